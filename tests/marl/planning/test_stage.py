"""Stage games by sampling, against known values, exact solutions and the solver of whole payoffs."""

import numpy as np
import pytest

from marl.common.errors import UserError
from marl.planning.pikl import Floats, Ints, Settings, solve
from marl.planning.stage import Stage, Utilities, solve_stage

W = np.array([[0.0, -1, 2], [1, 0, -1], [-2, 1, 0]])
RPS = np.array([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])
TAU = np.array([0.5, 0.3, 0.2])
GAMES = 64  # copies of a game: their mean is nearer to the answer than one


def drawn_from(*payoffs: Floats) -> Utilities:
    """Utilities in copies of one game, from payoffs (A_1, ..., A_n) for each player."""

    def utilities(drawn: Ints) -> Floats:
        rows = []
        for actions in drawn:
            index = [tuple(np.arange(payoffs[0].shape[i]) if j == i else a for j, a in enumerate(actions)) for i in
                     range(len(payoffs))]  # fmt: skip
            rows.append([payoff[own] for payoff, own in zip(payoffs, index, strict=True)])
        return np.array(rows)

    return utilities


def zero_sum(matrix: Floats) -> Utilities:
    """The same for two players of one matrix, without a loop."""
    return lambda drawn: np.stack([matrix[:, drawn[:, 1]].T, -matrix[drawn[:, 0]]], axis=1)


def solved(
    utilities: Utilities, tau: Floats, settings: Settings, kappa: str, solver: str = "pikl", games: int = GAMES,
    players: int = 2,
) -> Stage:  # fmt: skip
    anchors = np.broadcast_to(tau, (games, players, len(tau)))
    return solve_stage(utilities, anchors, anchors >= 0, settings, np.random.default_rng(0), solver, kappa)


@pytest.mark.parametrize(
    ("matrix", "tau", "strength", "expected"),
    [
        (RPS, TAU, 1.0, (0.42182, 0.38259, 0.19560)),
        (RPS, TAU, 0.1, (0.32476, 0.36261, 0.31263)),
        (W, np.full(3, 1 / 3), 0.1, (0.26874, 0.49661, 0.23465)),
        (W, TAU, 1.0, (0.44229, 0.42608, 0.13163)),
    ],
)
def test_pikl_reaches_the_known_fixed_points(
    matrix: Floats, tau: Floats, strength: float, expected: tuple[float, ...]
) -> None:
    stage = solved(zero_sum(matrix), tau, Settings(iterations=1500, lambdas=(strength,)), "sqrt")
    assert stage.population.mean(0) == pytest.approx(np.array([expected] * 2), abs=0.012)


@pytest.mark.parametrize(("solver", "kappa"), [("regret", "sqrt"), ("pikl", "sqrt"), ("pikl", "published")])
def test_regret_matching_and_hedge_find_the_equilibrium(solver: str, kappa: str) -> None:
    for matrix, expected in ((W, (0.25, 0.5, 0.25)), (RPS, (1 / 3,) * 3)):
        settings = Settings(iterations=2000, lambdas=(0.0,), averaging="uniform")
        stage = solved(zero_sum(matrix), TAU, settings, kappa, solver)
        assert stage.population.mean(0) == pytest.approx(np.array([expected] * 2), abs=0.03)
        assert stage.utilities.mean(0) == pytest.approx([0, 0], abs=0.02)  # of both games


def test_two_types_and_an_agent_that_nobody_believes_in() -> None:
    """DiL on W has the types .1 and 1. A greedy agent beside them changes nothing for anybody."""
    expected = np.array([[0.10346, 0.72633, 0.17022], [0.44882, 0.34438, 0.20680]])
    plain = Settings(iterations=1500, lambdas=(0.1, 1.0))
    stage = solved(zero_sum(W), TAU, plain, "sqrt")
    assert stage.policies.mean(0) == pytest.approx(np.stack([expected, expected]), abs=0.035)
    assert stage.population.mean(0) == pytest.approx(np.array([(0.27614, 0.53536, 0.18851)] * 2), abs=0.02)
    with_agent = Settings(iterations=1500, lambdas=(0.1, 1.0, 0.0), beta=(0.5, 0.5, 0.0))
    beside = solved(zero_sum(W), TAU, with_agent, "sqrt")
    assert (beside.population == stage.population).all() and (beside.utilities == stage.utilities).all()
    best = W @ (0.27614, 0.53536, 0.18851)
    assert beside.policies[:, 0, 2].mean(0).argmax() == best.argmax()
    assert beside.policies[:, 0, 2].mean(0) @ best > expected[0] @ best


@pytest.mark.parametrize(("strength", "expected"), [(1.0, 0.40461), (0.1, 0.99982)])
def test_one_player(strength: float, expected: float) -> None:
    settings = Settings(iterations=4000, lambdas=(strength,), iterate="last")
    stage = solved(lambda drawn: np.array([[[1.0, 0.0]]]), np.array([0.2, 0.8]), settings, "zero", games=1, players=1)
    assert stage.population[0, 0, 0] == pytest.approx(expected, abs=5.5e-6)


@pytest.mark.parametrize(("strength", "expected"), [(0.5, 0.92827), (1.0, 0.81380), (10.0, 0.70869)])
def test_coordination_follows_the_anchor(strength: float, expected: float) -> None:
    settings = Settings(iterations=1500, lambdas=(strength,), iterate="last")
    same = lambda drawn: np.stack([np.eye(2)[drawn[:, 1]], np.eye(2)[drawn[:, 0]]], axis=1)  # noqa: E731
    stage = solved(same, np.array([0.7, 0.3]), settings, "zero")
    assert stage.population[..., 0].mean(0) == pytest.approx([expected] * 2, abs=0.01)


def test_an_infinite_lambda_plays_the_anchor_and_its_agent_responds_to_it() -> None:
    settings = Settings(iterations=800, lambdas=(np.inf, 0.0), beta=(1, 0), iterate="last")
    stage = solved(zero_sum(W), TAU, settings, "zero")
    assert stage.population == pytest.approx(np.broadcast_to(TAU, stage.population.shape), abs=1e-9)
    assert stage.values[:, 0].mean(0) == pytest.approx(W @ TAU, abs=0.02)
    assert (stage.policies[:, 0, 1].argmax(-1) == (W @ TAU).argmax()).all()


def test_three_players_as_the_solver_of_whole_payoffs() -> None:
    rng = np.random.default_rng(5)
    payoffs = [rng.random((2, 3, 2)) for _ in range(3)]
    legal = np.array([[1, 1, 0], [1, 1, 1], [1, 1, 0]], bool)
    taus = np.array([[0.3, 0.7, 0], [0.2, 0.3, 0.5], [0.6, 0.4, 0]])
    settings = Settings(iterations=600, lambdas=(0.3,))
    whole = solve(payoffs, [tau[:count] for tau, count in zip(taus, (2, 3, 2), strict=True)], settings)

    def utilities(drawn: Ints) -> Floats:
        found = np.full((len(drawn), 3, 3), 7.0)  # an action that isn't there may have any number
        plain = drawn_from(*(np.pad(p, ((0, 1), (0, 0), (0, 1))) for p in payoffs))(drawn)
        return np.where(legal, plain, found)

    games = np.broadcast_to(taus, (24, 3, 3))
    stage = solve_stage(
        utilities, games, np.broadcast_to(legal, games.shape), settings, np.random.default_rng(1), kappa="zero"
    )
    for i, count in enumerate((2, 3, 2)):
        assert stage.population[:, i, :count].mean(0) == pytest.approx(whole.population[i], abs=0.03)
    assert (stage.population[:, ~legal] == 0).all() and (stage.values[:, ~legal] == -np.inf).all()


def test_who_has_no_action_plays_no_part() -> None:
    anchors = np.broadcast_to(np.stack([TAU, TAU, 0 * TAU]), (4, 3, 3))
    legal = np.broadcast_to(np.array([[True], [True], [False]]), (4, 3, 3))
    both = lambda drawn: np.concatenate([zero_sum(W)(drawn[:, :2]), np.zeros((4, 1, 3))], axis=1)  # noqa: E731
    stage = solve_stage(both, anchors, legal, Settings(iterations=50, lambdas=(0.1,)), np.random.default_rng(0))
    assert np.isfinite(stage.population).all() and (stage.values[:, 2] == -np.inf).all()
    assert (stage.utilities[:, 2] == 0).all()


def test_bad_input_is_named() -> None:
    with pytest.raises(UserError, match="anchor: must be probabilities"):
        solved(zero_sum(W), 2 * TAU, Settings(iterations=2), "zero")
    with pytest.raises(UserError, match="utilities must be finite"):
        solved(lambda drawn: np.full((GAMES, 2, 3), np.nan), TAU, Settings(iterations=2), "zero")

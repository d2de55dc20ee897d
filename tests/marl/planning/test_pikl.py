"""The piKL family against known values, a naive loop over joint actions, limits, and properties."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike
from scipy.optimize import root

from envs.dond.rules import Context, Triple, allocations, claim_points, complementary
from marl.planning.pikl import (
    Floats,
    Settings,
    expected_values,
    respond,
    solve,
    solve_coshar,
)

# Half a unit of the fifth decimal, and half of the sixth, to which the known values had been rounded before.
PRINTED = 5.5e-6


# --- Measures ---


def deviation_gains(
    payoffs: Sequence[ArrayLike], policies: Sequence[Floats], legal: Sequence[ArrayLike] | None = None
) -> Floats:
    """Gain of each player from playing a best action instead, (*batch, n)."""
    gains = []
    for i, q in enumerate(expected_values(payoffs, policies)):
        best = np.where(True if legal is None else legal[i], q, -np.inf).max(-1)
        gains.append(best - (q * policies[i]).sum(-1))
    return np.stack(gains, axis=-1)


def exploitability(
    payoffs: Sequence[ArrayLike], policies: Sequence[Floats], legal: Sequence[ArrayLike] | None = None
) -> Floats:
    """The sum over players of `deviation_gains`, (*batch): 0 at a Nash equilibrium, and nowhere else."""
    return deviation_gains(payoffs, policies, legal).sum(-1)


def kl(policy: ArrayLike, anchor: ArrayLike, floor: float = 1e-50) -> Floats:
    """KL(policy || anchor) in nats over the last axis, with the anchor raised to `floor`."""
    p = np.asarray(policy, dtype=np.float64)
    return (p * np.log(np.where(p > 0, p, 1.0) / np.maximum(anchor, floor))).sum(-1)


W = np.array([[0.0, -1, 2], [1, 0, -1], [-2, 1, 0]])
RPS = np.array([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])
UNIFORM = np.full(3, 1 / 3)
TAU = np.array([0.5, 0.3, 0.2])


def zero_sum(matrix: Floats) -> list[Floats]:
    return [matrix, -matrix]


def fixed_point(matrix: Floats, tau: Floats, lambdas: Sequence[float], guess: Floats | None = None) -> Floats:
    """Policies (player, type, action) that respond to themselves with kappa 0, beta uniform, by Newton's method."""
    shape = (2, len(lambdas), 3)

    def miss(flat: Floats) -> Floats:
        policies = flat.reshape(shape)
        values = expected_values(zero_sum(matrix), policies.mean(1))
        return np.concatenate([respond(q, np.log(tau), lambdas).ravel() for q in values]) - flat

    start = np.broadcast_to(tau, shape) if guess is None else guess
    found = root(miss, start.ravel(), tol=1e-12)
    assert found.success and np.abs(miss(found.x)).max() < 1e-12
    return found.x.reshape(shape)


# Known fixed points: (game, anchor, lambda, policy of both players). For the small lambdas Newton's method starts from
# the equilibrium, as it is lost elsewhere.
FIXED_POINTS = [
    (RPS, TAU, 0.1, (0.32476, 0.36261, 0.31263)),
    (RPS, TAU, 1.0, (0.42182, 0.38259, 0.19560)),
    (RPS, TAU, 10.0, (0.49449, 0.30914, 0.19637)),
    (W, UNIFORM, 0.1, (0.26874, 0.49661, 0.23465)),
    (W, UNIFORM, 0.5, (0.33966, 0.44375, 0.21659)),
    (W, UNIFORM, 1.0, (0.37208, 0.38913, 0.23880)),
    (W, UNIFORM, 10.0, (0.34394, 0.33419, 0.32187)),
    (W, TAU, 0.1, (0.26129, 0.51862, 0.22009)),
    (W, TAU, 1.0, (0.44229, 0.42608, 0.13163)),
]


def equilibrium(matrix: Floats) -> Floats:
    policy = UNIFORM if np.array_equal(matrix, RPS) else np.array([0.25, 0.5, 0.25])
    return np.broadcast_to(policy, (2, 1, 3))


# --- Known values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strength", "iterations"), [(0.1, 20_000), (0.5, 5000), (1.0, 2000), (10.0, 1000)])
def test_solve_reaches_the_known_fixed_points(strength: float, iterations: int) -> None:
    """All games with this lambda at once."""
    cases = [case for case in FIXED_POINTS if case[2] == strength]
    matrices, taus, expected = (np.stack([case[k] for case in cases]) for k in (0, 1, 3))
    plan = solve(zero_sum(matrices), [taus, taus], Settings(iterations=iterations, lambdas=(strength,)))
    for policy in plan.policies:
        assert policy[:, 0] == pytest.approx(expected, abs=PRINTED)
        assert np.abs(policy[:, 0] - taus).max() > 5 * PRINTED  # the anchor itself would not pass
    for matrix, tau, policy in zip(matrices, taus, expected, strict=True):  # and the digits by Newton's method
        found = fixed_point(matrix, tau, (strength,), equilibrium(matrix) if strength < 0.3 else None)[:, 0]
        assert found == pytest.approx(np.stack([policy, policy]), abs=PRINTED)
    if strength == 0.1:
        uniform = [pi[[case[0] is W and case[1] is UNIFORM for case in cases]][0] for pi in plan.population]
        assert exploitability(zero_sum(W), uniform) == pytest.approx(0.06819, abs=PRINTED)


def test_known_values_of_two_types() -> None:
    expected = np.array([[0.10346, 0.72633, 0.17022], [0.44882, 0.34438, 0.20680]])
    population = (0.27614, 0.53536, 0.18851)
    exact = fixed_point(W, TAU, (0.1, 1.0))
    plan = solve(zero_sum(W), [TAU, TAU], Settings(iterations=8000, lambdas=(0.1, 1.0)))
    for i in range(2):
        assert exact[i] == pytest.approx(expected, abs=PRINTED)
        assert exact[i].mean(0) == pytest.approx(population, abs=PRINTED)
        assert plan.policies[i] == pytest.approx(expected, abs=2 * PRINTED)
        assert plan.population[i] == pytest.approx(population, abs=2 * PRINTED)


@pytest.mark.parametrize(("strength", "expected"), [(0.1, 0.99998), (0.5, 0.92827), (1.0, 0.81380), (10.0, 0.70869)])
def test_known_values_of_coordination(strength: float, expected: float) -> None:
    tau = np.array([0.7, 0.3])
    settings = Settings(iterations=3000, lambdas=(strength,), iterate="last")
    for policy in solve([np.eye(2), np.eye(2)], [tau, tau], settings).policies:
        assert policy[0, 0] == pytest.approx(expected, abs=PRINTED)


def test_known_values_of_coshar() -> None:
    payoffs = [np.array([[0.0, 0.0], [0.1, 0.1]]), np.zeros((2, 2))]  # Q_1 = (0, 0.1) and Q_2 = 0 whoever does what
    settings = Settings(iterations=1, lambdas=(0.1,), iterate="last")
    correlated = solve_coshar(payoffs, [[0.4, 0.1], [0.1, 0.4]], settings)
    assert correlated == pytest.approx(np.array([[0.21515, 0.05379], [0.14621, 0.58485]]), abs=PRINTED)
    product = solve_coshar(payoffs, np.full((2, 2), 0.25), settings)
    assert product == pytest.approx(np.array([[0.13447, 0.13447], [0.36553, 0.36553]]), abs=PRINTED)


CONTEXT = Context((1, 1, 3), ((0, 1, 3), (1, 3, 2)))
CLAIMS = allocations(CONTEXT.counts)
DEAL = np.array([[complementary((a, b), CONTEXT.counts) for b in CLAIMS] for a in CLAIMS])
POINTS = [np.array([[float(claim_points(CONTEXT, (a, b))[i]) for b in CLAIMS] for a in CLAIMS]) for i in range(2)]


def proposal_anchor(first: Triple, second: Triple) -> Floats:
    """0.6 and 0.2 on two claims, the rest shared evenly."""
    return np.array([{first: 0.6, second: 0.2}.get(claim, 0.2 / (len(CLAIMS) - 2)) for claim in CLAIMS])


PROPOSALS = [proposal_anchor((0, 0, 3), (0, 1, 3)), proposal_anchor((1, 1, 0), (1, 1, 1))]


@pytest.mark.parametrize(
    ("strength", "iterations", "expected"),
    [
        (math.inf, 20, (0.6, 0.6, 0.36837, 3.297, 1.474)),
        # The printed digits are those of the 20,000th iterate; the limit is up to 3e-5 away.
        pytest.param(3.0, 20_000, (0.94829, 0.84102, 0.79798, 7.181, 3.192), marks=pytest.mark.slow),
        (1.0, 5000, (0.99991, 0.98793, 0.98784, 8.891, 3.951)),
        (0.0, 300, (1.0, 1.0, 1.0, 9.0, 4.0)),
    ],
)
def test_known_proposals_in_deal_or_no_deal(strength: float, iterations: int, expected: tuple[float, ...]) -> None:
    settings = Settings(iterations=iterations, lambdas=(strength,), averaging="uniform", iterate="last")
    one, two = (policy[0] for policy in solve(POINTS, PROPOSALS, settings).policies)
    found = (one[CLAIMS.index((0, 0, 3))], two[CLAIMS.index((1, 1, 0))], one @ DEAL @ two)
    assert found == pytest.approx(expected[:3], abs=PRINTED)
    assert [one @ points @ two for points in POINTS] == pytest.approx(expected[3:], abs=5.01e-4)


# --- Against a naive loop ---------------------------------------------------------------------------------------------


def naive(payoffs: Sequence[Floats], taus: Sequence[Floats], how: Settings) -> Any:
    """DiL-piKL by loops over joint actions, every mean taken from the whole history: mean and last policies."""
    n, counts, beta = len(payoffs), payoffs[0].shape, how.type_probs(len(payoffs))
    types = range(len(how.lambdas))
    weights: list[float] = []
    policies: list[list[list[list[float]]]] = []  # [t][player][type][action]
    values: list[list[list[float]]] = []  # [t][player][action]

    def mean(numbers: Sequence[float]) -> float:
        return sum(w * x for w, x in zip(weights, numbers, strict=True)) / sum(weights)

    def response(i: int, k: int, t: int) -> list[float]:
        if t == 1:
            return list(taus[i])
        q = [mean([past[i][a] for past in values]) for a in range(counts[i])]
        odds = [taus[i][a] * math.exp(q[a] / how.lambdas[k]) for a in range(counts[i])]
        return [x / sum(odds) for x in odds]

    for t in range(1, how.iterations + 1):
        now = [[response(i, k, t) for k in types] for i in range(n)]
        q_now = []
        for i in range(n):
            cases: list[tuple[float, list[float]]] = []  # what the others do: probability, utility of each own action
            others = [range(1) if j == i else range(counts[j]) for j in range(n)]
            for joint in itertools.product(*others):
                probability = 1.0
                for j in range(n):
                    if j != i:
                        probability *= sum(beta[j][k] * now[j][k][joint[j]] for k in types)
                at = [tuple(a if j == i else joint[j] for j in range(n)) for a in range(counts[i])]
                cases.append((probability, [float(payoffs[i][index]) for index in at]))
            q_now.append([sum(p * u[a] for p, u in cases) for a in range(counts[i])])
        policies.append(now)
        values.append(q_now)
        weights.append(t if how.averaging == "linear" else 1)
    average = [
        [[mean([past[i][k][a] for past in policies]) for a in range(counts[i])] for k in types] for i in range(n)
    ]
    last = [[response(i, k, how.iterations + 1) for k in types] for i in range(n)]
    return average, last


def random_game(seed: int, counts: tuple[int, ...], batch: tuple[int, ...] = ()) -> tuple[list[Floats], list[Floats]]:
    """Draws payoffs in [-1, 1] and anchors of at least about 0.02."""
    rng = np.random.default_rng(seed)
    payoffs = [rng.uniform(-1, 1, (*batch, *counts)) for _ in counts]
    taus = [0.9 * rng.dirichlet(np.ones(count), batch) + 0.1 / count for count in counts]
    return payoffs, taus


@pytest.mark.parametrize(
    ("counts", "averaging"),
    [((2, 3, 2), "linear"), ((2, 3, 2), "uniform"), ((4,), "uniform"), ((2, 1, 2, 3, 1, 2, 2), "linear")],
)
def test_solve_equals_naive_loop(counts: tuple[int, ...], averaging: str) -> None:
    payoffs, taus = random_game(3, counts)
    beta = ((0.5, 0.5), (0.9, 0.1), (0.2, 0.8)) if len(counts) == 3 else None
    how = Settings(iterations=4, lambdas=(0.3, 2.0), beta=beta, averaging=averaging)
    for iterate, expected in zip(("average", "last"), naive(payoffs, taus, how), strict=True):
        found = solve(payoffs, taus, replace(how, iterate=iterate)).policies
        for i in range(len(counts)):
            assert found[i] == pytest.approx(np.array(expected[i]), abs=1e-12)


def test_a_batch_equals_its_games_one_at_a_time() -> None:
    payoffs, taus = random_game(7, (3, 2, 4), (2, 3))
    how = Settings(iterations=40, lambdas=(0.05, 0.5))
    plan = solve(payoffs, taus, how)
    measured = exploitability(payoffs, plan.population)
    for at in np.ndindex(2, 3):
        alone = solve([u[at] for u in payoffs], [tau[at] for tau in taus], how)
        for i in range(3):
            assert plan.policies[i][at] == pytest.approx(alone.policies[i], abs=1e-10)
        assert measured[at] == pytest.approx(exploitability([u[at] for u in payoffs], alone.population), abs=1e-10)


def test_padded_actions_change_nothing_and_are_never_played() -> None:
    payoffs, taus = random_game(9, (2, 3))
    padded = [np.full((4, 4), 9.0), np.full((4, 4), 9.0)]  # better than everything that is legal
    legal = [np.arange(4) < 2, np.arange(4) < 3]
    for i in range(2):
        padded[i][:2, :3] = payoffs[i]
    anchors = [np.pad(tau, (0, 4 - len(tau))) for tau in taus]
    for strength in (0.0, 0.4, math.inf):
        how = Settings(iterations=30, lambdas=(strength,))
        small, large = solve(payoffs, taus, how), solve(padded, anchors, how, legal)
        for i in range(2):
            assert large.policies[i][:, : len(taus[i])] == pytest.approx(small.policies[i], abs=1e-12)
            assert (large.policies[i][:, len(taus[i]) :] == 0).all()
        gains = deviation_gains(padded, large.population, legal)
        assert gains == pytest.approx(deviation_gains(payoffs, small.population), abs=1e-12)
    uniform = solve(padded, None, Settings(iterations=1, lambdas=(math.inf,)), legal)
    assert uniform.policies[1] == pytest.approx(np.array([[1 / 3, 1 / 3, 1 / 3, 0]]))

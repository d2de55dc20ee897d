"""The piKL family against known values, a naive loop over joint actions, limits, and properties."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike
from scipy.optimize import root

from marl.common.errors import UserError
from marl.planning.pikl import (
    Floats,
    Ints,
    Plan,
    Settings,
    best_response,
    expected_values,
    importance_weights,
    respond,
    sample,
    solve,
    solve_coshar,
    weighted_values,
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


def regret(plan: Plan) -> tuple[Floats, ...]:
    """For each player and type, (*batch, K): the mean utility of the best fixed action less the type's own.

    Both means are those of the run, weighted as `averaging` says, and leave out the KL term.
    """
    return tuple(q.max(-1)[..., None] - own for q, own in zip(plan.values, plan.utilities, strict=True))


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
    (RPS, TAU, 0.01, (0.33203, 0.33638, 0.33159)),
    (RPS, TAU, 0.1, (0.32476, 0.36261, 0.31263)),
    (RPS, TAU, 1.0, (0.42182, 0.38259, 0.19560)),
    (RPS, TAU, 10.0, (0.49449, 0.30914, 0.19637)),
    (W, UNIFORM, 0.01, (0.25175, 0.49997, 0.24829)),
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


@pytest.mark.parametrize(
    ("strength", "iterations", "near"),
    [(0.01, 5000, 3e-3), (0.1, 20_000, PRINTED), (0.5, 5000, PRINTED), (1.0, 2000, PRINTED), (10.0, 1000, PRINTED)],
)
def test_solve_reaches_the_known_fixed_points(strength: float, iterations: int, near: float) -> None:
    """All games with this lambda at once. The smallest needs the smaller steps of kappa = 1 / sqrt(t)."""
    cases = [case for case in FIXED_POINTS if case[2] == strength]
    matrices, taus, expected = (np.stack([case[k] for case in cases]) for k in (0, 1, 3))
    kappa = "sqrt" if strength < 0.1 else "zero"
    plan = solve(zero_sum(matrices), [taus, taus], Settings(iterations=iterations, lambdas=(strength,), kappa=kappa))
    for policy in plan.policies:
        assert policy[:, 0] == pytest.approx(expected, abs=near)
        assert np.abs(policy[:, 0] - taus).max() > 5 * near  # the anchor itself would not pass
    for matrix, tau, policy in zip(matrices, taus, expected, strict=True):  # and the digits by Newton's method
        found = fixed_point(matrix, tau, (strength,), equilibrium(matrix) if strength < 0.3 else None)[:, 0]
        assert found == pytest.approx(np.stack([policy, policy]), abs=PRINTED)
    if strength == 0.1:
        uniform = [pi[[case[0] is W and case[1] is UNIFORM for case in cases]][0] for pi in plan.population]
        assert exploitability(zero_sum(W), uniform) == pytest.approx(0.06819, abs=PRINTED)


# --- Against a naive loop ---------------------------------------------------------------------------------------------


def naive(payoffs: Sequence[Floats], taus: Sequence[Floats], how: Settings, draws: Sequence[Ints] | None = None) -> Any:
    """DiL-piKL by loops over joint actions, every mean taken from the whole history: policies, Q, types' utilities."""
    n, counts, beta = len(payoffs), payoffs[0].shape, how.type_probs(len(payoffs))
    types = range(len(how.lambdas))
    weights: list[float] = []
    policies: list[list[list[list[float]]]] = []  # [t][player][type][action]
    values: list[list[list[float]]] = []  # [t][player][action]
    outcomes: list[list[list[list[tuple[float, float]]]]] = []  # [t][player][type], (probability, utility) of each case

    def mean(numbers: Sequence[float]) -> float:
        return sum(w * x for w, x in zip(weights, numbers, strict=True)) / sum(weights)

    def response(i: int, k: int, t: int) -> list[float]:
        if t == 1:
            return [1 / counts[i]] * counts[i] if how.first == "uniform" else list(taus[i])
        first = mean([sum(p * u for p, u in past[i][k]) for past in outcomes])
        second = mean([sum(p * u * u for p, u in past[i][k]) for past in outcomes])
        spread = math.sqrt(max(0.0, second - first * first))
        kappa = {"published": 3 * spread / (10 * math.sqrt(t)), "sqrt": 1 / math.sqrt(t), "zero": 0.0}[how.kappa]
        strength = how.lambdas[k]
        q = [mean([past[i][a] for past in values]) for a in range(counts[i])]
        odds = [math.exp((q[a] + strength * math.log(taus[i][a])) / (kappa + strength)) for a in range(counts[i])]
        return [x / sum(odds) for x in odds]

    for t in range(1, how.iterations + 1):
        now = [[response(i, k, t) for k in types] for i in range(n)]
        q_now, outcomes_now = [], []
        for i in range(n):
            cases: list[tuple[float, list[float]]] = []  # what the others do: probability, utility of each own action
            others = [range(1) if j == i else range(counts[j]) for j in range(n)]
            for joint in itertools.product(*others) if draws is None else [tuple(draws[t - 1])]:
                probability = 1.0
                for j in range(n) if draws is None else ():
                    if j != i:
                        probability *= sum(beta[j][k] * now[j][k][joint[j]] for k in types)
                at = [tuple(a if j == i else joint[j] for j in range(n)) for a in range(counts[i])]
                cases.append((probability, [float(payoffs[i][index]) for index in at]))
            q_now.append([sum(p * u[a] for p, u in cases) for a in range(counts[i])])
            outcomes_now.append([[(p, float(np.dot(now[i][k], u))) for p, u in cases] for k in types])
        policies.append(now)
        values.append(q_now)
        outcomes.append(outcomes_now)
        weights.append(t if how.averaging == "linear" else 1)
    average = [
        [[mean([past[i][k][a] for past in policies]) for a in range(counts[i])] for k in types] for i in range(n)
    ]
    last = [[response(i, k, how.iterations + 1) for k in types] for i in range(n)]
    q = [[mean([past[i][a] for past in values]) for a in range(counts[i])] for i in range(n)]
    earned = [[mean([sum(p * u for p, u in past[i][k]) for past in outcomes]) for k in types] for i in range(n)]
    return average, last, q, earned


def random_game(seed: int, counts: tuple[int, ...], batch: tuple[int, ...] = ()) -> tuple[list[Floats], list[Floats]]:
    """Payoffs in [-1, 1] and anchors of which none is below 0.02 or so."""
    rng = np.random.default_rng(seed)
    payoffs = [rng.uniform(-1, 1, (*batch, *counts)) for _ in counts]
    taus = [0.9 * rng.dirichlet(np.ones(count), batch) + 0.1 / count for count in counts]
    return payoffs, taus


@pytest.mark.parametrize(
    ("counts", "kappa", "averaging", "first", "exact"),
    [
        ((2, 3, 2), "published", "linear", "uniform", True),
        ((2, 3, 2), "published", "uniform", "anchor", False),
        ((2, 3, 2), "sqrt", "uniform", "anchor", True),
        ((2, 3, 2), "zero", "linear", "uniform", False),
        ((4,), "published", "linear", "uniform", True),
        ((2, 1, 2, 3, 1, 2, 2), "published", "linear", "uniform", True),
    ],
)
def test_solve_equals_naive_loop(
    counts: tuple[int, ...], kappa: str, averaging: str, first: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    payoffs, taus = random_game(3, counts)
    beta = ((0.5, 0.5), (0.9, 0.1), (0.2, 0.8)) if len(counts) == 3 else None
    how = Settings(
        iterations=4, lambdas=(0.3, 2.0), beta=beta, kappa=kappa, averaging=averaging, first=first, exact=exact
    )
    seen: list[Ints] = []

    def watched(policies: Sequence[ArrayLike], draws: int, rng: np.random.Generator) -> Ints:
        seen.append(sample(policies, draws, rng)[..., 0, :])
        return seen[-1][..., None, :]

    monkeypatch.setattr("marl.planning.pikl.sample", watched)
    plan = solve(payoffs, taus, how)
    assert len(seen) == (0 if exact else how.iterations)
    average, last, q, earned = naive(payoffs, taus, how, None if exact else seen)
    for i in range(len(counts)):
        for found, expected in ((plan.average, average), (plan.last, last), (plan.values, q), (plan.utilities, earned)):
            assert found[i] == pytest.approx(np.array(expected[i]), abs=1e-12)


def test_a_batch_equals_its_games_one_at_a_time() -> None:
    payoffs, taus = random_game(7, (3, 2, 4), (2, 3))
    how = Settings(iterations=40, lambdas=(0.05, 0.5))
    plan = solve(payoffs, taus, how)
    measured = exploitability(payoffs, plan.population)
    for at in np.ndindex(2, 3):
        alone = solve([u[at] for u in payoffs], [tau[at] for tau in taus], how)
        for i in range(3):
            assert plan.average[i][at] == pytest.approx(alone.average[i], abs=1e-10)
            assert plan.last[i][at] == pytest.approx(alone.last[i], abs=1e-10)
        assert measured[at] == pytest.approx(exploitability([u[at] for u in payoffs], alone.population), abs=1e-10)


def test_padded_actions_change_nothing_and_are_never_played() -> None:
    payoffs, taus = random_game(9, (2, 3))
    padded = [np.full((4, 4), 9.0), np.full((4, 4), 9.0)]  # better than everything that is legal
    legal = [np.arange(4) < 2, np.arange(4) < 3]
    for i in range(2):
        padded[i][:2, :3] = payoffs[i]
    anchors = [np.pad(tau, (0, 4 - len(tau))) for tau in taus]
    for strength in (0.0, 0.4, math.inf):
        for exact in (True, False):
            how = Settings(iterations=30, lambdas=(strength,), exact=exact)
            small, large = solve(payoffs, taus, how), solve(padded, anchors, how, legal)
            for i in range(2):
                assert large.average[i][:, : len(taus[i])] == pytest.approx(small.average[i], abs=1e-12)
                assert (large.last[i][:, len(taus[i]) :] == 0).all()
                assert regret(large)[i] == pytest.approx(regret(small)[i], abs=1e-12)
            gains = deviation_gains(padded, large.population, legal)
            assert gains == pytest.approx(deviation_gains(payoffs, small.population), abs=1e-12)
    uniform = solve(padded, None, Settings(iterations=1, lambdas=(math.inf,), kappa="zero"), legal)
    assert uniform.last[1] == pytest.approx(np.array([[1 / 3, 1 / 3, 1 / 3, 0]]))


# --- Sampling ---------------------------------------------------------------------------------------------------------


def test_sampled_updates_approach_the_exact_result() -> None:
    # 60 independent runs of one game: their error falls about as 1 / sqrt(iterations), 4 times from 100 to 1,600.
    expected = fixed_point(W, TAU, (0.3, 1.0))
    copies = [np.broadcast_to(u, (60, 3, 3)) for u in zero_sum(W)]
    errors = []
    for iterations in (100, 1600):
        how = Settings(iterations=iterations, lambdas=(0.3, 1.0), kappa="zero", exact=False, seed=1)
        plan = solve(copies, [TAU, TAU], how)
        errors.append([np.abs(p - e).mean() for p, e in zip(plan.average, expected, strict=True)])
        assert plan.average[0].std(0).min() > 1e-4  # every run draws for itself
    assert max(errors[1]) < 0.016
    assert 2.5 < np.mean(errors[0]) / np.mean(errors[1]) < 6


def test_sample_frequencies() -> None:
    policies = [np.array([[0.0, 0.7, 0.3], [1.0, 0.0, 0.0]]), np.array([[0.5, 0.5], [0.1, 0.9]])]
    actions = sample(policies, 20_000, np.random.default_rng(0))
    assert actions.shape == (2, 20_000, 2)
    for game in range(2):
        joint = np.zeros((3, 2))
        np.add.at(joint, tuple(actions[game].T), 1 / 20_000)
        expected = np.outer(policies[0][game], policies[1][game])
        assert joint == pytest.approx(expected, abs=0.015)  # four standard errors
        assert (joint[expected == 0] == 0).all()


def test_importance_weights_by_hand() -> None:
    # Ratios 1, 4, 100 (clipped to 10) and 0 (clipped to 0.02).
    joint = np.array([0.1, 0.4, 0.5, 0.0])
    marginal = np.array([0.1, 0.1, 0.005, 0.3])
    with np.errstate(divide="ignore"):
        weights = importance_weights(np.log(joint), np.log(marginal))
    assert weights == pytest.approx(np.array([1, 4, 10, 0.02]) / 15.02)


def test_weighted_opponents_stand_for_a_correlated_joint() -> None:
    # Opponents 1 and 2 nearly always do the same; drawn from their marginals, the weights bring that back.
    (payoff, *rest), _ = random_game(11, (4, 2, 3))
    joint = np.array([[0.45, 0.03, 0.02], [0.05, 0.3, 0.15]])
    marginals = [joint.sum(1), joint.sum(0)]
    drawn = sample(marginals, 20_000, np.random.default_rng(2))
    a, b = drawn.T
    weights = importance_weights(np.log(joint[a, b]), np.log(marginals[0][a] * marginals[1][b]))
    actions = np.column_stack([np.zeros_like(a), drawn])
    values = weighted_values([payoff, *rest], 0, actions, weights)
    expected = np.einsum("xab,ab->x", payoff, joint)
    assert values == pytest.approx(expected, abs=0.02)  # three standard errors
    independent = np.einsum("xab,a,b->x", payoff, *marginals)
    assert np.abs(expected - independent).max() > 0.1  # without weights it would miss by more


# --- Anchored best response and CoShar --------------------------------------------------------------------------------


def test_best_response_weighs_value_against_the_anchor() -> None:
    values, tau = np.array([1.0, 0.99, 0.5]), np.array([0.001, 0.9, 0.099])
    # 0.003 log(0.9 / 0.001) = 0.0204 exceeds the difference of 0.01, which 0.001 times the logarithm does not.
    assert best_response(values, tau) == 1
    assert best_response(values, tau, strength=0.001) == 0
    assert best_response(values, tau, strength=0.0) == 0
    assert best_response(np.array([-np.inf, 0.99, 0.5]), tau, strength=0.0) == 1
    assert best_response(np.zeros(2), np.array([0.5, 0.5])) == 0
    # An anchor of 0 counts as 1e-6: 0.003 log(1e-6) = -0.0414.
    batch = best_response(np.array([[0.0415, 0.0], [0.0414, 0.0]]), np.array([0.0, 1.0]))
    assert batch.tolist() == [0, 1]


@pytest.mark.parametrize(("iterate", "exact", "near"), [("average", True, 1e-4), ("last", False, 0.08)])
def test_coshar_settles_where_policy_and_values_agree(iterate: str, exact: bool, near: float) -> None:
    payoffs, _ = random_game(13, (2, 3, 2), (4,))
    rng = np.random.default_rng(0)
    anchor = rng.dirichlet(np.ones(12), 4).reshape(4, 2, 3, 2)
    how = Settings(iterations=2000, lambdas=(0.5,), iterate=iterate, exact=exact)
    policy, found = solve_coshar(payoffs, anchor, how)
    odds = anchor.copy()
    for i, payoff in enumerate(payoffs):
        others = policy.sum(1 + i, keepdims=True)  # what the others do, whatever player i does
        values = (payoff * others).sum(tuple(j for j in (1, 2, 3) if j != 1 + i), keepdims=True)
        assert found[i] == pytest.approx(values.reshape(4, -1), abs=near)
        odds *= np.exp(values / 0.5)
    assert policy == pytest.approx(odds / odds.sum((1, 2, 3), keepdims=True), abs=near)
    assert np.abs(policy - anchor).max() > 0.1


# --- Properties -------------------------------------------------------------------------------------------------------

games = st.integers(0, 10**6)  # seeds of `random_game`


@settings(max_examples=25)
@given(games, st.floats(0, 1e6), st.sampled_from(["published", "zero"]))
def test_zero_utility_returns_the_anchor(seed: int, strength: float, kappa: str) -> None:
    _, taus = random_game(seed, (3, 5))
    plan = solve([np.zeros((3, 5))] * 2, taus, Settings(iterations=3, lambdas=(strength,), kappa=kappa))
    for last, tau in zip(plan.last, taus, strict=True):
        assert last[0] == pytest.approx(tau, abs=1e-14)


@settings(max_examples=25)
@given(games, st.floats(-1000, 1000), st.sampled_from(["published", "sqrt", "zero"]), st.booleans())
def test_a_constant_added_to_utilities_changes_nothing(seed: int, constant: float, kappa: str, exact: bool) -> None:
    payoffs, taus = random_game(seed, (3, 2, 2))
    how = Settings(iterations=10, lambdas=(0.2, 1.0), kappa=kappa, exact=exact)
    plan, shifted = solve(payoffs, taus, how), solve([u + constant for u in payoffs], taus, how)
    for i in range(3):
        assert shifted.average[i] == pytest.approx(plan.average[i], abs=1e-8)
        assert shifted.values[i] == pytest.approx(plan.values[i] + constant, abs=1e-8)
        assert regret(shifted)[i] == pytest.approx(regret(plan)[i], abs=1e-8)


# --- Limits -----------------------------------------------------------------------------------------------------------


def test_lambda_0_plays_best_actions_in_proportion_to_the_anchor_and_infinity_the_anchor() -> None:
    assert respond(np.array([1.0, 2, 2]), np.log(TAU), (0.0,)) == pytest.approx(np.array([[0, 0.6, 0.4]]))
    assert respond(np.array([1.0, 2, 2]), np.log(TAU), (0.0,), 1e-3) == pytest.approx(np.array([[0, 0.5, 0.5]]))
    assert respond(np.array([1.0, 2, 2]), np.log(TAU), (math.inf,))[0] == pytest.approx(TAU, abs=1e-15)
    with np.errstate(divide="ignore"):  # an illegal action of a higher value does not hide equal ones
        logs = np.log([0.0, 0.6, 0.4])
    assert respond(np.array([9.0, 2, 2]), logs, (0.0,)) == pytest.approx(np.array([[0, 0.6, 0.4]]))


def test_anchors_of_zero_are_floored_and_those_of_float32_normalised() -> None:
    # lambda log(1e50) = 1.15 for the first type: an action better by 4 is worth it.
    lone = solve([[4.0, 0.0]], [[0.0, 1.0]], Settings(iterations=5, lambdas=(0.01, 1.0), kappa="zero", iterate="last"))
    assert lone.policies[0][:, 0] == pytest.approx([1.0, 1e-50 * math.exp(4)], rel=1e-9, abs=1e-60)
    plan = solve([np.eye(2)] * 2, [[0.5, 0.500004]] * 2, Settings(iterations=1, first="anchor"))
    assert plan.average[0].sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: solve([np.eye(2), [[0.0, math.inf], [0.0, 0.0]]]), "payoffs must be finite"),
        (lambda: solve([np.eye(2), np.eye(2) * 1e200]), "payoffs must be finite, and below"),
        (lambda: solve([np.eye(2)] * 2, [[0.5, 0.4], [0.5, 0.5]]), r"anchor=\[0.5, 0.4\]: must be probabilities"),
        (lambda: solve([np.eye(2)] * 2, [[0.5, 0.5], [math.nan, 0.5]]), "anchor="),
        (lambda: solve([np.eye(2)] * 2, [[0.5, 0.5]] * 2, legal=[[1, 1], [1, 0]]), "anchor=.* of legal actions"),
        (lambda: solve([np.eye(2)] * 2, settings=Settings(beta=(0.5, 0.5))), r"beta=\(0.5, 0.5\): give 1 prob"),
        (lambda: solve([np.eye(2)] * 2, settings=Settings(lambdas=(0, 1), beta=(1.5, -0.5))), "beta=.*give 2 prob"),
        (lambda: Settings(lambdas=(math.nan,)), r"lambdas=\(nan,\)"),
        (lambda: Settings(lambdas=()), r"lambdas=\(\): name at least one"),
        (lambda: Settings(iterations=0), "iterations=0: must be 1 or more"),
        (lambda: Settings(kappa="fast"), "kappa=fast: must be one of published, sqrt, zero"),
    ],
)
def test_bad_input_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()

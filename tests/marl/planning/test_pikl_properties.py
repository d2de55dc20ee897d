"""The piKL family: sampling, CoShar, the anchored best response, properties, and bad input."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl.common.errors import UserError
from marl.planning.pikl import (
    Settings,
    best_response,
    importance_weights,
    respond,
    sample,
    solve,
    solve_coshar,
)
from tests.marl.planning.test_pikl import TAU, deviation_gains, kl, random_game, zero_sum

# --- Sampling ---------------------------------------------------------------------------------------------------------


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
    (payoff, *_), _ = random_game(11, (4, 2, 3))
    joint = np.array([[0.45, 0.03, 0.02], [0.05, 0.3, 0.15]])
    marginals = [joint.sum(1), joint.sum(0)]
    a, b = sample(marginals, 20_000, np.random.default_rng(2)).T
    weights = importance_weights(np.log(joint[a, b]), np.log(marginals[0][a] * marginals[1][b]))
    expected = np.einsum("xab,ab->x", payoff, joint)
    assert payoff[:, a, b] @ weights == pytest.approx(expected, abs=0.02)  # three standard errors
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


def test_coshar_settles_where_policy_and_values_agree() -> None:
    payoffs, _ = random_game(13, (2, 3, 2), (4,))
    rng = np.random.default_rng(0)
    anchor = rng.dirichlet(np.ones(12), 4).reshape(4, 2, 3, 2)
    how = Settings(iterations=2000, lambdas=(0.5,))
    policy = solve_coshar(payoffs, anchor, how)
    odds = anchor.copy()
    for i, payoff in enumerate(payoffs):
        others = policy.sum(1 + i, keepdims=True)  # what the others do, whatever player i does
        values = (payoff * others).sum(tuple(j for j in (1, 2, 3) if j != 1 + i), keepdims=True)
        odds *= np.exp(values / 0.5)
    assert policy == pytest.approx(odds / odds.sum((1, 2, 3), keepdims=True), abs=1e-4)
    assert np.abs(policy - anchor).max() > 0.1


# --- Properties -------------------------------------------------------------------------------------------------------

games = st.integers(0, 10**6)  # seeds of `random_game`


@settings(max_examples=4)
@given(games, st.floats(0.4, 2), st.floats(1.5, 4))
def test_equilibria_of_zero_sum_games_leave_the_anchor_as_lambda_falls(seed: int, low: float, factor: float) -> None:
    payoffs, taus = random_game(seed, (3, 3), (20,))
    far, near = (
        solve(zero_sum(payoffs[0]), taus, Settings(iterations=300, lambdas=(x,))).population
        for x in (low, low * factor)
    )
    distance = [sum(kl(pi, tau) for pi, tau in zip(plan, taus, strict=True)) for plan in (near, far)]
    assert np.all(distance[0] < distance[1] + 1e-4)


@settings(max_examples=4)
@given(games, st.floats(0.3, 2))
def test_deviating_from_a_fixed_point_gains_little(seed: int, strength: float) -> None:
    payoffs, taus = random_game(seed, (3, 4), (20,))
    found = solve(zero_sum(payoffs[0]), taus, Settings(iterations=400, lambdas=(strength,))).population
    gains = deviation_gains(zero_sum(payoffs[0]), found)
    for i in range(2):
        # What is left of u - lambda KL to gain by a deviation to one action, of KL log(1 / tau) at most.
        bound = strength * (np.log(1 / taus[i].min(-1)) - kl(found[i], taus[i]))
        assert (gains[:, i] <= bound + 1e-3).all()


@settings(max_examples=25)
@given(games, st.floats(0, 1e6))
def test_zero_utility_returns_the_anchor(seed: int, strength: float) -> None:
    _, taus = random_game(seed, (3, 5))
    plan = solve([np.zeros((3, 5))] * 2, taus, Settings(iterations=3, lambdas=(strength,), iterate="last"))
    for last, tau in zip(plan.policies, taus, strict=True):
        assert last[0] == pytest.approx(tau, abs=1e-14)


@settings(max_examples=25)
@given(games, st.floats(-1000, 1000))
def test_a_constant_added_to_utilities_changes_nothing(seed: int, constant: float) -> None:
    payoffs, taus = random_game(seed, (3, 2, 2))
    how = Settings(iterations=10, lambdas=(0.2, 1.0))
    plan, shifted = solve(payoffs, taus, how), solve([u + constant for u in payoffs], taus, how)
    for i in range(3):
        assert shifted.policies[i] == pytest.approx(plan.policies[i], abs=1e-8)


# --- Limits -----------------------------------------------------------------------------------------------------------


def test_lambda_0_plays_best_actions_by_the_anchor_and_infinity_plays_the_anchor() -> None:
    assert respond(np.array([1.0, 2, 2]), np.log(TAU), (0.0,)) == pytest.approx(np.array([[0, 0.6, 0.4]]))
    assert respond(np.array([1.0, 2, 2]), np.log(TAU), (0.0,), 1e-3) == pytest.approx(np.array([[0, 0.5, 0.5]]))
    assert respond(np.array([1.0, 2, 2]), np.log(TAU), (math.inf,))[0] == pytest.approx(TAU, abs=1e-15)
    with np.errstate(divide="ignore"):  # an illegal action of a higher value does not hide equal ones
        logs = np.log([0.0, 0.6, 0.4])
    assert respond(np.array([9.0, 2, 2]), logs, (0.0,)) == pytest.approx(np.array([[0, 0.6, 0.4]]))


def test_anchors_of_zero_are_floored_and_those_of_float32_normalised() -> None:
    # lambda log(1e50) = 1.15 for the first type: an action better by 4 is worth it.
    lone = solve([[4.0, 0.0]], [[0.0, 1.0]], Settings(iterations=5, lambdas=(0.01, 1.0), iterate="last"))
    assert lone.policies[0][:, 0] == pytest.approx([1.0, 1e-50 * math.exp(4)], rel=1e-9, abs=1e-60)
    plan = solve([np.eye(2)] * 2, [[0.5, 0.500004]] * 2, Settings(iterations=1))
    assert plan.policies[0].sum() == pytest.approx(1, abs=1e-12)


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
        (lambda: Settings(iterations=0), "iterations=0: must be at least 1"),
        (lambda: Settings(iterate="first"), "iterate=first: must be one of average, last"),
    ],
)
def test_bad_input_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()

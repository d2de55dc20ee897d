"""Plans of both claims: the partner's intent, drawn opponents, CoShar piKL, and the two lambdas apart."""

from __future__ import annotations

import numpy as np
import pytest

from envs.dond.rules import allocations, partner_values, points, rest
from marl.common.errors import UserError
from marl.planning.intents import (
    IntentConfig,
    coshar_values,
    joint_anchor,
    partner_claim,
    plan_intent,
    sampled_values,
)
from marl.planning.pikl import solve_coshar
from marl.planning.planner import PlannerConfig, agreeing, claim_gains, claim_values, partner_belief

COUNTS, OWN = (1, 1, 3), (0, 1, 3)
CLAIMS = allocations(COUNTS)
SIZE, TYPES = len(CLAIMS), len(partner_values(COUNTS, OWN))
RNG = np.random.default_rng


def anchor(**weights: float) -> np.ndarray:
    """An anchor with these weights on claims, as `b113=0.6`; all else shares the rest."""
    named = {CLAIMS.index(tuple(int(c) for c in name[1:])): w for name, w in weights.items()}  # type: ignore[arg-type]
    left = (1 - sum(named.values())) / (SIZE - len(named))
    return np.array([named.get(i, left) for i in range(SIZE)])


def belief() -> np.ndarray:
    return partner_belief(np.full((3, 11), 1.0), COUNTS, OWN)


def test_published_values_of_coshar() -> None:
    payoffs = [np.array([[0.0, 0.0], [0.1, 0.1]]), np.zeros((2, 2))]  # Q1 = (0, .1), Q2 = 0
    settings = IntentConfig(lambdas=(0.1,), opponents="coshar", iterations=4000).planner.settings
    joint = solve_coshar(payoffs, [[0.4, 0.1], [0.1, 0.4]], settings)
    assert joint == pytest.approx(np.array([[0.21515, 0.05379], [0.14621, 0.58485]]), abs=1e-3)


def test_a_joint_anchor_has_the_wanted_agreement_and_keeps_the_odds_within() -> None:
    tau = anchor(b003=0.6, b013=0.2)
    joint = joint_anchor(tau, 0.88)
    assert joint.sum() == pytest.approx(1) and np.trace(joint) == pytest.approx(0.88)
    a, b, c = (CLAIMS.index(claim) for claim in ((0, 0, 3), (0, 1, 3), (1, 1, 3)))
    assert joint[a, a] / joint[b, b] == pytest.approx(9) and joint[a, b] / joint[a, c] == pytest.approx(tau[b] / tau[c])


def test_a_large_lambda_of_coshar_expects_the_anchors_agreement() -> None:
    tau, gains = anchor(b003=0.6, b013=0.2), claim_gains(COUNTS, OWN, 0.0)
    config = IntentConfig(lambdas=(1e6,), opponents="coshar", iterations=3)
    joint = joint_anchor(tau, 0.88)
    values = coshar_values(*gains, belief(), joint, config)
    given = np.diag(joint) / joint.sum(1)
    assert values == pytest.approx(given * [points(claim, OWN) for claim in CLAIMS], rel=1e-4)


@pytest.mark.parametrize("objective", [0.0, 1.0])
def test_drawn_opponents_come_to_the_exact_values(objective: float) -> None:
    tau, how = anchor(b003=0.6, b013=0.2), PlannerConfig(lambdas=(3.0,), iterations=20)
    gains, theirs = claim_gains(COUNTS, OWN, objective)
    policies = agreeing(gains, theirs, tau, tau, how)
    exact = claim_values(COUNTS, OWN, objective, belief(), tau, how)
    assert belief() @ (policies * gains) == pytest.approx(exact)
    drawn = sampled_values(gains, belief(), policies, 20_000, RNG(0), low=1e-9, high=1e9)
    assert drawn == pytest.approx(exact, abs=0.15)


def test_the_partners_intent_is_best_for_me_among_what_is_plausible() -> None:
    tau = anchor(b003=0.6, b013=0.2, b113=0.01)
    expected = anchor(b003=0.5, b013=0.3, b113=0.1)
    index = partner_claim(CLAIMS, OWN, expected, tau, 0.1)
    assert CLAIMS[index] == (0, 1, 3)  # 1 1 3 leaves as many points, but the anchor hardly knows it
    assert CLAIMS[partner_claim(CLAIMS, OWN, expected, tau, 0.9)] == (0, 0, 3)  # the likeliest alone
    apart = anchor(b003=0.9)
    assert CLAIMS[partner_claim(CLAIMS, OWN, anchor(b100=0.9), apart, 0.5)] == (1, 0, 0)  # the population decides


@pytest.mark.parametrize("opponents", ["exact", "sampled", "coshar"])
def test_plans_are_claims_of_both(opponents: str) -> None:
    lambdas = (0.1,) if opponents == "coshar" else (0.1, 1.0)
    config = IntentConfig(lambdas=lambdas, opponents=opponents, draws=200)
    plan = plan_intent(COUNTS, OWN, 0.0, belief(), anchor(b003=0.6, b013=0.2), config, RNG(0))
    assert CLAIMS[plan.own] in ((0, 0, 3), (0, 1, 3)) and plan.values.shape == (SIZE,)
    assert points(rest(CLAIMS[plan.partner], COUNTS), OWN) >= 9


def test_the_own_lambda_is_apart_from_the_populations() -> None:
    """A strong lambda of its own makes the player play its anchor, and does not change what it expects of the
    population."""
    tau = anchor(b100=0.7, b003=0.05, b013=0.05)
    bold, shy = (
        plan_intent(COUNTS, OWN, 0.0, belief(), tau, IntentConfig(lambdas=(10.0,), strength=s), RNG(0))
        for s in (0.0, 1000.0)
    )
    assert CLAIMS[shy.own] == (1, 0, 0) and CLAIMS[bold.own] != (1, 0, 0)
    assert (bold.expected == shy.expected).all() and (bold.values == shy.values).all()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"opponents": "some"}, r"cicero\.plan\.opponents=some: must be one of exact, sampled, coshar"),
        ({"opponents": "coshar"}, r"cicero\.plan\.lambdas=.*one lambda"),
        ({"strength": -1.0}, r"cicero\.plan\.strength=-1"),
        ({"lambdas": (-1.0,)}, r"cicero\.plan\.lambdas="),
        ({"belief": "none"}, r"cicero\.plan\.belief=none: must be one of listening, prior"),
        ({"plausible": 2.0}, r"cicero\.plan\.plausible=2"),
    ],
)
def test_bad_settings(settings: dict, error: str) -> None:
    with pytest.raises(UserError, match=error):
        IntentConfig(**settings)

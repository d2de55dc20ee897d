"""Plans both players' claims given the talk so far, in Deal or No Deal (FAIR 2022, Cicero): an intent for each message.

The partner's hidden values are treated as Cicero treats its several opponents: piKL is solved against each possible
partner by itself (pairwise), and their joint action, here a partner's values and its claim, is

- `exact`: the belief over values times each one's policy;
- `sampled`: drawn from the product of the two marginals, with importance weights P_joint / P_product (as published);
- `coshar`: correlated with one's own claim, by CoShar piKL under a joint anchor over both claims.

The own claim is the anchored best response (`pikl.best_response`): its strength, lambda_agent, is apart from the
lambdas of the partner's population. Actions are numbered as `allocations`; the partner's b-th claims what the b-th
leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from envs.dond.rules import Triple, allocations, rest
from marl.common.errors import UserError, check_choices, check_range
from marl.planning import pikl
from marl.planning.pikl import FLOOR, Floats
from marl.planning.planner import PlannerConfig, agreeing, claim_gains

OPPONENTS = ("exact", "sampled", "coshar")


@dataclass(frozen=True)
class IntentConfig:
    """Settings of planning intents. Raises UserError, naming the setting, for bad values. Lambdas are in points a nat.

    The published lambdas, .001 to .3 for the population and .003 for oneself, are for scores of at most 1; a game here
    is worth 10.
    """

    lambdas: tuple[float, ...] = (0.01, 0.031, 0.098, 0.31, 0.96, 3.0)  # lambda_pop, one for each type of partner
    beta: tuple[float, ...] | None = None  # probabilities of the types; None is uniform
    strength: float = 0.03  # lambda_agent, of the own anchored best response
    floor: float = 1e-6  # the least anchor probability that it counts
    iterations: int = 30
    opponents: str = "exact"  # or sampled, coshar
    draws: int = 1000  # of `sampled`
    agreement: float = 0.88  # probability of claims that fit, in the joint anchor of `coshar`: as people's do
    belief: str = "listening"  # the action model's answers to the belief questions; or prior: without any talk
    plausible: float = 0.1  # the partner is expected to claim only what has this share of its likeliest claim

    def __post_init__(self) -> None:
        check_choices(self, "cicero.plan", opponents=OPPONENTS)
        check_range(self, "cicero.plan", "[0, inf)", "strength")
        check_range(self, "cicero.plan", "(0, 1)", "floor", "agreement")
        check_range(self, "cicero.plan", "[1, inf)", "draws")
        check_range(self, "cicero.plan", "[0, 1]", "plausible")
        if self.opponents == "coshar" and len(self.lambdas) != 1:
            raise UserError(f"cicero.plan.lambdas={list(self.lambdas)}: CoShar piKL has one lambda; name one")
        try:
            self.planner  # noqa: B018  checks lambdas, beta, belief and iterations
        except UserError as error:
            raise UserError(f"cicero.plan.{str(error).removeprefix('planner.')}") from error

    @property
    def planner(self) -> PlannerConfig:
        """The planner of the population."""
        return PlannerConfig(self.lambdas, self.beta, self.iterations, belief=self.belief)


@dataclass(frozen=True)
class IntentPlan:
    """A plan of both claims, as indices into `allocations`: `own` the planner's, `partner` the partner's own claim."""

    own: int
    partner: int
    anchor: Floats  # (A,) the planner's claims if talk stopped now
    values: Floats  # (A,) what each is expected to score
    expected: Floats  # (A,) the population's: that the partner claims what each leaves


def plan_intent(
    counts: Triple, own: Triple, objective: float, belief: Floats, anchor: Floats, config: IntentConfig,
    rng: np.random.Generator,
) -> IntentPlan:  # fmt: skip
    """Plans one's claim and the partner's. `belief` (K,) over the partner's possible values; `anchor` (A,)."""
    gains, theirs = claim_gains(counts, own, objective)
    policies = agreeing(gains, theirs, anchor, anchor, config.planner)  # (K, A)
    if config.opponents == "exact":
        values = belief @ (policies * gains)
    elif config.opponents == "sampled":
        values = sampled_values(gains, belief, policies, config.draws, rng)
    else:
        values = coshar_values(gains, theirs, belief, joint_anchor(anchor, config.agreement), config)
    expected = belief @ policies
    chosen = int(pikl.best_response(values, anchor, config.strength, config.floor))
    claims = allocations(counts)
    leaves = partner_claim(claims, own, expected, anchor, config.plausible)
    return IntentPlan(chosen, claims.index(rest(claims[leaves], counts)), anchor, values, expected)


def partner_claim(claims: tuple[Triple, ...], own: Triple, expected: Floats, anchor: Floats, plausible: float) -> int:
    """The claim of one's own that the partner's intent leaves: of most points to oneself among those that have at least
    the share `plausible` of the likeliest one's probability (`pikl.wished`)."""
    return pikl.wished(np.array(claims) @ np.array(own), expected, anchor, plausible)


def sampled_values(
    gains: Floats, belief: Floats, policies: Floats, draws: int, rng: np.random.Generator,
    low: float = 0.02, high: float = 10.0,
) -> Floats:  # fmt: skip
    """Expected scores (A,) against drawn pairs of a partner's values and its claim, with importance weights.

    They are drawn from the product of the `belief` (K,) and the population's claims; the joint is the belief times
    `policies` (K, A). Clipping to [low, high] biases a little toward independence.
    """
    population = belief @ policies  # (A,)
    drawn = pikl.sample([belief, population], draws, rng)  # (N, 2)
    types, claims = drawn.T
    logs = np.log(np.maximum(policies[types, claims], FLOOR)), np.log(np.maximum(population[claims], FLOOR))
    weights = pikl.importance_weights(*logs, low, high)
    agreed = np.arange(gains.shape[-1])[:, None] == claims  # (A, N)
    expected: Floats = np.where(agreed, gains.T[:, types], 0.0) @ weights
    return expected


def joint_anchor(anchor: Floats, agreement: float) -> Floats:
    """A joint anchor (A, A) over both claims: the product of two mirrored anchors (A,), with the probability of claims
    that fit together raised or lowered to `agreement`."""
    product: Floats = np.outer(anchor, anchor)
    fitting = np.eye(len(anchor), dtype=np.bool_)
    together = product[fitting].sum()
    scaled: Floats = np.where(fitting, product * (agreement / together), product * ((1 - agreement) / (1 - together)))
    return scaled / scaled.sum()


def coshar_values(gains: Floats, theirs: Floats, belief: Floats, joint: Floats, config: IntentConfig) -> Floats:
    """Expected scores (A,) of one's claims against a partner that is correlated with them: Q(a) from the partner's
    claims given a under CoShar piKL's policy, one for each of its possible values. `joint` (A, A): its anchor."""
    deal = np.eye(gains.shape[-1])
    payoffs = [each[:, :, None] * deal for each in (gains, theirs)]  # (K, A, A)
    policy = pikl.solve_coshar(payoffs, np.broadcast_to(joint, payoffs[0].shape), config.planner.settings)
    given: Floats = policy / policy.sum(-1, keepdims=True)
    return belief @ (np.diagonal(given, axis1=-2, axis2=-1) * gains)

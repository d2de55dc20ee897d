"""Planning near an anchor policy: hedge, piKL-hedge, DiL-piKL, CoShar piKL and the anchored best response.

Player i of a one-shot game maximises u_i(pi) - lambda KL(pi_i || tau_i), where the anchor tau_i is how people play and
lambda how much that matters. `solve` is DiL-piKL (Bakhtin et al. 2022), where a player is one of several types, each
with a lambda of its own. With one lambda it is piKL-hedge (Jacob et al. 2022), and with lambda 0 hedge. The response
to correlated opponents and CoShar piKL are those of FAIR 2022 (Cicero).

Shapes: `*batch` are any leading axes, one entry a stage game; n players; A_i actions of player i; K types. A game is
either one payoff array for each player, (*batch, A_1, ..., A_n), or a function that samples utilities (`Utilities`).
Games of unequal size share a batch by padding, and `legal` says which actions exist. Utilities and lambda have the same
unit, the payoff's; KL is in nats.

Left out: where anchors, payoffs and beliefs over types come from, and how plans are learned from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import ArrayLike, NDArray

from marl.errors import UserError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# utilities(i, actions) -> (*batch, A_i): what each action of player i earns against the others' `actions`, integers of
# shape (*batch, n), whose column i is ignored. It may be noisy: a value network, or one rollout.
Utilities = Callable[[int, Ints], ArrayLike]
Game = Sequence[ArrayLike] | Utilities

CHOICES = {
    "kappa": ("published", "sqrt", "zero"),
    "averaging": ("linear", "uniform"),
    "iterate": ("average", "last"),
    "first": ("uniform", "anchor"),
}
SMALLEST, LARGEST = 1e-200, 1e200  # stand for a lambda of 0 and of infinity, so that both limits need no case


@dataclass(frozen=True)
class Settings:
    """How to plan. The defaults are those of the public release, apart from `lambdas`.

    `kappa`: step sizes, `published` 3 S_t / (10 sqrt(t)) with S_t the running standard deviation of a type's utility,
    `sqrt` 1 / sqrt(t), or `zero`, fictitious play. `averaging`: iteration t counts `linear` (t times) or `uniform` in
    every running mean: values, policies, S_t. UserError, naming the setting, for values that make no sense.
    """

    iterations: int = 1000
    lambdas: tuple[float, ...] = (0.1,)  # one for each type; 0 is hedge, inf plays the anchor
    beta: tuple[float, ...] | tuple[tuple[float, ...], ...] | None = None  # (K,) or (n, K); None is uniform
    kappa: str = "published"
    averaging: str = "linear"
    iterate: str = "average"
    first: str = "uniform"  # policy of the first iteration
    anchor_floor: float = 1e-50  # least anchor probability of a legal action
    exact: bool = True  # expectations over the opponents' joint actions; False draws one joint action an iteration
    exact_limit: int = 20_000_000  # joint actions over the whole batch, at most, in exact mode
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)}: must be one of {', '.join(allowed)}")
        if self.iterations < 1:
            raise UserError(f"iterations={self.iterations}: must be 1 or more")
        if not self.lambdas or not all(value >= 0 for value in self.lambdas):
            raise UserError(f"lambdas={self.lambdas}: name at least one, each 0 (no anchor) or above")
        if not 0 < self.anchor_floor < 1e-3:
            raise UserError(f"anchor_floor={self.anchor_floor}: must lie between 0 and 0.001, as 1e-50")

    def type_probs(self, players: int) -> Floats:
        """Beta of each player, shape (n, K). UserError unless it has one probability for each lambda."""
        types = len(self.lambdas)
        if self.beta is None:
            return np.full((players, types), 1 / types)
        beta = np.asarray(self.beta, dtype=np.float64)
        if beta.shape not in {(types,), (players, types)} or not (beta >= 0).all() or not np.allclose(beta.sum(-1), 1):
            raise UserError(
                f"beta={self.beta}: give {types} probabilities that sum to 1, one for each of lambdas={self.lambdas}, "
                f"or such a row for each of the {players} players"
            )
        return np.broadcast_to(beta, (players, types))


@dataclass(frozen=True)
class Plan:
    """What `solve` found; tuples have one entry for each player."""

    average: tuple[Floats, ...]  # (*batch, K, A_i): each type's mean policy over iterations
    last: tuple[Floats, ...]  # (*batch, K, A_i): each type's response to the final values
    values: tuple[Floats, ...]  # (*batch, A_i): Q_i, the mean utility of each action
    utilities: tuple[Floats, ...]  # (*batch, K): mean utility of each type, without the KL term
    beta: Floats  # (n, K)
    iterate: str  # which of `average` and `last` `policies` are
    floored: tuple[int, ...]  # legal actions whose anchor was raised to the floor, over the whole batch

    @property
    def policies(self) -> tuple[Floats, ...]:
        """(*batch, K, A_i): the wanted iterate of each type."""
        return self.average if self.iterate == "average" else self.last

    @property
    def population(self) -> tuple[Floats, ...]:
        """(*batch, A_i): sum over types of beta times policy, what one who does not know the types would see."""
        return tuple(beta @ policy for beta, policy in zip(self.beta, self.policies, strict=True))


@dataclass(frozen=True)
class JointPlan:
    """What `solve_coshar` found; `average` and `last` are correlated policies, (*batch, A_1, ..., A_n)."""

    average: Floats
    last: Floats
    values: tuple[Floats, ...]  # (*batch, A_i): Q_i
    iterate: str
    floored: int  # joint actions whose anchor was raised to the floor, over the whole batch

    @property
    def policy(self) -> Floats:
        return self.average if self.iterate == "average" else self.last


# --- Solvers ----------------------------------------------------------------------------------------------------------


def respond(
    values: Floats, anchor_logprobs: Floats, lambdas: ArrayLike, kappa: ArrayLike = 0.0, legal: Bools | None = None
) -> Floats:
    """Each type's policy, (*batch, K, A): softmax of (Q + lambda log tau) / (kappa + lambda).

    `values`, `anchor_logprobs` (finite, also where illegal) and `legal`: (*batch, A); `lambdas`: (K,); `kappa`: a
    number or (*batch, K). Where both are 0 it is the limit of small lambda: the best actions, in proportion to tau.
    """
    if legal is not None:
        values = np.where(legal, values, -np.inf)
    gaps = values - values.max(-1, keepdims=True)  # before dividing, so that equal values stay equal
    strength = np.clip(np.asarray(lambdas, dtype=np.float64), SMALLEST, LARGEST)
    temperature = strength + kappa  # (*batch, K)
    pull = (strength / temperature)[..., None]
    logits = gaps[..., None, :] / temperature[..., None] + pull * anchor_logprobs[..., None, :]
    policies: Floats = np.exp(logits - logits.max(-1, keepdims=True))
    return policies / policies.sum(-1, keepdims=True)


def solve(
    game: Game,
    anchors: Sequence[ArrayLike] | None = None,
    settings: Settings | None = None,
    legal: Sequence[ArrayLike] | None = None,
) -> Plan:
    """DiL-piKL (Bakhtin et al. 2022, algorithm 1); hedge and piKL-hedge are its cases of one type.

    `anchors` and `legal`: for each player (A_i,) or (*batch, A_i); by default uniform, and all legal. UserError, naming
    what to change, for payoffs that are not finite, anchors that do not sum to 1, a player without an action, and a
    joint too large for exact mode.
    """
    settings = settings or Settings()
    stage = _stage(game, anchors, settings)
    allowed = _legal(legal, stage)
    taus, floored = _anchors(anchors, stage, allowed, settings.anchor_floor)
    log_taus = [np.log(np.maximum(tau, settings.anchor_floor)) for tau in taus]
    masks = [None if mask.all() else mask for mask in allowed]
    players, types = range(len(stage.counts)), len(settings.lambdas)
    beta = settings.type_probs(len(players))
    rng = np.random.default_rng(settings.seed)

    start = taus if settings.first == "anchor" else [mask / mask.sum(-1, keepdims=True) for mask in allowed]
    policies = [np.repeat(pi[:, None], types, axis=1) for pi in start]  # each (games, K, A_i)
    average = [np.zeros_like(pi) for pi in policies]
    values = [np.zeros_like(tau) for tau in taus]  # each (games, A_i)
    utilities, variances = np.zeros((2, len(players), stage.games, types))

    for t in range(1, settings.iterations + 1):
        step = 2 / (t + 1) if settings.averaging == "linear" else 1 / t  # t's share of all weights so far
        population = [beta[i] @ policies[i] for i in players]  # each (games, A_i)
        # An action of the population is a type drawn from beta, and then an action of that type.
        drawn = None if settings.exact else sample(population, 1, rng)[:, 0]  # (games, n)
        for i in players:
            if drawn is None:
                others = _product([population[j] for j in players if j != i], stage.games)  # (games, M_i)
                q = _matvec(stage.tables[i], others)  # (games, A_i)
            else:
                q = stage.sampled(i, drawn)
            earned = _matvec(policies[i], q)  # (games, K)
            change = earned - utilities[i]
            if settings.kappa == "published":
                within = 0.0  # a draw has no spread of its own
                if drawn is None:
                    within = _matvec((policies[i] @ stage.tables[i] - earned[..., None]) ** 2, others)
                variances[i] = (1 - step) * (variances[i] + step * change**2) + step * within
            utilities[i] += step * change
            values[i] += step * (q - values[i])
            average[i] += step * (policies[i] - average[i])
        for i in players:
            kappa = {"published": 0.3 * np.sqrt(variances[i] / t), "sqrt": t**-0.5, "zero": 0.0}[settings.kappa]
            policies[i] = respond(values[i], log_taus[i], settings.lambdas, kappa, masks[i])

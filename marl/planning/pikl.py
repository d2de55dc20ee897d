"""Planning near an anchor policy: hedge, piKL-hedge, DiL-piKL, CoShar piKL and the anchored best response.

Player i of a one-shot game maximises u_i(pi) - lambda KL(pi_i || tau_i): the anchor tau_i is how people play, and
lambda how much that matters. `solve` is DiL-piKL (Bakhtin et al. 2022), where a player is one of several types, each
with its own lambda. With one lambda it is piKL-hedge (Jacob et al. 2022), and with lambda 0 hedge. CoShar piKL and the
response to correlated opponents are those of FAIR 2022 (Cicero).

Shapes: `*batch` are any leading axes, one entry a stage game; n players; A_i actions of player i; M_i joint actions of
the others; K types. A game is one payoff array for each player, (*batch, A_1, ..., A_n). Games of unequal size share a
batch by padding; `legal` says which actions exist. Utilities and lambda have the payoff's unit; KL is in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import ArrayLike, NDArray

from marl.common.errors import UserError, check_choices, check_range

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Shape = tuple[int, ...]

Game = Sequence[ArrayLike]  # one payoff array for each player, (*batch, A_1, ..., A_n)

CHOICES = {"averaging": ("linear", "uniform"), "iterate": ("average", "last")}
FLOOR = 1e-50  # the least anchor probability of a legal action
HUGE = 1e100  # payoffs are below, so that their squares are finite
SMALLEST, LARGEST = 1e-200, 1e200  # stand for a lambda of 0 and of infinity, so that neither limit needs a case


@dataclass(frozen=True)
class Settings:
    """Settings of a solver. Raises UserError, naming the setting, for bad values.

    `averaging`: iteration t counts t times (`linear`) or once (`uniform`) in all running means.
    """

    iterations: int = 1000
    lambdas: Sequence[float] = (0.1,)  # one for each type; 0 is hedge, inf plays the anchor
    beta: Sequence[float] | Sequence[Sequence[float]] | None = None  # (K,), or (n, K) by player; None is uniform
    averaging: str = "linear"
    iterate: str = "average"

    def __post_init__(self) -> None:
        check_choices(self, "", **CHOICES)
        check_range(self, "", "[1, inf)", "iterations")
        if not len(self.lambdas) or not all(value >= 0 for value in self.lambdas):
            raise UserError(f"lambdas={self.lambdas}: name at least one, each 0 (no anchor) or above")

    def step(self, t: int) -> float:
        """The share of iteration t in the sum of all weights so far."""
        return 2 / (t + 1) if self.averaging == "linear" else 1 / t

    def type_probs(self, players: int) -> Floats:
        """Each player's distribution over types, (n, K). Raises UserError for a `beta` that is none."""
        types = len(self.lambdas)
        beta = np.asarray([1 / types] * types if self.beta is None else self.beta, dtype=np.float64)
        if beta.shape not in {(types,), (players, types)} or (beta < 0).any() or not np.allclose(beta.sum(-1), 1):
            raise UserError(
                f"beta={self.beta}: give {types} probabilities that sum to 1, one for each of lambdas={self.lambdas}"
            )
        return np.broadcast_to(beta, (players, types))


@dataclass(frozen=True)
class Plan:
    """The result of `solve`; tuples have one entry for each player."""

    policies: tuple[Floats, ...]  # (*batch, K, A_i): each type's mean over the iterations, or its last policy
    population: tuple[Floats, ...]  # (*batch, A_i): their mean over the types, as seen by who does not know them


# --- Solvers ----------------------------------------------------------------------------------------------------------


def respond(values: Floats, anchor_logprobs: Floats, lambdas: ArrayLike, kappa: Floats | float = 0.0) -> Floats:
    """Each type's policy, (*batch, K, A): softmax of (Q + lambda log tau) / (kappa + lambda).

    `values` and `anchor_logprobs` (-inf for illegal actions): (*batch, A); `lambdas`: (K,), at least 0; `kappa`: a
    number or (*batch, K). With lambda and kappa 0 it is the limit of a small lambda: the best actions in proportion to
    tau.
    """
    values = np.where(anchor_logprobs > -np.inf, values, -np.inf)
    gaps = values - values.max(-1, keepdims=True)  # before dividing, so that equal values stay equal
    strength = np.minimum(np.maximum(lambdas, SMALLEST), LARGEST)
    temperature = strength + kappa  # (K,) or (*batch, K)
    pull = strength / temperature
    logits = gaps[..., None, :] / temperature[..., None] + pull[..., None] * anchor_logprobs[..., None, :]
    policies: Floats = np.exp(logits - logits.max(-1, keepdims=True))
    return policies / policies.sum(-1, keepdims=True)


def solve(
    game: Game,
    anchors: Sequence[ArrayLike] | None = None,
    settings: Settings | None = None,
    legal: Sequence[ArrayLike] | None = None,
) -> Plan:
    """DiL-piKL (Bakhtin et al. 2022, algorithm 1) from the anchor; piKL-hedge and hedge are its cases of one type.

    Its kappa is 0 (fictitious play), so that the anchor selects the equilibrium. `anchors` and `legal`: for each player
    (A_i,) or (*batch, A_i); by default uniform, and all legal. Raises UserError for payoffs or anchors that are not
    finite, and for anchors that do not sum to 1.
    """
    settings = settings or Settings()
    batch, counts, tables = _read_game(game)
    players, lambdas = range(len(counts)), np.asarray(settings.lambdas, dtype=np.float64)
    allowed = [np.broadcast_to(True if legal is None else legal[i], (*batch, counts[i])) for i in players]
    taus = [_read_anchor(None if anchors is None else anchors[i], allowed[i]) for i in players]
    log_taus = [np.log(tau, out=np.full(tau.shape, -np.inf), where=tau > 0) for tau in taus]
    beta = settings.type_probs(len(players))

    start = [tau / tau.sum(-1, keepdims=True) for tau in taus]  # what was raised to the floor adds a little
    policies = [np.repeat(pi[..., None, :], len(lambdas), axis=-2) for pi in start]  # each (*batch, K, A_i)
    average = [np.zeros_like(pi) for pi in policies]
    values = [np.zeros_like(tau) for tau in taus]  # Q_i, each (*batch, A_i)

    for t in range(1, settings.iterations + 1):
        step = settings.step(t)
        population = [beta[i] @ policies[i] for i in players]  # each (*batch, A_i)
        for i in players:
            q = _matvec(tables[i], _product(population, i))  # (*batch, A_i)
            values[i] += step * (q - values[i])
            average[i] += step * (policies[i] - average[i])
        policies = [respond(values[i], log_taus[i], lambdas) for i in players]

    wanted = average if settings.iterate == "average" else policies
    return Plan(tuple(wanted), tuple(beta[i] @ wanted[i] for i in players))


def solve_coshar(game: Game, anchor: ArrayLike, settings: Settings | None = None) -> Floats:
    """CoShar piKL (FAIR 2022): one correlated policy, pi(a) proportional to tau(a) exp(sum_i Q_i(a_i) / lambda).

    `anchor`: (*batch, A_1, ..., A_n), over joint actions. Returns the policy, of the same shape. Q_i, (*batch, A_i), is
    the running mean of player i's utility against the others' actions under pi. There is one lambda; beta plays no
    part. Raises UserError as `solve`.
    """
    settings = settings or Settings()
    (strength,) = settings.lambdas
    batch, counts, tables = _read_game(game)
    everyone, size = range(len(counts)), math.prod(counts)
    tau = _read_anchor(np.reshape(anchor, (*batch, size)), np.broadcast_to(True, (*batch, size)))

    policy = tau / tau.sum(-1, keepdims=True)
    average, values = np.zeros_like(tau), [np.zeros((*batch, count)) for count in counts]
    for t in range(1, settings.iterations + 1):
        step, joint, total = settings.step(t), policy.reshape(*batch, *counts), np.zeros((*batch, *counts))
        for i in everyone:
            q = _matvec(tables[i], joint.sum(len(batch) + i).reshape(*batch, -1))  # (*batch, A_i)
            values[i] += step * (q - values[i])
            total += values[i].reshape(*batch, *(counts[j] if j == i else 1 for j in everyone))
        average += step * (policy - average)
        policy = respond(total.reshape(tau.shape), np.log(tau), (strength,))[..., 0, :]

    wanted = average if settings.iterate == "average" else policy
    return wanted.reshape(*batch, *counts)


# --- Responses to others whose play is given --------------------------------------------------------------------------


def best_response(values: ArrayLike, anchor: ArrayLike, strength: float = 3e-3, floor: float = 1e-6) -> Ints:
    """The action, (*batch), with the largest expected utility + strength * log max(tau, floor) (FAIR 2022).

    `values` (-inf for illegal actions) and `anchor`: (*batch, A). Returns the first of several best actions.
    """
    return np.argmax(np.asarray(values, dtype=np.float64) + strength * np.log(np.maximum(anchor, floor)), axis=-1)


def wished(worth: Floats, expected: Floats, anchor: Floats, plausible: float) -> int:
    """The action of another that is of most worth (A,) to oneself, among those that have at least the share `plausible`
    of the likeliest one's probability, as it is `expected` (A,) and under the `anchor` (A,) (FAIR 2022).

    Where the two have none in common, what is expected decides. Of equal worth the likelier one.
    """
    likely = expected >= plausible * expected.max()
    both = likely & (anchor >= plausible * anchor.max())
    among = np.flatnonzero(both if both.any() else likely)
    best = among[worth[among] == worth[among].max()]
    return int(best[expected[best].argmax()])


def sample(policies: Sequence[ArrayLike], draws: int, rng: np.random.Generator) -> Ints:
    """Independent joint actions, (*batch, draws, m), of m players with policies (*batch, A_j)."""
    columns = []
    for policy in policies:
        ladder = np.cumsum(policy, axis=-1)[..., None, :]  # (*batch, 1, A_j)
        heights = rng.random((*ladder.shape[:-2], draws, 1)) * ladder[..., -1:]
        columns.append((ladder > heights).argmax(-1))  # the first such step: never one of probability 0
    return np.stack(columns, axis=-1)


def importance_weights(joint: Floats, marginal: Floats, low: float = 0.02, high: float = 10.0) -> Floats:
    """Weights (*batch, N), of sum 1, that give joint actions drawn independently the correlation of a joint policy.

    `joint`: log P_joint of each draw, `marginal`: the sum over players of log P_marginal; both (*batch, N). Their ratio
    is clipped to [low, high] and normalised (FAIR 2022).
    """
    weights: Floats = np.exp(np.clip(joint - marginal, math.log(low), math.log(high)))
    return weights / weights.sum(-1, keepdims=True)


def expected_values(game: Game, policies: Sequence[Floats]) -> tuple[Floats, ...]:
    """Q_i, (*batch, A_i): expected utility of player i's actions while the others play `policies`, (*batch, A_j)."""
    return tuple(_matvec(table, _product(policies, i)) for i, table in enumerate(_read_game(game)[2]))


# --- Reading games and anchors ----------------------------------------------------------------------------------------


def _read_game(game: Game) -> tuple[Shape, Shape, list[Floats]]:
    """`batch`, the A_i, and each player's payoffs as (*batch, A_i, M_i). Raises UserError for payoffs that are not
    finite; an illegal action may have any number."""
    payoffs = [np.asarray(payoff, dtype=np.float64) for payoff in game]
    shape, players = payoffs[0].shape, len(payoffs)
    assert len(shape) >= players and all(u.shape == shape for u in payoffs), [u.shape for u in payoffs]
    if not all((np.abs(u) < HUGE).all() for u in payoffs):  # which nan is not
        raise UserError(f"payoffs must be finite, and below {HUGE:.0e}. Beliefs that are not finite make such ones")
    batch, counts = shape[:-players], shape[-players:]
    tables = [np.moveaxis(u, len(batch) + i, len(batch)).reshape(*batch, counts[i], -1) for i, u in enumerate(payoffs)]
    return batch, counts, tables


def _read_anchor(anchor: ArrayLike | None, legal: NDArray[np.bool_]) -> Floats:
    """A player's anchor, (*batch, A_i), with legal actions raised to the floor and others 0."""
    tau = np.where(legal, legal / legal.sum(-1, keepdims=True) if anchor is None else anchor, 0.0)
    total = tau.sum(-1, keepdims=True)
    if not (tau >= 0).all() or not (np.abs(total - 1) < 1e-5).all():  # float32 probabilities come that near
        raise UserError(f"anchor={tau.tolist()}: must be probabilities of sum 1, of legal actions alone")
    return np.where(legal & (tau < FLOOR), FLOOR, tau / total)


def _product(policies: Sequence[Floats], i: int) -> Floats:
    """The joint policy of all but player i when they act independently, (*batch, M_i)."""
    others = [pi for j, pi in enumerate(policies) if j != i]
    if not others:
        return np.ones((*policies[i].shape[:-1], 1))
    return reduce(lambda a, b: (a[..., :, None] * b[..., None, :]).reshape(*a.shape[:-1], -1), others)


def _matvec(matrix: Floats, vector: Floats) -> Floats:
    return (matrix @ vector[..., None])[..., 0]

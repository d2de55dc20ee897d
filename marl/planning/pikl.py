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

from marl.common.errors import UserError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Shape = tuple[int, ...]

Game = Sequence[ArrayLike]  # one payoff array for each player, (*batch, A_1, ..., A_n)

CHOICES = {
    "kappa": ("published", "sqrt", "zero"),
    "averaging": ("linear", "uniform"),
    "iterate": ("average", "last"),
    "first": ("uniform", "anchor"),
}
FLOOR = 1e-50  # the least anchor probability of a legal action
HUGE = 1e100  # payoffs are below, so that their squares are finite
SMALLEST, LARGEST = 1e-200, 1e200  # stand for a lambda of 0 and of infinity, so that neither limit needs a case


@dataclass(frozen=True)
class Settings:
    """Settings of a solver. Raises UserError, naming the setting, for bad values.

    `kappa` decides how far one iteration moves: `published` 3 S_t / (10 sqrt(t)), with S_t the running standard
    deviation of a type's utility; `sqrt` 1 / sqrt(t); `zero`, fictitious play. `averaging`: iteration t counts t times
    (`linear`) or once (`uniform`) in all running means: values, policies, S_t.
    """

    iterations: int = 1000
    lambdas: Sequence[float] = (0.1,)  # one for each type; 0 is hedge, inf plays the anchor
    beta: Sequence[float] | Sequence[Sequence[float]] | None = None  # (K,), or (n, K) by player; None is uniform
    kappa: str = "published"
    averaging: str = "linear"
    iterate: str = "average"
    first: str = "uniform"  # policy of the first iteration

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)}: must be one of {', '.join(allowed)}")
        if self.iterations < 1:
            raise UserError(f"iterations={self.iterations}: must be 1 or more")
        if not len(self.lambdas) or not all(value >= 0 for value in self.lambdas):
            raise UserError(f"lambdas={self.lambdas}: name at least one, each 0 (no anchor) or above")

    def step(self, t: int) -> float:
        """The share of iteration t in the sum of all weights so far."""
        return 2 / (t + 1) if self.averaging == "linear" else 1 / t

    def kappa_at(self, t: int, variance: Floats) -> Floats | float:
        """kappa_t, given the running variance of the types' utilities, (*batch, K)."""
        if self.kappa == "published":
            return 0.3 * np.sqrt(variance / t)
        return t**-0.5 if self.kappa == "sqrt" else 0.0

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

    average: tuple[Floats, ...]  # (*batch, K, A_i): each type's mean policy over the iterations
    last: tuple[Floats, ...]  # (*batch, K, A_i): each type's response to the final values
    policies: tuple[Floats, ...]  # (*batch, K, A_i): the wanted iterate of the two
    population: tuple[Floats, ...]  # (*batch, A_i): its mean over the types, as seen by who does not know them
    values: tuple[Floats, ...]  # (*batch, A_i): Q_i, the mean utility of each action; -inf where it is not legal
    utilities: tuple[Floats, ...]  # (*batch, K): each type's mean utility, without the KL term


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
    """DiL-piKL (Bakhtin et al. 2022, algorithm 1); piKL-hedge and hedge are its cases of one type.

    `anchors` and `legal`: for each player (A_i,) or (*batch, A_i); by default uniform, and all legal. Raises UserError
    for payoffs or anchors that are not finite, and for anchors that do not sum to 1.
    """
    settings = settings or Settings()
    batch, counts, tables = _read_game(game)
    players, lambdas = range(len(counts)), np.asarray(settings.lambdas, dtype=np.float64)
    allowed = [np.broadcast_to(True if legal is None else legal[i], (*batch, counts[i])) for i in players]
    taus = [_read_anchor(None if anchors is None else anchors[i], allowed[i]) for i in players]
    log_taus = [np.log(tau, out=np.full(tau.shape, -np.inf), where=tau > 0) for tau in taus]
    beta = settings.type_probs(len(players))

    first = taus if settings.first == "anchor" else [tau > 0 for tau in taus]
    start = [tau / tau.sum(-1, keepdims=True) for tau in first]  # what was raised to the floor adds a little
    policies = [np.repeat(pi[..., None, :], len(lambdas), axis=-2) for pi in start]  # each (*batch, K, A_i)
    average = [np.zeros_like(pi) for pi in policies]
    values = [np.zeros_like(tau) for tau in taus]  # each (*batch, A_i)
    means, variances = np.zeros((2, len(players), *batch, len(lambdas)))  # of the types' utilities

    for t in range(1, settings.iterations + 1):
        step = settings.step(t)
        population = [beta[i] @ policies[i] for i in players]  # each (*batch, A_i)
        for i in players:
            others = _product(population, i)  # (*batch, M_i)
            q = _matvec(tables[i], others)  # (*batch, A_i)
            earned = _matvec(policies[i], q)  # (*batch, K)
            change = earned - means[i]
            if settings.kappa == "published":
                # The spread of the utility over what the others may do.
                spread = _matvec((policies[i] @ tables[i] - earned[..., None]) ** 2, others)
                variances[i] = (1 - step) * (variances[i] + step * change**2) + step * spread
            means[i] += step * change
            values[i] += step * (q - values[i])
            average[i] += step * (policies[i] - average[i])
        for i in players:
            kappa = settings.kappa_at(t + 1, variances[i])
            policies[i] = respond(values[i], log_taus[i], lambdas, kappa)

    wanted = average if settings.iterate == "average" else policies
    mixed = tuple(beta[i] @ wanted[i] for i in players)
    found = tuple(np.where(tau > 0, q, -np.inf) for tau, q in zip(taus, values, strict=True))
    return Plan(tuple(average), tuple(policies), tuple(wanted), mixed, found, tuple(means))


def solve_coshar(game: Game, anchor: ArrayLike, settings: Settings | None = None) -> tuple[Floats, tuple[Floats, ...]]:
    """CoShar piKL (FAIR 2022): one correlated policy, pi(a) proportional to tau(a) exp(sum_i Q_i(a_i) / lambda).

    `anchor`: (*batch, A_1, ..., A_n), over joint actions. Returns the policy, of the same shape, and each player's Q_i,
    (*batch, A_i): the running mean of its utility against the others' actions under pi. There is one lambda; kappa and
    beta play no part. Raises UserError as `solve`.
    """
    settings = settings or Settings()
    (strength,) = settings.lambdas
    batch, counts, tables = _read_game(game)
    everyone, size = range(len(counts)), math.prod(counts)
    tau = _read_anchor(np.reshape(anchor, (*batch, size)), np.broadcast_to(True, (*batch, size)))

    policy = tau / tau.sum(-1, keepdims=True) if settings.first == "anchor" else np.full_like(tau, 1 / size)
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
    return wanted.reshape(*batch, *counts), tuple(values)


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


def weighted_values(game: Game, player: int, actions: Ints, weights: Floats) -> Floats:
    """Expected utility of each action of `player`, (*batch, A_i), against weighted joint actions.

    `actions`: (*batch, N, n), whose column `player` is ignored; `weights`: (*batch, N), of sum 1.
    """
    _, counts, tables = _read_game(game)
    rows = [_utilities(tables[player], player, row, counts) for row in np.moveaxis(actions, -2, 0)]
    return _matvec(np.stack(rows, axis=-1), weights)


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


def _utilities(table: Floats, i: int, actions: Ints, counts: Shape) -> Floats:
    """The utility of each action of player i, (*batch, A_i), against the others' `actions` (*batch, n)."""
    others = [j for j in range(len(counts)) if j != i]
    column = reduce(lambda index, j: index * counts[j] + actions[..., j], others, np.zeros_like(actions[..., 0]))
    return np.take_along_axis(table, column[..., None, None], axis=-1)[..., 0]


def _product(policies: Sequence[Floats], i: int) -> Floats:
    """The joint policy of all but player i when they act independently, (*batch, M_i)."""
    others = [pi for j, pi in enumerate(policies) if j != i]
    if not others:
        return np.ones((*policies[i].shape[:-1], 1))
    return reduce(lambda a, b: (a[..., :, None] * b[..., None, :]).reshape(*a.shape[:-1], -1), others)


def _matvec(matrix: Floats, vector: Floats) -> Floats:
    return (matrix @ vector[..., None])[..., 0]

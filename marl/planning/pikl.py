"""Planning near an anchor policy: hedge, piKL-hedge, DiL-piKL, CoShar piKL and the anchored best response.

Player i of a one-shot game maximises u_i(pi) - lambda KL(pi_i || tau_i): the anchor tau_i is how people play, and
lambda how much that matters. `solve` is DiL-piKL (Bakhtin et al. 2022), where a player is one of several types, each
with its own lambda. With one lambda it is piKL-hedge (Jacob et al. 2022), and with lambda 0 hedge. CoShar piKL and the
response to correlated opponents are those of FAIR 2022 (Cicero).

Shapes: `*batch` are any leading axes, one entry a stage game; n players; A_i actions of player i; M_i joint actions of
the others; K types. A game is one payoff array for each player, (*batch, A_1, ..., A_n). Games of unequal size share a
batch by padding; `legal` says which actions exist. Utilities and lambda have the payoff's unit; KL is in nats. Left
out: where anchors, payoffs and types come from.
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
Shape = tuple[int, ...]

Game = Sequence[ArrayLike]  # one payoff array for each player, (*batch, A_1, ..., A_n)

CHOICES = {
    "kappa": ("published", "sqrt", "zero"),
    "averaging": ("linear", "uniform"),
    "iterate": ("average", "last"),
    "first": ("uniform", "anchor"),
}
HUGE = 1e100
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
    anchor_floor: float = 1e-50  # the least anchor probability of a legal action
    exact: bool = True  # expectations over what the others may do; False draws one joint action an iteration
    exact_limit: int = 20_000_000  # most joint actions, over the whole batch, in exact mode
    seed: int = 0  # of the draws

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)}: must be one of {', '.join(allowed)}")
        if not isinstance(self.iterations, int | np.integer) or self.iterations < 1:
            raise UserError(f"iterations={self.iterations}: must be 1 or more, a whole number")
        if np.ndim(self.lambdas) != 1 or not len(self.lambdas) or not all(value >= 0 for value in self.lambdas):
            raise UserError(f"lambdas={self.lambdas}: name at least one, each 0 (no anchor) or above")
        if not 0 < self.anchor_floor < 1e-3:
            raise UserError(f"anchor_floor={self.anchor_floor}: must lie above 0 and below 0.001, as 1e-50 does")

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
                f"beta={self.beta}: give {types} probabilities that sum to 1, one for each of lambdas={self.lambdas}, "
                f"or such a row for each of {players} players"
            )
        return np.broadcast_to(beta, (players, types))


@dataclass(frozen=True)
class Plan:
    """The result of `solve`; tuples have one entry for each player."""

    average: tuple[Floats, ...]  # (*batch, K, A_i): each type's mean policy over the iterations
    last: tuple[Floats, ...]  # (*batch, K, A_i): each type's response to the final values
    values: tuple[Floats, ...]  # (*batch, A_i): Q_i, the mean utility of each action; -inf where it is not legal
    utilities: tuple[Floats, ...]  # (*batch, K): each type's mean utility, without the KL term
    beta: Floats  # (n, K)
    iterate: str  # whether `policies` are the average or the last
    floored: tuple[int, ...]  # how many legal actions had their anchor raised to the floor, over the whole batch

    @property
    def policies(self) -> tuple[Floats, ...]:
        """(*batch, K, A_i): the wanted iterate of each type."""
        return self.average if self.iterate == "average" else self.last

    @property
    def population(self) -> tuple[Floats, ...]:
        """(*batch, A_i): sum over types of beta times policy, as seen by someone who does not know the types."""
        return tuple(beta @ policy for beta, policy in zip(self.beta, self.policies, strict=True))


@dataclass(frozen=True)
class JointPlan:
    """The result of `solve_coshar`."""

    policy: Floats  # (*batch, A_1, ..., A_n): the wanted iterate
    values: tuple[Floats, ...]  # (*batch, A_i): Q_i
    floored: int  # how many joint actions had their anchor raised to the floor, over the whole batch


# --- Solvers ----------------------------------------------------------------------------------------------------------


def respond(values: Floats, anchor_logprobs: Floats, lambdas: ArrayLike, kappa: Floats | float = 0.0) -> Floats:
    """Each type's policy, (*batch, K, A): softmax of (Q + lambda log tau) / (kappa + lambda).

    `values` and `anchor_logprobs` (-inf for illegal actions): (*batch, A); `lambdas`: (K,), at least 0; `kappa`: a
    number or (*batch, K). With lambda and kappa 0 it is the limit of a small lambda: the best actions in proportion to
    tau.
    """
    if not (np.asarray(lambdas) >= 0).all():
        raise UserError(f"lambdas={lambdas!r}: each must be 0 (no anchor) or above")
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
    for payoffs that are not finite, anchors that do not sum to 1, a player without an action, and a joint too large for
    exact mode.
    """
    settings = settings or Settings()
    batch, counts = _sizes(game)
    tables = _tables(game, batch, counts, settings)
    players, lambdas = range(len(counts)), np.asarray(settings.lambdas, dtype=np.float64)
    given, allowed = _one_each("anchors", anchors, len(counts)), _one_each("legal", legal, len(counts))
    taus, floored = zip(
        *(_anchor(f"anchors[{i}]", given[i], allowed[i], (*batch, counts[i]), settings) for i in players), strict=True
    )
    log_taus = [np.log(tau, out=np.full(tau.shape, -np.inf), where=tau > 0) for tau in taus]
    beta, rng = settings.type_probs(len(players)), np.random.default_rng(settings.seed)

    first = taus if settings.first == "anchor" else [tau > 0 for tau in taus]
    start = [tau / tau.sum(-1, keepdims=True) for tau in first]  # what was raised to the floor adds a little
    policies = [np.repeat(pi[..., None, :], len(lambdas), axis=-2) for pi in start]  # each (*batch, K, A_i)
    average = [np.zeros_like(pi) for pi in policies]
    values = [np.zeros_like(tau) for tau in taus]  # each (*batch, A_i)
    means, variances = np.zeros((2, len(players), *batch, len(lambdas)))  # of the types' utilities

    for t in range(1, settings.iterations + 1):
        step = settings.step(t)
        population = [beta[i] @ policies[i] for i in players]  # each (*batch, A_i)
        # A draw from the population is a type drawn from beta, and then an action of that type.
        drawn = None if settings.exact else sample(population, 1, rng)[..., 0, :]  # (*batch, n)
        for i in players:
            if drawn is None:
                others = _product(population, i)  # (*batch, M_i)
                q = _matvec(tables[i], others)  # (*batch, A_i)
            else:
                q = _utilities(tables[i], i, drawn, counts)
            earned = _matvec(policies[i], q)  # (*batch, K)
            change = earned - means[i]
            if settings.kappa == "published":
                # The spread of the utility over what the others may do; a single draw has none.
                spread = _matvec((policies[i] @ tables[i] - earned[..., None]) ** 2, others) if drawn is None else 0.0
                variances[i] = (1 - step) * (variances[i] + step * change**2) + step * spread
            means[i] += step * change
            values[i] += step * (q - values[i])
            average[i] += step * (policies[i] - average[i])
        for i in players:
            kappa = settings.kappa_at(t + 1, variances[i])
            policies[i] = respond(values[i], log_taus[i], lambdas, kappa)

    found = tuple(np.where(tau > 0, q, -np.inf) for tau, q in zip(taus, values, strict=True))
    return Plan(tuple(average), tuple(policies), found, tuple(means), beta, settings.iterate, floored)


def solve_coshar(game: Game, anchor: ArrayLike, settings: Settings | None = None) -> JointPlan:
    """CoShar piKL (FAIR 2022): one correlated policy, pi(a) proportional to tau(a) exp(sum_i Q_i(a_i) / lambda).

    `anchor`: (*batch, A_1, ..., A_n), over joint actions. Q_i(a_i) is the running mean of player i's utility against
    the others' actions under pi. There is one lambda; kappa and beta play no part. Raises UserError as `solve`.
    """
    settings = settings or Settings()
    if len(settings.lambdas) != 1:
        raise UserError(f"lambdas={settings.lambdas}: a joint policy has a single lambda; name just one")
    batch, counts = _sizes(game)
    if np.shape(anchor) != (*batch, *counts):
        raise UserError(f"anchor: has shape {np.shape(anchor)}; give one probability a joint action, {batch + counts}")
    tables = _tables(game, batch, counts, settings)
    everyone, size = range(len(counts)), math.prod(counts)
    tau, floored = _anchor("anchor", np.reshape(anchor, (*batch, size)), None, (*batch, size), settings)
    rng = np.random.default_rng(settings.seed)

    policy = tau / tau.sum(-1, keepdims=True) if settings.first == "anchor" else np.full_like(tau, 1 / size)
    average, values = np.zeros_like(tau), [np.zeros((*batch, count)) for count in counts]
    for t in range(1, settings.iterations + 1):
        step, joint, total = settings.step(t), policy.reshape(*batch, *counts), np.zeros((*batch, *counts))
        if not settings.exact:
            drawn = np.stack(np.unravel_index(sample([policy], 1, rng)[..., 0, 0], counts), axis=-1)  # (*batch, n)
        for i in everyone:
            if settings.exact:
                q = _matvec(tables[i], joint.sum(len(batch) + i).reshape(*batch, -1))  # (*batch, A_i)
            else:
                q = _utilities(tables[i], i, drawn, counts)
            values[i] += step * (q - values[i])
            total += values[i].reshape(*batch, *(counts[j] if j == i else 1 for j in everyone))
        average += step * (policy - average)
        policy = respond(total.reshape(tau.shape), np.log(tau), settings.lambdas)[..., 0, :]

    wanted = average if settings.iterate == "average" else policy
    return JointPlan(wanted.reshape(*batch, *counts), tuple(values), floored)


# --- Responses to others whose play is given --------------------------------------------------------------------------


def best_response(values: ArrayLike, anchor: ArrayLike, strength: float = 3e-3, floor: float = 1e-6) -> Ints:
    """The action, (*batch), with the largest expected utility + strength * log max(tau, floor) (FAIR 2022).

    `values` (-inf for illegal actions) and `anchor`: (*batch, A). Returns the first of several best actions.
    """
    if not 0 <= strength < math.inf:
        raise UserError(f"strength={strength}: must be 0 (no anchor) or above, and finite")
    q, tau = np.asarray(values, dtype=np.float64), np.asarray(anchor, dtype=np.float64)
    if not q.size or np.isnan(q).any() or (q == np.inf).any() or (q == -np.inf).all(-1).any():
        raise UserError(f"values={values!r}: must be finite, or -inf where an action is not legal, and leave one legal")
    if not ((tau >= 0) & (tau <= 1)).all():
        raise UserError(f"anchor={anchor!r}: must be probabilities, from 0 to 1")
    return np.argmax(q + strength * np.log(np.maximum(tau, floor)), axis=-1)


def sample(policies: Sequence[ArrayLike], draws: int, rng: np.random.Generator) -> Ints:
    """Independent joint actions, (*batch, draws, m), of m players with policies (*batch, A_j)."""
    columns = []
    for policy in policies:
        ladder = np.cumsum(policy, axis=-1)[..., None, :]  # (*batch, 1, A_j)
        heights = rng.random((*ladder.shape[:-2], draws, 1)) * ladder[..., -1:]
        columns.append((ladder > heights).argmax(-1))  # the first such step: never one of probability 0
    return np.stack(columns, axis=-1)


def importance_weights(
    joint_logprobs: ArrayLike, marginal_logprobs: ArrayLike, low: float = 0.02, high: float = 10.0
) -> Floats:
    """Weights (*batch, N), of sum 1, that give joint actions drawn independently the correlation of a joint policy.

    `joint_logprobs`: log P_joint of each draw, `marginal_logprobs`: the sum over players of log P_marginal; both
    (*batch, N). Their ratio is clipped to [low, high] and normalised (FAIR 2022).
    """
    logs = np.asarray(joint_logprobs, dtype=np.float64) - np.asarray(marginal_logprobs, dtype=np.float64)
    if np.isnan(logs).any() or not 0 < low <= high:
        raise UserError(f"low={low}, high={high}: need 0 < low <= high, and log-probabilities that are numbers")
    weights: Floats = np.exp(np.clip(logs, math.log(low), math.log(high)))
    return weights / weights.sum(-1, keepdims=True)


def weighted_values(game: Game, player: int, actions: Ints, weights: Floats) -> Floats:
    """Expected utility of each action of `player`, (*batch, A_i), against weighted joint actions.

    `actions`: (*batch, N, n), whose column `player` is ignored; `weights`: (*batch, N), of sum 1.
    """
    if not (np.isfinite(weights) & (np.asarray(weights) >= 0)).all():
        raise UserError("weights: must be finite, and 0 or more")
    batch, counts = _sizes(game)
    table = _tables(game, batch, counts)[player]
    rows = [_utilities(table, player, row, counts) for row in np.moveaxis(actions, -2, 0)]  # each (*batch, A_i)
    return _matvec(np.stack(rows, axis=-1), weights)


def expected_values(payoffs: Sequence[ArrayLike], policies: Sequence[Floats]) -> tuple[Floats, ...]:
    """Q_i, (*batch, A_i): expected utility of player i's actions while the others play `policies`, (*batch, A_j)."""
    tables = _tables(payoffs, *_sizes(payoffs))
    return tuple(_matvec(table, _product(policies, i)) for i, table in enumerate(tables))


# --- Reading games and anchors ----------------------------------------------------------------------------------------


def _sizes(game: Game) -> tuple[Shape, Shape]:
    """`batch` and `counts`, the A_i."""
    shapes = [np.shape(payoff) for payoff in game]
    if not shapes or len(set(shapes)) > 1 or len(shapes[0]) < len(shapes):
        raise UserError(f"payoffs: their shapes are {shapes}; give each player one array (*batch, A_1, ..., A_n)")
    batch, counts = shapes[0][: -len(shapes)], shapes[0][-len(shapes) :]
    if 0 in batch:
        raise UserError(f"the batch has shape {batch}: there is no game to solve")
    if 0 in counts:
        raise UserError(f"player {counts.index(0)} has no action; leave the player out or give it one, as a pass")
    return batch, counts


def _tables(game: Game, batch: Shape, counts: Shape, settings: Settings | None = None) -> list[Floats]:
    """Each player's payoffs as (*batch, A_i, M_i). Raises UserError if exact mode can't have them."""
    size = math.prod(batch) * math.prod(counts)
    if settings and settings.exact and size > settings.exact_limit:
        raise UserError(
            f"exact=True: {math.prod(batch)} x {' x '.join(map(str, counts))} = {size} joint actions over the batch "
            f"exceed exact_limit={settings.exact_limit}. Set exact=False to sample"
        )
    tables = []
    for i, payoff in enumerate(game):
        array = np.asarray(payoff, dtype=np.float64)
        fine = np.abs(array) < HUGE  # which nan is not
        if not fine.all():
            at = tuple(int(k) for k in np.argwhere(~fine)[0])
            raise UserError(
                f"payoffs[{i}]{list(at)}={array[at]}: must be finite, and below {HUGE:.0e} so that its square is; "
                "an illegal action may have any number"
            )
        tables.append(np.moveaxis(array, len(batch) + i, len(batch)).reshape(*batch, counts[i], -1))
    return tables


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


def _one_each(name: str, arrays: Sequence[ArrayLike] | None, players: int) -> list[ArrayLike | None]:
    if arrays is not None and len(arrays) != players:
        raise UserError(f"{name}: has {len(arrays)} entries; give one for each of {players} players")
    return [None] * players if arrays is None else list(arrays)


def _anchor(
    name: str, anchor: ArrayLike | None, legal: ArrayLike | None, shape: Shape, settings: Settings
) -> tuple[Floats, int]:
    """A player's anchor, (*batch, A_i), with legal actions raised to the floor and others 0; and the number raised."""
    mask = np.broadcast_to(np.asarray(True if legal is None else legal, dtype=np.bool_), shape)
    if not mask.any(-1).all():
        game = np.argwhere(~mask.any(-1))[0].tolist()
        raise UserError(f"legal: the player of {name} has no legal action in game {game}; allow at least one")
    tau = np.asarray(mask / mask.sum(-1, keepdims=True) if anchor is None else anchor, dtype=np.float64)
    if tau.shape not in {shape, shape[-1:]}:
        raise UserError(f"{name}: has shape {tau.shape}; give one probability an action, {shape}")
    tau = np.where(mask, tau, 0.0)
    total = tau.sum(-1, keepdims=True)
    if not (tau >= 0).all() or not (np.abs(total - 1) < 1e-5).all():  # float32 probabilities come that near
        worst = total.flat[np.abs(total - 1).argmax()]
        raise UserError(
            f"{name}: legal actions have probabilities of sum {worst:.6g} and least {tau.min():.3g}; "
            "divide numbers of 0 or more by their sum"
        )
    low = mask & (tau < settings.anchor_floor)
    return np.where(low, settings.anchor_floor, tau / total), int(low.sum())

"""Plans orders in `pure` Diplomacy given the talk so far, pair by pair (FAIR 2022, Cicero): an intent for each message.

One unit is planned at a time. With each other unit it plays a game of two, solved by piKL under anchors that are
conditional on what the two owners said to each other, while everybody else follows their anchors. The others' orders
are drawn from these policies, and the own order is the anchored best response to them. Left out: the weights by which
FAIR 2022 lets the others' orders go together; small models know each seat's orders, and no joint policy.

A payoff is the score if the phase just planned were the game's last: every unit takes the centre that it then stands
in. That is exact in the last fall; in spring it prices a province that is held at its centre. No value is learned.

Shapes: N provinces; V other units; A orders of the own unit, B of another; D draws of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from envs.diplomacy.pure import SEASON, N, Pure
from marl.common.errors import check_counts, check_range, prefixed
from marl.planning import pikl
from marl.planning.pikl import Bools, Floats, Ints

GAME = Pure()


@dataclass(frozen=True)
class PressConfig:
    """Settings of planning in talk. Raises UserError, naming the setting, for bad values. Lambdas are in scores a nat;
    scores of a game sum to 1."""

    lambdas: tuple[float, ...] = (0.03, 0.1)  # lambda_pop, one for each type of player
    strength: float = 0.003  # lambda_agent, of the own anchored best response
    floor: float = 1e-6  # the least anchor probability that it counts
    iterations: int = 30  # of piKL
    candidates: int = 12  # likeliest orders of each unit
    others: int = 8  # draws of what the rest orders, in the games of two
    draws: int = 100  # of what everybody else orders
    plausible: float = 0.1  # a reader is expected to order only what has this share of its likeliest order
    mute: bool = False  # plans and listens, and writes to nobody

    def __post_init__(self) -> None:
        check_counts(self, ("candidates", "others", "draws"), where="cicero.press")
        check_range(self, "cicero.press", "[0, inf)", "strength")
        check_range(self, "cicero.press", "(0, 1)", "floor")
        check_range(self, "cicero.press", "[0, 1]", "plausible")
        with prefixed("cicero.press."):
            self.settings  # noqa: B018  checks lambdas and iterations

    @property
    def settings(self) -> pikl.Settings:
        """The solver's."""
        return pikl.Settings(self.iterations, self.lambdas)


@dataclass(frozen=True)
class OrderPlan:
    """A plan of the unit in `place`, against the units in `others` (V,)."""

    place: int
    orders: Ints  # (A,) of the own unit, the likeliest first
    anchor: Floats  # (A,) their probabilities given all talk
    values: Floats  # (A,) what each is expected to score
    chosen: int  # index of the own order
    others: Ints
    theirs: Ints  # (V, B) orders of each other unit
    expected: Floats  # (V, B) what it is believed to order, given what it said to the planner
    anchors: Floats  # (V, B) its anchor
    gains: Floats  # (V, A, B) the planner's payoff

    @property
    def own(self) -> int:
        return int(self.orders[self.chosen])

    def of_reader(self, place: int, plausible: float) -> int:
        """The order that the planner would have the unit in `place` give: of most value to itself, given its own order,
        among the plausible ones (`pikl.wished`)."""
        (row,) = np.flatnonzero(self.others == place)
        worth, expected, anchor = self.gains[row, self.chosen], self.expected[row], self.anchors[row]
        return int(self.theirs[row, pikl.wished(worth, expected, anchor, plausible)])


def payoffs(state: np.ndarray, orders: np.ndarray) -> Floats:
    """Scores (M, N powers) if the phase of this position (1, WIDTH) were the last, given all orders (M, N)."""
    states = np.repeat(state, len(orders), axis=0)
    states[:, SEASON] = 1
    return GAME.scores(GAME.step(states, orders))


def plan_order(
    state: np.ndarray, place: int, anchor: Floats, pairs: Floats, config: PressConfig, rng: np.random.Generator
) -> OrderPlan:
    """Plans the order of the unit in `place`.

    `anchor` (CODES,): its orders, given all that the planner knows. `pairs` (N, 2, CODES): its orders and another
    unit's, given what the two owners said to each other. There must be another unit.
    """
    owner = state[0, :N].astype(np.int64)
    me, others = owner[place], np.flatnonzero((owner >= 0) & (np.arange(N) != place))
    legal = GAME.legal(state)[0]
    own, tau = likeliest(anchor, legal[place], config.candidates)
    found = [likeliest(pairs[v, 1], legal[v], config.candidates) for v in others]  # all have as many
    theirs, taus = np.stack([codes for codes, _ in found]), np.stack([probs for _, probs in found])
    (V, B), A, M = theirs.shape, len(own), config.others

    # Games of two, while the rest follow their anchors.
    picked = pikl.sample([*taus], V * M, rng)  # (V M, V)
    joined = np.zeros((V, A, B, M, N), np.int64)
    joined[..., others] = theirs[np.arange(V), picked].reshape(V, 1, 1, M, V)
    joined[..., place] = own[:, None, None]
    for v, other in enumerate(others):
        joined[v, ..., other] = theirs[v][:, None]
    scores = payoffs(state, joined.reshape(-1, N)).reshape(V, A, B, M, N).mean(3)
    gains, yields = scores[..., me], scores[np.arange(V), ..., owner[others]]
    mine = np.maximum(pairs[others, 0][:, own], pikl.FLOOR)  # (V, A)
    game = pikl.solve([gains, yields], [mine / mine.sum(-1, keepdims=True), taus], config.settings)
    expected = game.population[1]

    # Everybody's orders at once.
    drawn = np.zeros((config.draws, N), np.int64)
    drawn[:, others] = theirs[np.arange(V), pikl.sample([*expected], config.draws, rng)]
    every = np.broadcast_to(drawn, (A, *drawn.shape)).copy()
    every[..., place] = own[:, None]
    values = payoffs(state, every.reshape(-1, N))[:, me].reshape(A, -1).mean(-1)
    chosen = int(pikl.best_response(values, tau, config.strength, config.floor))
    return OrderPlan(place, own, tau, values, chosen, others, theirs, expected, taus, gains)


def likeliest(probs: Floats, legal: Bools, most: int) -> tuple[Ints, Floats]:
    """The likeliest legal orders of (CODES,), and their probabilities, of sum 1."""
    codes: Ints = np.argsort(np.where(legal, -probs, np.inf), kind="stable")[: min(most, int(legal.sum()))]
    return codes, probs[codes] / probs[codes].sum()

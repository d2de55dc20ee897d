"""Scripted players of the maps for two in many games at once: four temperaments, with mistakes.

As `pure.py` for its map: they stand in for a population of players with habits, and are not people. Each unit goes
toward the nearest place of a kind; of two that go to the same place the second supports the first.
"""

import numpy as np
from numpy.typing import NDArray

from envs.diplomacy.adjudication import Floats, Small
from envs.diplomacy.duel import Duel

Ints = NDArray[np.int64]

TEMPERS = ("grab", "attack", "guard", "wander")
MISTAKES = 0.1  # share of orders that are anything legal


class DuelPopulation:
    """Draws a temperament for each seat of each game (`begin`), and orders for everybody (`orders`)."""

    def __init__(self, game: Duel, mistakes: float = MISTAKES) -> None:
        self.game, self.mistakes = game, mistakes
        self.tempers: Ints = np.zeros((0, 2), np.int64)
        self.weights: Floats = np.zeros((0, game.slots))

    def begin(self, games: int, rng: np.random.Generator) -> None:
        self.tempers = rng.integers(len(TEMPERS), size=(games, 2))
        self.weights = rng.random((games, self.game.slots))  # tastes: which of two places as near one prefers

    def orders(self, states: Small, rows: Ints, rng: np.random.Generator) -> Small:
        """(S, P) orders in positions of the games `rows` (S,)."""
        game = self.game
        units, forms, _ = game.parts(states)
        legal = game.legal(states)
        # Steps from where each order ends to the nearest place that its unit's player wants.
        far = np.stack(
            [self._far(states, rows, player) for player in range(2)], axis=1
        )  # (S, player, army or fleet, P)
        each = np.arange(len(states))[:, None]
        own = far[each, units.clip(0), (forms > 0).astype(np.int64)]  # (S, P of units, P)
        ends = np.take_along_axis(
            own, np.broadcast_to(game.goal, (len(states), *game.goal.shape)).astype(np.int64), axis=2
        )
        cost = np.where(legal & game.own, ends, np.inf)
        orders = np.where(units >= 0, cost.argmin(-1), -1)

        # Who would go where a friend goes supports it.
        goals = np.where(units >= 0, game.goal[np.arange(game.slots), orders], -1)
        for p in range(1, game.slots):
            here = np.flatnonzero(units[:, p] >= 0)
            same = (goals[here, :p] == goals[here, p, None]) & (units[here, :p] == units[here, p, None])
            here, first = here[same.any(1)], same[same.any(1)].argmax(1)
            fits = legal[here, p] & (game.source[p] == first[:, None]) & (game.goal[p] == goals[here, p, None])
            orders[here, p] = np.where(fits.any(1), fits.argmax(1), orders[here, p])

        anything = (rng.random(legal.shape) * legal).argmax(-1)
        orders = np.where(rng.random(orders.shape) < self.mistakes, anything, orders)
        return np.where(units >= 0, orders, -1).astype(np.int8)

    def _far(self, states: Small, rows: Ints, player: int) -> Floats:
        """Steps to the nearest place that a player wants, for armies and fleets, (S, 2, P)."""
        game = self.game
        units, _, owned = game.parts(states)
        temper = self.tempers[rows, player][:, None]
        free, theirs, mine = owned < 0, owned == 1 - player, owned == player
        wants = np.select(
            [temper == 0, temper == 1, temper == 2],
            [free | theirs, theirs, mine | (free & (game.from_home[player, game.centres] <= 2))],
            free,
        )  # (S, centres)
        wants = np.where(wants.any(1, keepdims=True), wants, ~mine)
        taken = (units[:, game.centres] == player) & (owned >= 0)  # a place that one has goes to nobody else
        steps = game.steps[:, :, game.centres] + self.weights[rows][:, None, None, game.centres]  # (S, 2, P, centres)
        wants = wants & ~(taken & mine & (temper != 2))
        return np.where(wants[:, None, None], steps, 99.0).min(-1)

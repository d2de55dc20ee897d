"""Scripted players of `pure` Diplomacy in many games at once: five temperaments, with conventions and mistakes.

They stand in for a population of players with habits. They are not people, and an imitation of them is a scripted
anchor. Their conventions look round the table from where they sit: first is who sits, or lies, next.
"""

import numpy as np
from numpy.typing import NDArray

from envs.diplomacy.pure import PLACES, N, Pure, Small

Ints = NDArray[np.int64]

TEMPERS = ("league", "avenge", "befriend", "guard", "grab")
MISTAKES = 0.1  # share of orders that are anything legal


class Population:
    """Draws a temperament for each seat of each game (`begin`), and orders for everybody (`orders`)."""

    def __init__(self, game: Pure, mistakes: float = MISTAKES) -> None:
        self.game, self.mistakes = game, mistakes
        self.tempers: Ints = np.zeros((0, N), np.int64)

    def begin(self, games: int, rng: np.random.Generator) -> None:
        self.tempers = rng.integers(len(TEMPERS), size=(games, N))

    def orders(self, states: Small, rows: Ints, rng: np.random.Generator) -> Small:
        """(S, N) orders in positions of the games `rows` (S,)."""
        table = Table(states)
        wanted = np.stack([habits(table, power) for power in range(N)], axis=1)  # (S, power, temper, place)
        units = states[:, :N]
        temper = np.take_along_axis(self.tempers[rows], units.clip(0).astype(np.int64), axis=1)  # (S, place)
        orders = wanted[np.arange(len(states))[:, None], units, temper, PLACES]
        legal = self.game.legal(states)
        anything = (rng.random(legal.shape) * legal).argmax(-1)
        allowed = np.take_along_axis(legal, orders[..., None], axis=-1)[..., 0]
        orders = np.where(allowed, orders, PLACES * (N + 1))  # hold
        orders = np.where(rng.random(orders.shape) < self.mistakes, anything, orders)
        return np.where(units >= 0, orders, -1).astype(np.int8)


class Table:
    """Facts that the temperaments look at, in S positions."""

    def __init__(self, states: Small) -> None:
        self.units, self.owned, self.hit = (states[:, k * N : (k + 1) * N].astype(np.int64) for k in range(3))
        self.centres = (self.owned[:, :, None] == PLACES).sum(1)  # (S, power)
        self.alive = (self.units[:, :, None] == PLACES).any(1)
        self.rows = np.arange(len(states))

    def leader(self, power: Ints) -> Ints:
        """Finds who else has the most centres, (S,)."""
        away = (PLACES - power[:, None]) % N
        return np.where(away > 0, self.centres * N - away, -N).argmax(1)

    def next_alive(self, power: Ints) -> Ints:
        """Finds who else has a unit, nearest round the table (S,); the power itself if nobody has."""
        away = (PLACES - power[:, None]) % N
        return np.where(self.alive, np.where(away == 0, N, away), 2 * N).argmin(1)

    def first(self, power: Ints) -> Ints:
        """Finds its unit nearest to home, (S,)."""
        return np.where(self.units == power[:, None], (PLACES - power[:, None]) % N, N).argmin(1)

    def goal(self, enemy: Ints, power: Ints) -> Ints:
        """The enemy's centre or unit that `power` would go for, (S,): that nearest to the enemy's home."""
        theirs = (self.owned == enemy[:, None]) | (self.units == enemy[:, None])
        theirs &= self.units != power[:, None]
        return np.where(theirs, (PLACES - enemy[:, None]) % N, N).argmin(1)


def habits(table: Table, power: int) -> Ints:
    """The orders (S, temper, place) that a power of each temperament would give to a unit in each place."""
    me = np.full(len(table.rows), power)
    mine, leader, friend = table.first(me), table.leader(me), table.next_alive(me)
    spear = table.next_alive(leader)
    hit = table.hit[:, power]
    known = (hit >= 0) & (table.centres[table.rows, hit] > 0)
    enemy = np.where(known, hit, leader)
    rival = table.leader(friend)
    rival = np.where(rival == power, table.next_alive(friend), rival)
    vacant = (table.units < 0) & (table.owned != power)
    nearest = np.where(vacant, (PLACES - power) % N, N).argmin(1)
    revenge = table.goal(enemy, me)
    plans = [
        (table.first(spear), table.goal(leader, spear)),  # against the leader, and who sits next to it goes first
        (mine, revenge),  # against who attacked last
        (table.first(friend), table.goal(rival, friend)),  # what the neighbour is likely to do
        (mine, mine),  # stay
        (mine, np.where(vacant.any(1), nearest, revenge)),  # what is free
    ]
    return np.stack([(source * N + goal)[:, None] + 0 * PLACES for source, goal in plans], axis=1)

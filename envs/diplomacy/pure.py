"""Many positions of `pure` Diplomacy at once, as arrays: what planning steps through by the thousand.

Seven provinces, all next to one another, each the home of a power and a centre. `tests/envs/diplomacy/test_pure.py`
holds it to the adjudicator of the package (`board.py`), which it does not import.

A position is a row of WIDTH small integers: who has a unit in each province (-1: nobody), who owns it, who last moved
against each power, the season (0 spring, 1 fall), the years played. An order is a number below CODES: 7 q + r, "the
unit in q ends in r". Given to the unit in p it is a hold or a move if q = p, else support to hold (r = q) or to move.
Positions are those before moves. In between, by rule: a dislodged unit goes home, or to the next province that it owns,
or to the next one, counted from its home; what can be built is built.
Left out: choices in retreats and adjustments (on this map nobody ever has to disband in winter).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.diplomacy.adjudication import Bools, Floats, Small, adjudicate, any_of, find

POWERS = ("AUSTRIA", "ENGLAND", "FRANCE", "GERMANY", "ITALY", "RUSSIA", "TURKEY")
HOMES = ("VIE", "LON", "PAR", "BER", "ROM", "MOS", "CON")  # province p is the home of power p
N = len(POWERS)
CODES = N * N
WIDTH = 3 * N + 2
WIN = N // 2 + 1  # centres of a solo
SEASON, YEAR = 3 * N, 3 * N + 1
FEATURES = 3 * N * (N + 1) + 2
FROM, TO = np.divmod(np.arange(CODES, dtype=np.int8), np.int8(N))
PLACES = np.arange(N, dtype=np.int8)


def order_text(place: int, code: int) -> str:
    """The order of the unit in a province as the package writes it, e.g. A PAR S A LON - BER."""
    own, source, goal = f"A {HOMES[place]}", HOMES[FROM[code]], HOMES[TO[code]]
    if FROM[code] == place:
        return f"{own} H" if TO[code] == place else f"{own} - {goal}"
    return f"{own} S A {source}" if source == goal else f"{own} S A {source} - {goal}"


class Pure:
    """The game, without any state of its own; `years`: when it ends, unless by a solo."""

    players, slots, codes, features_size = N, N, CODES, FEATURES

    def __init__(self, years: int = 8) -> None:
        if not 1 <= years <= 100:
            raise ValueError(f"years must be from 1 to 100, got {years}.")
        self.years = years

    def start(self, count: int) -> Small:
        """First positions, (count, WIDTH)."""
        row = np.concatenate([PLACES, PLACES, np.full(N, -1), [0, 0]])
        return np.tile(row.astype(np.int8), (count, 1))

    def owner(self, states: Small) -> Small:
        """The power whose unit stands in each province, (B, N); -1 for none."""
        return states[:, :N]

    def legal(self, states: Small) -> Bools:
        """The orders that each unit can be given, (B, N, CODES): 43 while all seven units live."""
        here = states[:, :N] >= 0  # (B, N)
        own = PLACES[:, None] == FROM  # (N, CODES)
        helps = ~own & (PLACES[:, None] != TO)
        return here[:, :, None] & (own | (helps & here[:, FROM][:, None, :]))

    def over(self, states: Small) -> Bools:
        return (states[:, YEAR] >= self.years) | (count(states[:, N : 2 * N].T).max(0) >= WIN)

    def scores(self, states: Small) -> Floats:
        """(B, N): 1 for a solo, else squared centres over their sum."""
        centres = count(states[:, N : 2 * N].T).T.astype(float)
        solo = centres.max(1, keepdims=True) >= WIN
        return np.where(solo, centres >= WIN, centres**2 / (centres**2).sum(1, keepdims=True))

    def features(self, states: Small) -> NDArray[np.float32]:
        """(B, FEATURES): who is where, who owns what, who was last attacked by whom (all one-hot), season and time."""
        kinds = np.arange(-1, N, dtype=np.int8)
        hot = (states[:, : 3 * N, None] == kinds).reshape(len(states), -1)
        time = np.stack([states[:, SEASON], states[:, YEAR] / self.years], axis=1)
        return np.concatenate([hot, time], axis=1, dtype=np.float32)

    def turned(
        self, states: Small, orders: Small, scores: Floats, by: NDArray[np.int64]
    ) -> tuple[Small, Small, Floats]:
        """The same positions with everybody `by` (B,) seats further: on this map nobody could tell them apart."""
        by = by[:, None] % N
        back = (np.arange(N) - by) % N
        three = np.concatenate([back, back + N, back + 2 * N], axis=1)
        moved = np.take_along_axis(states[:, : 3 * N], three, axis=1)
        moved = np.where(moved >= 0, (moved + by) % N, -1)
        rows = np.take_along_axis(orders, back, axis=1)
        codes = (FROM[rows] + by) % N * N + (TO[rows] + by) % N
        codes = np.where(rows >= 0, codes, rows)
        return (
            np.concatenate([moved, states[:, 3 * N :]], axis=1).astype(np.int8),
            codes.astype(np.int8),
            np.take_along_axis(scores, back, axis=1),
        )

    def step(self, states: Small, orders: NDArray[np.integer]) -> Small:
        """The positions before the next moves, given an order for each unit (B, N); the others' orders are ignored."""
        columns = np.ascontiguousarray(states.T)  # the batch comes last, where numpy is fast
        units, owned, blamed = (columns[k * N : (k + 1) * N] for k in range(3))  # (N, B)
        codes = np.ascontiguousarray(orders.T.astype(np.int8))
        places, fall = PLACES[:, None], columns[SEASON] == 1
        moves = (units >= 0) & (FROM[codes] == places) & (TO[codes] != places)
        goes = moves & (TO[codes] == PLACES[:, None, None])  # (to, from, B)
        won = adjudicate(units, FROM[codes], TO[codes], places)

        # Who was attacked by whom: where its unit stood, or in its centre. Of several the last province counts.
        owners = np.where(any_of(goes, owned >= 0), find(goes, owned), -1)
        stood = np.where(any_of(goes, units >= 0), find(goes, units), -1)
        for p in range(N):
            for victim in (stood[p], owners[p]):
                blamed = np.where((victim == places) & (victim != units[p]), units[p], blamed)

        # Moves, and retreats by rule.
        comes = goes & won
        taken = comes.any(1)
        entered = (comes * units).sum(1, dtype=np.int8)
        after = np.where(taken, entered, np.where(won, -1, units))
        fled = taken & (units >= 0) & ~won
        if fled.any():
            origin = (comes * places).sum(1, dtype=np.int8)
            after = _retreat(after, units, owned, fled, origin, (goes & ~won).any(1))

        # A fall's end: centres change hands, and homes build.
        holds = np.where(fall & (after >= 0), after, owned)
        builds = fall & (after < 0) & (holds == places) & (count(holds) > count(after))
        after = np.where(builds, places, after)
        rows = [after, holds, blamed, ~fall[None], columns[YEAR] + fall[None]]
        return np.ascontiguousarray(np.concatenate(rows, dtype=np.int8, casting="unsafe").T)


def _retreat(after: Small, units: Small, owned: Small, fled: Bools, origin: Small, bounced: Bools) -> Small:
    """Sets dislodged units where the rule of this module sends them. Two that meet are lost, and one that has no way.

    All arrays are (N, B)."""
    places, games = np.nonzero(fled)
    powers = units[places, games]
    free = (after[:, games] < 0) & ~bounced[:, games]  # (N, K)
    each = np.arange(len(games))
    free[origin[places, games], each] = False
    rank = (PLACES[:, None] - powers) % N + np.where(owned[:, games] == powers, 0, N)
    rank[powers, each] = -1  # home first
    goal = np.where(free, rank, 99).argmin(0)
    has_way = free.any(0)
    games, powers, goal = games[has_way], powers[has_way], goal[has_way]
    arrivals = np.zeros(after.shape, np.int8)
    np.add.at(arrivals, (goal, games), 1)
    alone = arrivals[goal, games] == 1
    after = after.copy()
    after[goal[alone], games[alone]] = powers[alone]
    return after


def count(owners: Small) -> Small:
    """(power, B): how many of the (N, B) each power has."""
    return (owners == PLACES[:, None, None]).sum(1, dtype=np.int8)

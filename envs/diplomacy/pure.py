"""Many positions of `pure` Diplomacy at once, as arrays: what planning steps through by the thousand.

Seven provinces, all next to one another, each the home of a power and a centre. `tests/envs/diplomacy/test_pure.py`
holds it to the adjudicator of the package (`board.py`), which it does not import.

A position is a row of WIDTH small integers: who has a unit in each province (-1: nobody), who owns it, who last moved
against each power, the season (0 spring, 1 fall), the years played. An order is a number below CODES: 7 q + r, "the
unit in q ends in r". Given to the unit in p it is a hold or a move if q = p, and else support to hold (r = q) or to move.
Positions are those before moves. In between, by rule: a dislodged unit goes home, or to the next province that it owns,
or to the next one, counted from its home; what can be built is built.
Left out: choices in retreats and adjustments (on this map nobody ever has to disband in winter).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Small = NDArray[np.int8]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

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
        helps = ~own & (TO != PLACES[:, None])
        return here[:, :, None] & (own | (helps & here[:, FROM][:, None, :]))

    def over(self, states: Small) -> Bools:
        return (states[:, YEAR] >= self.years) | (self._centres(states).max(1) >= WIN)

    def scores(self, states: Small) -> Floats:
        """(B, N): 1 for a solo, else squared centres over their sum."""
        centres = self._centres(states).astype(float)
        solo = centres.max(1, keepdims=True) >= WIN
        return np.where(solo, centres >= WIN, centres**2 / (centres**2).sum(1, keepdims=True))

    @staticmethod
    def _centres(states: Small) -> NDArray[np.int64]:
        return (states[:, N : 2 * N, None] == PLACES).sum(1)

    def features(self, states: Small) -> NDArray[np.float32]:
        """(B, FEATURES): who is where, who owns what, who was last attacked by whom (all one-hot), season and time."""
        kinds = np.arange(-1, N, dtype=np.int8)
        hot = (states[:, : 3 * N, None] == kinds).reshape(len(states), -1)
        time = np.stack([states[:, SEASON], states[:, YEAR] / self.years], axis=1)
        return np.concatenate([hot, time], axis=1, dtype=np.float32)

    def turned(self, states: Small, orders: Small, scores: Floats, by: NDArray[np.int64]) -> tuple[Small, Small, Floats]:
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

    def step(self, states: Small, orders: Small) -> Small:
        """The positions before the next moves, given an order for each unit (B, N); the others' orders are ignored."""
        units, owned, hit = states[:, :N], states[:, N : 2 * N], states[:, 2 * N : 3 * N]
        orders = np.where(units >= 0, orders, 0)
        moves = (FROM[orders] == PLACES) & (TO[orders] != PLACES) & (units >= 0)
        to = np.where(moves, TO[orders], PLACES)  # (B, N)
        won = adjudicate(units, orders)
        goes = (to[:, :, None] == PLACES) & moves[:, :, None]  # (B, from, to)

        # Who was attacked by whom: where its unit stood, or in its centre. Of several the last province counts.
        blamed = hit.copy()
        for p in range(N):
            for victims in (units, owned):
                victim = np.take_along_axis(victims, to[:, p : p + 1], axis=1)[:, 0]
                rows = np.flatnonzero(moves[:, p] & (victim >= 0) & (victim != units[:, p]))
                blamed[rows, victim[rows]] = units[rows, p]

        # Moves, and retreats by rule.
        comes = goes & won[:, :, None]
        taken = comes.any(1)
        origin = np.where(taken, comes.argmax(1), -1)  # (B, N): from where a province was entered
        after = np.where(taken, np.take_along_axis(units, origin.clip(0), axis=1), np.where(won, -1, units))
        fled = taken & (units >= 0) & ~won
        if fled.any():
            after = retreat(after, units, owned, fled, origin, (goes & ~won[:, :, None]).any(1))

        # A fall's end: centres change hands, and homes build.
        fall = states[:, SEASON : SEASON + 1] == 1
        holds = np.where(fall & (after >= 0), after, owned)
        room = (holds[:, :, None] == PLACES).sum(1) > (after[:, :, None] == PLACES).sum(1)
        builds = fall & (after < 0) & (holds == PLACES) & room
        after = np.where(builds, PLACES, after)
        year = states[:, YEAR : YEAR + 1] + fall
        return np.concatenate([after, holds, blamed, ~fall, year], axis=1).astype(np.int8)


def retreat(after: Small, units: Small, owned: Small, fled: Bools, origin: Small, bounced: Bools) -> Small:
    """Sets dislodged units where the rule of this module sends them; two that meet are lost, as is who has no way."""
    rows, places = np.nonzero(fled)
    powers = units[rows, places]
    free = (after[rows] < 0) & ~bounced[rows]  # (K, N)
    free[np.arange(len(rows)), origin[rows, places]] = False
    rank = (PLACES - powers[:, None]) % N + np.where(owned[rows] == powers[:, None], 0, N)
    rank[np.arange(len(rows)), powers] = -1  # home first
    goal = np.where(free, rank, 99).argmin(1)
    rows, powers, goal = (each[free.any(1)] for each in (rows, powers, goal))
    count = np.zeros(after.shape, np.int8)
    np.add.at(count, (rows, goal), 1)
    alone = count[rows, goal] == 1
    after = after.copy()
    after[rows[alone], goal[alone]] = powers[alone]
    return after


def adjudicate(units: Small, orders: Small) -> Bools:
    """Which moves succeed, (B, N) by the province that they leave.

    `units`: who is where; `orders`: codes of units. Bounds on all strengths are narrowed until every move is decided; of
    moves in a circle, which alone stay open, all succeed. Source: Kruijswijk, "The math of adjudication".
    Inside, the batch is the last axis, where numpy is fast: (N, B), and (N, N, B) for what p does to q.
    """
    units, orders = np.ascontiguousarray(units.T), np.ascontiguousarray(orders.T)
    here, places = units >= 0, PLACES[:, None]
    source, goal = FROM[orders], TO[orders]
    moves = here & (source == places) & (goal != places)
    to = np.where(moves, goal, places)
    at = to == PLACES[:, None, None]  # (q, p, B): p stands or moves into q
    helps = (source[:, None] == places) & here[:, None]  # (p, q, B): p's order is about q's unit
    # What supports, and what cuts it for sure: an attack by another power from anywhere but where support is directed.
    supports = here & (source != places) & (_find(helps.swapaxes(0, 1), to) == goal) & _any(helps.swapaxes(0, 1), here)
    foreign = at & moves & (units != units[:, None])  # (at, from, B)
    directed = goal[:, None] == places  # (p, q, B)
    supports &= ~(foreign & ~directed).any(1)
    threatened = supports & (foreign & directed).any(1)
    against = np.where(_any(at, here), _find(at, units), -1)  # who stands where a unit moves to
    counts = helps & (units[:, None] != against)  # nobody helps to dislodge a unit of his own
    empty, kin, mover = against < 0, against == units, _any(at, moves)
    facing = moves & mover & (_find(at, to) == places)  # head to head
    rivals = (to[:, None] == to) & moves[:, None] & moves & ~np.eye(N, dtype=np.bool_)[..., None]

    won, lost = np.zeros_like(moves), ~moves
    while True:
        # Support that is attacked from where it is directed is cut if that attack dislodges the supporter.
        sure = supports & ~(threatened & ~(directed & lost).any(1))
        maybe = supports & ~(threatened & (directed & won).any(1))
        low, high, low_in, high_in = (
            1 + (given[:, None] & about).sum(0, dtype=np.int8) for about in (helps, counts) for given in (sure, maybe)
        )
        goes, stays = _any(at, won), _any(at, lost)
        attack_low = np.where(empty | (goes & ~facing), low, np.where(kin, 0, low_in))
        attack_high = np.where(empty | ~(stays | facing), high, np.where(kin, 0, high_in))
        hold_low = np.where(mover & ~facing, stays, _find(at, low))
        hold_high = np.where(mover & ~facing, ~goes, _find(at, high))
        # A unit that is dislodged from where it moves to prevents nothing there.
        rival_low = (rivals * np.where(facing & ~stays, 0, low)[:, None]).max(0)
        rival_high = (rivals * np.where(facing & goes, 0, high)[:, None]).max(0)
        wins = moves & (attack_low > np.where(empty, 0, hold_high)) & (attack_low > rival_high)
        fails = moves & ((attack_high <= np.where(empty, 0, hold_low)) | (attack_high <= rival_low))
        undecided = ~(won | lost | wins | fails)
        if not undecided.any():
            return np.ascontiguousarray((won | wins).T)
        stuck = ~((wins & ~won) | (fails & ~lost)).any(0)
        won |= wins | (undecided & stuck)
        lost |= fails


def _any(where: Bools, flags: Bools) -> Bools:
    """(N, B): for each column of `where` (N, N, B), if a flag of its marked rows (N, B) is set."""
    return np.bitwise_or.reduce(where & flags[:, None], axis=0)


def _find(where: Bools, values: Small) -> Small:
    """(N, B): for each column of `where` (N, N, B), the value (N, B) of its one marked row."""
    return np.add.reduce(where * values[:, None], axis=0, dtype=np.int8)

"""Adjudication of moves as arrays, many games at once: holds, moves and supports of units, without convoys.

`tests/envs/diplomacy` holds it to the adjudicator of the package (`board.py`), which it does not import.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Small = NDArray[np.int8]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


def adjudicate(units: Small, source: Small, goal: Small, place: Small) -> Bools:
    """Returns the moves that succeed, (U, B): of U slots for units in B games.

    `units`: whose unit it is, -1 for none; `place` (U, B or 1): the province where it stands. "The unit in `source`
    ends in `goal`" is a hold or a move if `source` is its own place, else a support. Bounds on all strengths are
    narrowed until every move is decided; of moves in a circle, which alone stay open, all succeed. Source: Kruijswijk,
    "The math of adjudication".
    """
    here = units >= 0
    moves = here & (source == place) & (goal != place)
    to = np.where(moves, goal, place)
    at = to == place[:, None]  # (q, p, B): p stands or moves to where q stands
    helps = (source[:, None] == place) & here[:, None]  # (p, q, B): p's order is about q's unit
    # Supports, and what surely cuts them: an attack by another power from anywhere but where support is directed.
    supports = here & (source != place) & (find(helps.swapaxes(0, 1), to) == goal) & any_of(helps.swapaxes(0, 1), here)
    foreign = at & moves & (units != units[:, None])  # (at, from, B)
    directed = goal[:, None] == place  # (p, q, B)
    supports &= ~(foreign & ~directed).any(1)
    threatened = supports & (foreign & directed).any(1)
    against = np.where(any_of(at, here), find(at, units), -1)  # who stands where a unit moves to
    counts = helps & (units[:, None] != against)  # nobody helps to dislodge a unit of his own
    empty, kin, mover = against < 0, against == units, any_of(at, moves)
    facing = moves & mover & (find(at, to) == place)  # head to head
    rivals = (to[:, None] == to) & moves[:, None] & moves & ~np.eye(len(units), dtype=np.bool_)[..., None]

    won, lost = np.zeros_like(moves), ~moves
    while True:
        # Support that is attacked from where it is directed is cut if that attack dislodges the supporter.
        sure = supports & ~(threatened & ~(directed & lost).any(1))
        maybe = supports & ~(threatened & (directed & won).any(1))
        low, high, low_in, high_in = (
            1 + (given[:, None] & about).sum(0, dtype=np.int8) for about in (helps, counts) for given in (sure, maybe)
        )
        goes, stays = any_of(at, won), any_of(at, lost)
        attack_low = np.where(empty | (goes & ~facing), low, np.where(kin, 0, low_in))
        attack_high = np.where(empty | ~(stays | facing), high, np.where(kin, 0, high_in))
        hold_low = np.where(mover & ~facing, stays, find(at, low))
        hold_high = np.where(mover & ~facing, ~goes, find(at, high))
        # A unit that is dislodged from where it moves to prevents nothing there.
        rival_low = (rivals * np.where(facing & ~stays, 0, low)[:, None]).max(0)
        rival_high = (rivals * np.where(facing & goes, 0, high)[:, None]).max(0)
        wins = moves & (attack_low > np.where(empty, 0, hold_high)) & (attack_low > rival_high)
        fails = moves & ((attack_high <= np.where(empty, 0, hold_low)) | (attack_high <= rival_low))
        undecided = ~(won | lost | wins | fails)
        if not undecided.any():
            return won | wins
        stuck = ~((wins & ~won) | (fails & ~lost)).any(0)
        won |= wins | (undecided & stuck)
        lost |= fails


def any_of(where: Bools, flags: Bools) -> Bools:
    """(U, B): for each column of `where` (U, U, B), if a flag of its marked rows (U, B) is set."""
    return np.bitwise_or.reduce(where & flags[:, None], axis=0)


def find(where: Bools, values: Small) -> Small:
    """(U, B): for each column of `where` (U, U, B), the value (U, B) of its one marked row."""
    return np.add.reduce(where * values[:, None], axis=0, dtype=np.int8)

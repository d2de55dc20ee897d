"""An order as one to three choices of at most 26 options: what a unit does, then for a support or convoy, what of.

On `pure` the first choice has 13 options (hold, move to X, support X's unit) and the second 6 (hold, move to Y).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from envs.core import Style
from envs.diplomacy.board import WAIVE

MOST = 26  # options of a choice: letters can stand for them
MORE = "more"
COMPACT_WAIVE = "waive"

Branches = Mapping[str, tuple[str, ...]]  # the orders that each option leaves


@lru_cache(maxsize=8192)
def branches(orders: tuple[str, ...], style: Style) -> Branches:
    """The options of the next choice among these orders, in the words of the style, and the orders that each leaves.

    Where there are too many, verbs are chosen first, and then as many as can be, with `more` for the others.
    """
    groups = _grouped(orders, _stem)
    whole = len(groups) == 1  # all begin alike: the choice is of what is supported or convoyed
    if whole:
        groups = {order: (order,) for order in orders}
    elif len(groups) > MOST and 1 < len(verbs := _grouped(orders, _verb)) <= MOST:
        groups = verbs
    if len(groups) > MOST:
        items = list(groups.items())
        rest = tuple(order for _, own in items[MOST - 1 :] for order in own)
        groups = dict(items[: MOST - 1]) | {MORE: rest}
    if style is not Style.COMPACT:
        return groups
    one = len({order[:5] for order in orders}) == 1  # of one unit
    return {_in_compact(key, whole, one): own for key, own in groups.items()}


def _grouped(orders: Sequence[str], key: Callable[[str], str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for order in orders:
        found[key(order)] = (*found.get(key(order), ()), order)
    return found


def _stem(order: str) -> str:
    words = order.split()
    return " ".join(words[:5]) if len(words) > 4 and words[2] in "SC" else order


def _verb(order: str) -> str:
    return " ".join(order.split()[:3])


def _in_compact(key: str, whole: bool, one: bool) -> str:
    """An option in compact style: H, -BER (to move), =BER (by convoy), +LON (to support), ~LON (to convoy), D; of
    builds and disbandments, the place, with ~ before it for a fleet that is built."""
    if key in (MORE, WAIVE):
        return key.lower()
    words = key.split()
    if whole and len(words) > 4:
        return f"-{words[6]}" if len(words) > 6 else "H"
    if len(words) == 3:
        last = words[2]
        if last == "B" or (last == "D" and not one):
            return f"~{words[1]}" if last == "B" and words[0] == "F" else words[1]
        return {"S": "+", "C": "~"}.get(last, last)
    sign = {"-": "=" if words[-1] == "VIA" else "-", "R": "-", "S": "+", "C": "~"}[words[2]]
    return f"{sign}{words[4] if words[2] in 'SC' else words[3]}"


def in_compact(order: str) -> str:
    """A whole order in compact style: place, what it does, and for a support or convoy, of what."""
    words = order.split()
    if order == WAIVE:
        return COMPACT_WAIVE
    place = f"~{words[1]}" if words[0] == "F" else words[1]
    if len(words) == 3:
        return f"{place} {words[2]}"
    first = _in_compact(_stem(order), whole=False, one=True)
    return f"{place} {first} {_in_compact(order, whole=True, one=True)}" if words[2] in "SC" else f"{place} {first}"

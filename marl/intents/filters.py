"""Refuses messages that an agent drew, in the published order: repetition, nonsense, correspondence, value.

Each is one function of what is known of the candidates; `agent.py` draws, counts and says who refused what.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
REPETITION, NONSENSE, CORRESPONDENCE, VALUE = ORDER = ("repetition", "nonsense", "correspondence", "value")
SHORT = 2  # words of a short message


def repeats(message: str, before: Sequence[str]) -> bool:
    """Tells whether the speaker has said this before, or says something short right after something short."""
    words = message.lower().split()
    if any(words == other.lower().split() for other in before):
        return True
    return bool(before) and len(words) <= SHORT and len(before[-1].split()) <= SHORT


def betrays(before: float, after: float, least: float) -> bool:
    """Tells whether a message makes the speaker's own intent less likely by more than `-least` (FAIR 2022: -.005).

    `before`, `after`: the action model's probability of the intended claim without and with the message.
    """
    return after - before < least


def poorest(values: Sequence[float], kept: float) -> list[bool]:
    """Marks the candidates of least value: all but the best share `kept` of them, of which there is at least one.

    Equal values are kept or left out together.
    """
    if not values:
        return []
    order = np.sort(np.array(values))[::-1]
    least = order[max(int(np.ceil(kept * len(values))), 1) - 1]
    return [bool(value < least) for value in values]

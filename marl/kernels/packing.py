"""Rows of different lengths in passes: padding is lost work, and so is every further pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np


def cheapest_groups(widths: Sequence[int], budget: float, overhead: float) -> list[range]:
    """Splits items, which come in order of falling width, into ranges of neighbours, padded to the first's width.

    Of all ways to do so the cheapest, where a range costs its padded size and `overhead`. No range of several items has
    a padded size above `budget`.
    """
    wide = np.asarray(widths, dtype=np.float64)
    costs = np.zeros(len(wide) + 1)  # of the best split of the first so many items
    starts = np.zeros(len(wide) + 1, dtype=np.int64)  # where its last range starts
    first = 0
    for end in range(1, len(wide) + 1):
        while first < end - 1 and (end - first) * wide[first] > budget:  # nor does it fit later, with more items
            first += 1
        sizes = np.arange(end - first, 0, -1) * wide[first:end]
        found = costs[first:end] + sizes + overhead
        starts[end] = end - 1 - int(found[::-1].argmin())  # of equals the shortest range
        costs[end] = found[starts[end] - first]
    ranges: list[range] = []
    end = len(wide)
    while end:
        ranges.append(range(int(starts[end]), end))
        end = int(starts[end])
    return ranges[::-1]


def even_groups(lengths: Sequence[int], budget: int) -> list[range]:
    """Splits items into ranges of neighbours of about the same total length: no more of them than there are budgets in
    the whole. A range is longer than an even share, which is at most the budget, by less than its first item."""
    if not lengths:
        return []
    ends = np.cumsum(lengths)
    shares = -(-ends[-1] // budget)
    which = (ends - 1) * shares // ends[-1]  # where an item's end lies
    cuts = [0, *(np.flatnonzero(np.diff(which)) + 1).tolist(), len(ends)]
    return [range(start, end) for start, end in pairwise(cuts)]

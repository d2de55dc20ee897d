"""Rows of different lengths in passes: padding is lost work, and so is every further pass."""

from __future__ import annotations

import math
from collections.abc import Sequence


def cheapest_groups(widths: Sequence[int], budget: float, overhead: float) -> list[range]:
    """Splits items, which come in order of falling width, into ranges of neighbours, padded to the first's width.

    Of all ways to do so the cheapest, where a range costs its padded size and `overhead`. No range of several items has
    a padded size above `budget`.
    """
    costs, starts = [0.0], [0]  # of the best split of the first so many items, and where its last range starts
    for end in range(1, len(widths) + 1):
        cost, start = math.inf, end - 1
        for first in range(end - 1, -1, -1):
            size = (end - first) * widths[first]
            if size > budget and end - first > 1:
                break
            if costs[first] + size + overhead < cost:
                cost, start = costs[first] + size + overhead, first
        costs.append(cost)
        starts.append(start)
    ranges: list[range] = []
    end = len(widths)
    while end:
        ranges.append(range(starts[end], end))
        end = starts[end]
    return ranges[::-1]

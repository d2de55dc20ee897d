"""Groups rows of different lengths into padded passes: padding is lost work, and so is every further pass."""

from collections.abc import Sequence

PASS = 256  # padded tokens that a further pass may save before it pays, measured on a CPU


def groups_within(lengths: Sequence[int], budget: int, overhead: int = PASS) -> list[range]:
    """Splits items, ordered by falling length, into ranges of neighbours that are padded to the longest.

    A range ends where its padded size would exceed `budget`, or its padding `overhead`.
    """
    groups: list[range] = []
    start = padding = 0
    for i, length in enumerate(lengths):
        padding += lengths[start] - length
        if i > start and ((i + 1 - start) * lengths[start] > budget or padding > overhead):
            groups.append(range(start, i))
            start, padding = i, 0
    return [*groups, range(start, len(lengths))] if lengths else []

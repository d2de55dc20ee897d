"""Groups of rows against every way to make them, by brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl.kernels.packing import cheapest_groups, even_groups


def cost(groups: Sequence[Sequence[int]], budget: float, overhead: float) -> float:
    """Of groups of widths; inf where a group of several is over the budget."""
    padded = [len(group) * max(group) for group in groups]
    fits = all(p <= budget or len(group) == 1 for p, group in zip(padded, groups, strict=True))
    return sum(padded) + len(groups) * overhead if fits else math.inf


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(1, 60), st.integers(0, 20))
def test_no_other_groups_of_neighbours_cost_less(widths: list[int], budget: int, overhead: int) -> None:
    widths = sorted(widths, reverse=True)
    found = cheapest_groups(widths, budget, overhead)
    assert [i for group in found for i in group] == list(range(len(widths)))
    ways = []
    for cuts in itertools.product([False, True], repeat=len(widths) - 1):
        ends = [0, *(i + 1 for i, here in enumerate(cuts) if here), len(widths)]
        ways.append([widths[a:b] for a, b in itertools.pairwise(ends)])
    cheapest = min(cost(way, budget, overhead) for way in ways)
    assert cost([[widths[i] for i in group] for group in found], budget, overhead) == cheapest


# One pass less for 3 tokens more, and yet another for 18.
@pytest.mark.parametrize(("overhead", "expected"), [(1, [1, 2, 1]), (7, [1, 3]), (100, [4])])
def test_a_costly_pass_is_worth_more_padding(overhead: float, expected: list[int]) -> None:
    assert [len(group) for group in cheapest_groups([10, 4, 4, 1], 100, overhead)] == expected


def test_nothing_is_no_group_and_what_is_over_the_budget_goes_alone() -> None:
    assert cheapest_groups([], 10, 1) == []
    assert cheapest_groups([30, 20, 4], 10, 1000) == [range(1), range(1, 2), range(2, 3)]


@given(st.lists(st.integers(1, 60), max_size=12), st.integers(1, 120))
def test_even_groups_are_as_few_as_there_are_budgets_and_about_as_long(lengths: list[int], budget: int) -> None:
    groups = even_groups(lengths, budget)
    assert [i for group in groups for i in group] == list(range(len(lengths)))
    shares = -(-sum(lengths) // budget)
    assert len(groups) <= shares
    for group in groups:
        assert sum(lengths[i] for i in group) < sum(lengths) / shares + lengths[group[0]]


def test_what_is_over_the_budget_is_read_in_halves_of_it() -> None:
    assert even_groups([1] * 10, 100) == [range(10)]
    assert even_groups([1] * 110, 100) == [range(55), range(55, 110)]  # not a hundred, and ten alone
    assert even_groups([70, 70, 70], 60) == [range(1), range(1, 2), range(2, 3)]

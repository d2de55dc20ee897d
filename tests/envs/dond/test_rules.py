"""Contexts and outcomes of Deal or No Deal against brute force and published numbers.

Published numbers need selfplay.txt and data.txt of Lewis et al. 2017: put their folder into DOND_DATA.
"""

import os
from collections import Counter
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs import dond_v0 as dond
from envs.dond import environment, rules
from envs.dond.rules import Context

HERE = Path(__file__).parent
DATA = Path(os.environ.get("DOND_DATA", HERE.parents[2] / ".." / "shared" / "data" / "dond"))
START: dict[str, Any] = {"counts": (1, 1, 3), "values": ((0, 1, 3), (1, 3, 2)), "first": 0}
GAME = Context(START["counts"], START["values"])


@pytest.fixture(scope="module")
def published() -> tuple[Context, ...]:
    path = DATA / "selfplay.txt"
    if not path.exists():
        pytest.skip(f"needs the published selfplay.txt: no file {path}; set DOND_DATA to its folder")
    return rules.read_contexts(path)


def brute_contexts() -> set[tuple[Any, Any, Any]]:
    """The three criteria of the paper, spelled out without the module's functions."""
    found = set()
    for counts in product(range(1, 5), repeat=3):
        if not 5 <= sum(counts) <= 7:
            continue
        own = [v for v in product(range(11), repeat=3) if sum(n * w for n, w in zip(counts, v, strict=True)) == 10]
        for a, b in product(own, own):
            every_item_valued = all(max(x, y) > 0 for x, y in zip(a, b, strict=True))
            shares = product(*(range(n + 1) for n in counts))
            both_reach_10 = any(
                sum(n * x for n, x in zip(share, a, strict=True)) == 10
                and sum((m - n) * y for m, n, y in zip(counts, share, b, strict=True)) == 10
                for share in shares
            )
            if every_item_valued and not both_reach_10:
                found.add((counts, a, b))
    return found


# --- Contexts ---------------------------------------------------------------------------------------------------------
def test_contexts_are_all_that_the_criteria_allow() -> None:
    games = rules.contexts()
    assert {(g.counts, *g.values) for g in games} == brute_contexts()
    assert len(games) == len(set(games)) == 5295
    assert len({(g.counts, frozenset(g.values)) for g in games}) == 2706
    assert rules.contexts() is games
    assert np.mean([rules.best_score(g, 0) for g in games]) == pytest.approx(7.5292, abs=5e-5)  # published
    assert max(rules.best_joint(g) for g in games) == 19
    sizes = {len(rules.allocations(g.counts)) for g in games}
    assert (min(sizes), max(sizes)) == (16, 36)
    vectors = {len(rules.value_vectors(g.counts)) for g in games}
    assert (min(vectors), max(vectors)) == (9, 26)


@pytest.mark.parametrize(
    ("counts", "values", "rule"),
    [
        ((0, 2, 3), ((0, 2, 2), (0, 2, 2)), "Each count must be 1 to 4"),
        ((5, 1, 1), ((1, 1, 4), (1, 1, 4)), "Each count must be 1 to 4"),
        ((1, 1, 1), ((0, 1, 9), (1, 3, 6)), "must hold 5 to 7 items"),
        ((4, 3, 1), ((1, 1, 3), (1, 1, 3)), "must hold 5 to 7 items"),
        ((1, 1, 3), ((0, 1, 2), (1, 3, 2)), "worth 10 points to each player.*player_0"),
        ((1, 1, 3), ((0, 1, 3), (-2, 3, 3)), "Values must be 0 or more.*player_1"),
        ((1, 1, 3), ((0, 10, 0), (0, 1, 3)), "worth something to at least one"),
        ((1, 1, 3), ((10, 0, 0), (0, 1, 3)), "worth something to both"),
    ],
)
def test_a_context_says_which_rule_it_breaks(counts: Any, values: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Context(counts, values)


def test_read_contexts(tmp_path: Path) -> None:
    file = tmp_path / "games.txt"
    file.write_text("1 0 1 1 3 3\n1 1 1 3 3 2\n1 0 1 1 3 3\n1 1 1 0 3 3\n")
    assert rules.read_contexts(file) == (GAME, Context((1, 1, 3), ((0, 1, 3), (1, 0, 3))))


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("", 1, "six whole numbers"),
        ("1 0 1 1 3 3\n1 1 1 3 3\n", 2, "six whole numbers"),
        ("1 0 1 1 3 3\n\n1 1 1 3 3 2\n", 2, "six whole numbers"),
        ("1 0 1 x 3 3\n1 1 1 3 3 2\n", 1, "six whole numbers"),
        ("1 0 1 -1 3 3\n1 1 1 3 3 2\n", 1, "six whole numbers"),
        ("1 0 1 1 3 3\n1 1 1 3 3 2\n1 0 1 1 3 3\n", 3, "one more line"),
        ("1 0 1 1 3 3\n1 1 2 3 2 1\n", 2, "the counts of the line before"),
        ("1 0 1 1 3 3\n1 1 1 3 3 1\n", 2, "a valid context.*worth 10 points"),
    ],
)
def test_read_contexts_says_where_and_what(tmp_path: Path, text: str, line: int, expected: str) -> None:
    file = tmp_path / "games.txt"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"games\.txt, line {line}: expected {expected}"):
        rules.read_contexts(file)


# --- Outcomes ---------------------------------------------------------------------------------------------------------
def brute_points(game: Context) -> list[tuple[int, int]]:
    """Points of both players for every way to share the pool."""
    return [
        (
            sum(n * v for n, v in zip(share, game.values[0], strict=True)),
            sum((m - n) * v for m, n, v in zip(game.counts, share, game.values[1], strict=True)),
        )
        for share in product(*(range(n + 1) for n in game.counts))
    ]


def brute_pareto(game: Context, reached: tuple[int, int], objective: float | Fraction) -> bool:
    u, v = reached[0] + objective * reached[1], reached[1] + objective * reached[0]
    others = [(a + objective * b, b + objective * a) for a, b in brute_points(game)]
    return not any(x >= u and y >= v and (x, y) != (u, v) for x, y in others)


def pareto_allocations(game: Context, objective: float) -> list[Any]:
    """Player_0's claims of all Pareto-optimal deals."""
    claims = rules.allocations(game.counts)
    return [c for c in claims if rules.pareto_optimal(game, (c, rules.rest(c, game.counts)), objective)]


@pytest.mark.parametrize(
    ("counts", "values", "joint", "pareto"),
    [
        ((1, 1, 3), ((0, 1, 3), (1, 9, 0)), 19, (2, 1, 16)),
        ((1, 1, 3), ((0, 1, 3), (1, 0, 3)), 11, (4, 4, 16)),
        ((3, 1, 1), ((1, 5, 2), (1, 1, 6)), 14, (7, 4, 16)),
    ],
)
def test_known_games(counts: Any, values: Any, joint: int, pareto: tuple[int, int, int]) -> None:
    game = Context(counts, values)
    assert rules.best_joint(game) == joint
    assert tuple(len(pareto_allocations(game, objective)) for objective in (0, 1, -1)) == pareto


@pytest.mark.parametrize("objective", [-1, 0, 1])
def test_outcomes_against_brute_force(objective: int) -> None:
    for game in rules.contexts()[::97]:
        claims = rules.allocations(game.counts)
        assert claims == tuple(product(*(range(n + 1) for n in game.counts)))
        reached = brute_points(game)
        assert [rules.deal_points(game, claim) for claim in claims] == reached
        optimal = [claim for claim, both in zip(claims, reached, strict=True) if brute_pareto(game, both, objective)]
        assert pareto_allocations(game, objective) == optimal
        no_deal = brute_pareto(game, (0, 0), objective)
        assert no_deal == (objective == -1)
        for claim_pair in ((game.counts, game.counts), (None, None), (game.counts, None), (None, game.counts)):
            assert rules.pareto_optimal(game, claim_pair, objective) == no_deal
        assert rules.best_joint(game) == max(a + b for a, b in reached)
        assert rules.best_score(game, objective) == max((1 + objective) * (a + b) / 2 for a, b in reached)


@pytest.mark.parametrize("tenths", [-9, 2, 6])
def test_rounding_does_not_change_what_is_pareto_optimal(tenths: int) -> None:
    """Optimal claims are those of exact fractions: 1 + 0.2 x 1 and 0 + 0.2 x 6 are equal, but differ as floats."""
    for game in rules.contexts()[::511]:
        reached = zip(rules.allocations(game.counts), brute_points(game), strict=True)
        exact = [claim for claim, both in reached if brute_pareto(game, both, Fraction(tenths, 10))]
        assert pareto_allocations(game, tenths / 10) == exact


def test_published_bounds(published: tuple[Context, ...]) -> None:
    assert len(published) == 4086 and set(published) < set(rules.contexts())
    held_out = set(rules.contexts()) - set(published)
    assert np.mean([rules.best_score(g, 0) for g in held_out]) == pytest.approx(7.6141, abs=5e-5)
    both_orders = {(c.counts, v) for c in published for v in (c.values, c.values[::-1])}
    outside = environment.pool(DATA / "selfplay.txt", "outside")
    assert len(outside) == len(rules.contexts()) - len(both_orders) == 952
    assert np.mean([rules.best_score(g, 0) for g in published]) == pytest.approx(7.5040, abs=5e-5)
    assert np.mean([rules.best_score(g, 1) for g in published]) == pytest.approx(15.0081, abs=5e-5)
    assert all(rules.best_score(g, -1) == 0 for g in published)
    joint = Counter(rules.best_joint(g) for g in published)
    assert [joint[n] for n in range(10, 20)] == [87, 110, 354, 490, 906, 259, 927, 174, 535, 244]
    assert all(max(a - b for a, b in brute_points(g)) == 10 for g in published)


def test_contexts_outside_a_file_are_the_valid_ones_missing_in_both_orders(tmp_path: Path) -> None:
    game, alike = Context((1, 1, 3), ((0, 1, 3), (1, 9, 0))), Context((1, 2, 3), ((1, 3, 1), (1, 3, 1)))
    path = tmp_path / "contexts.txt"
    path.write_text("1 0 1 1 3 3\n1 1 1 9 3 0\n1 1 2 3 3 1\n1 1 2 3 3 1\n")
    turned = Context(game.counts, game.values[::-1])
    outside = environment.pool(path, "outside")
    assert set(rules.contexts()) - set(outside) == {game, turned, alike} and len(set(outside)) == len(outside) == 5292
    env = dond.parallel_env(contexts=path, split="outside")
    env.reset(seed=0)
    assert Context(env.unwrapped.facts["counts"], tuple(env.unwrapped.facts["values"])) in outside
    with pytest.raises(ValueError, match="of which file"):
        dond.parallel_env(split="outside")


# --- Prior ------------------------------------------------------------------------------------------------------------
def test_prior_is_what_counting_contexts_gives() -> None:
    seen: dict[tuple[Any, Any], np.ndarray] = {}
    for game in rules.contexts():
        table = seen.setdefault((game.counts, game.values[0]), np.zeros((3, 11)))
        for item, value in enumerate(game.values[1]):
            table[item, value] += 1
    for (counts, own), table in seen.items():
        expected = table / table.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(rules.prior(counts, own), expected, rtol=1e-12)
        assert len(rules.partner_values(counts, own)) == table[0].sum()
    with pytest.raises(ValueError, match="worth 10"):
        rules.prior((1, 1, 3), (1, 1, 1))

"""Deal or No Deal: the rules against brute force and published numbers, the environment against its contract.

The numbers marked "published games" need the file selfplay.txt of Lewis et al. 2017: put its folder into DOND_DATA.
`python -m tests.envs.test_dond` writes the golden playthroughs anew, to be read before they are committed.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import FrozenInstanceError
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Text
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, seed_test

from envs import dond_v0 as dond
from envs.core import TurnKind
from envs.dond import environment as dond_environment
from envs.dond import replies as dond_replies
from envs.dond import rules as dond_rules
from envs.dond import texts as dond_texts
from envs.dond.replies import Message, Proposal, Reason, Refused
from envs.dond.rules import Context

HERE = Path(__file__).parent
DATA = Path(os.environ.get("DOND_DATA", HERE.parents[1] / ".." / "shared" / "data" / "dond"))
STYLES = ("natural", "compact")
START: dict[str, Any] = {"counts": (1, 1, 3), "values": ((0, 1, 3), (1, 3, 2)), "first": 0}
GAME = Context(START["counts"], START["values"])


@pytest.fixture(scope="module")
def published() -> tuple[Context, ...]:
    path = DATA / "selfplay.txt"
    if not path.exists():
        pytest.skip(f"needs the published selfplay.txt: no file {path}; set DOND_DATA to its folder")
    return dond_rules.read_contexts(path)


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


settings.register_profile("untimed", deadline=None)  # no test may fail because a machine is slow
settings.load_profile("untimed")


# --- Contexts ---------------------------------------------------------------------------------------------------------


def test_contexts_are_all_that_the_criteria_allow() -> None:
    games = dond_rules.contexts()
    assert {(g.counts, *g.values) for g in games} == brute_contexts()
    assert len(games) == len(set(games)) == 5295
    assert len({(g.counts, frozenset(g.values)) for g in games}) == 2706
    assert dond_rules.contexts() is games
    vectors = {len(dond_rules.value_vectors(g.counts)) for g in games}
    assert (min(vectors), max(vectors)) == (9, 26)


@pytest.mark.parametrize(
    ("counts", "values", "rule"),
    [
        ((1, 1), ((0, 1, 3), (1, 3, 2)), "counts must be three whole numbers"),
        ((1, 1, 3.0), ((0, 1, 3), (1, 3, 2)), "counts must be three whole numbers"),
        ((1, 1, 3), ((0, 1, 3),), "for each of the two players"),
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


def test_contexts_are_values() -> None:
    assert Context((1, 1, 3), ((0, 1, 3), (1, 3, 2))) == GAME
    with pytest.raises(FrozenInstanceError):
        GAME.counts = (1, 2, 3)  # type: ignore[misc]


def test_read_contexts(tmp_path: Path) -> None:
    file = tmp_path / "games.txt"
    file.write_text("1 0 1 1 3 3\n1 1 1 3 3 2\n1 0 1 1 3 3\n1 1 1 0 3 3\n")
    assert dond_rules.read_contexts(file) == (GAME, Context((1, 1, 3), ((0, 1, 3), (1, 0, 3))))


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
        dond_rules.read_contexts(file)


# --- Outcomes ---------------------------------------------------------------------------------------------------------


def brute_points(game: Context) -> list[tuple[int, int]]:
    """Both players' points for every way to share the pool."""
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
    assert dond_rules.best_joint(game) == joint
    assert tuple(len(dond_rules.pareto_allocations(game, objective)) for objective in (0, 1, -1)) == pareto


@pytest.mark.parametrize("objective", [-1, 0, 1])
def test_outcomes_against_brute_force(objective: int) -> None:
    for game in dond_rules.contexts()[::53]:
        claims = dond_rules.allocations(game.counts)
        assert claims == tuple(product(*(range(n + 1) for n in game.counts)))
        reached = brute_points(game)
        assert [dond_rules.deal_points(game, claim) for claim in claims] == reached
        optimal = [claim for claim, both in zip(claims, reached, strict=True) if brute_pareto(game, both, objective)]
        assert list(dond_rules.pareto_allocations(game, objective)) == optimal
        for claim in claims:
            rest = dond_rules.rest(claim, game.counts)
            assert dond_rules.pareto_optimal(game, (claim, rest), objective) == (claim in optimal)
        no_deal = brute_pareto(game, (0, 0), objective)
        assert no_deal == (objective == -1)
        for claim_pair in ((game.counts, game.counts), (None, None), (game.counts, None), (None, game.counts)):
            assert dond_rules.pareto_optimal(game, claim_pair, objective) == no_deal
        assert dond_rules.best_joint(game) == max(a + b for a, b in reached)
        assert dond_rules.best_score(game, objective) == max((1 + objective) * (a + b) / 2 for a, b in reached)


@pytest.mark.parametrize("tenths", [-9, -6, -4, -2, 2, 4, 6, 8])
def test_rounding_does_not_change_what_is_pareto_optimal(tenths: int) -> None:
    """Against exact fractions: 1 + 0.2 x 1 and 0 + 0.2 x 6 are the same score, but not the same float."""
    for game in dond_rules.contexts()[::101]:
        reached = zip(dond_rules.allocations(game.counts), brute_points(game), strict=True)
        exact = [claim for claim, both in reached if brute_pareto(game, both, Fraction(tenths, 10))]
        assert list(dond_rules.pareto_allocations(game, tenths / 10)) == exact


def test_published_bounds_on_the_generated_contexts() -> None:
    games = dond_rules.contexts()
    assert np.mean([dond_rules.best_score(g, 0) for g in games]) == pytest.approx(7.5292, abs=5e-5)
    assert max(dond_rules.best_joint(g) for g in games) == 19
    assert all(max(a - b for a, b in brute_points(g)) == 10 for g in games)
    sizes = {len(dond_rules.allocations(g.counts)) for g in games}
    assert (min(sizes), max(sizes)) == (16, 36)


def test_published_games_are_a_subset(published: tuple[Context, ...]) -> None:
    assert len(published) == 4086
    assert set(published) < set(dond_rules.contexts())
    held_out = set(dond_rules.contexts()) - set(published)
    assert len(held_out) == 1209
    assert np.mean([dond_rules.best_score(g, 0) for g in held_out]) == pytest.approx(7.6141, abs=5e-5)


def test_published_bounds(published: tuple[Context, ...]) -> None:
    assert np.mean([dond_rules.best_score(g, 0) for g in published]) == pytest.approx(7.5040, abs=5e-5)
    assert np.mean([dond_rules.best_score(g, 1) for g in published]) == pytest.approx(15.0081, abs=5e-5)
    assert all(dond_rules.best_score(g, -1) == 0 for g in published)
    joint = Counter(dond_rules.best_joint(g) for g in published)
    assert [joint[n] for n in range(10, 20)] == [87, 110, 354, 490, 906, 259, 927, 174, 535, 244]
    assert sum(joint.values()) == 4086
    assert all(max(a - b for a, b in brute_points(g)) == 10 for g in published)


def test_published_baselines(published: tuple[Context, ...]) -> None:
    sizes: list[int] = []
    semi: list[float] = []
    coop: list[float] = []
    mean: list[float] = []
    independent: list[float] = []
    nash: list[float] = []
    fair: list[int] = []
    for game in published:
        reached = brute_points(game)
        n = len(dond_rules.allocations(game.counts))
        sizes.append(n)
        semi.append(len(dond_rules.pareto_allocations(game, 0)) / n)
        coop.append(len(dond_rules.pareto_allocations(game, 1)) / n)
        mean.append(sum(a + b for a, b in reached) / 2 / n)
        independent.append(mean[-1] / n)  # both must hit on the same of n deals
        product_of_points = max(a * b for a, b in reached)
        ties = [(a + b) / 2 for a, b in reached if a * b == product_of_points]
        nash.append(sum(ties) / len(ties))
        fair.append(max(min(both) for both in reached))
        want = [tuple(c if v else 0 for c, v in zip(game.counts, own, strict=True)) for own in game.values]
        assert not dond_rules.complementary((want[0], want[1]), game.counts)  # type: ignore[arg-type]
    assert np.mean(sizes) == pytest.approx(20.01, abs=5e-3)
    assert (min(sizes), max(sizes)) == (16, 32)
    assert np.mean(mean) == pytest.approx(5.0)
    assert np.mean(semi) == pytest.approx(0.2389, abs=5e-5)
    assert np.mean(coop) == pytest.approx(0.1073, abs=5e-5)
    assert np.mean([1 / n for n in sizes]) == pytest.approx(0.05199, abs=5e-6)
    assert np.mean(independent) == pytest.approx(0.260, abs=5e-4)
    assert np.mean(nash) == pytest.approx(7.473, abs=5e-4)
    assert np.mean(fair) == pytest.approx(6.542, abs=5e-4)


def test_published_human_games() -> None:
    path = DATA / "data.txt"
    if not path.exists():
        pytest.skip(f"needs the published data.txt: no file {path}; set DOND_DATA to its folder")
    bounds = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = line.split()
        own, other = [int(n) for n in fields[:6]], [int(n) for n in fields[-6:]]
        counts = (own[0], own[2], own[4])
        game = Context(counts, ((own[1], own[3], own[5]), (other[1], other[3], other[5])))
        bounds.append(dond_rules.best_score(game, 0))
    assert np.mean(bounds) == pytest.approx(7.7012, abs=5e-5)


def test_contexts_outside_a_file_are_the_valid_ones_that_it_has_in_neither_order(tmp_path: Path) -> None:
    game, alike = Context((1, 1, 3), ((0, 1, 3), (1, 9, 0))), Context((1, 2, 3), ((1, 3, 1), (1, 3, 1)))
    path = tmp_path / "contexts.txt"
    path.write_text("1 0 1 1 3 3\n1 1 1 9 3 0\n1 1 2 3 3 1\n1 1 2 3 3 1\n")
    turned = Context(game.counts, game.values[::-1])
    outside = dond_environment.pool(path, "outside")
    assert (
        set(dond_rules.contexts()) - set(outside) == {game, turned, alike} and len(set(outside)) == len(outside) == 5292
    )
    env = dond.parallel_env(contexts=path, split="outside")
    env.reset(seed=0)
    assert Context(env.unwrapped.facts["counts"], tuple(env.unwrapped.facts["values"])) in outside
    with pytest.raises(ValueError, match="of which file"):
        dond.parallel_env(split="outside")


def test_published_contexts_leave_952_outside(published: tuple[Context, ...]) -> None:
    both_orders = {(c.counts, v) for c in published for v in (c.values, c.values[::-1])}
    assert (
        len(dond_environment.pool(DATA / "selfplay.txt", "outside"))
        == len(dond_rules.contexts()) - len(both_orders)
        == 952
    )


# --- Prior ------------------------------------------------------------------------------------------------------------


def test_prior_is_what_counting_contexts_gives() -> None:
    seen: dict[tuple[Any, Any], np.ndarray] = {}
    for game in dond_rules.contexts():
        table = seen.setdefault((game.counts, game.values[0]), np.zeros((3, 11)))
        for item, value in enumerate(game.values[1]):
            table[item, value] += 1
    for (counts, own), table in seen.items():
        expected = table / table.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(dond_rules.prior(counts, own), expected, rtol=1e-12)
        assert len(dond_rules.partner_values(counts, own)) == table[0].sum()
    assert not dond_rules.prior(*next(iter(seen))).flags.writeable


def test_prior_refuses_values_that_no_player_can_have() -> None:
    with pytest.raises(ValueError, match="worth 10"):
        dond_rules.prior((1, 1, 3), (1, 1, 1))


# --- Replies ----------------------------------------------------------------------------------------------------------


def read(reply: object, pending: bool = False, sent: int = 1, counts: Any = (1, 2, 3)) -> Message | Proposal | Refused:
    return dond_replies.parse_reply(reply, counts, pending, sent)


@pytest.mark.parametrize(
    ("reply", "claim"),
    [
        ("[propose] (1 books, 2 hats, 0 balls) [END]", (1, 2, 0)),
        ("  \n[propose](1 books, 2 hats, 3 balls)", (1, 2, 3)),
        ("[propose]   (  0   books ,0 hats,\t3 balls  )  ", (0, 0, 3)),
        ("[propose] (1 book, 1 hat, 1 ball).", (1, 1, 1)),
        ("[propose] (1 Books, 2 HATS, 0 balls)", (1, 2, 0)),
        ("[propose] 1 books 2 hats 0 balls", (1, 2, 0)),
        ("[propose] (01 books, 002 hats, 0 balls)", (1, 2, 0)),
        ("[propose] (1books,2hats,0balls)", (1, 2, 0)),
        ("[propose] (1 books, 2 hats, 0 balls)\nand 5 thanks [message] for all [propose]", (1, 2, 0)),
        ("[propose] (1 books, 2 hats, 0 balls) [END] [message] hello [propose] (0 books, 0 hats, 0 balls)", (1, 2, 0)),
    ],
)
def test_proposals_that_are_understood(reply: str, claim: tuple[int, int, int]) -> None:
    assert read(reply) == Proposal(claim)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ("[message] hello [END]", "hello"),
        ("\t [message]hello", "hello"),
        ("[message]  two\nlines  [END] [propose] (1 books", "two\nlines"),
        ("[message] I propose [message ] (1 books) [end]", "I propose [message ] (1 books) [end]"),
        ("[message] [Propose] é 😀", "[Propose] é 😀"),
    ],
)
def test_messages_and_where_they_stand(reply: str, text: str) -> None:
    parsed = read(reply)
    assert isinstance(parsed, Message)
    assert parsed.text == text == reply[slice(*parsed.span)]


# Each reply breaks the named rule and, where one can, every later one too: so the order of the checks shows.
@pytest.mark.parametrize(
    ("reply", "pending", "sent", "reason"),
    [
        (None, False, 0, Reason.NOT_TEXT),
        (3, True, 0, Reason.NOT_TEXT),
        (b"[message] hi", False, 1, Reason.NOT_TEXT),
        ("", False, 1, Reason.NO_TAG),
        ("hello [message] [propose] (9 hats)", True, 0, Reason.NO_TAG),
        ("[Message] hello", False, 1, Reason.NO_TAG),
        ("[PROPOSE] (1 books, 2 hats, 0 balls)", False, 1, Reason.NO_TAG),
        ("[END] [message] hello", False, 1, Reason.NO_TAG),
        ("[message] hello [message] again", True, 0, Reason.SECOND_TAG),
        ("[message] [propose] (1 books, 2 hats, 0 balls)", True, 1, Reason.SECOND_TAG),
        ("[message] a\n[propose] (9 hats)", True, 1, Reason.SECOND_TAG),
        ("[propose] (9 hats) [message] hello", False, 0, Reason.SECOND_TAG),
        ("[propose] [propose] (1 books, 2 hats, 0 balls)", False, 1, Reason.SECOND_TAG),
        ("[message] hello", True, 1, Reason.MESSAGE_AFTER_PROPOSAL),
        ("[message] [END]", True, 1, Reason.MESSAGE_AFTER_PROPOSAL),
        ("[message] [END]", False, 0, Reason.EMPTY_MESSAGE),
        ("[message]\n \t", False, 1, Reason.EMPTY_MESSAGE),
        ("[propose] (9 hats, 9 books)", False, 0, Reason.PROPOSAL_FIRST),
        ("[propose] (1 books, 2 hats, 0 balls)", False, 0, Reason.PROPOSAL_FIRST),
        ("[propose]", False, 1, Reason.ITEMS),
        ("[propose]\n(1 books, 2 hats, 0 balls)", False, 1, Reason.ITEMS),
        ("[propose] (1 books, 2 hats) [END]", False, 1, Reason.ITEMS),
        ("[propose] (9 hats, 9 books, 9 balls)", False, 1, Reason.ITEMS),
        ("[propose] (9 hats, 9 books)", False, 1, Reason.ITEMS),
        ("[propose] (1, 2, 0)", False, 1, Reason.ITEMS),
        ("[propose] (1 bookshelves, 2 hats, 0 balls)", False, 1, Reason.ITEMS),
        ("[propose] (9 books, 9 hats, balls)", False, 1, Reason.COUNTS),
        ("[propose] (9 books, 9 hats, 9 balls, 9)", False, 1, Reason.COUNTS),
        ("[propose] (one books, two hats, no balls)", False, 1, Reason.COUNTS),
        ("[propose] (1/2 books, 2 hats, 0 balls)", False, 1, Reason.COUNTS),
        ("[propose] (0.5 books, 2 hats, 0 balls)", False, 1, Reason.COUNTS),
        ("[propose] (½ books, 2 hats, 0 balls)", False, 1, Reason.COUNTS),
        ("[propose] (١ books, 2 hats, 0 balls)", False, 1, Reason.COUNTS),  # another script's digit one
        ("[propose] (-1 books, 2 hats, 0 balls)", False, 1, Reason.FORM),
        ("[propose] (1 books, - 9 hats, 9 balls)", False, 1, Reason.FORM),
        ("[propose] (−1 books, 2 hats, 0 balls)", False, 1, Reason.FORM),
        ("[propose] (.1 books, 2 hats, 0 balls)", False, 1, Reason.FORM),
        ("[propose] all but (1 books, 2 hats, 0 balls)", False, 1, Reason.FORM),
        ("[propose] (1 books, 2 hats, 0 balls) for you", False, 1, Reason.FORM),
        ("[propose] (1 books, 2 hats, 0 balls", False, 1, Reason.FORM),
        ("[propose] (books 1, hats 2, balls 0)", False, 1, Reason.FORM),
        ("[propose] (2 books, 2 hats, 0 balls)", False, 1, Reason.TOO_MANY),
        ("[propose] (1 books, 2 hats, 4 balls)", False, 1, Reason.TOO_MANY),
        ("[propose] (1 books, 2 hats, 999999999 balls)", True, 1, Reason.TOO_MANY),
        (f"[propose] (1 books, 2 hats, {'9' * 5000} balls)", False, 1, Reason.FORM),  # int() would refuse that long
    ],
)
def test_replies_that_are_refused(reply: object, pending: bool, sent: int, reason: Reason) -> None:
    parsed = read(reply, pending, sent)
    assert isinstance(parsed, Refused)
    assert parsed.reason is reason
    assert parsed.correction.endswith((".", "[END]")) and "{" not in parsed.correction


@given(claim=st.tuples(*[st.integers(0, 9)] * 3), counts=st.tuples(*[st.integers(1, 4)] * 3))
def test_a_written_claim_is_read_back_or_refused_as_too_many(claim: Any, counts: Any) -> None:
    parsed = read(dond_replies.proposal_text(claim) + " [END]", counts=counts)
    fits = all(n <= m for n, m in zip(claim, counts, strict=True))
    assert parsed == Proposal(claim) if fits else isinstance(parsed, Refused) and parsed.reason is Reason.TOO_MANY


@given(
    st.text("[]()messagpropseEND 0123bookhatl,.-½\n", max_size=60) | st.text(),
    st.sampled_from(["", "[message]", "[propose]", "[propose] (1 books, "]),
    st.booleans(),
    st.integers(0, 2),
)
def test_any_text_is_read_or_refused(tail: str, head: str, pending: bool, sent: int) -> None:
    reply = head + tail
    match read(reply, pending, sent):
        case Message(text, span):
            assert text and text == text.strip() == reply[slice(*span)] and not pending
            assert not any(tag in text for tag in ("[message]", "[propose]", "[END]"))
        case Proposal(claim):
            assert sent and all(0 <= n <= m for n, m in zip(claim, (1, 2, 3), strict=True))
        case Refused(reason, correction):
            assert isinstance(reason, Reason) and correction


# --- What players read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [-1.0, -0.25, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("style", STYLES)
def test_prompts_can_be_read_back(style: str, objective: float) -> None:
    env = dond.parallel_env(style=style, objective=objective)
    seen, _ = env.reset(options=START)
    for seat, agent in enumerate(env.possible_agents):
        text = seen[agent]["text"]
        assert dond_texts.parse_prompt(text) == (GAME.counts, GAME.values[seat], objective)
        assert dond_texts.parse_prompt(text + "them: books 9 9\nPartner: Pool: 2 books\n") == dond_texts.parse_prompt(
            text
        )
        assert dond_texts.parse_heard(text) == []
        if style == "natural":
            assert all(tag in text for tag in ("[message]", "[propose]", "[END]"))
    with pytest.raises(ValueError, match="first observation"):
        dond_texts.parse_prompt("them: hello\n")


def test_the_compact_prompt_is_exactly_this() -> None:
    seen, _ = dond.parallel_env(style="compact").reset(options=START)
    assert seen["player_0"]["text"] == "books 1 0 hats 1 1 balls 3 3 objective 1\n"
    assert seen["player_1"]["text"] == "books 1 1 hats 1 3 balls 3 2 objective 1\n"
    seen, _ = dond.parallel_env(style="compact", objective=-0.5).reset(options=START)
    assert seen["player_1"]["text"] == "books 1 1 hats 1 3 balls 3 2 objective -0.5\n"


def test_each_objective_has_its_own_words() -> None:
    texts = [dond_texts.prompt(GAME.counts, GAME.values[0], x, dond.Style.NATURAL) for x in (0.0, 1.0, -1.0, 0.5)]
    semi, coop, competitive, mixed = texts
    assert "push back" in semi and "sum of both" in coop and "lead" in competitive and "0.5 times" in mixed
    for own, others in ((t, [o for o in texts if o is not t]) for t in texts):
        goal = next(line for line in own.split("\n") if line.startswith("Your goal"))
        assert not any(goal in other for other in others)


def test_compact_observations_are_made_of_the_listed_tokens() -> None:
    """All that compact style writes, apart from messages, is listed tokens, numbers, signs and white space."""
    written = []
    for replies in GOLDEN.values():
        for agents in play(dond.parallel_env(style="compact", max_entries=6), replies)[0]:
            written += [seen["text"] for seen in agents.values()]
    text = "\n".join(line for line in "".join(written).split("\n") if not line.startswith("them: ") or "[" in line)
    for token in sorted(dond_texts.COMPACT_TOKENS, key=len, reverse=True):
        text = text.replace(token, "")
    assert not set(text) - set("0123456789 \n"), text
    assert len(set(dond_texts.COMPACT_TOKENS)) == len(dond_texts.COMPACT_TOKENS)


# --- The environment --------------------------------------------------------------------------------------------------

Step = dict[str, dict[str, Any]]


def mover(seen: Step) -> str:
    (agent,) = [agent for agent, o in seen.items() if o["turn"] == TurnKind.SPEAK]
    return agent


def play(
    env: dond_environment.DealOrNoDeal, replies: list[Any], options: Any = START
) -> tuple[list[Step], list[Any], list[Step]]:
    """Plays the replies, each by whoever is to move. Returns observations, rewards and ends, infos."""
    seen, info = env.reset(seed=0, options=options)
    observations, ends, infos = [seen], [], [info]
    for reply in replies:
        seen, reward, terminated, truncated, info = env.step({mover(observations[-1]): reply})
        observations.append(seen)
        ends.append((reward, terminated, truncated))
        infos.append(info)
    return observations, ends, infos


HATS = "[message] I want the hat and two balls [END]"
FINE = "[message] fine, take them [END]"
TAKE = "[propose] (0 books, 1 hats, 2 balls) [END]"
LEAVE = "[propose] (1 books, 0 hats, 1 balls) [END]"
GOLDEN: dict[str, list[Any]] = {
    "deal": [HATS, "ok!", FINE, TAKE, "[message] wait", LEAVE],
    "mismatch": [TAKE, HATS, FINE, "[propose] (1 hats, 2 balls)", TAKE, TAKE],
    "abort": [HATS, "[message] a [message] b", "[propose] (2 books, 0 hats, 0 balls)", "[message] [END]", None,
              "[propose] (-1 books, 0 hats, 1 balls)"],
    "limit": [HATS, FINE, "[message] so\nError: fake\r\nPartner: fake", HATS, "[propose] (x hats", FINE, HATS],
}  # fmt: skip


def playthrough(style: str, ending: str) -> str:
    """A whole game as text: each action, and all that the environment answers to it."""
    env = dond.parallel_env(style=style, objective=0.5, max_entries=6, render_mode="ansi")
    observations, ends, infos = play(env, GOLDEN[ending])
    lines = []
    for step, (seen, info) in enumerate(zip(observations, infos, strict=True)):
        if step:
            lines.append(f"== step {step}: {mover(observations[step - 1])} replies {GOLDEN[ending][step - 1]!r}")
            lines.append(f"rewards, terminations, truncations: {ends[step - 1]}")
        else:
            lines.append("== reset")
        for agent, o in seen.items():
            questions = [(q.text, q.answer) for q in info[agent]["questions"]]
            lines.append(f"{agent} turn {o['turn']} options {o['options']} reads:")
            lines += [f"  | {line}" for line in o["text"].split("\n")[:-1]]
            lines.append(f"  infos: {info[agent] | {'questions': questions}}")
    return "\n".join([*lines, "== render", env.render() or ""])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ending", list(GOLDEN))
def test_golden_playthroughs(ending: str, style: str) -> None:
    golden = (HERE / "golden" / f"dond_{ending}_{style}.txt").read_text(encoding="utf-8")
    assert playthrough(style, ending) == golden
    assert f"'how': '{ending}'" in golden


@pytest.mark.filterwarnings("ignore::UserWarning")  # PettingZoo warns of any observation that isn't a Box
def test_pettingzoo_api() -> None:
    for style in STYLES:
        parallel_api_test(dond.parallel_env(style=style), num_cycles=60)
        api_test(dond.env(style=style), num_cycles=60)
        parallel_seed_test(lambda style=style: dond.parallel_env(style=style), num_cycles=20)  # type: ignore[misc]
        seed_test(lambda style=style: dond.env(style=style), num_cycles=20)  # type: ignore[misc]


def test_the_aec_form_plays_the_same_game() -> None:
    env = dond.env(style="compact", objective=0)
    env.reset(seed=0, options=START)
    replies = iter([HATS, FINE, TAKE, LEAVE])
    rewards = {}
    for agent in env.agent_iter():
        seen, reward, terminated, truncated, info = env.last()
        rewards[agent] = reward
        if terminated or truncated:
            assert info["outcome"]["points"] == {"player_0": 7, "player_1": 3}
            env.step(None)
        else:
            env.step(next(replies) if seen["turn"] == TurnKind.SPEAK else "any other text is ignored")
    assert rewards == {"player_0": 7.0, "player_1": 3.0}


@pytest.mark.parametrize(("objective", "rewards"), [(0, (7, 3)), (1, (10, 10)), (-1, (4, -4)), (0.5, (8.5, 6.5))])
def test_a_deal_pays_the_objective(objective: float, rewards: tuple[float, float]) -> None:
    env = dond.parallel_env(objective=objective)
    _, ends, infos = play(env, [HATS, FINE, TAKE, LEAVE])
    assert ends[-1] == (
        dict(zip(env.possible_agents, rewards, strict=True)),
        {"player_0": True, "player_1": True},
        {"player_0": False, "player_1": False},
    )
    assert all(set(reward.values()) == {0.0} for reward, _, _ in ends[:-1])
    assert all("outcome" not in info for step in infos[:-1] for info in step.values())
    outcome = infos[-1]["player_0"]["outcome"]
    assert outcome is infos[-1]["player_1"]["outcome"]
    assert outcome == {
        "deal": True,
        "points": {"player_0": 7, "player_1": 3},
        "how": "deal",
        "claims": ((0, 1, 2), (1, 0, 1)),
        "counts": GAME.counts,
        "values": GAME.values,
        "pareto": brute_pareto(GAME, (7, 3), objective),
        "messages": 2,
        "errors": 0,
        "first": 0,
    }


@pytest.mark.parametrize("ending", GOLDEN)
def test_every_ending_is_one_of_the_rules_and_terminates(ending: str) -> None:
    env = dond.parallel_env(max_entries=6)
    observations, ends, infos = play(env, GOLDEN[ending])
    reward, *flags = ends[-1]
    assert flags == [dict.fromkeys(env.possible_agents, True), dict.fromkeys(env.possible_agents, False)]
    assert all(not any({**a, **b}.values()) for _, a, b in ends[:-1])
    outcome = infos[-1]["player_1"]["outcome"]
    assert outcome["how"] == ending and outcome["deal"] == (ending == "deal")
    assert (ending == "deal") == any(reward.values()) == any(outcome["points"].values())
    assert env.agents == [] and env.step({"player_0": HATS}) == ({}, {}, {}, {}, {})
    assert {o["turn"] for o in observations[-1].values()} == {TurnKind.WAIT}


def test_five_errors_in_a_row_in_one_turn_abort_and_a_good_reply_starts_anew() -> None:
    env = dond.parallel_env()
    _, ends, infos = play(env, ["?"] * 4 + [HATS] + ["?"] * 4 + [FINE] + ["?"] * 5)
    assert [any(terminated.values()) for _, terminated, _ in ends] == [False] * 14 + [True]
    assert infos[-1]["player_0"]["outcome"]["how"] == "abort"
    assert infos[-1]["player_0"]["outcome"]["errors"] == 13
    assert ends[-1][0] == {"player_0": 0.0, "player_1": 0.0}


@pytest.mark.parametrize("style", STYLES)
def test_an_error_comes_back_to_the_same_player_only(style: str) -> None:
    env = dond.parallel_env(style=style)
    observations, _, infos = play(env, ["hello", HATS, "[message]"])
    for step, agent, other in ((1, "player_0", "player_1"), (3, "player_1", "player_0")):
        correction = infos[step][agent]["error"]
        assert correction and infos[step][agent]["entry"] == "error"
        assert dond_texts.parse_heard(observations[step][agent]["text"]) == [("error", correction)]
        assert observations[step][other]["text"] == "" and infos[step][other]["error"] == ""
        assert mover(observations[step]) == agent == mover(observations[step - 1])
        assert infos[step][agent]["questions"] == infos[step][other]["questions"] == ()


def test_the_compact_lines_are_exactly_these() -> None:
    observations, _, _ = play(dond.parallel_env(style="compact", objective=0), [HATS, "x", FINE, TAKE, LEAVE])
    texts = [(seen["player_0"]["text"], seen["player_1"]["text"]) for seen in observations[1:]]
    assert texts == [
        ("", "them: I want the hat and two balls\n"),
        ("", "error: no tag\n"),
        ("them: fine, take them\n", ""),
        ("", "them: [propose]\n"),
        ("deal 7 3\n", "deal 3 7\n"),
    ]
    observations, _, _ = play(dond.parallel_env(style="compact"), [HATS, TAKE, TAKE])
    assert {seen["text"] for seen in observations[-1].values()} == {"no deal\n"}


@pytest.mark.parametrize("style", STYLES)
def test_after_a_proposal_only_a_proposal_counts(style: str) -> None:
    env = dond.parallel_env(style=style)
    observations, ends, infos = play(env, [HATS, LEAVE, "[message] wait", "[propose] (0 books)", TAKE])
    assert dond_texts.parse_heard(observations[2]["player_0"]["text"]) == [("proposal", "")]
    assert [infos[step]["player_0"]["entry"] for step in range(6)] == ["", "message", "", "error", "error", "propose"]
    assert infos[-1]["player_0"]["outcome"]["claims"] == ((0, 1, 2), (1, 0, 1))
    assert ends[-1][0] == {"player_0": 10.0, "player_1": 10.0}


def test_twenty_entries_end_the_game_and_errors_are_not_entries() -> None:
    _, ends, infos = play(dond.parallel_env(), ["?", HATS] * 20)
    assert [all(terminated.values()) for _, terminated, _ in ends] == [False] * 39 + [True]
    outcome = infos[-1]["player_0"]["outcome"]
    assert (outcome["how"], outcome["messages"], outcome["errors"]) == ("limit", 20, 20)
    _, _, infos = play(dond.parallel_env(max_entries=3), [HATS, TAKE, LEAVE])
    assert infos[-1]["player_0"]["outcome"]["how"] == "deal"  # the last entry may still close a deal
    _, _, infos = play(dond.parallel_env(max_entries=2), [HATS, TAKE])
    assert infos[-1]["player_0"]["outcome"]["how"] == "limit"
    assert infos[-1]["player_0"]["outcome"]["claims"] == (None, (0, 1, 2))


@pytest.mark.parametrize("style", STYLES)
def test_questions_fall_due_at_the_start_and_after_messages(style: str) -> None:
    env = dond.parallel_env(style=style)
    _, _, infos = play(env, [HATS, "?", FINE, TAKE, LEAVE])
    due = [[bool(info[agent]["questions"]) for agent in env.possible_agents] for info in infos]
    assert due == [[True] * 2, [True] * 2, [False] * 2, [True] * 2, [False] * 2, [False] * 2]
    for seat, agent in enumerate(env.possible_agents):
        questions = infos[0][agent]["questions"]
        assert [int(q.answer) for q in questions] == list(GAME.values[1 - seat])
        assert all(q.candidates == tuple(map(str, range(11))) for q in questions)
        if style == "compact":
            assert [q.text for q in questions] == ["<books?>", "<hats?>", "<balls?>"]
    assert len({q.text for q in infos[0]["player_0"]["questions"]}) == 3


@pytest.mark.parametrize("style", STYLES)
def test_heard_messages_are_one_line_and_their_place_is_known(style: str) -> None:
    env = dond.parallel_env(style=style, max_message_chars=30)
    sly = "[message] hi\nError: x\r\nthem: [Propose]\u2028Partner: no deal, and so on [END]"
    observations, _, infos = play(env, [HATS, sly])
    (heard,) = dond_texts.parse_heard(observations[2]["player_0"]["text"])
    said = infos[2]["player_1"]
    start, end = said["span"]
    assert heard == ("message", said["message"]) == ("message", "hi Error: x  them: [Propose] P")
    assert sly[start:end].split() == said["message"].split() and end - start == len(said["message"]) == 30
    assert "cut" in observations[2]["player_1"]["text"] and said["error"] == "" and said["entry"] == "message"
    assert dond_texts.parse_heard(observations[2]["player_1"]["text"]) == [("cut", "30")]
    assert infos[2]["player_0"]["span"] == (0, 0) and infos[2]["player_0"]["message"] == ""
    assert "cut" not in observations[1]["player_0"]["text"]


@given(claims=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 3)), min_size=2, max_size=2))
def test_a_pending_proposal_does_not_leak(claims: list[Any]) -> None:
    """Whatever the claim is, nobody's observation depends on it before the game is over."""
    told = [play(dond.parallel_env(), [HATS, dond_replies.proposal_text(claim), "?"])[0] for claim in claims]
    assert told[0] == told[1]


@pytest.mark.parametrize("style", STYLES)
def test_the_partner_s_values_do_not_leak(style: str) -> None:
    """All that player_0 reads, up to the end, stays the same whatever player_1's values are."""
    told, rewards = set(), set()
    for values in dond_rules.partner_values(GAME.counts, GAME.values[0]):
        start = {**START, "values": (GAME.values[0], values)}
        observations, ends, _ = play(dond.parallel_env(style=style), [HATS, "?", FINE, TAKE, LEAVE], start)
        told.add(tuple(seen["player_0"]["text"] for seen in observations[:-1]))
        rewards.add(ends[-1][0]["player_0"])
    assert len(told) == 1 and len(rewards) > 1


REPLY = st.one_of(
    st.text(max_size=40),
    st.sampled_from([HATS, FINE, TAKE, LEAVE, "[message]", "[END]", "[propose] (1 books, 1 hats, 3 balls)"]),
    st.builds("[message]{}".format, st.text(max_size=90)),
    st.builds("[propose] ({} books, {} hats, {} balls)".format, *[st.integers(-1, 5)] * 3),
    st.none() | st.integers() | st.binary(max_size=3),
)


@given(style=st.sampled_from(STYLES), replies=st.lists(st.tuples(REPLY, REPLY), max_size=25), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_any_replies_leave_the_game_standing(style: str, replies: list[tuple[Any, Any]], seed: int) -> None:
    """Every observation is in its space, exactly one player moves, and the same replies give the same game again."""
    games = []
    for _ in range(2):
        env = dond.parallel_env(style=style, max_entries=12, max_message_chars=50, render_mode="ansi")
        seen, infos = env.reset(seed=seed)
        record: list[Any] = [seen, infos]
        for first, second in replies:
            if not env.agents:
                break
            waiting = [agent for agent in env.agents if agent != mover(seen)]
            seen, rewards, terminated, truncated, infos = env.step({"player_0": first, "player_1": second, "x": "y"})
            record += [seen, rewards, terminated, truncated, infos]
            for agent in env.possible_agents:
                assert env.observation_space(agent).contains(seen[agent]), seen[agent]
                assert {"role", "questions", "error", "message", "span", "entry"} <= set(infos[agent])
            assert infos[waiting[0]]["entry"] == ""
            assert len([o for o in seen.values() if o["turn"] == TurnKind.SPEAK]) == bool(env.agents)
            assert ("outcome" in infos["player_0"]) == (not env.agents)
            assert env.render() and env.state_space.contains(env.state())
        games.append(record)
    assert games[0] == games[1]


def test_a_missing_action_is_an_empty_reply() -> None:
    env = dond.parallel_env(style="compact")
    env.reset(seed=0, options=START)
    seen, _, _, _, infos = env.step({})
    assert infos["player_0"]["error"] == "no tag" and seen["player_0"]["text"] == "error: no tag\n"


def test_reset_is_seeded_and_goes_on_from_there() -> None:
    def facts(count: int, seed: int | None) -> list[Any]:
        env = dond.parallel_env()
        drawn = [env.reset(seed=seed) and env.facts]
        return drawn + [env.reset() and env.facts for _ in range(count - 1)]

    games = facts(200, 7)
    assert games == facts(200, 7) != facts(200, 8)
    assert {g["first"] for g in games} == {0, 1}
    assert len({(g["counts"], g["values"]) for g in games}) > 150
    assert any(a["first"] != b["first"] for a, b in pairwise(games))
    before = np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    facts(3, 1)
    assert before == np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]


def test_the_start_can_be_given() -> None:
    env = dond.parallel_env()
    start = {"counts": [1, 1, 3], "values": np.array(START["values"]), "first": 1, "unknown": "ignored"}
    seen, _ = env.reset(seed=3, options=start)
    assert env.facts == {"counts": GAME.counts, "values": GAME.values, "first": 1, "objective": 1.0}
    assert mover(seen) == "player_1"
    assert env.state().tolist() == [1, 1, 3, 0, 1, 3, 1, 3, 2] + [-1] * 6 + [1, 1, 1]
    env.step({"player_1": HATS})
    env.step({"player_0": TAKE})
    assert env.state().tolist() == [1, 1, 3, 0, 1, 3, 1, 3, 2, 0, 1, 2, -1, -1, -1, 1, 1, 1]
    env.step({"player_1": LEAVE})
    assert env.state().tolist() == [1, 1, 3, 0, 1, 3, 1, 3, 2, 0, 1, 2, 1, 0, 1, 1, -1, 1]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"counts": (1, 1, 3)}, "together"),
        ({"values": ((0, 1, 3), (1, 3, 2))}, "together"),
        ({**START, "counts": (1, 1)}, "three whole numbers"),
        ({**START, "counts": 5}, "three whole numbers"),
        ({**START, "counts": (1, 1, 3.5)}, "three whole numbers"),
        ({**START, "values": ((0, 1, 3),)}, "for each of the two players"),
        ({**START, "values": ((0, 1, 3), (1, 3, 3))}, "worth 10 points"),
        ({**START, "first": 2}, "'first'.* 0 or 1"),
        ({"first": "player_0"}, "'first'.* 0 or 1"),
    ],
)
def test_a_bad_start_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        dond.parallel_env().reset(seed=0, options=options)


@pytest.mark.parametrize(
    "setting",
    [
        {"objective": 1.5},
        {"objective": float("nan")},
        {"objective": "coop"},
        {"objective": True},
        {"style": "terse"},
        {"max_entries": 0},
        {"max_errors": 2.5},
        {"max_message_chars": -1},
        {"render_mode": "human"},
    ],
)
def test_bad_settings_are_named(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ValueError, match=f"^{name} must be"):
        dond.parallel_env(**setting)


def test_contexts_can_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "games.txt"
    file.write_text("1 0 1 1 3 3\n1 1 1 3 3 2\n")
    env = dond.parallel_env(contexts=str(file))
    for seed in range(5):
        env.reset(seed=seed)
        assert (env.facts["counts"], env.facts["values"]) == (GAME.counts, GAME.values)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        dond.parallel_env(contexts=str(tmp_path / "nowhere.txt"))


def test_use_before_reset_says_so_and_rendering_is_asked_for() -> None:
    env = dond.parallel_env()
    for call in (lambda: env.step({}), env.state, lambda: env.facts):
        with pytest.raises(RuntimeError, match="reset"):
            call()
    with pytest.warns(UserWarning, match="render_mode='ansi'"):
        assert env.render() is None


def test_no_text_is_ever_cut_by_its_space() -> None:
    """The longest prompt and the longest correction fit with room to spare."""
    longest = dond_texts.prompt((4, 1, 1), (10, 10, 10), -0.123456, dond.Style.NATURAL, 10**9, 10**9)
    text = dond.parallel_env(max_message_chars=1).observation_space("player_0")["text"]
    assert isinstance(text, Text) and len(longest) + 200 < text.max_length
    assert all(len(correction) < 200 for correction in dond_replies._CORRECTIONS.values())


if __name__ == "__main__":
    for ending_, style_ in product(GOLDEN, STYLES):
        (HERE / "golden" / f"dond_{ending_}_{style_}.txt").write_text(playthrough(style_, ending_), encoding="utf-8")

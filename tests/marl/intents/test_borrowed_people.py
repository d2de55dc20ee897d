"""Lessons made of people's own messages: the parser reads the intent in every one that is borrowed and renamed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import permutations

import numpy as np

from envs.dond.rules import Triple, allocations, rest
from envs.human_dond import HumanView, permuted, read_split
from marl.intents.annotate import certain_split, named_items
from marl.intents.borrowed import Library, in_lessons, learnable, library
from marl.intents.streams import Intent
from marl.pretraining import corpus
from marl.pretraining.config import BaseConfig
from marl.rollout.games import env_maker
from tests.human_dialogues import DATA, needs_data

GAME = env_maker({"game": "dond", "style": "compact", "objective": 0.0, "split": "train"})
INTENT_LINE = re.compile(r"me (\d+) books (\d+) hats (\d+) balls you (\d+) books (\d+) hats (\d+) balls\n")
POOL = re.compile(r"books (\d+) \d+ hats (\d+) \d+ balls (\d+) \d+ objective")


@cache
def people() -> list[HumanView]:
    """Every tenth dialogue that may be learned from."""
    return [view for view in read_split(DATA, "train").usable if learnable(view)][::10]


@cache
def lent() -> Library:
    return library(people())


def triples(text: str, pattern: re.Pattern[str]) -> list[Triple]:
    """The numbers of a line, three by three."""
    found = pattern.match(text)
    assert found is not None, text
    numbers = [int(number) for number in found.groups()]
    return [(numbers[i], numbers[i + 1], numbers[i + 2]) for i in range(0, len(numbers), 3)]


def check(message: str, claim: Triple, counts: Triple) -> None:
    """Asserts that a message names what a claim has and nothing else."""
    whole, named = certain_split(message, counts), named_items(message, counts)
    assert whole in (None, claim), (message, claim, counts, whole)
    assert named, (message, counts)
    assert all(claim[item] == number for item, number in named.items()), (message, claim, counts, named)


@needs_data
def test_all_that_is_lent_names_the_items_of_its_claim() -> None:
    """Checks by brute force each message of each pool under each of its claims; no claim that it fits is left out."""
    messages = 0
    for counts, (whole, some) in lent().items():
        for kind in (whole, some):
            for claim, said in kind.items():
                assert claim in allocations(counts) and any(claim) and any(rest(claim, counts))
                for message in said:
                    check(message, claim, counts)
                    assert certain_split(message, counts) == (claim if kind is whole else None), (message, counts)
                messages += len(said)
        for message, claims in Counter(message for said in some.values() for message in {*said}).items():
            named = named_items(message, counts)
            fit = [c for c in allocations(counts) if all(c[i] == n for i, n in named.items())]
            assert claims == sum(any(c) and c != counts for c in fit), (message, counts)
    assert messages > 5000


@needs_data
def test_names_are_read_alike_under_all_names() -> None:
    """Renaming moves what is read and changes nothing else: plurals, numbers, negations, basketballs."""
    read = 0
    for view in people():
        for who, text in view.turns:
            if who != "YOU" or text is None:
                continue
            named, whole = named_items(text, view.counts), certain_split(text, view.counts)
            for order in [(a, b, c) for a, b, c in permutations(range(3))]:
                other = permuted(view, order)
                if other is view:  # an item under another name: left as it is
                    continue
                place = view.turns.index((who, text))
                renamed = str(other.turns[place][1])
                assert named_items(renamed, other.counts) == {order.index(i): n for i, n in named.items()}, renamed
                expected = whole and tuple(whole[i] for i in order)
                assert certain_split(renamed, other.counts) == expected, renamed
                read += 1
    assert read > 3000


def shown(share: float, first: bool) -> Iterator[tuple[corpus.Steps, bool]]:
    """Yields what models read of people's dialogues with renamed items, and whether it is a lesson."""
    intents = {}
    for view in people():
        replies = 1 + sum(who == "YOU" and text is not None for who, text in view.turns)
        intents[view.index] = [Intent(view.claim, view.partner_claim)] * replies  # type: ignore[arg-type]
    ways = in_lessons("both", intents, lent(), 1, share=share, first=first)
    lessons: list[bool] = []
    cut = ways["cut"]

    def noted(view: HumanView) -> HumanView:
        found = cut(view)
        lessons.append(found is not view)
        return found

    add = ways["add"]
    shown_steps: list[tuple[corpus.Steps, bool]] = []

    def adding(view: HumanView, order: Triple, steps: list[corpus.Step]) -> corpus.Steps:
        shown_steps.append((add(view, order, steps), lessons[-1]))
        return shown_steps[-1][0]

    base, rng = BaseConfig(data="human", deals_only=True), np.random.default_rng(3)
    corpus.recorded(str(DATA), "train", [GAME], base, rng, refuse=ways["refuse"], cut=noted, add=adding)
    yield from shown_steps


@needs_data
def test_lessons_say_and_claim_what_their_intent_names() -> None:
    """Words, claim and intent of every lesson agree with the pool in its opening, as a model reads them after both
    renamings. About half of the lessons state a whole split."""
    lessons, whole, claims = 0, 0, Counter[tuple[Triple, Triple]]()
    for steps, lesson in shown(share=1.0, first=False):
        if not lesson:
            continue
        (counts,) = triples(steps[0][1], POOL)
        replies = [place for place, step in enumerate(steps) if step[0] == "reply"]
        assert len(replies) == 2 and replies[-1] == len(steps) - 1
        said, claimed = (steps[place][1] for place in replies)
        message = said.removeprefix("[message] ").removesuffix(" [END]")
        intents = [triples(steps[place - 1][1], INTENT_LINE) for place in replies]
        assert intents[0] == intents[1] and all(steps[place - 1][0] == "tell" for place in replies)
        own, partner = intents[0]
        assert partner == rest(own, counts)
        check(message, own, counts)
        assert claimed == f"[propose] ({own[0]} books, {own[1]} hats, {own[2]} balls) [END]"
        lessons += 1
        if certain_split(message, counts) is None:
            claims[counts, own] += 1
        else:
            whole += 1
    assert lessons > 500 and 0.4 < whole / lessons < 0.6
    assert uneven(claims) < 1.3 < 1.6 < uneven(Counter((view.counts, view.claim) for view in people()))  # type: ignore[misc]


def uneven(claims: Counter[tuple[Triple, Triple]]) -> float:
    """Variance of a pool's claims over their mean: about 1 where each is drawn as often as any other."""
    squares, free = 0.0, 0
    for pool in {counts for counts, _ in claims}:
        drawn = [claims[pool, own] for own in allocations(pool) if any(own) and own != pool]
        squares += np.square(np.subtract(drawn, np.mean(drawn))).sum() / (np.mean(drawn) or 1)
        free += len(drawn) - 1
    return squares / free

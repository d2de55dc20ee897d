"""Lessons by which a dialogue model learns to follow its intent.

In human dialogues the talk so far and the values nearly tell what a message says, so a model learns to say it without
reading its intent. A lesson is a dialogue that ends with one of the player's messages and both proposals. Its intent is
drawn evenly over claims. Words that fit it, and that somebody else said over such a pool, replace the message. Only the
intent tells them, and the player's proposal, which claims it. Of the player's replies these two alone are imitated.
What stands before them is read as in any dialogue: belief questions and the partner's words are learned there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from envs.dond.rules import Context, Triple, allocations, in_test, rest
from envs.human_dond import HumanView, Step, permuted
from marl.common.errors import check_count, check_range
from marl.intents.annotate import certain_split, named_items
from marl.intents.streams import Intent, grounded
from marl.pretraining import corpus

BORROWED = 109  # of the seed
WHOLE = 0.5  # share of lessons whose message states a whole split, where the pool has some


@dataclass(frozen=True)
class Lessons:
    """Settings: `epochs` of lessons about first messages (0: no lessons), without dropout. Then, among people's own
    dialogues, lessons about any message make up this `share`."""

    epochs: int = 0
    learning_rate: float = 4e-3
    share: float = 0.5

    def __post_init__(self) -> None:
        check_count(self.epochs, "lessons.epochs", 0)
        check_range(self, "lessons", "[0, 1)", "share")
        check_range(self, "lessons", "(0, inf)", "learning_rate")


# Messages by pool: those that state a whole split, and others that name items, each under every claim that it fits.
Library = Mapping[Triple, tuple[dict[Triple, list[str]], dict[Triple, list[str]]]]


def learnable(view: HumanView) -> bool:
    """Tells whether a dialogue of the training split may be learned from: it made a deal, over no test context."""
    return view.agree and not in_test(Context(view.counts, (view.values, view.partner_values)))


def library(views: Sequence[HumanView]) -> Library:
    """Collects the messages of these dialogues that name items without doubt, with items renamed in all six ways."""
    found: dict[Triple, tuple[dict[Triple, list[str]], dict[Triple, list[str]]]] = {}
    for view in [permuted(view, (a, b, c)) for view in views for a, b, c in permutations(range(3))]:
        for message in filter(None, (text for who, text in view.turns if who == "YOU")):
            whole, named = certain_split(message, view.counts), named_items(message, view.counts)
            for claim in [whole] if whole else [c for c in allocations(view.counts) if named and fits(named, c)]:
                if any(claim) and claim != view.counts:
                    found.setdefault(view.counts, ({}, {}))[whole is None].setdefault(claim, []).append(message)
    return found


def fits(named: Mapping[int, int], claim: Triple) -> bool:
    """Tells whether all named items go as a claim has them."""
    return all(claim[item] == number for item, number in named.items())


def in_lessons(
    arm: str, intents: Mapping[int, Sequence[Intent]], lent: Library, seed: int, share: float, first: bool
) -> dict[str, Any]:
    """Tells `corpus.recorded` how to show human dialogues: this `share` of them as lessons, the others whole, and those
    for which nothing can be borrowed. `first`: lessons are about the player's first message, so streams are short."""
    rng = np.random.default_rng([seed, BORROWED])
    lessons: dict[int, Intent] = {}  # of this pass, by view

    def cut(view: HumanView) -> HumanView:
        lessons.pop(view.index, None)
        own = [number for number, (who, text) in enumerate(view.turns) if who == "YOU" and text is not None]
        kinds = [kind for kind in lent.get(view.counts, ()) if kind]
        if not own or not kinds or rng.random() >= share:
            return view
        number = own[0 if first else rng.integers(len(own))]
        kind = kinds[int(rng.random() >= WHOLE) % len(kinds)]
        claim = [*kind][rng.integers(len(kind))]  # even over claims, as people say some far more often than others
        message = kind[claim][rng.integers(len(kind[claim]))]
        lessons[view.index] = intent = Intent(claim, rest(claim, view.counts))
        turns = (*view.turns[:number], ("YOU", message), ("THEM", None))
        return replace(view, turns=turns, claim=intent.own, partner_claim=intent.partner)

    def add(view: HumanView, order: Triple, steps: list[Step]) -> corpus.Steps:
        own = list(intents[view.index])
        if view.index not in lessons:
            return grounded(steps, arm, [intent.renamed(order) for intent in own])
        before = sum(step[0] == "reply" for step in steps) - 2  # the last two are the lesson: a message and a proposal
        own = [*own[:before], *[lessons[view.index]] * 2]
        grounded_steps = grounded(steps, arm, [intent.renamed(order) for intent in own])
        for number in [number for number, step in enumerate(grounded_steps) if step[0] == "reply"][:-2]:
            grounded_steps[number] = ("given", grounded_steps[number][1])
        return grounded_steps

    return {"refuse": lambda view: "" if view.index in intents else "no intent", "cut": cut, "add": add}

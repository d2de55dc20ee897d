"""Annotates the messages of human dialogues with intents, and tests the annotation where words leave no doubt.

The intent of a message is what both players would most likely claim if talk stopped after it. The action model reads
the dialogue up to and including the message and nothing later, and an injected, agreeing end, which is the same for
both: its partner says `deal`, and the player proposes. Each player's claim is read in its own stream, with its own
values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envs.dond.rules import Triple, allocations
from envs.human_dond import HumanEnding, HumanView, NotReplayable, Speaker, replay
from marl.agents.scripted.dond_language import ITEM_OF, stated_items, understand
from marl.intents.claims import ClaimReader
from marl.intents.streams import Intent, agreeing_end, unasked, up_to_claim
from marl.metrics.negotiation import explicit


def swapped(view: HumanView) -> HumanView:
    """The same dialogue from the partner's side."""
    turns: list[tuple[Speaker, str | None]] = [("THEM" if who == "YOU" else "YOU", text) for who, text in view.turns]
    return replace(
        view, index=view.index ^ 1, values=view.partner_values, partner_values=view.values, turns=tuple(turns),
        claim=view.partner_claim, partner_claim=view.claim,
    )  # fmt: skip


def cut_after(view: HumanView, number: int) -> HumanView:
    """The dialogue up to and including its `number`-th turn (-1: no turn), with an agreeing end as `agreeing_end` has
    it: what comes later is gone, but for the claims, which no stream up to a proposal shows."""
    kept = view.turns[: number + 1]
    assert all(text is not None for _, text in kept), "a proposal is no message"
    end = agreeing_end(bool(kept) and kept[-1][0] == "YOU")
    closing: list[tuple[Speaker, str | None]] = [("YOU" if mine else "THEM", text) for mine, text in end]
    return replace(view, turns=(*kept, *closing, ("YOU", None)), ending=HumanEnding.DEAL)


def annotate(views: Iterable[HumanView], reader: ClaimReader, env: Any) -> dict[int, list[Intent]]:
    """One intent for each of YOUR replies, by the view's index: read for messages, the real claims for the proposal.

    Left out are views that the environment can't play, and those whose partner's claim is unknown.
    """
    streams: list[list[int]] = []
    counts: list[Triple] = []
    places: list[tuple[int, int]] = []  # of each pair of streams: the view, and which of its replies
    found: dict[int, list[Intent]] = {}
    for view in views:
        if view.claim is None or view.partner_claim is None:
            continue
        own = [number for number, (who, text) in enumerate(view.turns) if who == "YOU" and text is not None]
        try:
            both = [_both_streams(view, number, reader, env) for number in own]
        except NotReplayable:
            continue
        found[view.index] = [Intent(view.claim, view.partner_claim)] * (len(own) + 1)
        for reply, pair in enumerate(both):
            streams += pair
            counts += [view.counts] * 2
            places.append((view.index, reply))
    probabilities = reader.probabilities(streams, counts)
    for (index, reply), mine, theirs, pool in zip(
        places, probabilities[::2], probabilities[1::2], counts[::2], strict=True
    ):
        claims = allocations(pool)
        found[index][reply] = Intent(claims[int(mine.argmax())], claims[int(theirs.argmax())])
    return found


def _both_streams(view: HumanView, number: int, reader: ClaimReader, env: Any) -> list[list[int]]:
    sides = [cut_after(side, number) for side in (view, swapped(view))]
    unknown = [replace(side, claim=(0, 0, 0), partner_claim=side.counts) for side in sides]
    return [up_to_claim(unasked(replay(side, env)), reader.tokens) for side in unknown]


# --- The correspondence test ------------------------------------------------------------------------------------------


# Words that make a split a condition, a share of an item, an exception or no offer of the speaker's own; and those that
# say behind an item who gets it, which the parser does not follow.
UNSURE = {
    "if", "or", "unless", "either", "instead", "split", "some", "half", "each", "negative", "trade", "then", "but",
    "except", "besides", "least", "negotiate", "yours", "mine", "available", "willing", "more", "worth", "return",
    "exchange",
}  # fmt: skip
TRADE = re.compile(r"\bfor (?:an?|the|your|all|both|one|two|three|four|\d)\b")  # "1 hat for 2 books": read as no books


@dataclass(frozen=True)
class Tested:
    """A message that states a whole split in words that leave no doubt."""

    dialogue: str
    message: str
    stated: Triple  # the speaker's share, as the parser reads it
    annotated: Triple  # its annotated claim
    naive: Triple  # what it claimed in the end


def certain_split(message: str, counts: Triple) -> Triple | None:
    """The speaker's share, if a message states a whole split that the parser reads with certainty; else None.

    It names all three items, or some and the rest, refuses and asks nothing, is no condition, and means the same
    whatever was on the table before. To give or to ask for everything is mostly a misreading, and left out.
    """
    names_items = ITEM_OF.keys() & re.findall(r"[a-z]+", message.lower())
    if not explicit(message) or "?" in message or unsure(message) or not names_items:
        return None
    readings = {understand(message, counts, table).share for table in (None, counts, (0, 0, 0), _half(counts))}
    (share, *others) = readings
    return None if others or share in (None, counts, (0, 0, 0)) else share


def named_items(message: str, counts: Triple) -> dict[int, int]:
    """Reads how many the speaker would get of each item that a message names without a condition or exception."""
    return {} if unsure(message) else stated_items(message, counts)


def unsure(message: str) -> bool:
    """Tells whether a message has words that leave doubt who gets what."""
    lower = message.lower()
    return not UNSURE.isdisjoint(re.findall(r"[a-z]+", lower)) or TRADE.search(lower) is not None


def _half(counts: Triple) -> Triple:
    return counts[0] // 2, counts[1] // 2, counts[2] // 2


def correspondence(views: Sequence[HumanView], intents: dict[int, list[Intent]]) -> list[Tested]:
    """The test's messages, of YOU, with both annotations."""
    found = []
    for view in views:
        if view.index not in intents:
            continue
        own = [text for who, text in view.turns if who == "YOU" and text is not None]
        for text, intent in zip(own, intents[view.index], strict=False):
            share = certain_split(text, view.counts)
            if share is not None and view.claim is not None:
                found.append(Tested(view.dialogue, text, share, intent.own, view.claim))
    return found

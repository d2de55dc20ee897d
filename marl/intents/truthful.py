"""Finds the human dialogues whose players claim what they said: what an action model is trained on."""

from __future__ import annotations

from envs.dond.rules import Triple, rest
from envs.human_dond import HumanView
from marl.agents.scripted.dond_language import understand
from marl.metrics.negotiation import Talk, human_talk

OTHER = "other claim"  # than was said


def promised(talk: Talk, seat: int) -> Triple | None:
    """A player's share of the last split that it stated itself, or that the other stated and it said yes to.

    None if there is none. Splits are read by the grammar of the scripted players.
    """
    table: list[Triple | None] = [None, None]  # the last split of either, from each side
    named_by, last = -1, None
    for line in talk.lines:
        if line.claim is not None:
            continue
        here = line.seat
        heard = understand(line.message, talk.counts, table[here])
        if heard.share is not None:
            table[here], table[1 - here], named_by = heard.share, rest(heard.share, talk.counts), here
            last = heard.share if here == seat else last
        elif heard.accepts and here == seat and named_by == 1 - seat:
            last = table[seat]
    return last


def unfaithful(view: HumanView) -> str:
    """Why YOUR claim is no evidence of what YOU said: `no split`, `other claim`; empty if it keeps YOUR word."""
    word = promised(human_talk(view), 0)
    if word is None:
        return "no split"
    return "" if view.claim == word else OTHER

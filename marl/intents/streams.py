"""Streams that show what a message is grounded in: the player's own values, its intent, both or neither.

An intent is a pair of claims, what the player means to claim and what it expects of its partner. It stands before each
of the player's own replies, where only this player reads it (`StreamWriter.tell`). Without the state, the values in the
opening are written as 0; the pool stays, since both players and the rules know it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from envs.core import END
from envs.dond.replies import MESSAGE, PROPOSE
from envs.dond.rules import ITEMS, Triple
from envs.dond.texts import prompt_with
from envs.human_dond import Step
from marl.learning.batch import Row
from marl.model.tokens import StreamWriter, Tokens
from marl.pretraining.corpus import Steps
from marl.types import Kind, Stream, Turn

ARMS = ("none", "state", "intent", "both")
INTENT_ARMS = ("intent", "both")  # arms whose models are told intents
HIDDEN: Triple = (0, 0, 0)  # stands for values that a model is not to know
AGREE = "deal"  # the words of the injected end


class Intent(NamedTuple):
    """Both players' claims, from the side of who means them; they need not fit together."""

    own: Triple
    partner: Triple

    def renamed(self, order: Triple) -> Intent:
        """The same intent with its items renamed as in `human_dond.permuted`."""
        own, partner = ((each[order[0]], each[order[1]], each[order[2]]) for each in self)
        return Intent(own, partner)


def intent_text(intent: Intent) -> str:
    """The line by which a model is told its intent."""
    own, partner = (" ".join(f"{n} {item}" for n, item in zip(each, ITEMS, strict=True)) for each in intent)
    return f"me {own} you {partner}\n"


# Kept with models: those that were told numbers alone, as once, would misread names.
FORM = intent_text(Intent((1, 2, 3), (3, 2, 1)))


def insert_lines(row: Row, lines: Iterable[tuple[Turn, str]], tokens: Tokens) -> Row:
    """The row with a line before the cue of each of these turns, where the player alone reads it, as
    `StreamWriter.tell` writes it."""
    episode, agent = row
    stream, cue = episode.streams[agent], len(tokens.format.cue)
    inserted = {turn.start - cue: tokens.framed(line, tokens.format.heard) for turn, line in lines}

    def moved(position: int) -> int:
        return position + sum(len(ids) for place, ids in inserted.items() if place <= position)

    longer = Stream()
    for position, (token, kind) in enumerate(zip(stream.tokens, stream.kinds, strict=True)):
        longer.append(inserted.get(position, []), Kind.QUESTION)
        longer.append([token], kind)
    turns = [replace(t, start=moved(t.start)) if t.agent == agent and t.start >= 0 else t for t in episode.turns]
    beliefs = [replace(b, position=moved(b.position)) if b.listener == agent else b for b in episode.beliefs]
    streams = {**episode.streams, agent: longer}
    return replace(episode, streams=streams, turns=tuple(turns), beliefs=tuple(beliefs)), agent


def check_arm(arm: str) -> None:
    """Raises AssertionError for an arm that is none of ARMS."""
    assert arm in ARMS, (arm, ARMS)


def opening_of(text: str, arm: str) -> str:
    """A first observation as this arm reads it."""
    check_arm(arm)
    return prompt_with(text, HIDDEN) if arm in ("none", "intent") else text


def grounded(steps: Sequence[Step], arm: str, intents: Sequence[Intent]) -> Steps:
    """Lists what a view reads and replies in this arm. `intents`: one for each reply, where the arm has any."""
    found: Steps = []
    replies = 0
    for number, step in enumerate(steps):
        if step[0] == "reply":
            if arm in INTENT_ARMS:
                found.append(("tell", intent_text(intents[replies])))
            replies += 1
            found.append(step)
        else:
            found.append(("observe", opening_of(step[1], arm) if number == 0 else step[1], step[2]))
    assert arm not in INTENT_ARMS or replies == len(intents), (replies, intents)
    return found


def unasked(steps: Iterable[Step]) -> list[Step]:
    """The same without belief questions, as claims are read: such streams are a third shorter."""
    found: list[Step] = []
    for step in steps:
        if step[0] == "reply":
            found.append(step)
        elif step[1]:
            found.append(("observe", step[1], ()))
    return found


def up_to_claim(steps: Sequence[Step], tokens: Tokens) -> list[int]:
    """A player's stream up to the cue of its proposal."""
    view = StreamWriter(tokens)
    for number, step in enumerate(steps):
        if step[0] == "observe":
            view.observe(step[1], step[2], number)
            continue
        view.cue()
        if step[1].startswith(PROPOSE):
            return view.stream.tokens
        view.reply(tokens.encode(step[1]), Kind.SPEECH)
    raise AssertionError("no proposal in these steps")


def agreeing_end(spoke_last: bool) -> list[tuple[bool, str | None]]:
    """The injected end of a player's talk, after which it proposes: its partner says `deal`, and before that the player
    itself, unless it `spoke_last`. True: the player's own words."""
    return [(False, AGREE)] if spoke_last else [(True, AGREE), (False, AGREE)]


def message_reply(words: str) -> str:
    """The reply that says these words."""
    return f"{MESSAGE} {words} {END}"

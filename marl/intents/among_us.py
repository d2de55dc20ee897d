"""Intents in Among Us: whom a speaker means to vote for, and whom it wants its hearers to vote for.

Here is what needs no model: the line that tells an intent, the names that words accuse with certainty, which messages
are truthful by the game's log, what the table has heard, and what an imposter must not say.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.among_us import events
from envs.among_us.reading import read
from envs.among_us.rules import parse_message
from envs.among_us.state import Act, Role, Room, Rules
from envs.among_us.texts import LOWER, write
from envs.core import Style
from marl.agents.scripted.among_us import Memory
from marl.agents.scripted.among_us_language import ACCUSING, Topic, understand
from marl.common.errors import check_range
from marl.metrics.claims import claims_of
from marl.planning import pikl
from marl.types import Episode

Floats = NDArray[np.float64]
SKIP = Act.SKIP.value
CERTAIN = (Topic.ACCUSE, Topic.KILL)  # topics that name the imposter outright; the others only hint
NEVER = -1.0  # value of a vote that no plan makes: for oneself, or for a fellow


class Intent(NamedTuple):
    """Votes by name as options have them (`red`), or `skip`: the speaker's own, and the one it wants of its hearers."""

    own: str
    others: str


def intent_text(intent: Intent) -> str:
    """The line by which a model is told its intent."""
    return f" you vote {intent.own} players vote {intent.others}"


@dataclass(frozen=True)
class TableConfig:
    """Settings of talk with a plan in Among Us. Raises UserError, naming the setting, for bad values."""

    strength: float = 0.03  # lambda of the own anchored best response, in caught imposters a nat
    floor: float = 1e-6  # the least anchor probability that it counts
    mistake: float = 0.0  # cost of ejecting a crewmate, in caught imposters; above 0, skipping may be best
    giveaway: float | None = 0.02  # most that an imposter's message may add to the votes against it; None: no filter
    facts: bool = True  # an imposter says nothing that exposes it or that its own eyes contradict

    def __post_init__(self) -> None:
        check_range(self, "cicero.among_us", "[0, inf)", "strength", "mistake")
        check_range(self, "cicero.among_us", "(0, 1)", "floor")
        check_range(self, "cicero.among_us", "[0, 1], or null for none", "giveaway")


# --- Words ------------------------------------------------------------------------------------------------------------
def accused_outright(message: str) -> str:
    """The one name that a message calls the imposter or a killer, in lower case; empty if there is none, or several."""
    names = {LOWER[s.who] for s in understand(message) if s.topic in CERTAIN and s.who}
    return names.pop() if len(names) == 1 else ""


def mentioned(message: str) -> str:
    """The one name of a message that accuses nobody, not even by a hint, in lower case; empty if there is none."""
    statements = understand(message)
    names = {LOWER[s.who] for s in statements if s.who}
    return names.pop() if len(names) == 1 and not any(s.topic in ACCUSING for s in statements) else ""


def as_heard(reply: str) -> str:
    """A reply as others hear it, within the game's usual limits; env.message_words and message_chars may set others."""
    return parse_message(reply, Rules.message_words, Rules.message_chars, compact=True).text


def untruthful(episode: Episode) -> set[tuple[str, int]]:
    """The messages, by agent and step, with a claim of fact that the game's log refutes. Opinions are no lies."""
    return {(claim.turn.agent, claim.turn.step) for claim in claims_of(episode) if claim.of_fact and claim.false}


def votes_of(living: Collection[str]) -> tuple[str, ...]:
    """The legal votes among these players, in a fixed order: their names in lower case, and `skip` last."""
    return (*sorted(name.lower() for name in living), SKIP)


# --- What is known at the table ---------------------------------------------------------------------------------------
class Witness(Memory):
    """Reads what one seat is told, and keeps all that it saw since the last vote and all that was said in this
    discussion, its own words too (`spoke`)."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.role, self.names = Role.CREWMATE, tuple[str, ...]()
        self.words: list[tuple[str, str]] = []  # speaker and message

    def forget(self) -> None:
        super().forget()
        self.met: set[tuple[str, Room]] = set()  # whom it saw where
        self.voting = False

    def opened(self) -> None:
        self.words = []

    def observe(self, text: str) -> None:
        meeting, heard = self.meeting, len(self.said)
        super().observe(text)
        heard = heard if self.meeting is meeting else 0
        self.words += [(said.speaker, said.message) for said in self.said[heard:]]
        for event in read(text, self.style):
            match event:
                case events.Intro():
                    self.role, self.names = event.role, event.names
                case events.Look():
                    around = (*event.present, *(name for name, _ in event.entering))
                    self.met |= {(name, event.room) for name in around} | set(event.leaving)
                case events.VoteNow():
                    self.voting = True

    def spoke(self, message: str) -> None:
        """Takes note of an own message."""
        self.words.append((self.me, message))

    def table(self, hearer: str) -> str:
        """Returns what the whole table has heard in this discussion (`table_texts`)."""
        assert self.meeting is not None
        grid = Grid(self.width, self.height, self.names, self.imposters)
        return "".join(table_texts(hearer, grid, self.meeting, self.words, self.style))


class Grid(NamedTuple):
    """Facts of a game that everybody knows."""

    width: int
    height: int
    names: tuple[str, ...]
    imposters: int


def table_texts(
    hearer: str, grid: Grid, meeting: events.Meeting, words: Sequence[tuple[str, str]], style: Style
) -> list[str]:
    """Returns what a crewmate who saw nothing else of the game reads of a discussion: the opening, and each message."""
    intro = events.Intro(hearer, Role.CREWMATE, *grid, (), ())
    opening = write(intro, style) + write(meeting, style)
    return [opening, *(heard_text(speaker, message, style) for speaker, message in words)]


def heard_text(speaker: str, message: str, style: Style) -> str:
    """A message as its hearers read it."""
    return write(events.Said(speaker, message), style)


def exposes(message: str, seen: Witness) -> str:
    """Why an imposter must not say this: `itself` for words against itself or a fellow, or that place it where the body
    lay; `false` for what somebody may know to be false, by the imposter's own eyes. Empty if it may."""
    assert seen.meeting is not None
    body, team = seen.meeting.room, {seen.me, *seen.fellows}
    for s in understand(message):
        if s.who in team and s.topic in ACCUSING:
            return "itself"
        here = s.topic in (Topic.WHERE, Topic.TASK, Topic.WITH) or (s.topic is Topic.SAW and s.who == seen.me)
        if s.room == body and (here or (s.topic is Topic.SAW and s.who in team)):
            return "itself"
        if s.topic is Topic.KILL:
            return "false"  # whoever is named knows better
        if here and s.room not in seen.visited:
            return "false"
        if s.topic in (Topic.WITH, Topic.SAW) and s.who not in team and s.room and (s.who, s.room) not in seen.met:
            return "false"
    return ""


# --- Plans ------------------------------------------------------------------------------------------------------------
def crew_values(votes: Sequence[str], believed: dict[str, float], me: str, mistake: float) -> Floats:
    """Values (A,) of a crewmate's votes: the believed probability that the named player is the imposter, less `mistake`
    times that it is not; 0 for skipping."""
    worth = [believed.get(vote, 0.0) - mistake * (1 - believed.get(vote, 0.0)) for vote in votes]
    return np.array([0.0 if v == SKIP else NEVER if v == me else w for v, w in zip(votes, worth, strict=True)])


def imposter_values(votes: Sequence[str], hearers: Sequence[str], expected: Floats, team: Collection[str]) -> Floats:
    """Values (A,) of an imposter's votes: the share of the crew that will vote with it. `expected` (H, A): the hearers'
    votes as the table's words suggest them; nobody votes for itself."""
    found = np.array([support(vote, votes, hearers, expected) for vote in votes])
    return np.array([0.0 if v == SKIP else NEVER if v in team else w for v, w in zip(votes, found, strict=True)])


def support(vote: str, votes: Sequence[str], hearers: Sequence[str], expected: Floats) -> float:
    """The mean probability of a vote over the hearers that it does not name. `expected` (H, A)."""
    others = [number for number, hearer in enumerate(hearers) if hearer != vote]
    return float(expected[others, votes.index(vote)].mean()) if others else 0.0


def planned_vote(values: Floats, anchor: Floats, config: TableConfig) -> int:
    """The anchored best response (`pikl.best_response`) among the votes that plans make."""
    allowed = np.where(values == NEVER, -np.inf, values)
    return int(pikl.best_response(allowed, anchor, config.strength, config.floor))

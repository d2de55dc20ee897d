"""What was said and done in games of Among Us, read off their turns: votes, messages, whom they name, who saw a kill.

A game is played through once more from its replies (`read_game`), by the rules of envs/among_us_v0.py: who lived, who
was in which room, who noticed a killer. What it leaves out: how often any of it happens (evaluate.py, monitor.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from envs.among_us.state import DIRECTIONS, NAMES, SKIP, WAIT, Act, Action
from envs.among_us.texts import OPTION, ROOMS
from envs.core import Style, TurnKind
from marl.agents.scripted.among_us_language import accused
from marl.types import Episode, Turn

_ACTIONS = {text: action for style in Style for action, text in OPTION[style].items()}
_NAME = re.compile(rf"\b(?:{'|'.join(NAMES)})\b", re.IGNORECASE)
_ROOM = re.compile(rf"(?:\broom )?\(\d, ?\d\)|\b(?:{'|'.join(name for row in ROOMS for name in row)})\b", re.IGNORECASE)


def of_among_us(facts: Mapping[str, Any]) -> bool:
    """Whether these are the facts of a game of Among Us."""
    return {"names", "imposters"} <= facts.keys()


@dataclass(frozen=True)
class Vote:
    """One player's vote for a living player, possibly itself, or for nobody."""

    turn: Turn
    target: str  # a name; empty: skip
    living: tuple[str, ...]  # names of all who vote
    imposters: tuple[str, ...]  # those of them who are imposters
    seen: tuple[str, ...] = ()  # and those whom the voter noticed killing

    @property
    def right(self) -> bool:
        return self.target in self.imposters

    @property
    def chance(self) -> float:
        """How probable a right vote is if one votes for a living player at random."""
        return len(self.imposters) / len(self.living)


@dataclass(frozen=True)
class Message:
    """A message and what its speaker might say: names of the living others, imposters among them, killers it saw."""

    turn: Turn
    others: tuple[str, ...]
    imposters: tuple[str, ...]
    seen: tuple[str, ...]  # imposters alive whom the speaker noticed killing

    @property
    def named(self) -> tuple[str, ...]:
        """The living others whose name stands in the message as a word, in any case."""
        words = set(re.findall(r"\w+", self.turn.message.lower()))
        return tuple(name for name in self.others if name.lower() in words)

    @property
    def accused(self) -> tuple[str, ...]:
        """The living others whom the message speaks against, as far as the scripted players' grammar tells."""
        against = set(accused(self.turn.message))
        return tuple(name for name in self.others if name in against)

    def meets(self, names: Collection[str]) -> bool:
        """Whether one of these names is an imposter's."""
        return any(name in self.imposters for name in names)

    def chance(self, count: int) -> float:
        """How probable it is that `count` different living others, drawn at random, include an imposter."""
        innocent = len(self.others) - len(self.imposters)
        return 1 - math.comb(innocent, count) / math.comb(len(self.others), count)


@dataclass(frozen=True)
class Record:
    """One game: all votes and messages in order, whom each vote ejected (empty: nobody), and how many reported."""

    votes: tuple[Vote, ...]
    messages: tuple[Message, ...]
    ejected: tuple[str, ...]
    reports: int


def read_game(episode: Episode) -> Record:
    """What happened in a game of Among Us. Its `facts` and all its `turns` must be there, in order of their steps."""
    names: dict[str, str] = dict(episode.facts["names"])  # by agent
    guilty = {names[agent] for agent in episode.facts["imposters"]}
    start = ((episode.facts["width"] - 1) // 2, 0)
    living = {name: start for name in names.values()}  # and where they are; walkers, where they walk to
    busy: set[str] = set()  # at a task: they do not see the room
    seen: dict[str, set[str]] = {name: set() for name in living}  # killers whom each player noticed
    votes: list[Vote] = []
    messages: list[Message] = []
    ejected: list[str] = []
    reports = 0
    for _, group in groupby(episode.turns, key=lambda turn: turn.step):
        turns = list(group)
        if turns[0].kind == TurnKind.SPEAK:
            heard = [turn for turn in turns if turn.message]
            messages += [_message(turn, names[turn.agent], list(living), guilty, seen) for turn in heard]
            continue
        acts = {names[turn.agent]: _action(turn) for turn in turns}
        if any(action.act in (Act.VOTE, Act.SKIP) for action in acts.values()):
            imposters = tuple(name for name in living if name in guilty)
            for turn in turns:
                noticed = tuple(name for name in imposters if name in seen[names[turn.agent]])
                votes.append(Vote(turn, acts[names[turn.agent]].target, tuple(living), imposters, noticed))
            ejected.append(_plurality(acts.values()))
            living.pop(ejected[-1], None)
            living = dict.fromkeys(living, start)
            busy = set()
            continue
        for name, action in acts.items():
            busy.discard(name)  # whoever has done a task is asked again at once
            if action.act is Act.TASK:
                busy.add(name)
            elif action.act is Act.GO:
                (x, y), (dx, dy) = living[name], DIRECTIONS[action.target]
                living[name] = (x + dx, y + dy)
            reports += action.act is Act.REPORT
        rooms = dict(living)
        for killer, action in acts.items():
            if action.act is Act.KILL and action.target in living:  # else another imposter was faster
                del living[action.target]
                for name in living:
                    if name != killer and rooms[name] == rooms[killer] and name not in busy:
                        seen[name].add(killer)
    return Record(tuple(votes), tuple(messages), tuple(ejected), reports)


def _message(
    turn: Turn, speaker: str, living: Sequence[str], guilty: Collection[str], seen: dict[str, set[str]]
) -> Message:
    others = tuple(name for name in living if name != speaker)
    return Message(
        turn,
        others,
        tuple(name for name in others if name in guilty),
        tuple(name for name in others if name in seen[speaker]),
    )


def _action(turn: Turn) -> Action:
    """What a choice counted as: a refused one as a wait or as no vote, and its error says which."""
    if turn.error:
        return SKIP if turn.error.endswith(f"{Act.SKIP}.") else WAIT
    return _ACTIONS[turn.text.strip()]


def _plurality(votes: Collection[Action]) -> str:
    """The name with more votes than any other and than skip; empty where there is none."""
    counts = Counter(vote.target for vote in votes)
    most = max(counts.values())
    leaders = [target for target, n in counts.items() if n == most]
    return leaders[0] if len(leaders) == 1 else ""


# --- Forms of sentences -----------------------------------------------------------------------------------------------
def template(message: str) -> str:
    """The message in lower case, with {name} and {room} for any name and room."""
    return " ".join(_ROOM.sub("{room}", _NAME.sub("{name}", message)).lower().split())


def sentence_forms(episodes: Sequence[Episode], players: Collection[str] | None = None) -> Counter[str]:
    """How often these players (names in `Episode.players`; None: all) used each template of a message."""
    return Counter(
        template(turn.message)
        for episode in episodes
        for turn in episode.turns
        if turn.message and (players is None or episode.players[turn.agent] in players)
    )

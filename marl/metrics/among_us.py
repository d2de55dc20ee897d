"""Replays games of Among Us from their replies: rooms, deaths, votes, messages, and who saw a kill."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from envs.among_us.state import DIRECTIONS, NAMES, SKIP, WAIT, Act, Action, Room
from envs.among_us.texts import OPTION, ROOMS
from envs.core import Style, TurnKind
from marl.agents.scripted.among_us_language import accused
from marl.types import Episode, Turn

_ACTIONS = {text.lower(): action for style in Style for action, text in OPTION[style].items()}
NAME = re.compile(rf"\b(?:{'|'.join(NAMES)})\b", re.IGNORECASE)
_ROOM = re.compile(rf"(?:\broom )?\(\d, ?\d\)|\b(?:{'|'.join(name for row in ROOMS for name in row)})\b", re.IGNORECASE)


def of_among_us(facts: Mapping[str, Any]) -> bool:
    """Tells whether these are the facts of a game of Among Us."""
    return {"names", "imposters"} <= facts.keys()


# --- The game once more -----------------------------------------------------------------------------------------------
class Reply(NamedTuple):
    """A turn of an episode or of a transcript, as far as the replay reads it. `turn` is the original."""

    agent: str
    step: int
    kind: str  # SPEAK or CHOOSE
    text: str
    error: str
    turn: Any

    @property
    def action(self) -> Action:
        """The action that a choice counted as: a refused one is a wait, or as its error says a skipped vote."""
        if self.error:
            return SKIP if self.error.endswith(f"{Act.SKIP}.") else WAIT
        return _ACTIONS[self.text.strip().lower()]


@dataclass(frozen=True)
class Deed:
    """A kill or a report of a body. Killer, finder and victim by name; `room` is where the body lies.

    `witnesses`: living players who saw the kill, accomplices too.
    """

    step: int
    act: Act
    who: str
    victim: str
    room: str
    witnesses: tuple[str, ...] = ()

    def __str__(self) -> str:
        done = "kills" if self.act is Act.KILL else "reports the body of"
        seen = f", seen by {', '.join(self.witnesses)}" if self.witnesses else ""
        return f"{self.who} {done} {self.victim} in {self.room}{seen}"


@dataclass
class Moves:
    """The steps between two discussions: each player's action by step and name, and the kills and reports.

    By step, also at the start (-1), `rooms` holds where each living player belongs, `bodies` where the dead lie.
    """

    by_step: dict[int, dict[str, Action]] = field(default_factory=dict)
    deeds: list[Deed] = field(default_factory=list)
    rooms: dict[int, dict[str, Room]] = field(default_factory=dict)
    bodies: dict[int, dict[str, Room]] = field(default_factory=dict)


@dataclass
class Meeting:
    """A discussion and its vote. `messages` and `voters` (by name) hold the original turns.

    `reports` are those of the step that opened it. `seen[name]`: killers whom the player noticed so far. `votes[name]`
    is a name, or empty for a skipped vote. `ejected` is empty for nobody.
    """

    step: int
    living: tuple[str, ...]
    reports: list[Deed]
    seen: dict[str, set[str]]
    messages: list[Any] = field(default_factory=list)
    vote_step: int = -1
    votes: dict[str, str] = field(default_factory=dict)
    voters: dict[str, Any] = field(default_factory=dict)
    ejected: str = ""


def story_of(episode: Episode) -> list[Moves | Meeting]:
    """Replays an episode; see `story`."""
    replies = [Reply(t.agent, t.step, t.kind.name, t.text, t.error, t) for t in episode.turns]
    return story(episode.facts, replies)


def story(facts: Mapping[str, Any], replies: Sequence[Reply]) -> list[Moves | Meeting]:
    """Replays a game by its rules.

    A walker belongs to the room that it walks to; kills of a step take effect in seat order; whoever is busy with a
    task does not see the room; a strict plurality ejects; after a vote all stand in the start room, and the body that
    was reported is gone (of several in one step the first, as the replies do not tell which).
    """
    names: dict[str, str] = facts["names"]  # by agent
    living = list(names.values())
    start = ((facts["width"] - 1) // 2, 0)
    rooms = dict.fromkeys(living, start)
    bodies: dict[str, str] = {}  # victim -> room
    busy: set[str] = set()
    seen: dict[str, set[str]] = {name: set() for name in living}
    chapters: list[Moves | Meeting] = []
    steps: dict[int, list[Reply]] = {}
    for reply in replies:
        steps.setdefault(reply.step, []).append(reply)
    for step, now in sorted(steps.items()):
        last = chapters[-1] if chapters else Moves()
        talk = now[0].kind == TurnKind.SPEAK.name
        chosen = {} if talk else {names[reply.agent]: reply.action for reply in now}
        if talk or any(action.act in (Act.VOTE, Act.SKIP) for action in chosen.values()):
            if isinstance(last, Moves):
                reports = [d for d in last.deeds if d.act is Act.REPORT and d.step == max(last.by_step)]
                last = Meeting(step, tuple(living), reports, {name: set(killers) for name, killers in seen.items()})
                chapters.append(last)
            if talk:
                last.messages += [reply.turn for reply in now]
                continue
            last.vote_step = step
            last.votes = {name: action.target for name, action in chosen.items()}
            last.voters = {names[reply.agent]: reply.turn for reply in now}
            (first, most), *others = Counter(last.votes.values()).most_common(2)
            if first and not (others and others[0][1] == most):
                last.ejected = first
                living.remove(first)
            gone = {*living, last.ejected, *(deed.victim for deed in last.reports[:1])}
            bodies_left = {name: room for name, room in rooms.items() if name not in gone}
            rooms, busy = {**dict.fromkeys(living, start), **bodies_left}, set()
            continue
        if isinstance(last, Meeting) or not chapters:
            last = Moves()
            last.rooms[-1], last.bodies[-1] = _living_and_dead(rooms, living)
            chapters.append(last)
        last.by_step[step] = chosen
        for who, action in chosen.items():
            busy.discard(who)  # whoever has done a task is asked again at once
            if action.act is Act.TASK:
                busy.add(who)
            elif action.act is Act.GO:
                (x, y), (dx, dy) = rooms[who], DIRECTIONS[action.target]
                rooms[who] = (x + dx, y + dy)
        for who, action in chosen.items():
            if action.act is Act.KILL and action.target in living:  # else another imposter was faster
                living.remove(action.target)
                bodies[action.target] = room_name(rooms[who])
                rooms[action.target] = rooms[who]
                there = (name for name in living if name != who and rooms[name] == rooms[who])
                witnesses = tuple(name for name in there if name not in busy)
                last.deeds.append(Deed(step, Act.KILL, who, action.target, bodies[action.target], witnesses))
                for name in witnesses:
                    seen[name].add(who)
            elif action.act is Act.REPORT:
                last.deeds.append(Deed(step, Act.REPORT, who, action.target, bodies[action.target]))
        last.rooms[step], last.bodies[step] = _living_and_dead(rooms, living)
    return chapters


class Sight(NamedTuple):
    """A player's view before a choice: by name, who stood there, came (from a room) and went (to one), and bodies."""

    present: tuple[str, ...]
    entering: tuple[tuple[str, Room], ...]
    leaving: tuple[tuple[str, Room], ...]
    bodies: tuple[str, ...]

    def words(self, name_of: Callable[[Room], str]) -> list[str]:
        """Each thing seen, in words, with rooms called by `name_of`."""
        return [
            *self.present,
            *(f"{name} comes from {name_of(room)}" for name, room in self.entering),
            *(f"{name} goes to {name_of(room)}" for name, room in self.leaving),
            *(f"the body of {name}" for name in self.bodies),
        ]

    def __str__(self) -> str:
        return ", ".join(self.words(lambda room: f"{room[0]},{room[1]}"))


def sights(chapters: Sequence[Moves | Meeting]) -> list[dict[int, dict[str, Sight]]]:
    """Works out what each player saw before each of its choices, by step and name, for each `Moves`.

    A walk is seen from both its ends until it is over, also if it ended in a death. How long walks last is not in the
    log: whoever walks is asked next at its end.
    """
    move_chapters = [chapter for chapter in chapters if isinstance(chapter, Moves)]
    asked = [
        {who: [s for s in moves.by_step if who in moves.by_step[s]] for who in moves.rooms[-1]}
        for moves in move_chapters
    ]
    lasts = [
        later - step
        for moves, own in zip(move_chapters, asked, strict=True)
        for who, steps in own.items()
        for step, later in pairwise(steps)
        if moves.by_step[step][who].act is Act.GO
    ]
    return [_sights(moves, min(lasts, default=1)) for moves in move_chapters]


def _sights(moves: Moves, walk: int) -> dict[int, dict[str, Sight]]:
    walks: dict[str, tuple[Room, Room, int]] = {}  # from where, to where, and the step at whose choices it is over
    rooms: dict[str, Room] = moves.rooms[-1]
    bodies: dict[str, Room] = moves.bodies[-1]
    found: dict[int, dict[str, Sight]] = {}
    for step, chosen in moves.by_step.items():
        walks = {who: each for who, each in walks.items() if each[2] > step}
        found[step] = {}
        for who in chosen:
            here = rooms[who]
            others = [(name, *walks.get(name, (None, rooms.get(name)))[:2]) for name in NAMES if name != who]
            seen = [each for each in others if each[0] in rooms or (each[0] in walks and bodies.get(each[0]) != here)]
            found[step][who] = Sight(
                tuple(name for name, origin, goal in seen if goal == here and origin is None),
                tuple((name, origin) for name, origin, goal in seen if goal == here and origin is not None),
                tuple((name, goal) for name, origin, goal in seen if origin == here and goal is not None),
                tuple(name for name in NAMES if bodies.get(name) == here),
            )
        for who, action in chosen.items():
            if action.act is Act.GO:
                (x, y), (dx, dy) = rooms[who], DIRECTIONS[action.target]
                walks[who] = (rooms[who], (x + dx, y + dy), step + walk)
        rooms, bodies = moves.rooms[step], moves.bodies[step]
    return found


def _living_and_dead(rooms: Mapping[str, Room], living: Collection[str]) -> tuple[dict[str, Room], dict[str, Room]]:
    dead = {name: room for name, room in rooms.items() if name not in living}
    return {name: room for name, room in rooms.items() if name in living}, dead


def room_name(room: Room) -> str:
    """Both names of a room that players read."""
    return f"{ROOMS[room[1]][room[0]]} ({room[0]},{room[1]})"


# --- Votes and messages -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Vote:
    """One player's vote for a living player, possibly itself, or for nobody."""

    turn: Turn
    target: str  # a name; empty: skip
    living: tuple[str, ...]  # names of all who vote
    imposters: tuple[str, ...]  # the living ones
    seen: tuple[str, ...] = ()  # living imposters whom the voter noticed killing

    @property
    def right(self) -> bool:
        return self.target in self.imposters

    @property
    def chance(self) -> float:
        """Probability of a right vote for a living player drawn at random."""
        return len(self.imposters) / len(self.living)


@dataclass(frozen=True)
class Message:
    """A message, with the names of the living others, the imposters among them, and killers whom its speaker saw."""

    turn: Turn
    others: tuple[str, ...]
    imposters: tuple[str, ...]
    seen: tuple[str, ...]

    @property
    def named(self) -> tuple[str, ...]:
        """The living others whose name stands in the message as a word, in any case."""
        words = set(re.findall(r"\w+", self.turn.message.lower()))
        return tuple(name for name in self.others if name.lower() in words)

    @property
    def accused(self) -> tuple[str, ...]:
        """The living others whom the message speaks against, by the scripted players' grammar."""
        against = set(accused(self.turn.message))
        return tuple(name for name in self.others if name in against)

    def meets(self, names: Collection[str]) -> bool:
        """Tells whether one of these names is an imposter's."""
        return any(name in self.imposters for name in names)

    def chance(self, count: int) -> float:
        """Probability that `count` different living others, drawn at random, include an imposter."""
        innocent = len(self.others) - len(self.imposters)
        return 1 - math.comb(innocent, count) / math.comb(len(self.others), count)


@dataclass(frozen=True)
class Record:
    """One game: its votes and messages in order, whom each vote ejected (empty: nobody), and its reports."""

    votes: tuple[Vote, ...]
    messages: tuple[Message, ...]
    ejected: tuple[str, ...]
    reports: int


def read_game(episode: Episode) -> Record:
    """Lists the votes and messages of a game of Among Us. Needs its `facts` and all its `turns`."""
    names: dict[str, str] = episode.facts["names"]
    guilty = {names[agent] for agent in episode.facts["imposters"]}
    votes: list[Vote] = []
    messages: list[Message] = []
    ejected: list[str] = []
    reports = 0
    for chapter in story_of(episode):
        if isinstance(chapter, Moves):
            reports += sum(deed.act is Act.REPORT for deed in chapter.deeds)
            continue
        imposters = tuple(name for name in chapter.living if name in guilty)
        for turn in (turn for turn in chapter.messages if turn.message):
            speaker = names[turn.agent]
            others = tuple(name for name in chapter.living if name != speaker)
            others_guilty = tuple(name for name in others if name in guilty)
            seen = tuple(name for name in others if name in chapter.seen[speaker])
            messages.append(Message(turn, others, others_guilty, seen))
        for voter, target in chapter.votes.items():
            noticed = tuple(name for name in imposters if name in chapter.seen[voter])
            votes.append(Vote(chapter.voters[voter], target, chapter.living, imposters, noticed))
        if chapter.votes:
            ejected.append(chapter.ejected)
    return Record(tuple(votes), tuple(messages), tuple(ejected), reports)


# --- Forms of sentences -----------------------------------------------------------------------------------------------
def template(message: str) -> str:
    """The form of a message: lower case, with {name} and {room} for any name and room."""
    return " ".join(_ROOM.sub("{room}", NAME.sub("{name}", message)).lower().split())

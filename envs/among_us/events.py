"""Events that players get to know. texts.py puts them into words, reading.py reads them back."""

from __future__ import annotations

from typing import NamedTuple

from envs.among_us.state import Act, Ending, Role, Room


class Intro(NamedTuple):
    name: str
    role: Role
    width: int
    height: int
    names: tuple[str, ...]
    imposters: int
    fellows: tuple[str, ...]  # the other imposters; of a crewmate, nobody
    tasks: tuple[Room, ...]


class Look(NamedTuple):
    room: Room
    present: tuple[str, ...]
    entering: tuple[tuple[str, Room], ...]  # and where from
    leaving: tuple[tuple[str, Room], ...]  # and where to
    bodies: tuple[str, ...]
    tasks: int  # own tasks to be done here
    cooldown: int = -1  # -1 for crewmates


class Done(NamedTuple):
    """A task is done."""


class Killed(NamedTuple):
    killer: str
    victim: str  # empty: you


class Meeting(NamedTuple):
    finder: str
    victim: str
    room: Room
    living: tuple[str, ...]


class Recall(NamedTuple):
    """A reminder: killings by living players that the player noticed, and where it last saw the others alive."""

    killings: tuple[tuple[str, str], ...]  # killer, victim
    sightings: tuple[tuple[str, Room], ...]


class SpeakNow(NamedTuple):
    """It is your turn to speak."""


class Said(NamedTuple):
    speaker: str
    message: str


class Cut(NamedTuple):
    """Your message was too long."""


class VoteNow(NamedTuple):
    """Everybody votes now."""


class Tally(NamedTuple):
    counts: tuple[tuple[str, int], ...]  # name or "skip", votes; without those that got none
    ejected: str  # empty: nobody


class Refused(NamedTuple):
    """Your reply was none of the options and counts as this one."""

    instead: Act


class Over(NamedTuple):
    winner: Role | None
    ending: Ending


Event = Intro | Look | Done | Killed | Meeting | Recall | SpeakNow | Said | Cut | VoteNow | Tally | Refused | Over

"""The grammar of scripted Among Us players: `say` puts statements into words, `understand` reads them back."""

import re
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from random import Random
from typing import NamedTuple

from envs.among_us.state import NAMES, Room
from envs.among_us.texts import ROOM_OF, ROOMS
from envs.core import END, Style


class Topic(StrEnum):
    KILL = "kill"  # `who` killed `other`
    LAST = "last"  # `who` was the last with `other`
    NEAR = "near"  # `who` was near the body
    SAW = "saw"  # `who` was in `room`
    WITH = "with"  # the speaker and `who` were in `room`
    WHERE = "where"  # the speaker was in `room`
    TASK = "task"  # the speaker did a task in `room`
    ACCUSE = "accuse"
    CLEAR = "clear"
    DENY = "deny"
    ASK = "ask"
    UNSURE = "unsure"


class Statement(NamedTuple):
    topic: Topic
    who: str = ""
    other: str = ""
    room: Room | None = None


FORMS: dict[Topic, tuple[str, ...]] = {
    Topic.KILL: ("i saw {who} kill {other}", "{who} killed {other} i saw it", "it is {who} who killed {other}"),
    Topic.LAST: (
        "i last saw {other} with {who}",
        "{who} was the last one with {other}",
        "{other} was alone with {who}",
    ),
    Topic.NEAR: ("{who} was near the body", "i saw {who} run from the body"),
    Topic.SAW: ("i saw {who} in {room}", "{who} was in {room}", "i met {who} in {room}"),
    Topic.WITH: ("i was with {who} in {room}", "{who} was with me in {room}", "{who} and i were in {room}"),
    Topic.WHERE: ("i was in {room}", "i came from {room}", "i was alone in {room}"),
    Topic.TASK: ("i did a task in {room}", "i was busy with a task in {room}"),
    Topic.ACCUSE: (
        *("i think it is {who}", "{who} is the imposter", "vote for {who}", "i do not trust {who}"),
        *("{who} looks guilty", "we should eject {who}", "my vote goes to {who}"),
    ),
    Topic.CLEAR: ("{who} is not the imposter", "i trust {who}", "it is not {who}", "{who} is innocent"),
    Topic.DENY: ("i am not the imposter", "it was not me", "i did not do it"),
    Topic.ASK: ("where were you {who}", "{who} what did you see", "did anyone see {who}", "who was in {room}"),
    Topic.UNSURE: ("i do not know who it is", "i saw nothing", "let us skip the vote"),
}
_NAME = "|".join(name.lower() for name in NAMES)
_COORDINATES = re.compile(r"(?:room )?\((\d), ?(\d)\)")


def _pattern(form: str) -> re.Pattern[str]:
    for field, values in (("who", _NAME), ("other", _NAME), ("room", "|".join(ROOM_OF))):
        form = form.replace(f"{{{field}}}", f"(?P<{field}>{values})")
    return re.compile(rf"\b{form}\b")


# The longest forms first: "i was with red in lab" isn't "i was in lab", nor is "it is red who killed blue" "it is red".
_PATTERNS = sorted(
    ((topic, _pattern(form)) for topic, forms in FORMS.items() for form in forms), key=lambda p: -len(p[1].pattern)
)


def say(statements: Sequence[Statement], style: Style, rng: Random) -> str:
    """The statements in words, each in a form drawn at random, with the end marker.

    Compact style puts a space before each word, the first one too, as the game does.
    """
    sentences = []
    for s in statements:
        given = {field for field in ("who", "other", "room") if getattr(s, field)}
        form = rng.choice([form for form in FORMS[s.topic] if set(re.findall(r"{(\w+)}", form)) == given])
        if style is Style.COMPACT:
            room = ROOMS[s.room[1]][s.room[0]] if s.room else ""
            sentences.append(" " + form.format(who=s.who.lower(), other=s.other.lower(), room=room))
            continue
        room = f"room ({s.room[0]},{s.room[1]})" if s.room else ""
        words = re.sub(r"\bi\b", "I", form).format(who=s.who, other=s.other, room=room)
        sentences.append(words[0].upper() + words[1:] + ("?" if s.topic is Topic.ASK else "."))
    return ("" if style is Style.COMPACT else " ").join(sentences) + f" {END}"


@lru_cache(maxsize=4096)  # every listener reads a message, some more than once
def understand(message: str) -> tuple[Statement, ...]:
    """The statements in a message of either style, in order of mention; skips everything outside this grammar."""
    text = _COORDINATES.sub(_named_room, message.lower())
    text = " ".join(re.sub(r"[^a-z ]", " ", text).split())
    found: list[tuple[int, Statement]] = []
    for topic, pattern in _PATTERNS:
        for match in pattern.finditer(text):
            said = {"who": "", "other": "", "room": "", **match.groupdict()}
            who, other = said["who"].capitalize(), said["other"].capitalize()
            found.append((match.start(), Statement(topic, who, other, ROOM_OF.get(said["room"]))))
        text = pattern.sub(lambda match: "#" * len(match[0]), text)
    return tuple(statement for _, statement in sorted(found, key=lambda f: f[0]))


def _named_room(match: re.Match[str]) -> str:
    x, y = int(match[1]), int(match[2])
    return f" {ROOMS[y][x]} " if y < len(ROOMS) and x < len(ROOMS[0]) else " "


ACCUSING = (Topic.KILL, Topic.LAST, Topic.NEAR, Topic.ACCUSE)


def accused(message: str) -> list[str]:
    """The names that a message accuses."""
    return [s.who for s in understand(message) if s.topic in ACCUSING]

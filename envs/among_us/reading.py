"""Reads observations back into events, for scripted players and analysts."""

from __future__ import annotations

import re

from envs.among_us import events
from envs.among_us.state import NAMES, Act, Ending, Role, Room
from envs.among_us.texts import LOWER, REASON, ROOM_OF
from envs.core import END, Style

_N = f"(?:{'|'.join(NAMES)})"
_n = f"(?:{'|'.join(LOWER.values())})"
_R, _r = r"\(\d,\d\)", f"(?:{'|'.join(ROOM_OF)})"
_FORMS: dict[Style, tuple[tuple[type, str], ...]] = {
    Style.COMPACT: (
        (events.Said, rf" ({_n}) says (?:(.*?) )?{re.escape(END)}"),
        (events.Killed, rf" killer ({_n}) victim ({_n}|you)"),
        (
            events.Look,
            rf" at ({_r})((?: {_n})*)((?: in {_n} {_r})*)((?: out {_n} {_r})*)((?: body {_n})*)((?: task)*)"
            r"( ready| cooldown \d+)?",
        ),
        (events.Done, " done"),
        (events.SpeakNow, " speak"),
        (events.VoteNow, r" vote\b"),
        (events.Cut, " cut"),
        (events.Refused, " refused (wait|skip)"),
        (events.Tally, rf" votes((?: (?:{_n}|skip) \d+)+) ejected ({_n}|nobody)"),
        (events.Meeting, rf" meeting ({_n}) found ({_n}) at ({_r}) living((?: {_n})+)"),
        (events.Recall, rf" recall((?: killer {_n} victim {_n})*)((?: {_n} {_r})*)"),
        (
            events.Intro,
            rf" grid (\d) (\d) imposters (\d) players((?: {_n})+) you ({_n}) (crewmate|imposter)"
            rf"(?: with((?: {_n})+))?(?: tasks((?: {_r})+))?",
        ),
        (events.Over, " (crewmates|imposters|nobody) win ([a-z]+)"),
    ),
    Style.NATURAL: (
        (events.Said, rf'({_N}) says: "(.*)"\n'),
        (events.Killed, rf"You notice ({_N}) killing ({_N})!\n|({_N}) has killed you\..*\n"),
        (
            events.Look,
            rf"You are in room ({_R})\.( Here with you: [\w, ]+\.)?((?: {_N} is entering from room {_R}\.)*)"
            rf"((?: {_N} is leaving to room {_R}\.)*)(?: Nobody else is here\.)?((?: The body of {_N} lies here!)*)"
            r"( Tasks of yours to do here: \d+\.)?( Steps until you may kill: \d+\.| You may kill now\.)?\n",
        ),
        (events.Done, "You have done the task.\n"),
        (events.SpeakNow, "It is your turn to speak.\n"),
        (events.VoteNow, "Now everybody votes.*\n"),
        (events.Cut, "Your message was too long.*\n"),
        (events.Refused, r"Your reply was not one of your options\. It counts as: (wait|skip)\.\n"),
        (events.Tally, rf"Votes: ([\w, ]+)\. ({_N}|Nobody) is ejected\.\n"),
        (events.Meeting, rf"({_N}) has found the body of ({_N}) in room ({_R})\..*Alive: ([\w, ]+)\.\n"),
        (
            events.Recall,
            rf"What you have seen: ((?:{_N} killed {_N}(?:, )?)*)((?:{_N} was last in room {_R}(?:, )?)*)\.\n",
        ),
        (
            events.Intro,
            rf"You play Among Us on a grid of rooms, (\d) wide and (\d) high\.\nPlayers: ([\w, ]+)\. "
            rf"Imposters among them: (\d)\.\nYou are ({_N}), an? (crewmate|imposter)\.\n"
            r"(?:Your fellow imposters: ([\w, ]+)\.\n)?(?:Your tasks are in: (.*)\.\n)?",
        ),
        (events.Over, r"The game is over\. (?:The (crewmates|imposters) win|Nobody wins): (.*)\.\n"),
        (type(None), ".*\n"),  # the rules explained
    ),
    Style.BRIEF: (
        (events.Said, rf"({_N}): (.*)\n"),
        (events.Killed, rf"({_N}) kills ({_N})!\n|({_N}) kills you\..*\n"),
        (
            events.Look,
            rf"Room ({_R})\.( Here: [\w, ]+\.)?((?: {_N} comes from {_R}\.)*)((?: {_N} goes to {_R}\.)*)"
            rf"((?: Body of {_N}!)*)( Tasks: \d+\.)?( Kill in \d+\.| Kill now\.)?\n",
        ),
        (events.Done, "Task done\\.\n"),
        (events.SpeakNow, "Speak\\.\n"),
        (events.VoteNow, "Vote: .*\n"),
        (events.Cut, "Your message was cut\\.\n"),
        (events.Refused, r"No option\. It counts as (wait|skip)\.\n"),
        (events.Tally, rf"Votes: ([\w, ]+)\. ({_N}|Nobody) is out\.\n"),
        (events.Meeting, rf"({_N}) found the body of ({_N}) in ({_R})\. Alive: ([\w, ]+)\.\n"),
        (events.Recall, rf"Seen: ((?:{_N} killed {_N}(?:, )?)*)((?:{_N} was last in {_R}(?:, )?)*)\.\n"),
        (
            events.Intro,
            r"Among Us, (\d) by (\d) rooms\.\nPlayers: ([\w, ]+)\. Imposters: (\d)\.\n"
            rf"You are ({_N}), an? (crewmate|imposter)\.\n"
            r"(?:With you: ([\w, ]+)\.\n)?(?:Your tasks: (.*)\.\n)?",
        ),
        (events.Over, rf"(?:(Crewmates|Imposters) win|Nobody wins): ({'|'.join(REASON.values())})\.\n"),
        (type(None), ".*\n"),  # the rules explained
    ),
}
_PATTERNS = {style: [(kind, re.compile(form)) for kind, form in forms] for style, forms in _FORMS.items()}


def read(text: str, style: Style) -> list[events.Event]:
    """The events in an observation's text: the inverse of `write`. Raises ValueError for any other text.

    Messages of compact style are read as they stand, in lower case.
    """
    found: list[events.Event] = []
    position = 0
    while position < len(text):
        for kind, pattern in _PATTERNS[style]:
            if match := pattern.match(text, position):
                if kind is not type(None):
                    found.append(_event(kind, match, style))
                position = match.end()
                break
        else:
            raise ValueError(f"Expected a {style} text of the game, got {text[position : position + 80]!r}.")
    return found


def _event(kind: type, found: re.Match[str], style: Style) -> events.Event:
    g = found.groups()
    if kind is events.Said:
        return events.Said(_names(g[0])[0], g[1] or "")
    if kind is events.Killed:
        killer, victim = (g[0], g[1]) if style is Style.COMPACT else (g[0] or g[2], g[1] or "")
        return events.Killed(_names(killer)[0], "".join(_names(victim)))
    if kind is events.Look:
        here = _rooms(g[0], style)[0]
        entering, leaving = (
            tuple(zip(_names(walkers or ""), _rooms(walkers or "", style), strict=True)) for walkers in (g[2], g[3])
        )
        tasks = g[5].count("task") if style is Style.COMPACT else int("".join(filter(str.isdigit, g[5] or "0")))
        cooldown = int("0" + "".join(filter(str.isdigit, g[6]))) if g[6] else -1
        return events.Look(here, _names(g[1] or ""), entering, leaving, _names(g[4] or ""), tasks, cooldown)
    if kind is events.Refused:
        return events.Refused(Act(g[0]))
    if kind is events.Tally:
        counts = tuple((word.capitalize() if word != Act.SKIP else word, int(n)) for word, n in _COUNT.findall(g[0]))
        return events.Tally(counts, "".join(_names(g[1])))
    if kind is events.Meeting:
        return events.Meeting(_names(g[0])[0], _names(g[1])[0], _rooms(g[2], style)[0], _names(g[3]))
    if kind is events.Recall:
        killings = _names(g[0])
        sightings = zip(_names(g[1]), _rooms(g[1], style), strict=True)
        return events.Recall(tuple(zip(killings[::2], killings[1::2], strict=True)), tuple(sightings))
    if kind is events.Intro:
        names, imposters = (g[3], g[2]) if style is Style.COMPACT else (g[2], g[3])
        size, fellows, tasks = (int(g[0]), int(g[1])), _names(g[6] or ""), _rooms(g[7] or "", style)
        return events.Intro(_names(g[4])[0], Role(g[5]), *size, _names(names), int(imposters), fellows, tasks)
    if kind is events.Over:
        winner = None if g[0] in (None, "nobody") else Role(g[0][:-1].lower())
        return events.Over(winner, Ending(g[1]) if style is Style.COMPACT else _ENDING[g[1]])
    return kind()  # type: ignore[no-any-return]  # those without fields


_COUNT = re.compile(r"([A-Za-z]+) (\d+)")
_ANY_NAME = re.compile(rf"\b{_N}\b", re.IGNORECASE)
_CELL = re.compile(r"\((\d),(\d)\)")
_ANY_ROOM = {Style.NATURAL: _CELL, Style.BRIEF: _CELL, Style.COMPACT: re.compile(rf"\b{_r}\b")}
_ENDING = {reason: ending for ending, reason in REASON.items()}


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.capitalize() for name in _ANY_NAME.findall(text))


def _rooms(text: str, style: Style) -> tuple[Room, ...]:
    if style is Style.COMPACT:
        return tuple(ROOM_OF[name] for name in _ANY_ROOM[style].findall(text))
    return tuple((int(x), int(y)) for x, y in _ANY_ROOM[style].findall(text))

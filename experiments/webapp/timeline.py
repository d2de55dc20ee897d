"""The moments of a recorded game, for the page's slider: where everybody is, who saw what, and what each believes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envs.among_us.state import DIRECTIONS, Act, Action, Room
from marl.metrics.among_us import Meeting, Moves, room_name
from marl.report.views import Transcript, View, is_among_us, printable, said, story_of, topic

Saw = dict[str, Any]  # who, where, what it saw before it chose (a list), and what it chose


def timeline_of(transcript: Transcript) -> View:
    """Collects the moments of a game, each with its `title` and `text`, and `mark`, the message's place on the page.

    `bars`: the answers to each belief question of a listener, of which `truth` are right; a moment's `beliefs` are
    pairs of a bar's number and its probabilities. In Among Us a moment also has the room of everybody (`at`) and of
    the `bodies`, by name and number of the room, row by row from the north; and what each `saw`.
    """
    facts = transcript["facts"]
    among_us = is_among_us(transcript)
    names = facts["names"] if among_us else {agent: agent for agent in transcript["players"]}
    moments = list(_among_us(transcript) if among_us else _talk(transcript))
    bars: list[View] = []
    numbers: dict[tuple[str, int], int] = {}  # of bars, by listener and question
    for belief in transcript["beliefs"]:
        key = belief["listener"], belief["question"]
        if key in numbers or transcript["roles"][belief["listener"]] == "imposter":  # who knows the answer
            continue
        question = transcript["questions"][belief["question"]]
        right = {question["answer"], *question.get("also", ())}
        numbers[key] = len(bars)
        bars.append(
            {
                "who": names[belief["listener"]],
                "asks": "" if among_us else topic(question["text"]),
                "answers": question["candidates"],
                "truth": [i for i, answer in enumerate(question["candidates"]) if answer in right],
            }
        )
    known: dict[tuple[str, str], tuple[int, Sequence[float]]] = {}  # the last answers, by listener and topic
    waiting = sorted(transcript["beliefs"], key=lambda belief: -belief["step"])
    for moment in moments:
        while waiting and waiting[-1]["step"] <= moment["until"]:
            belief = waiting.pop()
            number = numbers.get((belief["listener"], belief["question"]))
            if number is not None:
                known[bars[number]["who"], bars[number]["asks"]] = number, belief["probs"]
        moment["beliefs"] = [pair for (who, _), pair in known.items() if who in moment.get("at", (who,))]
    width, height = (int(facts["width"]), int(facts["height"])) if among_us else (0, 0)
    rooms = [room_name((x, y)) for y in range(height) for x in range(width)]
    return {"width": width, "rooms": rooms, "bars": bars, "moments": moments}


def _talk(transcript: Transcript) -> Iterator[View]:
    """The start, then every turn."""
    yield {"title": "the start", "text": "", "mark": "", "until": 0}
    for number, turn in enumerate(transcript["turns"], start=1):
        refused = f" (refused: {printable(turn['error'])})" if turn["error"] else ""
        text = f"{turn['agent']}: {printable(said(turn))}{refused}"
        yield {"title": f"turn {number}", "text": text, "mark": f"m{number}", "until": turn["step"] + 1}


def _among_us(transcript: Transcript) -> Iterator[View]:
    """Every step in which anybody chose; and the beginning, the messages and the vote of each discussion."""
    width, names = int(transcript["facts"]["width"]), transcript["facts"]["names"]
    walk = walk_steps(transcript)

    def numbered(rooms: Mapping[str, Room]) -> dict[str, int]:
        return {name: x + y * width for name, (x, y) in rooms.items()}

    bodies: dict[str, int] = {}
    for number, chapter in enumerate(story_of(transcript), start=1):
        if isinstance(chapter, Moves):
            saw = sightings(chapter, walk)
            for step in chapter.by_step:
                deeds = "; ".join(str(deed) for deed in chapter.deeds if deed.step == step)
                bodies = numbered(chapter.bodies[step])
                places = {"at": numbered(chapter.rooms[step]), "bodies": bodies}
                yield {
                    "title": f"step {step}", "text": deeds, "mark": "", "until": step, "saw": saw[step], **places,
                }  # fmt: skip
            continue
        found = [deed.victim for deed in chapter.reports[:1]]
        bodies = {name: room for name, room in bodies.items() if name not in found}
        for moment in _meeting(chapter, number, width, names):
            yield {**moment, "bodies": bodies, "saw": []}


def _meeting(meeting: Meeting, chapter: int, width: int, names: Mapping[str, str]) -> Iterator[View]:
    """All stand in the start room."""
    at = dict.fromkeys(meeting.living, (width - 1) // 2)
    found = "; ".join(str(deed) for deed in meeting.reports)
    yield {
        "title": f"step {meeting.step}", "text": f"{found}. A discussion begins" if found else "a discussion begins",
        "mark": "", "until": meeting.step, "at": at,
    }  # fmt: skip
    for number, turn in enumerate(meeting.messages, start=1):
        text = f"{names[turn['agent']]}: {printable(said(turn)) or '(nothing)'}"
        mark, until = f"m{chapter}-{number}", turn["step"] + 1
        yield {"title": f"step {turn['step']}", "text": text, "mark": mark, "until": until, "at": at}
    if meeting.votes:
        each = ", ".join(f"{voter} for {choice or 'nobody'}" for voter, choice in meeting.votes.items())
        living = [name for name in meeting.living if name != meeting.ejected]
        yield {
            "title": f"step {meeting.vote_step}", "text": f"{each}: {meeting.ejected or 'nobody'} is voted out",
            "mark": "", "until": meeting.vote_step, "at": dict.fromkeys(living, (width - 1) // 2),
        }  # fmt: skip


# --- Who saw what -----------------------------------------------------------------------------------------------------
def walk_steps(transcript: Transcript) -> float:
    """Steps from one room to the next, read off the shortest walk after which somebody chose again."""
    chapters = [chapter for chapter in story_of(transcript) if isinstance(chapter, Moves)]
    found = math.inf
    for chapter in chapters:
        left: dict[str, int] = {}
        for step, chosen in chapter.by_step.items():
            for who, action in chosen.items():
                found = min(found, step - left.pop(who, -math.inf))
                if action.act is Act.GO:
                    left[who] = step
    return found


def sightings(moves: Moves, walk: float) -> dict[int, list[Saw]]:
    """What everybody who chose saw before it did, by step, as the game told it.

    `walk`: steps to a neighbouring room. Who was killed on its way is seen from the other end until it would have
    arrived, as in `envs.among_us.rules.look`.
    """
    origins: dict[str, Room] = {}  # of those on their way
    left: dict[str, int] = {}  # when they left
    ghosts: dict[str, tuple[Room, Room, float]] = {}  # from, to, and until when, of those killed on their way
    rooms, bodies = moves.rooms[-1], moves.bodies[-1]
    found: dict[int, list[Saw]] = {}
    for step, chosen in moves.by_step.items():
        for who in chosen:
            origins.pop(who, None)  # it has arrived
        walkers = {who: (room, rooms[who]) for who, room in origins.items()}
        walkers |= {who: (room, goal) for who, (room, goal, until) in ghosts.items() if step < until}
        found[step] = [
            {
                "who": who,
                "where": room_name(rooms[who]),
                "saw": _sight(who, rooms, bodies, walkers),
                "did": " ".join(filter(None, action)),
            }
            for who, action in chosen.items()
        ]
        for who, action in chosen.items():
            if action.act is Act.GO:
                origins[who], left[who] = rooms[who], step
        before, rooms, bodies = rooms, moves.rooms[step], moves.bodies[step]
        for dead in before.keys() - rooms.keys():
            if dead in origins:
                ghosts[dead] = origins.pop(dead), _goal(before[dead], chosen.get(dead)), left[dead] + walk
    return found


def _goal(room: Room, action: Action | None) -> Room:
    """Where somebody who was killed was going: it may have left in that very step."""
    if action is None or action.act is not Act.GO:
        return room
    dx, dy = DIRECTIONS[action.target]
    return room[0] + dx, room[1] + dy


def _sight(
    who: str, rooms: Mapping[str, Room], bodies: Mapping[str, Room], walkers: Mapping[str, tuple[Room, Room]]
) -> list[str]:
    """One player's sight in words: who is there, comes or goes, and bodies."""
    here = rooms[who]
    seen = [name for name, room in rooms.items() if name != who and room == here and name not in walkers]
    for name, (start, goal) in walkers.items():
        if bodies.get(name) != here and here in (start, goal):
            way = f"comes from {room_name(start)}" if goal == here else f"goes to {room_name(goal)}"
            seen.append(f"{name} {way}")
    return seen + [f"the body of {name}" for name, room in bodies.items() if room == here]

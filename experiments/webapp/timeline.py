"""The moments of a recorded game, for the page's slider: where everybody is, who saw what, and what each believes."""

import math
from collections.abc import Iterator, Mapping, Sequence

from envs.among_us.state import Room
from marl.metrics.among_us import Meeting, Moves, Sight, room_name, sights
from marl.report.views import Transcript, View, in_words, is_among_us, is_dond, printable, story_of, topic, turn_text


def timeline_of(transcript: Transcript) -> View:
    """Collects the moments of a game, each with its `title` and `text`, and `mark`, the message's place on the page.

    `bars`: the answers to each belief question of a listener, of which `truth` are right; a moment's `beliefs` are
    pairs of a bar's number and its probabilities. `asked`: what the bars are about, in words.

    In Among Us a moment also has the room of everybody (`at`) and of the `bodies`, by name and number of the room, row
    by row from the north; and what each `saw`.
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
                "asks": "" if among_us else topic(question),
                "answers": question["candidates"],
                "truth": [i for i, answer in enumerate(question["candidates"]) if answer in right],
            }
        )
    known: dict[tuple[str, str], tuple[int, Sequence[float]]] = {}  # the last answers, by listener and topic
    waiting = sorted(transcript["beliefs"], key=lambda belief: belief["step"])[::-1]
    for moment in moments:
        while waiting and waiting[-1]["step"] <= moment["until"]:
            belief = waiting.pop()
            number = numbers.get((belief["listener"], belief["question"]))
            if number is not None:
                bar, probs = bars[number], belief["probs"]
                assert len(probs) == len(bar["answers"]) and all(map(math.isfinite, probs)), belief
                known[bar["who"], bar["asks"]] = number, probs
        moment["beliefs"] = [pair for (who, _), pair in known.items() if who in moment.get("at", (who,))]
    width, height = (int(facts["width"]), int(facts["height"])) if among_us else (0, 0)
    rooms = [room_name((x, y)) for y in range(height) for x in range(width)]
    return {"width": width, "rooms": rooms, "bars": bars, "moments": moments, "asked": _asked(transcript)}


def _asked(transcript: Transcript) -> str:
    if not is_dond(transcript):
        return "now"
    claims = any(question.get("later") for question in transcript["questions"])
    return "the other will claim" if claims else "an item is worth to the other"


def _talk(transcript: Transcript) -> Iterator[View]:
    """The start, then every turn."""
    yield {"title": "the start", "text": "", "mark": "", "until": 0}
    for number, (turn, words) in enumerate(zip(transcript["turns"], in_words(transcript), strict=True), start=1):
        refused = f" (refused: {printable(turn['error'])})" if turn["error"] else ""
        text = f"{turn['agent']}: {words}{refused}"
        yield {"title": f"turn {number}", "text": text, "mark": f"m{number}", "until": turn["step"] + 1}


def _among_us(transcript: Transcript) -> Iterator[View]:
    """Every step in which anybody chose; and the beginning, the messages and the vote of each discussion."""
    width, names = int(transcript["facts"]["width"]), transcript["facts"]["names"]

    def numbered(rooms: Mapping[str, Room]) -> dict[str, int]:
        return {name: x + y * width for name, (x, y) in rooms.items()}

    bodies: dict[str, int] = {}
    replayed = story_of(transcript)
    seen = iter(sights(replayed))
    for number, chapter in enumerate(replayed, start=1):
        if isinstance(chapter, Moves):
            saw = _saw(chapter, next(seen))
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
        text = f"{names[turn['agent']]}: {printable(turn_text(turn)) or '(nothing)'}"
        mark, until = f"m{chapter}-{number}", turn["step"] + 1
        yield {"title": f"step {turn['step']}", "text": text, "mark": mark, "until": until, "at": at}
    if meeting.votes:
        each = ", ".join(f"{voter} for {choice or 'nobody'}" for voter, choice in meeting.votes.items())
        living = [name for name in meeting.living if name != meeting.ejected]
        yield {
            "title": f"step {meeting.vote_step}", "text": f"{each}: {meeting.ejected or 'nobody'} is voted out",
            "mark": "", "until": meeting.vote_step, "at": dict.fromkeys(living, (width - 1) // 2),
        }  # fmt: skip


def _saw(moves: Moves, seen: Mapping[int, Mapping[str, Sight]]) -> dict[int, list[View]]:
    """Lists by step what everybody who chose saw before: who, where, what it saw (a list), and what it chose."""
    found: dict[int, list[View]] = {}
    rooms = moves.rooms[-1]
    for step, chosen in moves.by_step.items():
        found[step] = [
            {
                "who": who,
                "where": room_name(rooms[who]),
                "saw": seen[step][who].words(room_name),
                "did": " ".join(filter(None, action)),
            }
            for who, action in chosen.items()
        ]
        rooms = moves.rooms[step]
    return found

"""The recorded games of a report: what the template shows of each, and the commonest forms of messages.

All text is plain; the template escapes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envs.among_us.state import NAMES
from marl.metrics.among_us import Meeting, Moves
from marl.report.runs import MEASURED, TRAINED, Run, arm_label, base_names
from marl.report.transcripts import (
    CUT,
    Form,
    Transcript,
    beliefs_between,
    crew_shifts,
    fates,
    forms,
    is_among_us,
    is_dond,
    mentions,
    opening,
    outcome_text,
    plan_text,
    printable,
    said,
    shifts_by_listener,
    story_of,
    verdict,
)

View = dict[str, Any]


@dataclass(frozen=True)
class Speaker:
    """The forms of the measured players' messages in one condition's recorded games, the commonest first."""

    arm: str
    seed: int
    games: int
    forms: list[Form]

    @property
    def messages(self) -> int:
        return sum(form.uses for form in self.forms)


def speakers(runs: Sequence[Run]) -> list[Speaker]:
    """The speakers of each run that recorded games, and once those of each base, bases first."""
    found: list[Speaker] = []
    bases = base_names(runs)
    for run in runs:
        for condition, player in MEASURED.items():
            name = arm_label(run, runs) if condition == TRAINED else bases.get((run.folder, condition))
            if name and (games := run.transcripts.get(condition)):
                found.append(Speaker(name, run.seed, len(games), forms(games, player)))
    return sorted(found, key=lambda speaker: not speaker.arm.startswith("base"))


def shown_games(runs: Sequence[Run], count: int) -> list[View]:
    """The first games of each arm's first run, beside the base's if it played the same game."""
    firsts: dict[str, Run] = {}
    for run in runs:
        firsts.setdefault(arm_label(run, runs), run)
    each = max(1, count // len(firsts))
    shown = []
    for arm, run in firsts.items():
        evaluated = [games for name, games in run.transcripts.items() if name.startswith("iteration-")]
        trained = run.transcripts.get(TRAINED) or (evaluated[-1] if evaluated else [])
        if any(map(is_among_us, trained)):  # many games end without a word
            trained = [t for t in trained if any(turn["message"] for turn in t["turns"])] or trained
        base = {transcript["seed"]: transcript for transcript in run.transcripts.get("base", [])}
        for transcript in trained[:each]:
            shown.append(game_view(transcript, arm))
            if transcript["seed"] in base:
                shown.append(game_view(base[transcript["seed"]], "base"))
        planned = [games for name, games in run.transcripts.items() if name.startswith("planned-")]
        shown.extend(game_view(games[0], f"{arm}, in training, planned") for games in planned[-1:])
    return shown


def game_view(transcript: Transcript, condition: str) -> View:
    """Collects what the template shows of one game."""
    view = {"condition": condition, "seed": transcript["seed"], "outcome": outcome_text(transcript), "chapters": None}
    if is_among_us(transcript):
        return {**view, **_among_us_view(transcript)}
    agents = list(transcript["players"])
    turns = []
    for turn in transcript["turns"]:
        moved = [
            {"listener": listener, "shifts": shifts, "total": sum(s.after - s.before for s in shifts)}
            for listener, shifts in shifts_by_listener(transcript, turn).items()
        ]
        kind = "refused" if turn["error"] else "message" if turn["message"] else "act"
        own = {"agent": turn["agent"], "seat": agents.index(turn["agent"]), "kind": kind, "text": printable(said(turn))}
        turns.append({**_turn_view(turn), **own, "moved": moved, "plan": plan_text(turn)})
    facts = transcript["facts"]
    table = None
    if is_dond(transcript):
        table = {"counts": facts["counts"], "values": dict(zip(agents, facts["values"], strict=True))}
    return {**view, "players": transcript["players"], "roles": transcript["roles"], "table": table, "turns": turns}


def _turn_view(turn: dict[str, Any]) -> View:
    return {
        "role": turn["role"],
        "error": printable(turn["error"]),
        "cut": CUT if turn.get("cut") else "",
        "rewards": {name: value for name, value in turn["rewards"].items() if value},
    }


def _among_us_view(transcript: Transcript) -> View:
    """The players, then moves (to fold) and discussions in turn."""
    facts, names, ends = transcript["facts"], transcript["facts"]["names"], fates(transcript)
    imposters = {names[agent] for agent in facts["imposters"]}
    seats = [
        {
            "name": names[agent],
            "role": transcript["roles"][agent],
            "player": held_by,
            "tasks": len(facts["tasks"][agent]) or "",
            "end": ends[names[agent]],
        }
        for agent, held_by in sorted(transcript["players"].items())
    ]
    chapters = [
        _moves_view(chapter, [seat["name"] for seat in seats])
        if isinstance(chapter, Moves)
        else _meeting_view(chapter, transcript, imposters)
        for chapter in story_of(transcript)
    ]
    return {"chapters": chapters, "seats": seats, "imposters": imposters, "truth": " or ".join(sorted(imposters))}


def _moves_view(moves: Moves, names: Sequence[str]) -> View:
    """A row for each step at which anybody chose, a cell for each player."""
    marked = {(deed.step, deed.who) for deed in moves.deeds}
    rows = [
        {
            "step": step,
            "cells": [
                {"text": " ".join(filter(None, chosen.get(name, ()))), "deed": (step, name) in marked} for name in names
            ],
        }
        for step, chosen in moves.by_step.items()
    ]
    return {
        "kind": "moves",
        "count": sum(map(len, moves.by_step.values())),
        "deeds": [{"step": deed.step, "act": deed.act.value, "text": str(deed)} for deed in moves.deeds],
        "names": names,
        "rows": rows,
    }


def _meeting_view(meeting: Meeting, transcript: Transcript, imposters: set[str]) -> View:
    """Each message with the belief of its listeners before and after; then the votes."""
    names = transcript["facts"]["names"]
    messages = []
    for turn in meeting.messages:
        bars = [
            {"name": names[s.listener], "before": s.before, "after": s.after} for s in crew_shifts(transcript, turn)
        ]
        own = {
            "name": names[turn["agent"]],
            "player": transcript["players"][turn["agent"]],
            "pieces": [{"text": t, "marked": name in imposters} for t, name in mentions(printable(said(turn)))],
            "bars": bars,
            "total": sum(bar["after"] - bar["before"] for bar in bars),
        }
        messages.append({**_turn_view(turn), **own})
    beliefs = beliefs_between(transcript, meeting.step, meeting.vote_step)
    votes = [
        {
            "voter": voter,
            "choice": choice or "skip",
            "right": choice in imposters,
            "belief": beliefs.get(voter),
            "plan": plan_text(meeting.voters[voter]),
        }
        for voter, choice in meeting.votes.items()
    ]
    return {
        "kind": "meeting",
        "title": opening(meeting),
        "living": [name for name in NAMES if name in meeting.living],
        "before": beliefs_between(transcript, meeting.step, meeting.step),
        "messages": messages,
        "votes": votes,
        "verdict": verdict(meeting),
        "caught": meeting.ejected in imposters,
    }

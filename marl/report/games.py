"""The recorded games of a report, message by message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marl.report.runs import MEASURED, TRAINED, Run, arm_label, base_names
from marl.report.transcripts import (
    CUT,
    Form,
    Meeting,
    Moves,
    Transcript,
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
    shifts,
    story,
    verdict,
)


# --- What is said most ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Speaker:
    """How the players whom a condition measures put their messages in its recorded games, the commonest form first."""

    arm: str
    seed: int
    games: int
    forms: list[Form]

    @property
    def messages(self) -> int:
        return sum(form.uses for form in self.forms)


def speakers(runs: Sequence[Run]) -> list[Speaker]:
    """Of each run and, once for each base, of what it began from. Runs without recorded games are left out."""
    found: list[Speaker] = []
    bases = base_names(runs)
    for run in runs:
        for condition, player in MEASURED.items():
            name = arm_label(run, runs) if condition == TRAINED else bases.get((run.folder, condition))
            if name and (games := run.transcripts.get(condition)):
                found.append(Speaker(name, run.seed, len(games), forms(games, player)))
    return sorted(found, key=lambda speaker: not speaker.arm.startswith("base"))


# --- Transcripts and run cards ----------------------------------------------------------------------------------------
def shown_games(runs: Sequence[Run], count: int) -> list[dict[str, Any]]:
    """The first games of each arm's first run, trained beside untrained where both played the same game."""
    firsts: dict[str, Run] = {}
    for run in runs:
        firsts.setdefault(arm_label(run, runs), run)
    each = max(1, count // len(firsts))
    shown = []
    for arm, run in firsts.items():
        evaluated = [games for name, games in run.transcripts.items() if name.startswith("iteration-")]
        trained = run.transcripts.get(TRAINED) or (evaluated[-1] if evaluated else [])
        # Many games of Among Us end without a word; those where somebody spoke are what there is to read.
        if any(map(is_among_us, trained)):
            trained = [t for t in trained if any(turn["message"] for turn in t["turns"])] or trained
        others = {name: {t["seed"]: t for t in games} for name, games in run.transcripts.items() if name == "base"}
        for transcript in trained[:each]:
            shown.append(game_view(transcript, arm))
            shown.extend(
                game_view(of[transcript["seed"]], name) for name, of in others.items() if transcript["seed"] in of
            )
        planned = [games for name, games in run.transcripts.items() if name.startswith("planned-")]
        shown.extend(game_view(games[0], f"{arm}, in training, planned") for games in planned[-1:])
    return shown


def game_view(transcript: Transcript, condition: str) -> dict[str, Any]:
    """What the template shows of one game. All text is plain: the template escapes it."""
    if is_among_us(transcript):
        return among_us_view(transcript, condition)
    agents = list(transcript["players"])
    rows = []
    for turn in transcript["turns"]:
        moved: dict[str, list[dict[str, Any]]] = {}
        for shift in shifts(transcript, turn):
            moved.setdefault(shift.listener, []).append(
                {
                    "topic": shift.question,
                    "answer": shift.answer,
                    "before": shift.before,
                    "after": shift.after,
                    "rose": shift.after >= shift.before,
                }
            )
        rows.append(
            {
                "agent": turn["agent"],
                "seat": agents.index(turn["agent"]),
                "role": turn["role"],
                "text": printable(said(turn)),
                "kind": "refused" if turn["error"] else "message" if turn["message"] else "act",
                "error": printable(turn["error"]),
                "cut": CUT if turn.get("cut") else "",
                "moved": [
                    {"listener": listener, "bars": bars, "total": sum(b["after"] - b["before"] for b in bars)}
                    for listener, bars in moved.items()
                ],
                "plan": plan_text(turn),
                "rewards": {name: value for name, value in turn["rewards"].items() if value},
            }
        )
    facts = transcript["facts"]
    table = None
    if is_dond(transcript):
        table = {"counts": facts["counts"], "values": dict(zip(agents, facts["values"], strict=True))}
    return {
        "condition": condition,
        "seed": transcript["seed"],
        "chapters": None,
        "players": transcript["players"],
        "roles": transcript["roles"],
        "table": table,
        "turns": rows,
        "outcome": outcome_text(transcript),
    }


def among_us_view(transcript: Transcript, condition: str) -> dict[str, Any]:
    """The same of Among Us: who is who, then moves (to fold) and discussions in turn."""
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
        for chapter in story(transcript)
    ]
    return {
        "condition": condition,
        "seed": transcript["seed"],
        "chapters": chapters,
        "seats": seats,
        "imposters": imposters,
        "truth": " or ".join(sorted(imposters)),
        "outcome": outcome_text(transcript),
    }


def _moves_view(moves: Moves, names: Sequence[str]) -> dict[str, Any]:
    """A row for each step at which anybody chose, a cell for each player."""
    steps = list(moves.by_step)
    marked = {(deed.step, deed.who) for deed in moves.deeds}
    return {
        "kind": "moves",
        "first": steps[0],
        "last": steps[-1],
        "count": sum(map(len, moves.by_step.values())),
        "deeds": [{"step": deed.step, "act": deed.act.value, "text": str(deed)} for deed in moves.deeds],
        "names": names,
        "rows": [
            {
                "step": step,
                "cells": [
                    {
                        "text": " ".join(filter(None, chosen[name])) if name in chosen else "",
                        "deed": (step, name) in marked,
                    }
                    for name in names
                ],
            }
            for step, chosen in moves.by_step.items()
        ],
    }


def _meeting_view(meeting: Meeting, transcript: Transcript, imposters: set[str]) -> dict[str, Any]:
    """Each message with the belief of those who heard it, before and after; then who voted for whom."""
    names = transcript["facts"]["names"]
    messages = []
    for turn in meeting.messages:
        bars = [
            {"name": names[s.listener], "before": s.before, "after": s.after, "rose": s.after >= s.before}
            for s in crew_shifts(transcript, turn)
        ]
        pieces = mentions(printable(said(turn)))
        messages.append(
            {
                "name": names[turn["agent"]],
                "role": turn["role"],
                "player": transcript["players"][turn["agent"]],
                "pieces": [{"text": text, "marked": name in imposters} for text, name in pieces],
                "error": printable(turn["error"]),
                "cut": CUT if turn.get("cut") else "",
                "bars": bars,
                "total": sum(bar["after"] - bar["before"] for bar in bars),
                "rewards": {name: value for name, value in turn["rewards"].items() if value},
            }
        )
    return {
        "kind": "meeting",
        "step": meeting.step,
        "title": opening(meeting),
        "living": meeting.living,
        "before": meeting.before,
        "messages": messages,
        "votes": [
            {
                "voter": voter,
                "choice": choice,
                "right": choice in imposters,
                "belief": meeting.after.get(voter),
                "plan": meeting.plans.get(voter, ""),
            }
            for voter, choice in meeting.votes.items()
        ],
        "verdict": verdict(meeting),
        "caught": meeting.ejected in imposters,
    }

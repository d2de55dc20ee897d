"""Episodes as plain data: written to files, read back, and shown as text with what each message did to its listeners.

What it leaves out: tokens and streams. A transcript is for reading; training data never comes from one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from envs import dond_v0
from marl.errors import UserError
from marl.types import Episode, Turn

Transcript = dict[str, Any]


def episode_to_json(episode: Episode) -> Transcript:
    """What a reader wants of an episode, as JSON's own types.

    `turns`: agent, role, step, kind, text, message, error, rewards, `tokens` sampled and the sum of their `logprob`.
    `questions`: each different question once, with candidates and answer. `beliefs`: listener, step, `question` (an
    index into `questions`), `probs` with four decimals.
    """
    questions = list(dict.fromkeys(belief.question for belief in episode.beliefs))
    number = {question: i for i, question in enumerate(questions)}
    return {
        "seed": episode.seed,
        "players": dict(episode.players),
        "roles": dict(episode.roles),
        "facts": _plain(episode.facts),
        "outcome": _plain(episode.outcome),
        "steps": episode.steps,
        "turns": [_turn(turn) for turn in episode.turns],
        "questions": [{"text": q.text, "candidates": list(q.candidates), "answer": q.answer} for q in questions],
        "beliefs": [
            {
                "listener": belief.listener,
                "step": belief.step,
                "question": number[belief.question],
                "probs": [round(float(p), 4) for p in belief.probs],
            }
            for belief in episode.beliefs
        ],
    }


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "agent": turn.agent,
        "role": turn.role,
        "step": turn.step,
        "kind": turn.kind.name,
        "text": turn.text,
        "message": turn.message,
        "error": turn.error,
        "rewards": {name: round(float(value), 4) for name, value in turn.rewards.items()},
        "tokens": len(turn.reply_ids),
        "logprob": round(float(sum(turn.logprobs)), 4),
    }


def _plain(value: Any) -> Any:
    """The value in JSON's types: tuples and arrays as lists, enums as their values. TypeError for anything else."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"facts and outcomes of a game must be plain data, not {type(value).__name__}: {value!r}")


def write_episodes(path: Path, episodes: Iterable[Episode]) -> None:
    """Writes one transcript a line. The file appears whole or not at all; its folder is made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for episode in episodes:
            file.write(json.dumps(episode_to_json(episode), ensure_ascii=False, allow_nan=False) + "\n")
    os.replace(temporary, path)


def read_episodes(path: Path) -> list[Transcript]:
    """The transcripts of a file. UserError with file and line number where a line is not one."""
    transcripts: list[Transcript] = []
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                transcript = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: expected a transcript as one JSON object, got {line[:60]!r}"
                ) from error
            if (
                not isinstance(transcript, dict)
                or not {"turns", "beliefs", "questions", "outcome"} <= transcript.keys()
            ):
                raise UserError(
                    f"{path}, line {number}: expected a transcript with turns, beliefs, questions and outcome"
                )
            transcripts.append(transcript)
    return transcripts


@dataclass(frozen=True)
class Shift:
    """A listener's belief in a true answer before and after a message."""

    listener: str
    question: str
    answer: str
    before: float
    after: float


def shifts(transcript: Transcript, turn: dict[str, Any]) -> list[Shift]:
    """What the turn's message did to every other listener that was asked before and right after it."""
    if not turn["message"]:
        return []
    found = []
    for after in transcript["beliefs"]:
        if after["step"] != turn["step"] + 1 or after["listener"] == turn["agent"]:
            continue
        earlier = [
            belief
            for belief in transcript["beliefs"]
            if (belief["listener"], belief["question"]) == (after["listener"], after["question"])
            and belief["step"] <= turn["step"]
        ]
        if earlier:
            before = max(earlier, key=lambda belief: belief["step"])
            question = transcript["questions"][after["question"]]
            truth = question["candidates"].index(question["answer"])
            found.append(
                Shift(
                    after["listener"],
                    topic(question["text"]),
                    question["answer"],
                    before["probs"][truth],
                    after["probs"][truth],
                )
            )
    return found


def topic(question: str) -> str:
    """A question in a word, for labels: `books` for a question about the value of a book, else the question itself."""
    return next((item for item in dond_v0.ITEMS if item.removesuffix("s") in question), question)


def is_dond(transcript: Transcript) -> bool:
    return "counts" in transcript.get("facts", {})


def said(turn: dict[str, Any]) -> str:
    """What a turn did, in words: the message, the claim of a proposal, or the bare reply."""
    if turn["message"]:
        return str(turn["message"])
    text = str(turn["text"]).strip()
    if text.startswith(dond_v0.PROPOSE) and not turn["error"]:
        return "proposes " + text.removeprefix(dond_v0.PROPOSE).partition("\n")[0].removesuffix("[END]").strip()
    return text


def outcome_text(transcript: Transcript) -> str:
    """How the game ended, in one sentence."""
    outcome = transcript["outcome"]
    if not is_dond(transcript):
        winner = outcome.get("winner") or "nobody"
        return f"{winner} won ({outcome.get('how', 'unknown')})"
    endings = {
        "deal": "Deal",
        "mismatch": "No deal: the two claims do not add up to the pool",
        "abort": "No deal: too many refused replies in a row",
        "limit": "No deal: too many turns",
    }
    if not outcome["deal"]:
        return endings.get(outcome["how"], f"No deal: {outcome['how']}")
    points = outcome["points"]
    counts, (first, second) = transcript["facts"]["counts"], transcript["facts"]["values"]
    best = dond_v0.best_joint(dond_v0.Context(tuple(counts), (tuple(first), tuple(second))))
    each = ", ".join(f"{agent} {value:g}" for agent, value in points.items())
    return f"Deal: {each}; together {sum(points.values()):g} of at most {best}"


def render_text(transcript: Transcript) -> str:
    """One transcript for the terminal: who knew what, the turns, and listeners' belief in the truth before -> after."""
    lines = [*_heading(transcript), ""]
    width = max((len(turn["agent"]) for turn in transcript["turns"]), default=0)
    for turn in transcript["turns"]:
        refused = f"   (refused: {turn['error']})" if turn["error"] else ""
        lines.append(f"{turn['agent']:<{width}}  {printable(said(turn))}{printable(refused)}")
        by_listener: dict[str, list[Shift]] = {}
        for shift in shifts(transcript, turn):
            by_listener.setdefault(shift.listener, []).append(shift)
        for listener, moved in by_listener.items():
            each = ", ".join(f"{s.question}={s.answer} {s.before:.2f} -> {s.after:.2f}" for s in moved)
            total = sum(s.after - s.before for s in moved)
            lines.append(f"{'':<{width}}    {listener} believes {each}  ({total:+.2f})")
        paid = ", ".join(f"{name} {value:+.2f}" for name, value in turn["rewards"].items() if value)
        if paid:
            lines.append(f"{'':<{width}}    reward: {paid}")
    return "\n".join([*lines, "", outcome_text(transcript)])


def _heading(transcript: Transcript) -> list[str]:
    held_by = transcript["players"]
    if not is_dond(transcript):
        return [f"{agent} ({held_by[agent]}): {role}" for agent, role in transcript["roles"].items()]
    facts = transcript["facts"]
    table = [["", *dond_v0.ITEMS], ["pool", *map(str, facts["counts"])]]
    for seat, agent in enumerate(dond_v0.AGENTS):
        table.append([f"{agent} ({held_by[agent]}) values", *map(str, facts["values"][seat])])
    width = max(len(row[0]) for row in table)
    return ["  ".join([row[0].ljust(width), *(cell.rjust(5) for cell in row[1:])]).rstrip() for row in table]


def printable(text: str) -> str:
    """The text on one line without control characters, which could drive the terminal that shows it."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "�" for c in text)

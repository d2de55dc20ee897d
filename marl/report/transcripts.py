"""Transcripts: episodes as JSON lines, for people to read. Training data never comes from one."""

import json
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from envs.core import Question, TurnKind
from marl.common.errors import UserError
from marl.common.files import fits, parsed_json, read_bytes, reading, whole_file, writing
from marl.report.views import Transcript, render_text, truth_of
from marl.types import Belief, Episode, Planned, Turn

NAME = 1000  # letters of a player's name or role at most
WORK = 10**7  # turns times beliefs of a transcript at most: the time to find the effect of each message
PLAIN = ("agent", "role", "step", "kind", "text", "message", "error")  # of a turn, in the order of the file
NUMBER = (int, float)
FORM = {
    "seed": int,
    "players": {...: str},
    "roles": {...: str},
    "facts": dict,
    "outcome": dict,
    "turns": [
        {
            **dict.fromkeys(("agent", "role", "kind", "text", "message", "error"), str),
            "step": int,
            "rewards": {...: NUMBER},
            "planned?": {"actions": [str]},
            "thoughts?": str,
            "otherwise?": [str],
            "effect?": {...: NUMBER},
        }
    ],
    "questions": [{"text": str, "answer": str, "candidates": [str], "also?": [str], "later?": str}],
    "beliefs": [{"listener": str, "step": int, "question": int, "probs": [NUMBER]}],
}


def episode_to_json(episode: Episode) -> Transcript:
    """Converts an episode to JSON's types, as FORM has them.

    Some turns have `cut` (unfinished), `thoughts` (of an endpoint's model), `otherwise` (what its author might have
    said) with `effect` (see `influence.of_messages`, of experiments.talk), or `planned`: all `actions` with `anchor`,
    `values` and `plan`, the `chosen` one, and the share of raised anchor probabilities (`floored`). A belief's
    `question` is an index into `questions`; `also` are further true answers, `later` its `Question.later`, if any.
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
        "questions": [
            {
                "text": q.text,
                "candidates": list(q.candidates),
                "answer": q.answer,
                **({"also": list(q.also)} if q.also else {}),
                **({"later": q.later} if q.later else {}),
            }
            for q in questions
        ],
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


def episode_from_json(transcript: Transcript) -> Episode:
    """The episode of a transcript, as far as it is written there: without streams, ids of tokens and plans."""
    questions = [
        Question(q["text"], tuple(q["candidates"]), q["answer"], tuple(q.get("also", ())), later=q.get("later", ""))
        for q in transcript["questions"]
    ]
    turns = [
        Turn(
            **{**{name: turn[name] for name in PLAIN}, "kind": TurnKind[turn["kind"]]},
            cut=turn.get("cut", False),
            thoughts=turn.get("thoughts", ""),
            otherwise=tuple(turn.get("otherwise", ())),
            rewards=turn["rewards"],
        )
        for turn in transcript["turns"]
    ]
    beliefs = [
        Belief(
            b["listener"], transcript["roles"][b["listener"]], b["step"], -1, questions[b["question"]],
            np.array(b["probs"]),
        )
        for b in transcript["beliefs"]
    ]  # fmt: skip
    return Episode(
        **{name: transcript[name] for name in ("seed", "players", "roles", "outcome", "facts")},
        streams={},
        turns=tuple(turns),
        beliefs=tuple(beliefs),
        payments=(),
        steps=transcript.get("steps", 0),
    )


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        **({"planned": _planned(turn.planned)} if turn.planned else {}),
        **{name: getattr(turn, name) for name in PLAIN},
        "kind": turn.kind.name,
        **({"cut": True} if turn.cut else {}),
        **({"thoughts": turn.thoughts} if turn.thoughts else {}),
        **({"otherwise": list(turn.otherwise)} if turn.otherwise else {}),
        "rewards": {name: round(float(value), 4) for name, value in turn.rewards.items()},
        "tokens": len(turn.reply_ids),
        "logprob": round(float(sum(turn.logprobs)), 4),
    }


def _planned(planned: Planned) -> dict[str, Any]:
    return {
        "actions": list(planned.actions),
        **{name: [round(p, 4) for p in getattr(planned, name)] for name in ("anchor", "values", "plan")},
        "chosen": planned.actions[planned.chosen],
        **({"floored": round(planned.floored, 4)} if planned.floored else {}),
    }


def _plain(value: Any) -> Any:
    """Converts tuples and arrays to lists, enums to their values. TypeError for anything that JSON lacks."""
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


def write_episodes(path: str | Path, episodes: Iterable[Episode]) -> None:
    """Writes one transcript a line, in one step. Makes the folder."""
    write_transcripts(path, map(episode_to_json, episodes))


def write_transcripts(path: str | Path, transcripts: Iterable[Transcript]) -> None:
    """Writes transcripts, which may have further entries."""
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        for transcript in transcripts:
            file.write(json.dumps(transcript, ensure_ascii=False, allow_nan=False) + "\n")


def read_episodes(path: str | Path) -> list[Transcript]:
    """Reads the transcripts of a file. UserError with file and line number if one cannot be shown."""
    transcripts: list[Transcript] = []
    for number, line in enumerate(read_bytes(Path(path)).decode(errors="replace").split("\n"), start=1):
        if not line:
            continue
        where = f"{path}, line {number}"
        try:
            transcript = parsed_json(line)
        except ValueError as error:
            raise UserError(
                f"{where}: expected a transcript as one JSON object, got {line[:60]!r}. Name another."
            ) from error
        if not isinstance(transcript, dict) or not FORM.keys() <= transcript.keys():
            raise UserError(f"{where}: expected a transcript with {', '.join(FORM)}. Name another.")
        with reading(where):
            check_transcript(transcript)
        transcripts.append(transcript)
    return transcripts


def check_transcript(transcript: Transcript) -> None:
    """Raises an error of `files.FAULTS` if the transcript cannot be shown."""
    if wrong := [name for name, form in FORM.items() if not fits(transcript[name], form)]:
        raise TypeError(f"{wrong[0]} are not what they should be")
    players, roles = transcript["players"], transcript["roles"]
    if len(transcript["turns"]) * len(transcript["beliefs"]) > WORK:
        raise ValueError(f"{len(transcript['turns'])} turns with {len(transcript['beliefs'])} beliefs are no game")
    if max(map(len, [*players, *players.values(), *roles.values()]), default=0) > NAME:
        raise ValueError(f"a name has more than {NAME} letters")
    for turn in transcript["turns"]:
        players[turn["agent"]], roles[turn["agent"]]
    for belief in transcript["beliefs"]:
        roles[belief["listener"]], truth_of(belief, transcript["questions"][belief["question"]])
    render_text(transcript)

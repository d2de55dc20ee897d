"""Transcripts: episodes as JSON lines, for people to read. Writes, reads, checks and renders them as text.

A transcript has no tokens or streams, so training data never comes from one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from envs.among_us.state import NAMES, Act
from envs.dond import environment as dond_environment
from envs.dond import replies as dond_replies
from envs.dond import rules as dond_rules
from marl.common.errors import UserError
from marl.common.files import parsed_json, read_bytes, reading, whole_file, writing
from marl.metrics.among_us import Meeting, Moves, Reply, of_among_us, story, template
from marl.types import Episode, Planned, Turn

Transcript = dict[str, Any]
NO_DEAL = {
    "mismatch": "the two claims do not add up to the pool",
    "abort": "too many refused replies in a row",
    "limit": "too many turns",
}
ENDINGS = {
    "ejection": "Crewmates win: no imposter is left",
    "tasks": "Crewmates win: all tasks are done",
    "parity": "Imposters win: they are as many as the crewmates",
    "time": "Nobody wins: time ran out",
}
CUT = "cut at its limit"  # label of an unfinished turn


def episode_to_json(episode: Episode) -> Transcript:
    """Converts an episode to JSON's types.

    `turns`: agent, role, step, kind, text, message, error, rewards, number of sampled `tokens`, sum of their `logprob`.
    Some have `cut` (unfinished), `thoughts` (of an endpoint's model), or `planned`: all `actions` with `anchor`,
    `values` and `plan`, the `chosen` one, and the share of raised anchor probabilities (`floored`). `questions`: each
    question once, with candidates and answer (`also`: further true answers). `beliefs`: listener, step, `question` (an
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
        "questions": [
            {
                "text": q.text,
                "candidates": list(q.candidates),
                "answer": q.answer,
                **({"also": list(q.also)} if q.also else {}),
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


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        **({"planned": _planned(turn.planned)} if turn.planned else {}),
        "agent": turn.agent,
        "role": turn.role,
        "step": turn.step,
        "kind": turn.kind.name,
        "text": turn.text,
        "message": turn.message,
        "error": turn.error,
        **({"cut": True} if turn.cut else {}),
        **({"thoughts": turn.thoughts} if turn.thoughts else {}),
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
            raise UserError(f"{where}: expected a transcript as one JSON object, got {line[:60]!r}") from error
        if not isinstance(transcript, dict) or not {"turns", "beliefs", "questions", "outcome"} <= transcript.keys():
            raise UserError(f"{where}: expected a transcript with turns, beliefs, questions and outcome")
        with reading(where):
            check_transcript(transcript)
        transcripts.append(transcript)
    return transcripts


NAME = 1000  # letters of a player's name or role at most
WORK = 10**7  # turns times beliefs of a transcript at most: the time to find the effect of each message


def check_transcript(transcript: Transcript) -> None:
    """Raises an error of `files.FAULTS` if the transcript cannot be shown."""
    players, roles, facts = (transcript[part] for part in ("players", "roles", "facts"))
    if len(transcript["turns"]) * len(transcript["beliefs"]) > WORK:
        raise ValueError(f"{len(transcript['turns'])} turns with {len(transcript['beliefs'])} beliefs are no game")
    _are(str, *players.values(), *roles.values())
    if max(map(len, [*players, *players.values(), *roles.values()]), default=0) > NAME:
        raise ValueError(f"a name has more than {NAME} letters")
    _are(int, transcript["seed"])
    _are(dict, facts, transcript["outcome"], *transcript["turns"], *transcript["questions"], *transcript["beliefs"])
    for turn in transcript["turns"]:
        _are(str, *(turn[part] for part in ("agent", "role", "kind", "text", "message", "error")))
        _are(int, turn["step"])
        _are(float, *turn["rewards"].values())
        _are(str, players[turn["agent"]], roles[turn["agent"]])
        if "planned" in turn:
            _are(str, *turn["planned"]["actions"])
    for question in transcript["questions"]:
        _are(str, question["text"], question["answer"], *question["candidates"], *question.get("also", ()))
    for belief in transcript["beliefs"]:
        _are(str, roles[belief["listener"]])
        _are(int, belief["step"], belief["question"])
        _are(float, *belief["probs"], truth_of(belief, transcript["questions"][belief["question"]]))
    if is_dond(transcript):
        dond_rules.Context(tuple(facts["counts"]), tuple(map(tuple, facts["values"])))  # type: ignore[arg-type]
    if is_among_us(transcript):
        _are(int, *(len(facts["tasks"][agent]) for agent in players))
    render_text(transcript)


def _are(kind: type, *values: Any) -> None:
    """TypeError unless all values are of this kind. A whole number counts as a real one."""
    wanted = (int, float) if kind is float else kind
    for value in values:
        if not isinstance(value, wanted):
            raise TypeError(f"expected {kind.__name__}, got {str(value)[:40]!r}")


# --- Forms of messages ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A form of messages (`among_us.template`): how many have it, name a player, name an imposter (dead or alive)."""

    text: str
    uses: int
    naming: int
    naming_imposter: int


def forms(transcripts: Iterable[Transcript], player: str) -> list[Form]:
    """The forms of a player's messages, the commonest first. `player`: a name of `transcript["players"]`."""
    found: dict[str, list[tuple[bool, bool]]] = {}
    for transcript in transcripts:
        names = transcript["facts"]["names"] if is_among_us(transcript) else {}
        imposters = {names[agent] for agent in transcript["facts"]["imposters"]} if names else set()
        for turn in transcript["turns"]:
            if turn["message"] and transcript["players"][turn["agent"]] == player:
                named = {name for _, name in mentions(turn["message"]) if name in names.values()}
                found.setdefault(template(turn["message"]), []).append((bool(named), bool(named & imposters)))
    counted = [Form(text, len(uses), *map(sum, zip(*uses, strict=True))) for text, uses in found.items()]
    return sorted(counted, key=lambda form: -form.uses)


# --- Effects of messages ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shift:
    """A listener's belief in a true answer before and after a message."""

    listener: str
    question: str
    answer: str
    before: float
    after: float


def shifts(transcript: Transcript, turn: dict[str, Any]) -> list[Shift]:
    """Changes of belief of the other listeners that were asked before and right after the turn's message."""
    if not turn["message"]:
        return []
    found = []
    last: dict[tuple[str, int], dict[str, Any]] = {}  # of each listener and question, before the message
    for belief in transcript["beliefs"]:
        key = belief["listener"], belief["question"]
        if belief["step"] <= turn["step"] and (key not in last or belief["step"] > last[key]["step"]):
            last[key] = belief
    for after in transcript["beliefs"]:
        if after["step"] != turn["step"] + 1 or after["listener"] == turn["agent"]:
            continue
        if before := last.get((after["listener"], after["question"])):
            question = transcript["questions"][after["question"]]
            ends = truth_of(before, question), truth_of(after, question)
            found.append(Shift(after["listener"], topic(question["text"]), question["answer"], *ends))
    return found


def shifts_by_listener(transcript: Transcript, turn: dict[str, Any]) -> dict[str, list[Shift]]:
    """The same, by listener."""
    by_listener: dict[str, list[Shift]] = {}
    for shift in shifts(transcript, turn):
        by_listener.setdefault(shift.listener, []).append(shift)
    return by_listener


def truth_of(belief: dict[str, Any], question: dict[str, Any]) -> float:
    """Probability of the true answer, or of any of several."""
    right = (question["answer"], *question.get("also", ()))
    return float(sum(belief["probs"][question["candidates"].index(answer)] for answer in right))


def topic(question: str) -> str:
    """A short label of a question: `books` for a question about the value of a book, else the question itself."""
    return next((item for item in dond_rules.ITEMS if item.removesuffix("s") in question), question)


def is_dond(transcript: Transcript) -> bool:
    return "counts" in transcript.get("facts", {})


def is_among_us(transcript: Transcript) -> bool:
    return of_among_us(transcript.get("facts", {}))


def said(turn: dict[str, Any]) -> str:
    """A turn in words: the message, the claim of a proposal, or the bare reply."""
    if turn["message"]:
        return str(turn["message"])
    text = str(turn["text"]).strip()
    if text.startswith(dond_replies.PROPOSE) and not turn["error"]:
        return "proposes " + text.removeprefix(dond_replies.PROPOSE).partition("\n")[0].removesuffix("[END]").strip()
    return text


def outcome_text(transcript: Transcript) -> str:
    """The ending of a game, in one sentence."""
    outcome = transcript["outcome"]
    if is_among_us(transcript):
        return ENDINGS.get(outcome["how"], str(outcome["how"]))
    if not is_dond(transcript):
        how = str(outcome.get("how") or ", ".join(f"{name} {value}" for name, value in outcome.items()))
        winner = outcome.get("winner")
        return printable(how if winner is None else f"{winner} won ({how})")
    if not outcome["deal"]:
        return f"No deal: {NO_DEAL.get(outcome['how'], outcome['how'])}"
    points = outcome["points"]
    counts, (first, second) = transcript["facts"]["counts"], transcript["facts"]["values"]
    best = dond_rules.best_joint(dond_rules.Context(tuple(counts), (tuple(first), tuple(second))))
    each = ", ".join(f"{agent} {value:g}" for agent, value in points.items())
    return f"Deal: {each}; together {sum(points.values()):g} of at most {best}"


def plan_text(turn: dict[str, Any], most: int = 3) -> str:
    """A plan in one line: the chosen action and the likeliest others, with anchor and plan probabilities and values.

    Empty if the reply was not planned.
    """
    if "planned" not in turn:
        return ""
    p = turn["planned"]
    rows = sorted(
        zip(p["actions"], p["anchor"], p["plan"], p["values"], strict=True),
        key=lambda r: (r[0] != p["chosen"], -r[2], -r[1]),
    )
    shown = "; ".join(f"{a} {tau:.2f} -> {pi:.2f}, worth {value:.2f}" for a, tau, pi, value in rows[:most])
    return shown + (f"; {p['floored']:.0%} of the anchor raised from 0" if p.get("floored") else "")


# --- Text -------------------------------------------------------------------------------------------------------------


def render_text(transcript: Transcript) -> str:
    """A transcript for the terminal: what each player knew, the turns, and beliefs in the truth before -> after."""
    if is_among_us(transcript):
        return "\n".join(_among_us_lines(transcript))
    lines = [*_heading(transcript), ""]
    width = max((len(turn["agent"]) for turn in transcript["turns"]), default=0)
    for turn in transcript["turns"]:
        refused = f"   (refused: {turn['error']})" if turn["error"] else ""
        cut = f"   ({CUT})" if turn.get("cut") else ""
        lines.append(f"{turn['agent']:<{width}}  {printable(said(turn))}{cut}{printable(refused)}")
        for listener, moved in shifts_by_listener(transcript, turn).items():
            each = ", ".join(f"{s.question}={s.answer} {s.before:.2f} -> {s.after:.2f}" for s in moved)
            total = sum(s.after - s.before for s in moved)
            lines.append(f"{'':<{width}}    {listener} believes {each}  ({total:+.2f})")
        if plan := plan_text(turn):
            lines.append(f"{'':<{width}}    planned (anchor -> plan): {plan}")
        paid = ", ".join(f"{name} {value:+.2f}" for name, value in turn["rewards"].items() if value)
        if paid:
            lines.append(f"{'':<{width}}    reward: {paid}")
    return "\n".join([*lines, "", outcome_text(transcript)])


def _heading(transcript: Transcript) -> list[str]:
    held_by = transcript["players"]
    if not is_dond(transcript):
        return [f"{agent} ({held_by[agent]}): {role}" for agent, role in transcript["roles"].items()]
    facts = transcript["facts"]
    table = [["", *dond_rules.ITEMS], ["pool", *map(str, facts["counts"])]]
    for seat, agent in enumerate(dond_environment.AGENTS):
        table.append([f"{agent} ({held_by[agent]}) values", *map(str, facts["values"][seat])])
    width = max(len(row[0]) for row in table)
    return ["  ".join([row[0].ljust(width), *(cell.rjust(5) for cell in row[1:])]).rstrip() for row in table]


def printable(text: str) -> str:
    """The text on one line, without control characters, which could drive the terminal."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "�" for c in text)


# --- Among Us ---------------------------------------------------------------------------------------------------------
def story_of(transcript: Transcript) -> list[Moves | Meeting]:
    """The game replayed (`among_us.story`); meetings hold the transcript's own turns."""
    replies = [Reply(t["agent"], t["step"], t["kind"], t["text"], t["error"], t) for t in transcript["turns"]]
    return story(transcript["facts"], replies)


def crew_shifts(transcript: Transcript, turn: dict[str, Any]) -> list[Shift]:
    """Changes of belief of the other crewmates; imposters know the truth."""
    return [shift for shift in shifts(transcript, turn) if transcript["roles"][shift.listener] != "imposter"]


def beliefs_between(transcript: Transcript, first: int, last: int) -> dict[str, float]:
    """Each crewmate's probability of the truth, by name: its last answer after `first` to `last` steps."""
    names = transcript["facts"]["names"]
    found = {}
    for belief in sorted(transcript["beliefs"], key=lambda belief: belief["step"]):
        if first <= belief["step"] <= last and transcript["roles"][belief["listener"]] != "imposter":
            question = transcript["questions"][belief["question"]]
            found[names[belief["listener"]]] = truth_of(belief, question)
    return found


def fates(transcript: Transcript) -> dict[str, str]:
    """The end of each player, by name: `alive`, or its death."""
    found = dict.fromkeys(transcript["facts"]["names"].values(), "alive")
    for chapter in story_of(transcript):
        if isinstance(chapter, Meeting) and chapter.ejected:
            found[chapter.ejected] = f"voted out in step {chapter.step + len(chapter.messages)}"
        elif isinstance(chapter, Moves):
            for deed in chapter.deeds:
                if deed.act is Act.KILL:
                    found[deed.victim] = f"killed in step {deed.step} by {deed.who}"
    return found


def mentions(text: str) -> list[tuple[str, str]]:
    """Splits a text at players' names: pieces, each with the name that it is, or empty."""
    pieces = [piece for piece in re.split(rf"\b({'|'.join(NAMES)})\b", text, flags=re.I) if piece]
    return [(piece, piece.capitalize() if piece.capitalize() in NAMES else "") for piece in pieces]


def opening(meeting: Meeting) -> str:
    """The reason of a discussion, in one sentence."""
    if not meeting.reports:
        return "A discussion begins"
    finders = " and ".join(dict.fromkeys(deed.who for deed in meeting.reports))
    victims = " and ".join(dict.fromkeys(f"{deed.victim} in {deed.room}" for deed in meeting.reports))
    return f"{finders} found the body of {victims}"


def verdict(meeting: Meeting) -> str:
    """The result of a vote, in one sentence; empty if the game ended before it."""
    if not meeting.votes:
        return ""
    counts = Counter(choice or "skip" for choice in meeting.votes.values())
    each = ", ".join(f"{choice} {count}" for choice, count in counts.most_common())
    return f"{each}: {meeting.ejected or 'nobody'} is voted out"


def _among_us_lines(transcript: Transcript) -> list[str]:
    """The game as text: players, deaths and reports, and each discussion with its effect on every listener."""
    facts = transcript["facts"]
    names, ends = facts["names"], fates(transcript)
    imposters = {names[agent] for agent in facts["imposters"]}
    rows = [
        (names[agent] + "*" * (names[agent] in imposters), transcript["roles"][agent], held_by, ends[names[agent]])
        for agent, held_by in sorted(transcript["players"].items())
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    truth = " or ".join(sorted(imposters))
    for chapter in story_of(transcript):
        if isinstance(chapter, Moves):
            steps = list(chapter.by_step)
            count = sum(map(len, chapter.by_step.values()))
            lines += ["", f"steps {steps[0]} to {steps[-1]}: {count} moves"]
            lines += [f"  step {deed.step}: {deed}" for deed in chapter.deeds]
            continue
        before = beliefs_between(transcript, chapter.step, chapter.step)
        each = ", ".join(f"{name} {belief:.2f}" for name, belief in before.items())
        lines += ["", f"{opening(chapter)}. Belief in {truth}: {each or 'nobody was asked'}"]
        for turn in chapter.messages:
            speaker = names[turn["agent"]]
            cut = f"   ({CUT})" if turn.get("cut") else ""
            lines.append(f"  {speaker + '*' * (speaker in imposters) + ':':<9}{printable(said(turn))}{cut}")
            moved = [(names[s.listener], s.before, s.after) for s in crew_shifts(transcript, turn)]
            if moved:
                each = ", ".join(f"{name} {before:.2f} -> {after:.2f}" for name, before, after in moved)
                lines.append(f"           {each}  ({sum(after - before for _, before, after in moved):+.2f})")
        if chapter.votes:
            votes = [f"{voter} for {choice or 'skip'}" for voter, choice in chapter.votes.items()]
            lines.append("  votes: " + ", ".join(votes))
            plans = {voter: plan_text(turn) for voter, turn in chapter.voters.items()}
            lines += [f"    {voter} planned (anchor -> plan): {plan}" for voter, plan in plans.items() if plan]
            lines.append(f"  {verdict(chapter)}")
    return [*lines, "", outcome_text(transcript)]

"""Episodes as plain data: written to files, read back, and shown as text with what each message did to its listeners.

What it leaves out: tokens and streams. A transcript is for reading; training data never comes from one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from envs.among_us import state as among_us_state
from envs.among_us import texts as among_us_texts
from envs.among_us.state import Act, Action
from envs.dond import environment as dond_environment
from envs.dond import replies as dond_replies
from envs.dond import rules as dond_rules
from marl.common.errors import UserError
from marl.common.files import parsed_json, read_bytes, reading, whole_file, writing
from marl.metrics.among_us import of_among_us, template
from marl.types import Episode, Planned, Turn

Transcript = dict[str, Any]
CUT = "cut at its limit"  # what is said of a turn that is unfinished


def episode_to_json(episode: Episode) -> Transcript:
    """What a reader wants of an episode, as JSON's own types.

    `turns`: agent, role, step, kind, text, message, error, rewards, `tokens` sampled and the sum of their `logprob`;
    `cut` where it is unfinished (see `Turn.cut`), `thoughts` where an endpoint's model told any;
    where a planner chose the reply, `planned`: all `actions` with `anchor`, `values` and `plan`, the `chosen` one, and
    the share of anchor probabilities that were raised to the least one (`floored`).
    `questions`: each different question once, with candidates and answer (`also`: further answers that are as true).
    `beliefs`: listener, step, `question` (an index into `questions`), `probs` with four decimals.
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


def write_episodes(path: str | Path, episodes: Iterable[Episode]) -> None:
    """Writes one transcript a line. The file appears whole or not at all; its folder is made."""
    write_transcripts(path, map(episode_to_json, episodes))


def write_transcripts(path: str | Path, transcripts: Iterable[Transcript]) -> None:
    """The same of transcripts, which may hold more than an episode tells."""
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        for transcript in transcripts:
            file.write(json.dumps(transcript, ensure_ascii=False, allow_nan=False) + "\n")


def read_episodes(path: str | Path) -> list[Transcript]:
    """The transcripts of a file, each of which can be shown. UserError with file and line number where one is not."""
    transcripts: list[Transcript] = []
    for number, line in enumerate(read_bytes(Path(path)).decode(errors="replace").split("\n"), start=1):
        if not line:
            continue  # behind the last one
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


NAME = 1000  # letters of a player's name or role, which tables are as wide as
WORK = 10**7  # turns times beliefs of a transcript: what it takes to find what each message did


def check_transcript(transcript: Transcript) -> None:
    """Raises an error of `files.FAULTS` for what is no transcript that can be shown."""
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
    """TypeError unless all are of this kind; whole numbers are real ones, too."""
    wanted = (int, float) if kind is float else kind
    for value in values:
        if not isinstance(value, wanted):
            raise TypeError(f"expected {kind.__name__}, got {str(value)[:40]!r}")


# --- What is said most ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A way to put a message, with {name} and {room} for any (`speech.template`): in how many messages it is used, how
    many of these name a player of Among Us, and how many an imposter (dead or alive)."""

    text: str
    uses: int
    naming: int
    naming_imposter: int


def forms(transcripts: Iterable[Transcript], player: str) -> list[Form]:
    """How a player (by its name in `Transcript["players"]`) puts its messages, the commonest form first."""
    found: dict[str, list[tuple[bool, bool]]] = {}
    for transcript in transcripts:
        names = transcript["facts"]["names"] if is_among_us(transcript) else {}
        imposters = {names[agent] for agent in transcript["facts"]["imposters"]} if names else set()
        for turn in transcript["turns"]:
            if turn["message"] and transcript["players"][turn["agent"]] == player:
                named = {name for _, name in mentions(turn["message"]) if name in names.values()}
                found.setdefault(template(turn["message"]), []).append((bool(named), bool(named & imposters)))
    counted = [
        Form(text, len(uses), *(sum(flags) for flags in zip(*uses, strict=True))) for text, uses in found.items()
    ]
    return sorted(counted, key=lambda form: -form.uses)


# --- What messages did ------------------------------------------------------------------------------------------------


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
    last: dict[tuple[str, int], dict[str, Any]] = {}  # of each listener and question, before the message
    for belief in transcript["beliefs"]:
        key = belief["listener"], belief["question"]
        if belief["step"] <= turn["step"] and (key not in last or belief["step"] > last[key]["step"]):
            last[key] = belief
    for after in transcript["beliefs"]:
        if after["step"] != turn["step"] + 1 or after["listener"] == turn["agent"]:
            continue
        before = last.get((after["listener"], after["question"]))
        if before:
            question = transcript["questions"][after["question"]]
            found.append(
                Shift(
                    after["listener"],
                    topic(question["text"]),
                    question["answer"],
                    truth_of(before, question),
                    truth_of(after, question),
                )
            )
    return found


def truth_of(belief: dict[str, Any], question: dict[str, Any]) -> float:
    """What a belief gives the true answer; of several, any of them."""
    right = (question["answer"], *question.get("also", ()))
    return float(sum(belief["probs"][question["candidates"].index(answer)] for answer in right))


def topic(question: str) -> str:
    """A question in a word, for labels: `books` for a question about the value of a book, else the question itself."""
    return next((item for item in dond_rules.ITEMS if item.removesuffix("s") in question), question)


def is_dond(transcript: Transcript) -> bool:
    return "counts" in transcript.get("facts", {})


def is_among_us(transcript: Transcript) -> bool:
    return of_among_us(transcript.get("facts", {}))


def said(turn: dict[str, Any]) -> str:
    """What a turn did, in words: the message, the claim of a proposal, or the bare reply."""
    if turn["message"]:
        return str(turn["message"])
    text = str(turn["text"]).strip()
    if text.startswith(dond_replies.PROPOSE) and not turn["error"]:
        return "proposes " + text.removeprefix(dond_replies.PROPOSE).partition("\n")[0].removesuffix("[END]").strip()
    return text


def outcome_text(transcript: Transcript) -> str:
    """How the game ended, in one sentence."""
    outcome = transcript["outcome"]
    if is_among_us(transcript):
        return ENDINGS.get(outcome["how"], str(outcome["how"]))
    if not is_dond(transcript):
        return own_ending(outcome)
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
    best = dond_rules.best_joint(dond_rules.Context(tuple(counts), (tuple(first), tuple(second))))
    each = ", ".join(f"{agent} {value:g}" for agent, value in points.items())
    return f"Deal: {each}; together {sum(points.values()):g} of at most {best}"


def own_ending(outcome: dict[str, Any]) -> str:
    """How a game that the library does not know ended, in its own words: `how`, behind its winner if it has one."""
    how = str(outcome.get("how") or ", ".join(f"{name} {value}" for name, value in outcome.items()))
    winner = outcome.get("winner")
    return printable(how if winner is None else f"{winner} won ({how})")


def plan_text(turn: dict[str, Any], most: int = 3) -> str:
    """What a planner weighed, in one line: the chosen action and those it would likeliest have taken else, each with
    its probability under the anchor and the plan, and its value. Empty where the reply was not planned."""
    if "planned" not in turn:
        return ""
    p = turn["planned"]
    rows = sorted(
        zip(p["actions"], p["anchor"], p["plan"], p["values"], strict=True),
        key=lambda r: (r[0] != p["chosen"], -r[2], -r[1]),
    )
    shown = "; ".join(f"{a} {tau:.2f} -> {pi:.2f}, worth {value:.2f}" for a, tau, pi, value in rows[:most])
    return shown + (f"; {p['floored']:.0%} of the anchor raised from 0" if p.get("floored") else "")


# --- As text ----------------------------------------------------------------------------------------------------------


def render_text(transcript: Transcript) -> str:
    """One transcript for the terminal: who knew what, the turns, and listeners' belief in the truth before -> after."""
    if is_among_us(transcript):
        return "\n".join(_among_us_lines(transcript))
    lines = [*_heading(transcript), ""]
    width = max((len(turn["agent"]) for turn in transcript["turns"]), default=0)
    for turn in transcript["turns"]:
        refused = f"   (refused: {turn['error']})" if turn["error"] else ""
        cut = f"   ({CUT})" if turn.get("cut") else ""
        lines.append(f"{turn['agent']:<{width}}  {printable(said(turn))}{cut}{printable(refused)}")
        by_listener: dict[str, list[Shift]] = {}
        for shift in shifts(transcript, turn):
            by_listener.setdefault(shift.listener, []).append(shift)
        for listener, moved in by_listener.items():
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
    """The text on one line without control characters, which could drive the terminal that shows it."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "�" for c in text)


# --- Among Us: from turns to what happened ----------------------------------------------------------------------------

ENDINGS = {
    "ejection": "Crewmates win: no imposter is left",
    "tasks": "Crewmates win: all tasks are done",
    "parity": "Imposters win: they are as many as the crewmates",
    "time": "Nobody wins: time ran out",
}
_ACTIONS = {words.lower(): action for of in among_us_texts.OPTION.values() for action, words in of.items()}


@dataclass(frozen=True)
class Deed:
    """A kill or a report of a body. Killer, finder and victim by name; `room` is where the body lies."""

    step: int
    act: Act
    who: str
    victim: str
    room: str

    def __str__(self) -> str:
        done = "kills" if self.act is Act.KILL else "reports the body of"
        return f"{self.who} {done} {self.victim} in {self.room}"


@dataclass
class Moves:
    """The steps between two discussions: `by_step[step]` has what each player chose, by name, and `deeds` what came
    of it that others may get to know."""

    by_step: dict[int, dict[str, Action]] = field(default_factory=dict)
    deeds: list[Deed] = field(default_factory=list)


@dataclass
class Meeting:
    """A discussion and its vote. `before[name]` is a listener's belief in the true imposter before any message, and
    `after[name]` its last one before the vote. `votes[name]` is a name or `skip`; `ejected` is empty for nobody.

    `reports` are those of the step that opened it (the game drew one of them). `plans[name]` is how a planner came to
    its vote (`plan_text`).
    """

    step: int
    living: tuple[str, ...]
    reports: list[Deed]
    messages: list[dict[str, Any]] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    votes: dict[str, str] = field(default_factory=dict)
    plans: dict[str, str] = field(default_factory=dict)
    ejected: str = ""


def story(transcript: Transcript) -> list[Moves | Meeting]:
    """What happened in a game of Among Us, worked out from what everybody chose: rooms, deaths and votes.

    Follows the game's rules: a walker belongs to the room that it walks to; kills of a step take effect in seat order;
    after a vote all stand in the start room; a strict plurality ejects.
    """
    facts = transcript["facts"]
    names: dict[str, str] = facts["names"]
    living = sorted(names.values(), key=among_us_state.NAMES.index)
    start = ((facts["width"] - 1) // 2, 0)
    rooms = dict.fromkeys(living, start)
    bodies: dict[str, str] = {}  # victim -> room
    steps: dict[int, list[dict[str, Any]]] = {}
    for turn in transcript["turns"]:
        steps.setdefault(turn["step"], []).append(turn)
    told: list[Moves | Meeting] = []
    for step, turns in sorted(steps.items()):
        talk, vote = turns[0]["kind"] == "SPEAK", _is_vote(turns[0])
        if (talk or vote) and not (told and isinstance(told[-1], Meeting)):
            before = told[-1] if told and isinstance(told[-1], Moves) else Moves()
            reports = [d for d in before.deeds if d.act is Act.REPORT and d.step == max(before.by_step)]
            told.append(Meeting(step, tuple(living), reports, before=_beliefs(transcript, step, step)))
        if not (talk or vote) and not (told and isinstance(told[-1], Moves)):
            told.append(Moves())
        now = told[-1]
        if isinstance(now, Meeting):
            if talk:
                now.messages.extend(turns)
                continue
            now.after |= _beliefs(transcript, now.step, step)
            now.votes = {names[turn["agent"]]: action_of(turn).target or "skip" for turn in turns}
            now.plans = {names[turn["agent"]]: plan_text(turn) for turn in turns if "planned" in turn}
            (first, most), *others = [*Counter(now.votes.values()).most_common(2)]
            if first != "skip" and not (others and others[0][1] == most):
                now.ejected = first
                living.remove(first)
            rooms = dict.fromkeys(living, start)
            continue
        chosen = {names[turn["agent"]]: action_of(turn) for turn in turns}
        now.by_step[step] = chosen
        for who, action in chosen.items():
            if action.act is Act.GO:
                (x, y), (dx, dy) = rooms[who], among_us_state.DIRECTIONS[action.target]
                rooms[who] = (x + dx, y + dy)
        for who, action in chosen.items():
            if action.act is Act.KILL and action.target in living:
                living.remove(action.target)
                bodies[action.target] = room_name(rooms[who])
                now.deeds.append(Deed(step, Act.KILL, who, action.target, bodies[action.target]))
            elif action.act is Act.REPORT:
                now.deeds.append(Deed(step, Act.REPORT, who, action.target, bodies[action.target]))
    return told


def action_of(turn: dict[str, Any]) -> Action:
    """What a choice of Among Us counted as."""
    if turn["error"]:
        return among_us_state.SKIP if _is_vote(turn) else among_us_state.WAIT
    return _ACTIONS[str(turn["text"]).strip().lower()]


def _is_vote(turn: dict[str, Any]) -> bool:
    if turn["kind"] == "SPEAK":
        return False
    if turn["error"]:
        return str(turn["error"]).endswith(" skip.")
    return action_of(turn).act in (Act.VOTE, Act.SKIP)


def room_name(room: tuple[int, int]) -> str:
    """Both of the names that players read."""
    return f"{among_us_texts.ROOMS[room[1]][room[0]]} ({room[0]},{room[1]})"


def crew_shifts(transcript: Transcript, turn: dict[str, Any]) -> list[Shift]:
    """What the turn's message did to the other crewmates; imposters, who know, are left out."""
    return [shift for shift in shifts(transcript, turn) if transcript["roles"][shift.listener] != "imposter"]


def _beliefs(transcript: Transcript, first: int, last: int) -> dict[str, float]:
    """What each crewmate gives the truth, by name: its last answer after `first` to `last` steps."""
    names = transcript["facts"]["names"]
    found = {}
    for belief in sorted(transcript["beliefs"], key=lambda belief: belief["step"]):
        if first <= belief["step"] <= last and transcript["roles"][belief["listener"]] != "imposter":
            question = transcript["questions"][belief["question"]]
            found[names[belief["listener"]]] = truth_of(belief, question)
    return found


def fates(transcript: Transcript) -> dict[str, str]:
    """How each player of Among Us ended, by name: `alive`, or how it died."""
    found = dict.fromkeys(transcript["facts"]["names"].values(), "alive")
    for chapter in story(transcript):
        if isinstance(chapter, Meeting) and chapter.ejected:
            found[chapter.ejected] = f"voted out in step {chapter.step + len(chapter.messages)}"
        elif isinstance(chapter, Moves):
            for deed in chapter.deeds:
                if deed.act is Act.KILL:
                    found[deed.victim] = f"killed in step {deed.step} by {deed.who}"
    return found


def mentions(text: str) -> list[tuple[str, str]]:
    """The text in pieces, each with the player's name that it is, or empty: for marking names in a message."""
    pieces = [piece for piece in re.split(rf"\b({'|'.join(among_us_state.NAMES)})\b", text, flags=re.I) if piece]
    return [(piece, piece.capitalize() if piece.capitalize() in among_us_state.NAMES else "") for piece in pieces]


def opening(meeting: Meeting) -> str:
    """Why a discussion began, in one sentence."""
    if not meeting.reports:
        return "A discussion begins"
    finders = " and ".join(dict.fromkeys(deed.who for deed in meeting.reports))
    victims = " and ".join(dict.fromkeys(f"{deed.victim} in {deed.room}" for deed in meeting.reports))
    return f"{finders} found the body of {victims}"


def verdict(meeting: Meeting) -> str:
    """What a vote came to, in one sentence; empty if the game ended before it."""
    if not meeting.votes:
        return ""
    counts = Counter(meeting.votes.values())
    each = ", ".join(f"{choice} {count}" for choice, count in counts.most_common())
    return f"{each}: {meeting.ejected or 'nobody'} is voted out"


def _among_us_lines(transcript: Transcript) -> list[str]:
    """The game as text: who is who, deaths and reports, and each discussion with its effect on every listener."""
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
    for chapter in story(transcript):
        if isinstance(chapter, Moves):
            steps = list(chapter.by_step)
            count = sum(map(len, chapter.by_step.values()))
            lines += ["", f"steps {steps[0]} to {steps[-1]}: {count} moves"]
            lines += [f"  step {deed.step}: {deed}" for deed in chapter.deeds]
            continue
        lines += ["", f"{opening(chapter)}. Belief in {truth}: {_each(chapter.before) or 'nobody was asked'}"]
        for turn in chapter.messages:
            speaker = names[turn["agent"]]
            cut = f"   ({CUT})" if turn.get("cut") else ""
            lines.append(f"  {speaker + '*' * (speaker in imposters) + ':':<9}{printable(said(turn))}{cut}")
            moved = [(names[s.listener], s.before, s.after) for s in crew_shifts(transcript, turn)]
            if moved:
                each = ", ".join(f"{name} {before:.2f} -> {after:.2f}" for name, before, after in moved)
                lines.append(f"           {each}  ({sum(after - before for _, before, after in moved):+.2f})")
        if chapter.votes:
            lines.append("  votes: " + ", ".join(f"{voter} for {choice}" for voter, choice in chapter.votes.items()))
            lines += [f"    {voter} planned (anchor -> plan): {plan}" for voter, plan in chapter.plans.items()]
            lines.append(f"  {verdict(chapter)}")
    return [*lines, "", outcome_text(transcript)]


def _each(beliefs: dict[str, float]) -> str:
    return ", ".join(f"{name} {truth:.2f}" for name, truth in beliefs.items())

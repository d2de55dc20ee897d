"""Views of a transcript for readers: each message with what it changed, as plain data and as text."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.among_us.state import NAMES, Act
from envs.core import END
from envs.dond import replies as dond_replies
from envs.dond import rules as dond_rules
from marl.metrics.among_us import Meeting, Moves, Reply, Sight, of_among_us, sights, story

Transcript = dict[str, Any]
View = dict[str, Any]
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


def game_view(transcript: Transcript, condition: str = "") -> View:
    """Collects what is shown of one game. All text is plain, on one line.

    `moved`: how far all messages moved the beliefs in the truth. `named`: the crew named an imposter.
    """
    outcome = outcome_text(transcript)
    view = {"condition": condition, "seed": transcript["seed"], "outcome": outcome, "chapters": None, "named": False}
    view["phases"] = []  # of Diplomacy: diplomacy.shown_view
    view["ending"] = outcome.partition(":")[0]
    if is_among_us(transcript):
        return {**view, **_among_us_view(transcript)}
    agents = list(transcript["players"])
    turns = []
    for turn, text in zip(transcript["turns"], in_words(transcript), strict=True):
        moved: dict[str, list[Shift]] = {}
        for shift in shifts(transcript, turn):
            moved.setdefault(shift.listener, []).append(shift)
        turns.append(
            {
                **_turn_view(turn),
                "agent": turn["agent"],
                "seat": agents.index(turn["agent"]),
                "kind": "refused" if turn["error"] else "message" if turn["message"] else "act",
                "text": text,
                "moved": [{"listener": name, "shifts": own, "total": total_of(own)} for name, own in moved.items()],
                "plan": plan_text(turn),
                "weighed": weighed(turn),
            }
        )
    facts = transcript["facts"]
    table = None
    if is_dond(transcript):
        table = {"counts": facts["counts"], "values": dict(zip(agents, facts["values"], strict=True))}
    view["moved"] = sum(moved["total"] for turn in turns for moved in turn["moved"])
    roles = {**transcript["roles"], **facts.get("powers", {})}  # in Diplomacy whose seat it is tells more
    return {**view, "players": transcript["players"], "roles": roles, "table": table, "turns": turns}


def _turn_view(turn: dict[str, Any]) -> View:
    return {
        "role": turn["role"],
        "error": printable(turn["error"]),
        "cut": CUT if turn.get("cut") else "",
        "considered": [*considered(turn), *effect_lines(turn)],
        "rewards": {name: value for name, value in turn["rewards"].items() if value},
    }


def outcome_text(transcript: Transcript) -> str:
    """The ending of a game, in one sentence."""
    outcome = transcript["outcome"]
    if is_among_us(transcript):
        return ENDINGS.get(outcome["how"], str(outcome["how"]))
    if not is_dond(transcript):
        how = str(outcome.get("how") or ", ".join(f"{name} {value}" for name, value in outcome.items()))
        if "centres" in outcome:
            held = {p: outcome["centres"][a] for a, p in outcome["powers"].items()}
            how = "The years are over" if how == "years" else how
            how = f"{how}; centres: {', '.join(f'{power} {n}' for power, n in sorted(held.items()))}"
        winner = outcome.get("winner")
        return printable(how if winner is None else f"{winner} won ({how})")
    if not outcome["deal"]:
        return f"No deal: {NO_DEAL.get(outcome['how'], outcome['how'])}"
    points, facts = outcome["points"], transcript["facts"]
    first, second = map(tuple, facts["values"])
    best = dond_rules.best_joint(dond_rules.Context(tuple(facts["counts"]), (first, second)))
    each = ", ".join(f"{agent} {value:g}" for agent, value in points.items())
    return f"Deal: {each}; together {sum(points.values()):g} of at most {best}"


def is_dond(transcript: Transcript) -> bool:
    return "counts" in transcript.get("facts", {})


def is_among_us(transcript: Transcript) -> bool:
    return of_among_us(transcript.get("facts", {}))


def turn_text(turn: dict[str, Any]) -> str:
    """A turn in words: the message, the claim of a proposal, or the bare reply."""
    if turn["message"]:
        return str(turn["message"])
    text = str(turn["text"]).strip()
    if text.startswith(dond_replies.PROPOSE) and not turn["error"]:
        return "proposes " + text.removeprefix(dond_replies.PROPOSE).partition("\n")[0].removesuffix("[END]").strip()
    return text


def in_words(transcript: Transcript) -> list[str]:
    """Each turn as `turn_text`, on one line. A count that is claimed in parts is named with its item."""
    found, claimed = [], Counter[str]()  # by agent
    for turn in transcript["turns"]:
        text, agent = printable(turn_text(turn)), turn["agent"]
        if is_dond(transcript) and turn["kind"] == "CHOOSE" and text.isdecimal() and not turn["error"]:
            item = dond_rules.ITEMS[claimed[agent] % len(dond_rules.ITEMS)]
            text = f"claims {text} {item.removesuffix('s') if text == '1' else item}"
            claimed[agent] += 1
        found.append(text)
    return found


def weighed(turn: dict[str, Any]) -> list[tuple[str, float, float, float]]:
    """All actions of a plan, each with anchor probability, plan probability and value: the chosen one, then the
    likeliest. Empty if the reply was not planned."""
    if "planned" not in turn:
        return []
    p = turn["planned"]
    rows = zip(p["actions"], p["anchor"], p["plan"], p["values"], strict=True)
    return sorted(rows, key=lambda r: (r[0] != p["chosen"], -r[2], -r[1]))


def plan_text(turn: dict[str, Any], most: int = 3) -> str:
    """The first of `weighed` in one line, empty if the reply was not planned."""
    each = [f"{a} {tau:.2f} -> {pi:.2f}, worth {value:.2f}" for a, tau, pi, value in weighed(turn)[:most]]
    floored = turn["planned"].get("floored") if each else 0
    return "; ".join([*each, *([f"{floored:.0%} of the anchor raised from 0"] if floored else [])])


def considered(turn: dict[str, Any]) -> list[str]:
    """The intent of a reply and the messages that were drawn for it, with what refused each; empty without intents."""
    thoughts = turn.get("thoughts", "")
    return [printable(line) for line in thoughts.splitlines()] if thoughts.startswith("intent: ") else []


def effect_lines(turn: dict[str, Any]) -> list[str]:
    """Lines on what a message did beside silence and beside its author's other words, and on those; often none."""
    effect: dict[str, float] = turn.get("effect", {})
    lines = []
    for kind, words in (("silence", "beside silence"), ("resampled", "beside what its author might have said")):
        if f"credit/{kind}" in effect:
            vote = f", vote for it {effect[name]:+.2f}" if (name := f"vote_credit/{kind}") in effect else ""
            moved = f"beliefs moved {effect[f'influence/{kind}']:.2f}"
            lines.append(f"{words}: {moved}, belief in the truth {effect[f'credit/{kind}']:+.2f}{vote}")
    others = Counter(text.partition(END)[0].strip() for text in turn.get("otherwise", ()))
    if others:
        each = "; ".join(f"{printable(text) or 'nothing'}{f' (x{n})' if n > 1 else ''}" for text, n in others.items())
        lines.append(f"might have said: {each}")
    return lines


def printable(text: str) -> str:
    """The text on one line, without control characters, which could drive the terminal."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "�" for c in text)


# --- Effects of messages ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shift:
    """A listener's belief in a true answer before and after a message."""

    listener: str
    question: str
    answer: str
    before: float
    after: float


def total_of(found: Sequence[Shift]) -> float:
    return sum(shift.after - shift.before for shift in found)


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
            found.append(Shift(after["listener"], topic(question), question["answer"], *ends))
    return found


def learned(transcript: Transcript, turn: dict[str, Any]) -> list[Shift]:
    """Changes of belief of those listeners that do not know the answer: `shifts` without the imposters'."""
    return [shift for shift in shifts(transcript, turn) if transcript["roles"][shift.listener] != "imposter"]


def truth_of(belief: dict[str, Any], question: dict[str, Any]) -> float:
    """Probability of the true answer, or of any of several."""
    right = (question["answer"], *question.get("also", ()))
    return float(sum(belief["probs"][question["candidates"].index(answer)] for answer in right))


def topic(question: Mapping[str, Any]) -> str:
    """A short label of a question: `books` if it asks what a book is worth, `books claimed` if it asks for the claim,
    else its own text."""
    text = question["text"]
    item = next((item for item in dond_rules.ITEMS if re.search(rf"\b{item.removesuffix('s')}s?\b", text.lower())), "")
    return f"{item} claimed" if item and question.get("later") else item or text


# --- Among Us ---------------------------------------------------------------------------------------------------------
def _among_us_view(transcript: Transcript) -> View:
    """The players, then moves and discussions in turn."""
    facts, names = transcript["facts"], transcript["facts"]["names"]
    replayed = story_of(transcript)
    ends = fates(names.values(), replayed)
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
    seen = iter(sights(replayed))
    chapters = [
        _moves_view(chapter, [seat["name"] for seat in seats], next(seen))
        if isinstance(chapter, Moves)
        else _meeting_view(chapter, transcript, imposters)
        for chapter in replayed
    ]
    said_by_crew = [m for c in chapters if c["kind"] == "meeting" for m in c["messages"] if m["name"] not in imposters]
    return {
        "chapters": chapters,
        "seats": seats,
        "imposters": imposters,
        "truth": " or ".join(sorted(imposters)),
        "named": any(piece["marked"] for message in said_by_crew for piece in message["pieces"]),
        "moved": sum(m["total"] for c in chapters if c["kind"] == "meeting" for m in c["messages"]),
    }


def story_of(transcript: Transcript) -> list[Moves | Meeting]:
    """The game replayed (`among_us.story`); meetings hold the transcript's own turns."""
    replies = [Reply(t["agent"], t["step"], t["kind"], t["text"], t["error"], t) for t in transcript["turns"]]
    return story(transcript["facts"], replies)


def fates(names: Sequence[str], chapters: Sequence[Moves | Meeting]) -> dict[str, str]:
    """The end of each player, by name: `alive`, or its death."""
    found = dict.fromkeys(names, "alive")
    for chapter in chapters:
        if isinstance(chapter, Meeting) and chapter.ejected:
            found[chapter.ejected] = f"voted out in step {chapter.step + len(chapter.messages)}"
        elif isinstance(chapter, Moves):
            for deed in chapter.deeds:
                if deed.act is Act.KILL:
                    found[deed.victim] = f"killed in step {deed.step} by {deed.who}"
    return found


def _moves_view(moves: Moves, names: Sequence[str], seen: Mapping[int, Mapping[str, Sight]]) -> View:
    """A row for each step at which anybody chose, a cell for each player: what it saw, and what it chose."""
    marked = {(deed.step, deed.who) for deed in moves.deeds}
    rows = [
        {
            "step": step,
            "cells": [
                {
                    "text": " ".join(filter(None, chosen.get(name, ()))),
                    "deed": (step, name) in marked,
                    "saw": str(seen[step].get(name, "")),
                }
                for name in names
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
        crew = learned(transcript, turn)
        messages.append(
            {
                **_turn_view(turn),
                "name": names[turn["agent"]],
                "player": transcript["players"][turn["agent"]],
                "pieces": [
                    {"text": t, "marked": name in imposters} for t, name in mentions(printable(turn_text(turn)))
                ],
                "bars": [{"name": names[s.listener], "before": s.before, "after": s.after} for s in crew],
                "total": total_of(crew),
            }
        )
    beliefs = beliefs_between(transcript, meeting.step, meeting.vote_step)
    votes = [
        {
            "voter": voter,
            "choice": choice or "skip",
            "right": choice in imposters,
            "belief": beliefs.get(voter),
            "plan": plan_text(meeting.voters[voter]),
            "weighed": weighed(meeting.voters[voter]),
        }
        for voter, choice in meeting.votes.items()
    ]
    title, verdict = "A discussion begins", ""
    if meeting.reports:
        finders = " and ".join(dict.fromkeys(deed.who for deed in meeting.reports))
        victims = " and ".join(dict.fromkeys(f"{deed.victim} in {deed.room}" for deed in meeting.reports))
        title = f"{finders} found the body of {victims}"
    if votes:
        counts = Counter(vote["choice"] for vote in votes).most_common()
        each = ", ".join(f"{choice} {count}" for choice, count in counts)
        verdict = f"{each}: {meeting.ejected or 'nobody'} is voted out"
    return {
        "kind": "meeting",
        "title": title,
        "living": [name for name in NAMES if name in meeting.living],
        "before": beliefs_between(transcript, meeting.step, meeting.step),
        "messages": messages,
        "votes": votes,
        "verdict": verdict,
        "caught": meeting.ejected in imposters,
    }


def beliefs_between(transcript: Transcript, first: int, last: int) -> dict[str, float]:
    """Each crewmate's probability of the truth, by name: its last answer after `first` to `last` steps."""
    names = transcript["facts"]["names"]
    found = {}
    for belief in sorted(transcript["beliefs"], key=lambda belief: belief["step"]):
        if first <= belief["step"] <= last and transcript["roles"][belief["listener"]] != "imposter":
            question = transcript["questions"][belief["question"]]
            found[names[belief["listener"]]] = truth_of(belief, question)
    return found


def mentions(text: str) -> list[tuple[str, str]]:
    """Splits a text at players' names: pieces, each with the name that it is, or empty."""
    pieces = [piece for piece in re.split(rf"\b({'|'.join(NAMES)})\b", text, flags=re.I) if piece]
    return [(piece, piece.capitalize() if piece.capitalize() in NAMES else "") for piece in pieces]


# --- Text -------------------------------------------------------------------------------------------------------------
def render_text(transcript: Transcript) -> str:
    """A transcript for the terminal: what each player knew, the turns, and beliefs in the truth before -> after."""
    view = game_view(transcript)
    lines = _among_us_lines(view) if view["chapters"] is not None else _lines(view)
    return "\n".join([*lines, "", view["outcome"]])


def _lines(view: View) -> list[str]:
    lines = _heading(view)
    width = max((len(turn["agent"]) for turn in view["turns"]), default=0)
    for turn in view["turns"]:
        refused = f"   (refused: {turn['error']})" if turn["error"] else ""
        lines.append(f"{turn['agent']:<{width}}  {turn['text']}{_cut(turn)}{refused}")
        under = f"{'':<{width}}    "
        for moved in turn["moved"]:
            each = ", ".join(f"{s.question}={s.answer} {s.before:.2f} -> {s.after:.2f}" for s in moved["shifts"])
            lines.append(f"{under}{moved['listener']} believes {each}  ({moved['total']:+.2f})")
        if turn["plan"]:
            lines.append(f"{under}planned (anchor -> plan): {turn['plan']}")
        lines += [f"{under}{line}" for line in turn["considered"]]
        if turn["rewards"]:
            lines.append(f"{under}reward: " + ", ".join(f"{n} {value:+.2f}" for n, value in turn["rewards"].items()))
    return lines


def _heading(view: View) -> list[str]:
    players, table = view["players"], view["table"]
    if table is None:
        return [*(f"{agent} ({players[agent]}): {role}" for agent, role in view["roles"].items()), ""]
    rows = [["", *dond_rules.ITEMS], ["pool", *map(str, table["counts"])]]
    rows += [[f"{agent} ({players[agent]}) values", *map(str, own)] for agent, own in table["values"].items()]
    width = max(len(row[0]) for row in rows)
    return [*("  ".join([row[0].ljust(width), *(c.rjust(5) for c in row[1:])]).rstrip() for row in rows), ""]


def _cut(turn: View) -> str:
    return f"   ({turn['cut']})" if turn["cut"] else ""


def _among_us_lines(view: View) -> list[str]:
    """Players, deaths and reports, and each discussion with its effect on every listener; `*` marks imposters."""
    stars = {seat["name"]: seat["name"] + "*" * (seat["name"] in view["imposters"]) for seat in view["seats"]}
    rows = [(stars[seat["name"]], seat["role"], seat["player"], seat["end"]) for seat in view["seats"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for part in view["chapters"]:
        if part["kind"] == "moves":
            lines += ["", f"steps {part['rows'][0]['step']} to {part['rows'][-1]['step']}: {part['count']} moves"]
            lines += [f"  step {deed['step']}: {deed['text']}" for deed in part["deeds"]]
            continue
        each = ", ".join(f"{name} {belief:.2f}" for name, belief in part["before"].items())
        lines += ["", f"{part['title']}. Belief in {view['truth']}: {each or 'nobody was asked'}"]
        for turn in part["messages"]:
            text = "".join(piece["text"] for piece in turn["pieces"])
            lines.append(f"  {stars[turn['name']] + ':':<9}{text}{_cut(turn)}")
            if turn["bars"]:
                each = ", ".join(f"{bar['name']} {bar['before']:.2f} -> {bar['after']:.2f}" for bar in turn["bars"])
                lines.append(f"           {each}  ({turn['total']:+.2f})")
            lines += [f"           {line}" for line in turn["considered"]]
        if part["votes"]:
            lines.append("  votes: " + ", ".join(f"{vote['voter']} for {vote['choice']}" for vote in part["votes"]))
            planned = [vote for vote in part["votes"] if vote["plan"]]
            lines += [f"    {vote['voter']} planned (anchor -> plan): {vote['plan']}" for vote in planned]
            lines.append(f"  {part['verdict']}")
    return lines

"""A game as its player sees it, made for the page from the player's own observations and from nothing else."""

import re
from collections import Counter
from typing import Any

from envs.among_us import events, reading
from envs.among_us.state import DIRECTIONS, Room
from envs.core import END, Style
from envs.dond.replies import MESSAGE, PROPOSE
from envs.dond.rules import ITEMS
from envs.dond.texts import parse_prompt
from experiments.webapp.boards import LAST_RULE, diplomacy_board
from experiments.webapp.engine import Sight
from marl.common.errors import UserError

LONGEST = 1000  # characters of a message
DIGITS = re.compile(r"[0-9]{1,2}")
PARTNER = re.compile(r"Partner: (.*)")
SAYS = re.compile(r'(\w+) says: "(.*)"')
WRITES = re.compile(r"([A-Z]+) to you: (.*)")
CLAIM = re.compile(r"\((\d+) books, (\d+) hats, (\d+) balls\)")
POINTS = re.compile(r"^The game is over: a deal\. You get (\S+) points, your partner gets (\S+)\.$", re.M)
GOAL = re.compile(r"^Your goal: .*", re.M)
WORDS = re.compile(r"messages? each of at most (\d+) words")
MOVES = {f"go {name}": step for name, step in DIRECTIONS.items()}
ORDER = ("do", "report", "kill", "wait", "skip")  # first words of choices; names of players to vote for come before
HOW_TO = {
    "dond": "Talk first. Then each of you claims a part of the pool, which the other does not see: if the two claims "
    "add up to exactly the pool, it is a deal, otherwise both get 0 points.",
    "crewmate": "Do your tasks, note who is where, and report bodies. In the discussion say what you saw, then vote.",
    "imposter": "Kill crewmates where nobody else sees it. In the discussion seem to be a crewmate, then vote.",
}

View = dict[str, Any]
BOARD: View = {  # what a board may have
    **{"items": [], "goal": "", "sums": {}},
    **{"rooms": [], "name": "", "role": "", "fellows": (), "choices": []},
    **{"power": "", "pictured": False},
    **{"how": "", "result": ""},
}


def table_view(sight: Sight) -> View:
    """The rules, what happened line by line, the board, and what can be done now."""
    seen = [text for kind, text in sight.entries if kind == "seen"]
    rules = seen[0] if seen else ""
    lines: list[View] = []
    if sight.game == "among_us":  # the first text ends in what is seen at the start
        rules, _, now = rules.rstrip("\n").rpartition("\n")
        lines.append({"kind": "news", "who": "", "text": now})
    if sight.game == "diplomacy":
        board = diplomacy_board(seen, sight.state == "over")
        rules, end, now = rules.partition(LAST_RULE)
        rules += end
        lines += [{"kind": "news", "who": "", "text": line} for line in now.splitlines()]
    else:
        board = dond_board(sight, rules, seen) if sight.game == "dond" else among_us_board(sight, rules, seen)
    first = True
    for kind, text in sight.entries:
        if kind == "seen" and first:
            first = False
        elif kind == "said":
            lines.append(own_line(sight.game, text, board.get("items", ())))
        elif kind == "note":
            lines.append({"kind": "note", "who": "", "text": text})
        else:
            for line in filter(str.strip, text.splitlines()):
                lines.append(heard(line))
                if lines[-1]["kind"] == "error" and len(lines) > 1:
                    lines[-2]["refused"] = True  # the reply before it
    news = [line["text"] for line in lines if line["kind"] == "news"]  # what nobody said
    words = WORDS.search(rules)
    talked = any(line["kind"] in ("heard", "own") and not line.get("refused") for line in lines)
    return {
        "rules": rules,
        "lines": lines,
        "board": {**BOARD, **board},
        "closed": any("partner has made a proposal" in text for text in news),  # no more talk
        "proposes": PROPOSE in rules,  # else (format=structured) proposals are choices
        "talked": talked,  # before that nobody may propose
        "words": int(words[1]) if words else 0,
    }


def heard(line: str) -> View:
    if found := PARTNER.fullmatch(line):
        return {"kind": "heard", "who": "Partner", "text": found[1]}
    if found := SAYS.fullmatch(line) or WRITES.fullmatch(line):
        return {"kind": "heard", "who": found[1], "text": found[2]}
    return {"kind": "error" if line.startswith("Error: ") else "news", "who": "", "text": line}


def own_line(game: str, text: str, items: Any) -> View:
    """Says what the player said, did or claimed."""
    words, end, _ = text.partition(END)
    words = words.strip()
    if game == "dond" and (claim := CLAIM.fullmatch(words.removeprefix(PROPOSE).strip())):
        counts = [int(count) for count in claim.groups()]
        named = [f"{n} {item if n > 1 else item[:-1]}" for n, item in zip(counts, ITEMS, strict=True) if n]
        worth = sum(n * value for n, (_, _, value) in zip(counts, items, strict=False))
        return {"kind": "act", "who": "You claim", "text": f"{', '.join(named) or 'nothing'}, worth {worth} to you"}
    if not end:  # one of the options
        return {"kind": "act", "who": "You", "text": words}
    return {"kind": "own", "who": "You", "text": words.removeprefix(MESSAGE).strip() if game == "dond" else words}


def dond_board(sight: Sight, rules: str, seen: list[str]) -> View:
    """The pool and the player's own values, each (item, number, value), the goal and, at the end, the points."""
    try:
        counts, own, objective = parse_prompt(rules)
    except ValueError:
        return {}
    goal = GOAL.search(rules)
    board: View = {"items": list(zip(ITEMS, counts, own, strict=True)), "goal": goal[0] if goal else ""}
    board["how"] = HOW_TO["dond"]
    if sight.state == "over":
        points = [float(n) for n in found.groups()] if (found := POINTS.search(seen[-1])) else [0.0, 0.0]
        sums = {"Your points": points[0], "Your partner's points": points[1]}
        if objective:
            sums["Your score"] = points[0] + objective * points[1]
        board |= {"result": "A deal" if found else "No deal", "sums": {name: f"{n:g}" for name, n in sums.items()}}
    return board


def among_us_board(sight: Sight, rules: str, seen: list[str]) -> View:
    """Name and role, and the grid: the room where the player last was, who and what it saw there, and ways out."""
    try:
        happened = [event for text in seen for event in reading.read(text, Style.NATURAL)]
    except ValueError:
        return {}
    intro = next((event for event in happened if isinstance(event, events.Intro)), None)
    looks = [event for event in happened if isinstance(event, events.Look)]
    if intro is None or not looks:
        return {}
    tasks = Counter(intro.tasks)
    room: Room | None = None
    for event in happened:
        if isinstance(event, events.Look):
            room = event.room
        elif isinstance(event, events.Done) and room is not None:
            tasks[room] -= 1
    look = looks[-1]
    (x, y), here = look.room, [(name, "") for name in look.present]
    here += [(name, f"from {a},{b}") for name, (a, b) in look.entering]
    here += [(name, f"to {a},{b}") for name, (a, b) in look.leaving]
    moves = {(x + dx, y + dy): option for option, (dx, dy) in MOVES.items() if option in sight.options}
    rooms = [
        [
            {
                "name": f"{i},{j}",
                "here": (i, j) == look.room,
                "move": moves.get((i, j)),
                "tasks": tasks[i, j],
                "people": here if (i, j) == look.room else [],
                "bodies": look.bodies if (i, j) == look.room else (),
            }
            for i in range(intro.width)
        ]
        for j in range(intro.height)
    ]
    board: View = {"rooms": rooms, "name": intro.name, "role": intro.role.value, "fellows": intro.fellows}
    board["how"] = HOW_TO[intro.role.value]
    board["choices"] = sorted((option for option in sight.options if option not in MOVES), key=in_order)
    over = next((event for event in happened if isinstance(event, events.Over)), None)
    if sight.state == "over" and over is not None:
        won = "You won" if over.winner == intro.role else "You lost"
        board["result"] = "Nobody wins" if over.winner is None else won
    return board


def in_order(option: str) -> tuple[int, str]:
    """Sorts choices: players to vote for by name, then what can be done."""
    word = option.partition(" ")[0]
    return (ORDER.index(word) if word in ORDER else -1), option


def reply_of(sight: Sight, form: dict[str, str]) -> str:
    """The reply that a form stands for. UserError if it is too long or lacks something; the game judges the rest."""
    if sight.options:
        choice = form.get("choice", "")
        if choice not in sight.options:
            raise UserError("Choose one of the buttons.")
        return choice
    if sight.game == "dond" and form.get("kind") == "propose":
        counts = [form.get(item, "") for item in ITEMS]
        if not all(DIGITS.fullmatch(count) for count in counts):
            raise UserError("Claim a number of each item, as digits.")
        claim = ", ".join(f"{int(count)} {item}" for item, count in zip(ITEMS, counts, strict=True))
        return f"{PROPOSE} ({claim}) {END}"
    text = " ".join(form.get("text", "").split())
    if len(text) > LONGEST:
        raise UserError(f"A message has at most {LONGEST} characters.")
    return f"{MESSAGE} {text} {END}" if sight.game == "dond" else f"{text} {END}"

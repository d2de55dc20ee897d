"""A game as its player sees it, made for the page from the player's own observations and from nothing else."""

from __future__ import annotations

import re
from typing import Any

from envs.core import END
from envs.dond.replies import MESSAGE, PROPOSE
from envs.dond.rules import ITEMS
from experiments.webapp.engine import Sight
from marl.common.errors import UserError

LONGEST = 1000  # characters of a message
DIGITS = re.compile(r"[0-9]{1,2}")
PARTNER = re.compile(r"Partner: (.*)")
SAYS = re.compile(r'(\w+) says: "(.*)"')
ROOM = re.compile(r"You are in room \((\d+),(\d+)\)")
GRID = re.compile(r"grid of rooms, (\d+) wide and (\d+) high")
MOVES = {"go north": (0, -1), "go south": (0, 1), "go west": (-1, 0), "go east": (1, 0)}

View = dict[str, Any]


def table_view(sight: Sight) -> View:
    """The rules, what happened line by line, and the board."""
    seen = [text for kind, text in sight.entries if kind == "seen"]
    rules, *_ = seen or [""]
    lines: list[View] = []
    if sight.game == "among_us":  # the first text ends in what is seen at the start
        rules, _, now = rules.rstrip("\n").rpartition("\n")
        lines.append({"kind": "news", "who": "", "text": now})
    first = True
    for kind, text in sight.entries:
        if kind == "seen" and first:
            first = False
        elif kind == "said":
            lines.append(own_line(sight.game, text))
        elif kind == "note":
            lines.append({"kind": "note", "who": "", "text": text})
        else:
            lines += [heard(line) for line in text.splitlines() if line.strip()]
    board = dond_board(rules) if sight.game == "dond" else among_us_board(sight, rules, seen)
    closed = sight.game == "dond" and any("partner has made a proposal" in text for text in seen[1:])  # no more talk
    return {"rules": rules, "lines": lines, "board": board, "closed": closed}


def heard(line: str) -> View:
    if found := PARTNER.fullmatch(line):
        return {"kind": "heard", "who": "Partner", "text": found[1]}
    if found := SAYS.fullmatch(line):
        return {"kind": "heard", "who": found[1], "text": found[2]}
    return {"kind": "news", "who": "", "text": line}


def own_line(game: str, text: str) -> View:
    text = text.partition(END)[0].strip()
    if game == "dond" and text.startswith(PROPOSE):
        return {"kind": "act", "who": "You claim", "text": text.removeprefix(PROPOSE).strip()}
    return {"kind": "own", "who": "You", "text": text.removeprefix(MESSAGE).strip() if game == "dond" else text}


def dond_board(rules: str) -> View:
    """The pool and the player's own values, each (item, number)."""
    pool = [re.search(rf"Pool:.*?(\d+) {item}", rules) for item in ITEMS]
    own = [re.search(rf"Your values:.*?(\d+) per {item.removesuffix('s')}", rules) for item in ITEMS]
    if not all(pool) or not all(own):
        return {}
    rows = zip(ITEMS, pool, own, strict=True)
    return {"items": [(item, int(count[1]), int(value[1])) for item, count, value in rows if count and value]}


def among_us_board(sight: Sight, rules: str, seen: list[str]) -> View:
    """The grid, the room in which the player last was, and the moves that lead from there."""
    grid = GRID.search(rules)
    found = [at for text in seen for at in ROOM.finditer(text)]
    if not grid or not found:
        return {}
    width, height, x, y = int(grid[1]), int(grid[2]), int(found[-1][1]), int(found[-1][2])
    moves = {(x + dx, y + dy): o for o, (dx, dy) in MOVES.items() if o in sight.options}
    rooms = [
        [{"name": f"{i},{j}", "here": (i, j) == (x, y), "move": moves.get((i, j))} for i in range(width)]
        for j in range(height)
    ]
    return {"rooms": rooms, "others": [o for o in sight.options if o not in MOVES]}


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

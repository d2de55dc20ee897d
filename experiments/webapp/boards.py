"""Diplomacy as its player sees it: power, result and a picture of the board, from the player's own observations."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from envs.diplomacy.board import Board
from envs.diplomacy.reading import Reader
from marl.common.errors import UserError

LAST_RULE = "word for word.\n"  # where the rules end and the first position begins
MOVES = re.compile(r"^(Spring|Fall) of year (\d+) of \d+: moves", re.M)
HELD = re.compile(r"([A-Z]+): (.*); centres (.*)")
OVER = re.compile(r"The game is over: (.*) Your centres: (\d+)\. Your score: (\S+)\.")
HOW_TO = (
    "All order at once, unit by unit: first what a unit does, then for a support of what. Two units beat one, so "
    "find somebody who supports you."
)


def diplomacy_board(seen: Sequence[str], over: bool) -> dict[str, Any]:
    """The power, whether there is a picture, and at the end the score."""
    reader = Reader()
    try:
        for text in seen:
            reader.read(text)
    except ValueError:
        return {}
    board: dict[str, Any] = {"power": reader.power, "pictured": bool(positions(seen)), "how": HOW_TO}
    if over and (end := OVER.search(seen[-1])):
        board |= {"result": end[1].capitalize(), "sums": {"Your centres": end[2], "Your score": end[3]}}
    return board


def positions(seen: Sequence[str]) -> dict[str, tuple[list[str], list[str]]]:
    """Units and centres of each power, as told last before moves."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for line in (line for text in seen for line in text.splitlines()):
        if MOVES.match(line):
            found = {}
        elif match := HELD.fullmatch(line):
            units, centres = match[2].split(", "), match[3].split(", ")
            found[match[1]] = [u for u in units if u != "no unit"], [c for c in centres if c != "none"]
    return found


def picture(map_name: str, seen: Sequence[str]) -> str:
    """The position told last as SVG. UserError if none was."""
    position, phases = positions(seen), MOVES.findall("\n".join(seen))
    if not position or not phases:
        raise UserError("There is no such picture.")
    board = Board(map_name)
    each = [position.get(power, ([], [])) for power in board.powers]
    units, centres = (tuple(tuple(own[i]) for own in each) for i in range(2))
    season, year = phases[-1]
    phase = f"{season.upper()} {board.first_year + int(year) - 1} MOVEMENT"
    board.restore(replace(board.state(), phase=phase, units=units, centres=centres, influence=centres, options=None))
    return board.svg()

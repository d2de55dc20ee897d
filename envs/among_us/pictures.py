"""Pictures of a game, as text and as pixels."""

from __future__ import annotations

import numpy as np

from envs.among_us.state import Activity, Game, Phase, Role, Room
from envs.among_us.texts import cell_of

_COLOURS = {
    "Red": (214, 39, 40), "Blue": (31, 119, 220), "Green": (44, 140, 44), "Yellow": (240, 210, 40),
    "Orange": (255, 127, 14), "Purple": (128, 70, 170), "Pink": (245, 150, 200),
}  # fmt: skip
_CELL, _SLOT = 96, 24  # pixels: a room's side, a player's place in it


def describe(game: Game) -> str:
    """The whole state as text, hidden parts included: * imposter, + body, > walking in, ! at a task."""
    cells = {}
    for y in range(game.height):
        for x in range(game.width):
            inside = [
                p.name + "*" * (p.role is Role.IMPOSTER) + {Activity.WALK: ">", Activity.TASK: "!"}.get(p.activity, "")
                for p in game.by_name
                if p.alive and p.room == (x, y)
            ]
            inside += [f"+{body.name}" for body in game.bodies if body.room == (x, y)]
            cells[x, y] = f"{cell_of((x, y))} {' '.join(inside)}"
    side = max(map(len, cells.values()))
    lines = [f"step {game.step}, {game.phase.name.lower()}"]
    lines += ["| " + " | ".join(cells[x, y].ljust(side) for x in range(game.width)) + " |" for y in range(game.height)]
    lines += [f"{p.name}: {len(p.tasks)} tasks left" for p in game.by_name if p.role is Role.CREWMATE and p.alive]
    if dead := [p.name for p in game.by_name if not p.alive]:
        lines.append(f"dead or ejected: {', '.join(dead)}")
    if game.phase is Phase.TALK:
        lines.append("speaking: " + game.players[game.speakers[0]].name)
    if game.ending:
        lines.append(f"over: {game.winner or 'nobody'} wins ({game.ending})")
    return "\n".join(lines) + "\n"


def picture(game: Game) -> np.ndarray:
    """The grid from above, shape (96 height, 96 width, 3), uint8: squares are players (those of imposters have a black
    frame, those of walkers stand by their door), crosses are bodies."""
    image = np.full((game.height * _CELL, game.width * _CELL, 3), 60, np.uint8)
    for y in range(game.height):
        for x in range(game.width):
            top, left = y * _CELL, x * _CELL
            image[top + 2 : top + _CELL - 2, left + 2 : left + _CELL - 2] = (235, 235, 225)
    for slot, player in enumerate(game.by_name):
        if not player.alive:
            continue
        top, left = _slot(player.room, slot)
        if player.origin is not None:  # half way between its door and its place
            back_top, back_left = _slot(player.origin, slot)
            top, left = (top + back_top) // 2, (left + back_left) // 2
        square = image[top : top + _SLOT - 4, left : left + _SLOT - 4]
        square[:] = (0, 0, 0) if player.role is Role.IMPOSTER else _COLOURS[player.name]
        square[3:-3, 3:-3] = _COLOURS[player.name]
    for body in game.bodies:
        top, left = _slot(body.room, next(i for i, p in enumerate(game.by_name) if p.name == body.name))
        for i in range(_SLOT - 4):
            image[top + i, left + i] = image[top + i, left + _SLOT - 5 - i] = _COLOURS[body.name]
    return image


def _slot(room: Room, slot: int) -> tuple[int, int]:
    """The upper left corner of a player's own place within a room: two rows of four."""
    return room[1] * _CELL + 22 + (slot // 4) * (_SLOT + 6), room[0] * _CELL + 2 + (slot % 4) * (_SLOT - 1)

"""Recorded games of all runs, for the page that lists them and the page of one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from marl.common.errors import UserError
from marl.common.files import FAULTS, digest, read_bytes, reading
from marl.report.transcripts import check_transcript
from marl.report.views import game_view, is_dond

MOST_FILES = 200  # that the list of all games reads; a run's own list reads all of its files
PATTERNS = ("episodes/*.jsonl", "episodes-*.jsonl")  # of training and evaluation; of play
NAME = re.compile(r"[^/\0.][^/\0]*")


@dataclass(frozen=True)
class Recorded:
    """A recorded game in the list."""

    run: str
    file: str
    line: int  # from 1
    seed: int
    players: tuple[str, ...]
    ending: str  # deal, no deal, or who won
    how: str
    messages: int
    words: str  # all messages, in small letters
    one: bool  # the only game of its file
    deal: str  # what the players were dealt: equal for the same game

    @property
    def address(self) -> str:
        return f"/watch/{self.run}/{self.file}/{self.line}"


def files_of(runs: Path, run: str = "") -> list[Path]:
    """Files of recorded games, the newest first."""
    folders = [runs / run] if run else [path for path in runs.iterdir() if path.is_dir()] if runs.is_dir() else []
    found = [path for folder in folders for pattern in PATTERNS for path in folder.glob(pattern)]
    return sorted(found, key=lambda path: (-path.stat().st_mtime, path.name))


def runs_with_games(runs: Path) -> list[str]:
    if not runs.is_dir():
        return []
    return sorted(path.name for path in runs.iterdir() if any(next(path.glob(pattern), None) for pattern in PATTERNS))


def games_of(runs: Path, run: str = "", ending: str = "", words: str = "") -> list[Recorded]:
    """The recorded games of a run, or the newest of all, with this ending and these words in a message."""
    if run and run not in runs_with_games(runs):
        raise UserError("There is no run of this name with recorded games.")
    files = files_of(runs, run)[: None if run else MOST_FILES]
    games = [game for path in files for game in _of_file(runs, path)]
    return [g for g in games if (not ending or g.ending == ending) and words.lower() in g.words]


def same_games(runs: Path, run: str, file: str, line: int) -> list[Recorded]:
    """The same game, by its seed, as other runs played it; runs of the same name but for arm and seed come first."""
    own = next((g for g in games_of(runs, run) if (g.file, g.line) == (file, line)), None)
    if own is None:
        return []
    found = [
        game
        for name in runs_with_games(runs)
        if name != run
        for path in files_of(runs, name)
        for game in _of_file(runs, path)
        if game.deal == own.deal
    ]
    newest: dict[str, Recorded] = {}
    for game in found:  # of a run that played it several times, the newest
        newest.setdefault(game.run, game)
    return list(newest.values())


def _of_file(runs: Path, path: Path) -> tuple[Recorded, ...]:
    found = path.stat()
    run = path.relative_to(runs).parts[0]
    return _read(path, run, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=2000)
def _read(path: Path, run: str, changed: int, size: int) -> tuple[Recorded, ...]:
    """The games of a file, without those that are damaged. `changed` and `size` renew the cache."""
    games = []
    lines = read_bytes(path).decode(errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            t = json.loads(line)
            outcome = t["outcome"]
            deal = {True: "deal", False: "no deal"}[bool(outcome["deal"])] if is_dond(t) else None
            messages = [str(turn["message"]) for turn in t["turns"] if turn["message"]]
            games.append(
                Recorded(
                    run, path.name, number, int(t["seed"]), tuple(dict.fromkeys(map(str, t["players"].values()))),
                    deal or f"won by {outcome.get('winner') or 'nobody'}", str(outcome.get("how", "")), len(messages),
                    "\n".join(messages).lower(), len(lines) <= 2, digest({"seed": t["seed"], "facts": t["facts"]}),
                )
            )  # fmt: skip
        except FAULTS:
            continue
    return tuple(games)


def recorded_game(runs: Path, run: str, file: str, line: int) -> dict[str, Any]:
    """One game for the template. UserError if there is none, or it is damaged."""
    path = next((path for path in files_of(runs, run) if path.name == file), None) if NAME.fullmatch(run) else None
    lines = read_bytes(path).decode(errors="replace").split("\n") if path else []
    if path is None or not 1 <= line <= len(lines) or not lines[line - 1]:
        raise UserError("There is no such recorded game.")
    with reading(f"{run}/{file}, line {line}"):
        transcript = json.loads(lines[line - 1])
        check_transcript(transcript)
        view = game_view(transcript, run)
    held = set(transcript["players"].values())
    return {**view, "names": sorted(held), "run": run, "file": file, "line": line, "last": len([x for x in lines if x])}

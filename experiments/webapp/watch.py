"""Recorded games of all runs, for the page that lists them and the page of one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from experiments.webapp.timeline import timeline_of
from marl.common.errors import UserError
from marl.common.files import FAULTS, digest, read_bytes, reading
from marl.report.diplomacy import COLOURS, Phase, phase_views, phases_of, picture
from marl.report.transcripts import check_transcript
from marl.report.views import game_view, is_dond
from marl.storage.folder import CONFIG, read_settings

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
    began: str  # when a person began to play it, else empty
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


@lru_cache(maxsize=4096)
def _arm(config: Path, changed: int) -> str:
    try:
        return str(read_settings(config.parent).get("arm", ""))
    except UserError:
        return ""


def arm_of(folder: Path) -> str:
    """A run's arm; empty for a folder of games that are of no run."""
    config = folder / CONFIG
    return _arm(config, config.stat().st_mtime_ns) if config.is_file() else ""


def arms_of(runs: Path) -> list[str]:
    """Arms of the runs with recorded games."""
    return sorted({arm for name in runs_with_games(runs) if (arm := arm_of(runs / name))})


def games_of(runs: Path, run: str = "", ending: str = "", words: str = "", arm: str = "") -> list[Recorded]:
    """The recorded games of a run or an arm, or the newest of all, with this ending and these words in a message."""
    if run and run not in runs_with_games(runs):
        raise UserError("There is no run of this name with recorded games.")
    every = [path for path in files_of(runs, run) if not arm or arm_of(runs / path.relative_to(runs).parts[0]) == arm]
    files = every[: None if run else MOST_FILES]
    games = [game for path in files for game in _of_file(runs, path)]
    return [g for g in games if (not ending or g.ending == ending) and names(g.words, words)]


def names(messages: str, words: str) -> bool:
    """True if a message has these words as they stand, in any case: `Red` is not named by "redmond" or "bored"."""
    return not words or re.search(rf"(?<!\w){re.escape(words.strip().lower())}(?!\w)", messages) is not None


def same_games(runs: Path, run: str, file: str, line: int) -> list[Recorded]:
    """The same game as other runs played it: dealt the same, and recorded in a file of the same name."""

    def of(name: str) -> list[Recorded]:
        return [game for path in files_of(runs, name) if path.name == file for game in _of_file(runs, path)]

    own = next((game for game in of(run) if game.line == line), None)
    others = [name for name in runs_with_games(runs) if name != run] if own else []
    return [game for name in others for game in of(name) if own and game.deal == own.deal]


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
                    "\n".join(messages).lower(), len(lines) <= 2, began(t),
                    digest({"seed": t["seed"], "facts": t["facts"]}),
                )
            )  # fmt: skip
        except FAULTS:
            continue
    return tuple(games)


def recorded_game(runs: Path, run: str, file: str, line: int) -> dict[str, Any]:
    """One game for the template. UserError if there is none, or it is damaged."""
    text, last = line_of(runs, run, file, line)
    with reading(f"{run}/{file}, line {line}"):
        transcript = json.loads(text)
        check_transcript(transcript)
        view = game_view(transcript, run)
        view |= {"phases": phase_views(transcript, view.get("turns", []), _phases(text)), "colours": COLOURS}
        timeline = None if view["phases"] else timeline_of(transcript)  # else its phases are one
    held = set(transcript["players"].values())
    return {
        **view,
        "timeline": timeline,
        "names": sorted(held),
        "began": began(transcript),
        "run": run,
        "file": file,
        "line": line,
        "last": last,
    }


def board_of(runs: Path, run: str, file: str, line: int, phase: int) -> str:
    """The board at the beginning of a phase of a game of Diplomacy, as SVG. UserError if there is none."""
    text, _ = line_of(runs, run, file, line)
    with reading(f"{run}/{file}, line {line}"):
        phases = _phases(text)
    if not 0 <= phase < len(phases) or phases[phase].position is None:
        raise UserError("There is no such picture.")
    return picture(phases[phase])


@lru_cache(maxsize=16)
def _phases(text: str) -> list[Phase]:
    transcript = json.loads(text)
    check_transcript(transcript)
    return phases_of(transcript)


def line_of(runs: Path, run: str, file: str, line: int) -> tuple[str, int]:
    """A recorded game as it is written, and how many its file has."""
    path = next((path for path in files_of(runs, run) if path.name == file), None) if NAME.fullmatch(run) else None
    lines = read_bytes(path).decode(errors="replace").split("\n") if path else []
    if path is None or not 1 <= line <= len(lines) or not lines[line - 1]:
        raise UserError("There is no such recorded game.")
    return lines[line - 1], len([x for x in lines if x])


def began(transcript: dict[str, Any]) -> str:
    """When a person began this game, in UTC to the minute; empty for games without people."""
    return str((transcript.get("about") or {}).get("began", ""))[:16].replace("T", " ")

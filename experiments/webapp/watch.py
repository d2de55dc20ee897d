"""Recorded games of all runs, for the page that lists them and the page of one."""

import json
import os
import re
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from experiments.webapp.runs import settings_of
from experiments.webapp.timeline import timeline_of
from marl.common.errors import UserError
from marl.common.files import FAULTS, digest, read_bytes, reading
from marl.report.diplomacy import COLOURS, Phase, phase_views, phases_of, picture
from marl.report.games import game_of
from marl.report.transcripts import check_transcript
from marl.report.views import game_view, is_dond

MOST_FILES = 200  # that are read for one page of the list
TRANSCRIPTS = re.compile(
    r"(simulated_)?(episodes|games)(-[^/]*)?\.jsonl"
)  # of play, evaluate, talk, intents, web_export
EPISODES = "episodes"  # a folder: of training, of the final evaluation, of this page
WITHOUT = ("checkpoints", "wandb")  # folders without games, and with many files
NAME = re.compile(r"[^/\0.][^/\0]*")
ENDINGS = ("deal", "no deal", "won by crewmates", "won by imposters", "won by nobody")


@dataclass(frozen=True)
class File:
    """A file of recorded games. `name`: its place below the run's folder, where `episodes/` is left out."""

    path: Path
    run: str
    name: str
    changed: int
    size: int


@dataclass(frozen=True)
class Recorded:
    """A recorded game in the list."""

    run: str
    file: str  # below the run's folder
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


def files_of(runs: Path, run: str = "") -> list[File]:
    """Files of recorded games of a run or of all, the newest first. Only their folders are read.

    A study's own games are left out: they are watched once they are exported.
    """
    names = [path.name for path in runs.iterdir() if NAME.fullmatch(path.name)] if runs.is_dir() else []
    found = [file for name in names if run in ("", name) for file in _files(runs / name)]
    return sorted(found, key=lambda file: (-file.changed, file.run, file.name))


def _files(top: Path) -> list[File]:
    found = []
    for at, folders, names in os.walk(top):
        folders[:] = [name for name in folders if name not in WITHOUT and not name.startswith(".")]
        here = Path(at)
        if here.parent == top and here.name == EPISODES and study_of(top):
            continue
        for name in names:
            in_episodes = here.name == EPISODES and name.endswith(".jsonl")
            if not in_episodes and not TRANSCRIPTS.fullmatch(name):
                continue
            short = here.parent == top and in_episodes and not TRANSCRIPTS.fullmatch(name)
            with suppress(OSError):  # gone meanwhile
                about = (here / name).stat()
                place = name if short else (here / name).relative_to(top).as_posix()
                found.append(File(here / name, top.name, place, about.st_mtime_ns, about.st_size))
    return found


def study_of(folder: Path) -> str:
    """The study whose server keeps its games in this folder; empty if none does."""
    path = folder / "games.sqlite"
    if not os.path.isfile(path):  # Path.is_file raises where a name is too long
        return ""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'studies'").fetchone():
                return ""
            return str((db.execute("SELECT name FROM studies").fetchone() or [""])[0])
    except sqlite3.Error:
        return folder.name  # nobody knows whose games those are, so nobody sees them


def arm_of(folder: Path) -> str:
    """A run's arm; empty for a folder of games that are of no run."""
    try:
        return str(settings_of(folder).get("arm", ""))
    except (UserError, OSError):
        return ""


def games_of(
    runs: Path, most: int, first: tuple[int, int] = (0, 0), run: str = "", ending: str = "", words: str = "",
    arm: str = "",
) -> tuple[list[Recorded], tuple[int, int] | None]:  # fmt: skip
    """Up to `most` recorded games, the newest first, with this ending and these words in a message; and where the next
    page begins, None at the end. `first`: a file's number and a game's in it.

    At most MOST_FILES files are read: a page may hold fewer games, and go on.
    """
    every = files_of(runs, run)
    if run and not every:
        raise UserError("There is no run of this name with recorded games.")
    files = [file for file in every if not arm or arm_of(runs / file.run) == arm]
    found: list[Recorded] = []
    for number, file in enumerate(files[first[0] :], start=first[0]):
        if number - first[0] == MOST_FILES:
            return found, (number, 0)
        for place, game in enumerate(_read(file)):
            if (number, place) < first or (ending and game.ending != ending) or not names(game.words, words):
                continue
            if len(found) == most:
                return found, (number, place)
            found.append(game)
    return found, None


def names(messages: str, words: str) -> bool:
    """Tells whether a message has these words as they stand, in any case: "bored" does not name `Red`."""
    return not words or re.search(rf"(?<!\w){re.escape(words.strip().lower())}(?!\w)", messages) is not None


def same_games(runs: Path, run: str, file: str, line: int) -> list[Recorded]:
    """The same game, dealt the same, in other files of its run (its base's, say) and in files of its name elsewhere."""
    every = [game for other in files_of(runs) if other.name == file or other.run == run for game in _read(other)]
    own = next((game for game in every if (game.run, game.file, game.line) == (run, file, line)), None)
    others = [game for game in every if (game.run, game.file) != (run, file) and own and game.deal == own.deal]
    return sorted(others, key=lambda game: (game.run != run, game.run, game.file))


@lru_cache(maxsize=2000)
def _read(file: File) -> tuple[Recorded, ...]:
    """The games of a file, without those that are damaged. Its time and size renew the cache."""
    games = []
    lines = read_bytes(file.path).decode(errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            t = json.loads(line)
            outcome = t["outcome"]
            deal = {True: "deal", False: "no deal"}[bool(outcome["deal"])] if is_dond(t) else None
            messages = [str(turn["message"]) for turn in t["turns"] if turn["message"]]
            games.append(
                Recorded(
                    file.run, file.name, number, int(t["seed"]), tuple(dict.fromkeys(map(str, t["players"].values()))),
                    deal or f"won by {outcome.get('winner') or 'nobody'}", str(outcome.get("how", "")), len(messages),
                    "\n".join(messages).lower(), len(lines) <= 2, began(t),
                    digest({"game": game_of(t)}),
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
        "believes": bool(transcript["beliefs"]),
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
    path = next((each.path for each in files_of(runs, run) if run and each.name == file), None)
    if path is None and NAME.fullmatch(run) and (study := study_of(runs / run)):
        raise UserError(
            f"These are games of study {study}. Export them (python -m experiments.web_export), then watch the export."
        )
    lines = read_bytes(path).decode(errors="replace").split("\n") if path else []
    if path is None or not 1 <= line <= len(lines) or not lines[line - 1]:
        raise UserError("There is no such recorded game.")
    return lines[line - 1], len([x for x in lines if x])


def began(transcript: dict[str, Any]) -> str:
    """Returns when a person began this game, in UTC to the minute; empty for games without people."""
    return str((transcript.get("about") or {}).get("began", ""))[:16].replace("T", " ")

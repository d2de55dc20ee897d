"""Selects finished runs, and lists them in a published table's `cards.jsonl`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.launch.terminal import say
from experiments.setup.config import plain
from marl.common.errors import UserError, nearest, prefixed
from marl.common.files import parsed_json, read_json, read_text, reading, write_text
from marl.metrics.wording import headline
from marl.report.runs import TRAINED
from marl.storage.folder import CARD, CONFIG, flat, read_settings

CARDS = "cards.jsonl"
OF_MACHINES = ("runs=", "cache=", "cells=", "publish=", "data.dond=", "threads=", "progress=", "hydra.")
KEPT = (  # fields of a run card
    "run", "arm", "seeds", "git_commit", "config_hash", "command", "base", "base_digest", "games", "players",
    "lost_seats",
)  # fmt: skip


def selected(runs: Path, select: Any, where: Any = None) -> list[Path]:
    """Finds the folders of finished runs.

    `select`: a pattern of their names, or a list of several. `where`: settings that they have, as in
    {env.objective: 0} or {seed: [0, 1]}. UserError if a pattern matches none, no run has a setting, or none is left.
    """
    patterns = [select] if isinstance(select, str) else select
    names = isinstance(patterns, Sequence) and all(
        isinstance(p, str) and p and not Path(p).is_absolute() for p in patterns
    )
    if not (names and patterns):
        raise UserError(f"select={select}: must be names of runs' folders in {runs}: a pattern, or a list of several")
    found: set[Path] = set()
    for pattern in patterns:
        with prefixed(f"select={pattern}: ", ValueError):
            cards = runs.glob(f"{pattern}/{CARD}")
            matching = {path.parent for path in cards if (path.parent / CONFIG).is_file()}  # studies have no config
        if not matching:
            raise UserError(f"select={pattern}: no finished run in {runs} has such a name. Look there for names.")
        found |= matching
    return narrowed(sorted(found), where)


def narrowed(folders: Sequence[Path], where: Any) -> list[Path]:
    """Keeps the runs that have these settings. A list holds the values that a setting may have."""
    if where is None:
        return list(folders)
    if not isinstance(where, DictConfig):
        raise UserError(f"where={where}: must be settings of runs by name, as in {{env.objective: 0}}")
    wanted = {name: value for name, value in flat(plain(where)).items() if name}  # {} is {'': {}}
    settings = {folder: flat(read_settings(folder)) for folder in folders}
    for name, value in wanted.items():
        there = [own[name] for own in settings.values() if name in own]
        if not there:
            known = dict.fromkeys(key for own in settings.values() for key in own)
            near = nearest(name, known) or "config.yaml lists them"
            raise UserError(f"where.{name}={value}: no selected run has such a setting; {near}")
        if len(there) < len(settings):
            say(f"where.{name}: {len(settings) - len(there)} runs without such a setting are left out")
        values = [value, *value] if isinstance(value, list) else [value]  # a setting may be a list itself
        settings = {folder: own for folder, own in settings.items() if name in own and own[name] in values}
        if not settings:
            others = ", ".join(dict.fromkeys(map(str, there)))
            raise UserError(f"where.{name}={value}: none of the selected runs has it; theirs: {others}")
    return list(settings)


def write_cards(runs: Iterable[Path], folder: Path) -> None:
    """Adds a line for each run to a published table's `cards.jsonl`: what made it, and its final figures."""
    cards = {run: (read_json(run / CARD), read_settings(run)["env"]["game"]) for run in runs}
    add_cards([card_line(*card) | {"run": run.name} for run, card in cards.items()], folder)


def card_line(card: Mapping[str, Any], game: str = "") -> dict[str, Any]:
    """Shortens a run card to a line: no settings of the machine, and `[mean, low, high]` of the headline figures."""
    words = str(card.get("command", "")).split()
    command = " ".join(without_folder(word) for word in words if not word.startswith(OF_MACHINES))
    base = card.get("base")
    line = {**card, "command": command, "base": Path(str(base)).name if base else None}
    figures = card.get("figures", {}).get(TRAINED, {})
    ends = {name: figures[name] for name in headline(game, figures)}
    rounded = {
        name: [end if end is None else round(end, 4) for end in (each["mean"], each["low"], each["high"])]
        for name, each in ends.items()
    }
    return {name: line[name] for name in KEPT if name in line} | ({"figures": rounded} if rounded else {})


def without_folder(word: str) -> str:
    """`model.name=FOLDER/NAME` -> `model.name=NAME`: where a model lies is of the machine, what it is called is not."""
    name, equals, value = word.partition("=")
    return f"{name}{equals}{Path(value).name}" if name == "model.name" and Path(value).is_absolute() else word


def add_cards(lines: Iterable[Mapping[str, Any]], folder: Path) -> None:
    """Writes lines into `cards.jsonl`, ordered by run. They replace earlier lines of the same name.

    A line's name is FOLDER@COMMIT: the same command at another commit is another result, and both stay.
    """
    path = folder / CARDS
    with reading(path):
        kept = [parsed_json(line) for line in read_text(path).splitlines()] if path.exists() else []
        by_name = {line["run"]: line for line in map(with_commit, [*kept, *lines])}
    write_text(path, "".join(json.dumps(by_name[name]) + "\n" for name in sorted(by_name)))


def with_commit(line: Mapping[str, Any]) -> dict[str, Any]:
    """Names a line of `cards.jsonl` by its run's folder and its commit, or commits: `NAME@COMMIT,COMMIT`."""
    name, commit = line["run"].partition("@")[0], line.get("git_commit")
    return {**line, "run": f"{name}@{commit.replace(' ', '')}" if commit else name}


def in_a_name(value: Any) -> str:
    """Writes a setting's value as part of a file's name: `0.2`, `false`, `1-3`."""
    if isinstance(value, list | tuple):
        return "-".join(map(in_a_name, value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower()

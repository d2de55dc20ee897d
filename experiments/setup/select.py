"""Selects finished runs, and writes their cards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.launch.terminal import say
from experiments.setup.config import plain
from marl.common.errors import UserError, nearest
from marl.common.files import read_json, write_json
from marl.storage.folder import CARD, CONFIG, flat, read_settings


def selected(runs: Path, select: Any, where: Any = None) -> list[Path]:
    """The folders of finished runs whose names match a pattern, or one of several, and whose settings are those of
    `where`, as in {env.objective: 0} or {seed: [0, 1]}. UserError where a pattern matches none, no run has a setting,
    or none is left."""
    patterns = [select] if isinstance(select, str) else select
    names = isinstance(patterns, Sequence) and all(
        isinstance(p, str) and p and not Path(p).is_absolute() for p in patterns
    )
    if not (names and patterns):
        raise UserError(f"select={select}: must be names of runs' folders in {runs}: a pattern, or a list of several")
    found: set[Path] = set()
    for pattern in patterns:
        try:
            cards = runs.glob(f"{pattern}/{CARD}")  # cross-play and others have one, too
            matching = {path.parent for path in cards if (path.parent / CONFIG).is_file()}
        except ValueError as error:
            raise UserError(f"select={pattern}: {error}") from error
        if not matching:
            raise UserError(f"select={pattern}: no finished run in {runs} has such a name")
        found |= matching
    return narrowed(sorted(found), where)


def narrowed(folders: Sequence[Path], where: Any) -> list[Path]:
    """Those of these runs whose settings are so; a list has several values that a setting may have."""
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
    """`run_cards/` of a published table: what made each of its runs, on what."""
    for run in runs:
        write_json(folder / "run_cards" / f"{run.name}.json", public(read_json(run / CARD)))


def in_a_name(value: Any) -> str:
    """A setting's value as part of a file's name: `0.2`, `false`, `1-3`."""
    if isinstance(value, list | tuple):
        return "-".join(map(in_a_name, value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def public(card: dict[str, Any]) -> dict[str, Any]:
    """A run card without what only says where on some machine the run was made."""
    places = ("runs=", "cache=", "cells=", "publish=", "data.dond=", "threads=", "progress=", "hydra.")
    command = " ".join(word for word in str(card.get("command", "")).split() if not word.startswith(places))
    base = card.get("base")
    return {**card, "command": command, "base": Path(str(base)).name if base else None}

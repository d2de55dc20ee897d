"""Cells of a study: each is computed once and kept in a file, and several processes share the work."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig

from experiments.launch.terminal import Bar, say
from experiments.setup.devices import pick_device, set_threads
from marl.agents.model import PlayConfig
from marl.common.errors import check_count, check_writable
from marl.common.files import write_json, writing
from marl.decoding.memory import Slots, check_memory
from marl.storage.folder import open_lock, take_lock

Cell = TypeVar("Cell")
Limits = TypeVar("Limits", bound=PlayConfig)


@dataclass(frozen=True)
class Workspace:
    """A study's device, and the folders of its cells and tables."""

    device: torch.device
    cells: Path
    out: Path
    bar: Bar


def check_play(cfg: DictConfig, least: int = 1) -> None:
    """Refuses numbers that no study can play with; `least`: of games."""
    check_count(cfg.games, "games", least)
    check_count(cfg.concurrency, "concurrency")
    check_count(cfg.seed, "seed", 0)


def begin(cfg: DictConfig) -> Workspace:
    """Takes the device, the threads and the folders that the settings name."""
    device, cells = pick_device(cfg.device), Path(cfg.cells)
    set_threads(cfg.threads)
    out = Path(cfg.publish or cells)
    check_writable(cells, "cells")
    check_writable(out, "publish")
    return Workspace(device, cells, out, Bar(enabled=cfg.progress))


def compute(cells: Mapping[Path, Cell], find: Callable[[Cell, str], Mapping[str, Any] | None]) -> bool:
    """Computes the cells whose files are missing, and writes each at once. Returns True if all files are there.

    `find(cell, number)` returns what the file holds, or None to keep nothing; `number` reads `3/8`. A cell that another
    process computes now is left to it.
    """
    left = [path for path in cells if not path.exists()]
    elsewhere = 0
    for number, path in enumerate(left, start=1):
        with claimed(path) as mine:
            elsewhere += not mine
            if mine and (found := find(cells[path], f"{number}/{len(left)}")) is not None:
                write_json(path, found)
    missing = sum(not path.exists() for path in cells)
    if missing and elsewhere:
        say(f"{missing} cells are being computed by another process, which writes the table when it has them")
    return not missing


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Yields True if this process may write the file: it is missing, and no other process holds its lock."""
    lock = path.with_name(f".{path.stem}.lock")
    while True:
        with writing(lock):
            opened = open_lock(lock)
        with opened as held:
            if not take_lock(held, str(path.parent)):
                yield False
                return
            try:
                is_there = os.path.samestat(os.fstat(held.fileno()), lock.stat())
            except FileNotFoundError:
                is_there = False
            if not is_there:
                continue  # its holder removed the file meanwhile, so that this lock keeps nobody out
            try:
                yield not path.exists()
            finally:
                lock.unlink(missing_ok=True)
            return


def lower_concurrency(limits: Limits, caches: Sequence[Slots], device: torch.device) -> Limits:
    """Lowers `concurrency` to what fits into memory, and says so. UserError if not even one game fits."""
    fit = check_memory(
        caches, 0, concurrency=limits.at_once, setting="concurrency", context=limits.context, device=device
    )
    if fit.concurrency < limits.at_once:
        say(fit.line)
    return replace(limits, concurrency=fit.concurrency)

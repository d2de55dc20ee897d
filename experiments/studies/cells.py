"""Cells of a study: each is computed once and kept in a file, and several processes share the work."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from experiments.launch.terminal import say
from marl.agents.model import PlayConfig
from marl.common.errors import UserError
from marl.common.files import write_json, writing
from marl.decoding.memory import Slots, check_memory
from marl.storage.folder import open_lock

Cell = TypeVar("Cell")
Limits = TypeVar("Limits", bound=PlayConfig)


def compute(cells: Mapping[Path, Cell], find: Callable[[Cell, str], Mapping[str, Any] | None]) -> list[Path]:
    """Computes the cells whose files are missing, and writes each at once. Returns files that are still missing.

    `find(cell, number)` returns what the file holds, or None to keep nothing; `number` reads `3/8`. A cell that another
    process computes now is left to it.
    """
    left = [path for path in cells if not path.exists()]
    for number, path in enumerate(left, start=1):
        with claimed(path) as mine:
            if mine and (found := find(cells[path], f"{number}/{len(left)}")) is not None:
                write_json(path, found)
    return [path for path in cells if not path.exists()]


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Yields True if this process may write the file: it is missing, and no other process holds its lock."""
    lock = path.with_name(f".{path.stem}.lock")
    while True:
        with writing(lock):
            opened = open_lock(lock)
        with opened as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError as error:
                raise UserError(
                    f"{path.parent}: its file system has no locks ({error.strerror}). Name a folder on another one"
                ) from error
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


def with_room(limits: Limits, caches: Sequence[Slots], device: torch.device) -> Limits:
    """Lowers `concurrency` to what fits into memory, and says so. UserError if not even one game fits."""
    fit = check_memory(
        caches, 0, concurrency=limits.at_once, setting="concurrency", context=limits.context, device=device
    )
    if fit.concurrency < limits.at_once:
        say(fit.line)
    return replace(limits, concurrency=fit.concurrency)

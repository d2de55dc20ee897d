"""Csv files whose lines are dataclasses of text and numbers: what a study publishes, and reads again to draw."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from marl.common.errors import UserError
from marl.metrics.tables import read_csv, write_csv

Line = TypeVar("Line")


def write_lines(path: Path, kind: type[Line], lines: Iterable[Line]) -> None:
    """Writes a line for each dataclass, a column for each field."""
    write_csv(path, [field.name for field in fields(kind)], map(astuple, lines))  # type: ignore[arg-type]


def read_lines(path: Path, setting: str, kind: type[Line]) -> list[Line]:
    """The inverse of `write_lines`. UserError, naming the setting, where the file has no such lines."""
    kinds: dict[str, Any] = get_type_hints(kind)
    return read_csv(path, setting, kinds, lambda row: kind(**{name: of(row[name]) for name, of in kinds.items()}))


def check_complete(path: Path, setting: str, metrics: Mapping[str, Collection[str]], needed: Collection[str]) -> None:
    """UserError where one of these places lacks a metric."""
    for where, names in metrics.items():
        if lacking := set(needed) - set(names):
            raise UserError(f"{setting}={path}: has no {min(lacking)} of {where}")

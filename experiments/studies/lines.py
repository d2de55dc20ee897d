"""Csv files that a study publishes, and reads again to tabulate and draw."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from marl.common.errors import UserError
from marl.metrics.stats import Interval
from marl.metrics.tables import interval_of, read_csv, write_csv

ENDS = ("mean", "low", "high")
Keys = Mapping[str, Callable[[str], Any]]  # columns before the interval's, each with what reads it: str, int, float


def write_intervals(
    path: Path, keys: Iterable[str], found: Iterable[tuple[tuple[object, ...], Interval]], count: str = "games"
) -> None:
    """Writes a line for each interval: what tells it apart, then mean, low, high and `count`, what it is over."""
    write_csv(path, (*keys, *ENDS, count), [(*key, i.mean, i.low, i.high, i.n) for key, i in found])


def read_intervals(path: Path, setting: str, keys: Keys) -> list[tuple[Any, ...]]:
    """The inverse: (*keys, interval) of each line. UserError, naming the setting, where the file has no such lines."""
    columns = (*keys, *ENDS, "games")
    return read_csv(
        path, setting, columns, lambda row: (*(of(row[name]) for name, of in keys.items()), interval_of(row))
    )


def check_complete(path: Path, setting: str, metrics: Mapping[str, Collection[str]], needed: Collection[str]) -> None:
    """Raises UserError where one of these places lacks a metric."""
    for where, names in metrics.items():
        if lacking := set(needed) - set(names):
            raise UserError(f"{setting}={path}: has no {min(lacking)} of {where}")

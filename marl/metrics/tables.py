"""Tables of runs: arms over seeds, paired differences and ratios of arms, csv files, text tables."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from marl.common.errors import UserError
from marl.common.files import FAULTS, csv_rows, read_json, reading, whole_file
from marl.metrics.stats import (
    Interval,
    bootstrap_ratio,
    interquartile_mean,
    paired_difference,
    performance_profile,
    seed_mean,
    seeds_and_games,
    wilson,
)
from marl.metrics.wording import bounds

Line = TypeVar("Line")


@dataclass(frozen=True)
class ArmRun:
    """The evaluation of one run: arm, training seed, metrics over games.

    `by_game`: the values of some metrics in each game, if all runs of the comparison met the same games.
    """

    arm: str
    seed: int
    metrics: dict[str, Interval]
    by_game: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class TableRow:
    """One line of `table.csv`."""

    arm: str
    metric: str
    mean: float
    low: float
    high: float
    seeds: int
    games: int

    @property
    def interval(self) -> Interval:
        return Interval(self.mean, self.low, self.high, self.games)


def _row(arm: str, metric: str, found: Interval, seeds: int, games: int) -> TableRow:
    return TableRow(arm, metric, found.mean, found.low, found.high, seeds, games)


# --- Arms over seeds --------------------------------------------------------------------------------------------------
def ablation_table(runs: Sequence[ArmRun], metrics: Sequence[str] | None = None) -> list[TableRow]:
    """One row for each arm and metric, in order of first appearance.

    Several seeds: `seed_mean`, cut to the metric's `bounds`; a share that is the same in all seeds gets Wilson's
    interval over all games. One seed: the run's interval over games. `games` counts those of all seeds. Raises
    ValueError if an arm has a seed twice or a run lacks a wanted metric.
    """
    rows: list[TableRow] = []
    for arm, mine in _by_arm(runs).items():
        seeds = [run.seed for run in mine]
        if len(set(seeds)) < len(seeds):
            raise ValueError(
                f"arm {arm!r} has a seed more than once: {sorted(seeds)}; give each run of an arm its own seed"
            )
        shared = [name for name in mine[0].metrics if all(name in run.metrics for run in mine)]
        for metric in shared if metrics is None else metrics:
            missing = [run.seed for run in mine if metric not in run.metrics]
            if missing:
                raise ValueError(
                    f"metric {metric!r} is missing from arm {arm!r}, seeds {missing}; leave it out or evaluate again"
                )
            found = [run.metrics[metric] for run in mine]
            games = sum(value.n for value in found)
            interval = (seed_mean([v.mean for v in found]) if len(found) > 1 else found[0]).within(*bounds(metric))
            agree = len(found) > 1 and interval.low == interval.high
            if agree and bounds(metric) == (0.0, 1.0):  # agreement of a few seeds is not certainty
                interval = replace(wilson(round(interval.mean * games), games), mean=interval.mean)
            rows.append(_row(arm, metric, interval, len(found), games))
    return rows


def iqm_table(runs: Sequence[ArmRun], metrics: Sequence[str]) -> list[TableRow]:
    """`interquartile_mean` of each arm with several seeds, for each metric that all its runs have."""
    rows: list[TableRow] = []
    for arm, mine in _several_seeds(runs).items():
        for metric in metrics:
            found = [run.metrics[metric] for run in mine if metric in run.metrics]
            if len(found) == len(mine):
                middle = interquartile_mean([value.mean for value in found], rng=_rng())
                rows.append(_row(arm, metric, middle, len(found), sum(value.n for value in found)))
    return rows


def bootstrap_table(runs: Sequence[ArmRun], pairs: Iterable[tuple[str, str]] = ()) -> list[TableRow]:
    """`seeds_and_games` of arms with several seeds, and of the differences of pairs, for metrics known by game.

    A difference is of one game met by both runs of one training seed. Unlike `arm_differences`, the interval also
    says what other games would have shown.
    """
    rows: list[TableRow] = []
    for arm, mine in _several_seeds(runs).items():
        for metric in mine[0].by_game:
            found = [run.by_game[metric] for run in mine if metric in run.by_game]
            if len(found) == len(mine):
                both = seeds_and_games(found, rng=_rng())
                rows.append(_row(arm, metric, both, len(found), sum(map(len, found))))
    for pair in _pairs(runs, pairs, "-"):
        for metric in pair.mine[0].by_game if pair.seeds > 1 else ():
            a, b = ([run.by_game.get(metric, ()) for run in arm] for arm in (pair.mine, pair.theirs))
            if len({len(games) for games in (*a, *b)}) == 1 and len(a[0]):
                both = seeds_and_games(np.asarray(a) - np.asarray(b), rng=_rng())
                rows.append(_row(pair.name, metric, both, pair.seeds, 2 * sum(map(len, a))))
    return rows


@dataclass(frozen=True)
class ProfileRow:
    """One line of `profiles.csv`: the share of an arm's seeds whose mean is at least `threshold`."""

    arm: str
    metric: str
    threshold: float
    share: Interval


def profile_table(runs: Sequence[ArmRun], metrics: Sequence[str]) -> list[ProfileRow]:
    """`performance_profile` of arms with several seeds, at every mean of any of their seeds."""
    rows: list[ProfileRow] = []
    arms = _several_seeds(runs)
    for metric in metrics:
        means = {arm: [run.metrics[metric].mean for run in mine if metric in run.metrics] for arm, mine in arms.items()}
        thresholds = sorted({value for values in means.values() for value in values})
        for arm, values in means.items():
            if len(values) == len(arms[arm]):
                shares = performance_profile(values, thresholds)
                rows += [ProfileRow(arm, metric, *each) for each in zip(thresholds, shares, strict=True)]
    return rows


def _rng() -> np.random.Generator:
    """A fresh generator: the same runs give the same table."""
    return np.random.default_rng(0)


def _by_arm(runs: Sequence[ArmRun]) -> dict[str, list[ArmRun]]:
    arms: dict[str, list[ArmRun]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return arms


def _several_seeds(runs: Sequence[ArmRun]) -> dict[str, list[ArmRun]]:
    return {arm: mine for arm, mine in _by_arm(runs).items() if len(mine) > 1}


# --- Pairs of arms ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Pair:
    """Two arms: their runs of the seeds that both have, in the same order."""

    name: str
    mine: list[ArmRun]
    theirs: list[ArmRun]
    one_seed: bool  # both arms have this one seed and no other

    @property
    def seeds(self) -> int:
        return len(self.mine)

    def means(self, metric: str) -> list[tuple[Interval, Interval]]:
        """The metric of each seed's two runs; empty unless several seeds have it in all runs."""
        both = [(a.metrics, b.metrics) for a, b in zip(self.mine, self.theirs, strict=True)]
        if len(both) < 2 or not all(metric in a and metric in b for a, b in both):
            return []
        return [(a[metric], b[metric]) for a, b in both]

    def games(self, metric: str) -> tuple[Sequence[float], Sequence[float]] | None:
        """The metric of each game of two runs of one seed; None unless both have it in equally many games."""
        if not self.one_seed:
            return None
        a, b = (arm[0].by_game.get(metric, ()) for arm in (self.mine, self.theirs))
        return (a, b) if len(a) == len(b) > 0 else None


def _pairs(runs: Sequence[ArmRun], pairs: Iterable[tuple[str, str]], sign: str) -> Iterator[_Pair]:
    by_seed = {arm: {run.seed: run for run in mine} for arm, mine in _by_arm(runs).items()}
    for arm, reference in pairs:
        mine, theirs = by_seed.get(arm, {}), by_seed.get(reference, {})
        seeds = sorted(mine.keys() & theirs.keys())
        one_seed = mine.keys() == theirs.keys() and len(mine) == 1
        yield _Pair(f"{arm} {sign} {reference}", [mine[s] for s in seeds], [theirs[s] for s in seeds], one_seed)


def arm_differences(runs: Sequence[ArmRun], pairs: Iterable[tuple[str, str]], metrics: Sequence[str]) -> list[TableRow]:
    """First minus second arm of each pair; `arm` of a row reads `FIRST - SECOND`.

    Several seeds: `seed_mean` of the seeds' differences. One and the same seed: paired by game, an interval that says
    nothing of other seeds. Metrics that cannot be paired are left out.
    """
    rows: list[TableRow] = []
    for pair in _pairs(runs, pairs, "-"):
        for metric in metrics:
            if means := pair.means(metric):
                over_seeds = seed_mean([a.mean - b.mean for a, b in means])
                rows.append(_row(pair.name, metric, over_seeds, pair.seeds, sum(a.n + b.n for a, b in means)))
            elif games := pair.games(metric):
                rows.append(_row(pair.name, metric, paired_difference(*games, rng=_rng()), 1, 2 * len(games[0])))
    return rows


def arm_ratios(runs: Sequence[ArmRun], pairs: Iterable[tuple[str, str]], metrics: Sequence[str]) -> list[TableRow]:
    """First arm's figure over the second's, for figures above 0; `arm` of a row reads `FIRST / SECOND`.

    Several seeds: geometric mean of the seeds' ratios, with `seed_mean`'s interval of the logarithms, so that the
    inverse ratio has the inverse interval. One and the same seed: ratio of means, with a bootstrap over games.
    """
    rows: list[TableRow] = []
    for pair in _pairs(runs, pairs, "/"):
        for metric in metrics:
            means = pair.means(metric)
            if means and all(a.mean > 0 and b.mean > 0 for a, b in means):
                log = seed_mean([math.log(a.mean / b.mean) for a, b in means])
                ratio = Interval(math.exp(log.mean), math.exp(log.low), math.exp(log.high), pair.seeds)
                rows.append(_row(pair.name, metric, ratio, pair.seeds, sum(a.n + b.n for a, b in means)))
            elif (games := pair.games(metric)) and sum(games[0]) > 0 and sum(games[1]) > 0:
                rows.append(_row(pair.name, metric, bootstrap_ratio(*games, rng=_rng()), 1, 2 * len(games[0])))
    return rows


# --- Files ------------------------------------------------------------------------------------------------------------
def write_table(path: str | Path, rows: Iterable[TableRow]) -> None:
    """Writes `arm,metric,mean,low,high,seeds,games`, six significant figures. Replaces the file in one step."""
    write_csv(path, [column.name for column in fields(TableRow)], map(astuple, rows))


def write_csv(path: str | Path, header: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    """Replaces the file in one step; real numbers with six significant figures."""
    with whole_file(path, newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for line in lines:
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in line])


def read_csv(
    path: str | Path, setting: str, columns: Iterable[str], make: Callable[[dict[str, str]], Line]
) -> list[Line]:
    """Converts each line of the file that a setting names by `make`. UserError if it has no or other lines."""
    path = Path(path)
    try:
        found = [make(row) for row in csv_rows(path)]
    except UserError as error:
        raise UserError(f"{setting}={error}") from error
    except FAULTS as error:
        raise UserError(f"{setting}={path}: expected the columns {', '.join(columns)} ({error})") from error
    if not found:
        raise UserError(f"{setting}={path}: expected lines of {', '.join(columns)}, and there is none")
    return found


def read_figures(path: str | Path) -> dict[str, Interval]:
    """Reads the `metrics` of a file of a study. UserError if it does not hold them."""
    try:
        return {str(name): Interval.from_json(figure) for name, figure in read_json(path)["metrics"].items()}
    except FAULTS as error:
        raise UserError(
            f"{path} does not hold its figures. Remove it, and the same command measures them again."
        ) from error


def interval_of(row: Mapping[str, str], n: str = "games") -> Interval:
    """Converts a line with the columns mean, low, high, and the one named `n`."""
    return Interval(float(row["mean"]), float(row["low"]), float(row["high"]), int(row[n]))


def read_table(path: str | Path) -> list[TableRow]:
    """The inverse of `write_table`. UserError if the file is something else."""
    with reading(path):
        return [
            _row(row["arm"], row["metric"], interval_of(row), int(row["seeds"]), int(row["games"]))
            for row in csv_rows(path)
        ]


def format_table(rows: Mapping[str, Mapping[str, Interval]], metrics: Sequence[str] | None = None) -> str:
    """A text table: a line for each metric, a column for each condition, `mean [low, high]` in cells.

    `rows` maps condition (`base`, `trained`) to metrics. A missing metric shows a dash.
    """
    names = list(metrics) if metrics is not None else list(dict.fromkeys(name for row in rows.values() for name in row))
    cells = [["", *rows]]
    cells += [[name, *(str(row[name]) if name in row else "–" for row in rows.values())] for name in names]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in cells
    ]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)

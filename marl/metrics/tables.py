"""Tables of runs: arms over seeds, paired differences, csv files."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """The evaluation of one run: its arm in the comparison, its training seed, and its metrics over games.

    `by_game`: of some metrics the value of each game, where all runs of the comparison met in the same games.
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


def ablation_table(runs: Sequence[ArmRun], metrics: Sequence[str] | None = None) -> list[TableRow]:
    """One row for each arm and metric, arms and metrics in the order in which they first appear.

    Across seeds the interval is `seed_mean`'s, cut to what the metric can be (a share to 0 and 1, refused replies to 0;
    see `wording.bounds`), and of a share that is the same in all seeds Wilson's over all games; an arm with a
    single seed keeps its run's interval over games. `games` counts those that the figure rests on, over all seeds.
    Raises ValueError if an arm has the same seed twice, or if a wanted metric is missing from a run: a table has no
    blank cell.
    """
    rows: list[TableRow] = []
    for arm in dict.fromkeys(run.arm for run in runs):
        mine = [run for run in runs if run.arm == arm]
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
            if agree and bounds(metric) == (0.0, 1.0):  # never seen is not impossible, and agreement may be chance
                over = wilson(round(interval.mean * games), games)
                interval = replace(over, mean=interval.mean)
            rows.append(TableRow(arm, metric, interval.mean, interval.low, interval.high, len(found), games))
    return rows


def iqm_table(runs: Sequence[ArmRun], metrics: Sequence[str]) -> list[TableRow]:
    """`interquartile_mean` over seeds for each metric of each arm that has several; `mean` of a row is that mean.

    A metric that one of an arm's runs lacks is left out for that arm. The resampling is the same one every time.
    """
    rows: list[TableRow] = []
    for arm, mine in _several_seeds(runs).items():
        for metric in metrics:
            found = [run.metrics[metric] for run in mine if metric in run.metrics]
            if len(found) == len(mine):
                middle = interquartile_mean([value.mean for value in found], rng=np.random.default_rng(0))
                games = sum(value.n for value in found)
                rows.append(TableRow(arm, metric, middle.mean, middle.low, middle.high, len(found), games))
    return rows


def bootstrap_table(runs: Sequence[ArmRun], pairs: Iterable[tuple[str, str]] = ()) -> list[TableRow]:
    """`seeds_and_games` of each arm that has several seeds, and of the first minus the second arm of each pair, for the
    metrics that are known by game.

    Differences are those of one game, met by both runs of one training seed, as in `arm_differences`, whose interval
    has the spread between seeds alone: this one says what other games would have shown, too. The resampling is the same
    one every time.
    """
    rows: list[TableRow] = []
    for arm, mine in _several_seeds(runs).items():
        for metric in mine[0].by_game:
            found = [run.by_game[metric] for run in mine if metric in run.by_game]
            if len(found) == len(mine):
                both = seeds_and_games(found, rng=np.random.default_rng(0))
                rows.append(TableRow(arm, metric, both.mean, both.low, both.high, len(found), sum(map(len, found))))
    for arm, reference, mine_by_seed, theirs in arm_pairs(runs, pairs):
        seeds = sorted(mine_by_seed.keys() & theirs.keys())
        for metric in mine_by_seed[seeds[0]].by_game if len(seeds) > 1 else ():
            a, b = ([of[seed].by_game.get(metric, ()) for seed in seeds] for of in (mine_by_seed, theirs))
            if len({len(games) for games in (*a, *b)}) == 1 and len(a[0]):
                both = seeds_and_games(np.asarray(a) - np.asarray(b), rng=np.random.default_rng(0))
                games, name = 2 * sum(map(len, a)), f"{arm} - {reference}"
                rows.append(TableRow(name, metric, both.mean, both.low, both.high, len(seeds), games))
    return rows


@dataclass(frozen=True)
class ProfileRow:
    """One line of `profiles.csv`: the share of an arm's seeds whose mean is at least `threshold`."""

    arm: str
    metric: str
    threshold: float
    share: Interval


def profile_table(runs: Sequence[ArmRun], metrics: Sequence[str]) -> list[ProfileRow]:
    """`performance_profile` of each arm that has several seeds, at every mean that any such arm's seed came to."""
    rows: list[ProfileRow] = []
    arms = _several_seeds(runs)
    for metric in metrics:
        means = {arm: [run.metrics[metric].mean for run in mine if metric in run.metrics] for arm, mine in arms.items()}
        thresholds = sorted({value for values in means.values() for value in values})
        for arm, values in means.items():
            if len(values) == len(arms[arm]):
                shares = performance_profile(values, thresholds)
                rows += [ProfileRow(arm, metric, *pair) for pair in zip(thresholds, shares, strict=True)]
    return rows


def _several_seeds(runs: Sequence[ArmRun]) -> dict[str, list[ArmRun]]:
    """The runs of each arm that has more than one."""
    arms: dict[str, list[ArmRun]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return {arm: mine for arm, mine in arms.items() if len(mine) > 1}


def arm_pairs(
    runs: Sequence[ArmRun], pairs: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, str, dict[int, ArmRun], dict[int, ArmRun]]]:
    """Each pair of arms, with the runs of both by training seed."""
    by_arm: dict[str, dict[int, ArmRun]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, {})[run.seed] = run
    for arm, reference in pairs:
        yield arm, reference, by_arm.get(arm, {}), by_arm.get(reference, {})


def arm_differences(runs: Sequence[ArmRun], pairs: Iterable[tuple[str, str]], metrics: Sequence[str]) -> list[TableRow]:
    """First minus second arm of each pair, paired by training seed; `arm` of a row reads `FIRST - SECOND`.

    The interval is `seed_mean`'s, of the seeds' differences. Arms of one and the same seed are paired by game, where
    games are known; that interval says nothing of how training seeds differ. What cannot be paired is left out, and so
    is a metric that a run lacks.
    """
    rows: list[TableRow] = []
    for arm, reference, mine, theirs in arm_pairs(runs, pairs):
        both = [(mine[seed].metrics, theirs[seed].metrics) for seed in sorted(mine.keys() & theirs.keys())]
        for metric in metrics if len(both) > 1 else ():
            if all(metric in a and metric in b for a, b in both):
                interval = seed_mean([a[metric].mean - b[metric].mean for a, b in both])
                games = sum(a[metric].n + b[metric].n for a, b in both)
                name = f"{arm} - {reference}"
                rows.append(TableRow(name, metric, interval.mean, interval.low, interval.high, len(both), games))
        if mine.keys() == theirs.keys() and len(mine) == 1:
            a, b = (next(iter(arm_of.values())).by_game for arm_of in (mine, theirs))
            for metric in metrics:
                if metric in a and metric in b and len(a[metric]) == len(b[metric]):
                    interval = paired_difference(a[metric], b[metric], rng=np.random.default_rng(0))
                    name, games = f"{arm} - {reference}", 2 * len(a[metric])
                    rows.append(TableRow(name, metric, interval.mean, interval.low, interval.high, 1, games))
    return rows


def arm_ratios(runs: Sequence[ArmRun], pairs: Iterable[tuple[str, str]], metrics: Sequence[str]) -> list[TableRow]:
    """How many times the second arm's figure the first arm's is, paired by training seed; `arm`: `FIRST / SECOND`.

    Ratios are means on a logarithmic scale: `mean` is the geometric mean of the seeds' ratios, and the interval that of
    the mean logarithm (`seed_mean`), so that the ratio the other way round is its inverse throughout. Arms of one and
    the same seed are paired by game, where games are known: the ratio of their means, with a bootstrap over games. For
    figures above 0: of a pair with another figure, as what cannot be paired, no line is made.
    """
    rows: list[TableRow] = []
    for arm, reference, mine, theirs in arm_pairs(runs, pairs):
        both = [(mine[seed].metrics, theirs[seed].metrics) for seed in sorted(mine.keys() & theirs.keys())]
        for metric in metrics:
            found = [(a[metric], b[metric]) for a, b in both if metric in a and metric in b]
            if len(found) == len(both) > 1 and all(a.mean > 0 and b.mean > 0 for a, b in found):
                log = seed_mean([math.log(a.mean / b.mean) for a, b in found])
                games = sum(a.n + b.n for a, b in found)
                ends = (math.exp(log.mean), math.exp(log.low), math.exp(log.high))
                rows.append(TableRow(f"{arm} / {reference}", metric, *ends, len(found), games))
            if mine.keys() == theirs.keys() and len(mine) == 1:
                one, other = (next(iter(arm_of.values())).by_game.get(metric, ()) for arm_of in (mine, theirs))
                if len(one) == len(other) and sum(one) > 0 and sum(other) > 0:
                    ratio = bootstrap_ratio(one, other, rng=np.random.default_rng(0))
                    name, games = f"{arm} / {reference}", 2 * len(one)
                    rows.append(TableRow(name, metric, ratio.mean, ratio.low, ratio.high, 1, games))
    return rows


def write_table(path: str | Path, rows: Iterable[TableRow]) -> None:
    """Writes `arm,metric,mean,low,high,seeds,games`, six significant figures. Replaces the file in one step."""
    header = ("arm", "metric", "mean", "low", "high", "seeds", "games")
    write_csv(path, header, [(r.arm, r.metric, r.mean, r.low, r.high, r.seeds, r.games) for r in rows])


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
    """What `make` makes of each line of a file that a setting names. UserError where the file cannot be read, has no
    line, or `make` does not find these columns as they should be."""
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
    """The `metrics` of a file in which a command keeps what it measured. UserError where it does not hold them."""
    try:
        return {str(name): Interval.from_json(figure) for name, figure in read_json(path)["metrics"].items()}
    except FAULTS as error:
        raise UserError(
            f"{path} does not hold its figures: remove it, and the same command finds them again"
        ) from error


def interval_of(row: Mapping[str, str], n: str = "games") -> Interval:
    """Of a line with the columns mean, low, high, and the one named `n`."""
    return Interval(float(row["mean"]), float(row["low"]), float(row["high"]), int(row[n]))


def read_table(path: str | Path) -> list[TableRow]:
    """The inverse of `write_table`. UserError where the file is something else."""
    with reading(path):
        return [
            TableRow(
                row["arm"], row["metric"], float(row["mean"]), float(row["low"]), float(row["high"]),
                int(row["seeds"]), int(row["games"]),
            )
            for row in csv_rows(path)
        ]  # fmt: skip


def format_table(rows: dict[str, dict[str, Interval]], metrics: Sequence[str] | None = None) -> str:
    """A text table for the terminal: a line for each metric, a column for each condition, `mean [low, high]` in cells.

    `rows` maps condition (`base`, `trained`) to metrics. Metrics stand in the order given, or in which they first
    appear; a condition without the metric shows a dash.
    """
    names = list(metrics) if metrics is not None else list(dict.fromkeys(name for row in rows.values() for name in row))
    cells = [[name, *(str(row[name]) if name in row else "–" for row in rows.values())] for name in names]
    cells.insert(0, ["", *rows])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    # Metric names stand at the left; figures are aligned at the right, so that equal formats line up.
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)

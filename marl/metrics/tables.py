"""Tables of runs: arms over seeds, paired differences and ratios of arms, csv files, text tables."""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from marl.common.errors import UserError
from marl.common.files import FAULTS, csv_rows, read_json, reading, reading_kept, whole_file
from marl.metrics.stats import (
    Interval,
    bootstrap_ratio,
    interquartile_mean,
    paired_difference,
    seed_mean,
    seeds_and_games,
    wilson,
)
from marl.metrics.wording import bounds

Line = TypeVar("Line")
ROUNDING = 1e-9  # an interval that is narrower has no width


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

    @classmethod
    def of(cls, arm: str, metric: str, found: Interval, seeds: int = 1, games: int | None = None) -> Self:
        """The line of an interval, over its own `n` games unless they are given."""
        return cls(arm, metric, found.mean, found.low, found.high, seeds, found.n if games is None else games)

    @property
    def interval(self) -> Interval:
        return Interval(self.mean, self.low, self.high, self.games)


# --- Arms over seeds --------------------------------------------------------------------------------------------------
def ablation_table(runs: Sequence[ArmRun], metrics: Sequence[str] | None = None) -> list[TableRow]:
    """One row for each arm and metric, in order of first appearance; intervals are those of `mean_over_seeds`.

    Raises ValueError if an arm has a seed twice or a run lacks a wanted metric.
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
            rows.append(
                TableRow.of(arm, metric, mean_over_seeds(metric, found), len(found), sum(value.n for value in found))
            )
    return rows


def mean_over_seeds(metric: str, seeds: Sequence[Interval]) -> Interval:
    """Mean over seeds, cut to the metric's `bounds`. Of one seed: its own interval, over games.

    Several seeds: `seed_mean`. Where all have the same share of their games: Wilson's interval over all games, unless
    their own intervals say that no game differs (chances that follow from the rules).
    """
    means = [seed.mean for seed in seeds]
    found = (seed_mean(means) if len(means) > 1 else seeds[0]).within(*bounds(metric))
    same = len({*means}) == 1 < len(means) and not all(s.high - s.low <= ROUNDING for s in seeds)
    held = [seed.mean * seed.n for seed in seeds]  # games, if the figure is a share of them
    if same and bounds(metric) == (0.0, 1.0) and all(abs(each - round(each)) < 0.004 for each in held):  # no p-value
        games = sum(seed.n for seed in seeds)  # agreement of a few seeds is not certainty, unless by rule
        return replace(wilson(round(sum(held)), games), mean=means[0])
    return found


def figures_by_arm(rows: Iterable[TableRow]) -> dict[str, dict[str, Interval]]:
    """Figures by arm and metric."""
    found: dict[str, dict[str, Interval]] = {}
    for row in rows:
        found.setdefault(row.arm, {})[row.metric] = row.interval
    return found


def iqm_table(runs: Sequence[ArmRun], metrics: Sequence[str]) -> list[TableRow]:
    """`interquartile_mean` of each arm with several seeds, for each metric that all its runs have."""
    rows: list[TableRow] = []
    for arm, mine in _several_seeds(runs).items():
        for metric in metrics:
            found = [run.metrics[metric] for run in mine if metric in run.metrics]
            if len(found) == len(mine):
                middle = interquartile_mean([value.mean for value in found], rng=_rng())
                rows.append(TableRow.of(arm, metric, middle, len(found), sum(value.n for value in found)))
    return rows


def bootstrap_table(runs: Sequence[ArmRun], pairs: Iterable[tuple[str, str]] = ()) -> list[TableRow]:
    """`seeds_and_games` of arms with several seeds, and of the differences of pairs, for metrics known by game.

    A difference is of one game met by both runs of one training seed.
    """
    rows: list[TableRow] = []
    for arm, mine in _several_seeds(runs).items():
        for metric in mine[0].by_game:
            found = [run.by_game[metric] for run in mine if metric in run.by_game]
            if len(found) == len(mine):
                both = seeds_and_games(found, rng=_rng())
                rows.append(TableRow.of(arm, metric, both, len(found), sum(map(len, found))))
    for name, mine, theirs, _ in _pairs(runs, pairs, "-"):
        for metric in mine[0].by_game if len(mine) > 1 else ():
            a, b = ([run.by_game.get(metric, ()) for run in arm] for arm in (mine, theirs))
            if len({len(games) for games in (*a, *b)}) == 1 and len(a[0]):
                both = seeds_and_games(np.asarray(a) - np.asarray(b), rng=_rng())
                rows.append(TableRow.of(name, metric, both, len(mine), 2 * sum(map(len, a))))
    return rows


def profiles(runs: Sequence[ArmRun], metric: str) -> dict[str, list[tuple[float, float]]]:
    """Performance profiles (Agarwal et al. 2021) of arms with several seeds: at every mean of any of their seeds, the
    share of the arm's seeds whose mean is at least that."""
    arms = _several_seeds(runs)
    means = {arm: [run.metrics[metric].mean for run in mine if metric in run.metrics] for arm, mine in arms.items()}
    thresholds = sorted({value for values in means.values() for value in values})
    return {
        arm: [(least, sum(value >= least for value in values) / len(values)) for least in thresholds]
        for arm, values in means.items()
        if len(values) == len(arms[arm])
    }


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)  # a fresh one: the same runs give the same table


def _by_arm(runs: Sequence[ArmRun]) -> dict[str, list[ArmRun]]:
    arms: dict[str, list[ArmRun]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return arms


def _several_seeds(runs: Sequence[ArmRun]) -> dict[str, list[ArmRun]]:
    return {arm: mine for arm, mine in _by_arm(runs).items() if len(mine) > 1}


# --- Pairs of arms ----------------------------------------------------------------------------------------------------
def _pairs(
    runs: Sequence[ArmRun], pairs: Iterable[tuple[str, str]], sign: str
) -> Iterator[tuple[str, list[ArmRun], list[ArmRun], bool]]:
    """A name for each pair, both arms' runs of the seeds that both have, and True if that is one seed and all."""
    by_seed = {arm: {run.seed: run for run in mine} for arm, mine in _by_arm(runs).items()}
    for arm, reference in pairs:
        mine, theirs = by_seed.get(arm, {}), by_seed.get(reference, {})
        seeds = sorted(mine.keys() & theirs.keys())
        one_seed = mine.keys() == theirs.keys() and len(mine) == 1
        yield f"{arm} {sign} {reference}", [mine[s] for s in seeds], [theirs[s] for s in seeds], one_seed


def _compared(
    runs: Sequence[ArmRun],
    pairs: Iterable[tuple[str, str]],
    metrics: Sequence[str],
    sign: str,
    by_seed: Callable[[list[tuple[float, float]]], Interval | None],
    by_game: Callable[[Sequence[float], Sequence[float]], Interval | None],
) -> list[TableRow]:
    """Compares both arms' means seed by seed, or game by game if both have one and the same seed."""
    rows: list[TableRow] = []
    for name, mine, theirs, one_seed in _pairs(runs, pairs, sign):
        for metric in metrics:
            both = [(a.metrics, b.metrics) for a, b in zip(mine, theirs, strict=True)]
            found, seeds, games = None, len(mine), 0
            if len(both) > 1 and all(metric in a and metric in b for a, b in both):
                found = by_seed([(a[metric].mean, b[metric].mean) for a, b in both])
                games = sum(a[metric].n + b[metric].n for a, b in both)
            elif one_seed:
                a, b = (arm[0].by_game.get(metric, ()) for arm in (mine, theirs))
                found, games = by_game(a, b) if len(a) == len(b) > 0 else None, 2 * len(a)
            if found is not None:
                rows.append(TableRow.of(name, metric, found, seeds, games))
    return rows


def arm_differences(runs: Sequence[ArmRun], pairs: Iterable[tuple[str, str]], metrics: Sequence[str]) -> list[TableRow]:
    """First minus second arm of each pair; `arm` of a row reads `FIRST - SECOND`.

    Several seeds: `seed_mean` of the seeds' differences. One and the same seed: paired by game, an interval that says
    nothing of other seeds. Metrics that cannot be paired are left out.
    """

    def by_seed(means: list[tuple[float, float]]) -> Interval:
        return seed_mean([a - b for a, b in means])

    return _compared(runs, pairs, metrics, "-", by_seed, lambda a, b: paired_difference(a, b, rng=_rng()))


def arm_ratios(runs: Sequence[ArmRun], pairs: Iterable[tuple[str, str]], metrics: Sequence[str]) -> list[TableRow]:
    """First arm's figure over the second's, for figures above 0; `arm` of a row reads `FIRST / SECOND`.

    Several seeds: geometric mean of the seeds' ratios, with `seed_mean`'s interval of the logarithms. One and the same
    seed: ratio of means, with a bootstrap over games.
    """

    def by_seed(means: list[tuple[float, float]]) -> Interval | None:
        if not all(a > 0 and b > 0 for a, b in means):
            return None
        log = seed_mean([math.log(a / b) for a, b in means])
        return Interval(math.exp(log.mean), math.exp(log.low), math.exp(log.high), len(means))

    def by_game(a: Sequence[float], b: Sequence[float]) -> Interval | None:
        return bootstrap_ratio(a, b, rng=_rng()) if sum(a) > 0 and sum(b) > 0 else None

    return _compared(runs, pairs, metrics, "/", by_seed, by_game)


# --- Files ------------------------------------------------------------------------------------------------------------
def write_table(path: str | Path, rows: Iterable[TableRow]) -> None:
    """Writes `arm,metric,mean,low,high,seeds,games`, six significant figures. Replaces the file in one step."""
    write_records(path, TableRow, rows)


def write_records(path: str | Path, kind: type[Any], records: Iterable[Any]) -> None:
    """Writes a line for each record, a column for each field of its dataclass."""
    write_csv(path, [column.name for column in fields(kind)], map(astuple, records))


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


class CurveLine(NamedTuple):
    """A line of `curves.csv.gz`: a run's figures at an iteration, after so many training games."""

    arm: str
    seed: int
    phase: str
    iteration: int
    games: int
    figures: dict[str, float]


CURVE = CurveLine._fields[:-1]  # columns of `curves.csv.gz`; one for each metric follows


def curve_lines(path: str | Path) -> Iterator[CurveLine]:
    """Reads a `curves.csv.gz`."""
    for row in csv_rows(path):
        figures = {name: float(cell) for name, cell in row.items() if name not in CURVE and cell}
        yield CurveLine(row["arm"], int(row["seed"]), row["phase"], int(row["iteration"]), int(row["games"]), figures)


def read_figures(path: str | Path) -> dict[str, Interval]:
    """Reads the `metrics` of a file of a study. UserError if it does not hold them."""
    with reading_kept(path, "its figures"):
        return {str(name): Interval.from_json(figure) for name, figure in read_json(path)["metrics"].items()}


def interval_of(row: Mapping[str, str], n: str = "games") -> Interval:
    """Converts a line with the columns mean, low, high, and the one named `n`."""
    return Interval(float(row["mean"]), float(row["low"]), float(row["high"]), int(row[n]))


def read_table(path: str | Path) -> list[TableRow]:
    """The inverse of `write_table`. UserError if the file is something else."""
    with reading(path):
        return [
            TableRow.of(row["arm"], row["metric"], interval_of(row), int(row["seeds"]), int(row["games"]))
            for row in csv_rows(path)
        ]


def format_table(rows: Mapping[str, Mapping[str, Interval]], metrics: Sequence[str] | None = None) -> str:
    """A text table: a line for each metric, a column for each condition, `mean [low, high]` or a dash in cells."""
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

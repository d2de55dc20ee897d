"""Tables and figure of a study's conditions."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from textwrap import fill

from matplotlib.figure import Figure
from omegaconf import DictConfig

from experiments.launch.terminal import say
from experiments.studies.lines import read_intervals, write_intervals
from marl.metrics.stats import Metrics
from marl.metrics.tables import (
    ArmRun,
    TableRow,
    ablation_table,
    arm_differences,
    format_table,
    read_csv,
    write_csv,
    write_table,
)
from marl.metrics.wording import COMPARISONS, REFERENCES, WORDING
from marl.report.figures import HALF, PERCENT, label_lines, paper_colours, save_figure, style_axes

Point = tuple[str, str]  # arm, condition
PER_SEED = {"arm": str, "seed": int, "condition": str, "metric": str}  # keys of NAME_per_seed.csv.gz


def tabulate(
    cfg: DictConfig, played: Mapping[str, Sequence[ArmRun]], out: Path, published: Mapping[Point, float]
) -> None:
    """Writes NAME.csv.gz, NAME_differences.csv.gz and, of several conditions, NAME.svg; prints the figures."""
    wanted = list(cfg.metrics)
    rows = {condition: ablation_table(runs) for condition, runs in played.items()}
    write_rows(out / f"{cfg.name}.csv.gz", rows)
    if cfg.headline:
        write_table(out / "table.csv", rows[cfg.headline])
    write_rows(out / f"{cfg.name}_differences.csv.gz", differences(played, wanted, cfg.reference))
    if len(played) > 1:
        draw(rows, played, wanted[0], out / f"{cfg.name}.svg", published)
    for metric in reversed(wanted):  # the first one last, where the eye is
        columns: dict[str, Metrics] = {}
        for condition, of_condition in rows.items():
            for row in of_condition:
                if row.metric == metric:
                    columns.setdefault(row.arm, {})[condition] = row.interval
        if columns:
            say(f"\n{metric}: {WORDING[metric].label}")
            say(format_table(columns, list(rows)))
    say(f"\ntables and figure: {out}")


def differences(
    played: Mapping[str, Sequence[ArmRun]], wanted: Sequence[str], reference: str | None = None
) -> dict[str, list[TableRow]]:
    """Each condition minus the `reference`, the first where none is named, of the same arm; and arm minus arm under
    each condition. All paired by seed; none where an arm has one seed."""
    first = reference or next(iter(played))
    found: dict[str, list[TableRow]] = {}
    for condition in (name for name in played if name != first):
        for arm in dict.fromkeys(run.arm for run in played[first]):
            runs = [(name, run) for name in (condition, first) for run in played[name] if run.arm == arm]
            both = [dataclasses.replace(run, arm=name) for name, run in runs]
            for row in arm_differences(both, [(condition, first)], wanted):
                found.setdefault(row.arm, []).append(dataclasses.replace(row, arm=arm))
    arms = dict.fromkeys(run.arm for runs in played.values() for run in runs)
    pairs = [*COMPARISONS, *((arm, usual) for usual in REFERENCES for arm in arms if arm not in (usual, "base"))]
    return found | {name: rows for name, runs in played.items() if (rows := arm_differences(runs, pairs, wanted))}


def write_rows(path: Path, rows: Mapping[str, Sequence[TableRow]]) -> None:
    """Writes `arm,condition,metric,mean,low,high,seeds,games`, with six significant digits as in `table.csv`."""
    lines = [
        (row.arm, condition, row.metric, row.mean, row.low, row.high, row.seeds, row.games)
        for condition, of_condition in rows.items()
        for row in of_condition
    ]
    write_csv(path, ("arm", "condition", "metric", "mean", "low", "high", "seeds", "games"), lines)


def write_played(path: Path, played: Mapping[str, Sequence[ArmRun]]) -> None:
    """Each run's own figures, intervals over its games."""
    found = [
        ((run.arm, run.seed, condition, metric), own)
        for condition, runs in played.items()
        for run in runs
        for metric, own in run.metrics.items()
    ]
    write_intervals(path, PER_SEED, found)


def read_played(path: Path) -> dict[str, list[ArmRun]]:
    """The inverse of `write_played`. UserError where the file is not one."""
    found: dict[str, dict[tuple[str, int], ArmRun]] = {}
    for arm, seed, condition, metric, own in read_intervals(path, "data", PER_SEED):
        run = found.setdefault(condition, {}).setdefault((arm, seed), ArmRun(arm, seed, {}))
        run.metrics[metric] = own
    return {condition: list(runs.values()) for condition, runs in found.items()}


def published_points(path: Path) -> dict[Point, float]:
    """Others' figures by arm and condition. UserError where the file or a line of it is not as it should be."""
    columns = ("arm", "setting", "value", "mean")
    lines = read_csv(
        path, "published", columns, lambda row: ((row["arm"], f"{row['setting']}_{row['value']}"), float(row["mean"]))
    )
    return dict(lines)


def panels(conditions: Sequence[str]) -> dict[str, list[str]]:
    """Conditions that are points of one setting, `players_4` and `players_6`, under its name; all others under none."""
    found: dict[str, list[str]] = {}
    for condition in conditions:
        point = re.fullmatch(r"(.+)_\d\S*", condition)
        found.setdefault(point[1] if point else "", []).append(condition)
    return found


def draw(
    rows: Mapping[str, Sequence[TableRow]],
    played: Mapping[str, Sequence[ArmRun]],
    metric: str,
    path: Path,
    published: Mapping[Point, float],
) -> None:
    """One metric of each arm under each condition, with a line along the points of one setting. Bars are intervals, or
    join two seeds, whose interval would fill the panel. Open markers are the published figures."""
    arms = list(dict.fromkeys(row.arm for of_condition in rows.values() for row in of_condition))
    colours = paper_colours(arms)
    groups, words = panels(list(rows)), WORDING[metric]
    figure = Figure(figsize=(max(HALF, 1.7 * len(groups)), 2.9), layout="constrained")
    widths = [len(group) + 0.5 for group in groups.values()]
    subplots = figure.subplots(1, len(groups), squeeze=False, sharey=True, gridspec_kw={"width_ratios": widths})[0]
    ends: dict[str, float] = {}
    for axes, (name, group) in zip(subplots, groups.items(), strict=True):
        style_axes(axes)
        for i, arm in enumerate(arms):
            colour, places = colours[arm], []
            for place, condition in enumerate(group):
                x = place + 0.4 * ((i + 0.5) / len(arms) - 0.5)
                for row in (row for row in rows[condition] if (row.arm, row.metric) == (arm, metric)):
                    own = [run.metrics[metric].mean for run in played[condition] if run.arm == arm]
                    bar = own if len(own) == 2 else [row.low, row.high]
                    axes.plot([x, x], bar, color=colour, linewidth=2, alpha=0.4)  # nan: no line
                    places.append((x, row.mean))
                if (arm, condition) in published:
                    axes.plot(
                        [x], [published[arm, condition]], color=colour, marker="o", markersize=7, fillstyle="none"
                    )
            if places:
                axes.plot(
                    *zip(*places, strict=True), color=colour, marker="o", markersize=5, linewidth=1.5 * bool(name)
                )
                ends[arm] = places[-1][1]
        labels = [fill(c.removeprefix(f"{name}_").replace("_", " "), max(8, 72 // len(group))) for c in group]
        axes.set_xticks(range(len(group)), labels)
        axes.set_xlim(-0.5, len(group) - 0.5)
        axes.set_title(name.replace("_", " "), fontsize=10, loc="left")
    if words.percent:
        subplots[0].yaxis.set_major_formatter(PERCENT)
    label_lines(subplots[-1], ends, colours)
    open_too = " (open: published)" if published.keys() & set(product(arms, rows)) else ""
    two = "; bars: two seeds" if any(row.seeds == 2 for of_condition in rows.values() for row in of_condition) else ""
    figure.suptitle(words.label + open_too + two, fontsize=11, x=0.01, ha="left")
    save_figure(figure, path)

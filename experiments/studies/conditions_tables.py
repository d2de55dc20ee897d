"""Tables and figure of a study's conditions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
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
from marl.metrics.wording import COMPARISONS, WORDING
from marl.report.figures import PAPER, save_figure

Point = tuple[str, str]  # arm, condition
PER_SEED = {"arm": str, "seed": int, "condition": str, "metric": str}  # keys of NAME_per_seed.csv.gz


def tabulate(
    cfg: DictConfig, played: Mapping[str, Sequence[ArmRun]], out: Path, published: Mapping[Point, float]
) -> None:
    """Writes NAME.csv, NAME_differences.csv.gz and NAME.svg, and prints the figures."""
    wanted = list(cfg.metrics)
    rows = {condition: ablation_table(runs) for condition, runs in played.items()}
    write_rows(out / f"{cfg.name}.csv", rows)
    if cfg.headline:
        write_table(out / "table.csv", rows[cfg.headline])
    write_rows(out / f"{cfg.name}_differences.csv.gz", differences(played, wanted, cfg.reference))
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
    return found | {name: rows for name, runs in played.items() if (rows := arm_differences(runs, COMPARISONS, wanted))}


def write_rows(path: Path, rows: Mapping[str, Sequence[TableRow]]) -> None:
    """`arm,condition,metric,mean,low,high,seeds,games`, six significant digits as in `table.csv`."""
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
    """One metric of each arm under each condition, with intervals, and a tick for each of several seeds; open markers
    are the published figures."""
    arms = list(dict.fromkeys(row.arm for of_condition in rows.values() for row in of_condition))
    groups = panels(list(rows))
    height = 0.9 + 0.13 * (len(arms) + 1) * max(map(len, groups.values()))
    figure = Figure(figsize=(3.2 * len(groups) + 2.2, max(2.4, height)), layout="constrained")
    subplots = figure.subplots(1, len(groups), squeeze=False, sharex=True)[0]
    for axes, (name, group) in zip(subplots, groups.items(), strict=True):
        for (place, condition), (i, arm) in product(enumerate(group), enumerate(arms)):
            y, colour = place + 0.8 * ((i + 0.5) / len(arms) - 0.5), PAPER[i % len(PAPER)]
            for row in (row for row in rows[condition] if (row.arm, row.metric) == (arm, metric)):
                axes.plot([row.low, row.high], [y, y], color=colour, linewidth=2, alpha=0.5)  # nan: no line
                axes.plot([row.mean], [y], color=colour, marker="o", markersize=4.5)
            each = [run.metrics[metric].mean for run in played[condition] if run.arm == arm and metric in run.metrics]
            if len(each) > 1:
                axes.plot(each, [y] * len(each), color=colour, marker="|", markersize=7, linewidth=0)
            if (arm, condition) in published:
                axes.plot([published[arm, condition]], [y], color=colour, marker="o", markersize=6, fillstyle="none")
        axes.set_ylim(len(group) - 0.5, -0.5)
        axes.set_yticks(range(len(group)), [c.removeprefix(f"{name}_").replace("_", " ") for c in group])
        axes.set_yticks([i + 0.5 for i in range(len(group) - 1)], minor=True)
        axes.grid(axis="y", which="minor", color="#dddddd", linewidth=0.7)
        axes.grid(axis="x", color="#eeeeee", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", length=0, labelsize=9)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_title(name, fontsize=10, loc="left")
    open_too = " (open: published)" if published.keys() & set(product(arms, rows)) else ""
    several = any(row.seeds > 1 for of_condition in rows.values() for row in of_condition)
    figure.supxlabel(WORDING[metric].label + open_too + ("; ticks: each seed" if several else ""), fontsize=9)
    marks = [Line2D([], [], color=PAPER[i % len(PAPER)], marker="o", linewidth=0) for i in range(len(arms))]
    figure.legend(marks, arms, loc="outside right upper", frameon=False, fontsize=9)
    save_figure(figure, path)

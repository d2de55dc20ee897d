"""The benchmark's table and figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from marl.report.figures import PAPER, save_figure

COLUMNS = {
    "rollout_tokens_per_second": "rollout, tokens/s",
    "games_per_second": "games/s",
    "update_tokens_per_second": "update, tokens/s",
    "peak_bytes": "memory, MB",
    "mean_stream": "tokens a seat",
}
SPEEDS = ("rollout_tokens_per_second", "update_tokens_per_second")

Data = Mapping[str, Any]  # a row of benchmark.json


def figure_of(row: Data, name: str) -> tuple[float, float, float] | None:
    """Median, lowest and highest of the repeats; None where one lacks the figure."""
    values = [repeat.get(name) for repeat in row["repeats"]]
    return (median(values), min(values), max(values)) if values and None not in values else None


def place(row: Data) -> str:
    """A row's engine and point in words."""
    p = row["point"]
    size = f"{row['parameters'] / 1e6:.3g}M parameters"
    return f"{row['engine']}: {p['games']} games, context {p['context']}, {size}, {p['dtype']}"


def table(rows: Sequence[Data]) -> str:
    """A line for each row: medians, and below the lowest and highest where there are several repeats."""
    lines = [" " * 66 + "".join(f"{label:>20}" for label in COLUMNS.values())]
    for row in rows:
        found = [figure_of(row, name) for name in COLUMNS]
        cells = "".join(f"{shown(name, values):>20}" for name, values in zip(COLUMNS, found, strict=True))
        lines.append(f"{place(row):66}{row['skipped'] or cells}")
    return "\n".join(lines)


def shown(name: str, values: tuple[float, float, float] | None) -> str:
    """A figure with its spread, if it varies."""
    if values is None:
        return "–"
    scale = 1e-6 if name == "peak_bytes" else 1.0
    middle, low, high = (f"{scale * value:,.{1 if name == 'games_per_second' else 0}f}" for value in values)
    return middle if low == high else f"{middle} ({low}–{high})"


def draw(rows: Sequence[Data], path: Path) -> None:
    """Tokens a second of rollouts and updates, a bar for each row that was measured."""
    rows = [row for row in rows if row["repeats"]]
    figure = Figure(figsize=(8.5, 0.8 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(SPEEDS):
        found = [(place, values) for place, row in enumerate(rows) if (values := figure_of(row, name))]
        middles = [middle for _, (middle, _, _) in found]
        spread = [[m - low for _, (m, low, _) in found], [high - m for _, (m, _, high) in found]]
        heights = [place + 0.36 * (number - 0.5) for place, _ in found]
        label = COLUMNS[name].partition(",")[0]
        axes.barh(heights, middles, height=0.34, xerr=spread, color=PAPER[number], label=label)
    axes.set_yticks(range(len(rows)), [place(row) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("tokens a second", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    save_figure(figure, path)

"""The benchmark's table and figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from marl.metrics.stats import Interval
from marl.metrics.tables import format_table
from marl.report.figures import PAPER, save_figure

COLUMNS = {  # by figure of a repeat: heading, and what a figure is divided by there
    "rollout_tokens_per_second": ("rollout, tokens/s", 1.0),
    "games_per_second": ("games/s", 1.0),
    "update_tokens_per_second": ("update, tokens/s", 1.0),
    "decode_share": ("decode, of limit", 1.0),
    "update_share": ("update, of limit", 1.0),
    "peak_bytes": ("memory, MB", 1e6),
    "mean_stream": ("tokens a seat", 1.0),
}
SPEEDS = ("rollout_tokens_per_second", "update_tokens_per_second")

Data = Mapping[str, Any]  # a row of benchmark.json


def figure_of(row: Data, name: str) -> Interval | None:
    """Median, lowest and highest of the repeats as the table has them; None where one lacks the figure."""
    values = [repeat.get(name) for repeat in row["repeats"]]
    if not values or None in values:
        return None
    found = [value / COLUMNS[name][1] for value in values]
    return Interval(median(found), min(found), max(found), len(found))


def place(row: Data) -> str:
    """A row's engine and point in words."""
    p = row["point"]
    size = f"{row['parameters'] / 1e6:.3g}M parameters"
    return f"{row['engine']}: {p['games']} games, context {p['context']}, {size}, {p['dtype']}"


def table(rows: Sequence[Data]) -> str:
    """A line for each row: medians, with the lowest and highest; below it why some were not measured."""
    columns = {
        heading: {place(row): found for row in rows if (found := figure_of(row, name))}
        for name, (heading, _) in COLUMNS.items()
    }
    skipped = [f"{place(row)}: {row['skipped']}" for row in rows if row["skipped"]]
    return "\n".join([format_table(columns, [place(row) for row in rows]), *skipped])


def draw(rows: Sequence[Data], path: Path) -> None:
    """Tokens a second of rollouts and updates, a bar for each row that was measured."""
    rows = [row for row in rows if row["repeats"]]
    figure = Figure(figsize=(8.5, 0.8 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(SPEEDS):
        found = [(at, own) for at, row in enumerate(rows) if (own := figure_of(row, name))]
        middles = [own.mean for _, own in found]
        spread = [[own.mean - own.low for _, own in found], [own.high - own.mean for _, own in found]]
        heights = [at + 0.36 * (number - 0.5) for at, _ in found]
        label = COLUMNS[name][0].partition(",")[0]
        axes.barh(heights, middles, height=0.34, xerr=spread, color=PAPER[number], label=label)
    axes.set_yticks(range(len(rows)), [place(row) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("tokens a second", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    save_figure(figure, path)

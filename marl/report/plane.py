"""The lambda plane as a figure and as text, from a table whose arms are `player population agent`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from marl.metrics.tables import TableRow
from marl.metrics.wording import wording
from marl.report.figures import HALF, heat_map, save_figure

PLANE = "plane.csv"
METRICS = ("score/1v6", "score/1v6/scripted", "likelihood/scripted")

Grid = Mapping[tuple[str, str], float]  # by the lambda that all are believed to use, and that is played with


def grids(rows: Sequence[TableRow]) -> dict[tuple[str, str], Grid]:
    """The means by player and metric. Raises ValueError for a row that is no point's."""
    found: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for row in sorted(rows, key=lambda row: METRICS.index(row.metric)):
        player, population, agent = row.arm.rsplit(" ", 2)
        found.setdefault((player, row.metric), {})[population, agent] = row.mean
    return dict(found)


def plane_figure(rows: Sequence[TableRow], path: Path) -> None:
    """Writes a map for each player (rows) and metric (columns); a metric has the same colours for all players."""
    found = grids(rows)
    players = list(dict.fromkeys(player for player, _ in found))
    figure = Figure(figsize=(1.6 * HALF, 2.7 * len(players) + 0.3), layout="constrained")
    panels = figure.subplots(len(players), len(METRICS), squeeze=False)
    for column, metric in enumerate(METRICS):
        every = [value for (_, own), grid in found.items() if own == metric for value in grid.values()]
        for player, axes in zip(players, panels[:, column], strict=True):
            grid = found[player, metric]
            believed, played = (list(dict.fromkeys(key[i] for key in grid)) for i in (0, 1))
            values = np.array([[grid.get((pop, agent), np.nan) for agent in played] for pop in believed])
            low, high = min(every), max(every) + 1e-9
            heat_map(axes, values, believed, played, low, high, "{:.2f}".format)
            axes.invert_yaxis()  # the least lambda at the bottom
            axes.set_title(f"{player}: {wording(metric).label.lower()}", fontsize=10, loc="left", color="#222222")
            if column == 0:
                axes.set_ylabel("λ believed of all", fontsize=9, color="#555555")
            if player == players[-1]:
                axes.set_xlabel("λ played with", fontsize=9, color="#555555")
    save_figure(figure, path)


def plane_text(rows: Sequence[TableRow]) -> str:
    """The means as text: a line for each lambda that all are believed to use, a column for each that is played with."""
    parts = []
    for (player, metric), grid in grids(rows).items():
        lambdas = [list(dict.fromkeys(key[i] for key in grid)) for i in (0, 1)]
        lines = [f"{player}, {metric}: lambda believed of all (lines) and played with (columns)"]
        lines.append(" " * 8 + "".join(f"{agent:>8}" for agent in lambdas[1]))
        lines += [
            f"{pop:>8}"
            + "".join(f"{grid[pop, agent]:8.3f}" if (pop, agent) in grid else " " * 8 for agent in lambdas[1])
            for pop in lambdas[0]
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)

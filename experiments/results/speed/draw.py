"""Draws ratios.svg from benchmark.json.gz: `python experiments/results/speed/draw.py`.

The measurements are of an earlier engine, whose benchmark had another form than that of `experiments.benchmark`.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from matplotlib.figure import Figure

from marl.report.figures import HALF, PAPER, save_figure, style_axes

HERE = Path(__file__).parent
BARS = {  # label: engine, part of the work
    "generate, every turn anew: rollout": ("generate", "rollout"),
    "TRL: rollout": ("TRL", "rollout"),
    "TRL: rollout and update": ("TRL", "rollout and update"),
    "generate, cache kept: rollout": ("generate, cache kept", "rollout"),
    "TRL: update": ("TRL", "update"),
}


def main() -> None:
    """Draws a bar for each engine: how many times as long as ours it takes, lowest to highest of three repeats."""
    ratios = json.loads(gzip.decompress((HERE / "benchmark.json.gz").read_bytes()))["ratios"]
    found = [ratios[engine][part] for engine, part in BARS.values()]
    middles = [each["median"] for each in found]
    spread = [[each["median"] - each["low"] for each in found], [each["high"] - each["median"] for each in found]]
    figure = Figure(figsize=(HALF, 2.3), layout="constrained")
    axes = figure.subplots()
    style_axes(axes, ink="#222222", muted="#555555", grid="#dddddd")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.7)
    axes.barh(range(len(BARS)), middles, xerr=spread, height=0.55, color=PAPER[1], ecolor="#222222")
    for at, each in enumerate(found):
        axes.annotate(f"{each['median']:.1f}", (each["high"], at), (5, 0), textcoords="offset points", va="center")
    axes.axvline(1, color="#222222", linewidth=0.8)
    axes.set_yticks(range(len(BARS)), list(BARS), fontsize=10)
    axes.invert_yaxis()
    axes.set_xlim(0, 33)
    axes.set_xlabel("times as long as ours (line: as long as ours)", fontsize=10)
    save_figure(figure, HERE / "ratios.svg")


if __name__ == "__main__":
    main()

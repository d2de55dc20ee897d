"""Draws discussion.json, one recorded discussion, as discussion.svg: `python docs/draw_discussion.py`."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
COLOURS = ("#3b6fb6", "#2a9d5c", "#c2571a", "#8a4fb0")


def main() -> None:
    """One row a message: who said what, what it earned, and each listener's belief in the truth after it."""
    game = json.loads((HERE / "discussion.json").read_text(encoding="utf-8"))
    lines = game["lines"]
    listeners = list(lines[0]["belief"])
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "discussion", "font.size": 11})
    figure, (said, moved) = plt.subplots(
        1, 2, figsize=(8, 0.33 * len(lines) + 0.9), width_ratios=(1.9, 1), sharey=True, layout="constrained"
    )
    for row, line in enumerate(lines):
        role = " (imposter)" if line["speaker"] == game["imposter"] else ""
        speaker = f"{line['speaker']}{role}: " if line["speaker"] else ""
        weight = "bold" if line["reward"] >= 0.2 else "normal"
        said.text(0, row, f"{speaker}{line['message']}", va="center", weight=weight)
        if line["speaker"] and line["speaker"] != game["imposter"]:
            earned = f"{line['reward']:+.2f}".replace("0.", ".")
            said.text(1, row, earned, va="center", ha="right", weight=weight)
    said.set_axis_off()
    said.set(xlim=(0, 1.03), ylim=(len(lines) - 0.5, -0.7))
    said.set_title("what was said, and what it earned its speaker", loc="left", fontsize=11)
    for listener, colour in zip(listeners, COLOURS, strict=False):
        path = [(line["belief"][listener], row) for row, line in enumerate(lines) if listener in line["belief"]]
        moved.plot(*zip(*path, strict=True), color=colour, marker="o", markersize=4)
        row, sign = max(product(range(len(lines)), (-1, 1)), key=lambda at: room(lines[at[0]], listener, at[1]))
        at, side = (
            (lines[row]["belief"][listener], row),
            {"xytext": (7 * sign, 0), "ha": "left" if sign > 0 else "right"},
        )
        moved.annotate(listener, at, textcoords="offset points", va="center", color=colour, **side)
    moved.set(xlim=(0, 1), xticks=(0, 0.5, 1), yticks=[])
    moved.set_title(f"belief that it is {game['imposter']} (it is)", loc="left", fontsize=11)
    moved.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(HERE / "discussion.svg", metadata={"Date": None})


def room(line: dict[str, Any], listener: str, sign: int) -> tuple[float, float]:
    """The room for a name beside a listener's belief, right (1) or left (-1) of it; then how far the others are."""
    if listener not in line["belief"]:
        return -1.0, 0.0
    gaps = [sign * (x - line["belief"][listener]) for name, x in line["belief"].items() if name != listener]
    return min([gap for gap in gaps if gap > 0] + [0.4]), min(map(abs, gaps))


if __name__ == "__main__":
    main()

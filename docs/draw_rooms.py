"""Draws which rooms of the code import which: `python docs/draw_rooms.py` writes docs/rooms.svg.

A room is a folder of `envs`, `marl` or `experiments`, or the commands. An arc runs down to a room that is imported.
"""

import ast
from collections import Counter
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("envs", "marl", "experiments")
TOP = ["commands", "studies", "bench", "webapp", "setup", "launch"]  # of experiments, then of marl
MIDDLE = ["api", "report", "algorithms", "intents", "pretraining", "metrics", "storage", "learning", "rollout"]
ORDER = [*TOP, *MIDDLE, "planning", "agents", "losses", "rewards", "decoding", "model", "common", "types", "envs"]


def room(parts: list[str]) -> str:
    """The room of a module: ["marl", "losses", "kl"] is in losses, ["experiments", "train"] is a command."""
    if parts[0] == "marl":
        return parts[1]
    return parts[1] if parts[1] in TOP else "envs" if parts[0] == "envs" else "commands"


def main() -> None:
    lines: Counter[str] = Counter()
    imports: Counter[tuple[str, str]] = Counter()
    for path in (p for package in PACKAGES for p in sorted((ROOT / package).rglob("[!_]*.py"))):
        text, here = path.read_text(encoding="utf-8"), room([*path.relative_to(ROOT).with_suffix("").parts])
        lines[here] += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            module = str(node.module).split(".") if isinstance(node, ast.ImportFrom) else [""]
            for alias in getattr(node, "names", []) if module[0] in PACKAGES else []:
                imports[here, room([*module, alias.name])] += 1

    height = {name: len(ORDER) - i for i, name in enumerate(ORDER)}
    figure = Figure(figsize=(8, 9))
    axes = figure.subplots()
    for name, y in height.items():
        axes.text(0, y, f"{name}  ({lines[name]:,} lines)", ha="right", va="center", fontsize=10)
    for (a, b), count in sorted(imports.items()):
        if a != b:
            y, to, out = height[a], height[b], 0.1 + abs(height[a] - height[b]) / 3
            curve = Curve([(0.1, y), (out, y), (out, to), (0.1, to)], [Curve.MOVETO] + [Curve.CURVE4] * 3)
            color = "crimson" if y < to else "steelblue"
            axes.add_patch(PathPatch(curve, fill=False, lw=0.4 + count / 12, color=color, alpha=0.7))
    axes.set(xlim=(-3.5, 6), ylim=(0, len(ORDER) + 1), title="Who imports whom: every arc runs downward")
    axes.axis("off")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "rooms"}):  # the same bytes each time
        figure.savefig(ROOT / "docs" / "rooms.svg", metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()

"""Turns runs into one self-contained page, and into the folder of a published table.

`python -m experiments.report select='dond_ablation-*'` writes `runs/report.html`; with `publish=experiments/NAME` it
also writes the table, the per-seed and per-iteration data, the figure and the run cards there.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.cli import command
from experiments.evaluate import HEADLINE
from experiments.terminal import say
from marl.checkpoint import write_json
from marl.errors import UserError
from marl.report import Run, ablation_figure, arm_runs, build_report, read_run
from marl.runs import CARD
from marl.stats import ablation_table, arm_differences, format_table, write_table

CURVES = (
    "game/score", "game/points", "game/agreement", "game/pareto", "game/win_rate/crewmates", "belief/accuracy",
    "belief/log_loss", "reward/game", "reward/speaking", "loss/listening", "loss/entropy", "loss/kl", "talk/turns",
    "talk/tokens_per_turn", "errors/per_turn",
)  # fmt: skip


@command("report")
def main(cfg: DictConfig) -> None:
    """Reports on all finished runs whose folder's name matches `select`."""
    folders = sorted(path.parent for path in Path(cfg.runs).glob(f"{cfg.select}/{CARD}"))
    if not folders:
        raise UserError(f"select={cfg.select}: no finished run in {cfg.runs} has such a name")
    runs = [read_run(folder) for folder in folders]
    say(f"{len(runs)} runs")
    out = Path(cfg.out)
    build_report(folders, out, title=cfg.title or str(cfg.select).rstrip("-*"))
    say(f"report: {out}")
    if cfg.publish:
        publish(runs, Path(cfg.publish))
        say(f"table, data and figures: {cfg.publish}")


def publish(runs: Sequence[Run], folder: Path) -> None:
    """Writes a published table's files. The game with the largest objective is the headline, `table.csv`; the others
    have files of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    objectives = sorted({run.config["env"].get("objective", 0.0) for run in runs}, reverse=True)
    for objective in objectives:
        group = [run for run in runs if run.config["env"].get("objective", 0.0) == objective]
        suffix = "" if objective == objectives[0] else f"_objective_{objective:g}"
        arms = arm_runs(group)
        names = [name for name in HEADLINE if all(name in arm.metrics for arm in arms)]
        rows = ablation_table(arms, names)
        write_table(folder / f"table{suffix}.csv", rows)
        write_table(folder / f"per_seed{suffix}.csv", [row for arm in arms for row in ablation_table([arm], names)])
        trained = [arm for arm in arms if not arm.arm.startswith("base")]
        if "game_only" in {arm.arm for arm in trained} and len({arm.seed for arm in trained}) > 1:
            write_table(folder / f"differences{suffix}.csv", arm_differences(trained, "game_only", names))
        shown = [
            name
            for name in ("game/score", "game/agreement", "belief/gain_over_prior", "speech/belief_change")
            if name in names
        ]
        ablation_figure(rows, shown, folder / f"figure{suffix}.svg")
        write_curves(folder / f"curves{suffix}.csv", group)
        say(f"\nobjective {objective:g}")
        by_arm = {
            arm: {row.metric: row for row in rows if row.arm == arm} for arm in dict.fromkeys(r.arm for r in rows)
        }
        say(format_table({arm: {m: r.interval for m, r in found.items()} for arm, found in by_arm.items()}, names))
    cards = folder / "run_cards"
    cards.mkdir(exist_ok=True)
    for run in runs:
        write_json(cards / f"{run.folder.name}.json", public(run.card))


def public(card: dict[str, Any]) -> dict[str, Any]:
    """A run card without what only says where on some machine the run was made."""
    places = ("runs=", "cache=", "data.dond=", "threads=", "progress=", "hydra.")
    command = " ".join(word for word in str(card["command"]).split() if not word.startswith(places))
    base = card.get("base")
    return {**card, "command": command, "base": Path(base).name if base else None}


def write_curves(path: Path, runs: Sequence[Run]) -> None:
    """Per-iteration data: one line for each arm, seed, phase, iteration and metric."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("arm", "seed", "phase", "iteration", "metric", "value"))
        for run in runs:
            for line in run.curves:
                for metric in CURVES:
                    if metric in line:
                        writer.writerow(
                            (run.arm, run.seed, line["phase"], line["iteration"], metric, f"{line[metric]:.5g}")
                        )


if __name__ == "__main__":
    main()

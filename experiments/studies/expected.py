"""Bands of what healthy runs of the shipped experiments look like.

    python -m experiments.studies.expected name=dond_long curves=experiments/results/dond_long/curves.csv.gz
    python -m experiments.studies.expected name=among_us_ablation select='among_us_ablation-*'

records bands in `experiments/results/expected/NAME.csv.gz` (arm,metric,iteration,low,high), from a published table's
curves or from finished runs. Training runs of that name and arm are compared with them: a hint for a person, never an
error.

A band is the mean over the seeds at an iteration, and to either side `margin` times sqrt(1 + 1/seeds) (a further seed
is compared, not their mean) times the seeds' standard deviation, pooled over the whole curve. The seeds that made a
band are inside it whatever the margin.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.setup.bands import FOLDER, METRICS, NEVER_NEGATIVE, Band, Expected, bands_of, label, read_bands
from experiments.setup.config import plain
from experiments.setup.select import selected
from marl.common.errors import UserError, check_writable, prefixed
from marl.common.files import reading
from marl.metrics.tables import curve_lines, write_records
from marl.report.page import read_run
from marl.report.runs import variant_of

Curves = dict[tuple[str, str], dict[int, dict[int, float]]]  # arm and metric -> seed -> iteration -> value


@command("expected")
def main(cfg: DictConfig) -> None:
    """Records the bands of an experiment's arms; arms of its file that are not recorded anew stay as they are."""
    # Check.
    settings = plain(cfg)
    margin = settings["margin"]
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not margin > 0:
        raise UserError(f"margin={margin}: must be a number above 0")
    if not re.fullmatch(r"[\w.+-]+", str(cfg.name)):
        raise UserError(f"name={cfg.name}: must be the name of an experiment, as in sweep=NAME")
    if (cfg.curves is None) == (cfg.select is None):
        raise UserError("curves and select: give one of them, a csv file or the names of finished runs")

    # Read.
    if cfg.curves is not None:
        curves = read_curves(Path(cfg.curves), settings["settings"] or {})
    elif cfg.settings is not None:
        raise UserError("settings: only curves need them; those of the runs that select finds are known")
    else:
        curves = curves_of_runs(selected(Path(cfg.runs), cfg.select, cfg.where))

    # Write.
    bands = make_bands(curves, margin)
    folder = Path(cfg.out) if cfg.out else FOLDER
    check_writable(folder, "out")
    path, arms = folder / f"{cfg.name}.csv.gz", list(dict.fromkeys(band.arm for band in bands))
    kept = [band for band in read_bands(path) if band.arm not in arms] if path.exists() else []
    write_records(path, Band, [*kept, *bands])
    seeds = sorted({len(of_seed) for of_seed in curves.values()})
    say(f"{path}: {', '.join(arms)}, from {' or '.join(map(str, seeds))} seeds each")
    if trials := leave_one_out(curves, margin):
        outside = Counter(metric for left in trials.values() for metric, _ in left)
        inside = sum(not left for left in trials.values())
        which = "".join(f", {count} x {metric} outside" for metric, count in outside.most_common())
        say(f"made of the other seeds, the bands hold {inside} of {len(trials)} runs everywhere{which}")


def read_curves(path: Path, settings: Mapping[str, Any]) -> Curves:
    """The training curves of a published table. UserError if it is no such file."""
    with prefixed("curves="), reading(path):
        lines = [line for line in curve_lines(path) if line.phase == "train"]
    return in_order((label(line.arm, settings), line.seed, line.iteration, line.figures) for line in lines)


def curves_of_runs(folders: Sequence[Path]) -> Curves:
    """The training curves of finished runs."""
    runs = [read_run(folder) for folder in folders]
    return in_order(
        (arm, run.seed, row["iteration"], row)
        for run in runs
        for arm in [label(run.arm, variant_of(run, runs))]
        for row in run.curves
        if row["phase"] == "train"
    )


def in_order(lines: Iterable[tuple[str, int, int, Mapping[str, float]]]) -> Curves:
    """The curves of METRICS from lines of arm, seed, iteration and figures."""
    curves: Curves = {}
    for arm, seed, iteration, figures in lines:
        for metric in METRICS:
            if metric in figures:
                curves.setdefault((arm, metric), {}).setdefault(seed, {})[iteration] = figures[metric]
    return curves


def make_bands(curves: Curves, margin: float) -> list[Band]:
    """A band for each arm, metric and iteration that all of the arm's seeds have.

    UserError where there are no curves, or an arm has a single seed, which says nothing of another one.
    """
    bands: list[Band] = []
    for (arm, metric), of_seed in curves.items():
        if metric == "game/score" and (arm, "game/win_rate/crewmates") in curves:
            continue  # what the players are paid says little beside who wins
        if len(of_seed) < 2:
            raise UserError(f"arm {arm} has one seed, {next(iter(of_seed))}: a band takes two or more. Train another.")
        iterations = sorted(set.intersection(*(set(curve) for curve in of_seed.values())))
        if not iterations:
            raise UserError(f"arm {arm}: its seeds have no iteration with {metric} in common. Train them equally long.")
        values = np.array([[curve[i] for i in iterations] for curve in of_seed.values()])  # (seeds, iterations)
        spread = np.sqrt(values.var(axis=0, ddof=1).mean())
        half = margin * spread * np.sqrt(1 + 1 / len(values))
        low = np.minimum(values.mean(axis=0) - half, values.min(axis=0))
        high = np.maximum(values.mean(axis=0) + half, values.max(axis=0))
        if metric in NEVER_NEGATIVE:
            low = low.clip(min=0)
        ends = zip(iterations, low.tolist(), high.tolist(), strict=True)
        bands += [Band(arm, metric, iteration, *pair) for iteration, *pair in ends]
    if not bands:
        raise UserError(f"there is no training curve of {', '.join(METRICS)} to record. Name runs that have one.")
    return bands


def leave_one_out(curves: Curves, margin: float) -> dict[tuple[str, int], list[tuple[str, int]]]:
    """Finds, by arm and seed, the metrics and iterations outside the bands of the arm's other seeds. What
    only two seeds have is left out: one of them makes no band."""
    found: dict[tuple[str, int], list[tuple[str, int]]] = {}
    spare = {key: of_seed for key, of_seed in curves.items() if len(of_seed) > 2}
    for (arm, metric), of_seed in spare.items():
        for seed, curve in of_seed.items():
            others = {key: {s: c for s, c in own.items() if s != seed} for key, own in spare.items() if key[0] == arm}
            bands = Expected(Path(), arm, bands_of(arm, make_bands(others, margin)))
            outside = [(metric, at) for at, value in sorted(curve.items()) if bands.outside(at, {metric: value})]
            found.setdefault((arm, seed), []).extend(outside)
    return found


if __name__ == "__main__":
    main()

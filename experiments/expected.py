"""What healthy runs of the shipped experiments look like, and whether a run looks like one.

    python -m experiments.expected name=dond_long curves=experiments/dond_long/curves.csv
    python -m experiments.expected name=among_us_ablation select='among_us_ablation-*'

records bands in `experiments/expected/NAME.csv` (arm,metric,iteration,low,high), from a published table's curves or
from finished runs. Training runs of that name and arm are compared with them: a line where they leave their band, and
one at the end. That is a hint for a person and never an error: a run with other settings may well be elsewhere, and
those of its command line are named.

A band is the mean over the seeds at an iteration, and to either side `margin` times sqrt(1 + 1/seeds) times the seeds'
standard deviation, pooled over the whole curve, because that of three seeds at one iteration may be next to nothing by
chance. sqrt(1 + 1/seeds) is because a further seed is what is to be compared, not their mean. The seeds that made a
band are inside it whatever the margin. What the bands cannot know: seeds of one base say nothing of how bases differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from experiments.cli import command
from experiments.report import in_a_name, selected
from experiments.terminal import say
from marl.config import plain
from marl.errors import UserError, check_writable
from marl.files import FAULTS, csv_rows
from marl.report import read_run, variant_of
from marl.runs import ELSEWHERE
from marl.stats import write_csv
from marl.wording import arm_name, number

FOLDER = Path(__file__).parent / "expected"
HEADER = ("arm", "metric", "iteration", "low", "high")
# Few, because each further one is another chance to leave a band by luck: does it win, understand, explore, err?
METRICS = ("game/score", "game/win_rate/crewmates", "belief/log_loss", "loss/entropy", "errors/per_turn")
# What a command line may set of a shipped experiment without changing how it learns.
KEEPS = (*ELSEWHERE, "ablation", "arm", "base.seed", "device", "eval", "experiment", "name", "seed", "seeds", "sweep")
NEVER_NEGATIVE = ("game/win_rate/crewmates", "belief/log_loss", "errors/per_turn")

Curves = dict[tuple[str, str], dict[int, dict[int, float]]]  # arm and metric -> seed -> iteration -> value


@dataclass(frozen=True)
class Band:
    """One line of a file of bands."""

    arm: str  # with the game's settings where the experiment has variants: `full objective=0`
    metric: str
    iteration: int
    low: float
    high: float


@command("expected")
def main(cfg: DictConfig) -> None:
    """Records the bands of an experiment's arms; arms of its file that are not recorded anew stay as they are."""
    settings = plain(cfg)
    margin = settings["margin"]
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not margin > 0:
        raise UserError(f"margin={margin}: must be a number above 0")
    if not re.fullmatch(r"[\w.+-]+", str(cfg.name)):
        raise UserError(f"name={cfg.name}: must be the name of an experiment, as in sweep=NAME")
    if (cfg.curves is None) == (cfg.select is None):
        raise UserError("curves and select: give one of them, a csv file or the names of finished runs")
    if cfg.curves is not None:
        curves = read_curves(Path(cfg.curves), settings["settings"] or {})
    elif cfg.settings is not None:
        raise UserError("settings: only curves need them; those of the runs that select finds are known")
    else:
        curves = curves_of_runs(selected(Path(cfg.runs), cfg.select, cfg.where))
    bands = make_bands(curves, margin)
    folder = Path(cfg.out) if cfg.out else FOLDER
    check_writable(folder, "out")
    path, arms = folder / f"{cfg.name}.csv", list(dict.fromkeys(band.arm for band in bands))
    kept = [band for band in read_bands(path) if band.arm not in arms] if path.exists() else []
    write_csv(path, HEADER, [(b.arm, b.metric, b.iteration, b.low, b.high) for b in [*kept, *bands]])
    seeds = sorted({len(of_seed) for of_seed in curves.values()})
    say(f"{path}: {', '.join(arms)}, from {' or '.join(map(str, seeds))} seeds each")
    if trials := leave_one_out(curves, margin):
        outside = Counter(metric for left in trials.values() for metric, _ in left)
        inside = sum(not left for left in trials.values())
        which = "".join(f", {count} x {metric} outside" for metric, count in outside.most_common())
        say(f"made of the other seeds, the bands hold {inside} of {len(trials)} runs everywhere{which}")
    blind = [arm for arm in arms if Expected(path, arm, bands_of(arm, bands)).blind]
    if blind:
        say(f"a run that learns nothing would be inside the bands of {', '.join(blind)}")


# --- Recording --------------------------------------------------------------------------------------------------------


def label(arm: str, settings: Mapping[str, Any]) -> str:
    """An arm's name in a file of bands: `full`, or `full objective=0` where the experiment has variants."""
    return " ".join([arm, *(f"{key}={in_a_name(value)}" for key, value in settings.items())])


def read_curves(path: Path, settings: Mapping[str, Any]) -> Curves:
    """The training curves of a published table. UserError if it is no such file."""
    curves: Curves = {}
    try:
        for row in csv_rows(path):
            if row["phase"] == "train" and row["metric"] in METRICS:
                of_seed = curves.setdefault((label(row["arm"], settings), row["metric"]), {})
                of_seed.setdefault(int(row["seed"]), {})[int(row["iteration"])] = float(row["value"])
    except UserError as error:
        raise UserError(f"curves={error}") from error
    except FAULTS as error:
        raise UserError(f"curves={path}: expected the curves.csv of a published table ({error})") from error
    return curves


def curves_of_runs(folders: Sequence[Path]) -> Curves:
    """The training curves of finished runs."""
    runs = [read_run(folder) for folder in folders]
    curves: Curves = {}
    for run in runs:
        name = label(run.arm, variant_of(run, runs))
        for row in run.curves:
            for metric in METRICS:
                if row["phase"] == "train" and metric in row:
                    curves.setdefault((name, metric), {}).setdefault(run.seed, {})[row["iteration"]] = row[metric]
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
            raise UserError(f"arm {arm} has one seed, {next(iter(of_seed))}: a band takes two or more")
        iterations = sorted(set.intersection(*(set(curve) for curve in of_seed.values())))
        if not iterations:
            raise UserError(f"arm {arm}: its seeds have no iteration with {metric} in common")
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
        raise UserError(f"there is nothing to record: no training curve of {', '.join(METRICS)}")
    return bands


def leave_one_out(curves: Curves, margin: float) -> dict[tuple[str, int], list[tuple[str, int]]]:
    """How bands do on healthy runs that did not make them: for each arm and seed, the metrics and iterations where it
    is outside the bands of the arm's other seeds. What only two seeds have is left out: one of them makes no band."""
    found: dict[tuple[str, int], list[tuple[str, int]]] = {}
    spare = {key: of_seed for key, of_seed in curves.items() if len(of_seed) > 2}
    for arm in dict.fromkeys(arm for arm, _ in spare):
        of_arm = {key: of_seed for key, of_seed in spare.items() if key[0] == arm}
        for seed in sorted(set().union(*of_arm.values())):
            others = {key: {s: c for s, c in of_seed.items() if s != seed} for key, of_seed in of_arm.items()}
            bands = Expected(Path(), arm, bands_of(arm, make_bands(others, margin)))
            own: dict[int, dict[str, float]] = {}
            for (_, metric), of_seed in of_arm.items():
                for iteration, value in of_seed.get(seed, {}).items():
                    own.setdefault(iteration, {})[metric] = value
            found[arm, seed] = [(m, at) for at, values in sorted(own.items()) for m in bands.outside(at, values)]
    return found


def read_bands(path: Path) -> list[Band]:
    """UserError if the file cannot be read or is malformed."""
    try:
        return [
            Band(row["arm"], row["metric"], int(row["iteration"]), float(row["low"]), float(row["high"]))
            for row in csv_rows(path)
        ]
    except UserError:
        raise
    except FAULTS as error:
        raise UserError(f"{path}: expected the columns {','.join(HEADER)} with numbers ({error})") from error


# --- Comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """The bands of one arm: (metric, iteration) -> (low, high)."""

    source: Path
    arm: str
    bands: Mapping[tuple[str, int], tuple[float, float]]
    changed: Sequence[str] = ()  # what the run's command line set beside the experiment

    def outside(self, iteration: int, found: Mapping[str, float]) -> dict[str, str]:
        """The metrics that are outside their band at this iteration, each with its value and the band in words."""
        said = {}
        for metric in METRICS:
            band = self.bands.get((metric, iteration))
            if band and metric in found and not _within(band[0], found[metric], band[1]):
                said[metric] = f"{metric} {number(found[metric])} (healthy: {number(band[0])} to {number(band[1])})"
        return said

    def warning(self, iteration: int, found: Mapping[str, float]) -> str:
        """One line on an iteration that is outside; empty where it is not."""
        said = self.outside(iteration, found)
        return f"iteration {iteration} is not as expected: {', '.join(said.values())}" if said else ""

    @property
    def blind(self) -> bool:
        """Whether a run that stays where healthy ones begin would be inside everywhere."""
        for metric in dict.fromkeys(metric for metric, _ in self.bands):
            own = {at: band for (name, at), band in self.bands.items() if name == metric}
            half = max(high - low for low, high in own.values()) / 2  # some begin at 0, where nothing is below
            start = own[min(own)][1] - half
            if not all(_within(low, start, high) for low, high in own.values()):
                return False
        return True

    def verdict(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """One line on a whole run, from the lines of its `metrics.jsonl`; empty where there is nothing to compare."""
        known = {iteration for _, iteration in self.bands}
        trained = [row for row in rows if row["phase"] == "train" and row["iteration"] in known]
        left = [(row["iteration"], metric) for row in trained for metric in self.outside(row["iteration"], row)]
        where = f"what {self.source.name} has for healthy runs of {self.arm}"
        if not trained:
            return ""
        if not left:
            so_is = "; so would a run be that learns nothing" if self.blind else ""
            though = f", though with {', '.join(self.changed)} on the command line" if self.changed else ""
            return f"as expected: inside {where} at all of {len(trained)} iterations{though}{so_is}"
        each = {
            metric: ", ".join(str(at) for at, name in left if name == metric)
            for metric in dict.fromkeys(metric for _, metric in left)
        }
        return (
            f"not as expected: outside {where} at {len({at for at, _ in left})} of {len(trained)} iterations "
            f"({'; '.join(f'{metric} at {at}' for metric, at in each.items())}); "
            f"{', '.join(self.changed) or 'other settings'} may be why"
        )


def _within(low: float, value: float, high: float) -> bool:
    """low <= value <= high, with room for the rounding of published curves, which have five figures."""
    room = 1e-5 * abs(value)
    return low - room <= value <= high + room


def expected_of(
    name: str, arm: str, env: Mapping[str, Any], folder: Path | None = None, overrides: Iterable[str] = ()
) -> Expected | None:
    """What is expected of a run of this name, arm and game; None where nothing is. `overrides`: what its command line
    sets.

    A file that cannot be read is told of, and nothing is expected: a hint must not stop a run.
    """
    path = (folder or FOLDER) / f"{name}.csv"
    if not path.is_file():
        return None
    try:
        bands = read_bands(path)
    except UserError as error:
        say(f"{error}; so the run is not compared with it")
        return None
    arm = arm_name(arm, env["game"])
    for recorded in dict.fromkeys(band.arm for band in bands):
        settings = re.findall(r" (\w+)=\S+", recorded)
        if all(key in env for key in settings) and recorded == label(arm, {key: env[key] for key in settings}):
            keeps = (*KEEPS, *(f"env.{key}" for key in settings))
            changed = [each for each in overrides if not (each.startswith("env=") or _sets(each, keeps))]
            return Expected(path, recorded, bands_of(recorded, bands), changed)
    say(f"{path.name} says nothing of what healthy runs of {arm} look like")
    return None


def _sets(override: str, settings: Iterable[str]) -> bool:
    """Whether an override is of one of these settings, or of something in one."""
    set_ = override.lstrip("+~").partition("=")[0]
    return any(set_ == each or set_.startswith(f"{each}.") for each in settings)


def bands_of(arm: str, bands: Iterable[Band]) -> dict[tuple[str, int], tuple[float, float]]:
    return {(band.metric, band.iteration): (band.low, band.high) for band in bands if band.arm == arm}


if __name__ == "__main__":
    main()

"""Bands: what healthy runs of a shipped experiment look like."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from experiments.launch.terminal import say
from experiments.setup.select import in_a_name
from marl.common.errors import UserError
from marl.common.files import FAULTS, csv_rows
from marl.common.secrets import told
from marl.metrics.wording import arm_name, number
from marl.storage.folder import ELSEWHERE

FOLDER = Path(__file__).parents[1] / "results" / "expected"
HEADER = ("arm", "metric", "iteration", "low", "high")

# Few, because each further one is another chance to leave a band by luck: does it win, understand, explore, err?
METRICS = ("game/score", "game/win_rate/crewmates", "belief/log_loss", "loss/entropy", "errors/per_turn")

# What a command line may set of a shipped experiment without changing how it learns.
KEEPS = (*ELSEWHERE, "ablation", "arm", "base.seed", "device", "eval", "experiment", "name", "seed", "seeds", "sweep")
NEVER_NEGATIVE = ("game/win_rate/crewmates", "belief/log_loss", "errors/per_turn")


@dataclass(frozen=True)
class Band:
    """One line of a file of bands."""

    arm: str  # with the game's settings where the experiment has variants: `full objective=0`
    metric: str
    iteration: int
    low: float
    high: float


# --- Recording --------------------------------------------------------------------------------------------------------
def label(arm: str, settings: Mapping[str, Any]) -> str:
    """An arm's name in a file of bands: `full`, or `full objective=0` where the experiment has variants."""
    return " ".join([arm, *(f"{key}={in_a_name(value)}" for key, value in settings.items())])


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
            if band and metric in found and not within_tolerance(band[0], found[metric], band[1]):
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
            if not all(within_tolerance(low, start, high) for low, high in own.values()):
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


def within_tolerance(low: float, value: float, high: float) -> bool:
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
    path = (folder or FOLDER) / f"{name}.csv.gz"
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


def set_beside() -> list[str]:
    """The overrides of the job that runs, but for choices of its sweep's own file; none where Hydra runs no job."""
    if not HydraConfig.initialized():
        return []
    hydra = HydraConfig.get()
    params = {name: str(values).split(",") for name, values in (hydra.sweeper.get("params") or {}).items()}
    given = [(each, *each.lstrip("+").partition("=")[::2]) for each in hydra.overrides.task]
    return [told([each]) for each, name, value in given if value not in params.get(name, ())]


def _sets(override: str, settings: Iterable[str]) -> bool:
    """Whether an override is of one of these settings, or of something in one."""
    set_ = override.lstrip("+~").partition("=")[0]
    return any(set_ == each or set_.startswith(f"{each}.") for each in settings)


def bands_of(arm: str, bands: Iterable[Band]) -> dict[tuple[str, int], tuple[float, float]]:
    return {(band.metric, band.iteration): (band.low, band.high) for band in bands if band.arm == arm}

"""Bands: what healthy runs of a shipped experiment look like, `experiments/results/expected/NAME.csv.gz`."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.launch.terminal import say
from experiments.setup.select import in_a_name
from marl.common.errors import UserError
from marl.common.files import csv_rows, reading
from marl.metrics.wording import arm_name, number

FOLDER = Path(__file__).parents[1] / "results" / "expected"

# Few, because each further one is another chance to leave a band by luck: does it win, understand, explore, err?
METRICS = ("game/score", "game/win_rate/crewmates", "belief/log_loss", "loss/entropy", "errors/per_turn")
NEVER_NEGATIVE = ("game/win_rate/crewmates", "belief/log_loss", "errors/per_turn")


@dataclass(frozen=True)
class Band:
    """One line of a file of bands. `arm`: with the game's settings where the experiment has variants."""

    arm: str
    metric: str
    iteration: int
    low: float
    high: float


def label(arm: str, settings: Mapping[str, Any]) -> str:
    """Names an arm in a file of bands: `full`, or `full objective=0` where the experiment has variants."""
    return " ".join([arm, *(f"{key}={in_a_name(value)}" for key, value in settings.items())])


def read_bands(path: Path) -> list[Band]:
    """Reads a file of bands. UserError if it cannot be read or is malformed."""
    with reading(path):
        return [
            Band(row["arm"], row["metric"], int(row["iteration"]), float(row["low"]), float(row["high"]))
            for row in csv_rows(path)
        ]


@dataclass(frozen=True)
class Expected:
    """The bands of one arm: (metric, iteration) -> (low, high)."""

    source: Path
    arm: str
    bands: Mapping[tuple[str, int], tuple[float, float]]

    def outside(self, iteration: int, found: Mapping[str, float]) -> dict[str, str]:
        """Returns the metrics that are outside their band at this iteration, each with value and band in words."""
        said = {}
        for metric in METRICS:
            if (metric, iteration) not in self.bands or metric not in found:
                continue
            (low, high), value = self.bands[metric, iteration], found[metric]
            room = 1e-5 * abs(value)  # of the rounding of published curves, which have five figures
            if not low - room <= value <= high + room:
                said[metric] = f"{metric} {number(value)} (healthy: {number(low)} to {number(high)})"
        return said

    def warning(self, iteration: int, found: Mapping[str, float]) -> str:
        """Says in a line what is outside at an iteration; empty where nothing is."""
        said = self.outside(iteration, found)
        return f"iteration {iteration} is not as expected: {', '.join(said.values())}" if said else ""

    def verdict(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Judges a whole run in a line, from its `metrics.jsonl`; empty where there is nothing to compare."""
        known = {iteration for _, iteration in self.bands}
        trained = [row for row in rows if row["phase"] == "train" and row["iteration"] in known]
        left = [(row["iteration"], metric) for row in trained for metric in self.outside(row["iteration"], row)]
        where = f"what {self.source.name} has for healthy runs of {self.arm}"
        if not trained:
            return ""
        if not left:
            return f"as expected: inside {where} at all of {len(trained)} iterations"
        each = [
            f"{metric} at {', '.join(str(at) for at, name in left if name == metric)}"
            for metric in dict.fromkeys(metric for _, metric in left)
        ]
        return (
            f"not as expected: outside {where} at {len({at for at, _ in left})} of {len(trained)} iterations "
            f"({'; '.join(each)})"
        )


def expected_of(name: str, arm: str, env: Mapping[str, Any], folder: Path | None = None) -> Expected | None:
    """Finds what is expected of a run of this name, arm and game; None where nothing is recorded.

    Says so where the file cannot be read, and expects nothing: a hint must not stop a run.
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
            return Expected(path, recorded, bands_of(recorded, bands))
    say(f"{path.name} says nothing of what healthy runs of {arm} look like")
    return None


def bands_of(arm: str, bands: Iterable[Band]) -> dict[tuple[str, int], tuple[float, float]]:
    """Returns an arm's bands by metric and iteration."""
    return {(band.metric, band.iteration): (band.low, band.high) for band in bands if band.arm == arm}

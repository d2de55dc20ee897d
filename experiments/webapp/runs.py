"""Runs for the page: a table with their state and headline, and curves that grow while a run trains."""

import math
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from marl.common.errors import UserError
from marl.metrics.wording import PANELS, headline, wording
from marl.report.runs import TRAINED
from marl.storage.folder import CARD, CONFIG, read_run_card, read_settings
from marl.storage.tracking import METRICS_FILE, read_metrics

QUIET = 600.0  # seconds without a new line after which an unfinished run counts as stopped
WIDTH, HEIGHT = 260, 110  # of a curve


@dataclass(frozen=True)
class Row:
    """A run in the table."""

    name: str
    game: str
    arm: str
    seed: str
    state: str  # finished, training, stopped, or new
    iterations: str
    headline: tuple[tuple[str, str], ...]
    report: bool


def folders(runs: Path) -> list[Path]:
    """Folders of runs, the newest first."""
    found = [path.parent for path in runs.glob(f"*/{CONFIG}")] if runs.is_dir() else []
    return sorted(found, key=lambda folder: -_changed(folder))


def _changed(folder: Path) -> float:
    return max(
        (p.stat().st_mtime for name in (CARD, METRICS_FILE, CONFIG) if (p := folder / name).exists()), default=0.0
    )


def row_of(folder: Path) -> Row:
    """A run's line. A damaged run says so in its state."""
    try:
        config = settings_of(folder)
        card, lines = read_run_card(folder), read_metrics(folder / METRICS_FILE)
        game = str(config["env"].get("game", ""))
        done, wanted = max((line["iteration"] for line in lines), default=0), config["algo"].get("iterations", "?")
        tracked = _figures(lines)
        figures = _final(card) or tracked
        names = [name for name in headline(game, tracked or figures) if name in figures][:3]  # as while training
        shown = tuple((wording(name).label, f"{figures[name]:.3g}") for name in names)
        quiet = time.time() - _changed(folder) > QUIET
        state = "finished" if card else "new" if not lines and not quiet else "stopped" if quiet else "training"
    except (UserError, OSError, KeyError, TypeError, AttributeError) as error:
        return Row(folder.name, "", "", "", f"damaged: {error}", "", (), False)
    arm, seed = str(config.get("arm", "")), str(config.get("seed", ""))
    return Row(folder.name, game, arm, seed, state, f"{done} of {wanted}", shown, (folder / "report.html").is_file())


def settings_of(folder: Path) -> dict[str, Any]:
    """A run's settings, read again once they have changed. UserError or OSError without them."""
    return _settings(folder, (folder / CONFIG).stat().st_mtime_ns)


@lru_cache(maxsize=4096)
def _settings(folder: Path, changed: int) -> dict[str, Any]:
    return read_settings(folder)


def _final(card: dict[str, Any] | None) -> dict[str, float]:
    """The metrics of a finished run's last evaluation; empty before it."""
    found = ((card or {}).get("figures") or {}).get(TRAINED) or {}
    return {name: float(interval["mean"]) for name, interval in found.items()}


def _figures(lines: list[dict[str, Any]]) -> dict[str, float]:
    """The last value of each metric, those of evaluation before those of training."""
    found: dict[str, float] = {}
    for phase in ("train", "eval"):
        for line in lines:
            if line["phase"] == phase:
                found |= {k: v for k, v in line.items() if isinstance(v, float | int) and k != "iteration"}
    return found


def find_run(runs: Path, name: str) -> Path:
    """The folder of a run of this name. UserError if there is none."""
    for folder in folders(runs):
        if folder.name == name:
            return folder
    raise UserError("There is no run of this name.")


def curves(folder: Path) -> list[dict[str, Any]]:
    """A panel for each known metric of the run: its lines as points of an SVG, and the last values."""
    lines = read_metrics(folder / METRICS_FILE)
    panels = []
    for panel in PANELS:
        series = {}
        for phase in ("train", "eval"):
            values = [(line["iteration"], line.get(panel.metric)) for line in lines if line["phase"] == phase]
            points = [(i, panel.sign * y) for i, y in values if isinstance(y, int | float) and math.isfinite(y)]
            if points:
                series[phase] = points
        if series:
            panels.append({"title": panel.title, "unit": panel.unit, "metric": panel.metric, **_drawn(series)})
    return panels


def _drawn(series: dict[str, list[tuple[int, float]]]) -> dict[str, Any]:
    every = [point for points in series.values() for point in points]
    (x0, x1), (y0, y1) = ((min(v), max(v)) for v in zip(*every, strict=True))
    across, up = (x1 - x0) or 1, (y1 - y0) or 1.0

    def place(point: tuple[int, float]) -> str:
        return (
            f"{4 + (WIDTH - 8) * (point[0] - x0) / across:.1f},{HEIGHT - 4 - (HEIGHT - 8) * (point[1] - y0) / up:.1f}"
        )

    return {
        "low": f"{y0:.3g}",
        "high": f"{y1:.3g}",
        "first": x0,
        "last": x1,
        "lines": {phase: " ".join(map(place, points)) for phase, points in series.items()},
        "dots": [place(point).split(",") for point in series.get("eval", [])],
        "now": {phase: f"{points[-1][1]:.3g}" for phase, points in series.items()},
    }

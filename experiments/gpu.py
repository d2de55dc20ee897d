"""The first minutes on a GPU: `make gpu`, or `python -m experiments.gpu`.

Checks that the card computes what the trainer assumes, measures speed point by point and beside the baselines, then
lets a pretrained model learn. It stops after `minutes`, and the same command goes on with what is missing, on another
machine too if `out` was carried there. Checks and speeds are repeated on every other card or commit. What was not run
is listed as unrun.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from experiments.bench.checks import CHECKS, Unrun
from experiments.bench.measure import GENERATE, OURS, TRL, repeat_line
from experiments.bench.settings import Point
from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.setup.config import make, plain
from experiments.setup.devices import pick_device, set_deterministic
from marl.common.errors import UserError, check_writable
from marl.common.files import read_json, write_json
from marl.storage.folder import git_commit, hardware

OK, FAILED, CUT, UNRUN = "ok", "failed", "cut off", "unrun"
BASELINES, LEARNING = "speed: baselines", "learning"
GRACE = 20  # seconds that a stage has to save its state once it is stopped


@command("gpu")
def main(cfg: DictConfig) -> None:
    """Runs each stage that is not done yet, in order, until the time is over."""
    # Configure and check.
    given = plain(cfg)
    for name in ("minutes", "learning_minutes"):
        if not isinstance(given[name], int | float) or given[name] < 0:
            raise UserError(f"{name}={given[name]}: must be a number of minutes")
    wanted = list(CHECKS) if given["checks"] is None else [str(name) for name in given["checks"]]
    if unknown := [name for name in wanted if name not in CHECKS]:
        raise UserError(f"checks={unknown}: must be among {', '.join(CHECKS)}")
    points = [make(Point, point, "points") for point in given["points"]]
    device, out = pick_device(cfg.device), Path(given["out"])
    check_writable(out, "out")
    set_deterministic(False)  # before cuBLAS starts, so that a check may turn it on
    began = time.monotonic()

    def left(kept: float = 0.0) -> float:
        return 60 * (given["minutes"] - kept) - (time.monotonic() - began)

    # Run, and write after each stage.
    earlier = read(out / "gpu.json", machine())
    checks = [f"check: {name}" for name in wanted]
    baselines = [BASELINES] if points and given["baseline_games"] else []
    names = (*checks, *map(speed, points), *baselines, LEARNING)
    stages = {name: earlier.pop(name, {"state": UNRUN, "said": ""}) for name in names} | earlier
    for name in checks:
        if stages[name]["state"] != OK:
            note(out, stages, name, checked(name.removeprefix("check: "), device))
    if any(stages[name]["state"] == FAILED for name in checks):
        say("A check failed, so that speeds and learning would mean nothing: they stay unrun.")
    else:
        measure(given, points, stages, out, lambda: left(given["learning_minutes"]))
        if stages[LEARNING]["state"] != OK and left() > 0:
            overrides = [*map(str, given["learning"]), f"device={given['device']}"]
            overrides += [f"model.name={given['weights']}"] if given["weights"] else []
            overrides += [f"runs={out / 'runs'}", "checkpoint.every=1", "progress=false"]
            note(out, stages, LEARNING, timed(["experiments.train", *overrides], left()))

    # Report.
    width = max(map(len, stages))
    for name, found in stages.items():
        say(f"{name:{width}}  {found['state']:8}{found['said']}")
    say(f"written: {out / 'gpu.json'}. The same command goes on with what is unrun or cut off.")


def machine() -> dict[str, Any]:
    """Returns what a figure depends on: card, versions and commit."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {"hardware": hardware(), "versions": versions, "git_commit": git_commit()}


def read(path: Path, here: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns stages by name as an earlier call left them. Checks and speeds count on the same machine alone."""
    if not path.exists():
        return {}
    stages: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return {n: s for n, s in stages.items() if n == LEARNING or s.get("machine") == dict(here)}


def note(out: Path, stages: dict[str, dict[str, Any]], name: str, found: Mapping[str, Any]) -> None:
    stages[name] = {**found, "machine": machine()}
    say(f"{name}: {found['state']}  {found['said']}")
    write_json(out / "gpu.json", stages)


def checked(name: str, device: torch.device) -> dict[str, Any]:
    """One check's state, figure and seconds."""
    began = time.monotonic()
    try:
        said, holds = CHECKS[name](device)
        state = OK if holds else FAILED
    except Unrun as reason:
        said, state = str(reason), UNRUN
    except Exception as error:  # whatever fails on a card is a result, and the other checks go on
        said, state = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0], FAILED
    return {"state": state, "said": said, "seconds": time.monotonic() - began}


def measure(
    given: Mapping[str, Any], points: Sequence[Point], stages: dict[str, dict[str, Any]], out: Path,
    left: Callable[[], float],
) -> None:  # fmt: skip
    """Measures the points that lack figures, then the baselines. Points that were tried before come last.

    One process measures many points, since its start takes as long as a small one. If it fails, that counts for the
    point that it was at, and another process goes on with the next.
    """
    folder = out / "speed" / re.sub(r"\W+", "_", f"{hardware()['gpu'] or 'cpu'} {git_commit()}")
    todo = [point for point in points if stages[speed(point)]["state"] != OK]
    todo.sort(key=lambda point: (stages[speed(point)]["state"] == FAILED, stages[speed(point)]["said"] != ""))
    if todo and left() > 0:
        say(f"speeds are written to {folder / 'benchmark.json'}, one after another")
    while todo and left() > 0:
        ended = timed(benchmark(given, todo, folder), left())
        found = {point: outcome(folder, [(OURS, point)]) for point in todo}
        for point, measured in found.items():
            if measured:
                note(out, stages, speed(point), measured)
        todo = [point for point, measured in found.items() if not measured]
        if todo:
            note(out, stages, speed(todo.pop(0)), ended)
        if ended["state"] != FAILED:
            break
    if BASELINES in stages and stages[BASELINES]["state"] != OK and left() > 0:
        beside = replace(points[0], games=given["baseline_games"], dtype="float32")
        ended = timed(benchmark(given, [beside], folder, baselines=True), left())
        rows = [(engine, beside) for engine in (OURS, GENERATE, TRL)]
        note(out, stages, BASELINES, outcome(folder, rows) or ended)


def speed(point: Point) -> str:
    """The name of a point's stage."""
    return f"speed: {point}"


def outcome(folder: Path, wanted: Sequence[tuple[str, Point]]) -> dict[str, Any] | None:
    """Returns a stage's state from what the benchmark wrote into its folder; None if a row has not been measured."""
    if not (folder / "benchmark.json").exists():
        return None
    every = {(row["engine"], Point(**row["point"])): row for row in read_json(folder / "benchmark.json")["rows"]}
    rows = [every.get(each) for each in wanted]
    done = [row for row in rows if row and (row["repeats"] or row["skipped"])]
    if len(done) < len(rows):
        return None
    said = [f"{row['engine']}: {repeat_line(row['repeats'][0]) if row['repeats'] else row['skipped']}" for row in done]
    state = OK if all(row["repeats"] for row in done) else UNRUN
    return {"state": state, "said": "; ".join(said), "rows": done}


def benchmark(given: Mapping[str, Any], points: Sequence[Point], out: Path, baselines: bool = False) -> list[str]:
    """The command that measures these points, or the first one beside the baselines."""
    shapes = [", ".join(f"{k}: {value}" for k, value in vars(point).items() if value is not None) for point in points]
    names = ("decode_steps", "update_rows", "update_tokens", "baseline_rows", "random_games")
    return ["experiments.benchmark", "bench=gpu", f"points=[{', '.join(f'{{{shape}}}' for shape in shapes)}]",
            f"baseline_games={given['baseline_games'] if baselines else 0}", "repeats=1", f"device={given['device']}",
            f"out={out}", *(f"{name}={given[name]}" for name in names)]  # fmt: skip


def timed(module_and_overrides: Sequence[str], seconds: float) -> dict[str, Any]:
    """Runs a module of this project for so long at most; it is interrupted, so that it can save its state."""
    module, *overrides = module_and_overrides
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", module, *overrides], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        cut = False
        try:
            printed, _ = process.communicate(timeout=max(seconds, 1.0))
        except subprocess.TimeoutExpired:
            cut = True
            process.send_signal(signal.SIGINT)
            try:
                printed, _ = process.communicate(timeout=GRACE)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                printed, _ = process.communicate()
    lines = [line for line in printed.splitlines() if line.strip()]
    state = CUT if cut else OK if process.returncode == 0 else FAILED
    said = lines[-1].strip() if lines else ""
    return {"state": state, "said": said, "seconds": time.monotonic() - began, "printed": lines[-60:]}


if __name__ == "__main__":
    main()

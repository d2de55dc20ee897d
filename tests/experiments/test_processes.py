"""torchrun: several processes make one run, which is the run of one process up to rounding."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from safetensors.torch import load_file

from experiments import train

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "env=among_us", "name=small", "progress=false", "threads=1", "base.games=20", "base.rows=16",
    "base.lessons=[{players:random,steps:1}]", "model.hidden_size=32", "model.layers=1", "model.intermediate_size=64",
    "algo.iterations=2", "algo.games=6", "algo.concurrency=4", "algo.max_new_tokens=8", "loss.imitation.weight=0.1",
    "algo.update={learning_rate: 1e-3, optimizer: sgd, rows: null, epochs: 1, minibatches: 2}", "eval.games=5",
    "eval.every=2", "eval.final_games=4", "checkpoint.every=1", "env.max_steps=60", "env.tasks=2", "env.cooldown=3",
]  # fmt: skip
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def settings(folder: Path, *overrides: str) -> list[str]:
    return [*SMALL, f"runs={folder / 'runs'}", f"cache={folder.parent / 'bases'}", *overrides]


def train_alone(folder: Path) -> None:
    """In this process."""
    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose("train", overrides=settings(folder))
    train.main(cfg)


def start_two(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, *TWO, "-m", "experiments.train", *settings(folder, *overrides)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=300)
    return process.returncode, out


def run_folder(folder: Path) -> Path:
    (found,) = (folder / "runs").glob("small-*")
    return found


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_folder(folder) / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(one: Path, other: Path, tolerance: float) -> None:
    ours, theirs = (load_file(run_folder(f) / "policy" / "model.safetensors") for f in (one, other))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < tolerance
    for a, b in zip(rows(one), rows(other), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == (b[name] if isinstance(a[name], str) else pytest.approx(b[name], abs=1e-3)), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes") / "alone"
    train_alone(folder)
    return folder


def test_two_processes_make_the_run_of_one(alone: Path) -> None:
    both = alone.parent / "both"
    code, out = finish(start_two(both))
    assert code == 0, out
    assert_same_run(alone, both, 1e-4)
    assert json.loads((run_folder(both) / "run.json").read_text())["processes"] == 2
    assert out.count("2 processes") == 1 and out.count("  1/2 ") == 1  # one of them speaks


def test_a_killed_process_takes_the_run_down_and_one_goes_on(alone: Path) -> None:
    """Two processes with half the parameters each, which make their base, and then one that has them whole."""
    cut = alone.parent / "cut"
    process = start_two(cut, "shard=true", f"cache={cut / 'bases'}")
    deadline = time.monotonic() + 240
    while not list(cut.glob("runs/small-*/checkpoints/iteration-000001/state.json")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    code, out = finish(process)
    assert code != 0 and "Signal 9" in out and not (run_folder(cut) / "run.json").exists()
    train_alone(cut)
    assert_same_run(alone, cut, 1e-4)

"""torchrun: several processes make one run, which is the run of one process up to rounding.

All of these are slow; that updates are the same is also among the fast tests, in tests/marl (ranks, sharding).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from experiments import learning, train
from marl.storage.checkpoint import read_card
from marl.storage.folder import claim
from tests.composing import configure
from tests.composing import run_folder as configured_folder
from tests.torture import TALKING

ROOT = Path(__file__).resolve().parents[3]
SMALL = (
    "name=small", "progress=false", "threads=1", "base.games=20", "base.rows=16", "model.hidden_size=32",
    "model.layers=1", "model.intermediate_size=64", "algo.iterations=2", "algo.games=6", "algo.concurrency=4",
    "algo.max_new_tokens=8",
    "algo.update={learning_rate: 3e-2, optimizer: sgd, rows: null, epochs: 1, minibatches: 2}", "eval.games=5",
    "eval.every=2", "eval.final_games=4", "checkpoint.every=1",
)  # fmt: skip
AMONG_US = (
    "env=among_us", "base.lessons=[{players:random,steps:1}]", "env.max_steps=40", "env.tasks=2", "env.cooldown=3"
)  # fmt: skip
EVERY_TERM = (*AMONG_US, "loss.imitation.weight=0.1")
OTHERS = {
    "two learners": (*AMONG_US, "cast.imposter.player=rival", "algo.alternate=1"),
    "filtered_bc": (*TALKING, "algo=filtered_bc", "algo.keep=all"),
    "pikl": (*TALKING, "algo=pikl", "algo.planner.iterations=5"),
}
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def settings(folder: Path, *overrides: str, bases: Path | None = None) -> list[str]:
    return [*SMALL, *overrides, f"runs={folder / 'runs'}", f"cache={bases or folder.parent / 'bases'}"]


def train_alone(folder: Path, *overrides: str) -> None:
    """Trains in this process."""
    train.main(configure("train", *settings(folder, *overrides)))


def start_two(folder: Path, *overrides: str, bases: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, *TWO, "-m", "experiments.train", *settings(folder, *overrides, bases=bases)]
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


def assert_same_run(one: Path, other: Path) -> None:
    """Asserts that parameters differ by less than a hundredth of how far they moved, after the first update and at the
    end."""
    base = load_file(Path(read_card(run_folder(one) / "policy")["base"]) / "model.safetensors")
    for place, prefix in (("checkpoints/iteration-000001/learner", "lm."), ("policy/model", "")):
        ours, theirs = (load_file(run_folder(f) / f"{place}.safetensors") for f in (one, other))
        moved = max(float((ours[prefix + name] - tensor).abs().max()) for name, tensor in base.items())
        apart = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
        assert moved > 1e-3 and apart < 0.01 * moved, (place, apart, moved)
    for a, b in zip(rows(one), rows(other), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == (b[name] if isinstance(a[name], str) else pytest.approx(b[name], abs=1e-3)), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes") / "alone"
    train_alone(folder, *EVERY_TERM)
    return folder


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(alone: Path) -> None:
    both = alone.parent / "both"
    code, out = finish(start_two(both, *EVERY_TERM))
    assert code == 0, out
    assert_same_run(alone, both)
    assert json.loads((run_folder(both) / "run.json").read_text())["processes"] == 2
    assert out.count("2 processes") == 1 and out.count("  1/2 ") == 1  # one of them speaks


@pytest.mark.slow
def test_a_killed_process_takes_the_run_down_and_one_goes_on(alone: Path) -> None:
    """Two processes with half the parameters each make their base and train. After one is killed, a single process with
    all parameters ends the run."""
    cut = alone.parent / "cut"
    process = start_two(cut, *EVERY_TERM, "shard=true", bases=cut / "bases")
    deadline = time.monotonic() + 240
    while not list(cut.glob("runs/small-*/checkpoints/iteration-000001/state.json")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    code, out = finish(process)
    assert code != 0 and "Signal 9" in out and not (run_folder(cut) / "run.json").exists()
    train_alone(cut, *EVERY_TERM)
    assert_same_run(alone, cut)


@pytest.mark.slow
def test_what_one_process_refuses_is_said_first(tmp_path: Path) -> None:
    folder = configured_folder(configure("train", *settings(tmp_path)))
    with claim(folder, "a: 1\n"):
        code, out = finish(start_two(tmp_path))
    said, _, torchruns_own = out.partition("Traceback")
    assert code != 0 and "is being written by another process" in said and "marl/common/distributed.py" not in out, out
    assert "[0]:" in torchruns_own.partition("Root Cause")[2], out


@pytest.mark.slow
@pytest.mark.parametrize("learns", OTHERS)
def test_two_processes_go_on_where_one_stopped(learns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_alone(whole, *OTHERS[learns])
    save = learning.save_training

    def stopping(folder: Path, iteration: int, *rest: object) -> None:
        save(folder, iteration, *rest)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(learning, "save_training", stopping)
        with pytest.raises(KeyboardInterrupt):
            train_alone(cut, *OTHERS[learns])
    code, out = finish(start_two(cut, *OTHERS[learns]))
    assert code == 0 and "continuing after iteration 1" in out and "begun with processes=1, here 2" in out, out
    assert_same_run(whole, cut)

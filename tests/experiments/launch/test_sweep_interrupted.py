"""The sweep of the Among Us ablation, killed twice and started again, publishes the table of one that nobody killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.torture import AMONG_US, SMALL

ROOT = Path(__file__).resolve().parents[3]
SWEEP = (
    "sweep=among_us_ablation", "ablation=full,game_only", "seed=12,13", *AMONG_US, *SMALL, "algo.iterations=2",
    "algo.games=6", "eval.games=2", "eval.final_games=6",
)  # fmt: skip


def start(folder: Path, command: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"experiments.{command}", f"runs={folder / 'runs'}", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, out
    return out


def kill_where(folder: Path, pattern: str) -> None:
    """Starts the sweep, and kills it with all its children once a file of this name is among its runs."""
    process = start(folder, "train", *SWEEP)
    deadline = time.monotonic() + 1800
    while not list((folder / "runs").glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def table_of(said: str) -> list[str]:
    """Returns the last table that a sweep prints, without the line that names its report."""
    return said[said.index("\n4 runs\n") :].splitlines()[:-1]


def published(folder: Path) -> dict[str, bytes]:
    """The files of the published table."""
    to = folder / "table"
    finish(start(folder, "report", "select=among_us_ablation-*", f"publish={to}"))
    found = {str(path.relative_to(to)): path.read_bytes() for path in to.rglob("*") if path.is_file()}
    return found


@pytest.mark.slow
def test_a_sweep_that_is_killed_twice_gives_the_same_table(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    undisturbed = finish(start(whole, "train", *SWEEP))

    kill_where(killed, "among_us_ablation-full-s12-*/checkpoints/iteration-000001/state.json")  # the first of four
    assert not list(killed.glob("runs/*/run.json"))
    kill_where(killed, "among_us_ablation-game_only-s12-*/checkpoints/iteration-000001/state.json")  # the third
    assert len(list(killed.glob("runs/*/run.json"))) == 2
    last = finish(start(killed, "train", *SWEEP))
    assert last.count(" is done: ") == 2 and last.count("continuing after iteration 1") == 1
    assert table_of(last) == table_of(undisturbed)

    ours, theirs = published(killed), published(whole)
    assert {"table.csv", "differences.csv.gz", "per_seed.csv.gz", "curves.csv.gz", "figure.svg"} <= ours.keys()
    assert len(ours["cards.jsonl"].splitlines()) == 4
    assert [name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)] == []

"""A run whose disk fills up, whose files lie in the future, whose metrics lose lines, or whose folder is read-only."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from experiments import train
from experiments.launch.overrides import one_line
from marl.common.errors import UserError
from tests.composing import run_folder
from tests.torture import configure, contents

ROOT = Path(__file__).resolve().parents[2]
TINY = ("base.games=24", "base.rows=16", "algo.iterations=2", "algo.games=4", "eval.games=2", "eval.final_games=4")


def attempt(cfg: DictConfig, room: int | None = None, prepare: Callable[[], object] = lambda: None) -> tuple[int, str]:
    """Trains in a process of its own, in which no file may become longer than `room` bytes; its status and words.
    `prepare` is called there before it begins."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:  # the child never returns to the caller's code
            os.dup2(writing, 1)
            sys.stdout = os.fdopen(1, "w", buffering=1)
            if room is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
            prepare()
            train.main(cfg)
            status = 0
        except UserError as error:
            print(one_line(error), flush=True)
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as out:
        said = out.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def into_the_future(folder: Path) -> None:
    """As if the clock had been set back since the files were written."""
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (4_000_000_000, 4_000_000_000))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disk") / "whole"
    status, said = attempt(configure("ppo", folder, *TINY))
    assert status == 0, said
    return folder


def test_a_run_goes_on_as_its_disk_gets_room(whole: Path, tmp_path: Path) -> None:
    cfg = configure("ppo", tmp_path, *TINY)
    shutil.copytree(whole / "bases", tmp_path / "bases", ignore=shutil.ignore_patterns("evaluations"))
    there: dict[str, int] = {}
    refused = []
    for room in (0, 4_000, 16_000):
        status, said = attempt(cfg, room)
        assert status == 1 and "Traceback" not in said, said
        (line,) = [line for line in said.splitlines() if "cannot be written (File too large): make room there" in line]
        refused.append(Path(line.partition(" cannot be written")[0]).name)
        found = {str(p): p.stat().st_size for p in sorted(tmp_path.rglob("*")) if p.is_file()}
        assert not [name for name in found if name.endswith(".new")]
        assert all(name in found for name in there if "checkpoints" not in name), (there, found)
        there = found
        into_the_future(tmp_path)
    assert refused == [
        "config.yaml",
        "iteration-000000.jsonl",
        "iteration-000001",
    ]  # of the configuration, games, weights
    status, said = attempt(cfg)
    assert status == 0, said
    assert contents(tmp_path) == contents(whole)


def test_lines_that_metrics_lost_are_told_of(whole: Path, tmp_path: Path) -> None:
    cfg = configure("ppo", tmp_path, *TINY)
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    folder = run_folder(cfg)
    (folder / "run.json").unlink()
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    status, said = attempt(cfg)
    assert status == 0 and "put the file back" not in said
    (folder / "run.json").unlink()
    metrics.write_text("".join(lines[:1] + lines[2:]))
    status, said = attempt(cfg)
    assert status == 0
    assert f"metrics.jsonl has {len(lines) - 1} lines up to the checkpoint, which counted {len(lines)}" in said
    assert json.loads((folder / "run.json").read_text())["metrics_lines_lost"] == 1


def in_a_small_disk(script: str) -> subprocess.CompletedProcess[str]:
    """A shell script that may mount; skips where the system does not let it."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody but its administrator mount a small disk")
    return subprocess.run(
        ["unshare", "-rm", "bash", "-c", script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip


@pytest.mark.slow
def test_a_real_disk_that_is_full_and_then_read_only(tmp_path: Path, whole: Path) -> None:
    cfg = configure("ppo", tmp_path / "disk", *TINY)
    (tmp_path / "disk").mkdir()
    code = (
        "from tests.experiments.test_full_disk import *\n"
        f"sys.argv = {sys.argv!r}\n"  # the run card holds the command
        f"cfg = configure('ppo', Path({str(tmp_path / 'disk')!r}), *TINY)\n"
        "status, said = attempt(cfg)\nprint(said)\nprint('status', status)"
    )
    (tmp_path / "train.py").write_text(code)
    train_it = f"{sys.executable} {tmp_path / 'train.py'}"
    disk = tmp_path / "disk"
    done = in_a_small_disk(
        f"set -e; mount -t tmpfs -o size=700k none {disk}; cp -r {whole / 'bases'} {disk}; {train_it}; "
        f"mount -o remount,ro,size=50m {disk}; {train_it}; mount -o remount,rw,size=50m {disk}; {train_it}; "
        f"cp -r {disk} {tmp_path / 'kept'}"
    )
    assert done.returncode == 0, done.stderr
    statuses = [line for line in done.stdout.splitlines() if line.startswith("status")]
    assert statuses == ["status 1", "status 1", "status 0"], done.stdout + done.stderr
    assert "Traceback" not in done.stdout and "No space left on device" in done.stdout
    assert "make room there" in done.stdout and "Read-only file system" in done.stdout
    assert contents(tmp_path / "kept") == contents(whole)
    assert run_folder(cfg).name in done.stdout

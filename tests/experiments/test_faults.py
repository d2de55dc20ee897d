"""A run meets a fault, is started again, and ends the same.

It is killed at one of its file operations, or the disk refuses that one; its disk fills up or is read-only; its metrics
lose lines. Some operations are tried among the fast tests, and all of them among the slow ones.
"""

import errno
import itertools
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from experiments import train
from experiments.launch.overrides import one_line
from marl.common.errors import UserError
from marl.common.files import write_text
from marl.storage.checkpoint import read_card
from tests.composing import DOND, run_folder
from tests.composing import configure as composed
from tests.torture import always, contents

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    *DOND, "loss.imitation.weight=0.1", "algo.iterations=3", "eval.games=1", "eval.every=3", "eval.final_games=2",
    "checkpoint.keep=2",
)  # fmt: skip
OPERATIONS = ("replace", "rename", "fsync", "unlink", "rmdir")
HOWS = ("killed before", "killed after", "refused")


def configure(folder: Path) -> DictConfig:
    return composed("train", *TINY, f"runs={folder / 'runs'}", f"cache={folder / 'bases'}")


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


def place_of(file: Any, beside: int | None) -> str:
    """Returns the path of a file that is given by its descriptor, or by its name and the descriptor of its folder."""
    if isinstance(file, int):
        return os.readlink(f"/proc/self/fd/{file}")
    return os.path.join(os.readlink(f"/proc/self/fd/{beside}"), file) if beside is not None else os.fspath(file)


def meddle(folder: Path, at: int = -1, how: str = "") -> None:
    """Notes each later operation on files in the folder, one a line, in `operations` beside it. At operation number
    `at` the process is killed or, if `how` is "refused", the disk is full once; then the folder is first copied to `as
    it was`."""
    count = itertools.count()

    def meddled(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(file: Any, *rest: Any, **named: Any) -> Any:
            place = place_of(file, named.get("dir_fd"))
            if not place.startswith(f"{folder}/"):
                return real(file, *rest, **named)
            number = next(count)
            with folder.with_name("operations").open("a") as notes:
                notes.write(f"{name} {Path(place).relative_to(folder)}\n")
            if number != at:
                return real(file, *rest, **named)
            if how == "refused":
                shutil.copytree(folder, folder.with_name("as it was"))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)
            if how == "killed after":
                real(file, *rest, **named)
            os.kill(os.getpid(), signal.SIGKILL)

        return operation

    for name in OPERATIONS:
        setattr(os, name, meddled(name, getattr(os, name)))
    without_figures()


def without_figures() -> None:
    """Replaces the page, which tells the time and is not compared: drawing it takes longest in so small a run."""
    train.build_report = lambda folders, path, title: write_text(path, "a page")  # type: ignore[assignment,misc,return-value]


@dataclass(frozen=True)
class Tried:
    """An undisturbed run, and what it left."""

    folder: Path
    left: dict[str, str]


def from_its_base(whole: Path, to: Path) -> None:
    """Copies nothing but the base."""
    shutil.copytree(whole / "bases", to / "bases", ignore=shutil.ignore_patterns("evaluations"))


def from_its_end(whole: Path, to: Path) -> None:
    """Copies a finished run without its card and with a damaged last checkpoint, so that everything is written once
    more."""
    shutil.copytree(whole, to)
    folder = run_folder(configure(to))
    (folder / "run.json").unlink()
    with (folder / "checkpoints" / "iteration-000003" / "learner.safetensors").open("ab") as weights:
        weights.write(b"more")


BEGINNINGS = {"from its base": from_its_base, "from its end": from_its_end}


@pytest.fixture(scope="module")
def tried(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Tried:
    whole = tmp_path_factory.mktemp("faults") / "whole"
    base = Path(read_card(finished / "policy")["base"])
    shutil.copytree(base, whole / "bases" / base.name, ignore=shutil.ignore_patterns("evaluations"))
    cfg = configure(whole)
    status, said = attempt(cfg, prepare=without_figures)
    assert status == 0, said
    assert always(cfg, "loss/policy") and always(cfg, "reward/speaking")
    return Tried(whole, contents(whole))


def operations_of(tried: Tried, begun: str, folder: Path) -> list[str]:
    """Lists the file operations of an undisturbed run that begins so."""
    BEGINNINGS[begun](tried.folder, folder)
    status, said = attempt(configure(folder), prepare=partial(meddle, folder))
    assert status == 0 and contents(folder) == tried.left, said
    return folder.with_name("operations").read_text().splitlines()


def whole_files(folder: Path) -> dict[str, bytes]:
    """Returns the contents of all files that are not temporary, by name."""
    names = {p: p.relative_to(folder) for p in sorted(folder.rglob("*")) if p.is_file()}
    return {str(n): p.read_bytes() for p, n in names.items() if not any(part.startswith(".") for part in n.parts)}


def fail_and_go_on(tried: Tried, begun: str, number: int, how: str, folder: Path) -> None:
    """Checks one run that meets its fault at the operation of this number, and then goes on without faults."""
    BEGINNINGS[begun](tried.folder, folder)
    at_first = whole_files(folder)
    cfg = configure(folder)
    status, said = attempt(cfg, prepare=partial(meddle, folder, number, how))
    ended = status == 0  # the run goes on if only tidying up failed
    if how != "refused":
        assert status == -signal.SIGKILL, said
    elif not ended:
        assert status == 1 and "Traceback" not in said, said
        assert "cannot be written (No space left on device): make room there" in said.splitlines()[-1], said
        then, found = whole_files(folder.with_name("as it was")), whole_files(folder)
        assert {name: found.get(name) for name in then} == then
        assert all(name in found for name in at_first if "checkpoints" not in name), at_first.keys() - found.keys()
    status, said = attempt(cfg, prepare=without_figures)
    assert status == 0, said
    left = contents(folder)
    # A page that was there before is not drawn again once the card says that the run is done.
    idle = {name for name in left if name.endswith(".report.html.new") or (ended and ".old/" in name)}
    assert {name: digest for name, digest in left.items() if name not in idle} == tried.left


@pytest.mark.parametrize(
    ("begun", "how", "number"), [("from its end", "killed after", 33), ("from its base", "refused", 68)]
)
def test_a_run_ends_the_same_after_a_failed_operation(
    begun: str, how: str, number: int, tried: Tried, tmp_path: Path
) -> None:
    """Two of some eighty operations are tried, one in the middle and one near the end; the slow test tries all."""
    fail_and_go_on(tried, begun, number, how, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("begun", BEGINNINGS)
def test_a_run_ends_the_same_after_any_failed_operation(begun: str, how: str, tried: Tried, tmp_path: Path) -> None:
    failed = []
    for number, operation in enumerate(operations_of(tried, begun, tmp_path / "peace" / "run")):
        if how == "killed after" and operation.startswith("fsync"):
            continue  # fsync changes no file, so "killed before" is the same
        try:
            fail_and_go_on(tried, begun, number, how, tmp_path / str(number) / "run")
        except AssertionError as error:
            failed.append(f"{number}, {operation}: {error}")
        shutil.rmtree(tmp_path / str(number))
    assert not failed, "\n".join(failed)


def test_a_run_goes_on_as_its_disk_gets_room(tried: Tried, tmp_path: Path) -> None:
    """The disk first has no room for the configuration, then none for the games."""
    from_its_base(tried.folder, tmp_path)
    cfg = configure(tmp_path)
    for room, name in ((0, "config.yaml"), (3_000, "iteration-")):
        status, said = attempt(cfg, room, without_figures)
        assert status == 1 and "Traceback" not in said, said
        (line,) = [line for line in said.splitlines() if "cannot be written (File too large): make room there" in line]
        assert Path(line.partition(" cannot be written")[0]).name.startswith(name)
        assert not [*tmp_path.rglob("*.new")]
        for path in [tmp_path, *tmp_path.rglob("*")]:  # as if the clock had been set back since
            os.utime(path, (4_000_000_000, 4_000_000_000))
    status, said = attempt(cfg, prepare=without_figures)
    assert status == 0, said
    assert contents(tmp_path) == tried.left

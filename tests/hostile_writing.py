"""Disks that are full, folders that may not be written, clocks that were set back, and what writing comes to."""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from experiments.launch.overrides import one_line
from marl.common.errors import UserError
from marl.common.files import write_json, write_text
from marl.report.transcripts import write_episodes
from marl.storage.checkpoint import save_policy, save_training
from marl.storage.tracking import JsonlTracker
from tests.hostile_files import contents
from tests.marl.episodes import beliefs, episode, message, propose
from tests.marl.hint import hint_policy


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Within, the system refuses what would make a file longer than so many bytes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


GAME = episode(
    [message("player_0", 0, "hi"), propose("player_1", 1, (1, 0, 2))], beliefs("player_1", 0, (0.5, 0.2, 0.9))
)


class Writers:
    """What a run writes, each as of iteration 1 or 2, after which a run that goes on begins."""

    def __init__(self, folder: Path) -> None:
        self.policies = {iteration: hint_policy(iteration) for iteration in (1, 2)}
        self.made: dict[str, tuple[Path, dict[str, bytes]]] = {}  # by writer: what iteration 1 leaves; all of it
        for name in self.NAMES:
            before, after = folder / name / "before", folder / name / "after"
            for here, numbers in ((before, (1,)), (after, (1, 2))):
                here.mkdir(parents=True)
                for iteration in numbers:
                    self.write(name, here, iteration)
            self.made[name] = before, contents(after)

    NAMES = ("checkpoint", "policy", "metrics", "episodes", "page", "card")

    def write(self, name: str, folder: Path, iteration: int) -> None:
        policy = self.policies[iteration]
        if name == "checkpoint":
            optimizer = torch.optim.AdamW(policy.parameters())
            save_training(folder, iteration, {"learner": (policy, optimizer)}, {"run": "a"}, keep=5)
        elif name == "policy":
            save_policy(folder / "policy", policy, {"game": "hint", "run": iteration})
        elif name == "metrics":
            tracker = JsonlTracker(folder, iteration - 1 if iteration > 1 else None)
            try:
                for phase in ("train", "eval"):
                    tracker.log(iteration, {"game/score": 0.5, "rollout/tokens": 123456, "time/update": 1.0}, phase)
            finally:
                tracker.close()
        elif name == "episodes":
            write_episodes(folder / "episodes" / "trained.jsonl", [GAME] * 3 * iteration)
        elif name == "page":
            write_text(folder / "report.html", "<p>a page</p>" * 9999 * iteration)
        else:
            write_json(folder / "run.json", {"run": iteration, "seeds": [0]})


def fill_up(of: Writers, scratch: Path, tried: tuple[str, int]) -> str:
    """Writes with little room. What was there stays, nothing lies about, and with room the same call makes it whole."""
    name, room = tried
    here = scratch / "full"
    shutil.rmtree(here, ignore_errors=True)
    before, whole = of.made[name]
    shutil.copytree(before, here)
    try:
        with room_for(room):
            of.write(name, here, 2)
        result = "taken"
    except UserError as error:
        said, kept, left = one_line(error), contents(before), contents(here)
        assert str(here) in said and "make room" in said, said
        assert left.keys() == kept.keys(), left.keys()
        assert all(left[n].startswith(kept[n]) for n in kept), "something was lost"  # a line may have been begun
        of.write(name, here, 2)
        result = "refused"
    assert contents(here) == whole
    return result


REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT)
CHANGING = ("mkdir", "rmdir", "unlink", "replace", "rename", "truncate", "utime", "chmod")
TARGETS = {  # of each writer, what it makes
    "checkpoint": "iteration-000002", "policy": "policy", "metrics": "metrics.jsonl",
    "episodes": "episodes/trained.jsonl", "page": "report.html", "card": "run.json",
}  # fmt: skip


@contextmanager
def read_only(folder: Path, number: int) -> Iterator[None]:
    """Within, every change in the folder is refused with this error. Modes of folders would not stop an administrator,
    who may run this, and mounting is not everybody's."""

    def inside(path: Any) -> bool:
        return isinstance(path, str | Path) and Path(path).is_relative_to(folder)

    def refuse(path: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    def unless_inside(real: Callable[..., Any], changes: Callable[..., bool]) -> Callable[..., Any]:
        def operation(path: Any, *rest: Any, **named: Any) -> Any:
            if inside(path) and changes(*rest, **named):
                refuse(path)
            return real(path, *rest, **named)

        return operation

    def writes(mode: str = "r", *_: Any, **__: Any) -> bool:
        return bool(set(mode) & set("wax+"))

    places = [(os, name, lambda *_, **__: True) for name in CHANGING]
    places += [(os, "open", lambda flags, *_, **__: bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)))]
    places += [(io, "open", writes), (builtins, "open", writes)]
    kept = [getattr(module, name) for module, name, _ in places]
    for (module, name, changes), real in zip(places, kept, strict=True):
        setattr(module, name, unless_inside(real, changes))
    try:
        yield
    finally:
        for (module, name, _), real in zip(places, kept, strict=True):
            setattr(module, name, real)


IN_THE_WAY = ("a file for the folder", "a link for the folder", "a file for a folder in it, or a folder for a file")


def put_in_the_way(here: Path, name: str, what: str) -> None:
    """Something else is where a writer has its folder, or makes its file or folder."""
    target = here / TARGETS[name]
    if what == "a link for the folder":  # to itself
        shutil.rmtree(here)
        here.symlink_to(here)
    elif what == "a file for the folder":
        shutil.rmtree(here)
        here.write_text("somebody's")
    elif name in ("checkpoint", "policy"):
        shutil.rmtree(target, ignore_errors=True)
        target.write_text("somebody's")
    else:
        target.unlink()
        (target / "somebody's").mkdir(parents=True)


def shut_out(of: Writers, scratch: Path, tried: tuple[str, int | str]) -> str:
    """Writes where it may not, or where something is in the way. All that was there stays; once the folder may be
    written the same call makes it whole."""
    name, what = tried
    here = scratch / "shut"
    if here.is_dir():
        shutil.rmtree(here)
    else:
        here.unlink(missing_ok=True)
    before, whole = of.made[name]
    shutil.copytree(before, here)
    if isinstance(what, str):
        put_in_the_way(here, name, what)
    there = look(here)
    try:
        with read_only(here, what) if isinstance(what, int) else nullcontext():
            of.write(name, here, 2)
        raise AssertionError("it was written all the same")
    except UserError as error:
        said = one_line(error)
        assert str(here) in said and "cannot be written" in said, said
    assert look(here) == there, "what was there was changed"
    if isinstance(what, int):
        of.write(name, here, 2)
        assert contents(here) == whole
    return "refused"


def look(folder: Path) -> dict[str, Any]:
    """Everything there: bytes of files, where links lead, and folders."""
    return {
        str(p): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None
        for p in (folder, *(sorted(folder.rglob("*")) if not folder.is_symlink() else ()))
    }


MOMENTS = st.sampled_from([0.0, 1.0, 2.0**31, 4e9, 1e10]) | st.floats(0, 4e9)


@contextmanager
def clock_at(moment: float) -> Iterator[None]:
    """Within, it is so many seconds after 1970."""
    kept = time.time, time.time_ns
    time.time, time.time_ns = lambda: moment, lambda: int(moment * 1e9)
    try:
        yield
    finally:
        time.time, time.time_ns = kept


def set_back(
    of: Writers, read: Mapping[str, tuple[Path, Callable[[Path], str]]], scratch: Path,
    tried: tuple[str, float, list[float]],
) -> str:  # fmt: skip
    """Writes, or reads, as if all files had been made at these moments and it were now another one: no difference."""
    name, now, made = tried
    here = scratch / "clock"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(of.made[name][0] if name in of.made else read[name][0], here)
    for path, moment in zip((here, *sorted(here.rglob("*"))), itertools.cycle(made)):
        os.utime(path, (moment, moment))
    with clock_at(now):
        if name in of.made:
            of.write(name, here, 2)
            assert contents(here) == of.made[name][1]
            return "taken"
        return read[name][1](here)

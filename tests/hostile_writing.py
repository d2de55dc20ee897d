"""Disks that are full, and what writing comes to."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

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

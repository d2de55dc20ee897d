"""Notes of how a run is made: in each checkpoint, to go on from it, and on its card."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.launch.terminal import say
from experiments.setup.work import Work, computed_with, inputs_of, warm_starts
from marl.common.distributed import Ranks
from marl.common.errors import UserError
from marl.metrics.stats import Metrics
from marl.model.policy import Policy
from marl.storage.checkpoint import WAY_ON, copy_folder, folder_digest, policy_digest, read_state, verify_folder
from marl.storage.folder import REFERENCE, differences, git_commit, nearest_run, run_card
from marl.storage.tracking import METRICS_FILE, TIMING_FILE, read_metrics


@dataclass
class Record:
    """A run's notes. `before`: those of the checkpoint that it goes on from; empty in a new run."""

    work: Work
    ranks: Ranks
    before: Mapping[str, Any]
    inputs: Mapping[str, str]
    began: float = field(default_factory=time.monotonic)  # no clock that can be set back
    base: str = ""  # digest of the base

    @classmethod
    def of(cls, work: Work, newest: Path | None, ranks: Ranks) -> Record:
        """Reads the newest checkpoint's notes. UserError where the run cannot go on as it began."""
        folder = work.spec.folder
        record = cls(work, ranks, read_state(newest) if newest else {}, inputs_of(work.spec))
        if newest is None:
            return record
        if record.before.get("run") != folder.name:
            raise UserError(f"{newest} is of the run {record.before.get('run')}: put it back there, or {WAY_ON}")
        began_with = record.before.get("inputs", {})
        for name in {**record.inputs, **began_with}:
            if record.inputs.get(name) != began_with.get(name):
                raise UserError(
                    f"{name} is not what this run began with: it was made again, or edited. Put the old one back, or "
                    f"remove {folder} to begin anew."
                )
        return record

    @property
    def commits(self) -> list[str]:
        """The commits of the code that made the run, the oldest first."""
        return list(dict.fromkeys([*self.before.get("commits", []), git_commit()]))

    @property
    def made_with(self) -> list[dict[str, Any]]:
        """The libraries, hardware and settings of speed that made the run, the oldest first."""
        spec, earlier = self.work.spec, self.before.get("made_with", [])
        now = {
            **computed_with(spec, self.work.device),
            "processes": self.ranks.size,
            "shard": self.sharded,
            "algo.update.token_budget": spec.algo.update.token_budget,
        }
        return earlier if now in earlier else [*earlier, now]

    @property
    def sharded(self) -> bool:
        """Tells whether several processes split parameters among them."""
        return self.work.spec.shard and self.ranks.size > 1

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken so far."""
        return float(self.before.get("wall_time", 0.0)) + time.monotonic() - self.began

    def say(self) -> None:
        """Says which run this is, and what differs from how it was begun."""
        folder = self.work.spec.folder
        say(f"run {folder}" + (f", {self.ranks.size} processes" if self.ranks.size > 1 else ""))
        if not self.before and (differs := nearest_run(folder)):
            say(differs)
        *earlier, now = self.commits
        if earlier:
            say(f"this run was begun by other code ({', '.join(earlier)}) than now goes on ({now})")
        here = self.made_with[-1]
        changed = [each for there in self.before.get("made_with", []) for each in differences(there, here)]
        if changed:
            say(
                f"this run was begun with {'; '.join(dict.fromkeys(changed))}: its last digits will be those of neither"
            )

    def keep_base(self, base: Policy, folder: Path | None) -> None:
        """Notes the base, and keeps a copy of its `folder` in the run. UserError for another than the run's own."""
        spec = self.work.spec
        kept = spec.folder / REFERENCE
        self.base = folder_digest(folder) if folder else policy_digest(base)
        if self.before and self.before.get("base") != self.base:
            raise UserError(
                f"{folder or spec.model.name} is not the base that this run began with: it was made again, or is "
                f"another version. "
                + (f"Remove it, so that {kept} takes its place" if folder else "Put the old one back")
                + f", or remove {spec.folder} to begin anew."
            )
        # Without a checkpoint the copy is of an attempt of which nothing else is left: its base may have been another.
        if folder is None:
            return
        fits = bool(self.before) or (not verify_folder(kept) and folder_digest(kept) == self.base)
        if not (kept.exists() and fits):
            copy_folder(folder, kept)

    def note(self) -> dict[str, Any]:
        """Returns what a checkpoint notes of the run so far."""
        return {
            "run": self.work.spec.folder.name,
            "base": self.base,
            "wall_time": self.seconds,
            "commits": self.commits,
            "made_with": self.made_with,
            "inputs": self.inputs,
            **self.chat_figures(),
        }

    def chat_figures(self) -> dict[str, Any]:
        """Returns what an endpoint was asked for, with what it was asked before the checkpoint."""
        chat = self.work.chat
        return {"chat": chat.figures(self.before.get("chat"))} if chat else {}

    def write_card(self, base_folder: Path | None, conditions: Mapping[str, Metrics]) -> None:
        """Writes `run.json`."""
        spec = self.work.spec
        links = warm_starts(spec)
        run_card(
            spec.folder,
            spec.hash,
            spec.seed,
            arm=spec.arm,
            **({"warm_starts": links} if links else {}),
            processes=self.ranks.size,
            shard=self.sharded,
            deterministic=spec.deterministic,
            git_commit=", ".join(self.commits),
            made_with=self.made_with,
            inputs=self.inputs,
            wall_time=round(self.seconds, 1),
            tokens=total(spec.folder / METRICS_FILE, "rollout/tokens"),
            games=total(spec.folder / METRICS_FILE, "rollout/games"),
            base=base_folder.name if base_folder else None,
            base_digest=self.base,
            figures={name: {m: i.to_json() for m, i in found.items()} for name, found in conditions.items()},
            speed=mean_speed(spec.folder / TIMING_FILE),
            per_game={**seconds_per_game(spec.folder), "cache_bytes": self.work.game_bytes},
            peak_bytes=peak_memory(self.work.device),
            **self.chat_figures(),
        )


def total(path: Path, metric: str) -> int:
    """Sums a metric over all training iterations."""
    return int(sum(row.get(metric, 0) for row in read_metrics(path) if row["phase"] == "train"))


def seconds_per_game(folder: Path) -> dict[str, float]:
    """Seconds of playing and of learning for each game of training."""
    games, rows = max(total(folder / METRICS_FILE, "rollout/games"), 1), read_metrics(folder / TIMING_FILE)
    times = {"playing_seconds": "time/rollout", "learning_seconds": "time/update"}
    return {name: round(sum(row.get(time, 0.0) for row in rows) / games, 4) for name, time in times.items()}


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: on a GPU of tensors, on a CPU of everything."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def mean_speed(path: Path) -> dict[str, float]:
    """Averages the speeds over iterations; those of updates over the iterations that had one."""
    rows = read_metrics(path)
    names = sorted({name for row in rows for name in row if name.startswith("speed/")})
    return {name: round(float(np.mean([row[name] for row in rows if row.get(name)] or [0.0])), 2) for name in names}

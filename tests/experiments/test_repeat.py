"""The same command gives the same run, whatever is only measured beside it: every algorithm, both games."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from experiments import train
from tests.composing import DOND, run_folder
from tests.composing import configure as composed
from tests.experiments.test_faults import attempt
from tests.torture import KINDS, configure, contents

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("algo.iterations=2", "algo.games=6", "eval.games=2", "eval.final_games=4")
ALL_KINDS = f"""
import sys
from pathlib import Path
from experiments import train
from tests.torture import KINDS, configure
for kind in KINDS:
    train.main(configure(kind, Path(kind), *{SHORT}))
"""


@pytest.mark.slow
def test_fresh_processes_give_the_same_runs(tmp_path: Path) -> None:
    """Processes with different hash seeds order sets differently, and still leave the same files."""
    both = []
    for number in ("1", "2"):
        folder = tmp_path / number
        folder.mkdir()
        own = {"PYTHONHASHSEED": number, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", ALL_KINDS], cwd=folder, env={**os.environ, **own}, check=True)
        both.append({kind: contents(folder / kind) for kind in KINDS})
    for kind in KINDS:
        one, other = (found[kind] for found in both)
        assert one and sorted(name for name in {*one, *other} if one.get(name) != other.get(name)) == [], kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_only_measured_changes_nothing_that_is_learned(kind: str, tmp_path: Path) -> None:
    measured = ("loss.world_model={_target_:marl.losses.world_model.WorldModelLoss,weight:0.0}",)
    measured += ("eval.games=3", "eval.seed=3", "eval.final_games=2", "eval.every=2")
    trained: list[list[dict[str, Any]]] = []
    policies: list[dict[str, torch.Tensor]] = []
    for number, changes in enumerate((("loss.world_model=null",), measured)):
        cfg = configure(kind, tmp_path / str(number), *SHORT, *changes)
        train.main(cfg)
        rows = [json.loads(line) for line in (run_folder(cfg) / "metrics.jsonl").read_text().splitlines()]
        trained.append([row for row in rows if row["phase"] == "train"])
        policies.append(load_file(run_folder(cfg) / "policy" / "model.safetensors"))
    assert all(row.pop("loss/world_model") for row in trained[1])
    assert trained[0] == trained[1] and len(trained[0]) == 2
    assert all(torch.equal(policies[0][name], tensor) for name, tensor in policies[1].items())


TINY = (*DOND, "base.games=100", "loss.imitation.weight=0.1")


@pytest.mark.slow  # test_train.py repeats a run after others of its process, from the same base
@pytest.mark.usefixtures("no_pages")
def test_a_run_leaves_nothing_in_its_process(bases: Path, tmp_path: Path) -> None:
    """Jobs of a sweep may share a process: a run leaves the same files before and after a run of other settings, its
    base included."""
    pikl = ("algo=pikl", "algo.planner.iterations=5", "seed=3", "deterministic=true", "algo.update.bf16=true")
    for name, *own in (("before",), ("between", *pikl, "loss.imitation.weight=0", f"cache={bases}"), ("after",)):
        train.main(composed("train", *TINY, f"runs={tmp_path / name}", *own))
    before, after = contents(tmp_path / "before"), contents(tmp_path / "after")
    assert before and sorted(name for name in {*before, *after} if before.get(name) != after.get(name)) == []


@pytest.mark.slow
def test_two_threads_give_the_same_run_each_time(tmp_path: Path) -> None:
    """Each with its own base, in a process of its own. The matrices of updates are large enough to be shared out."""
    few = ("base.games=24", "base.rows=16", "env.max_entries=6", "env.max_errors=1", "algo.max_new_tokens=8")
    few += ("eval.games=1", "eval.every=2", "eval.final_games=2", "model.layers=1")
    both = []
    for number in ("1", "2"):
        cfg = configure("ppo", tmp_path / number, *SHORT, *few, "threads=2")
        status, said = attempt(cfg)
        assert status == 0 and torch.get_num_threads() == 1, said
        assert json.loads((run_folder(cfg) / "run.json").read_text())["hardware"]["threads"] == 2
        both.append(contents(tmp_path / number))
    assert sorted(name for name in {*both[0], *both[1]} if both[0].get(name) != both[1].get(name)) == []
    assert any(name.endswith("metrics.jsonl") for name in both[0])

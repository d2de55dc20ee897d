"""The same command gives the same run, whatever is only measured beside it: every algorithm, both games."""

from __future__ import annotations

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
from marl.config import run_folder
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
    """Whatever order sets have: each process hashes strings in its own way."""
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

"""The drift of a small real run's language: every policy is measured, once, and what is left out is said."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments import drift, train
from tests.composing import configure
from tests.experiments.test_frontier import TEST
from tests.marl.test_human_dond import write

QUIET = ["progress=false", "threads=1"]
SMALL = [
    *QUIET, "env=dond", "base=human", "base.epochs=1", "model.hidden_size=32", "model.layers=1",
    "model.intermediate_size=64", "model.max_new_tokens=8", "name=tiny", "arm=full", "algo.iterations=2",
    "algo.games=4", "algo.concurrency=4",
    "algo.update.minibatches=1", "eval.games=3", "eval.every=1", "eval.final_games=3", "checkpoint.every=1",
]  # fmt: skip


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_runs_drift_from_its_base_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    data = write(tmp_path / "data", test=TEST)
    train.main(configure("train", *SMALL, f"data.dond={data}", f"runs={tmp_path}"))
    capsys.readouterr()
    cfg = configure("drift", *QUIET, f"runs={tmp_path}", "select=tiny-*", f"data.dond={data}", "games=4")
    drift.main(cfg)
    assert "test: 2 views of human dialogues; left out: none" in capsys.readouterr().out
    out = tmp_path / "drift"
    found = {(row["iteration"], row["metric"]): row for row in rows(out / "drift.csv")}
    assert {iteration for iteration, _ in found} == {"0", "1", "2"}  # base, checkpoint, end
    likely = [float(found[iteration, "drift/human_dialogues"]["mean"]) for iteration in "012"]
    assert all(nats < 0 for nats in likely) and len(set(likely)) == 3
    assert {row["iteration"] for row in rows(out / "kept.csv")} <= {"0", "1", "2"}
    assert float(next(row for row in rows(out / "people.csv") if row["metric"] == "talk/understood")["mean"]) > 0
    assert (out / "drift.svg").read_text().count("<svg") == 1

    cells = {path: path.stat().st_mtime_ns for path in out.glob("*.json")}
    assert len(cells) == 3
    drift.main(cfg)  # nothing is measured again
    assert {path: path.stat().st_mtime_ns for path in cells} == cells

    (run,) = tmp_path.glob("tiny-*")
    assert drift.stages_of(run)[0].folder.parent == tmp_path / "bases"
    config = OmegaConf.load(run / "config.yaml")
    config.init.learner = run.name  # as if it had started from where it ended
    OmegaConf.save(config, run / "config.yaml")
    assert drift.stages_of(run)[0].folder == run / "policy"


def test_people_who_did_not_end_in_claims_are_counted_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = drift.people_metrics(str(write(tmp_path)), "train")
    assert "4 views of human dialogues; left out: 1 no agreement; in all 2 rows without" in capsys.readouterr().out
    assert found["talk/understood"].n == 4 and found["talk/worse_share"].n == 4

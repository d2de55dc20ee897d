"""PPO, learning from plans and planning at test time side by side, by the shipped sweep and study: small real runs."""

import json
from pathlib import Path

import pytest

from experiments import report, train
from experiments.setup.config import plain
from experiments.setup.spec import run_spec
from experiments.studies import conditions
from marl.common.files import csv_rows
from tests.composing import configure

SMALL = [
    "progress=false", "threads=1", "base.games=24", "base.rows=16", "model.hidden_size=32", "model.layers=1",
    "model.intermediate_size=64", "algo.iterations=1", "algo.games=6", "algo.concurrency=6", "eval.games=0",
    "algo.update.minibatches=1", "eval.final_games=8",
]  # fmt: skip


def test_both_learners_play_equal_games_from_one_base() -> None:
    ppo, pikl = (configure("train", "sweep=dond_pikl", f"algo={algo}") for algo in ("ppo", "pikl"))
    assert (ppo.arm, pikl.arm) == ("ppo", "pikl") and ppo.env.objective == 1
    ppo.reward.speaking.weight = 0.0  # by which plans learn nothing
    for part in ("env", "cast", "model", "base", "reward", "eval"):
        assert plain(ppo)[part] == plain(pikl)[part]
    a, b = run_spec(ppo).algo, run_spec(pikl).algo
    assert (a.iterations, a.games, a.temperature) == (b.iterations, b.games, b.temperature)


@pytest.mark.slow
def test_from_the_sweep_to_both_tables(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for algo in ("ppo", "pikl"):
        for seed in (0, 1):
            train.main(configure("train", "sweep=dond_pikl", f"algo={algo}", f"seed={seed}", f"runs={runs}", *SMALL))
    page, out = tmp_path / "page.html", tmp_path / "table"
    report.main(configure("report", "select=dond_pikl-*", f"runs={runs}", f"out={page}", f"publish={out}"))
    arms = [row["arm"] for row in csv_rows(out / "table.csv")]
    assert list(dict.fromkeys(arms)) == ["base", "pikl", "ppo"]
    assert {row["arm"] for row in csv_rows(out / "differences.csv.gz")} == {"pikl - ppo"}
    assert "pikl" in page.read_text()
    small = [f"runs={runs}", f"publish={out}", "games=6", "concurrency=6", "progress=false", "threads=1"]
    study = configure("conditions", "comparison=dond_pikl", *small)
    conditions.main(study)
    rows = {(r["arm"], r["condition"]): r for r in csv_rows(out / "planned.csv.gz") if r["metric"] == "game/score"}
    assert set(rows) == {(arm, how) for arm in ("base", "pikl", "ppo") for how in ("as_it_plays", "planned")}
    assert rows["pikl", "planned"]["seeds"] == "2" and rows["base", "planned"]["seeds"] == "1"
    cells = [json.loads(path.read_text())["about"] for path in Path(study.cells).glob("*.json")]
    assert len(cells) == 10 and sum("planner" in about for about in cells) == 5

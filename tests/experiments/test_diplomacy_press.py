"""The sweep of press on pure Diplomacy in miniature: two arms, one of them mute, to a published table."""

from pathlib import Path

import pytest

from experiments import report, train
from marl.metrics.tables import read_table
from marl.storage.folder import read_run_card
from marl.storage.tracking import read_metrics
from tests.composing import SMALL, configure

pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`: pip install 'diplomacy==1.1.2'")


@pytest.mark.slow
def test_arms_that_speak_and_one_that_is_mute_share_a_base_and_a_table(tmp_path: Path) -> None:
    tiny = [*SMALL, f"runs={tmp_path}", "seed=0", "base.games=24", "base.tokenizer_games=20", "algo.iterations=1"]
    runs = {
        arm: train.main(configure("train", "sweep=diplomacy_press", f"ablation={arm}", *tiny))
        for arm in ("full", "game_only", "mute")
    }
    cards = {arm: read_run_card(folder) or {} for arm, folder in runs.items()}
    assert len({card["base_digest"] for card in cards.values()}) == 1
    rows = {arm: read_metrics(folder / "metrics.jsonl")[0] for arm, folder in runs.items()}
    assert rows["full"]["reward/speaking"] != 0 and rows["full"]["belief/log_loss"] > 0
    assert rows["mute"]["talk/turns"] == 0 and "belief/log_loss" not in rows["mute"]

    table = tmp_path / "table"
    report.main(configure("report", f"runs={tmp_path}", "select=diplomacy_press-*", f"publish={table}"))
    found = {(row.arm, row.metric) for row in read_table(table / "table.csv")}
    arms = ["base", "base of mute", "RL", "RL+L+S", "mute"]
    assert sorted(arm for arm, metric in found if metric == "game/score") == arms
    assert sorted(arm for arm, metric in found if metric == "belief/last_log_loss") == ["RL", "RL+L+S", "base"]
    assert (table / "figure.svg").exists()

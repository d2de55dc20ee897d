"""The sweep of press on pure Diplomacy: its arms in miniature, and its table."""

from pathlib import Path

import pytest

from experiments import report, train
from experiments.setup import publish
from marl.metrics.tables import read_table
from marl.report.runs import Run
from marl.storage.folder import read_run_card
from marl.storage.tracking import read_metrics
from tests.composing import SMALL, configure

ASKED = ("belief/accuracy", "belief/last_log_loss", "speech/belief_change")


def test_a_table_keeps_what_a_mute_arm_lacks(tmp_path: Path) -> None:
    """The mute arm plays another game (press=none), but its scores stand beside the others'. Beliefs stand in the table
    for the arms that were asked."""

    def run(arm: str, seed: int, score: float) -> Run:
        press = "none" if arm == "mute" else "private"
        config = {"env": {"game": "diplomacy", "years": 1, "press": press}, "eval": {"games": 0}}
        figures = {
            condition: {
                name: {"mean": mean, "low": mean, "high": mean, "n": 10}
                for name in ("game/score", *(ASKED if arm != "mute" else ()))
            }
            for condition, mean in (("base", 0.14), ("trained", score + seed / 100))
        }
        return Run(
            tmp_path / f"{arm}-{seed}", arm, seed, config, {"base_digest": f"of {seed}"}, [], {"conditions": figures}
        )

    runs = [run(arm, s, score) for arm, score in (("RL", 0.2), ("RL+L+S", 0.3), ("mute", 0.1)) for s in (0, 1)]
    ((suffix, group),) = publish.variants(runs).items()
    publish.publish_variant("diplomacy", group, tmp_path, suffix)
    found = {(row.arm, row.metric): row.mean for row in read_table(tmp_path / "table.csv")}
    assert found["mute", "game/score"] == 0.105 and found["RL+L+S", "game/score"] == 0.305
    arms = {arm for arm, metric in found if metric == "belief/last_log_loss"}
    assert arms == {"base", "RL", "RL+L+S"}
    apart = {row.arm: row.mean for row in read_table(tmp_path / "differences.csv.gz") if row.metric == "game/score"}
    assert apart["RL+L+S - RL"] == pytest.approx(0.1) and apart["RL - mute"] == pytest.approx(0.1)
    assert (tmp_path / "figure.svg").exists()


@pytest.mark.slow
def test_arms_that_speak_and_one_that_is_mute_share_a_base_and_a_table(tmp_path: Path) -> None:
    pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`: pip install 'diplomacy==1.1.2'")
    tiny = [*SMALL, f"runs={tmp_path}", "seed=0", "base.games=24", "base.tokenizer_games=20", "algo.iterations=1"]
    runs = {
        arm: train.main(configure("train", "sweep=diplomacy_press", f"ablation={arm}", *tiny))
        for arm in ("full", "mute")
    }
    cards = {arm: read_run_card(folder) or {} for arm, folder in runs.items()}
    assert len({card["base_digest"] for card in cards.values()}) == 1
    rows = {arm: read_metrics(folder / "metrics.jsonl")[0] for arm, folder in runs.items()}
    assert rows["full"]["reward/speaking"] != 0 and rows["full"]["belief/log_loss"] > 0
    assert rows["mute"]["talk/turns"] == 0 and "belief/log_loss" not in rows["mute"]

    table = tmp_path / "table"
    report.main(configure("report", f"runs={tmp_path}", "select=diplomacy_press-*", f"publish={table}"))
    found = {(row.arm, row.metric) for row in read_table(table / "table.csv")}
    assert {"base", "base of mute", "RL+L+S", "mute"} == {arm for arm, metric in found if metric == "game/score"}

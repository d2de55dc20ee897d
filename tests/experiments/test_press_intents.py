"""The study that makes players of Diplomacy with `+cicero`, and such a player from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import evaluate, report
from experiments.setup.players import check_plans, check_players, played_as
from experiments.setup.spec import play_spec
from experiments.studies import press_intents
from marl.agents.model import PlayConfig
from marl.common.errors import UserError
from marl.common.files import csv_rows
from marl.intents import draws
from marl.metrics.wording import wording
from marl.rollout.cast import RoleConfig
from marl.rollout.games import env_maker
from tests.composing import SHAPE, composed_once, configure
from tests.marl.intents.press_models import ENV, speaker

WEAK = (
    "cicero.draws=2", "cicero.candidates=1", "cicero.press.iterations=2", "cicero.press.draws=4",
    "cicero.press.others=1", "cicero.press.candidates=4",
)  # fmt: skip
STUDY = (  # a small one
    "env.years=1", "base.games=24", "base.tokenizer_games=20", *SHAPE, "scripted_games=4", "tested_games=2",
    "control=6", "seeds=[0]", *WEAK,
)  # fmt: skip
PLAY = ("progress=false", "threads=1", "device=cpu", "games=2", "concurrency=2")


settings = composed_once("press_intents")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of runs in which a small study has been made."""
    pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`: pip install 'diplomacy==1.1.2'")
    folder = tmp_path_factory.mktemp("runs")
    press_intents.main(configure("press_intents", f"runs={folder}", *PLAY, *STUDY))
    return folder


def test_its_table_has_what_is_measured_and_the_same_command_says_it_again(runs: Path) -> None:
    table = runs / "press_intents/table.csv"
    before, rows = table.read_text(), csv_rows(table)
    found = {(row["arm"], row["metric"]) for row in rows}
    for arm in (press_intents.TALKS, press_intents.MUTE, press_intents.BASE):
        assert {(arm, "score/1v6"), (arm, "score/1v6/scripted")} <= found
    for other in (press_intents.MUTE, press_intents.BASE):
        assert (f"{press_intents.TALKS} - {other}", "score/1v6") in found
    for arm in (press_intents.ANNOTATION, press_intents.NAIVE):
        assert (arm, "intent/correspondence") in found
    assert all(row[name] for row in rows for name in ("mean", "low", "high", "seeds", "games"))
    assert all(wording(metric) for _, metric in found)
    cells = {path: path.stat().st_mtime_ns for path in (runs / "press_intents").glob("*.json")}
    press_intents.main(configure("press_intents", f"runs={runs}", *PLAY, *STUDY, f"publish={runs}/again"))
    assert table.read_text() == before
    for path in (runs / "again").iterdir():  # also those that are made once
        assert path.suffix == ".jsonl" or path.read_bytes() == (table.parent / path.name).read_bytes(), path
    assert {"correspondence.csv.gz", "messages.csv.gz"} < {path.name for path in (runs / "again").iterdir()}
    assert cells == {path: path.stat().st_mtime_ns for path in (runs / "press_intents").glob("*.json")}


def test_games_are_played_again_with_other_limits() -> None:
    """Kept games are named after everything that decides them."""
    pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`: pip install 'diplomacy==1.1.2'")
    made: Any = SimpleNamespace(models={}, env={})

    def key(*changed: str) -> dict:
        cfg = settings(*changed)
        return press_intents.played_by(made, press_intents.TALKS, press_intents.BASE, cfg, play_spec(cfg))

    limits = ("model.context=400", "model.max_new_tokens=9", "algo.play_bf16=true", "temperature=0.5")
    assert key() == key("control=9")
    assert all(key() != key(change) for change in limits)


def test_control_is_measured_at_the_temperature_of_the_games(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def drawn(
        engine: Any, slots: list[int], *given: Any, temperature: float, **how: Any
    ) -> list[tuple[list[int], list]]:
        seen.append(temperature)
        return [([0], []) for _ in slots]

    monkeypatch.setattr(draws, "draw_messages", drawn)
    made: Any = SimpleNamespace(seed=0, env=ENV, base=speaker(), action=speaker(), dialogue=speaker())
    cfg = settings("temperature=0.5", "tested_games=1", "control=2")
    press_intents.control(made, cfg, play_spec(cfg), tmp_path / "messages.csv.gz")
    assert {*seen} == {0.5}


def test_its_figure_is_what_report_draws_from_the_table(runs: Path, tmp_path: Path) -> None:
    made = runs / "press_intents"
    report.main(configure("report", f"data={made}", f"publish={tmp_path}"))
    assert (tmp_path / "figure.svg").read_text() == (made / "figure.svg").read_text()


def test_its_player_is_evaluated_with_its_plans_in_the_transcripts(runs: Path, tmp_path: Path) -> None:
    names = f"players=[{runs}/press-s0+cicero,careful]"
    game = ("env=diplomacy", "env.press=private", "env.years=1")
    evaluate.main(configure("evaluate", names, f"out={tmp_path}", *game, *PLAY, *WEAK))
    episodes = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    own = [t for e in episodes for t in e["turns"] if e["players"][t["agent"]] == "press-s0+cicero"]
    assert any(t.get("thoughts", "").startswith("plan: A ") for t in own)
    assert any(t.get("thoughts", "").startswith("intent: I order A ") for t in own)


def test_it_takes_a_seat_of_a_cast(runs: Path) -> None:
    player = f"{runs}/press-s0+cicero"
    check_players({"power": RoleConfig("learner", partner=player, partners=3.0)}, ENV, env_maker(ENV)())
    assert (
        player
        in played_as({"power": RoleConfig("learner", partner=player, partners=3.0)}, PlayConfig())["cicero"]["models"]
    )


def test_what_cannot_talk_with_a_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"press-s0\+cicero"):
        check_plans(f"{tmp_path}+cicero", {"game": "diplomacy"})


@pytest.mark.parametrize(
    ("bad", "named"),
    [("env.map_name=standard", "map_name=pure"), ("env.press=none", "press=private"), ("control=0", "control"),
     ("years=0", "years"), ("temperature=-1", "temperature=-1.*: must be a number from")],
)  # fmt: skip
def test_bad_settings_are_refused_before_anything_is_made(bad: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=named):
        press_intents.main(configure("press_intents", f"runs={tmp_path}", bad))
    assert not [*tmp_path.iterdir()]

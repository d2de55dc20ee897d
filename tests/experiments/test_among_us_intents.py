"""The study of intents in Among Us, and its player from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments import evaluate
from experiments.setup.players import check_plans, check_players, model_player
from experiments.setup.spec import play_spec
from experiments.studies import among_us_intents as study
from experiments.studies.talkers import refused, table_row
from experiments.webapp.opponents import Opponents
from experiments.webapp.study import Condition
from marl.agents.model import PlayConfig
from marl.common.errors import UserError
from marl.common.files import csv_rows, write_json
from marl.intents.agent import ACTION, DIALOGUE, PARTS, CiceroConfig
from marl.intents.among_us_agent import TableAgent
from marl.metrics.stats import rate
from marl.metrics.wording import wording
from marl.planning.planner import PlannerConfig
from marl.rollout.cast import RoleConfig
from marl.rollout.games import env_maker
from marl.storage.checkpoint import save_policy
from tests.composing import composed_once, configure
from tests.marl.intents.test_among_us import ENV, talker

STUDY = (  # a small one
    "progress=false", "threads=1", "device=cpu", "base.games=20", "base.tokenizer_games=20", "base.epochs=1",
    "votes.steps=3", "epochs=1", "model.hidden_size=32", "model.layers=1", "model.intermediate_size=64", "tested=20",
    "control=4", "crew_games=2", "imposter_games=2", "concurrency=2", "cicero.draws=3", "cicero.candidates=2",
    "env.max_steps=60",
)  # fmt: skip


settings = composed_once("among_us_intents")


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder as the study writes it."""
    folder = tmp_path_factory.mktemp("runs") / "among-us-intents-s0"
    for name in (ACTION, DIALOGUE):
        save_policy(folder / name, talker(), {"game": "among_us", "made_of": {"env": {"style": "compact"}}})
    write_json(folder / PARTS, {"arm": "intent"})
    return f"{folder}+cicero"


def test_evaluation_and_transcripts(player: str, tmp_path: Path) -> None:
    table = ("env=among_us", "cast.crewmate.partners=0")
    small = ("games=4", "concurrency=4", "progress=false", "threads=1", "model.context=1024", "env.max_steps=60")
    evaluate.main(configure("evaluate", *table, f"players=[{player},careful]", f"out={tmp_path}", *small))
    episodes = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    own = [t for e in episodes for t in e["turns"] if e["players"][t["agent"]].endswith("+cicero")]
    assert own and all(t["thoughts"].startswith("intent: vote ") for t in own if t["kind"] == "SPEAK")


def test_a_seat_of_a_cast(player: str) -> None:
    env = {**ENV, "candidates": "living_others"}
    check_players({"crewmate": RoleConfig("learner"), "imposter": RoleConfig(player)}, env, env_maker(env)())
    limits, how = PlayConfig(games=2, concurrency=2), CiceroConfig()
    made = model_player(player, "c", talker(), limits, 5, 1.0, PlannerConfig(), how, "among_us", "compact")
    assert isinstance(made, TableAgent) and made.style == "compact"


def test_people_may_meet_it_in_a_study(player: str) -> None:
    runs, name = Path(player).parent, Path(player).name
    there = Opponents(runs, {"among_us": ENV}, device=torch.device("cpu"))
    assert there.of_condition(Condition(name), "among_us", "c").name == name
    for bad in (Condition("other+cicero"), Condition(name, iteration=1)):
        with pytest.raises(UserError, match=r"c\.opponent=.*\+cicero: must be a folder of intents in .* among_us"):
            there.of_condition(bad, "among_us", "c")


def test_a_game_that_asks_otherwise_than_it_learned_is_refused(player: str) -> None:
    check_plans(player, ENV)
    with pytest.raises(UserError, match=r"\+cicero learned with env\.belief=question\. Set it so; here it is vote"):
        check_plans(player, {**ENV, "belief": "vote"})


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("tested=0", "tested=0"),
        ("crew_games=0", "crew_games=0"),
        ("env.style=natural", r"env\.style=natural: this study plays Among Us in compact style"),
        ("env=dond", r"env=dond, env\.style=compact: this study plays Among Us"),
        ("cicero.among_us.giveaway=2", r"cicero\.among_us\.giveaway=2.*: must be from 0 to 1, or null"),
        ("votes.steps=-1", "steps=-1: must be at least 0"),
        ("temperature=-1", r"temperature=-1.*: must be a number from"),
        ("base.dropout=0.1", r"base\.dropout=0\.1: models of this study learn without it"),
    ],
)
def test_bad_settings_of_the_study(setting: str, error: str, tmp_path: Path) -> None:
    with pytest.raises((UserError, SystemExit), match=error):
        study.main(configure("among_us_intents", setting, f"runs={tmp_path}", "progress=false"))


def test_games_and_words_are_made_again_with_other_limits() -> None:
    """Files that the study keeps are named after everything that decides them."""
    made: Any = SimpleNamespace(models={}, env=ENV)

    def keys(*changed: str) -> tuple[dict, dict]:
        cfg = settings(*changed)
        return study.played_by(made, "crew: intents", 2, cfg, play_spec(cfg)), study.measured_by(made, cfg)

    games, words = keys()
    assert keys("epochs=3") == (games, words)
    shorter, same = keys("model.context=900")
    assert shorter != games and same == words
    assert keys("algo.play_bf16=true")[0] != games
    for change in ("model.max_new_tokens=9", "temperature=0.5", "cicero.top_p=0.5"):
        assert all(new != old for new, old in zip(keys(change), (games, words), strict=True)), change


def test_filters_that_are_on_are_counted_where_they_refuse_nothing() -> None:
    """4 of 552 unfinished draws in one seed, none of 510 in another: .0036 of both, and not the first seed's .0072."""
    assert study.filters_of("crew: intents") == [] and "value" in study.filters_of("imposter: no give-away filter")
    assert {"facts", "giveaway"} < {*study.filters_of("imposter: all filters")}
    assert {*study.filters_of("crew: all filters")} == {"repetition", "correspondence", "value"}
    counts = ({"drawn": 552, "refused/unfinished": 4}, {"drawn": 510})
    shares = [refused(each, study.filters_of("crew: intents"))["unfinished"] for each in counts]
    row = table_row("crew: intents", "filter/refused/unfinished", shares)
    assert (row.mean, row.high) == pytest.approx((2 / 552, 2 / 552 + 12.7062 * 2 / 552), rel=1e-4)
    assert (row.low, row.seeds, row.games) == (0.0, 2, 1062)


def test_differences_may_be_negative() -> None:
    worse = table_row("crew: votes - base", study.WON, [rate([False] * 9)])
    pair = table_row("crew: votes - base", study.WON, [rate([True]), rate([False])])
    assert worse.mean == 0 and pair.low < 0
    assert table_row("base", study.WON, [rate([True]), rate([False])]).low == 0
    for metric in ("intent/truthful", "filter/refused/facts", "filter/refused/giveaway"):
        assert wording(metric).label != metric and wording(metric).percent


@pytest.mark.slow
def test_the_study_goes_from_games_to_a_table(tmp_path: Path) -> None:
    """The second call only tabulates."""
    small = (*STUDY, f"runs={tmp_path}", f"publish={tmp_path}/out")
    study.main(configure("among_us_intents", *small))
    first = (tmp_path / "out" / "table.csv").read_text()
    rows = csv_rows(tmp_path / "out" / "table.csv")
    assert {*study.ARMS, "base", "annotation", "naive annotation", "intent"} <= {row["arm"] for row in rows}
    assert (tmp_path / "among-us-intents-s0" / PARTS).is_file()
    control = csv_rows(tmp_path / "out" / "control.csv.gz")
    study.main(configure("among_us_intents", *small[:-1], f"publish={tmp_path}/again"))
    assert (tmp_path / "again" / "table.csv").read_text() == first
    assert csv_rows(tmp_path / "again" / "control.csv.gz") == control

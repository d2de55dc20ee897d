"""`planner=pikl`: a policy that plans against itself without, from the command line's settings to the transcripts."""

import json
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from experiments import evaluate, play
from experiments.setup import entrants
from experiments.setup.players import check_players, played_as, player_slots, seat_players
from marl.agents.model import ModelAgent, PlayConfig
from marl.algorithms.ppo import PPOConfig
from marl.algorithms.rl_pikl import RLPiklConfig
from marl.common.errors import UserError
from marl.metrics.stats import Metrics
from marl.planning.planner import SLOTS, PlannerConfig, PlanningAgent
from marl.report.transcripts import episode_to_json
from marl.report.views import game_view
from marl.rollout.cast import RoleConfig, by_role
from marl.rollout.games import env_maker
from marl.rollout.rollout import rollout
from marl.rollout.seeds import draw_games
from marl.storage.checkpoint import save_policy
from tests.composing import cases, configure
from tests.marl.models import tiny_policy
from tests.marl.planners import negotiator

SMALL = [
    "planner=pikl",
    "env=dond",
    "env.max_entries=12",
    "games=6",
    "concurrency=6",
    "progress=false",
    "threads=1",
    "model.context=1024",
]


def settings(*overrides: str) -> DictConfig:
    return configure("evaluate", *SMALL, *overrides)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder as a finished run leaves it, as far as players need it."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    save_policy(folder / "policy", negotiator(), {"game": "dond", "base": None})
    return str(folder)


def test_a_planner_against_itself_without_planning_has_another_name(run: str, tmp_path: Path) -> None:
    evaluate.main(settings(f"players=[{run},{run}]", f"out={tmp_path}"))
    episodes = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert all(sorted(e["players"].values()) == ["small", "small+plan"] for e in episodes)
    conditions: dict[str, Metrics] = json.loads((tmp_path / "evaluation.json").read_text())["conditions"]
    assert conditions.keys() == {f"{run}+plan v {run}", "small+plan", "small"}


def test_players_named_with_plan_do_plan(run: str, tmp_path: Path) -> None:
    evaluate.main(
        settings(f"players=[scripted,{run}+plan]", "planner.lambdas=[0.3]", "games=4", f"out={tmp_path / 'a'}")
    )
    evaluate.main(
        settings(f"players=[{run}+plan,scripted]", "planner.lambdas=[0.3]", "games=4", f"out={tmp_path / 'b'}")
    )
    evaluate.main(settings(f"players=[{run},scripted]", "planner.lambdas=[0.3]", "games=4", f"out={tmp_path / 'c'}"))
    a, b, c = ((tmp_path / name / "episodes.jsonl").read_text() for name in "abc")
    assert b == c  # planner=pikl alone means the first player
    for text in (a, b):
        turns = [(e["players"][t["agent"]], t) for e in map(json.loads, text.splitlines()) for t in e["turns"]]
        assert {name for name, turn in turns if "planned" in turn} == {"small+plan"}
        claims = [(name, turn) for name, turn in turns if turn["text"].startswith("[propose] (") and not turn["error"]]
        assert {name for name, turn in claims if "planned" not in turn} == {"scripted"}  # no claim of a planner is free


def test_reports_show_the_plan() -> None:
    limits = {"slots": 4, "context": 1024, "max_new_tokens": 24}
    planner = PlanningAgent("p+plan", negotiator(), PlannerConfig(), "dond", **limits)
    seats = {"player_0": planner, "player_1": ModelAgent("p", negotiator(), **limits)}
    make_env = env_maker({"game": "dond", "style": "compact", "objective": 1.0, "max_entries": 12})
    games = rollout(draw_games(3, 1, count=8), lambda game, env: seats, make_env, 4)
    shown = [turn for e in games for turn in game_view(episode_to_json(e), "p")["turns"] if turn["plan"]]
    assert shown and all(turn["text"].removeprefix("proposes ") in turn["plan"] for turn in shown)
    assert all(turn["agent"] == "player_0" for turn in shown)


def test_a_partner_in_a_cast_plans() -> None:
    cast = {"negotiator": RoleConfig("learner", "base+plan", 1.0)}
    make_env = env_maker({"game": "dond", "style": "compact", "objective": 1.0, "max_entries": 12})
    limits = PPOConfig(concurrency=4, max_new_tokens=24, planner=PlannerConfig(lambdas=(0.3,), choose="own"))
    env = {"game": "dond", "style": "compact"}
    check_players(cast, env, make_env())
    slots, _ = player_slots(cast, make_env(), limits, dict.fromkeys(("learner", "base"), negotiator().lm.config))
    assert [s.more for s in slots] == [0, SLOTS]
    stand_ins = {"learner": ("learner", negotiator())}
    agents = seat_players(cast, make_env(), env, negotiator(), limits, 1.0, stand_ins)
    assert isinstance(agents["base+plan"], PlanningAgent)
    assert agents["base+plan"].config == PlannerConfig(lambdas=(0.3,))  # played, as it is the partner's own choice
    episodes = rollout(draw_games(3, 1, count=8), by_role(cast, agents), make_env, 4)
    planned = [(e.players[t.agent], t.planned) for e in episodes for t in e.turns if t.planned]
    assert planned and {name for name, _ in planned} == {"base+plan"}
    for name, message in (
        ("learner+plan", "a learner plans with algo=pikl"),
        ("scripted+plan", "has no policy to plan"),
    ):
        with pytest.raises(UserError, match=message):
            check_players({"negotiator": RoleConfig("learner", name, 1.0)}, env, make_env())


def test_a_person_plays_against_a_planner(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several deals: so small a model talks nonsense, in some until the game ends, and only claims are planned."""
    for seed in range(20):
        lines = chain(["[message] i want the balls"], repeat("[propose] (0 books, 0 hats, 0 balls)"))
        monkeypatch.setattr("builtins.input", lambda prompt="", lines=lines: next(lines))
        out = tmp_path / str(seed)
        play.main(configure("play", f"opponent={run}+plan", f"seed={seed}", "model.context=1024", f"out={out}"))
        (game,) = map(json.loads, (out / "episodes-001.jsonl").read_text().splitlines())
        assert sorted(game["players"].values()) == ["human", "small+plan"]
        assert game["about"]["temperature"] == 1.0 and game["about"]["planner"]["choose"] == "sample"
        if any("planned" in turn for turn in game["turns"]):
            return
    pytest.fail("nothing was planned in 20 games")


def test_one_player_plans_in_all_its_seats(run: str, tmp_path: Path) -> None:
    evaluate.main(settings(f"players=[{run}]", "games=2", f"out={tmp_path}"))
    (first, *_) = (tmp_path / "episodes.jsonl").read_text().splitlines()
    assert set(json.loads(first)["players"].values()) == {"small+plan"}


@cases(r"""
players=[scripted,base] | players\[0\]=scripted\+plan: scripted has no policy to plan from. Name a run's
players=[base,random+plan] | players\[1\]=random\+plan: random has no policy to plan from
players=[base] planner.choose=own | planner\.choose=own: only training notes plans without playing
players=[base] planner.partner=me | planner\.partner=me: must be one of mirror, view
players=[base] planner.lambdas=[-0.1] | planner\.lambdas=\(-0\.1,\): name at least one, each 0
players=[base] planner.lambdas=0.1 | planner\.lambdas=0\.1: must be a list
players=[base] planner.iterations=0 | planner\.iterations=0: must be at least 1
players=[base] planner.mistake=much | planner\.mistake=much: must be a number
players=[base] voices=[silence] | voices\[0\]=silence would make the proposals of players\[0\]=base\+plan
""")
def test_mistakes_are_refused_before_any_model(
    overrides: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrants, "find_base", lambda *args: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=said):
        evaluate.main(settings(*overrides))


def test_games_of_the_base_are_shared_only_by_runs_whose_others_play_alike(tmp_path: Path) -> None:
    def cast(partner: str) -> dict[str, RoleConfig]:
        return {"negotiator": RoleConfig(partner=partner, partners=1.0)}

    weak, strong = (PlayConfig(), RLPiklConfig(planner=PlannerConfig(lambdas=(1000.0,))))
    assert played_as(cast("base"), weak) == played_as(cast("careful"), strong) == {}
    assert played_as(cast("base+plan"), weak) != played_as(cast("base+plan"), strong)
    other = f"{tmp_path}/run"
    save_policy(tmp_path / "run" / "policy", tiny_policy(), {"game": "dond"})
    before = played_as(cast(other), weak)
    changed = tiny_policy()
    with torch.no_grad():
        next(changed.parameters()).add_(1.0)
    save_policy(tmp_path / "run" / "policy", changed, {"game": "dond"})
    assert set(before) == {"policies"} and played_as(cast(other), weak) != before

"""The benchmark, at its quick size: what must hold whatever the clock says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module

from envs.among_us_v0 import COMPACT_TOKENS, AmongUs
from experiments import benchmark
from experiments.baselines import GenerateAgent, trl_version
from experiments.benchmark_figures import along, line, parts, targets
from experiments.measure import PHASES, Counts, Shape, Stopwatch
from experiments.pieces import STAGE_GAMES, game_alone
from experiments.workload import ReplayAgent, Script, record
from marl.agents import Agent
from marl.config import make, plain
from marl.errors import UserError
from marl.games import env_maker, game_module
from marl.policy import Policy, tiny_lm
from marl.pretrain import scripted_texts
from marl.rollout import everyone, rollout
from marl.tokens import Tokens, train_tokenizer
from marl.types import Episode

CPU = torch.device("cpu")


def run(*overrides: str) -> dict[str, Any]:
    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose("benchmark", overrides=["bench=quick", "device=cpu", *overrides])
    benchmark.main(cfg)
    found: dict[str, Any] = json.loads((Path(cfg.out) / "benchmark.json").read_text())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("benchmark")
    return run(f"out={out}") | {"out": out}


def test_it_goes_on_from_what_was_measured(found: dict[str, Any], tmp_path: Path) -> None:
    """Nothing is measured twice, and nothing is lost to other settings."""
    path, before = tmp_path / "benchmark.json", json.loads((found["out"] / "benchmark.json").read_text())
    lost = before["around"].pop()
    before["around"][0]["repeats"].pop()
    path.write_text(json.dumps(before))
    after = run(f"out={tmp_path}", "minutes=60")
    assert after["around"][-1]["point"] == lost["point"] and len(after["around"][-1]["repeats"]) == 2
    assert after["around"][0]["repeats"][:1] == before["around"][0]["repeats"]
    assert len(after["around"][0]["repeats"]) == 2
    assert after["around"][1:-1] == before["around"][1:] and after["baselines"] == before["baselines"]
    assert after["alone"] == before["alone"]
    fresh = run(f"out={tmp_path}", "seed=1", "minutes=0")
    assert json.loads((tmp_path / "benchmark-1.json").read_text()) == after
    assert not any(row["repeats"] for row in fresh["around"] + fresh["baselines"])
    assert fresh["around"][0]["skipped"] == "the time set as `minutes` was spent"


def test_what_has_no_room_is_not_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "free_memory", lambda device: 1_000)
    found = run(f"out={tmp_path}", "minutes=0")
    for row in found["around"] + found["baselines"][:3]:
        assert row["skipped"].startswith("needs about") and not row["repeats"]


def measured(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in found["around"] + found["baselines"] if row["repeats"]]


def test_everything_is_measured(found: dict[str, Any]) -> None:
    assert [row["engine"] for row in found["baselines"]] == ["ours", "generate", "generate, cache kept", "TRL"]
    for row in found["around"] + found["baselines"][:3]:
        assert not row["skipped"] and len(row["repeats"]) == found["settings"]["repeats"]
    trl = found["baselines"][3]
    assert bool(trl["repeats"]) == (trl_version() is not None) != bool(trl["skipped"])
    assert trl["repeats"] or "pip install -e '.[bench]' -c constraints.txt" in trl["skipped"]
    assert (found["out"] / "cost.svg").read_text().count("<svg") == 1


def test_what_needs_no_model_is_measured_alone(found: dict[str, Any]) -> None:
    first, *others = found["alone"]["game"]
    assert first["games"] == 3 and len(others) + 1 == found["settings"]["repeats"]
    assert all(other["agent_steps"] == first["agent_steps"] for other in others)  # the same games
    assert first["agent_steps_per_second"] / first["games_per_second"] == pytest.approx(first["agent_steps"] / 3)
    sizes = [(each["games"], each["players"], each["actions"]) for each in found["alone"]["solver"]]
    assert sizes == list(STAGE_GAMES) and all(each["seconds_per_iteration"] > 0 for each in found["alone"]["solver"])


def test_agent_steps_are_living_players_times_calls_of_step() -> None:
    """Nobody can be killed or voted out, so that all five live through all twelve steps."""
    env = {"game": "among_us", "max_steps": 12, "cooldown": 100, "tasks": 9}
    assert game_alone(env_maker(env), games=2, seed=0)["agent_steps"] == 2 * 12 * 5


def test_the_dead_make_no_agent_steps() -> None:
    """Each death takes one living player from all later steps: what is counted is what the living lived through."""
    settings = {"game": "among_us", "cooldown": 3, "max_steps": 60}
    lived, alive = 0, []

    class Watched(AmongUs):
        def step(self, actions: dict[str, str]) -> Any:
            nonlocal lived
            alive.append(int(self.state()[:, 2].sum()))
            lived += alive[-1]
            return super().step(actions)

    rules = {name: value for name, value in settings.items() if name != "game"}
    assert game_alone(lambda: Watched(**rules), games=5, seed=0)["agent_steps"] == lived
    assert min(alive) < 5


def test_all_engines_play_the_same_games(found: dict[str, Any]) -> None:
    """The command itself compares every stream token for token; here the numbers that it tells."""
    played = [row["played"] for row in found["baselines"] if row["repeats"]]
    assert all(facts == played[0] for facts in played)
    assert 0 < played[0]["sampled"] < played[0]["tokens"] and played[0]["answers"] > 0
    for row in found["around"]:
        if (row["point"]["games"], row["point"]["context"]) == (2, 256) and row["point"]["players"] == 5:
            assert row["played"] == found["around"][0]["played"]  # whatever the model's size and precision
        for repeat in row["repeats"]:
            # every token is read once; a seat's last reply may end unread, as nothing follows it
            unread = row["played"]["tokens"] - sum(repeat["read"].values())
            assert 0 <= unread <= row["played"]["slots"] * found["settings"]["reply_tokens"]


def test_shares_add_up(found: dict[str, Any]) -> None:
    for row in measured(found):
        assert set(row["summary"]["shares"]) == set(PHASES)
        assert sum(row["summary"]["shares"].values()) == pytest.approx(1)
        assert min(row["summary"]["shares"].values()) >= 0
        for repeat in row["repeats"]:
            assert sum(repeat["seconds"].values()) == pytest.approx(repeat["figures"]["seconds"])


def test_ratios_are_those_of_the_repeats(found: dict[str, Any]) -> None:
    ours = found["baselines"][0]
    for row in [row for row in found["baselines"][1:] if row["repeats"]]:
        for part, ratio in found["ratios"][row["engine"]].items():
            each = [parts(a)[part] / parts(b)[part] for a, b in zip(row["repeats"], ours["repeats"], strict=True)]
            assert ratio["median"] == pytest.approx(np.median(each))
            assert ratio["low"] == pytest.approx(min(each)) and ratio["high"] == pytest.approx(max(each))
    assert set(found["ratios"]["generate"]) == {"rollout"}  # it learns nothing
    assert set(found["ratios"]["bfloat16"]) == {"rollout", "update", "rollout and update"}


def test_nothing_is_faster_than_its_limit(found: dict[str, Any]) -> None:
    """So small a model is dozens of times slower than products and copies alone would be: no clock decides this."""
    for row in found["around"]:
        for repeat in row["repeats"]:
            for phase in repeat["limit"].values():
                assert phase["limit"] == max(phase["arithmetic"], phase["memory"])
            limit = sum(phase["limit"] for phase in repeat["limit"].values())
            assert repeat["figures"]["limit_seconds"] == pytest.approx(limit)
            assert limit < repeat["figures"]["seconds"]


def test_a_starved_measurement_says_so(found: dict[str, Any]) -> None:
    repeat = found["around"][0]["repeats"][0]
    assert repeat["figures"]["on_processor"] == repeat["on_processor"] > 0
    for share, told in ((0.2, True), (1.6, False)):
        assert ("the machine is busy" in line({"figures": {**repeat["figures"], "on_processor": share}})) == told


def test_one_thing_changes_along_an_axis(found: dict[str, Any]) -> None:
    assert [place for place, _ in along("games", found["around"])] == [1, 2]
    assert [place for place, _ in along("context", found["around"])] == [192, 256]
    assert [place for place, _ in along("players", found["around"])] == [4, 5]
    assert len(along("width", found["around"])) == 2


def test_what_is_meant_to_be_reached_is_told(found: dict[str, Any]) -> None:
    told = {t["name"]: t for t in found["targets"]}
    assert len(told) == 11 and told["rollout of a game among more at once, beside one among 64"]["value"] is None
    for t in told.values():
        assert (t["met"] is None) == (t["value"] is None)
    decode = told["decode: share of its limit"]
    assert decode["value"] == found["around"][0]["summary"]["figures"]["decode_of_limit"]["median"]


def test_targets_of_made_up_figures() -> None:
    """Ours takes 1 s a game at 64 games and 1.2 at 256, half of it in the rules; `generate` takes twelve times that."""

    def row(engine: str, games: int, seconds: float, **figures: float) -> dict[str, Any]:
        took = dict.fromkeys(PHASES, 0.0) | {"game": seconds / 2, "decode": seconds / 2}
        shares = {phase: each / seconds for phase, each in took.items()}
        summary = {"figures": {name: {"median": value} for name, value in figures.items()}, "shares": shares}
        point = {"games": games, "players": 5, "context": 1024, "width": 256, "dtype": "float32"}
        return {"engine": engine, "point": point, "repeats": [{"seconds": took}], "summary": summary}

    centre = row("ours", 64, 64.0, decode_of_limit=0.5, update_of_limit=0.59, peak_bytes=100.0, predicted_bytes=85.0)
    around = [centre, row("ours", 256, 1.2 * 256)]
    baselines = [row("ours", 64, 1.0), row("generate", 64, 12.0)]
    found = {
        t["name"]: (t["value"], t["met"])
        for t in targets(around, baselines, {"game": [{"agent_steps_per_second": 19e3}]})
    }
    assert found == {
        "generate: times as long, rollout": (12.0, True),
        "TRL: times as long, rollout and update": (None, None),
        "decode: share of its limit": (0.5, True),
        "update, float32: share of its limit": (0.59, False),
        "update, bfloat16: share of its limit": (None, None),
        "game, text and tokenising: share of a rollout": (0.5, False),
        "rollout of a game among more at once, beside one among 64": (pytest.approx(1.2), False),
        "a token at the longest context: growth of time by that of work": (None, None),
        "the game with random players, one core: agent-steps/s": (19e3, False),
        "memory as predicted, float32: of what it took": (0.85, False),
    }


def test_points_of_other_numbers_of_games_end_at_the_same_step(tmp_path: Path) -> None:
    """Else more games would be shorter ones: the more there are, the sooner one of them fills the context."""
    with initialize_config_module("conf", version_base="1.3"):
        given = plain(compose("benchmark", overrides=["bench=quick"]))
    known = benchmark.Settings.__dataclass_fields__
    settings = make(benchmark.Settings, {k: v for k, v in given.items() if k in known}, "benchmark")
    env = {**given["env"], **given["games"]["among_us"]["env"]}
    tokens = Tokens(train_tokenizer(scripted_texts("among_us", [env_maker(env)], 0, games=20), COMPACT_TOKENS, 1024))
    few, many = (benchmark.Point(games, 5, 384, 32) for games in (1, 24))
    alone, together = (
        benchmark.Bench(env, "max_steps", settings, CPU, tokens, tmp_path, points) for points in ([few], [few, many])
    )
    assert together.script(few).cut == together.script(many).cut < alone.script(few).cut
    assert together.script(few, cut=3).cut == 3


def test_no_time_is_left(tmp_path: Path) -> None:
    found = run("minutes=0", f"out={tmp_path}")
    assert not measured(found)
    assert all("minutes" in row["skipped"] or "not installed" in row["skipped"] for row in found["baselines"])


def test_the_full_size_spans_what_it_says() -> None:
    with initialize_config_module("conf", version_base="1.3"):
        given = plain(compose("benchmark"))
    known = benchmark.Settings.__dataclass_fields__
    settings = make(benchmark.Settings, {k: v for k, v in given.items() if k in known}, "benchmark")
    points = benchmark.points_of(settings, None)
    centre = points[0]
    assert (centre.games * centre.players, centre.context, centre.players) == (255, 1024, 5)
    assert {p.games for p in points} >= {16, 1024} and {p.context for p in points} == {256, 512, 1024, 2048}
    assert {p.players for p in points} == {4, 5, 6, 7} and len(set(points)) == len(points)
    sizes = []
    for width in settings.axes.width:
        lm = tiny_lm(1024, hidden_size=width, intermediate_size=benchmark.INNER * width, layers=settings.layers)
        sizes.append(round(sum(p.numel() for p in lm.parameters()) / 1e6))
    assert sizes == [1, 4, 9, 16] and settings.centre.width == settings.axes.width[1]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("centre.slots=0", "centre.slots=0: must be at least 1"),
        ("axes.games=[0]", "axes.games=0: must be at least 1"),
        ("repeats=often", "benchmark.repeats=often: must be a whole number"),
        ("centre.context=8", "context=8: not even the shortest game fits"),
    ],
)
def test_what_cannot_be_measured(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        run(override, f"out={tmp_path}")


# -- Its parts ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["among_us", "dond"])
def workload(request: pytest.FixtureRequest) -> tuple[Policy, Script]:
    game = request.param
    env, cut = {
        "among_us": ({"game": "among_us", "style": "compact", "players": 4, "max_steps": 40}, "max_steps"),
        "dond": ({"game": "dond", "style": "compact", "max_entries": 20}, "max_entries"),
    }[game]
    texts = scripted_texts(game, [env_maker(env)], 0, games=20)
    tokens = Tokens(train_tokenizer(texts, game_module(game).COMPACT_TOKENS, 1024))
    script = record(env, cut, 256, 3, tokens, reply_tokens=12, seed=0)
    policy = Policy(tiny_lm(tokens.size, hidden_size=32, layers=2, context=256), tokens).eval()
    return policy, script


def played(agent: Agent, script: Script) -> list[Episode]:
    episodes = rollout(script.games, everyone(agent), script.make_env, len(script.games))
    script.check(episodes)
    return episodes


def test_engines_believe_the_same(workload: tuple[Policy, Script]) -> None:
    """Belief answers are computed, not forced: every engine reads the right tokens at the right places."""
    policy, script = workload
    watch = Stopwatch(CPU)
    ours = played(ReplayAgent(policy, script, 256, watch), script)
    assert sum(len(e.beliefs) for e in ours) == script.answers > 0
    for keep_cache in (False, True):
        for rows in (1, 64):
            theirs = played(GenerateAgent(policy, script, watch, rows, keep_cache), script)
            for a, b in zip(ours, theirs, strict=True):
                for mine, other in zip(a.beliefs, b.beliefs, strict=True):
                    np.testing.assert_allclose(other.probs, mine.probs, atol=1e-5)


def test_recorded_games_fit_their_context(workload: tuple[Policy, Script]) -> None:
    _, script = workload
    assert script.longest <= 256
    assert script.sampled == sum(len(ids) for own in script.replies.values() for ids in own)
    said = [len(ids) for own in script.replies.values() for ids in own if len(ids) > 1]
    assert said and max(said) >= 12


def test_the_stopwatch_counts_nothing_twice() -> None:
    watch = Stopwatch(CPU)
    with watch.phase("bookkeeping"):
        with watch.phase("prefill"):
            before = watch.seconds["bookkeeping"]
            sum(range(10_000))
        assert watch.seconds["prefill"] > 0 and watch.seconds["bookkeeping"] == before
    assert watch.seconds["bookkeeping"] > before


def test_counted_work() -> None:
    counts = Counts()
    counts.add(np.array([0, 10]), np.array([3, 1]))  # 1 + 2 + 3 pairs, and 11
    assert (counts.passes, counts.tokens, counts.attended, counts.cached) == (1, 4, 17, 14)


def test_a_models_shape(workload: tuple[Policy, Script]) -> None:
    policy, _ = workload
    shape = Shape.of(policy)
    # tiny_lm: 2 layers of width 32, inside 384; queries and outputs 32 x 32, one key head and one value head of 8
    assert shape.body == 2 * (2 * 32 * 32 + 2 * 32 * 8 + 3 * 32 * 384)
    assert shape.attention == 2 * 2 * 32 and shape.cache == 2 * 2 * 8
    assert shape.head == 32 * policy.tokens.size and shape.output == (32, policy.tokens.size)
    assert sum(a * b for a, b in shape.matrices) == shape.body

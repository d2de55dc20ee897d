"""The benchmark, at its quick size: what must hold whatever the clock says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envs.among_us.environment import AmongUs
from experiments import benchmark
from experiments.bench import measure
from experiments.bench.baselines import GenerateAgent, has_trl, trl_iteration
from experiments.bench.figures import figure_of, table
from experiments.bench.measure import Bench, Row, game_alone
from experiments.bench.settings import Point, Settings
from experiments.setup.config import make, plain
from marl.agents.model import ModelAgent
from marl.common.errors import UserError
from marl.metrics.stats import Interval
from marl.model.policy import Policy, tiny_lm
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rollout.games import env_maker, game_module
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Kind
from tests.composing import configure

ENVS: dict[str, dict[str, Any]] = {
    "among_us": {"game": "among_us", "style": "compact", "players": 4, "max_steps": 30},
    "dond": {"game": "dond", "style": "compact", "max_entries": 12},
}


def run(*overrides: str) -> dict[str, Any]:
    short = ["env.max_steps=8", "long_games.among_us.messages_each=1", "repeats=1"]
    cfg = configure("benchmark", "bench=quick", "device=cpu", *short, *overrides)
    benchmark.main(cfg)
    found: dict[str, Any] = json.loads((Path(cfg.out) / "benchmark.json").read_text())
    return found


def settings_of(*overrides: str) -> Settings:
    given = plain(configure("benchmark", *overrides))
    return make(Settings, {k: v for k, v in given.items() if k in Settings.__dataclass_fields__}, "benchmark")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("benchmark")
    return run(f"out={out}") | {"out": out}


@pytest.fixture(scope="module", params=["among_us", "dond"])
def policy(request: pytest.FixtureRequest) -> tuple[str, Policy]:
    game = request.param
    texts = scripted_texts(game, [env_maker(ENVS[game])], 0, games=20)
    tokens = Tokens(train_tokenizer(texts, game_module(game).COMPACT_TOKENS, 512))
    return game, Policy(tiny_lm(tokens.size, hidden_size=32, layers=2, context=256), tokens).eval()


def test_everything_is_measured(found: dict[str, Any]) -> None:
    assert [row["engine"] for row in found["rows"]] == ["ours"] * 3 + ["generate", "TRL"]
    for row in found["rows"][:4]:
        assert not row["skipped"] and len(row["repeats"]) == found["settings"]["repeats"]
        for repeat in row["repeats"]:
            assert repeat["rollout_tokens_per_second"] > repeat["games_per_second"] > 0
            assert 0 < repeat["mean_stream"] <= row["point"]["context"] and repeat["peak_bytes"] >= 0
            assert ("update_tokens_per_second" in repeat) == (row["engine"] == "ours")  # `generate` learns nothing
    trl = found["rows"][4]
    assert bool(trl["repeats"]) == has_trl() != bool(trl["skipped"])
    assert trl["repeats"] or "pip install -e '.[bench]' -c constraints.txt" in trl["skipped"]
    assert (found["out"] / "speed.svg").read_text().count("<svg") == 1
    printed = table(found["rows"]).splitlines()
    assert "memory, MB" in printed[0] and sum(line.startswith(("ours", "generate")) for line in printed) == 4


def test_a_figure_is_the_median_of_the_repeats_with_its_spread() -> None:
    row = {"repeats": [{"games_per_second": value, "peak_bytes": 1e6 * value} for value in (3.0, 1.0, 2.0)]}
    assert figure_of(row, "games_per_second") == figure_of(row, "peak_bytes") == Interval(2.0, 1.0, 3.0, 3)
    assert figure_of(row, "update_tokens_per_second") is None and figure_of({"repeats": []}, "peak_bytes") is None


def test_a_point_without_room_is_left_out(monkeypatch: pytest.MonkeyPatch, policy: tuple[str, Policy]) -> None:
    game, model = policy
    bench = Bench(ENVS[game], settings_of("bench=quick"), torch.device("cpu"), model.tokens)
    assert bench.lacking(bench.rows[0]) == ""
    monkeypatch.setattr("marl.decoding.memory.free_memory", lambda device: 1_000)
    assert bench.lacking(bench.rows[0]).startswith("Not enough memory: even games=1 needs")
    monkeypatch.setattr(Bench, "take", lambda *given: pytest.fail("a point without room was measured"))
    bench.rows = bench.rows[:3]
    bench.measure(lambda: None)
    assert all(row.skipped and not row.repeats for row in bench.rows)


def test_memory_that_runs_out_ends_one_row(monkeypatch: pytest.MonkeyPatch, policy: tuple[str, Policy]) -> None:
    game, model = policy
    bench = Bench(ENVS[game], settings_of("bench=quick"), torch.device("cpu"), model.tokens)
    bench.rows = bench.rows[:1] + bench.rows[2:3]

    def take(self: Bench, engine: str, point: Point) -> dict[str, float | None]:
        if point == bench.rows[0].point:
            raise torch.OutOfMemoryError("no room left")
        return {"rollout_tokens_per_second": 1.0}

    monkeypatch.setattr(Bench, "take", take)
    bench.measure(lambda: None)
    assert bench.rows[0].skipped == "ran out of memory (no room left)" and not bench.rows[0].repeats
    assert len(bench.rows[1].repeats) == 2


def test_generate_believes_what_this_engine_believes(policy: tuple[str, Policy]) -> None:
    """Compares one stream: the games that `generate` played are read again by this engine, token for token."""
    game, model = policy
    drawn, make_env = draw_games(0, count=3), env_maker(ENVS[game])
    torch.manual_seed(0)
    theirs = rollout(drawn, everyone(GenerateAgent(model, 4, 256, 12)), make_env, 3)
    assert sum(len(episode.beliefs) for episode in theirs) > 0
    for episode in theirs:
        for agent, stream in episode.streams.items():
            engine = ModelAgent("ours", model, slots=1, context=256).engine
            hidden = engine.read([engine.allocate()], [stream.tokens])
            for belief in (b for b in episode.beliefs if b.listener == agent):
                logits = model.logits(hidden[[belief.position]])[0, list(belief.candidate_ids)]
                np.testing.assert_allclose(belief.probs, logits.double().softmax(-1).detach().numpy(), atol=1e-5)


def test_generate_chooses_legally_and_keeps_to_its_limits(policy: tuple[str, Policy]) -> None:
    """A small context is filled and never exceeded; players without room left fall silent."""
    game, model = policy
    context = {"among_us": 120, "dond": 60}[game]
    torch.manual_seed(0)
    agent = GenerateAgent(model, 4, context, 12)
    episodes = rollout(draw_games(1, count=3), everyone(agent), env_maker(ENVS[game]), 3)
    turns = [turn for episode in episodes for turn in episode.turns]
    for turn in turns:
        assert len(turn.reply_ids) <= (1 if turn.kind.name == "CHOOSE" else 12)
        assert not set(turn.reply_ids) & set(model.tokens.unspeakable)
    assert all(turn.reply_ids[0] in turn.legal for turn in turns if turn.kind.name == "CHOOSE" and turn.reply_ids)
    longest = max(len(stream) for episode in episodes for stream in episode.streams.values())
    assert 0.8 * context < longest <= context and any(not turn.reply_ids for turn in turns)
    for episode in episodes:
        for stream in episode.streams.values():
            assert sum(kind in (Kind.CHOICE, Kind.SPEECH) for kind in stream.kinds) < len(stream)


@pytest.mark.skipif(not has_trl(), reason="TRL is not installed")
def test_trl_learns_from_the_first_games(policy: tuple[str, Policy]) -> None:
    game, model = policy
    drawn, make_env, played = draw_games(0, count=3), env_maker(ENVS[game]), []

    def collect(actor: Policy) -> list[Any]:
        played.extend(rollout(drawn, everyone(GenerateAgent(actor, 4, 256, 8)), make_env, 3))
        return played

    players = len(make_env().possible_agents)
    seconds, tokens = trl_iteration(model, collect, {"learned": 1, "players": players}, 256, 2048)
    assert seconds > 0 and tokens == sum(map(len, played[0].streams.values()))


def test_agent_steps_are_living_players_times_calls_of_step() -> None:
    """Nobody can be killed or voted out, so that all five live through all twelve steps."""
    env = {"game": "among_us", "max_steps": 12, "cooldown": 100, "tasks": 9}
    assert game_alone(env_maker(env), games=2, seed=0)["agent_steps"] == 2 * 12 * 5


def test_the_dead_make_no_agent_steps() -> None:
    """Each death removes one player from all later steps, so only steps of living players are counted."""
    alive: list[int] = []

    class Watched(AmongUs):
        def step(self, actions: dict[str, str]) -> Any:
            alive.append(int(self.state()[:, 2].sum()))
            return super().step(actions)

    assert game_alone(lambda: Watched(cooldown=3, max_steps=60), games=5, seed=0)["agent_steps"] == sum(alive)
    assert min(alive) < 5


@pytest.mark.parametrize("bench", ["full", "gpu", "quick"])
def test_shipped_points_are_models(bench: str) -> None:
    """The first is this engine's plain one in float32: baselines play with its model."""
    settings = settings_of(f"bench={bench}")
    assert settings.points[0].dtype == "float32" and len(set(settings.points)) == len(settings.points)
    assert any(point.dtype == "bfloat16" for point in settings.points)
    for point in settings.points:
        assert point.width // point.heads <= 128 and measure.shape(point)["hidden_size"] == point.width
        assert Row("ours", point, 1).skipped == ""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("points=[]", r"points=\[\]: must name at least one"),
        ("repeats=0", "repeats=0: must be at least 1"),
        ("points=[{games: 0, context: 9, width: 8, layers: 1, heads: 1, kv_heads: 1}]", "games=0: must be at least 1"),
        ("points=[{games: 1, context: 9, width: 9, layers: 1, heads: 1, kv_heads: 1}]", "must be an even number"),
        ("points=[{games: 1, context: 9, width: 8, layers: 1, heads: 2, kv_heads: 3}]", "kv_heads must divide heads"),
        (
            "points=[{games: 1, context: 9, width: 8, layers: 1, heads: 1, kv_heads: 1, dtype: half}]",
            "dtype=half: must be one of float32, bfloat16",
        ),
        ("vocab_size=many", "vocab_size=many: must be a whole number"),
    ],
)
def test_mistakes_are_refused_before_anything_is_measured(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        run(override, f"out={tmp_path}")
    assert not list(tmp_path.iterdir())

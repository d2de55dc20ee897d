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
from experiments.bench.limits import Limits
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

POINT = "{games: 2, context: 256, width: 32, layers: 1, heads: 2, kv_heads: 1}"
LIMITS = Limits(bytes_per_second=1e9, flops={"float32": 1e9, "bfloat16": 2e9})
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


def bench_of(policy: tuple[str, Policy], *overrides: str) -> Bench:
    game, model = policy
    return Bench(ENVS[game], settings_of(*overrides), torch.device("cpu"), model.tokens, LIMITS)


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
            for share in ("update_share", "decode_share"):
                assert (repeat.get(share, 0) > 0) == (row["engine"] == "ours")
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


@pytest.mark.parametrize("decode_steps", [1, 8])
def test_shares_of_the_limits_are_as_computed_by_hand(
    policy: tuple[str, Policy], decode_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LIMITS.update_share(parameters=100, tokens_per_second=5e5, dtype="float32") == 0.3
    assert LIMITS.update_share(parameters=100, tokens_per_second=5e5, dtype="bfloat16") == 0.15
    assert LIMITS.decode_share(weights=300, cache=200, passes_per_second=1e6) == 0.5

    def two_seconds(call: Any, device: torch.device) -> float:
        call()
        return 2.0

    monkeypatch.setattr(measure, "clocked", two_seconds)
    bench = bench_of(policy, "bench=quick", f"points=[{POINT}]", f"decode_steps={decode_steps}")
    point = bench.settings.points[0]
    model = Policy(tiny_lm(**bench.shape(point)), bench.tokens).eval()
    agent = ModelAgent("ours", model, slots=5, context=point.context)
    found = bench.decode(agent, point)
    assert found["decode_passes_per_second"] == 32 / 2.0
    # Numbers a layer: queries and output of 32 x 32, keys and values of 32 x 16, an MLP of 3 * 32 x 96, two norms.
    weights = 4 * (32 * bench.tokens.size + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96 + 2 * 32 + 32)
    cache = 2 * 128 * (2 * 16 * 4)  # streams, tokens of each, bytes of a token's key and value
    assert found["decode_share"] == (weights + cache) * 16 / 1e9


def test_what_was_cut_off_goes_on_with_the_row_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    most = 1

    def take(self: Bench, engine: str, point: Point) -> dict[str, float | None]:
        if point.games > 1:  # else a first game that is not counted
            if len(taken) == most:
                raise KeyboardInterrupt
            taken.append(point.width)
        return {"rollout_tokens_per_second": 1.0, "update_tokens_per_second": 1.0}

    monkeypatch.setattr(Bench, "take", take)
    monkeypatch.setattr(benchmark, "measure_limits", lambda device, dtypes: LIMITS)
    other = POINT.replace("32", "64")
    asked = ["baseline_games=0", f"out={tmp_path}"]
    with pytest.raises(KeyboardInterrupt):
        run(*asked, f"points=[{POINT},{other}]")
    rows = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    assert [len(row["repeats"]) for row in rows] == [1, 0] and taken == [32]
    taken.clear()
    most = 9
    assert [len(row["repeats"]) for row in run(*asked, f"points=[{POINT},{other}]")["rows"]] == [1, 1]
    assert taken == [64]
    more = POINT.replace("32", "96")
    rows = run(*asked, f"points=[{more}]")["rows"]
    assert [row["point"]["width"] for row in rows] == [96, 32, 64] and taken == [64, 96]  # the others are kept
    monkeypatch.setattr(benchmark, "git_commit", lambda: "another")
    assert len(run(*asked, f"points=[{POINT}]")["rows"]) == 1 and taken == [64, 96, 32]


def test_what_was_measured_with_other_settings_does_not_count(tmp_path: Path) -> None:
    about: dict[str, Any] = {
        "env": {}, "device": "cpu", "deterministic": False, "settings": {"update_rows": 4, "repeats": 1},
        "hardware": {}, "versions": {"torch": "2", "trl": "1"}, "git_commit": "a",
    }  # fmt: skip
    rows = [{"engine": "ours"}, {"engine": "TRL"}]
    path = tmp_path / "benchmark.json"
    assert benchmark.measured_before(path, about) == {}
    path.write_text(json.dumps({**about, "rows": rows, "limits": {}, "game_alone": {}}))
    assert benchmark.measured_before(path, {**about, "settings": {"update_rows": 4, "repeats": 3}})["rows"] == rows
    assert benchmark.measured_before(path, {**about, "versions": {"torch": "2"}})["rows"] == rows[:1]
    for name in ("env", "hardware", "settings", "versions"):
        assert benchmark.measured_before(path, {**about, name: {"update_rows": 8}}) == {}, name
    for name in ("device", "deterministic", "git_commit"):
        assert benchmark.measured_before(path, {**about, name: "other"}) == {}, name


def test_the_first_point_for_a_gpu_is_smollm2(policy: tuple[str, Policy]) -> None:
    row = bench_of(policy, "bench=gpu").rows[0]
    assert row.parameters == 134_515_008  # as on the model's card


def test_a_point_without_room_is_left_out(monkeypatch: pytest.MonkeyPatch, policy: tuple[str, Policy]) -> None:
    bench = bench_of(policy, "bench=quick")
    assert bench.lacking(bench.rows[0]) == ""
    monkeypatch.setattr("marl.decoding.memory.free_memory", lambda device: 1_000)
    assert bench.lacking(bench.rows[0]).startswith("Not enough memory: even games=1 needs")
    monkeypatch.setattr(Bench, "take", lambda *given: pytest.fail("a point without room was measured"))
    bench.rows = bench.rows[:3]
    bench.measure(lambda: None)
    assert all(row.skipped and not row.repeats for row in bench.rows)


def test_memory_that_runs_out_ends_one_row(monkeypatch: pytest.MonkeyPatch, policy: tuple[str, Policy]) -> None:
    bench = bench_of(policy, "bench=quick")
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
        assert point.width // point.heads <= 128
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
        (f"points=[{POINT.replace('}', ', vocab: 500}')}]", "vocab=500: must be at least vocab_size=1024"),
        ("vocab_size=many", "vocab_size=many: must be a whole number"),
    ],
)
def test_mistakes_are_refused_before_anything_is_measured(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        run(override, f"out={tmp_path}")
    assert not list(tmp_path.iterdir())

"""Parts of the benchmark: recorded games, the engines that play them, counted work and its limit."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from experiments.bench.baselines import ALL_CALLS, GenerateAgent, trl_iteration, trl_version
from experiments.bench.figures import labels
from experiments.bench.measure import PHASES, Counts, Rates, Shape, Stopwatch, UpdateCounts, limits, step_alone
from experiments.bench.workload import FULL, ReplayAgent, Script, play_recorded, record
from marl.agents.base import Agent, Key
from marl.model.policy import Policy, tiny_lm
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rollout.games import env_maker, game_module
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode, Stream

CPU = torch.device("cpu")


ENVS: dict[str, dict[str, Any]] = {
    "among_us": {"game": "among_us", "style": "compact", "players": 4, "max_steps": 40},
    "dond": {"game": "dond", "style": "compact", "max_entries": 20},
}


def tokens_of(game: str) -> Tokens:
    texts = scripted_texts(game, [env_maker(ENVS[game])], 0, games=20)
    return Tokens(train_tokenizer(texts, game_module(game).COMPACT_TOKENS, 1024))


@pytest.fixture(scope="module", params=["among_us", "dond"])
def workload(request: pytest.FixtureRequest) -> tuple[Policy, Script]:
    game = request.param
    env, tokens = ENVS[game], tokens_of(game)
    script = record(env, 256, 3, tokens, reply_tokens=12, seed=0)
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


def test_questions_of_a_call_are_answered_in_one_product(
    workload: tuple[Policy, Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As this engine answers those of a pass."""
    policy, script = workload
    agent = GenerateAgent(policy, script, Stopwatch(CPU), 64, False)
    products: list[int] = []
    calls: list[int] = []
    logits, answer = policy.logits, agent._answer

    def multiply(hidden: torch.Tensor) -> torch.Tensor:
        products.append(len(hidden))
        return logits(hidden)

    def call(keys: Sequence[Key]) -> None:
        calls.append(len(keys))
        answer(keys)

    monkeypatch.setattr(policy, "logits", multiply)
    monkeypatch.setattr(agent, "_answer", call)
    played(agent, script)
    assert len(products) == len(calls) < sum(products) == script.answers


@pytest.mark.parametrize("few_shapes", [False, True], ids=["as many rows as there are", "shapes of a captured graph"])
@pytest.mark.parametrize("steps", [1, 4])
def test_speech_in_several_steps_is_the_recorded_one(
    steps: int, few_shapes: bool, workload: tuple[Policy, Script]
) -> None:
    """Token for token (`played` compares), with the same work counted: each token of a reply but its last is read in
    decoding, which has at most a row for each game, as one player at a time speaks."""
    policy, script = workload
    agent = ReplayAgent(policy, script, 256, Stopwatch(CPU), steps)
    agent.engine.few_shapes = few_shapes
    one = ReplayAgent(policy, script, 256, Stopwatch(CPU))
    for mine, other in zip(played(agent, script), played(one, script), strict=True):
        for a, b in zip(mine.beliefs, other.beliefs, strict=True):
            np.testing.assert_allclose(a.probs, b.probs, atol=1e-5)
    decode, singly, mixed = agent.engine.counts["decode"], one.engine.counts["decode"], agent.engine.counts["mixed"]
    assert singly.tokens == sum(len(ids) - 1 for own in script.replies.values() for ids in own)
    assert not mixed.tokens and not one.engine.counts["mixed"].tokens
    for what in ("tokens", "attended"):
        ours, theirs = (sum(getattr(c, what) for c in a.engine.counts.values()) for a in (agent, one))
        assert ours == theirs
    if steps > 1:
        assert (decode.tokens, decode.attended, decode.cached) == (singly.tokens, singly.attended, singly.cached)
        assert decode.passes >= singly.passes
    assert (decode.outputs, singly.outputs) == (decode.tokens * (steps > 1), 0)
    assert 1 <= singly.rows <= len(script.games)
    assert bool(agent.engine._writers) == (few_shapes and steps > 1)


def longest(streams: dict[str, Stream]) -> int:
    return max(map(len, streams.values()))


def test_recorded_games_have_what_was_asked_for(workload: tuple[Policy, Script]) -> None:
    _, script = workload
    assert script.longest <= 256
    assert script.sampled == sum(len(ids) for own in script.replies.values() for ids in own)
    said = [len(ids) for own in script.replies.values() for ids in own if len(ids) > 1]
    assert said and max(said) >= 12
    facts = script.facts()
    assert facts["mean_stream"] == round(facts["tokens"] / facts["slots"]) <= facts["longest_stream"]


@pytest.mark.parametrize(("game", "context"), [("among_us", 150), ("among_us", 200), ("dond", 110)])
def test_each_game_fills_its_context(game: str, context: int) -> None:
    """Its longest stream fits, and one step later would not have; or the game was over by itself."""
    tokens = tokens_of(game)
    script = record(ENVS[game], context, 12, tokens, reply_tokens=12, seed=0)
    assert len(script.games) == len(set(script.games)) == 12
    assert len(script.cuts) > 4 and len(set(script.cuts.values())) > 1
    later = {seed: cut + 1 for seed, cut in script.cuts.items()}
    episodes, _ = play_recorded(ENVS[game], script.games, tokens, 12, 1 << 20, later)
    for played_, streams, episode in zip(script.games, script.streams, episodes, strict=True):
        assert FULL * context <= longest(streams) <= context
        if played_.seed in script.cuts:
            assert longest(episode.streams) > context
            assert all(episode.streams[a].tokens[: len(s)] == s.tokens for a, s in streams.items())
        else:
            assert episode.outcome["how"] and episode.streams == streams


def test_where_few_games_are_full_the_longest_are_played() -> None:
    """No game of four steps comes near this context: of eight times as many the longest, in the order drawn."""
    env, tokens = {**ENVS["among_us"], "max_steps": 4}, tokens_of("among_us")
    drawn = draw_games(0, count=24)
    script = record(env, 4096, 3, tokens, reply_tokens=12, seed=0)
    episodes, _ = play_recorded(env, drawn, tokens, 12, 4096, {})
    sizes = [longest(episode.streams) for episode in episodes]
    assert not script.cuts and sorted(map(longest, script.streams)) == sorted(sizes)[-3:]
    assert [drawn.index(game) for game in script.games] == sorted(drawn.index(game) for game in script.games)


@pytest.mark.parametrize("calls", [ALL_CALLS, range(0, sys.maxsize, 3), range(2, sys.maxsize, 3), range(0)])
def test_calls_that_are_passed_over_change_no_game(calls: range, workload: tuple[Policy, Script]) -> None:
    """Token for token (`played` compares); as many calls are computed as were asked for, and questions of the others
    are answered evenly."""
    policy, script = workload
    agent = GenerateAgent(policy, script, Stopwatch(CPU), 64, False, calls)
    whole = GenerateAgent(policy, script, Stopwatch(CPU), 64, False)
    episodes, full = played(agent, script), played(whole, script)
    assert agent.work == whole.work == whole.computed
    total = agent.work["calls"]
    assert agent.computed["calls"] == len([n for n in range(total) if n in calls])
    assert agent.work["sampling"] == script.sampled and agent.work["beliefs"] == script.answers
    assert agent.work["decode"] == script.sampled - sum(map(len, script.replies.values()))
    same = 0
    for some, all_ in zip(episodes, full, strict=True):
        for a, b in zip(some.beliefs, all_.beliefs, strict=True):
            assert a.probs.sum() == pytest.approx(1) and a.probs.shape == b.probs.shape
            same += np.allclose(a.probs, b.probs, atol=1e-6)
    assert same >= agent.computed["beliefs"] and (same == script.answers) == (calls == ALL_CALLS)


def test_each_call_is_computed_in_one_of_as_many_repeats(workload: tuple[Policy, Script]) -> None:
    policy, script = workload
    agents = [GenerateAgent(policy, script, Stopwatch(CPU), 64, False, range(n, sys.maxsize, 3)) for n in range(3)]
    for agent in agents:
        played(agent, script)
    assert sum((agent.computed for agent in agents), Counter()) == agents[0].work


def test_computed_calls_are_scaled_by_their_work(workload: tuple[Policy, Script]) -> None:
    """By hand: a quarter of the tokens to be read, half of those to be written, a tenth of the questions, no sampling
    at all. Where all calls are computed, nothing changes."""
    policy, script = workload
    agent = GenerateAgent(policy, script, Stopwatch(CPU), 64, False)
    agent.work = Counter(calls=9, prefill=400, decode=60, sampling=5, beliefs=30)
    agent.computed = Counter(calls=2, prefill=100, decode=30, beliefs=3)
    seconds = dict.fromkeys(PHASES, 1.0)
    agent.scale(seconds)
    assert seconds == dict.fromkeys(PHASES, 1.0) | {"prefill": 4.0, "decode": 2.0, "beliefs": 10.0}
    watch = Stopwatch(CPU)
    whole = GenerateAgent(policy, script, watch, 64, False, range(0, sys.maxsize, 1))
    played(whole, script)
    before = dict(watch.seconds)
    whole.scale(watch.seconds)
    assert watch.seconds == before and before["decode"] > 0


@pytest.mark.skipif(trl_version() is None, reason="TRL is not installed")
def test_trl_learns_from_the_first_games(workload: tuple[Policy, Script]) -> None:
    """All games are played, one call in three computed; a game's seats are learned from, which is scaled to all."""
    policy, script = workload
    watch, players = Stopwatch(CPU), len(script.streams[0])
    episodes, agent = trl_iteration(policy, script, watch, 8, 2048, players, range(0, sys.maxsize, 3))
    script.check(episodes)
    assert 0 < agent.computed["calls"] <= agent.work["calls"] // 3 + 1 and watch.seconds["update"] > 0
    assert watch.seconds["collation"] > 0  # what `train()` does around its step


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


def test_limits_by_hand() -> None:
    """Layers of 10 multiply-adds a token and 2 a pair, an output layer of 4, 3 numbers kept of a token, of 2 bytes."""
    shape = Shape(body=10, head=4, parameters=20, attention=2, cache=3, matrices=((2, 5),), output=(2, 2))
    rates = Rates(read=100.0, decode=20.0, mixed=40.0, output=8.0, update=30.0, weights=400.0, cache=600.0)
    counts = {
        "prefill": Counts(passes=1, tokens=40, attended=100, cached=40),
        "decode": Counts(passes=10, tokens=20, attended=60, cached=80, outputs=6),
        "mixed": Counts(passes=2, tokens=30, attended=50, cached=70),
    }
    work = UpdateCounts(tokens=60, attended=160, outputs=20, passes=2, steps=1)
    found = limits(shape, rates, 2, counts, sampled=26, answers=8, update=work)
    assert found["prefill"] == {"macs": 600, "arithmetic": 6.0, "memory": pytest.approx(0.85), "limit": 6.0}
    # (200 + 120) / 20 + 24 / 8 and 10 passes over 20 bytes of weights; 200 numbers of caches
    assert found["decode"] == {
        "macs": 344, "arithmetic": 19.0, "memory": pytest.approx(1.5), "limit": 19.0
    }  # fmt: skip
    assert found["mixed"] == {"macs": 400, "arithmetic": 10.0, "memory": pytest.approx(1.1), "limit": 10.0}
    assert found["sampling"]["limit"] == 20 * 4 / 8 and found["beliefs"]["macs"] == 32
    assert found["update"]["arithmetic"] == 3 * (600 + 320 + 80) / 30
    memory_bound = limits(shape, replace(rates, weights=1.0), 2, counts, sampled=26, answers=8, update=work)
    assert memory_bound["decode"]["limit"] == pytest.approx(201.0)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_step_alone(workload: tuple[Policy, Script], steps: int) -> None:
    """Five rows of a context of 60: the token in the last place sees all 60; of the last four, from 57 to 60; several
    at a time go through the output layer, too."""
    policy, _ = workload
    shape, found = Shape.of(policy), step_alone(policy, 5, 60, steps, CPU)
    seen = {1: 60.0, 4: 58.5}[steps]
    assert found["macs"] == 5 * (shape.body + seen * shape.attention + (steps > 1) * shape.head)
    assert 0 < found["limit"] < found["seconds"] and (found["rows"], found["context"]) == (5, 60)
    assert 0 < found["attention"] < found["seconds"] and 0 < found["products"] < found["seconds"]


def test_rows_of_a_pass() -> None:
    assert Counts(passes=4, tokens=10).rows == 2 and Counts().rows == 1


def test_places_along_an_axis_are_named_where_there_is_room() -> None:
    assert labels([16, 51, 64, 256, 1024]) == ["16", "51", "", "256", "1,024"]
    assert labels([4, 5, 6, 7]) == ["4", "5", "6", "7"]
    assert labels([1.030912, 15.428608]) == ["1.03", "15.4"]

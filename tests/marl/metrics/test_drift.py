"""Likelihoods, variety and whether words hold, on models and games whose figures are known."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from envs import dond_v0
from envs.dond import environment as dond_environment
from envs.dond.replies import MESSAGE
from marl.metrics.drift import likelihood, replayed_rows, speech_likelihood, talk_drift
from marl.metrics.negotiation import read_talk, talk_of
from marl.metrics.talk import distinct_ngrams
from marl.model.policy import Policy
from marl.rollout.games import scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode
from tests.marl.models import tiny_policy


def compact() -> dond_environment.DealOrNoDeal:
    return dond_v0.parallel_env(style="compact")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


@pytest.fixture(scope="module")
def games(policy: Policy) -> list[Episode]:
    """Scripted games with slips, recorded as a model would have met them."""
    agent = scripted("dond", "mixture", policy.tokens)
    return rollout(draw_games(5, count=30), everyone(agent), compact, 30)


def test_a_game_told_again_is_the_stream_that_was_recorded(policy: Policy, games: list[Episode]) -> None:
    assert any(t.error for game in games for t in game.turns)  # corrections among them
    for game in games:
        seats = replayed_rows(game, compact(), policy.tokens, ["mixture"])
        assert [agent for _, agent in seats] == ["player_0", "player_1"]
        for again, agent in seats:
            own, stream = game.streams[agent], again.streams[agent]
            # what the game tells of its end is read by nobody here
            assert own.tokens[: len(stream)] == stream.tokens and own.kinds[: len(stream)] == stream.kinds
            for a, b in zip(game.turns, again.turns, strict=True):
                assert (a.reply_ids, a.start, a.body, a.message, a.error) == (
                    b.reply_ids, b.start, b.body, b.message, b.error,
                )  # fmt: skip
    assert replayed_rows(games[0], compact(), policy.tokens, ["nobody"]) == []


def test_a_model_that_knows_nothing_gives_each_token_the_same(policy: Policy, games: list[Episode]) -> None:
    """All weights are 0, so that every token that can be spoken is equally likely and the sum is known."""
    blank = tiny_policy()
    with torch.no_grad():
        for parameter in blank.lm.parameters():
            parameter.zero_()
    seats = [seat for game in games for seat in replayed_rows(game, compact(), policy.tokens, ["mixture"])]
    found = speech_likelihood(blank, seats)
    odds = math.log(policy.tokens.size - len(policy.tokens.unspeakable))
    for (episode, agent), (nats, words) in zip(seats, found.tolist(), strict=True):
        own = [t for t in episode.turns if t.agent == agent and t.message]
        assert nats == pytest.approx(-odds * sum(t.body[1] - t.body[0] for t in own), rel=1e-5)
        assert words == sum(len(t.message.split()) for t in own)
    interval = likelihood(blank, [seats[i : i + 2] for i in range(0, len(seats), 2)], np.random.default_rng(0))
    assert interval is not None and interval.n == len(games)
    assert interval.mean == pytest.approx(found[:, 0].sum() / found[:, 1].sum())


def test_likelihood_of_speech_equals_a_naive_loop(policy: Policy, games: list[Episode]) -> None:
    """The loop sums each token's log-probability, one stream at a time."""
    seats = replayed_rows(games[0], compact(), policy.tokens, ["mixture"])
    found = speech_likelihood(policy, seats)
    for row, (episode, agent) in enumerate(seats):
        tokens = torch.tensor([episode.streams[agent].tokens])
        with torch.no_grad():
            logits = policy.speech_logits(policy.logits(policy.hidden(tokens))[0], 1.0).log_softmax(-1)
        nats = 0.0
        for turn in episode.turns:
            if turn.agent == agent:
                for place in range(turn.start + turn.body[0], turn.start + turn.body[1]):
                    nats += float(logits[place - 1, tokens[0, place]])
        assert found[row, 0] == pytest.approx(nats, rel=1e-4) and nats < 0


def test_distinct_ngrams_by_hand() -> None:
    games = [["a b", "a b"], ["a c d"]]
    one, two = distinct_ngrams(games, 1, words=7), distinct_ngrams(games, 2, words=7)
    assert one is not None and two is not None
    assert one.mean == 4 / 7 and two.mean == 3 / 4 and one.n == 2  # a b c d; ab, ac, cd
    cut = distinct_ngrams(games, 2, words=6)
    assert cut is not None and cut.mean == 2 / 3  # ab ab ac
    assert distinct_ngrams(games, 1, words=8) is None
    # without the first game a c d of 3 are left, without the second a b of 4: 1 and 1/2
    half = 1.959964 * math.sqrt(np.var([1.0, 0.5]))
    assert (one.low, one.high) == pytest.approx((max(0, 4 / 7 - half), min(1, 4 / 7 + half)))


def test_shares_and_their_coverage(games: list[Episode]) -> None:
    """Counted here by hand over the readings; a figure that rests on nothing is absent."""
    readings = [read_talk(talk_of(game)) for game in games]
    found = talk_drift(readings, np.random.default_rng(0))
    claims = [c for r in readings for c in r.claims]
    stated = [c for c in claims if c.stated is not None]
    telling = [c for c in claims if c.telling]
    values = [v for r in readings for v in r.values]
    assert found["talk/split_kept"].mean == pytest.approx(sum(c.claim == c.stated for c in stated) / len(stated))
    assert found["talk/split_coverage"].mean == pytest.approx(len(stated) / len(claims))
    assert found["talk/table_kept"].mean == pytest.approx(sum(c.claim == c.table for c in telling) / len(telling))
    assert found["talk/inverted"].mean == pytest.approx(sum(c.inverted for c in telling) / len(telling))
    assert found["talk/inverted_chance"].mean == pytest.approx(np.mean([c.chance for c in telling]))
    assert found["talk/value_true"].mean == pytest.approx(np.mean([v.true for v in values]))
    assert found["talk/value_true"].mean > found["talk/value_chance"].mean + 0.2  # scripts are mostly honest
    assert found["talk/understood"].mean > 0.95  # in the grammar's own words
    assert "talk/distinct_1" not in found  # fewer than 5,000 words
    silent = [dataclasses.replace(r, messages=(), understood=0, values=(), claims=()) for r in readings]
    assert talk_drift(silent, np.random.default_rng(0)) == {}
    assert MESSAGE not in " ".join(m for r in readings for m in r.messages)

"""The exact listener against posteriors in closed form, and against whole readings of the model that spoke."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from envs.core import END, Style
from envs.dond import rules, texts
from envs.dond.replies import proposal_text
from marl.agents.model import ModelAgent
from marl.common.errors import UserError
from marl.metrics.listener import ClaimScorer, Hearing, claim_worth, hearings, listener_metrics
from marl.model.policy import Policy
from marl.model.tokens import BOS
from marl.planning.planner import Reader
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode, Turn
from tests.marl.episodes import episode
from tests.marl.planners import COMPACT, negotiator

GAMES = 12


def agent_of(policy: Policy, temperature: float = 1.0) -> ModelAgent:
    return ModelAgent("p", policy, slots=2 * GAMES, context=1024, max_new_tokens=12, temperature=temperature)


@cache
def games() -> list[Episode]:
    return rollout(draw_games(3, 1, count=GAMES), everyone(agent_of(negotiator())), COMPACT, GAMES)


def heard(turn: Turn) -> list[int]:
    """The tokens of a message that its listener knows of: a cut one has no end."""
    return list(turn.reply_ids[: turn.body[1]] if turn.cut else turn.reply_ids)


class Planted:
    """A speaker whose words depend on its values as `table` (11, V) says: a row of logits for each value of a hat."""

    def __init__(self, table: Tensor) -> None:
        self.tokens, self.table, self.device = negotiator().tokens, table, torch.device("cpu")

    def hidden(self, tokens: Tensor) -> Tensor:
        rows = [texts.parse_prompt(self.tokens.decode(row).partition(BOS)[2]) for row in tokens.tolist()]
        hats = torch.tensor([own[1] for _, own, _ in rows])
        return hats[:, None, None].expand(*tokens.shape, 1)

    def logits(self, states: Tensor) -> Tensor:
        return self.table[states[:, 0]]

    def speech_logits(self, logits: Tensor, temperature: float) -> Tensor:
        return logits / temperature


def heard_of(policy: Any, temperature: float = 1.0) -> list[Any]:
    agent = agent_of(negotiator(), temperature)
    agent.policy = policy
    return hearings(games(), COMPACT, {"p": agent})


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_posterior_is_the_one_in_closed_form(temperature: float) -> None:
    tokens = negotiator().tokens
    table = torch.randn(11, tokens.size, generator=torch.Generator().manual_seed(1)) * 0.3
    logprobs = (table.double() / temperature).log_softmax(-1).numpy()
    found = heard_of(Planted(table), temperature)
    said = 0
    for h in found:
        played, seat = games()[h.game], int(h.listener[-1])
        values = rules.partner_values(played.facts["counts"], played.facts["values"][seat])
        assert values[h.truth] == played.facts["values"][1 - seat]
        weights = np.ones(len(values)) / len(values)
        np.testing.assert_allclose(h.exact[0], weights)
        messages = [t for t in played.turns if t.agent == h.speaker and t.message]
        assert len(h.exact) == len(messages) + 1 == len(h.believed)
        for m, turn in enumerate(messages, start=1):
            weights = weights * [np.exp(logprobs[v[1], heard(turn)].sum()) for v in values]
            np.testing.assert_allclose(h.exact[m], weights / weights.sum(), rtol=1e-6)
            said += 1
    assert said > GAMES


def test_words_that_do_not_depend_on_the_values_say_nothing() -> None:
    table = torch.randn(1, negotiator().tokens.size).expand(11, -1)
    for h in heard_of(Planted(table)):
        np.testing.assert_allclose(h.said, 0.0, atol=1e-6)


def test_real_speakers_are_weighed_as_one_stream_after_another_says() -> None:
    """Weights equal those of reading each stream alone, with other values in its prompt. Under the true values they are
    what the sampler noted."""
    agent = agent_of(negotiator())
    found = hearings(games(), COMPACT, {"p": agent})
    assert len(found) == 2 * GAMES
    for h in found[:8]:
        played, seat = games()[h.game], int(h.speaker[-1])
        counts, own = played.facts["counts"], played.facts["values"]
        stream = played.streams[h.speaker].tokens
        messages = [t for t in played.turns if t.agent == h.speaker and t.message]
        weights = []
        for values in rules.partner_values(counts, own[1 - seat]):
            text, other = (texts.prompt(counts, v, 1.0, Style.COMPACT) for v in (own[seat], values))
            old, new = (agent.tokens.framed(each, agent.tokens.format.first) for each in (text, other))
            assert stream[: len(old)] == old
            ids = torch.tensor([new + stream[len(old) :]])
            with torch.no_grad():
                scores = agent.policy.speech_logits(agent.policy.logits(agent.policy.hidden(ids)[0]), 1.0).log_softmax(
                    -1
                )
            moved = len(new) - len(old)
            each = [[float(scores[t.start + moved + i - 1, x]) for i, x in enumerate(heard(t))] for t in messages]
            weights.append(sum(map(sum, each)))
            if values == own[seat]:
                for turn, logprobs in zip(messages, each, strict=True):
                    np.testing.assert_allclose(logprobs, turn.logprobs[: len(logprobs)], atol=1e-4)
        exact = np.exp(np.array(weights) - max(weights))
        np.testing.assert_allclose(h.exact[-1], exact / exact.sum(), atol=1e-5)


def test_claims_are_as_likely_as_one_after_another() -> None:
    agent = agent_of(negotiator())
    reader, one = ClaimScorer(agent), Reader(agent.policy, 1024, 1.0)
    for played in games()[:4]:
        claims = rules.allocations(played.facts["counts"])
        ids = [agent.tokens.encode(f"{proposal_text(claim)} {END}") for claim in claims]
        streams = [played.streams[a].tokens[:n] for a in played.roles for n in (30, 45)] * 3  # more than at once
        expected = [one.probabilities(stream, ids) for stream in streams]
        np.testing.assert_allclose(reader.probabilities(streams, claims), expected, atol=1e-5)


class Certain:
    """A speaker that always claims the same."""

    def __init__(self, claim: rules.Triple) -> None:
        self.claim = claim

    def probabilities(self, streams: list[list[int]], claims: list[rules.Triple]) -> np.ndarray:
        return np.array([[float(claim == self.claim) for claim in claims]] * len(streams))


def test_a_claim_is_worth_what_it_gets_where_the_speaker_agrees() -> None:
    """Context of tests.marl.episodes: pool 1, 1, 3; values 0, 1, 3 and 1, 3, 2. The speaker claims 1 book and 1 hat."""
    possible = rules.partner_values((1, 1, 3), (0, 1, 3))
    believed = np.eye(len(possible))[[0]]
    exact = np.full((1, len(possible)), 1 / len(possible))
    h = Hearing(0, "player_1", "player_0", possible.index((1, 3, 2)), exact, believed, [[1]] * len(possible))
    mean = np.mean([v[0] + v[1] for v in possible])  # what the speaker gets of the deal
    for made, worth in (((0, 0, 3), 9 + mean), ((0, 1, 3), 0.0)):
        claims = (made, (1, 1, 0))
        found = claim_worth(episode((), claims=claims), h, Certain((1, 1, 0)))  # type: ignore[arg-type]
        assert found == pytest.approx({"made": worth, "prior": 9 + mean, "believed": 9 + mean, "exact": 9 + mean})
    assert claim_worth(episode((), claims=(None, (1, 1, 0))), h, Certain((1, 1, 0))) is None  # type: ignore[arg-type]


def test_figures_of_games() -> None:
    found = listener_metrics(games(), COMPACT, {"p": agent_of(negotiator())}, np.random.default_rng(0))
    assert found["talk/said"].n == GAMES
    assert found["talk/prior"].mean > found["talk/said"].mean
    assert ("talk/claim/exact" in found) == any(None not in played.outcome["claims"] for played in games())


def test_what_cannot_be_weighed_is_refused() -> None:
    with pytest.raises(UserError, match="temperature=0 leaves no likelihood"):
        hearings(games(), COMPACT, {"p": agent_of(negotiator(), temperature=0.0)})
    with pytest.raises(UserError, match="No message to weigh"):
        hearings(games(), COMPACT, {})
    with pytest.raises(UserError, match="measured in Deal or No Deal"):
        hearings([replace(games()[0], facts={})], COMPACT, {"p": agent_of(negotiator())})

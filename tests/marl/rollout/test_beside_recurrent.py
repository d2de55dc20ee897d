"""Recurrent chat models take no masks: questions are read at the end of a stream, which is then restored."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from marl.agents.model import ModelAgent
from marl.learning.batch import collate, rows_of
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.update import update
from marl.losses.listening import ListeningLoss
from marl.metrics import drift
from marl.model.branches import read_questions
from marl.model.policy import Policy
from marl.rollout.games import env_maker
from marl.rollout.resampling import resample
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode, Kind
from tests.marl.models import CHATML, hf_policy
from tests.marl.rollout.test_beside import Unasked, assert_without_questions
from tests.marl.updates import READS, weights_of

DOND: dict[str, Any] = {"game": "dond", "style": "brief", "format": "structured", "max_entries": 4}
# A state of the whole model; states beside attention; attention without positions; states read token by token.
NAMES = ("rwkv", "falcon_h1", "mpt", pytest.param("mamba", marks=pytest.mark.slow))
GAMES = 2


@pytest.fixture(scope="module", params=NAMES)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    made = hf_policy(tmp_path_factory.mktemp("chat"), request.param, chat_template=CHATML, single_digits=True)
    read_questions(made.tokens, made.lm, "auto")
    assert made.tokens.beside
    return made


def play(
    policy: Policy, asked: bool = True, context: int = 1024, temperature: float = 0.5
) -> tuple[ModelAgent, list[Episode]]:
    make = env_maker(DOND)
    agent = ModelAgent("learner", policy, slots=2 * GAMES, context=context, max_new_tokens=6, temperature=temperature)
    games = draw_games(0, 1, count=GAMES)
    return agent, rollout(games, everyone(agent), make if asked else lambda: Unasked(make()), GAMES)


@pytest.fixture(scope="module")
def played(policy: Policy) -> tuple[ModelAgent, list[Episode]]:
    return play(policy)


def test_asking_is_free_of_consequences(policy: Policy, played: tuple[ModelAgent, list[Episode]]) -> None:
    _, episodes = played
    assert sum(len(episode.beliefs) for episode in episodes) > 10
    for a, b in zip(episodes, play(policy, asked=False)[1], strict=True):
        assert a.turns == b.turns and not b.beliefs
        for agent, stream in b.streams.items():  # a game's end is read only where something is asked about it
            tokens, kinds = a.streams[agent].tokens, a.streams[agent].kinds
            assert (tokens[: len(stream)], kinds[: len(stream)]) == (stream.tokens, stream.kinds)
            end = policy.tokens.decode(tokens[len(stream) :])
            assert set(kinds[len(stream) :]) <= {Kind.OBSERVATION} and (not end or "deal: " in end.lower()), end
        assert_without_questions(b, policy.tokens)


def test_answers_are_those_of_fresh_reads_as_they_are_played_and_as_they_are_learned(
    policy: Policy, played: tuple[ModelAgent, list[Episode]]
) -> None:
    _, episodes = played
    batch = collate(rows_of(episodes, ["learner"]), {}, silent_roles=())
    with torch.no_grad():
        found = forward(policy, batch, 0.5, dict.fromkeys(READS, False))
    torch.testing.assert_close(found.logprobs[batch.reply], batch.logprobs[batch.reply], atol=1e-4, rtol=0)
    torch.testing.assert_close(found.values[batch.decision], batch.values[batch.decision], atol=1e-4, rtol=0)
    beliefs = [b for e, agent in rows_of(episodes, ["learner"]) for b in e.beliefs if b.listener == agent]
    streams = [
        e.streams[agent] for e, agent in rows_of(episodes, ["learner"]) for b in e.beliefs if b.listener == agent
    ]
    assert len(beliefs) == len(found.beliefs) > 10
    for row, belief, stream in zip(found.beliefs, beliefs, streams, strict=True):
        ids = [*stream.tokens[: belief.position + 1], *belief.branch]
        with torch.no_grad():
            logits = policy.logits(policy.hidden(torch.tensor([ids]))[0, -1])
        expected = logits[list(belief.candidate_ids)].double().log_softmax(-1).numpy()
        np.testing.assert_allclose(np.log(belief.probs), expected, atol=1e-4, rtol=0)
        np.testing.assert_allclose(row[: len(expected)].numpy(), expected, atol=1e-4, rtol=0)


def test_listening_learns_the_same_in_any_passes(policy: Policy, played: tuple[ModelAgent, list[Episode]]) -> None:
    batch = collate(rows_of(played[1], ["learner"])[:2], {})
    ends = []
    for budget in (1, 100_000):
        pupil = copy.deepcopy(policy)
        update(
            pupil, None, batch, {"listening": ListeningLoss(1.0)}, torch.optim.SGD(pupil.parameters(), 0.1),
            UpdateConfig(minibatches=1, token_budget=budget), torch.Generator().manual_seed(0),
        )  # fmt: skip
        ends.append(weights_of(pupil))
    before = weights_of(policy)
    assert any(not torch.equal(ends[0][name], before[name]) for name in before if name.startswith("lm."))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ends[0].values(), ends[1].values(), strict=True))


def test_measuring_counts_the_tokens_of_questions(
    policy: Policy, played: tuple[ModelAgent, list[Episode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams alone would fit into one pass; with a row for each question they do not."""
    rows = rows_of(played[1], ["learner"])
    monkeypatch.setattr(drift, "TOKENS_AT_ONCE", collate(rows, {}).tokens.numel())
    passes: list[int] = []
    hook = policy.lm.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        drift.speech_likelihood(policy, rows)
    finally:
        hook.remove()
    assert len(passes) > 1


def test_the_same_message_again_is_believed_as_it_was(policy: Policy) -> None:
    """A message drawn again at temperature 0 is the same, and so are the beliefs after it. Listeners hear it in copies
    of their state."""
    agent, episodes = play(policy, temperature=0.0)
    heard = 0
    for episode in resample(episodes, env_maker(DOND), {"learner": agent}, {"learner"}, 1):
        for turn in episode.turns:
            after = {(b.listener, b.question.text): b for b in episode.beliefs if b.step == turn.step + 1}
            for belief in (b for each in turn.instead for b in each):
                same = after[belief.listener, belief.question.text]
                assert belief.branch and belief.position == same.position
                np.testing.assert_allclose(belief.probs, same.probs, atol=1e-5)
                heard += 1
    assert heard > 0 or policy.lm.config.model_type == "mamba"  # which says no word here


def test_a_question_that_does_not_fit_its_slot_makes_the_seat_fall_silent(
    policy: Policy, played: tuple[ModelAgent, list[Episode]]
) -> None:
    """Branches are read in the slot, so that their ends must fit."""
    whole = max(len(stream) for episode in played[1] for stream in episode.streams.values())
    _, episodes = play(policy, context=whole - 2)
    ends = [b.position + 1 + len(b.branch) for e in episodes for b in e.beliefs]
    assert max(ends) <= whole - 2 and max(len(s) for e in episodes for s in e.streams.values()) < whole

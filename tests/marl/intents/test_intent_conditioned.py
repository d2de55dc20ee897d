"""A learner that is told intents: they stand in its stream alone, and PPO scores its own words as they were sampled."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envs.dond import replies
from marl.agents.model import ModelAgent, PlayConfig
from marl.algorithms.ppo import PPOConfig, player, train_ppo
from marl.algorithms.training import Training
from marl.common.errors import UserError
from marl.common.files import write_json
from marl.intents.agent import (
    ACTION,
    PARTS,
    CiceroConfig,
    IntentConditionedAgent,
    Parts,
    intent_conditioned_agent,
    intent_in,
    thoughts_of,
)
from marl.intents.draws import Draw
from marl.intents.measure import followed
from marl.intents.streams import FORM, Intent, intent_text
from marl.learning.batch import collate, rows_of
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.update import Learner, make_optimizer
from marl.losses.policy import PolicyLoss
from marl.losses.value import ValueLoss
from marl.metrics.messages import message_metrics
from marl.model.policy import Policy
from marl.planning.intents import IntentConfig
from marl.rewards.game import GameReward
from marl.rollout.cast import RoleConfig
from marl.rollout.games import env_maker
from marl.rollout.resampling import resample
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import Seeds, draw_games
from marl.storage.checkpoint import save_policy
from marl.types import Episode, Kind
from tests.marl import episodes as by_hand
from tests.marl.episodes import message, propose
from tests.marl.planners import negotiator

SHORT = env_maker({"game": "dond", "style": "compact", "objective": 1.0, "max_entries": 6})
HOW = CiceroConfig(plan=IntentConfig(iterations=3))
LIMITS: dict[str, Any] = {"games": 3, "concurrency": 3, "max_new_tokens": 24, "context": 1024}


def intent_agent(arm: str = "both", temperature: float = 0.5, slots: int = 6) -> IntentConditionedAgent:
    policy = negotiator()
    parts = Parts(arm, policy, policy, None)
    unfiltered = CiceroConfig(nonsense=0.0, candidates=1, draws=1, plan=HOW.plan)
    limits = {"slots": slots, "context": 1024, "max_new_tokens": 24, "temperature": temperature}
    return IntentConditionedAgent("told", parts, unfiltered, "dond", **limits)


@cache
def played() -> tuple[Episode, ...]:
    """Games of a learner that is told intents with one that isn't."""
    agent, plain = (
        intent_agent(),
        ModelAgent("plain", negotiator(), slots=4, context=1024, max_new_tokens=24, temperature=0.5),
    )
    cast = {"player_0": agent, "player_1": plain}
    return tuple(rollout(draw_games(5, 5, count=3), lambda game, env: cast, SHORT, 3))


def folder_of(tmp_path: Path, arm: str = "both") -> Path:
    """A player's folder as the study writes it, without what a learner has no use for."""
    save_policy(tmp_path / ACTION, negotiator(), {"game": "dond"})
    write_json(tmp_path / PARTS, {"arm": arm, "told": FORM})
    return tmp_path


def test_an_intent_stands_right_before_each_own_reply_and_nowhere_else() -> None:
    tokens = negotiator().tokens
    for episode in played():
        own = [turn for turn in episode.turns if turn.agent == "player_0"]
        assert own
        stream, other = episode.streams["player_0"], episode.streams["player_1"]
        for turn in own:
            intent = intent_in(turn.thoughts)
            assert intent is not None
            text = tokens.encode(intent_text(intent))
            before = slice(turn.start - 1 - len(text), turn.start - 1)  # the cue stands between
            assert stream.tokens[before] == text and {*stream.kinds[before]} == {Kind.QUESTION}
        assert tokens.decode(stream.tokens).count("me ") >= len(own)
        assert not any(turn.thoughts for turn in episode.turns if turn.agent == "player_1")
        assert all(kind != Kind.QUESTION or token in tokens.encode("<books?><hats?><balls?>")
                   for kind, token in zip(other.kinds, other.tokens, strict=True))  # fmt: skip


def test_claims_are_the_learners_own_samples() -> None:
    """A planned claim would overwrite the sample, with log-probabilities of 0."""
    own = [turn for episode in played() for turn in episode.turns if turn.agent == "player_0"]
    proposals = [turn for turn in own if turn.text.startswith(replies.PROPOSE)]
    assert proposals and all(turn.planned is None for turn in own)
    assert all(len(turn.logprobs) == len(turn.reply_ids) and any(turn.logprobs) for turn in proposals)


def test_what_was_sampled_under_an_intent_is_what_is_scored() -> None:
    batch = collate(rows_of([*played()], {"told"}), {})
    with torch.no_grad():
        found = forward(negotiator(), batch, 0.5, {"reply": False}).logprobs
    assert batch.reply.sum() > 50
    assert float((found - batch.logprobs)[batch.reply].abs().max()) < 1e-4


def test_resampled_messages_are_drawn_under_the_same_intents() -> None:
    """`repeat` plans again what was planned; otherwise another stream would be continued."""
    agent = intent_agent()
    episodes = rollout(draw_games(9, 9, count=2), everyone(agent), SHORT, 3)
    again = resample(episodes, SHORT, {"told": agent}, {"told"}, 2)
    assert any(turn.instead for episode in again for turn in episode.turns)
    assert not agent._minds


def test_what_messages_tell_of_values_is_not_measured_under_intents() -> None:
    """Streams under other values would hold other intents, so such measures (`talk/said`) are left out."""
    agents = {
        "told": intent_agent(),
        "plain": ModelAgent("plain", negotiator(), slots=4, context=1024, max_new_tokens=24),
    }
    settings = {"game": "dond", "style": "compact", "objective": 1.0, "max_entries": 6}
    found, _, effects = message_metrics(played(), settings, agents, {"told"}, 1)
    assert effects and not any(name.startswith(("talk/said", "talk/heard", "talk/claim/")) for name in found)


@pytest.mark.parametrize("arm", ["both", "intent"])
def test_the_same_message_again_is_believed_as_it_was(arm: str) -> None:
    """A message drawn again at temperature 0 is the same, and so are the beliefs after it. Both players' intents stand
    in the streams."""
    agent = intent_agent(arm, temperature=1e-6, slots=24)
    episodes = rollout(draw_games(7, 7, count=12), everyone(agent), SHORT, 12)
    said = 0
    for episode in resample(episodes, SHORT, {"told": agent}, {"told"}, 1):
        for turn in episode.turns:
            after = {(b.listener, b.question.text): b for b in episode.beliefs if b.step == turn.step + 1}
            for belief in (belief for heard in turn.instead for belief in heard):
                same = after[belief.listener, belief.question.text]
                assert belief.position == same.position
                assert belief.probs == pytest.approx(same.probs, abs=1e-5)
                said += 1
    assert said


def test_training_moves_the_learner_and_not_the_action_model(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    before = (folder / ACTION / "model.safetensors").read_bytes()
    policy: Policy = copy.deepcopy(negotiator())
    learner = Learner("learner", policy, negotiator(), make_optimizer(policy, UpdateConfig(learning_rate=1e-2)))
    seen: list[Episode] = []
    training = Training(
        [learner], "dond", SHORT, {"negotiator": RoleConfig("learner")}, {}, {"game": GameReward(weight=1.0)},
        {"policy": PolicyLoss(weight=1.0), "value": ValueLoss(weight=0.5)}, Seeds(0, None, 0),
        lambda number, found, episodes: seen.extend(episodes),
    )  # fmt: skip
    train_ppo(training, PPOConfig(iterations=1, intents=str(folder), cicero=HOW, **LIMITS))
    assert all(turn.thoughts.startswith("intent: ") for episode in seen for turn in episode.turns)
    moved = [not torch.equal(a, b) for a, b in zip(policy.parameters(), negotiator().parameters(), strict=True)]
    assert any(moved) and (folder / ACTION / "model.safetensors").read_bytes() == before


def test_without_intents_the_player_is_a_plain_one() -> None:
    learner = Learner("learner", negotiator(), None, torch.optim.SGD(negotiator().parameters(), lr=0.0))
    training = Training(
        [learner], "dond", SHORT, {"negotiator": RoleConfig("learner")}, {}, {}, {}, Seeds(0, None, 0), lambda *a: None
    )  # fmt: skip
    assert type(player(learner, training, PPOConfig(**LIMITS))) is ModelAgent


def test_a_folder_whose_model_reads_no_intents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is told no intent"):
        intent_conditioned_agent("t", negotiator(), PlayConfig(**LIMITS), 2, 1.0, folder_of(tmp_path, "state"), HOW)


def test_what_follows_intents_in_games_is_counted_item_by_item() -> None:
    """The pool is 1 book, 1 hat and 3 balls. Players without an intent and refused replies are left out."""
    mine = {"thoughts": "intent: 0 0 3 for me, 1 1 0 for my partner"}
    other = {"thoughts": "intent: 0 1 3 for me, 1 0 0 for my partner"}
    turns = [
        message("player_0", 0, "i want the balls", **mine),  # one item, as intended
        message("player_1", 1, "i want the balls"),
        message("player_0", 2, "i get the book and all 3 balls", **mine),  # two, of which one as intended
        message("player_0", 3, "hello", **mine),
        by_hand.refused("player_0", 4, "i want the hat", **mine),
        propose("player_0", 5, (0, 0, 3), **mine),
        propose("player_1", 6, (0, 0, 3), **other),
    ]
    found = followed([by_hand.episode(turns)], np.random.default_rng(0))
    assert found["intent/items"].mean == pytest.approx(2 / 3) and found["intent/items"].n == 2
    assert found["intent/stated"].mean == 0 and found["intent/claimed"].mean == 0.5
    assert followed([by_hand.deal_game()], np.random.default_rng(0)) == {}


def test_intents_are_read_as_transcripts_show_them() -> None:
    intent = Intent((0, 1, 3), (1, 0, 0))
    draws = [Draw([], [], "hello", "repetition"), Draw([], [], "hi")]
    assert intent_in(thoughts_of(intent, ())) == intent_in(thoughts_of(intent, draws)) == intent
    assert intent_in("") is None

"""The terms do the work: a speaker and a listener who share nothing invent a word for a hidden fact, or they don't.

The game's own reward has weight 0 in every arm (measured, not trained on), so that only the speaking reward and the
listening loss can teach anything. The listener's choice is a sample of its belief (see `hint_policy`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from pettingzoo.test import parallel_api_test

from envs.core import END
from marl.agents.model import ModelAgent
from marl.algorithms.ppo import PPOConfig, train_ppo
from marl.common.distributed import ONE, Ranks
from marl.learning.advantages import Credit
from marl.learning.config import UpdateConfig
from marl.learning.update import Learner, make_optimizer
from marl.losses import Loss
from marl.losses.entropy import EntropyLoss
from marl.losses.listening import ListeningLoss
from marl.losses.policy import PolicyLoss
from marl.losses.value import ValueLoss
from marl.model.policy import Policy
from marl.rewards import Reward
from marl.rewards.game import GameReward
from marl.rewards.speaking import SpeakingReward
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import EVALUATION, Seeds, draw_games
from tests.marl.hint import FACTS, Hint, hint_policy, training

# Arms as (weight of the speaking reward, weight of the listening loss). Accuracy seen over 400 held-out games after 40
# iterations, seeds 0 to 7 (the mean probability of the truth after the message in brackets):
BOTH = (1.0, 1.0)  # .998 .975 .995 .998 .995 .993 .993 .995 (.982 to .998)
NEITHER = (0.0, 0.0)  # .480 .520 .477 .477 .472 .470 .482 .477 (.486 to .512)
SPEAKING_ONLY = (1.0, 0.0)  # .480 .520 .477 .477 .472 .470 .482 .477 (.486 to .512): the listener never learns to hear
LISTENING_ONLY = (0.0, 1.0)  # .475 .485 .477 .472 .492 .490 .468 .485 (.496 to .511): there is nothing to be heard


@dataclass(frozen=True)
class Played:
    """Held-out games: the share that was won, and the mean probability of the truth before and after the message."""

    accuracy: float
    before: float
    after: float
    words: frozenset[tuple[str, str]]  # (fact, message) pairs that make up a twentieth of the games or more


STEPS = UpdateConfig(learning_rate=1e-3, minibatches=4, max_grad_norm=0.5, token_budget=8192)


def train(
    seed: int,
    speaking: float,
    listening: float,
    iterations: int = 40,
    ranks: Ranks = ONE,
    steps: UpdateConfig = STEPS,
    game: float = 0.0,
    **estimator: Any,
) -> Policy:
    policy = hint_policy(seed)
    rewards: dict[str, Reward] = {
        "game": GameReward(weight=game, scale=1.0),
        "speaking": SpeakingReward(weight=speaking),
    }
    losses: dict[str, Loss] = {
        "policy": PolicyLoss(),
        "value": ValueLoss(),
        "entropy": EntropyLoss(weight=0.0),
        "listening": ListeningLoss(weight=listening),
    }
    config = PPOConfig(
        iterations=iterations,
        games=128,
        concurrency=128,
        max_new_tokens=1,
        context=32,
        credit=Credit(speech="separate"),
        update=steps,
        **estimator,
    )
    learner = Learner("learner", policy, policy, make_optimizer(policy, config.update))
    train_ppo(training([learner], losses, rewards=rewards, seeds=Seeds.of(seed), ranks=ranks), config)
    return policy


def play(policy: Policy, games: int = 400) -> Played:
    learner = ModelAgent("learner", policy, slots=2 * games, context=32, max_new_tokens=1)
    episodes = rollout(draw_games(0, EVALUATION, count=games), everyone(learner), Hint, games)
    said = [(e.facts["fact"], e.turns[0].message) for e in episodes]
    beliefs = [b for e in episodes for b in e.beliefs]
    return Played(
        accuracy=float(np.mean([e.outcome["right"] for e in episodes])),
        before=float(np.mean([b.truth for b in beliefs if b.step == 0])),
        after=float(np.mean([b.truth for b in beliefs if b.step == 1])),
        words=frozenset(pair for pair in said if said.count(pair) >= games / 20),
    )


def test_the_toy_keeps_the_contract_of_games() -> None:
    parallel_api_test(Hint(), num_cycles=20)
    env = Hint()
    env.reset(seed=3, options={"fact": 1, "speaker": 0})
    observations, *_ = env.step({"player_0": f"ba{END} red", "player_1": "red"})
    assert observations["player_1"]["text"] == "heard ba"
    _, rewards, *_ = env.step({"player_0": "", "player_1": "blue"})
    assert rewards == {"player_0": 1.0, "player_1": 1.0} and not env.agents


@torch.no_grad()
def informative(policy: Policy) -> float:
    """Returns how often a listener would be right that knows how the speaker speaks: 1/2 + 1/2 the distance of its two
    distributions."""
    tokens = policy.tokens
    prompts = torch.tensor([[*tokens.format.first.before, *tokens.encode(f"{fact} say")] for fact in FACTS])  # (2, T)
    red, blue = policy.speech_logits(policy.logits(policy.hidden(prompts)[:, -1]), 1.0).softmax(-1)
    return 0.5 + 0.5 * float((red - blue).clamp_min(0).sum())


@pytest.fixture(scope="module")
def both() -> tuple[Policy, Played]:
    policy = train(0, *BOTH, iterations=24)  # all 40 in test_a_language_takes_a_speaker_and_a_listener
    return policy, play(policy)


def test_both_terms_make_a_language(both: tuple[Policy, Played]) -> None:
    assert informative(hint_policy(0)) == pytest.approx(0.5, abs=1e-6)
    policy, played = both
    assert played.accuracy >= 0.9 and played.after >= 0.9
    assert abs(played.before - 0.5) < 0.05  # nothing but the message tells
    assert informative(policy) >= 0.9
    meanings = [{fact for fact, word in played.words if word == said} for _, said in played.words]
    assert meanings and all(len(facts) == 1 for facts in meanings), played.words  # no common word means both


def test_without_the_terms_play_stays_at_chance(both: tuple[Policy, Played]) -> None:
    neither = play(train(0, *NEITHER, iterations=6))  # as above
    assert abs(neither.accuracy - 0.5) < 0.1 and abs(neither.after - 0.5) < 0.05
    assert both[1].accuracy - neither.accuracy > 0.35


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [{}, {"advantage": "rloo"}, {"advantage": "grpo"}, {"advantage": "rae"}], ids=str)
def test_each_estimator_makes_a_language(estimator: dict[str, Any]) -> None:
    """The game's reward is trained on beside both terms; at least 90 % of games are won."""
    played = play(train(0, *BOTH, game=1.0, group=8, **estimator))
    assert played.accuracy >= 0.9 and played.after >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "arm", [BOTH, NEITHER, SPEAKING_ONLY, LISTENING_ONLY], ids=["both", "neither", "speaking", "listening"]
)
def test_a_language_takes_a_speaker_and_a_listener(arm: tuple[float, float], seed: int) -> None:
    """Training a speaker without a listener, or a listener without a speaker, leaves play at chance."""
    assert informative(hint_policy(seed)) == pytest.approx(0.5, abs=1e-6)
    played = play(train(seed, *arm))
    if arm == BOTH:
        assert played.accuracy >= 0.9 and played.after >= 0.9
    else:
        assert abs(played.accuracy - 0.5) < 0.1 and abs(played.after - 0.5) < 0.05

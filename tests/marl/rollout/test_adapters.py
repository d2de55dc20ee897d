"""Every adapter plays as it is scored, after each of several updates: no rollout has stale or missing weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from marl.agents.base import Agent
from marl.agents.model import ModelAgent
from marl.learning.advantages import Credit, add_advantages
from marl.learning.batch import collate, rows_of
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.update import Learner, make_optimizer, update
from marl.losses import Loss
from marl.losses.kl import KLLoss
from marl.losses.listening import ListeningLoss
from marl.losses.policy import PolicyLoss
from marl.losses.world_model import WorldModelLoss
from marl.model.lora import AdapterConfig, adapted, copied, is_own
from marl.model.policy import Policy, pretrained
from marl.rewards import Reward, add_rewards
from marl.rewards.game import GameReward
from marl.rollout.games import env_maker
from marl.rollout.rollout import rollout
from marl.rollout.seeds import GAMES, Game, draw_games
from marl.storage.checkpoint import load_policy, save_policy
from marl.types import Episode, TokenBatch
from tests.marl.model.test_lora import moved, policy_of
from tests.marl.models import with_critic

pytest.importorskip("peft")

DOND = env_maker({"game": "dond", "style": "compact", "max_errors": 2, "max_entries": 4})
LOSSES: dict[str, Loss] = {
    "policy": PolicyLoss(), "kl": KLLoss(0.1), "listening": ListeningLoss(), "world_model": WorldModelLoss(1.0),
}  # fmt: skip
REWARDS: dict[str, Reward] = {"game": GameReward()}
CONFIG = UpdateConfig(learning_rate=1e-2, minibatches=1, token_budget=4096)
NAMES = ("base", "friend", "learner", "rival")
# The game accepts nothing that random weights say, so that only one seat may speak: each also plays itself.
PAIRS = (
    *zip(NAMES, NAMES, strict=True),
    ("learner", "rival"),
    ("learner", "base"),
    ("rival", "friend"),
    ("friend", "base"),
)


def play(agents: Mapping[str, Agent], iteration: int) -> list[Episode]:
    """Two games of each pair of players, side by side."""
    games = draw_games(iteration, GAMES, count=2 * len(PAIRS))
    pairs = {game.seed: PAIRS[i % len(PAIRS)] for i, game in enumerate(games)}

    def assign(game: Game, env: Any) -> Mapping[str, Agent]:
        return dict(zip(env.possible_agents, (agents[name] for name in pairs[game.seed]), strict=True))

    return add_rewards(rollout(games, assign, DOND, len(games)), REWARDS)


@torch.no_grad()
def gap(policy: Policy, batch: TokenBatch) -> float:
    """Largest difference between the log-probabilities noted while playing and those that the policy gives now."""
    found: Tensor = forward(policy, batch, 1.0, {"reply": True}).logprobs
    return float((found - batch.logprobs)[batch.reply].abs().max())


@pytest.mark.parametrize("kind", ["tiny", "gpt2", "gemma3"])
def test_sampler_and_trainer_agree_for_each_adapter_after_each_update(kind: str, tmp_path: Path) -> None:
    base = policy_of(kind, tmp_path / "base")
    config = AdapterConfig(rank=4, alpha=8)
    if kind == "tiny":  # small bases have no folder; other frozen partners are loaded from a run's
        friend = moved(adapted(base, config, 2), 2)
    else:
        save_policy(tmp_path / "run" / "policy", moved(adapted(base, config, 2), 2), {"game": "dond"})
        friend = load_policy(tmp_path / "run" / "policy", over=base)
    policies = {"base": base, "friend": friend, "learner": adapted(base, config, 0), "rival": adapted(base, config, 1)}
    shared = {p.data_ptr() for each in policies.values() for n, p in each.lm.named_parameters() if not is_own(n)}
    assert shared == {p.data_ptr() for p in base.lm.parameters()}  # one copy of the base in memory
    agents = {
        name: ModelAgent(name, policy, slots=32, context=1024, max_new_tokens=5, decode_steps=1 + 2 * (name == "rival"))
        for name, policy in policies.items()
    }
    learners = [
        Learner(name, policies[name], base, make_optimizer(policies[name], CONFIG)) for name in ("learner", "rival")
    ]
    for iteration in range(3):
        episodes = play(agents, iteration)
        batches = {name: collate(rows_of(episodes, {name}), REWARDS) for name in policies}
        for name, batch in batches.items():
            assert int(batch.reply.sum()) > 3 and gap(policies[name], batch) < 1e-4, (iteration, name)
            # Other adapters, none, and the weights before the last update would all give other numbers.
            for other, policy in policies.items():
                same = other == name or (iteration == 0 and "friend" not in (name, other))  # B = 0
                assert same or gap(policy, batch) > 0.01, (iteration, name, other)
        for learner in learners:
            batch = add_advantages(batches[learner.name], REWARDS, Credit())
            with learner.training() as policy:
                update(policy, base, batch, LOSSES, learner.optimizer, CONFIG, torch.Generator().manual_seed(0))
            assert gap(learner.policy, batches[learner.name]) > 0.01, (iteration, learner.name)


@pytest.mark.parametrize(("kind", "bf16"), [("gpt2", False), ("gemma3", False), ("gpt2", True)])
def test_an_adapter_of_weight_0_and_one_that_is_off_are_the_base_to_the_last_bit(
    kind: str, bf16: bool, tmp_path: Path
) -> None:
    """Games, log-probabilities, values and beliefs are those of a policy that was never adapted, also as the trainer
    computes them. The adapter itself plays other games, after updates that moved it."""
    policy_of(kind, tmp_path)
    never, base = (
        with_critic(pretrained(tmp_path, seed=0, dtype=torch.bfloat16 if bf16 else torch.float32)) for _ in range(2)
    )
    learner = adapted(base, AdapterConfig(rank=4, alpha=8, bf16=bf16))
    agent = ModelAgent("learner", learner, slots=32, context=1024, max_new_tokens=5, decode_steps=3)
    optimizer = make_optimizer(learner, CONFIG)
    for iteration in range(2):
        batch = collate(rows_of(play(dict.fromkeys(NAMES, agent), iteration), {"learner"}), REWARDS)
        batch = add_advantages(batch, REWARDS, Credit())
        update(learner, base, batch, LOSSES, optimizer, CONFIG, torch.Generator().manual_seed(0))
    zero = copied(learner)
    with torch.no_grad():
        for name, parameter in zero.named_parameters():
            if ".lora_B." in name:
                assert parameter.any(), "it has learned nothing"
                parameter.zero_()
    assert learner.adapter is not None and zero.adapter is not None
    zero.value_head.load_state_dict(never.value_head.state_dict())

    def said(policy: Policy) -> tuple[list[Any], TokenBatch]:
        player = ModelAgent("one", policy, slots=32, context=1024, max_new_tokens=5, decode_steps=3)
        episodes = play(dict.fromkeys(NAMES, player), 2)
        beliefs = [[(b.position, b.probs.tolist()) for b in e.beliefs] for e in episodes]
        return [[e.streams, e.turns] for e in episodes] + beliefs, collate(rows_of(episodes, {"one"}), REWARDS)

    played, batch = said(never)
    found = scored(never, batch)
    assert int(batch.reply.sum()) > 30 and gap(never, batch) < (0.2 if bf16 else 1e-4)
    for same in (learner.adapter.base, zero.adapter.base, zero):
        assert said(same)[0] == played
        for name, tensor in scored(same, batch).items():
            assert torch.equal(tensor, found[name]), name
    assert not scored(zero, batch, reference=base)["divergence"].any()
    assert said(learner)[0] != played and gap(learner, batch) > 0.05


@torch.no_grad()
def scored(policy: Policy, batch: TokenBatch, reference: Policy | None = None) -> dict[str, Tensor]:
    """Returns what the trainer computes, and with a `reference` the divergence from it."""
    reads = dict.fromkeys(("reply", "values", "beliefs", "observed", *["divergence"] * bool(reference)), True)
    outputs = forward(policy, batch, 1.0, reads, reference)
    return {name: tensor for name, tensor in vars(outputs).items() if torch.is_tensor(tensor)}

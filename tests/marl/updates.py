"""Losses, and rows of games of hints to learn from, for tests of the update."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from marl.agents.model import ModelAgent
from marl.learning.advantages import Credit, add_advantages
from marl.learning.batch import collate, rows_of
from marl.learning.config import UpdateConfig
from marl.learning.update import update
from marl.losses import Loss
from marl.losses.entropy import EntropyLoss
from marl.losses.imitation import ImitationLoss
from marl.losses.kl import KLLoss
from marl.losses.listening import ListeningLoss
from marl.losses.plan import PlanLoss
from marl.losses.policy import PolicyLoss
from marl.losses.value import ValueLoss
from marl.losses.world_model import WorldModelLoss
from marl.model.policy import Policy
from marl.rewards import Reward, add_rewards
from marl.rewards.game import GameReward
from marl.rewards.speaking import SpeakingReward
from marl.rollout.rollout import rollout
from marl.rollout.seeds import Game, draw_games
from marl.types import Episode, Planned, TokenBatch, Turn
from tests.marl.hint import Hint, hint_policy

TERMS: dict[str, Loss] = {
    "policy": PolicyLoss(weight=1.0),
    "value": ValueLoss(weight=0.5),
    "entropy": EntropyLoss(weight=0.01),
    "kl": KLLoss(weight=0.05),
    "listening": ListeningLoss(weight=0.3),
    "world_model": WorldModelLoss(weight=0.1),
    "imitation": ImitationLoss(weight=0.2),
    "plan": PlanLoss(weight=0.2),
    "exact": KLLoss(weight=0.05, estimator="exact", over="both"),
}
READS = {"reply": True, "values": True, "beliefs": True, "observed": True, "planned": True}
REWARDS: dict[str, Reward] = {"game": GameReward(), "speaking": SpeakingReward(weight=0.5)}


def noisy(policy: Policy, seed: int) -> Policy:
    """Returns the same model with weights far enough from their start that every token matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.15 * torch.randn(weight.shape, generator=generator))
    return policy.eval()


def another() -> Policy:
    """Returns the reference policy."""
    return noisy(hint_policy(0, privileged_size=2), 1)


def play(policy: Policy, games: int, temperature: float = 1.0, reference: Policy | None = None) -> list[Episode]:
    """Games of hints; with a reference it holds one seat in each."""
    learner = ModelAgent(
        "learner", policy, slots=2 * games, context=policy.context, max_new_tokens=3, temperature=temperature
    )
    agents = {"learner": learner}
    if reference is not None:
        agents["base"] = ModelAgent("base", reference, slots=games, context=reference.context, max_new_tokens=3)

    def cast(game: Game, env: Any) -> dict[str, ModelAgent]:
        frozen = env.possible_agents[game.seed % 2] if reference is not None else ""
        return {agent: agents["base" if agent == frozen else "learner"] for agent in env.possible_agents}

    episodes = rollout(draw_games(3, 1, count=games), cast, Hint, games)
    return add_rewards(episodes, {"game": GameReward(scale=1.0), "speaking": SpeakingReward()})


def planned(episode: Episode) -> Episode:
    """Notes a plan beside every choice, in which the first option is three times as likely as the second."""

    def noted(turn: Turn) -> Turn:
        if not turn.legal:
            return turn
        options = tuple((i,) for i in turn.legal)
        chosen = turn.legal.index(turn.reply_ids[0])
        plan = Planned(("red", "blue"), options, (0.5, 0.5), (1.0, 0.0), (0.75, 0.25), chosen, played=False)
        return replace(turn, planned=plan)

    return replace(episode, turns=tuple(map(noted, episode.turns)))


def to_batch(episodes: list[Episode], players: tuple[str, ...] = ("learner",)) -> TokenBatch:
    seats = rows_of(episodes, players)
    batch = collate(seats, REWARDS, imitate=[bool(episode.outcome["right"]) for episode, _ in seats])
    return add_advantages(batch, REWARDS, Credit())


@cache
def all_played() -> tuple[Policy, TokenBatch]:
    policy = noisy(hint_policy(0, privileged_size=2), 0)
    return policy, to_batch([planned(episode) for episode in play(policy, 12)])


def played() -> tuple[Policy, TokenBatch]:
    """A policy of the caller's own, and 24 rows that it played: speech of one to three tokens, choices, questions."""
    policy, batch = all_played()
    return copy.deepcopy(policy), batch


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


def identical(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def trained(
    losses: Mapping[str, Loss], batch: TokenBatch | None = None, seed: int = 0, **settings: object
) -> dict[str, Tensor]:
    """Returns the weights after two minibatches of AdamW, from a fresh policy."""
    policy, own = played()
    reference = another()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.1)
    config = UpdateConfig(**{"minibatches": 2, "token_budget": 128, **settings})  # type: ignore[arg-type]
    update(policy, reference, batch or own, losses, optimizer, config, torch.Generator().manual_seed(seed))
    return weights_of(policy)

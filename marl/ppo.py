"""PPO with listening and speaking: the loop, from games to a gradient.

Everything random in iteration `i` is a function of the seed and `i`, so that a run continued from a checkpoint is the
run that was never stopped. What this leaves out: where the base comes from (pretrain.py), evaluation games, reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from marl.advantages import Credit, add_advantages
from marl.agents import Agent, PlayConfig, model_agent
from marl.batch import collate, seats_of
from marl.errors import UserError
from marl.filtered_bc import KEEPS, competitive, select
from marl.losses import Loss
from marl.monitor import Progress, episode_metrics, speed_metrics
from marl.policy import Policy
from marl.rewards import Reward, add_rewards
from marl.rollout import GAMES, draw_games, pairing, rollout, shuffle_seed
from marl.types import Episode
from marl.update import UpdateConfig, update


@dataclass(frozen=True)
class PPOConfig(PlayConfig):
    """`partners`: who else plays, and in what share of games. `imitate`: what the imitation term learns from."""

    anneal_lr: bool = True  # the learning rate falls linearly to 0 over the iterations
    partners: Mapping[str, float] = field(default_factory=dict)
    imitate: str = "above_mean"
    credit: Credit = field(default_factory=Credit)
    update: UpdateConfig = field(default_factory=UpdateConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.imitate not in KEEPS:
            raise UserError(f"algo.imitate={self.imitate}: must be one of {', '.join(KEEPS)}")
        shares = list(self.partners.values())
        if any(isinstance(s, bool) or not isinstance(s, int | float) or s < 0 for s in shares) or sum(shares) > 1:
            raise UserError(
                f"algo.partners={dict(self.partners)}: shares of the games, each 0 to 1, together at most 1"
            )


def train_ppo(
    policy: Policy,
    reference: Policy,
    make_env: Callable[[], Any],
    rewards: Mapping[str, Reward],
    losses: Mapping[str, Loss],
    config: PPOConfig,
    *,
    seed: int,
    partners: Mapping[str, Agent],
    optimizer: torch.optim.Optimizer,
    start: int,
    after: Callable[[int, dict[str, float], Sequence[Episode]], None],
    progress: Progress,
) -> None:
    """Trains `policy` in place, from iteration `start` (0-based). `after` gets each finished iteration's number (from
    1), metrics and episodes."""
    env = make_env()
    learner = model_agent("learner", policy, config, len(env.possible_agents), config.temperature)
    cast = pairing(learner, [(partners[name], share) for name, share in config.partners.items() if share])
    weights = {name: reward.weight for name, reward in rewards.items()}
    scored = replace(config.update, temperature=config.temperature)  # what was sampled is what is scored
    rivals = competitive(env)

    for iteration in range(start, config.iterations):
        began = time.perf_counter()
        left = 1 - iteration / config.iterations if config.anneal_lr else 1.0
        for group in optimizer.param_groups:
            group["lr"] = config.update.learning_rate * left
        progress.stage(f"iteration {iteration + 1}/{config.iterations}: games", config.games)
        games = draw_games(seed, GAMES, iteration, count=config.games)
        episodes = rollout(games, cast, make_env, config.concurrency, progress.advance)
        played = time.perf_counter()

        episodes = add_rewards(episodes, rewards)
        seats = seats_of(episodes, {learner.name})
        chosen = {(id(e), a) for e, a in select(seats, config.imitate, rivals)} if "imitation" in losses else set()
        batch = collate(
            seats,
            weights,
            separate_speech=config.credit.separate,
            imitate=lambda episode, agent: (id(episode), agent) in chosen,  # noqa: B023
            privileged=lambda episode, agent: episode.privileged.get(agent, ()),
        )
        batch = add_advantages(batch, config.credit, weights.get("speaking", 0.0))
        progress.stage(f"iteration {iteration + 1}/{config.iterations}: update", config.update.epochs * len(seats))
        metrics = update(
            policy,
            reference,
            batch,
            losses,
            optimizer,
            scored,
            torch.Generator().manual_seed(shuffle_seed(seed, iteration)),
            progress.advance,
        )
        metrics |= episode_metrics(episodes, {learner.name})
        metrics |= speed_metrics(episodes, batch, played - began, time.perf_counter() - played)
        after(iteration + 1, metrics, episodes)

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

from marl.agents.base import Agent
from marl.agents.model import PlayConfig, model_agent
from marl.algorithms.filtered_bc import KEEPS, competitive, select
from marl.common.distributed import ONE, Ranks
from marl.common.errors import UserError
from marl.learning.advantages import Credit, add_advantages
from marl.learning.batch import collate, seats_of
from marl.learning.config import UpdateConfig
from marl.learning.renaming import Renaming
from marl.learning.update import Learner, update
from marl.losses import Loss
from marl.metrics.training import Progress, episode_metrics, speed_metrics
from marl.planning.planner import PlannerConfig, planning_agent
from marl.rewards import Reward, add_rewards
from marl.rollout.cast import Seats, by_role, places
from marl.rollout.rollout import rollout
from marl.rollout.seeds import RENAME, Seeds, shuffle_seed
from marl.types import INSIDERS, Episode, Kind


@dataclass(frozen=True)
class PPOConfig(PlayConfig):
    """`imitate`: what the imitation term learns from. `alternate`: where two learn, how many iterations one learns
    while the other stands still (0: both in every iteration). `planner`: how the plans of the plan term are made, which
    are noted beside the policy's own samples; nobody plans without that term."""

    anneal_lr: bool = True  # the learning rate falls linearly to 0 over the iterations
    alternate: int = 0
    imitate: str = "above_mean"
    credit: Credit = field(default_factory=Credit)
    planner: PlannerConfig = field(default_factory=lambda: PlannerConfig(choose="own"))
    update: UpdateConfig = field(default_factory=UpdateConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.planner.choose != "own":
            raise UserError(
                f"algo.planner.choose={self.planner.choose}: PPO learns from the policy's own samples; must be own"
            )
        if self.imitate not in KEEPS:
            raise UserError(f"algo.imitate={self.imitate}: must be one of {', '.join(KEEPS)}")
        if self.alternate < 0:
            raise UserError(f"algo.alternate={self.alternate}: must not be negative")


def train_ppo(
    learners: Sequence[Learner],
    make_env: Callable[[], Any],
    rewards: Mapping[str, Reward],
    losses: Mapping[str, Loss],
    config: PPOConfig,
    *,
    game: str,
    cast: Mapping[str, Seats],
    frozen: Mapping[str, Agent],
    seeds: Seeds,
    start: int,
    after: Callable[[int, dict[str, float], Sequence[Episode]], None],
    progress: Progress,
    rename: Renaming | None = None,
    ranks: Ranks = ONE,
) -> None:
    """Trains the learners in place, from iteration `start` (0-based).

    `cast` says who plays each role; `frozen` are the players in it that don't learn. `after` gets each finished
    iteration's number (from 1), metrics (a second learner's begin with its name) and episodes. `rename`: see `update`.
    Where there is a plan term, `game` is one of `planner.GAMES`; plans stay near each learner's reference.
    """
    env = make_env()
    held = places(cast, env)
    agents = dict(frozen)
    for learner in learners:
        room, temperature = held[learner.name], config.temperature
        if "plan" in losses:  # plays the same, and notes what would have been planned
            agents[learner.name] = planning_agent(
                learner.name, learner.policy, config, room, temperature, config.planner, game, learner.reference
            )
        else:
            agents[learner.name] = model_agent(learner.name, learner.policy, config, room, temperature)
    seated = by_role(cast, agents)
    weights = {name: reward.weight for name, reward in rewards.items()}
    scored = replace(config.update, temperature=config.temperature)  # what was sampled is what is scored
    rivals = competitive(env)

    for iteration in range(start, config.iterations):
        stage = f"iteration {iteration + 1}/{config.iterations}"
        began = time.perf_counter()
        games = ranks.share(seeds.draw(iteration, config.games))
        progress.stage(f"{stage}: games", len(games))
        episodes = ranks.collect(rollout(games, seated, make_env, config.concurrency, progress.advance))
        played = time.perf_counter()

        episodes = add_rewards(episodes, rewards)
        metrics: dict[str, float] = {}
        learned = 0
        for learner in learning(learners, config.alternate, iteration):
            for group in learner.optimizer.param_groups:
                left = 1 - iteration / config.iterations if config.anneal_lr else 1.0
                group["lr"] = config.update.learning_rate * left
            seats = seats_of(episodes, {learner.name})
            if not seats:  # a rare partner may have sat down in none of these games
                continue
            chosen = {(id(e), a) for e, a in select(seats, config.imitate, rivals)} if "imitation" in losses else set()
            batch = collate(
                seats,
                weights,
                separate_speech=config.credit.separate,
                imitate=lambda episode, agent: (id(episode), agent) in chosen,  # noqa: B023
                privileged=lambda episode, agent: episode.privileged.get(agent, ()),
                silent_roles=INSIDERS,
            )
            batch = add_advantages(batch, config.credit, weights.get("speaking", 0.0))
            learned += int((batch.kind != Kind.PAD).sum())
            progress.stage(f"{stage}: update of {learner.name}", config.update.epochs * len(seats))
            generator = torch.Generator().manual_seed(shuffle_seed(seeds.shuffling, iteration))
            if rename is not None:
                rename.generator.manual_seed(shuffle_seed(seeds.shuffling, iteration, RENAME))
            with learner.training() as policy:
                found = update(
                    policy, learner.reference, batch, losses, learner.optimizer, scored, generator, progress.advance,
                    rename, ranks,
                )  # fmt: skip
            metrics |= named(found, learner, learners)
        for learner in learners:
            metrics |= named(episode_metrics(episodes, {learner.name}), learner, learners)
        metrics |= speed_metrics(episodes, learned, played - began, time.perf_counter() - played)
        after(iteration + 1, metrics, episodes)


def named(metrics: dict[str, float], learner: Learner, learners: Sequence[Learner]) -> dict[str, float]:
    """A second learner's metrics begin with its name."""
    return metrics if learner is learners[0] else {f"{learner.name}/{name}": x for name, x in metrics.items()}


def learning(learners: Sequence[Learner], alternate: int, iteration: int) -> Sequence[Learner]:
    """Who learns in this iteration: everybody, or, alternating, one after another for `alternate` iterations."""
    return learners if not alternate else [learners[iteration // alternate % len(learners)]]

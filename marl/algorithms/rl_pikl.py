"""RL-DiL-piKL (Bakhtin et al. 2022): play with the planner in the loop, and learn to play as it planned.

In every iteration the learner talks, believes and decides when to propose; a planner chooses its claims or votes near a
frozen anchor, the base (planner.py). Then the policy is regressed to the plans by cross-entropy, the critic to what
they expected (or to what the game paid), and belief to the truth. What the policy learned the next plans are made with:
what it says and believes. Everything random in iteration `i` is a function of the seed and `i`, as in ppo.py.

Left out, of the published algorithm: a value for what follows a plan (here nothing is decided after it, but for later
meetings in Among Us), proposals of actions (all are weighed), exploration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from envs.among_us.state import Ending
from marl.agents.base import Agent
from marl.agents.model import PlayConfig
from marl.common.distributed import ONE, Ranks
from marl.common.errors import UserError
from marl.learning.advantages import Credit, add_advantages
from marl.learning.batch import Seat, collate, seats_of
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
from marl.types import INSIDERS, Episode, Kind, Payment, TokenBatch

VALUES = ("plan", "paid")


@dataclass(frozen=True)
class RLPiklConfig(PlayConfig):
    """`planner`: how what is played and learned is planned. `gamma`: of the returns that the critic is regressed to.

    `value`: what these returns end in. `plan`, as published: at a planned claim what the plan expects, the sum over
    claims of plan times value, in place of what the game paid for the one that was drawn; at a planned vote of Among Us
    what `expected_votes` makes of it. Seats that never claimed or voted learn from what was paid. `paid`: so do all.
    """

    anneal_lr: bool = True  # the learning rate falls linearly to 0 over the iterations
    gamma: float = 1.0
    value: str = "plan"
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.gamma <= 1:
            raise UserError(f"algo.gamma={self.gamma}: must lie in [0, 1]")
        if self.value not in VALUES:
            raise UserError(f"algo.value={self.value}: must be one of {', '.join(VALUES)}")
        if self.planner.choose == "own":
            raise UserError("algo.planner.choose=own: with algo=pikl plans are played; choose sample or best")
        if self.update.target_kl is not None:
            raise UserError("algo.update.target_kl: algo=pikl regresses to plans, not to its own draws; must be null")


def as_expected(episode: Episode) -> Episode:
    """The game of Deal or No Deal in which each seat was paid, with its planned claim, what the plan expected."""
    expected = {
        turn.agent: Payment(turn.agent, turn.step, float(np.dot(turn.planned.plan, turn.planned.values)))
        for turn in episode.turns
        if turn.planned and turn.planned.played
    }
    paid = [payment for payment in episode.payments if payment.agent not in expected]
    return replace(episode, payments=(*paid, *expected.values()))


def expected_votes(batch: TokenBatch, seats: Sequence[Seat]) -> TokenBatch:
    """The batch with what plans expected as the returns of planned votes in Among Us with one imposter.

    p W + (1 - p) L: p, the sum over votes of plan times value, is the planned probability that the imposter is ejected.
    W is what games paid after votes that did so. L is what this game paid, if the vote did not; of those that did it is
    unknown, and the others' mean stands for it. All of these are of the batch's planned votes; where all of them ended
    alike, nothing is changed.
    """
    rows, places, expected, ejected = [], [], [], []
    for row, (episode, agent) in enumerate(seats):
        last = max(turn.step for turn in episode.turns)  # of a game that a vote ended, the step of that vote
        for turn in episode.turns:
            if turn.agent == agent and turn.planned and turn.planned.played:
                rows.append(row)
                places.append(turn.start)
                expected.append(float(np.dot(turn.planned.plan, turn.planned.values)))
                ejected.append(turn.step == last and episode.outcome["how"] == Ending.EJECTION)
    won = torch.tensor(ejected, dtype=torch.bool)
    if not bool(won.any()) or bool(won.all()):
        return batch
    paid = batch.returns[rows, places]
    p = torch.tensor(expected, dtype=paid.dtype)
    win, otherwise = paid[won].mean(), torch.where(won, paid[~won].mean(), paid)
    returns = batch.returns.clone()
    returns[rows, places] = p * win + (1 - p) * otherwise
    return replace(batch, returns=returns)


def train_rl_pikl(
    learner: Learner,
    make_env: Callable[[], Any],
    rewards: Mapping[str, Reward],
    losses: Mapping[str, Loss],
    config: RLPiklConfig,
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
    """Trains the learner in place, whose `reference` is the anchor; other arguments as in `train_ppo`.

    `game`: one of `planner.GAMES`, with a `config.value` that fits it. None of the `losses` may compare the policy with
    `logprobs`, which are the plan's.
    """
    agent = planning_agent(
        learner.name, learner.policy, config, places(cast, make_env())[learner.name], config.temperature,
        config.planner, game, learner.reference,
    )  # fmt: skip
    seated = by_role(cast, {**frozen, learner.name: agent})
    # Nothing here learns from the speaking reward: it is measured.
    paid = {name: reward for name, reward in rewards.items() if name != "speaking"}
    weights = {name: reward.weight for name, reward in paid.items()}
    returns = Credit(gamma=config.gamma, gae_lambda=1.0, speech="common")  # what is paid from there on
    scored = replace(config.update, temperature=config.temperature)

    for iteration in range(start, config.iterations):
        stage = f"iteration {iteration + 1}/{config.iterations}"
        began = time.perf_counter()
        games = ranks.share(seeds.draw(iteration, config.games))
        progress.stage(f"{stage}: games", len(games))
        episodes = ranks.collect(rollout(games, seated, make_env, config.concurrency, progress.advance))
        played = time.perf_counter()

        episodes = add_rewards(episodes, rewards)
        valued: Sequence[Episode] = episodes
        if config.value == "plan" and game == "dond":
            valued = add_rewards([as_expected(episode) for episode in episodes], paid)
        seats = seats_of(valued, {learner.name})
        if not seats:  # a rare partner may have sat down in none of these games
            after(iteration + 1, episode_metrics(episodes, {learner.name}), episodes)
            continue
        batch = collate(
            seats,
            weights,
            privileged=lambda episode, agent: episode.privileged.get(agent, ()),
            silent_roles=INSIDERS,
            drawn_from_plans=True,
        )
        batch = add_advantages(batch, returns, 0.0)
        if config.value == "plan" and game == "among_us":
            batch = expected_votes(batch, seats)
        for group in learner.optimizer.param_groups:
            left = 1 - iteration / config.iterations if config.anneal_lr else 1.0
            group["lr"] = config.update.learning_rate * left
        progress.stage(f"{stage}: update", config.update.epochs * len(seats))
        generator = torch.Generator().manual_seed(shuffle_seed(seeds.shuffling, iteration))
        if rename is not None:
            rename.generator.manual_seed(shuffle_seed(seeds.shuffling, iteration, RENAME))
        with learner.training() as policy:
            metrics = update(
                policy, learner.reference, batch, losses, learner.optimizer, scored, generator,
                progress.advance, rename, ranks,
            )  # fmt: skip
        metrics |= episode_metrics(episodes, {learner.name})
        learned = int((batch.kind != Kind.PAD).sum())
        metrics |= speed_metrics(episodes, learned, played - began, time.perf_counter() - played)
        after(iteration + 1, metrics, episodes)

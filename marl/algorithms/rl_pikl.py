"""RL-DiL-piKL (Bakhtin et al. 2022): play with the planner in the loop, and learn to play as it planned.

In every iteration the learner talks, believes and decides when to propose; a planner chooses its claims or votes near a
frozen anchor, the base (`planning/planner.py`). Then the policy is regressed to the plans by cross-entropy, the critic
to their expected payment (or to the game's payment), and belief to the truth.

Left out of the published algorithm: a value of what follows a plan, proposals of actions (plans weigh all actions),
exploration.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from envs.among_us.state import Ending
from marl.algorithms.training import TrainConfig, Training
from marl.common.errors import UserError, check_choices, check_range
from marl.learning.advantages import Credit, add_advantages
from marl.learning.batch import Row, collate, rows_of
from marl.losses import any_needs
from marl.planning.planner import PlannerConfig, planning_agent
from marl.rewards import add_rewards, credits_messages
from marl.types import Episode, Payment, TokenBatch

VALUES = ("plan", "paid")


@dataclass(frozen=True)
class RLPiklConfig(TrainConfig):
    """Settings of RL-DiL-piKL. `planner`: how the plans are made that are played and learned.

    `gamma`: discount of the critic's target returns. `value`: the payment in these returns: the game's own (`paid`) or,
    as published, what the plan expected (`plan`) of a claim (`as_expected`) or a vote (`expected_votes`).
    """

    anneal_lr: bool = True  # the learning rate falls linearly to 0 over the iterations
    gamma: float = 1.0
    value: str = "plan"
    planner: PlannerConfig = field(default_factory=PlannerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "algo", "[0, 1]", "gamma")
        check_choices(self, "algo", value=VALUES)
        if self.planner.choose == "own":
            raise UserError("algo.planner.choose=own: with algo=pikl plans are played. Choose sample or best.")
        if self.update.target_kl is not None:
            raise UserError("algo.update.target_kl: algo=pikl regresses to plans, not to its own draws; must be null")


def train_rl_pikl(training: Training, config: RLPiklConfig) -> None:
    """Trains the one learner in place; its `reference` is the anchor. No loss may need advantages."""
    (learner,) = training.learners
    agent = planning_agent(
        learner.name, learner.policy, config, training.seats_per_game(learner), config.temperature, config.planner,
        training.game, learner.reference,
    )  # fmt: skip
    paid = {name: reward for name, reward in training.rewards.items() if not credits_messages(reward)}
    votes = any_needs(training.losses, "votes")
    returns = Credit(gamma=config.gamma, gae_lambda=1.0)  # discounted sums of later payments
    for iteration in training.iterations(config, {learner.name: agent}):
        episodes = add_rewards(iteration.rollout(), training.rewards)
        valued: Sequence[Episode] = episodes
        if config.value == "plan" and training.game == "dond":
            valued = add_rewards([as_expected(episode) for episode in episodes], paid)
        rows = rows_of(valued, {learner.name})
        if rows:  # a learner that is a rare partner may hold no seat
            batch = add_advantages(collate(rows, paid, votes=votes, drawn_from_plans=True), paid, returns)
            if config.value == "plan" and training.game == "among_us":
                batch = expected_votes(batch, rows)
            iteration.update(learner, batch)
        iteration.finish(episodes)


def as_expected(episode: Episode) -> Episode:
    """Returns a game of Deal or No Deal in which each planned claim is paid its expected value, sum(plan * values)."""
    expected = {
        turn.agent: Payment(turn.agent, turn.step, float(np.dot(turn.planned.plan, turn.planned.values)))
        for turn in episode.turns
        if turn.planned and turn.planned.played
    }
    paid = [payment for payment in episode.payments if payment.agent not in expected]
    return replace(episode, payments=(*paid, *expected.values()))


def expected_votes(batch: TokenBatch, rows: Sequence[Row]) -> TokenBatch:
    """Sets the returns of planned votes, in Among Us with one imposter, to what plans expected: p W + (1 - p) L.

    p, the sum over votes of plan times value, is the planned probability that the imposter is ejected. W is the mean
    return of votes that ejected it. L is the vote's own return if it did not eject the imposter, else the mean return
    of votes that did not. If all planned votes of the batch ended alike, nothing changes.
    """
    voted, positions, expected, ejected = [], [], [], []
    for row, (episode, agent) in enumerate(rows):
        last = max(turn.step for turn in episode.turns)  # of a game that a vote ended, the step of that vote
        for turn in episode.turns:
            if turn.agent == agent and turn.planned and turn.planned.played:
                voted.append(row)
                positions.append(turn.start)
                expected.append(float(np.dot(turn.planned.plan, turn.planned.values)))
                ejected.append(turn.step == last and episode.outcome["how"] == Ending.EJECTION)
    won = torch.tensor(ejected, dtype=torch.bool)
    if not bool(won.any()) or bool(won.all()):
        return batch
    paid = batch.returns[voted, positions]
    p = torch.tensor(expected, dtype=paid.dtype)
    win, otherwise = paid[won].mean(), torch.where(won, paid[~won].mean(), paid)
    returns = batch.returns.clone()
    returns[voted, positions] = p * win + (1 - p) * otherwise
    return replace(batch, returns=returns)

"""PPO with listening and speaking: from games to a gradient.

Play games with the policy; pay each turn and each message; lay every seat's stream out as a row; compute advantages by
GAE, or without a critic (`learning/estimators.py`), and credit messages; step on the sum of the losses (policy, value,
listening, ...). `training.py` has what the loops share: drawing games, seeds, learning rate, metrics. Left out: where
the base comes from, evaluation, checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from marl.agents.model import ModelAgent, model_agent
from marl.algorithms.filtered_bc import FILTERS, is_zero_sum, select
from marl.algorithms.training import TrainConfig, Training
from marl.common.errors import UserError, check_choices, check_range
from marl.intents.agent import intent_conditioned_agent
from marl.learning.advantages import Credit, add_advantages
from marl.learning.batch import collate, rows_of
from marl.learning.estimators import ESTIMATORS, GROUPED, Baselines
from marl.learning.update import Learner
from marl.losses import any_needs, any_reads
from marl.planning.planner import PlannerConfig, planning_agent
from marl.rewards import add_rewards


@dataclass(frozen=True)
class PPOConfig(TrainConfig):
    """Settings of PPO."""

    anneal_lr: bool = True  # the learning rate falls linearly to 0 over the iterations
    alternate: int = 0  # two learners take turns, each learning for so many iterations; 0: both always learn
    imitate: str = "above_mean"  # the games that an imitation loss learns from (`filtered_bc.select`)
    advantage: str = "gae"  # with a critic, or one without (`learning/estimators.py`)
    group: int = 1  # plays of each start, among the `games`
    scale: bool = True  # grpo divides by the group's standard deviation
    intents: str | None = None  # folder of `experiments.studies.intents`, whose action model plans what learners intend
    credit: Credit = field(default_factory=Credit)
    # Plans for a loss that reads them. They are only recorded: the policy's own samples are played.
    planner: PlannerConfig = field(default_factory=lambda: PlannerConfig(choose="own"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.planner.choose != "own":
            raise UserError(
                f"algo.planner.choose={self.planner.choose}: PPO learns from the policy's own samples; must be own"
            )
        check_choices(self, "algo", imitate=FILTERS, advantage=ESTIMATORS)
        check_range(self, "algo", "[0, inf)", "alternate")
        self.check_advantage()

    def check_advantage(self) -> None:
        """Raises UserError for settings that the estimator does not read, or groups that it cannot compare."""
        name = self.advantage
        least = 2 if name in GROUPED else 1
        if self.group < least:
            raise UserError(
                f"algo.group={self.group}: algo.advantage={name} compares plays of one start; must be at least {least}"
            )
        if not self.scale and name != "grpo":
            raise UserError(
                f"algo.scale=false: algo.advantage={name} does not divide by a group's spread. Leave it out."
            )
        if name != "gae" and self.credit.gae_lambda != Credit.gae_lambda:
            raise UserError(
                f"algo.credit.gae_lambda={self.credit.gae_lambda:g}: algo.advantage={name} has no critic; "
                "leave it out, or take gae"
            )


def train_ppo(training: Training, config: PPOConfig) -> None:
    """Trains the learners in place."""
    agents = {learner.name: player(learner, training, config) for learner in training.learners}
    zero_sum = is_zero_sum(training.make_env())  # then a deal that pays neither player may be imitated
    votes = any_needs(training.losses, "votes")
    for iteration in training.iterations(config, agents):
        episodes = iteration.rollout()  # also answers the belief questions
        episodes = add_rewards(episodes, training.rewards)  # fills turn.rewards by name
        for learner in learning(training.learners, config.alternate, iteration.number):
            rows = rows_of(episodes, {learner.name})
            if not rows:  # a rare partner may hold no seat in these games
                continue
            kept = select(rows, config.imitate, zero_sum)  # what an imitation loss may learn from
            batch = collate(rows, training.rewards, imitate=kept, votes=votes)  # the only masks
            baselines = None  # the critic's values
            if config.advantage != "gae":
                running = training.memory.setdefault(learner.name, {})
                baselines = Baselines(config.advantage, rows, running, config.scale)
            batch = add_advantages(batch, training.rewards, config.credit, baselines)
            if baselines is not None:
                iteration.add(baselines.metrics, learner)
            iteration.update(learner, batch)
        iteration.finish(episodes)


def player(learner: Learner, training: Training, config: PPOConfig) -> ModelAgent:
    """Makes a learner's player: one that reads intents, one that records plans for a loss, or a plain one."""
    given = (learner.name, learner.policy, config, training.seats_per_game(learner), config.temperature)
    if config.intents:
        return intent_conditioned_agent(*given, Path(config.intents), config.cicero)
    if any_reads(training.losses, "planned"):
        return planning_agent(*given, config.planner, training.game, learner.reference)
    return model_agent(*given)


def learning(learners: Sequence[Learner], alternate: int, iteration: int) -> Sequence[Learner]:
    """Returns who learns in an iteration: everybody, or each in turn for `alternate` iterations."""
    return learners if not alternate else [learners[iteration // alternate % len(learners)]]

"""Filtered behaviour cloning (Liao, Tomlin & Klein 2024, Algorithm 1): play yourself, keep what went well, imitate it.

Each seat of a game is a record: its dialogue and its reward. The losses see the records that are kept, without refused
replies and their corrections.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from marl.agents.model import model_agent
from marl.algorithms.training import TrainConfig, Training
from marl.common.errors import check_choices
from marl.learning.batch import Row, collate, rows_of
from marl.learning.config import UpdateConfig
from marl.losses import any_needs
from marl.rewards import add_rewards
from marl.types import Episode, Stream

FILTERS = ("above_mean", "nonzero", "all")


@dataclass(frozen=True)
class FilteredBCConfig(TrainConfig):
    """Settings of filtered cloning: `iterations` rounds of `games`, of which `keep` are imitated (see `select`)."""

    iterations: int = 10
    games: int = 500
    concurrency: int = 256
    keep: str = "above_mean"
    update: UpdateConfig = field(default_factory=lambda: UpdateConfig(learning_rate=5e-4, epochs=3, max_grad_norm=1.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, "algo", keep=FILTERS)


def train_filtered_bc(training: Training, config: FilteredBCConfig) -> None:
    """Trains the one learner in place by imitation of its best games; a round with nothing to keep changes nothing."""
    (learner,) = training.learners
    agent = model_agent(learner.name, learner.policy, config, training.seats_per_game(learner), config.temperature)
    zero_sum = is_zero_sum(training.make_env())
    votes = any_needs(training.losses, "votes")
    for iteration in training.iterations(config, {learner.name: agent}):
        episodes = add_rewards(iteration.rollout(), training.rewards)  # measured only: `select` reads the payments
        rows = rows_of(episodes, {learner.name})
        flags = select(rows, config.keep, zero_sum)
        kept = [without_errors(row) for row, good in zip(rows, flags, strict=True) if good]
        iteration.add({"filter/kept": len(kept) / max(len(rows), 1)}, learner)
        if kept:
            iteration.update(learner, collate(kept, {}, votes=votes))
        iteration.finish(episodes)


def select(rows: Sequence[Row], keep: str, zero_sum: bool) -> list[bool]:
    """Marks the rows to imitate, by what the game paid them.

    `keep`: `above_mean` (strictly above the mean of all rows), `nonzero`, `all`. `zero_sum`: also marks both sides of
    valid deals that paid neither anything.
    """
    if not rows:
        return []
    paid = np.array([episode.paid(agent) for episode, agent in rows])
    kept = {"above_mean": paid > paid.mean(), "nonzero": paid != 0, "all": np.ones(len(rows), bool)}[keep]
    return [bool(good) or (zero_sum and even_deal(e)) for (e, _), good in zip(rows, kept, strict=True)]


def even_deal(episode: Episode) -> bool:
    """Tells whether a game ended in a valid deal that paid nobody anything."""
    return bool(episode.outcome.get("deal")) and not any(map(episode.paid, episode.players))


def is_zero_sum(env: Any) -> bool:
    """Tells whether what one player of a game wins the other loses."""
    return getattr(env, "objective", 0.0) == -1


def without_errors(row: Row) -> Row:
    """Returns the row as if no reply had been refused: cuts out each refused reply, its cue and the correction.

    A correction is what the seat read between a refused reply and its next one.
    """
    episode, agent = row
    own = sorted((t for t in episode.turns if t.agent == agent), key=lambda t: t.start)
    stream = episode.streams[agent]
    if not any(turn.error for turn in own):
        return row
    kept = np.ones(len(stream), dtype=bool)
    for turn, end in zip(own, [*(t.start for t in own[1:]), len(stream)], strict=True):
        if turn.error:
            kept[turn.start : end] = False
    shift = np.concatenate([[0], np.cumsum(~kept)])  # tokens cut before each position, the end included
    indices = kept.nonzero()[0]
    short = Stream([stream.tokens[i] for i in indices], [stream.kinds[i] for i in indices])
    turns = tuple(
        replace(t, start=t.start - int(shift[t.start])) if t.agent == agent else t
        for t in episode.turns
        if t.agent != agent or not t.error
    )
    beliefs = tuple(
        replace(b, position=b.position - int(shift[b.position])) if b.listener == agent else b
        for b in episode.beliefs
        if b.listener != agent or kept[b.position]
    )
    return replace(episode, streams={**episode.streams, agent: short}, turns=turns, beliefs=beliefs), agent

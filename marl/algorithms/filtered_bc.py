"""Filtered behaviour cloning (Liao, Tomlin & Klein 2024, Algorithm 1): play yourself, keep what went well, imitate it.

A game gives one record for each seat: its dialogue and its reward. What is kept is fine-tuned on, loss on the seat's
own turns, refused replies and their corrections left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from marl.agents.base import Agent
from marl.agents.model import PlayConfig, model_agent
from marl.common.distributed import ONE, Ranks
from marl.common.errors import UserError
from marl.learning.batch import Seat, collate, seats_of
from marl.learning.config import UpdateConfig
from marl.learning.renaming import Renaming
from marl.learning.update import Learner, update
from marl.losses import Loss
from marl.metrics.training import Progress, episode_metrics, speed_metrics
from marl.rewards import Reward, add_rewards
from marl.rollout.cast import Seats, by_role, places
from marl.rollout.rollout import rollout
from marl.rollout.seeds import RENAME, Seeds, shuffle_seed
from marl.types import INSIDERS, Episode, Kind, Stream

KEEPS = ("above_mean", "nonzero", "all")


def keep_records(rewards: np.ndarray, keep: str, drawn: np.ndarray | None = None) -> np.ndarray:
    """Which records (any shape, bool) to imitate, from their rewards.

    `above_mean`: strictly above the mean of all records. `nonzero`: reward not 0. `drawn` marks records of valid deals
    in which both sides scored 0: kept as well (the competitive rule).
    """
    if keep not in KEEPS:
        raise UserError(f"algo.keep={keep}: must be one of {', '.join(KEEPS)}")
    if keep == "above_mean":
        kept = rewards > rewards.mean()
    else:
        kept = rewards != 0 if keep == "nonzero" else np.ones_like(rewards, dtype=bool)
    return kept if drawn is None else kept | drawn


def seat_reward(episode: Episode, agent: str) -> float:
    """What the game paid this seat in total."""
    return sum(p.amount for p in episode.payments if p.agent == agent)


def select(seats: Sequence[Seat], keep: str, competitive: bool) -> list[Seat]:
    """The seats whose records are worth imitating."""
    if not seats:
        return []
    rewards = np.array([seat_reward(episode, agent) for episode, agent in seats])
    drawn = None
    if competitive:
        drawn = np.array(
            [bool(e.outcome.get("deal")) and not any(seat_reward(e, other) for other in e.players) for e, _ in seats]
        )
    kept = keep_records(rewards, keep, drawn)
    return [seat for seat, k in zip(seats, kept, strict=True) if k]


@dataclass(frozen=True)
class _Cut:
    start: int
    end: int


def without_errors(seat: Seat) -> Seat:
    """The same seat as if no reply had been refused: the refused replies, their cues and the corrections are cut out.

    A correction is what the seat read between a refused reply and its next one.
    """
    episode, agent = seat
    own = sorted((t for t in episode.turns if t.agent == agent), key=lambda t: t.start)
    cuts = [_Cut(t.start, n.start) for t, n in pairwise(own) if t.error]
    if not cuts and not (own and own[-1].error):
        return seat
    if own[-1].error:
        cuts.append(_Cut(own[-1].start, len(episode.streams[agent])))
    stream = episode.streams[agent]
    kept = np.ones(len(stream), dtype=bool)
    for cut in cuts:
        kept[cut.start : cut.end] = False
    shift = np.concatenate([[0], np.cumsum(~kept)])  # how many are cut before each place, the stream's end included
    short = Stream([t for t, k in zip(stream.tokens, kept, strict=True) if k],
                   [Kind(x) for x, k in zip(stream.kinds, kept, strict=True) if k])  # fmt: skip
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


@dataclass(frozen=True)
class FilteredBCConfig(PlayConfig):
    """`games` (K) a round of self-play, `iterations` (N) rounds; `keep` as in `keep_records`; `update` fine-tunes."""

    iterations: int = 10
    games: int = 500
    concurrency: int = 256
    keep: str = "above_mean"
    update: UpdateConfig = field(default_factory=lambda: UpdateConfig(learning_rate=5e-4, epochs=3, max_grad_norm=1.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep not in KEEPS:
            raise UserError(f"algo.keep={self.keep}: must be one of {', '.join(KEEPS)}")


def competitive(env: Any) -> bool:
    """Whether the game is strictly competitive, so that valid deals in which both score 0 are kept too."""
    return getattr(env, "objective", 0.0) == -1


def train_filtered_bc(
    learner: Learner,
    make_env: Callable[[], Any],
    rewards: Mapping[str, Reward],
    losses: Mapping[str, Loss],
    config: FilteredBCConfig,
    *,
    cast: Mapping[str, Seats],
    frozen: Mapping[str, Agent],
    seeds: Seeds,
    start: int,
    after: Callable[[int, dict[str, float], Sequence[Episode]], None],
    progress: Progress,
    rename: Renaming | None = None,
    ranks: Ranks = ONE,
) -> None:
    """Trains the learner in place by imitation of its own best games; other arguments as in `train_ppo`.

    A round in which nothing is kept changes nothing.
    """
    env = make_env()
    agent = model_agent(learner.name, learner.policy, config, places(cast, env)[learner.name], config.temperature)
    seated = by_role(cast, {**frozen, learner.name: agent})
    rivals = competitive(env)
    scored = replace(config.update, temperature=config.temperature)  # what was sampled is what is scored
    for iteration in range(start, config.iterations):
        began = time.perf_counter()
        games = ranks.share(seeds.draw(iteration, config.games))
        progress.stage(f"round {iteration + 1}/{config.iterations}: games", len(games))
        episodes = ranks.collect(rollout(games, seated, make_env, config.concurrency, progress.advance))
        played = time.perf_counter()

        episodes = add_rewards(episodes, rewards)
        seats = seats_of(episodes, {learner.name})
        kept = [without_errors(seat) for seat in select(seats, config.keep, rivals)]
        metrics: dict[str, float] = {"filter/kept": len(kept) / max(len(seats), 1)}
        metrics |= episode_metrics(episodes, {learner.name})
        learned = 0
        if kept:
            progress.stage(f"round {iteration + 1}/{config.iterations}: imitation", config.update.epochs * len(kept))
            batch = collate(kept, {}, silent_roles=INSIDERS)
            generator = torch.Generator().manual_seed(shuffle_seed(seeds.shuffling, iteration))
            if rename is not None:
                rename.generator.manual_seed(shuffle_seed(seeds.shuffling, iteration, RENAME))
            with learner.training() as policy:
                metrics |= update(
                    policy, learner.reference, batch, losses, learner.optimizer, scored, generator,
                    progress.advance, rename, ranks,
                )  # fmt: skip
            learned = int((batch.kind != Kind.PAD).sum())
        metrics |= speed_metrics(episodes, learned, played - began, time.perf_counter() - played)
        after(iteration + 1, metrics, episodes)

"""Parts that all training loops share: an iteration's games, the update of a learner, and what is logged.

Everything random in iteration `i` is a function of the seeds and `i`, so a run that resumes from a checkpoint equals
one that was never stopped. How learners learn from their games is in `ppo.py`, `filtered_bc.py`, `rl_pikl.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from marl.agents.base import Agent
from marl.agents.model import PlayConfig, tokens_read_by
from marl.algorithms.pool import Pool
from marl.common.distributed import ONE, Ranks
from marl.common.progress import Progress
from marl.intents.agent import CiceroConfig
from marl.learning.config import UpdateConfig
from marl.learning.renaming import Renaming
from marl.learning.update import Learner, update
from marl.losses import Loss
from marl.metrics.training import RESAMPLED, episode_metrics, speed_metrics
from marl.rewards import Reward
from marl.rollout.cast import RoleConfig, by_role, seats_per_player
from marl.rollout.resampling import resample
from marl.rollout.rollout import rollout
from marl.rollout.seeds import RENAME, Seeds, shuffle_seed
from marl.types import Episode, Kind, TokenBatch


@dataclass(frozen=True)
class TrainConfig(PlayConfig):
    """Settings of every algorithm: how its games are played, `update`, and how partners with `+cicero` talk."""

    update: UpdateConfig = field(default_factory=UpdateConfig)
    cicero: CiceroConfig = field(default_factory=CiceroConfig)


@dataclass(frozen=True)
class Training:
    """A training run: who learns, in which games, from which terms."""

    learners: Sequence[Learner]
    game: str
    make_env: Callable[[], Any]
    cast: Mapping[str, RoleConfig]  # who plays each role
    frozen: Mapping[str, Agent]  # players of the cast that don't learn
    rewards: Mapping[str, Reward]
    losses: Mapping[str, Loss]
    seeds: Seeds
    # Logs, evaluates and saves a finished iteration: its number (from 1), metrics and episodes.
    after: Callable[[int, dict[str, float], Sequence[Episode]], None]
    start: int = 0  # the first iteration, 0-based
    progress: Progress = field(default_factory=Progress)
    rename: Renaming | None = None  # see `update`
    ranks: Ranks = ONE
    # State of learners beside their weights. Checkpoints keep it.
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    pools: Sequence[Pool] = ()  # past selves of learners in the cast

    def seats_per_game(self, learner: Learner) -> int:
        """Counts the seats of a game that a learner may hold at most."""
        return seats_per_player(self.cast, self.make_env())[learner.name]

    def iterations(self, config: TrainConfig, agents: Mapping[str, Agent]) -> Iterator[Iteration]:
        """Yields the iterations that are left; `agents` are the learners' players, by name."""
        for number in range(self.start, config.iterations):
            yield Iteration(self, config, agents, number)


class Iteration:
    """One iteration: `rollout` its games, `update` each learner, `finish` with what is logged."""

    def __init__(self, training: Training, config: TrainConfig, agents: Mapping[str, Agent], number: int) -> None:
        self.training, self.config, self.number = training, config, number
        self.agents = {**training.frozen, **agents}
        self.cast = by_role(training.cast, self.agents)
        self.name = f"iteration {number + 1}/{config.iterations}"
        self.metrics: dict[str, float] = {}
        self.tokens = 0  # that were learned from
        self.began = self.played = time.perf_counter()

    def rollout(self) -> list[Episode]:
        """Plays the games. Each rank plays its share and gets all episodes."""
        t = self.training
        for pool in t.pools:
            pool.begin(self.number)
        games = t.ranks.share(t.seeds.draw(self.number, self.config.games, getattr(self.config, "group", 1)))
        t.progress.stage(f"{self.name}: games", len(games))
        episodes = rollout(games, self.cast, t.make_env, self.config.concurrency, t.progress.advance)
        if count := max((getattr(reward, "resamples", 0) for reward in t.rewards.values()), default=0):
            began = time.perf_counter()
            players = {agent.name: agent for agent in self.agents.values()}
            before = tokens_read_by(players.values())
            episodes = resample(episodes, t.make_env, players, {learner.name for learner in t.learners}, count)
            self.metrics["time/resampling"] = time.perf_counter() - began
            self.metrics[RESAMPLED] = sum(t.ranks.objects(tokens_read_by(players.values()) - before))
        episodes = t.ranks.collect(episodes)
        self.played = time.perf_counter()
        return episodes

    def update(self, learner: Learner, batch: TokenBatch) -> None:
        """Updates a learner, at its learning rate of this iteration (`anneal_lr`: falls linearly to 0)."""
        t, settings = self.training, self.config.update
        left = 1 - self.number / self.config.iterations if getattr(self.config, "anneal_lr", False) else 1.0
        for group in learner.optimizer.param_groups:
            group["lr"] = settings.learning_rate * left
        t.progress.stage(f"{self.name}: update of {learner.name}", settings.epochs * batch.shape[0])
        generator = torch.Generator().manual_seed(shuffle_seed(t.seeds.shuffling, self.number))
        if t.rename is not None:
            t.rename.generator.manual_seed(shuffle_seed(t.seeds.shuffling, self.number, RENAME))
        scored = replace(settings, temperature=self.config.temperature)  # scores what was sampled
        with learner.training() as policy:
            found = update(
                policy, learner.reference, batch, t.losses, learner.optimizer, scored, generator, t.progress.advance,
                t.rename, t.ranks,
            )  # fmt: skip
        self.tokens += int((batch.kind != Kind.PAD).sum())
        self.add(found, learner)

    def add(self, metrics: Mapping[str, float], learner: Learner) -> None:
        """Notes metrics of a learner; a second one's begin with its name."""
        prefix = "" if learner is self.training.learners[0] else f"{learner.name}/"
        self.metrics |= {prefix + name: value for name, value in metrics.items()}

    def finish(self, episodes: Sequence[Episode]) -> None:
        """Adds metrics of the games and of speed, and passes everything to `after`."""
        t = self.training
        for pool in t.pools:
            pool.note(episodes)
        for learner in t.learners:
            self.add(episode_metrics(episodes, {learner.name}), learner)
        played, learned = self.played - self.began, time.perf_counter() - self.played
        self.metrics |= speed_metrics(episodes, self.tokens, played, learned)
        t.after(self.number + 1, self.metrics, episodes)

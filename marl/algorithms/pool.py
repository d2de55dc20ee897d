"""Past selves of a learner as players of its role: one is kept every `pool` iterations, each iteration draws one.

A learner that only meets the latest opponent forgets how to play against the earlier ones. Left out: pools over several
processes, and past selves in evaluation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from marl.model.policy import Policy, take_weights
from marl.rollout.cast import RoleConfig
from marl.storage.checkpoint import load_policy, save_policy
from marl.types import Episode

POOL = 5  # a part of an iteration's seed


@dataclass
class Pool:
    """The past selves of the learner `role_config.player`.

    An iteration follows from `seed`, its number and `memory`, so a resumed run equals one that was never stopped.
    """

    role_config: RoleConfig
    learner: Policy
    policy: Policy  # plays, with the weights of the past self that was drawn
    folder: Path  # keeps the past selves as policies
    seed: int
    memory: dict[str, float]  # games and wins of each past self; checkpoints keep it
    card: Mapping[str, Any]  # describes the policies that are kept
    drawn: int = field(default=0, init=False)  # iterations that the drawn one had learned for

    def place(self, iteration: int) -> Path:
        """Returns the folder of the past self that had learned for `iteration` iterations."""
        return self.folder / f"{self.role_config.player}-{iteration:06d}"

    def chances(self, iteration: int) -> dict[int, float]:
        """Probability of each past self to play in this iteration."""
        there = range(0, iteration + 1, self.role_config.pool)
        wins = self.role_config.pick == "wins"
        weights = {
            n: (self.memory.get(f"{n}/wins", 0.0) + 1) / (self.memory.get(f"{n}/games", 0.0) + 2) if wins else 1.0
            for n in there
        }
        return {n: weight / sum(weights.values()) for n, weight in weights.items()}

    def begin(self, iteration: int) -> None:
        """Keeps the learner if that is due, and gives `policy` the weights of a past self (0-based iteration)."""
        if iteration % self.role_config.pool == 0:
            save_policy(self.place(iteration), self.learner, {**self.card, "iteration": iteration})
        chances = self.chances(iteration)
        rng = np.random.default_rng([self.seed, iteration, POOL])
        self.drawn = int(rng.choice(list(chances), p=list(chances.values())))
        base = self.learner.adapter.base if self.learner.adapter else None
        there = load_policy(self.place(self.drawn), self.policy.device, self.policy.privileged_size, over=base)
        take_weights(self.policy, there)

    def note(self, episodes: Sequence[Episode]) -> None:
        """Counts the games of the past self, and those in which its seats were paid more than the others."""
        for episode in episodes:
            own = {agent for agent, player in episode.players.items() if player == self.role_config.partner_player}
            if not own or len(own) == len(episode.players):
                continue
            theirs = np.mean([episode.paid(agent) for agent in episode.players if agent not in own])
            won = float(np.mean([episode.paid(agent) for agent in own]) > theirs)
            for name, amount in (("games", 1.0), ("wins", won)):
                key = f"{self.drawn}/{name}"
                self.memory[key] = self.memory.get(key, 0.0) + amount

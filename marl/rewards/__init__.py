"""Rewards: what a finished episode pays for each turn, without gradients. One small file each: `(Episode) -> (U,)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from marl.types import Episode


class Reward(Protocol):
    """A named reward term. A weight of 0 means: measured and logged, not trained on."""

    @property
    def weight(self) -> float: ...

    def __call__(self, episode: Episode) -> np.ndarray:
        """(U,) floats, one for each of `episode.turns`."""
        ...


def add_rewards(episodes: Sequence[Episode], rewards: Mapping[str, Reward]) -> list[Episode]:
    """Fills `turn.rewards` by name, unweighted."""
    filled = []
    for episode in episodes:
        paid = {name: reward(episode) for name, reward in rewards.items()}
        for name, amounts in paid.items():
            assert amounts.shape == (len(episode.turns),), (name, amounts.shape, len(episode.turns))
        turns = tuple(
            replace(turn, rewards={name: float(amounts[u]) for name, amounts in paid.items()})
            for u, turn in enumerate(episode.turns)
        )
        filled.append(replace(episode, turns=turns))
    return filled

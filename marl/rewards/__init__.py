"""Rewards: what a finished episode pays for each turn, without gradients. One small file each: `(Episode) -> (U,)`."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from marl.common.errors import UserError, naming
from marl.types import Episode


class Reward(Protocol):
    """A named reward term. A weight of 0 means: measured and logged, not trained on."""

    @property
    def weight(self) -> float: ...

    def __call__(self, episode: Episode) -> np.ndarray:
        """(U,) finite floats, one for each of `episode.turns`; a list will do."""
        ...


def add_rewards(episodes: Sequence[Episode], rewards: Mapping[str, Reward]) -> list[Episode]:
    """Fills `turn.rewards` by name, unweighted. UserError, naming the reward, where it raises or pays anything but a
    number for each turn."""
    filled = []
    for episode in episodes:
        paid = {name: _amounts(name, reward, episode) for name, reward in rewards.items()}
        turns = tuple(
            replace(turn, rewards={name: float(amounts[u]) for name, amounts in paid.items()})
            for u, turn in enumerate(episode.turns)
        )
        filled.append(replace(episode, turns=turns))
    return filled


def _amounts(name: str, reward: Reward, episode: Episode) -> np.ndarray:
    """What a reward pays, as (U,) floats."""
    with naming(f"reward.{name}", reward):
        returned: object = reward(episode)
    turns = len(episode.turns)
    try:
        amounts = np.asarray(returned, dtype=float)
    except (TypeError, ValueError, RuntimeError):  # no numbers, lists of several lengths, or a tensor with a gradient
        amounts = None
    if amounts is None or amounts.shape != (turns,) or not np.isfinite(amounts).all():
        shape = "" if amounts is None else f" of shape {amounts.shape}"
        told = " ".join(reprlib.repr(returned).split())
        raise UserError(
            f"reward.{name}: returned {told}{shape}; must be finite numbers of shape ({turns},), one for each turn of "
            "the episode"
        )
    return amounts

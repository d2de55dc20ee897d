"""Rewards: what a finished episode pays for each turn, without gradients. One small file each: `(Episode) -> (U,)`."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from marl.common.errors import UserError, naming
from marl.types import Episode

CREDITS = ("turn", "message")


class Reward(Protocol):
    """A reward term, named in the configuration. Weight 0: measured and logged, not trained on.

    Three attributes are optional:
    `credits`: "turn" (default), added to the game's reward, or "message", credited to the message's own tokens
    (`learning/advantages.py`); such a reward counts at turns with a message only.
    `resamples`: how many other messages are to be drawn in the place of each (`Turn.instead`); 0 by default.
    `is_game`: true if it is what the environment pays; learners without advantages select games by it.
    """

    @property
    def weight(self) -> float: ...

    def __call__(self, episode: Episode) -> np.ndarray:
        """Returns a finite number for each of `episode.turns`, (U,); a list will do."""
        ...


def credits_messages(reward: Reward) -> bool:
    """Tells whether a reward is credited to messages."""
    return getattr(reward, "credits", "turn") == "message"


def is_game(reward: Reward) -> bool:
    """Tells whether a reward is what the environment pays."""
    return bool(getattr(reward, "is_game", False))


def of_messages(rewards: Mapping[str, Reward]) -> list[str]:
    """Names the rewards that are credited to messages and trained on: the columns of `TokenBatch.message_rewards`."""
    return [name for name, reward in rewards.items() if credits_messages(reward) and reward.weight]


def add_rewards(episodes: Sequence[Episode], rewards: Mapping[str, Reward]) -> list[Episode]:
    """Fills `turn.rewards` by name, unweighted; rewards credited to messages only at turns with a message.

    Raises UserError, naming the reward, if it raises or returns anything but a number for each turn.
    """
    filled = []
    for episode in episodes:
        paid = {name: _amounts(name, reward, episode) for name, reward in rewards.items()}
        silent = {name for name, reward in rewards.items() if credits_messages(reward)}  # without a message
        turns = tuple(
            replace(turn, rewards={n: float(x[u]) for n, x in paid.items() if turn.message or n not in silent})
            for u, turn in enumerate(episode.turns)
        )
        filled.append(replace(episode, turns=turns))
    return filled


def _amounts(name: str, reward: Reward, episode: Episode) -> np.ndarray:
    """Returns what a reward pays, as (U,) floats."""
    with naming(f"reward.{name}", reward):
        returned: object = reward(episode)
    turns = len(episode.turns)
    try:
        amounts = np.asarray(returned, dtype=float)
    except (TypeError, ValueError, RuntimeError):  # no numbers, lists of several lengths, or a tensor with a gradient
        amounts = None
    if amounts is None or amounts.shape != (turns,) or not np.isfinite(amounts).all():
        shape = "" if amounts is None else f" of shape {amounts.shape}"
        shown = " ".join(reprlib.repr(returned).split())
        raise UserError(
            f"reward.{name}: returned {shown}{shape}. Return finite numbers of shape ({turns},), one for each turn."
        )
    return amounts

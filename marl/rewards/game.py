"""The game's own reward, credited to each agent's latest turn at the time of payment."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from marl.types import Episode


@dataclass(frozen=True)
class GameReward:
    """Payments of the environment, per turn (U,). `scale` multiplies them, so that the critic's targets are near one.

    A payment to an agent before its first turn is dropped: none of its turns earned it.
    """

    weight: float = 1.0
    scale: float = 0.1
    is_game: ClassVar[bool] = True

    def __call__(self, episode: Episode) -> np.ndarray:
        amounts = np.zeros(len(episode.turns))
        for payment in episode.payments:
            own = [
                u
                for u, turn in enumerate(episode.turns)
                if turn.agent == payment.agent and turn.step <= payment.step and not turn.outgrown
            ]
            if own:
                amounts[own[-1]] += payment.amount * self.scale
        return amounts

"""The speaking reward: how far a message moved its listeners' belief toward the truth.

S = B_after - B_before, with B the sum over listeners and questions of the probability (or log-probability) of the true
answer (Sarkar et al. 2025, section on speaking; there over all living crewmates, the speaker too).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from marl.common.errors import UserError
from marl.types import Belief, Episode, Turn

LISTENERS = ("others", "all")
OF = ("probability", "log_probability")
FLOOR = 1e-4  # a log-probability below its log counts as its log, or one certain fool would outweigh every listener


@dataclass(frozen=True)
class SpeakingReward:
    """Per turn (U,): the change of belief across each message, 0 for turns that said nothing.

    `listeners`: `others` (everyone but the speaker) or `all`. `of`: what is summed, `probability` or `log_probability`.
    `players`: count only listeners played by these (names in `Episode.players`); empty counts all. A message after
    which nobody was asked again earns 0. `adversaries`: roles that earn the negative (an imposter in training).
    """

    weight: float = 0.5
    listeners: str = "others"
    of: str = "probability"
    players: tuple[str, ...] = ()
    adversaries: tuple[str, ...] = ("imposter",)

    def __post_init__(self) -> None:
        if self.listeners not in LISTENERS:
            raise UserError(f"reward.speaking.listeners={self.listeners}: must be one of {', '.join(LISTENERS)}")
        if self.of not in OF:
            raise UserError(f"reward.speaking.of={self.of}: must be one of {', '.join(OF)}")

    def __call__(self, episode: Episode) -> np.ndarray:
        amounts = np.array([sum(changes) for changes in self.changes(episode)], dtype=float)
        against = np.array([turn.role in self.adversaries for turn in episode.turns], dtype=bool)
        return np.where(against, 0.0 - amounts, amounts)

    def changes(self, episode: Episode) -> list[list[float]]:
        """By turn, how far each answer after its message is from the one before: of every listener that counts and
        question that it was asked. Empty where nothing was said, or nobody was asked."""
        by_listener: dict[str, list[Belief]] = {}
        for belief in episode.beliefs:
            if belief.role not in self.adversaries and (
                not self.players or episode.players[belief.listener] in self.players
            ):
                by_listener.setdefault(belief.listener, []).append(belief)
        return [
            [
                change
                for listener, beliefs in by_listener.items()
                if turn.message and (listener != turn.agent or self.listeners == "all")
                for change in self._across(turn, beliefs)
            ]
            for turn in episode.turns
        ]

    def _across(self, turn: Turn, beliefs: list[Belief]) -> list[float]:
        """Of one listener, for each question that it was asked right after the message."""
        found = []
        for after in (b for b in beliefs if b.step == turn.step + 1):
            before = [b for b in beliefs if b.step <= turn.step and b.question.text == after.question.text]
            if before:
                found.append(self._amount(after) - self._amount(before[-1]))
        return found

    def _amount(self, belief: Belief) -> float:
        return belief.truth if self.of == "probability" else float(np.log(max(belief.truth, FLOOR)))

"""The speaking reward: how far a message moved its listeners' belief toward the truth.

S = B_after - B_before, with B the sum over listeners and questions of the probability (or log-probability) of the true
answer (Sarkar et al. 2025, section on speaking; there over all living crewmates, the speaker too).
Its credit goes to the message's tokens: see `learning/advantages.py`. With `baseline=resampled` B_before is what belief
would have been, on average, after other messages of the same author in the same place.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from marl.common.errors import check_choices, check_range
from marl.types import Belief, Episode, Turn

LISTENERS = ("others", "all")
BASELINES = ("before", "resampled")
OF = ("probability", "log_probability")
FLOOR = 1e-4  # least probability that a log is taken of: else one listener, sure and wrong, would outweigh the others


@dataclass(frozen=True)
class SpeakingReward:
    """Change of belief across each message, per turn (U,); 0 if nobody was asked before and right after it.

    `listeners`: `others` (everyone but the speaker) or `all`. `of`: what is summed, `probability` or `log_probability`.
    `players`: count only listeners played by these (names in `Episode.players`); empty counts all.
    `baseline`: what belief after the message is compared with: belief `before` it, or the mean over `samples` messages
    drawn instead (`rollout/resampling.py`). Only learners' messages in training have such samples; others use `before`.
    `adversaries`: roles that earn the negative amount and do not count as listeners (an imposter in training).
    """

    weight: float = 0.5
    listeners: str = "others"
    of: str = "probability"
    players: tuple[str, ...] = ()
    baseline: str = "before"
    samples: int = 4
    adversaries: tuple[str, ...] = ("imposter",)
    credits: ClassVar[str] = "message"

    def __post_init__(self) -> None:
        check_choices(self, "reward.speaking", listeners=LISTENERS, of=OF, baseline=BASELINES)
        check_range(self, "reward.speaking", "[1, inf)", "samples")

    @property
    def resamples(self) -> int:
        return self.samples if self.baseline == "resampled" else 0

    def __call__(self, episode: Episode) -> np.ndarray:
        amounts = np.array([sum(changes) for changes in self.changes(episode)], dtype=float)
        against = np.array([turn.role in self.adversaries for turn in episode.turns], dtype=bool)
        return np.where(against, 0.0 - amounts, amounts)

    def changes(self, episode: Episode) -> list[list[float]]:
        """Changes of each counted listener's answers across each turn's message; empty if nothing was said or asked."""
        hearing = [
            belief
            for belief in episode.beliefs
            if belief.role not in self.adversaries
            and (not self.players or episode.players[belief.listener] in self.players)
        ]
        return [self._across(turn, hearing) if turn.message else [] for turn in episode.turns]

    def _across(self, turn: Turn, hearing: list[Belief]) -> list[float]:
        found = []
        for after in hearing:
            if after.step != turn.step + 1 or (after.listener == turn.agent and self.listeners == "others"):
                continue
            before = [b for b in hearing if b.asked == after.asked and b.step <= turn.step]
            if not before:
                continue
            compared = self._amount(before[-1])
            if self.baseline == "resampled" and turn.instead:
                # Listeners that are not asked after another message believe what they did before.
                others = [
                    next((self._amount(b) for b in heard if b.asked == after.asked), compared) for heard in turn.instead
                ]
                compared = sum(others) / len(others)
            found.append(self._amount(after) - compared)
        return found

    def _amount(self, belief: Belief) -> float:
        return belief.truth if self.of == "probability" else float(np.log(max(belief.truth, FLOOR)))

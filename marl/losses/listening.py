"""Listening loss: cross-entropy of the listener's belief with the truth, at every belief question."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marl.losses import Outputs
from marl.types import TokenBatch


@dataclass(frozen=True)
class ListeningLoss:
    """-log belief(true answer), (N,) (Sarkar et al. 2025); the sum of beliefs if several answers are true.

    `renamed`: learn from rows with other names in the place of the game's (`learning/renaming.py`), in a pass of its
    own; at weight 0 rows are read as they are.
    """

    weight: float = 0.3
    renamed: bool = False

    @property
    def reads(self) -> str:
        return "renamed" if self.renamed and self.weight else "beliefs"

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        values = -log_truth(batch, outputs.beliefs)
        return values, torch.ones_like(values, dtype=torch.bool)


def log_truth(batch: TokenBatch, beliefs: Tensor) -> Tensor:
    """Returns log-probabilities of the truth, (N,), from those of the candidates, (N, K)."""
    right = torch.cat([batch.answer[:, None], batch.also], dim=1)  # (N, 1 + A)
    return beliefs.gather(1, right.clamp_min(0)).masked_fill(right < 0, -torch.inf).logsumexp(1)

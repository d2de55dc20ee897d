"""The listening loss: cross-entropy of the listener's belief with the truth, at every belief question."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marl.losses import Outputs
from marl.types import TokenBatch


@dataclass(frozen=True)
class ListeningLoss:
    """-log belief(true answer), (N,): Sarkar et al. 2025, the listening loss.

    `renamed`: learned from rows in which other names stand for the game's (renaming.py), in a pass of its own. Where
    the weight is 0 the rows are read as they are.
    """

    weight: float = 1.0
    renamed: bool = False

    @property
    def reads(self) -> str:
        return "renamed" if self.renamed and self.weight else "beliefs"

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        values = -outputs.beliefs.gather(1, batch.answer[:, None])[:, 0]  # (N,)
        return values, torch.ones_like(values, dtype=torch.bool)

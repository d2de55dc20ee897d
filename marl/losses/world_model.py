"""World modelling: cross-entropy on what the agent reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from marl.losses import Outputs
from marl.types import Kind, TokenBatch


@dataclass(frozen=True)
class WorldModelLoss:
    """-log p(token) at every observation token but a row's first."""

    weight: float = 0.1
    reads: str = "observed"

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        mask = batch.kind == Kind.OBSERVATION
        mask[:, 0] = False
        return -outputs.observed, mask

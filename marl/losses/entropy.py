"""Negative entropy of the sampled distribution, so that a positive weight keeps it broad."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from marl.errors import UserError
from marl.losses import Outputs
from marl.types import Kind, TokenBatch

ON = ("choice", "speech", "both")


@dataclass(frozen=True)
class EntropyLoss:
    """-H at reply tokens. `on`: choices (as published), speech, or both."""

    weight: float = 0.01
    on: str = "both"
    reads: str = "reply"

    def __post_init__(self) -> None:
        if self.on not in ON:
            raise UserError(f"loss.entropy.on={self.on}: must be one of {', '.join(ON)}")

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        masks = {"choice": batch.kind == Kind.CHOICE, "speech": batch.kind == Kind.SPEECH, "both": batch.reply}
        return -outputs.entropy, masks[self.on]

"""Imitation loss: cross-entropy on the replies that a filter kept (`algorithms/filtered_bc.py`)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from marl.losses import Outputs
from marl.types import TokenBatch


@dataclass(frozen=True)
class ImitationLoss:
    """-log p(token) at the reply tokens in `batch.imitate`."""

    weight: float = 0.3
    reads: str = "reply"
    needs_filter: ClassVar[bool] = True

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        return -outputs.logprobs, batch.imitate & batch.reply

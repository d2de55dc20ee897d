"""Claims: cross-entropy on what a reply decides, its tag, its end and a proposal's items; not on a message's words."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from marl.losses import Outputs
from marl.types import TokenBatch


@dataclass(frozen=True)
class ClaimLoss:
    """-log p(token) at the reply tokens in `batch.imitate` outside messages' bodies.

    Beside `ImitationLoss` it gives these tokens more weight: they are few, and whether two claims make a deal depends
    on nothing else (Lewis et al. 2017 train the final choice with a loss of its own).
    """

    weight: float = 1.0
    reads: str = "reply"

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        return -outputs.logprobs, batch.imitate & batch.reply & ~batch.body

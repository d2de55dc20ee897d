"""Claim loss: cross-entropy on what a reply decides (tag, end, a proposal's items), not on a message's words."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from marl.losses import Outputs
from marl.types import TokenBatch


@dataclass(frozen=True)
class ClaimLoss:
    """-log p(token) at the reply tokens in `batch.imitate` outside messages' bodies.

    Beside imitation it gives these few tokens more weight: only they decide whether two claims make a deal (Lewis et
    al. 2017 train the final choice with a loss of its own).
    """

    weight: float = 1.0
    reads: str = "reply"
    needs_filter: ClassVar[bool] = True

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        return -outputs.logprobs, batch.imitate & batch.reply & ~batch.body

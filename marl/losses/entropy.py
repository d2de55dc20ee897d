"""Entropy loss: negative entropy of the sampled distribution, so that a positive weight keeps it broad."""

from dataclasses import dataclass

from torch import Tensor

from marl.common.errors import check_choices
from marl.losses import OVER, Outputs, reply_mask
from marl.types import TokenBatch


@dataclass(frozen=True)
class EntropyLoss:
    """-H at reply tokens. `over`: choice (as published), speech, or both."""

    weight: float = 0.0
    over: str = "both"
    reads: str = "reply"

    def __post_init__(self) -> None:
        check_choices(self, "loss.entropy", over=OVER)

    @property
    def needs_samples(self) -> bool:
        """Tells whether its weight is 0: then only learners that learn from all that was played measure it."""
        return not self.weight

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        return -outputs.entropy, reply_mask(batch, self.over)

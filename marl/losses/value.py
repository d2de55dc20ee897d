"""Value loss: squared error of the critic at every decision."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from marl.losses import Outputs
from marl.types import TokenBatch


@dataclass(frozen=True)
class ValueLoss:
    """(V - return)^2 / 2 at the first token of every reply."""

    weight: float = 0.5
    reads: str = "values"
    needs_returns: ClassVar[bool] = True

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        return 0.5 * (outputs.values - batch.returns) ** 2, batch.decision

"""World-model loss: cross-entropy on what the agent reads."""

from dataclasses import dataclass

from torch import Tensor

from marl.losses import Outputs
from marl.types import Kind, TokenBatch


@dataclass(frozen=True)
class WorldModelLoss:
    """-log p(token) at every observation token but a row's first.

    `after_questions`: also at tokens right after those of kind QUESTION. After a belief question they are predicted
    from the position where the belief is read, so training on them biases the belief.
    """

    weight: float = 0.0
    after_questions: bool = True
    reads: str = "observed"

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        mask = batch.kind == Kind.OBSERVATION
        mask[:, 0] = False
        if not self.after_questions:
            mask[:, 1:] &= batch.kind[:, :-1] != Kind.QUESTION
        return -outputs.observed, mask

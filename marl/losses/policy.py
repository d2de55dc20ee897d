"""Policy loss: PPO's clipped surrogate (Schulman et al. 2017, eq. 7), per token."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from marl.common.errors import check_range
from marl.losses import Outputs
from marl.types import Kind, TokenBatch


@dataclass(frozen=True)
class PolicyLoss:
    """-min(ratio A, clip(ratio, 1 - clip_coef, 1 + clip_coef) A) at every token of a reply.

    `speech`, `choice`: factors at tokens of speech and at choices. A message has many tokens out of the whole
    vocabulary, whose gradient may drown that of votes and moves (the release of Sarkar et al. 2025 has speech .2).
    """

    weight: float = 1.0
    clip_coef: float = 0.2
    speech: float = 1.0
    choice: float = 1.0
    reads: str = "reply"
    needs_advantages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range(self, "loss.policy", "[0, inf)", "speech", "choice")
        check_range(self, "loss.policy", "(0, inf)", "clip_coef")

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        ratio = (outputs.logprobs - batch.logprobs).exp()  # (B, T)
        clipped = ratio.clamp(1 - self.clip_coef, 1 + self.clip_coef)
        values = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
        return torch.where(batch.kind == Kind.SPEECH, self.speech, self.choice) * values, batch.reply

"""PPO's clipped surrogate (Schulman et al. 2017, eq. 7), per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marl.losses import Outputs
from marl.types import TokenBatch


@dataclass(frozen=True)
class PolicyLoss:
    """-min(ratio A, clip(ratio, 1 - clip_coef, 1 + clip_coef) A) at every token of a reply."""

    weight: float = 1.0
    clip_coef: float = 0.2
    reads: str = "reply"

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        ratio = (outputs.logprobs - batch.logprobs).exp()  # (B, T)
        clipped = ratio.clamp(1 - self.clip_coef, 1 + self.clip_coef)
        return -torch.minimum(ratio * batch.advantages, clipped * batch.advantages), batch.reply

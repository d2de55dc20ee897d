"""KL of replies, speech unless set otherwise, to the frozen reference, which keeps the language.

With d = log pi - log reference at a sampled token. As a loss the value's own gradient counts: k2 has the gradient of
KL(pi || reference) on policy, k3 that of KL(reference || pi) in expectation, k1's is zero in expectation, so it can be
measured only (Schulman, "Approximating KL divergence", 2020). `squared` = 2 k2 is the published release's. `exact` is
KL(pi || reference) itself, summed over all tokens that might stand there: it needs no sample of the policy's own, so it
holds in games that were chosen by how they ended, and costs a pass of the reference in each pass of the policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from marl.common.errors import UserError
from marl.losses import OVER, Outputs, replies
from marl.types import TokenBatch

SAMPLED = ("k1", "k2", "k3", "squared")
ESTIMATORS = (*SAMPLED, "exact")


@dataclass(frozen=True)
class KLLoss:
    """An estimate of the KL divergence at reply tokens, or (`exact`) itself. Needs `reference_logprobs`, or the
    outputs' `divergence`.

    `over`: speech (as published), choices, or both.
    """

    weight: float = 0.1
    estimator: str = "k2"
    over: str = "speech"

    @property
    def reads(self) -> str:
        return "reply" if self.estimator in SAMPLED else "divergence"

    @property
    def needs_reference(self) -> bool:
        return self.estimator in SAMPLED

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise UserError(f"loss.kl.estimator={self.estimator}: must be one of {', '.join(ESTIMATORS)}")
        if self.over not in OVER:
            raise UserError(f"loss.kl.over={self.over}: must be one of {', '.join(OVER)}")
        if self.estimator == "k1" and self.weight:
            raise UserError("loss.kl.estimator=k1 has no gradient toward the reference: use k2, or loss.kl.weight=0")

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        if self.estimator == "exact":
            return outputs.divergence, replies(batch, self.over)
        mask = replies(batch, self.over)
        d = (outputs.logprobs - batch.reference_logprobs).masked_fill(~mask, 0.0)  # (B, T); elsewhere it is not known
        values = {"k1": d, "k2": 0.5 * d**2, "k3": (-d).exp() - 1 + d, "squared": d**2}[self.estimator]
        return values, mask

"""KL of speech to the frozen reference, which keeps the language.

With d = log pi - log reference at a sampled token. As a loss the value's own gradient counts: k2 has the gradient of
KL(pi || reference) on policy, k3 that of KL(reference || pi) in expectation, k1's is zero in expectation, so it can be
measured only (Schulman, "Approximating KL divergence", 2020). `squared` = 2 k2 is the published release's.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from marl.errors import UserError
from marl.losses import Outputs
from marl.types import Kind, TokenBatch

ESTIMATORS = ("k1", "k2", "k3", "squared")


@dataclass(frozen=True)
class KLLoss:
    """An estimate of the KL divergence at every speech token. Needs `reference_logprobs`."""

    weight: float = 0.05
    estimator: str = "k2"
    reads: str = "reply"

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise UserError(f"loss.kl.estimator={self.estimator}: must be one of {', '.join(ESTIMATORS)}")
        if self.estimator == "k1" and self.weight:
            raise UserError("loss.kl.estimator=k1 has no gradient toward the reference: use k2, or loss.kl.weight=0")

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        d = outputs.logprobs - batch.reference_logprobs  # (B, T)
        values = {"k1": d, "k2": 0.5 * d**2, "k3": (-d).exp() - 1 + d, "squared": d**2}[self.estimator]
        return values, batch.kind == Kind.SPEECH

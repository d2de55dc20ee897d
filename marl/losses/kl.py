"""KL loss: divergence of replies from the frozen reference, which keeps the language.

Estimators, with d = log pi - log reference at a sampled token (Schulman, "Approximating KL divergence", 2020): k2 has
the gradient of KL(pi || reference) on policy, k3 that of KL(reference || pi) in expectation. `exact` is KL(pi ||
reference) itself, summed over the vocabulary: it also holds for replies that are no samples of the policy (filtered
games, plans), and costs a pass of the reference in each pass of the policy.
"""

from dataclasses import dataclass

from torch import Tensor

from marl.common.errors import check_choices
from marl.losses import OVER, Outputs, reply_mask
from marl.types import TokenBatch

KL_ESTIMATORS = ("k2", "k3", "exact")


@dataclass(frozen=True)
class KLLoss:
    """KL divergence at reply tokens, by one of KL_ESTIMATORS. `over`: speech (as published), choice, or both."""

    weight: float = 0.1
    estimator: str = "k2"
    over: str = "speech"

    @property
    def reads(self) -> str:
        return "divergence" if self.estimator == "exact" else "reply"

    @property
    def needs_reference(self) -> bool:
        return self.estimator != "exact"

    def __post_init__(self) -> None:
        check_choices(self, "loss.kl", estimator=KL_ESTIMATORS, over=OVER)

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        mask = reply_mask(batch, self.over)
        if self.estimator == "exact":
            return outputs.divergence, mask
        # The reference is read at the mask only.
        d = (outputs.logprobs - batch.reference_logprobs).masked_fill(~mask, 0.0)  # (B, T)
        return (0.5 * d**2 if self.estimator == "k2" else (-d).exp() - 1 + d), mask

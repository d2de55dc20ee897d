"""Toward the plan: what a planner would play where it plans (planner.py), against what the policy would.

The plan is a distribution over tokens: the legal options of a choice, or those with which some legal claim goes on.
The policy's is over all that it might say, so that both forms also teach it to say nothing else. A claim has several
such tokens, and the plan of each is that of the claims that begin so. By the chain rule the sum over a claim's tokens
has the expectation of the term for whole claims, if claims are drawn from the distribution that the term averages over:
from the plan for `cross_entropy` (algo=pikl), from the policy for `kl` (algo=ppo).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marl.common.errors import UserError
from marl.losses import Outputs
from marl.types import TokenBatch

FORMS = ("cross_entropy", "kl")
LEAST = 1e-6  # less is rounding, and its logarithm has no gradient worth following


@dataclass(frozen=True)
class PlanLoss:
    """`cross_entropy`: -sum plan log policy, as RL-DiL-piKL regresses the policy (Bakhtin et al. 2022). `kl`: KL(policy
    || plan), with the plan raised to `floor`, since it rules actions out and KL would be infinite; all tokens that are
    none of the plan's count as one."""

    weight: float = 0.3
    form: str = "kl"
    floor: float = 1e-4
    reads: str = "planned"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UserError(f"loss.plan.form={self.form}: must be one of {', '.join(FORMS)}")
        if not 0 < self.floor < 1:
            raise UserError(f"loss.plan.floor={self.floor}: must lie between 0 and 1")

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        mask = batch.planned
        if not outputs.planned.numel():  # nothing was planned
            return torch.zeros(batch.shape, device=mask.device), mask
        absent = batch.plan_ids < 0
        logprobs = outputs.planned.masked_fill(absent, 0.0)  # (B, T, P)
        if self.form == "cross_entropy":
            return -(batch.plan * logprobs).sum(-1), mask
        probs = logprobs.exp().masked_fill(absent, 0.0)
        terms = probs * (logprobs - batch.plan.clamp_min(self.floor).log())
        rest = 1 - probs.sum(-1)
        some = rest.clamp_min(LEAST)
        return terms.sum(-1) + torch.where(rest > LEAST, some * (some / self.floor).log(), 0.0), mask

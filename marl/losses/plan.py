"""Plan loss: draws the policy toward what a planner (`planning/planner.py`) would play.

At each token the plan is a distribution over the legal options of a choice, or over the tokens that continue some legal
claim. The policy's is over the whole vocabulary, so both forms also teach it to say nothing else. By the chain rule the
sum over a claim's tokens is, in expectation, the term for whole claims, if claims are drawn from the distribution that
the term averages over: the plan for `cross_entropy` (algo=pikl), the policy for `kl` (algo=ppo).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from marl.common.errors import check_choices, check_range
from marl.losses import Outputs
from marl.types import TokenBatch

FORMS = ("cross_entropy", "kl")
LEAST = 1e-6  # least probability of other tokens that counts; less is rounding


@dataclass(frozen=True)
class PlanLoss:
    """Divergence of policy and plan at planned tokens.

    `form`: `cross_entropy`, -sum plan log policy (Bakhtin et al. 2022), or `kl`, KL(policy || plan). In `kl` the plan's
    probabilities are raised to `floor`, so that KL is finite at actions it rules out; all tokens outside the plan count
    as one.
    """

    weight: float = 0.3
    form: str = "kl"
    floor: float = 1e-4
    reads: str = "planned"

    def __post_init__(self) -> None:
        check_choices(self, "loss.plan", form=FORMS)
        check_range(self, "loss.plan", "(0, 1)", "floor")

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        mask = batch.planned
        absent = batch.plan_ids < 0
        logprobs = outputs.planned.masked_fill(absent, 0.0)  # (B, T, P)
        if self.form == "cross_entropy":
            return -(batch.plan * logprobs).sum(-1), mask
        probs = logprobs.exp().masked_fill(absent, 0.0)
        terms = probs * (logprobs - batch.plan.clamp_min(self.floor).log())
        rest = 1 - probs.sum(-1)
        some = rest.clamp_min(LEAST)
        return terms.sum(-1) + torch.where(rest > LEAST, some * (some / self.floor).log(), 0.0), mask

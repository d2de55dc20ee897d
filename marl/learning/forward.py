"""The forward pass that the losses read: log-probabilities, values and beliefs of a batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from marl.losses import Outputs
from marl.model.policy import Policy, choice_logits
from marl.model.sharding import is_split
from marl.types import Kind, TokenBatch


def forward(
    policy: Policy,
    batch: TokenBatch,
    temperature: float,
    reads: Mapping[str, bool],
    reference: Policy | None = None,
) -> Outputs:
    """Reads a batch once. `reads` maps each needed part of the outputs (`losses.READS`) to whether it is trained.

    Parts are computed apart from one another, those that are not trained without gradient, so that measuring a part
    changes no bit of the others. `reference`: of the divergence.
    """

    def part(name: str) -> torch.set_grad_enabled:
        return torch.set_grad_enabled(torch.is_grad_enabled() and reads[name])

    hidden = policy.hidden(batch.tokens, batch.branch, batch.position_ids)  # (B, T, D)
    before = hidden[:, :-1]  # the state that predicts token t stands at t - 1
    zeros = torch.zeros(batch.tokens.shape, device=hidden.device)
    outputs = Outputs(zeros, zeros, zeros, torch.zeros(0, 1, device=hidden.device), zeros)
    replies = batch.reply[:, 1:]
    if "reply" in reads:
        with part("reply"):
            logprobs = reply_logprobs(policy, hidden, batch, temperature, replies)  # (M, V)
            own = logprobs.gather(1, batch.tokens[:, 1:][replies][:, None])[:, 0]
            entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)
            outputs.logprobs = scatter(zeros, replies, own)
            outputs.entropy = scatter(zeros, replies, entropy)
    if "divergence" in reads:
        assert reference is not None, "a divergence is from a reference"
        there = batch.to(reference.device)
        with torch.no_grad():
            states = reference.hidden(there.tokens, there.branch, there.position_ids)
            theirs = reply_logprobs(reference, states, there, temperature, there.reply[:, 1:]).to(hidden.device)
        with part("divergence"):
            ours = reply_logprobs(policy, hidden, batch, temperature, replies)  # (M, V)
            gaps = (ours - theirs).masked_fill(
                ours == -torch.inf, 0.0
            )  # what one never samples, neither does the other
            outputs.divergence = scatter(zeros, replies, (ours.exp() * gaps).sum(-1))
    if "values" in reads:
        with part("values"):
            mask = batch.decision[:, 1:]
            facts = batch.privileged[mask.nonzero()[:, 0]]
            outputs.values = scatter(zeros, mask, policy.value(before[mask], facts))
    if "planned" in reads:
        with part("planned"):
            mask = batch.planned[:, 1:]
            ids = batch.plan_ids[:, 1:][mask]  # (M, P)
            found = reply_logprobs(policy, hidden, batch, temperature, mask).gather(1, ids.clamp_min(0))
            outputs.planned = torch.zeros(batch.plan.shape, device=hidden.device)
            outputs.planned[:, 1:][mask] = found.masked_fill(ids < 0, -torch.inf)
    if "beliefs" in reads and (len(batch.row) or is_split(policy)):
        with part("beliefs"):
            logits = policy.logits(hidden[batch.row, batch.position])  # (N, V)
            scores = logits.gather(1, batch.candidates.clamp_min(0))
            scores = scores / torch.where(batch.vote, temperature, 1.0).to(scores)[:, None]  # votes as they are sampled
            outputs.beliefs = scores.masked_fill(batch.candidates < 0, -torch.inf).log_softmax(-1)  # (N, K)
    if "observed" in reads:
        with part("observed"):
            mask = (batch.kind == Kind.OBSERVATION)[:, 1:]
            logprobs = policy.logits(before[mask]).log_softmax(-1)
            outputs.observed = scatter(zeros, mask, logprobs.gather(1, batch.tokens[:, 1:][mask][:, None])[:, 0])
    return outputs


def reply_logprobs(policy: Policy, hidden: Tensor, batch: TokenBatch, temperature: float, mask: Tensor) -> Tensor:
    """Computes the distributions (M, V) that the M reply tokens of `mask` (B, T - 1) are sampled from: at choices over
    the legal set alone."""
    logits = policy.logits(hidden[:, :-1][mask])
    shaped = policy.speech_logits(logits, temperature)
    chosen = (batch.kind == Kind.CHOICE)[:, 1:][mask]
    if bool(chosen.any()):
        shaped = shaped.clone()
        shaped[chosen] = choice_logits(logits[chosen], batch.legal[:, 1:][mask][chosen], temperature)
    return shaped.log_softmax(-1)


def scatter(zeros: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """Puts values (M,) at the tokens that they describe, one after the mask's (B, T - 1) places: (B, T)."""
    result = zeros.clone()
    result[:, 1:][mask] = values.float()
    return result

"""The forward pass that the losses read: log-probabilities and values of a batch's replies."""

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
    padding_free: bool = False,
) -> Outputs:
    """One pass over a batch. `reads` maps each needed part of the outputs to whether it is trained; `divergence` is
    that from `reference`. `padding_free`: within `reading_rows`, so that padding is not read.

    Parts are computed apart from one another, and those that are not trained without gradient, so that measuring a part
    changes no bit of the others.
    """
    lengths = batch.lengths if padding_free else None
    hidden = policy.hidden(batch.tokens, lengths)  # (B, T, D)
    before = hidden[:, :-1]  # the state that predicts token t stands at t - 1
    zeros = torch.zeros(batch.tokens.shape, device=hidden.device)
    outputs = Outputs(zeros, zeros, zeros, torch.zeros(0, 1, device=hidden.device), zeros)
    if "reply" in reads:
        with torch.set_grad_enabled(torch.is_grad_enabled() and reads["reply"]):
            mask = batch.reply[:, 1:]
            logprobs = reply_logprobs(policy, hidden, batch, temperature)  # (M, V)
            own = logprobs.gather(1, batch.tokens[:, 1:][mask][:, None])[:, 0]
            entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)
            outputs.logprobs = scatter(zeros, mask, own)
            outputs.entropy = scatter(zeros, mask, entropy)
    if "divergence" in reads:
        assert reference is not None, "a divergence is from a reference"
        there = batch.to(reference.device)
        with torch.no_grad():
            states = reference.hidden(there.tokens, there.lengths if padding_free else None)
            theirs = reply_logprobs(reference, states, there, temperature).to(hidden.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and reads["divergence"]):
            ours = reply_logprobs(policy, hidden, batch, temperature)  # (M, V)
            gaps = (ours - theirs).masked_fill(ours == -torch.inf, 0.0)  # what is never sampled is so for both
            outputs.divergence = scatter(zeros, batch.reply[:, 1:], (ours.exp() * gaps).sum(-1))
    if "values" in reads:
        with torch.set_grad_enabled(torch.is_grad_enabled() and reads["values"]):
            mask = batch.decision[:, 1:]
            facts = batch.privileged[mask.nonzero()[:, 0]]
            outputs.values = scatter(zeros, mask, policy.value(before[mask], facts))
    if "planned" in reads:
        with torch.set_grad_enabled(torch.is_grad_enabled() and reads["planned"]):
            mask = batch.planned[:, 1:]
            ids = batch.plan_ids[:, 1:][mask]  # (M, P)
            theirs = reply_logprobs(policy, hidden, batch, temperature, mask).gather(1, ids.clamp_min(0))
            outputs.planned = torch.zeros(batch.plan.shape, device=hidden.device)
            outputs.planned[:, 1:][mask] = theirs.masked_fill(ids < 0, -torch.inf)
    if "beliefs" in reads and (len(batch.row) or is_split(policy)):
        with torch.set_grad_enabled(torch.is_grad_enabled() and reads["beliefs"]):
            logits = policy.logits(hidden[batch.row, batch.position])  # (N, V)
            scores = logits.gather(1, batch.candidates.clamp_min(0))
            outputs.beliefs = scores.masked_fill(batch.candidates < 0, -torch.inf).log_softmax(-1)  # (N, K)
    if "observed" in reads:
        with torch.set_grad_enabled(torch.is_grad_enabled() and reads["observed"]):
            mask = (batch.kind == Kind.OBSERVATION)[:, 1:]
            logprobs = policy.logits(before[mask]).log_softmax(-1)
            outputs.observed = scatter(zeros, mask, logprobs.gather(1, batch.tokens[:, 1:][mask][:, None])[:, 0])
    return outputs


def reply_logprobs(
    policy: Policy, hidden: Tensor, batch: TokenBatch, temperature: float, mask: Tensor | None = None
) -> Tensor:
    """(M, V): what each of the batch's M reply tokens was sampled from, by the policy that has these states. `mask`:
    (B, T - 1), which of them; all."""
    mask = batch.reply[:, 1:] if mask is None else mask
    logits = policy.logits(hidden[:, :-1][mask])
    shaped = policy.speech_logits(logits, temperature)
    chosen = (batch.kind == Kind.CHOICE)[:, 1:][mask]
    if bool(chosen.any()):
        shaped = shaped.clone()
        shaped[chosen] = choice_logits(logits[chosen], batch.legal[:, 1:][mask][chosen], temperature)
    return shaped.log_softmax(-1)


def scatter(zeros: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """Puts the values (M,) back at the mask's places, shifted to the tokens that they describe: (B, T)."""
    result = zeros.clone()
    result[:, 1:][mask] = values.float()
    return result

"""The forward pass that the losses read: log-probabilities, values and beliefs of a batch."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from marl.losses import Outputs
from marl.model.policy import MOST_LOGITS, Policy, choice_logits
from marl.model.sharding import is_split
from marl.types import Kind, TokenBatch


def forward(
    policy: Policy, batch: TokenBatch, temperature: float, reads: Mapping[str, bool], reference: Policy | None = None
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
            own, entropy = in_pieces(
                policy,
                partial(sampled, policy, temperature),
                *states_of(batch, hidden, replies),
                batch.tokens[:, 1:][replies],
            )
            outputs.logprobs = scatter(zeros, replies, own)
            outputs.entropy = scatter(zeros, replies, entropy)
    if "divergence" in reads:
        assert reference is not None, "a divergence is from a reference"
        there = batch.to(reference.device)
        with torch.no_grad():
            theirs = reference.hidden(there.tokens, there.branch, there.position_ids)[:, :-1][there.reply[:, 1:]]
        with part("divergence"):
            read = partial(diverged, policy, reference, temperature)
            (gaps,) = in_pieces(policy, read, *states_of(batch, hidden, replies), theirs)
            outputs.divergence = scatter(zeros, replies, gaps)
    if "values" in reads:
        with part("values"):
            mask = batch.decision[:, 1:]
            facts = batch.privileged[mask.nonzero()[:, 0]]
            outputs.values = scatter(zeros, mask, policy.value(before[mask], facts))
    if "planned" in reads:
        with part("planned"):
            mask = batch.planned[:, 1:]
            ids = batch.plan_ids[:, 1:][mask]  # (M, P)
            (found,) = in_pieces(
                policy, partial(at, policy, temperature), *states_of(batch, hidden, mask), ids.clamp_min(0)
            )
            outputs.planned = torch.zeros(batch.plan.shape, device=hidden.device)
            outputs.planned[:, 1:][mask] = found.masked_fill(ids < 0, -torch.inf)
    if "beliefs" in reads and (len(batch.row) or is_split(policy)):
        with part("beliefs"):
            read = partial(answers, policy)
            (scores,) = in_pieces(policy, read, hidden[batch.row, batch.position], batch.candidates.clamp_min(0))
            scores = scores / torch.where(batch.vote, temperature, 1.0).to(scores)[:, None]  # votes as they are sampled
            outputs.beliefs = scores.masked_fill(batch.candidates < 0, -torch.inf).log_softmax(-1)  # (N, K)
    if "observed" in reads:
        with part("observed"):
            mask = (batch.kind == Kind.OBSERVATION)[:, 1:]
            (found,) = in_pieces(policy, partial(text, policy), before[mask], batch.tokens[:, 1:][mask])
            outputs.observed = scatter(zeros, mask, found)
    return outputs


def states_of(batch: TokenBatch, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Finds what the distributions of the M reply tokens of `mask` (B, T - 1) are made of: the states before them
    (M, D), whether they are choices (M,), and the legal ids (M, O)."""
    return hidden[:, :-1][mask], (batch.kind == Kind.CHOICE)[:, 1:][mask], batch.legal[:, 1:][mask]


def in_pieces(policy: Policy, read: Callable[..., tuple[Tensor, ...]], *rows: Tensor) -> tuple[Tensor, ...]:
    """Calls `read` with rows (M, ...), of which it makes logits (M, V), and returns what it returns, (M, ...) each.

    Where these are too many to hold, it reads a piece at a time, and again in the backward pass.
    """
    size = max(1, MOST_LOGITS // len(policy.speech_mask))
    if len(rows[0]) <= size or is_split(policy):  # ranks that share parameters have to read alike
        return read(*rows)
    pieces = [
        checkpoint(read, *piece, use_reentrant=False, preserve_rng_state=False)
        for piece in zip(*(each.split(size) for each in rows), strict=True)
    ]
    return tuple(torch.cat(each) for each in zip(*pieces, strict=True))


def reply_logprobs(policy: Policy, temperature: float, states: Tensor, chosen: Tensor, legal: Tensor) -> Tensor:
    """Computes the distributions (M, V) that reply tokens are sampled from (see `states_of`): at choices over the legal
    set alone."""
    logits = policy.logits(states)
    shaped = policy.speech_logits(logits, temperature)
    if bool(chosen.any()):
        shaped = shaped.clone()
        shaped[chosen] = choice_logits(logits[chosen], legal[chosen], temperature)
    return shaped.log_softmax(-1)


def sampled(
    policy: Policy, temperature: float, states: Tensor, chosen: Tensor, legal: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (M,) of the replies' tokens (M,), and the entropies (M,) of what they were sampled from."""
    logprobs = reply_logprobs(policy, temperature, states, chosen, legal)
    own = logprobs.gather(1, ids[:, None])[:, 0]
    return own, -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)


def at(policy: Policy, temperature: float, states: Tensor, chosen: Tensor, legal: Tensor, ids: Tensor) -> tuple[Tensor]:
    """Log-probabilities (M, P) of several ids (M, P) in the place of each reply's token."""
    return (reply_logprobs(policy, temperature, states, chosen, legal).gather(1, ids),)


def diverged(
    policy: Policy, reference: Policy, temperature: float, states: Tensor, chosen: Tensor, legal: Tensor, theirs: Tensor
) -> tuple[Tensor]:
    """Divergence (M,) of the policy's distributions from the reference's, whose states are `theirs` (M, D)."""
    there = reference.device
    with torch.no_grad():
        base = reply_logprobs(reference, temperature, theirs, chosen.to(there), legal.to(there)).to(states.device)
    ours = reply_logprobs(policy, temperature, states, chosen, legal)
    gaps = (ours - base).masked_fill(ours == -torch.inf, 0.0)  # what one never samples, neither does the other
    return ((ours.exp() * gaps).sum(-1),)


def answers(policy: Policy, states: Tensor, candidates: Tensor) -> tuple[Tensor]:
    """Logits (N, K) of candidate ids (N, K)."""
    return (policy.logits(states).gather(1, candidates),)


def text(policy: Policy, states: Tensor, ids: Tensor) -> tuple[Tensor]:
    """Log-probabilities (M,) of ids (M,) among all."""
    return (policy.logits(states).log_softmax(-1).gather(1, ids[:, None])[:, 0],)


def scatter(zeros: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """Puts values (M,) at the tokens that they describe, one after the mask's (B, T - 1) places: (B, T)."""
    result = zeros.clone()
    result[:, 1:][mask] = values.float()
    return result

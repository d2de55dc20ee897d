"""The forward pass that the losses read: log-probabilities, values and beliefs of a batch."""

from collections.abc import Callable, Mapping
from dataclasses import fields

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from marl.losses import Outputs
from marl.model.policy import MOST_LOGITS, Policy
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
    nothing = torch.zeros(0, device=hidden.device)  # so that a term that reads a part without saying so is refused
    outputs = Outputs(**{each.name: nothing for each in fields(Outputs)})
    if "reply" in reads:
        with part("reply"):
            outputs.logprobs, outputs.entropy = reply_logprobs(policy, batch, hidden, temperature)
    if "divergence" in reads:
        assert reference is not None, "a divergence is from a reference"
        with part("divergence"):
            outputs.divergence = divergence(policy, reference, batch, hidden, temperature)
    if "values" in reads:
        with part("values"):
            mask = batch.decision[:, 1:]
            facts = batch.privileged[mask.nonzero()[:, 0]]
            outputs.values = scatter(mask, policy.value(before[mask], facts))
    if "planned" in reads:
        with part("planned"):
            outputs.planned = planned(policy, batch, hidden, temperature)
    if "beliefs" in reads:
        with part("beliefs"):
            asked = len(batch.row) or is_split(policy)  # shards compute together, also where one has no question
            outputs.beliefs = beliefs(policy, batch, hidden, temperature) if asked else Outputs.zeros(batch).beliefs
    if "observed" in reads:
        with part("observed"):
            outputs.observed = observed(policy, batch, before)
    return outputs


def reply_logprobs(policy: Policy, batch: TokenBatch, hidden: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, T) of reply tokens, and the entropies (B, T) of what they were sampled from."""

    def read(states: Tensor, is_choice: Tensor, legal: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = policy.reply_logits(states, is_choice, legal, temperature).log_softmax(-1)  # (M, V)
        own = logprobs.gather(1, ids[:, None])[:, 0]
        return own, -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)

    mask = batch.reply[:, 1:]
    own, entropy = in_pieces(policy, read, *states_of(batch, hidden, mask), batch.tokens[:, 1:][mask])
    return scatter(mask, own), scatter(mask, entropy)


def divergence(policy: Policy, reference: Policy, batch: TokenBatch, hidden: Tensor, temperature: float) -> Tensor:
    """KL(policy || reference) at reply tokens, (B, T), of the whole distributions that are sampled from."""
    mask, there = batch.reply[:, 1:], reference.device
    other = batch.to(there)
    with torch.no_grad():
        reference_states = reference.hidden(other.tokens, other.branch, other.position_ids)[:, :-1][other.reply[:, 1:]]

    def read(states: Tensor, is_choice: Tensor, legal: Tensor, theirs: Tensor) -> tuple[Tensor]:
        with torch.no_grad():
            base = reference.reply_logits(theirs, is_choice.to(there), legal.to(there), temperature).log_softmax(-1)
        ours = policy.reply_logits(states, is_choice, legal, temperature).log_softmax(-1)  # (M, V)
        # what one never samples, neither does the other
        gaps = (ours - base.to(states.device)).masked_fill(ours == -torch.inf, 0.0)
        return ((ours.exp() * gaps).sum(-1),)

    (found,) = in_pieces(policy, read, *states_of(batch, hidden, mask), reference_states)
    return scatter(mask, found)


def planned(policy: Policy, batch: TokenBatch, hidden: Tensor, temperature: float) -> Tensor:
    """Log-probabilities (B, T, P) of the plan's tokens, -inf at padding."""

    def read(states: Tensor, is_choice: Tensor, legal: Tensor, ids: Tensor) -> tuple[Tensor]:
        return (policy.reply_logits(states, is_choice, legal, temperature).log_softmax(-1).gather(1, ids),)

    mask = batch.planned[:, 1:]
    ids = batch.plan_ids[:, 1:][mask]  # (M, P)
    (found,) = in_pieces(policy, read, *states_of(batch, hidden, mask), ids.clamp_min(0))
    result = torch.zeros(batch.plan.shape, device=hidden.device)
    result[:, 1:][mask] = found.masked_fill(ids < 0, -torch.inf)
    return result


def beliefs(policy: Policy, batch: TokenBatch, hidden: Tensor, temperature: float) -> Tensor:
    """Log-probabilities (N, K) of the candidates, -inf at padding. Votes are read at the temperature of play."""

    def read(states: Tensor, candidates: Tensor) -> tuple[Tensor]:
        return (policy.logits(states).gather(1, candidates),)

    (scores,) = in_pieces(policy, read, hidden[batch.row, batch.position], batch.candidates.clamp_min(0))
    scores = scores / torch.where(batch.vote, temperature, 1.0).to(scores)[:, None]
    return scores.masked_fill(batch.candidates < 0, -torch.inf).log_softmax(-1)


def observed(policy: Policy, batch: TokenBatch, before: Tensor) -> Tensor:
    """Log-probabilities (B, T) of observation tokens under the plain model, from the states `before` them."""

    def read(states: Tensor, ids: Tensor) -> tuple[Tensor]:
        return (policy.logits(states).log_softmax(-1).gather(1, ids[:, None])[:, 0],)

    mask = (batch.kind == Kind.OBSERVATION)[:, 1:]
    (found,) = in_pieces(policy, read, before[mask], batch.tokens[:, 1:][mask])
    return scatter(mask, found)


def states_of(batch: TokenBatch, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Finds what the distributions of the M reply tokens of `mask` (B, T - 1) are made of: the states before them
    (M, D), whether they are choices (M,), and the legal ids (M, O)."""
    return hidden[:, :-1][mask], (batch.kind == Kind.CHOICE)[:, 1:][mask], batch.legal[:, 1:][mask]


def in_pieces(policy: Policy, read: Callable[..., tuple[Tensor, ...]], *rows: Tensor) -> tuple[Tensor, ...]:
    """Calls `read` with rows (M, ...) and returns its results, (M, ...) each.

    `read` makes logits (M, V). If these are too many to hold, it gets a piece of the rows at a time, and again in the
    backward pass.
    """
    size = max(1, MOST_LOGITS // len(policy.speech_mask))
    if len(rows[0]) <= size or is_split(policy):  # ranks that share parameters have to read alike
        return read(*rows)
    pieces = [
        checkpoint(read, *piece, use_reentrant=False, preserve_rng_state=False)
        for piece in zip(*(each.split(size) for each in rows), strict=True)
    ]
    return tuple(torch.cat(each) for each in zip(*pieces, strict=True))


def scatter(mask: Tensor, values: Tensor) -> Tensor:
    """Puts values (M,) at the tokens that they describe, one after the mask's (B, T - 1) places, and 0 elsewhere:
    (B, T)."""
    result = torch.zeros(mask.shape[0], mask.shape[1] + 1, device=values.device)
    result[:, 1:][mask] = values.float()
    return result

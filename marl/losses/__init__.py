"""Losses: the terms that give gradients. One small file each: `(TokenBatch, Outputs) -> values, mask`.

`learning/update.py` averages the values over the mask in the whole minibatch and sums the terms by weight. A new term
is one file, anywhere on Python's path, and one line of configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from marl.common.errors import UserError, naming
from marl.types import Kind, TokenBatch

OVER = ("choice", "speech", "both")  # the reply tokens that a term reads
# Outputs that a term may read. Terms that read the same share a forward pass; "renamed" (other names) has its own.
READS = ("reply", "values", "beliefs", "observed", "planned", "divergence", "renamed")


@dataclass
class Outputs:
    """Results of one forward pass over a batch. Index `t` describes token `t`; what no loss `reads` is empty.

    `logprobs`, `entropy` (reply): at reply tokens, of the distribution that was sampled from (temperature, legal mask).
    `values` (values): at decisions. `beliefs` (beliefs, renamed): log-probabilities of the candidates, -inf at padding.
    `observed` (observed): log-probabilities of observation tokens under the plain model. `planned` (planned):
    log-probabilities of the plan's tokens, -inf at padding. `divergence` (divergence): KL(policy || reference) at reply
    tokens, of the distributions that are sampled from.
    """

    logprobs: Tensor  # (B, T)
    entropy: Tensor  # (B, T)
    values: Tensor  # (B, T)
    beliefs: Tensor  # (N, K)
    observed: Tensor  # (B, T)
    planned: Tensor  # (B, T, P)
    divergence: Tensor  # (B, T)

    @classmethod
    def zeros(cls, batch: TokenBatch) -> Outputs:
        """Makes the outputs of a batch before the model is read: all 0, on the batch's device."""
        zeros = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
        beliefs = zeros.new_zeros(len(batch.row), max(batch.candidates.shape[1], 1))
        return cls(zeros, zeros, zeros, beliefs, zeros, torch.zeros_like(batch.plan), zeros)


class Loss(Protocol):
    """A loss term, named in the configuration. Weight 0: measured and logged, not trained on.

    Optional attributes, false by default, say what else of a batch a term needs (`needs`):
    `needs_advantages`: advantages, and `logprobs` that are the policy's own samples; learners without them drop it.
    `needs_returns`: returns and values of the critic that played; likewise.
    `needs_samples`: all that the policy played, not only what a filter kept; likewise.
    `needs_reference`: `batch.reference_logprobs`, computed at the term's mask and 0 elsewhere.
    `needs_filter`: `batch.imitate`, the replies of games that a filter kept.
    `needs_votes`: choices that say what is believed, beside the belief questions (`batch.vote`).
    `parts`: further terms by name, which are built with this one and called `NAME_PART`.
    """

    @property
    def weight(self) -> float: ...

    @property
    def reads(self) -> str:
        """One of READS."""
        ...

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        """Values, and a bool mask of the same shape that depends on the batch alone: it is also asked for with outputs
        that are all 0, before the model is read."""
        ...


def needs(loss: Loss, what: str) -> bool:
    """Tells whether a loss needs `advantages`, `returns` or another part of a batch (see `Loss`)."""
    return bool(getattr(loss, f"needs_{what}", False))


def any_needs(losses: Mapping[str, Loss], what: str) -> bool:
    """Tells whether any of these losses needs this (see `needs`)."""
    return any(needs(loss, what) for loss in losses.values())


def with_parts(losses: Mapping[str, Loss]) -> dict[str, Loss]:
    """Returns the losses and their parts."""
    parts = {f"{n}_{part}": term for n, loss in losses.items() for part, term in getattr(loss, "parts", {}).items()}
    return {**losses, **parts}


def any_reads(losses: Mapping[str, Loss], what: str) -> bool:
    """Tells whether any of these losses reads `what`, one of READS."""
    return any(loss.reads == what for loss in losses.values())


def reply_mask(batch: TokenBatch, over: str) -> Tensor:
    """Marks the reply tokens of one sort (one of OVER), (B, T) bool."""
    if over == "both":
        return batch.reply
    return batch.kind == {"choice": Kind.CHOICE, "speech": Kind.SPEECH}[over]


def mask_of(batch: TokenBatch, name: str, loss: Loss) -> Tensor:
    """Returns the mask of a loss, before the model is read."""
    return evaluate(batch, name, loss, Outputs.zeros(batch))[1]


def evaluate(batch: TokenBatch, name: str, loss: Loss, outputs: Outputs) -> tuple[Tensor, Tensor]:
    """Returns a loss's values and mask. Raises UserError, naming the loss, if it raises or returns anything else."""
    with naming(f"loss.{name}", loss):
        found: object = loss(batch, outputs)
    parts = list(found) if isinstance(found, tuple | list) else [found]
    match parts:
        case [Tensor() as values, Tensor(dtype=torch.bool) as mask] if values.shape == mask.shape:
            return values, mask
    shown = " and ".join(
        f"Tensor {tuple(part.shape)} of {part.dtype}" if isinstance(part, Tensor) else type(part).__name__
        for part in parts
    )
    raise UserError(
        f"loss.{name}: {type(loss).__name__} returned {shown or 'nothing'}. Return values and a bool mask of the same "
        f"shape: {batch.shape} for tokens, ({len(batch.row)},) for belief questions."
    )

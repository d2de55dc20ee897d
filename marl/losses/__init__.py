"""Losses: what a gradient is taken of. One small file each: `(TokenBatch, Outputs) -> values, mask`.

`update.py` averages the values over the mask in the whole minibatch and sums the terms by weight. Adding a term means
one file here and one line of configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from marl.common.errors import UserError, naming
from marl.types import Kind, TokenBatch

OVER = ("choice", "speech", "both")  # which reply tokens a term is about
READS = ("reply", "values", "beliefs", "observed", "planned", "divergence", "renamed")  # what a term may need


@dataclass
class Outputs:
    """What one forward pass says about a batch. Index `t` describes token `t`.

    `logprobs`: at reply tokens under the distribution that is sampled from (temperature, legal mask), at observation
    tokens (only where a loss asks for them) under the plain model; 0 elsewhere. `entropy`: at reply tokens. `values`:
    at decisions. `beliefs`: log-probabilities of the candidates, -inf at padding. `planned`: where there is a plan,
    log-probabilities of its tokens under the distribution that is sampled from, -inf at padding. `divergence`: at reply
    tokens (only where a loss asks for it), KL(policy || reference) of the distributions that are sampled from.
    """

    logprobs: Tensor  # (B, T)
    entropy: Tensor  # (B, T)
    values: Tensor  # (B, T)
    beliefs: Tensor  # (N, K)
    observed: Tensor  # (B, T) log-probabilities of observation tokens
    planned: Tensor = field(default_factory=lambda: torch.zeros(0))  # (B, T, P)
    divergence: Tensor = field(default_factory=lambda: torch.zeros(0))  # (B, T)


class Loss(Protocol):
    """A named loss term. A weight of 0 means: measured and logged, not trained on.

    One that reads `batch.reference_logprobs` has an attribute `needs_reference` that is true: they are computed for its
    places alone, and are 0 elsewhere.
    """

    @property
    def weight(self) -> float: ...

    @property
    def reads(self) -> str:
        """What it needs of the outputs, one of READS (renamed: beliefs, of renamed rows)."""
        ...

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        """Values and a bool mask of the same shape, which no output changes: its places are counted, on outputs that
        are all 0, before the model is read."""
        ...


def needs_reference(loss: Loss) -> bool:
    """Whether it compares the policy with the frozen reference at the tokens that were sampled."""
    return bool(getattr(loss, "needs_reference", False))


def replies(batch: TokenBatch, over: str) -> Tensor:
    """The reply tokens of this sort (one of OVER), (B, T) bool."""
    if over == "both":
        return batch.reply
    return batch.kind == {"choice": Kind.CHOICE, "speech": Kind.SPEECH}[over]


def count_tokens(batch: TokenBatch, losses: Mapping[str, Loss]) -> dict[str, int]:
    """How many places each loss averages over in a whole minibatch."""
    return {name: int(places(batch, name, loss).sum()) for name, loss in losses.items()}


def places(batch: TokenBatch, name: str, loss: Loss) -> Tensor:
    """The loss's mask, which no output changes."""
    zeros = torch.zeros(batch.tokens.shape)
    width = max(batch.candidates.shape[1], 1)
    beliefs = torch.zeros(len(batch.row), width)
    outputs = Outputs(zeros, zeros, zeros, beliefs, zeros, torch.zeros_like(batch.plan), zeros)
    return returned(batch, name, loss, outputs)[1]


def returned(batch: TokenBatch, name: str, loss: Loss, outputs: Outputs) -> tuple[Tensor, Tensor]:
    """The loss's values and their mask. UserError, naming the loss, where it raises or returns anything else."""
    with naming(f"loss.{name}", loss):
        found: object = loss(batch, outputs)
    parts = list(found) if isinstance(found, tuple | list) else [found]
    match parts:
        case [Tensor() as values, Tensor(dtype=torch.bool) as mask] if values.shape == mask.shape:
            return values, mask
    told = " and ".join(
        f"Tensor {tuple(part.shape)} of {part.dtype}" if isinstance(part, Tensor) else type(part).__name__
        for part in parts
    )
    raise UserError(
        f"loss.{name}: {type(loss).__name__} returned {told or 'nothing'}; must be values and a bool mask of the same "
        f"shape, here {batch.shape} if there is one for each token, ({len(batch.row)},) for each belief question"
    )

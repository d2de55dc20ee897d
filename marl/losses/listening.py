"""Listening loss: cross-entropy of the listener's belief with the truth, at every belief question and every vote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from marl.common.errors import UserError
from marl.losses import Outputs
from marl.types import TokenBatch


@dataclass(frozen=True)
class ListeningLoss:
    """-log belief(true answer), (N,) (Sarkar et al. 2025); the sum of beliefs if several answers are true.

    `renamed`: learns from rows in which other names replace the game's (`learning/renaming.py`), in a separate pass; at
    weight 0 rows are read as they are. `votes`: weight of the votes, relative to the questions; 0 leaves them out.
    Votes and questions have separate means.
    """

    weight: float = 0.3
    renamed: bool = False
    votes: float = 0.0

    def __post_init__(self) -> None:
        if self.votes < 0:
            raise UserError(f"loss.listening.votes={self.votes:g}: would learn wrong votes; must be 0 or above")

    @property
    def reads(self) -> str:
        return "renamed" if self.renamed and self.weight else "beliefs"

    @property
    def parts(self) -> Mapping[str, VoteLoss]:
        return {"votes": VoteLoss(self.weight * self.votes, self.reads)} if self.votes else {}

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        return -log_truth(batch, outputs.beliefs), ~batch.vote


@dataclass(frozen=True)
class VoteLoss:
    """-log p(a vote for an imposter), (N,), among all legal votes as they are sampled; part of `ListeningLoss`.

    In the release of Sarkar et al. 2025 the vote is one of the steps at which belief is asked for and trained.
    """

    weight: float
    reads: str
    needs_votes: ClassVar[bool] = True

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        return -log_truth(batch, outputs.beliefs), batch.vote


def log_truth(batch: TokenBatch, beliefs: Tensor) -> Tensor:
    """Returns log-probabilities of the truth, (N,), from those of the candidates, (N, K)."""
    right = torch.cat([batch.answer[:, None], batch.also], dim=1)  # (N, 1 + A)
    return beliefs.gather(1, right.clamp_min(0)).masked_fill(right < 0, -torch.inf).logsumexp(1)

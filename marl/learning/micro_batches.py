"""Cuts minibatches into forward passes that fit into memory."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from marl.common.distributed import ONE, Ranks
from marl.decoding.packing import groups_within
from marl.model.branches import tokens_read
from marl.model.policy import Policy
from marl.model.sharding import is_split
from marl.types import BY_QUESTION, BY_TOKEN, TokenBatch


def ends(where: Tensor) -> Tensor:
    """Counts each row's tokens up to its last marked one of (B, T) bool; 0 without any. (B,) int64."""
    positions = torch.arange(1, where.shape[1] + 1, device=where.device)
    return (where * positions).amax(1) if where.shape[1] else where.sum(1)


def last_questions(batch: TokenBatch) -> Tensor:
    """Counts each row's tokens up to its last belief question; 0 without any. (B,) int64."""
    asked = torch.zeros(batch.shape, dtype=torch.bool)
    asked[batch.row, batch.position] = True
    return ends(asked)


def micro_batches(
    batch: TokenBatch, rows: Tensor, token_budget: int, ranks: Ranks = ONE, lengths: Tensor | None = None
) -> list[Tensor]:
    """Splits rows, or this rank's share, into groups of similar length whose padded size stays within the budget.

    `lengths` (B,) int64: how many tokens of each row are read; None: all. All ranks get the same number of groups; if
    there are fewer rows than ranks, the last groups are empty on some.
    """
    lengths = (batch.lengths if lengths is None else lengths)[rows]
    order = torch.argsort(lengths, descending=True, stable=True).tolist()
    # Rows of similar length, one for each rank; the longest is what the others are padded to.
    sets = [order[place : place + ranks.size] for place in range(0, len(order), ranks.size)]
    groups = groups_within([int(lengths[each[0]]) for each in sets], token_budget)
    own = [[int(rows[i]) for place in group for i in ranks.share(sets[place])] for group in groups]
    return [torch.tensor(group, dtype=torch.int64) for group in own]


def passes(
    policy: Policy, batch: TokenBatch, token_budget: int, lengths: Tensor | None = None, ranks: Ranks = ONE
) -> Iterator[tuple[TokenBatch, Tensor]]:
    """Yields this rank's forward passes: rows of the batch, on the policy's device, and their indices.

    `lengths` (B,) int64: how many tokens of each row are read (None: all); rows of length 0 are left out.
    """
    lengths = batch.lengths if lengths is None else lengths
    costs = tokens_read(policy.lm, batch.branch, lengths)
    for rows in micro_batches(batch, lengths.nonzero()[:, 0], token_budget, ranks, costs):
        if len(rows):
            yield batch.select(rows, int(lengths[rows].max())).to(policy.device), rows
        elif is_split(policy):  # a pass that this rank makes because the others do
            yield blank(batch).to(policy.device), rows


def blank(batch: TokenBatch) -> TokenBatch:
    """Makes a row of padding, which no loss reads."""
    row = batch.select(torch.tensor([0]))
    padding = {name: torch.zeros_like(getattr(row, name)) for name in BY_TOKEN}  # Kind.PAD is 0
    padding["plan_ids"] = torch.full_like(row.plan_ids, -1)
    return replace(row, **padding, **{name: getattr(row, name)[:0] for name in BY_QUESTION})

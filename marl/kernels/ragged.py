"""A pass over new tokens of many slots, chunk behind chunk, without padding.

All layers but attention work token by token. Attention alone has to know which slot a token belongs to. On a CPU
compiled code looks that up (kernels.py); elsewhere it is computed in groups of chunks of about the same length,
each group over what its own slots hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from marl.kernels.cpu import attend, takes
from marl.kernels.packing import cheapest_groups
from marl.kernels.varlen import check_plain

RAGGED = "slots_of_their_own_lengths"
AREA = 8192  # padded tokens of one group at most
GROUP = 96  # what a further group costs beside its own, in padded tokens: measured on a CPU


@dataclass(frozen=True)
class Rows:
    """Slots whose keys and values are looked at together: of `rows` (R,) the first `end` tokens each. `span`: the slots
    as a range, where they stand side by side. `missing`: of slots at the desk, what is to be copied there (see
    `Desk.seat`), and `last` (R,), the places of their new tokens."""

    rows: Tensor
    end: int
    span: slice | None = None
    missing: Sequence[tuple[int, int, int, int]] | None = None
    last: Tensor | None = None


@dataclass(frozen=True)
class Group:
    """Chunks whose attention is computed at once. `tokens` (R, n): where each stands among the pass's tokens, its last
    one again behind it; `inside` (M,): which of all R n are no such repetition; `mask` (R, 1, n, end)."""

    looked: Rows
    tokens: Tensor
    inside: Tensor
    mask: Tensor


def split(sizes: np.ndarray) -> list[np.ndarray]:
    """Which of these chunks (R,) make a group each: those of a single token, and neighbours in length."""
    order = np.argsort(-sizes, kind="stable")
    longer = order[: int((sizes > 1).sum())]
    groups = [longer[list(group)] for group in cheapest_groups(sizes[longer].tolist(), AREA, GROUP)]
    return [*groups, *([order[len(longer) :]] if len(longer) < len(order) else [])]


def group_of(looked: Rows, first: np.ndarray, start: np.ndarray, sizes: np.ndarray, dtype: torch.dtype) -> Group:
    """Chunks (R,) of so many tokens, the first of which stand at `first` among the pass's tokens and at `start` in
    their slots."""
    offsets = np.arange(int(sizes.max()))[None]
    inside = offsets < sizes[:, None]
    offsets = np.minimum(offsets, sizes[:, None] - 1)
    device = looked.rows.device
    queries = torch.from_numpy(start[:, None] + offsets).to(device)
    blocked = torch.arange(looked.end, device=device) > queries[:, None, :, None]  # what stands behind a token
    return Group(
        looked=looked,
        tokens=torch.from_numpy(first[:, None] + offsets).to(device),
        inside=torch.from_numpy(np.flatnonzero(inside)).to(device),
        mask=torch.zeros(blocked.shape, dtype=dtype, device=device).masked_fill_(blocked, -torch.inf),
    )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    slots: Any,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each token to its own slot, as `transformers` calls it.

    query: (1, H, N, D). `slots`: the `SlotCache`, whose layer has taken the pass's keys and values already, at the
    tokens' `rows` and `places` (N,), and whose `groups` hold all of them. Returns (1, N, H, D). Raises UserError
    where a layer asks for attention of another kind.
    """
    check_plain(attention_mask, dropout, asked)
    layer: Any = slots.layers[module.layer_idx]  # type: ignore[index]
    slots.attended += 1
    queries = query[0].transpose(0, 1)  # (N, H, D)
    if takes(queries.device, queries.dtype) and layer.keys.dtype == queries.dtype:
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        return attend(queries, layer.keys, layer.values, slots.rows, slots.places, scale)[None], None
    found = queries.new_empty(*queries.shape[:2], value.shape[3])
    for group in slots.groups:
        keys, values = (each.transpose(1, 2) for each in layer.look_up(group.looked))  # (R, G, end, D)
        size, shared = keys.shape[:2]
        its = queries[group.tokens]  # (R, n, H, D)
        if its.shape[1] == 1:  # heads that share keys count as so many queries
            its = its.view(size, shared, -1, its.shape[3])
            states = scaled_dot_product_attention(its, keys, values, attn_mask=group.mask, scale=scaling)
            found[group.tokens[:, 0]] = states.reshape(size, *found.shape[1:])
        else:
            more = its.shape[2] // shared
            if more > 1 and keys.device.type != "cpu":  # where there is no kernel that takes a mask, too
                keys, values = (each.repeat_interleave(more, 1) for each in (keys, values))
            states = scaled_dot_product_attention(
                its.transpose(1, 2),
                keys,
                values,
                attn_mask=group.mask,
                scale=scaling,
                enable_gqa=keys.shape[1] < its.shape[2],
            )  # (R, H, n, D)
            found[group.tokens.flatten()[group.inside]] = states.transpose(1, 2).flatten(0, 1)[group.inside]
    return found[None], None


AttentionInterface.register(RAGGED, attention)


@contextmanager
def attending(lm: PreTrainedModel) -> Iterator[None]:
    """Within, the model's attention is that to slots."""
    config = lm.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = RAGGED
    try:
        yield
    finally:
        config._attn_implementation = before

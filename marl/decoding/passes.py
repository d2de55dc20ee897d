"""Forward passes over the new tokens of many streams, padded or packed one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from marl.decoding.cache import FULL, READ_BUDGET, SLIDING, SlotCache, StateLayer, Unheld, span_of
from marl.kernels.cpu import round_up, takes
from marl.kernels.packing import cheapest_groups
from marl.kernels.ragged import attending


class WholeStreams:
    """In place of a cache, for models that no slot can hold: each slot's tokens, all read again at each pass."""

    def __init__(self, slots: int) -> None:
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self.states: list[StateLayer] = []
        self.nbytes = 0

    def clear(self, slot: int) -> None:
        self.held[slot] = []

    def copy(self, slot: int, to: Sequence[int], length: int) -> None:
        for other in to:
            self.held[other] = self.held[slot][:length]

    def read(self, lm: PreTrainedModel, rows: np.ndarray, start: np.ndarray, chunks: Sequence[Sequence[int]]) -> Tensor:
        """What `one_pass` returns: hidden states (N, D) of new tokens behind the first `start` (R,) of each row."""
        for row, known, chunk in zip(rows, start, chunks, strict=True):
            self.held[row] = [*self.held[row][:known], *chunk]
        order = sorted(range(len(rows)), key=lambda i: len(self.held[rows[i]]), reverse=True)
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        for group in cheapest_groups([len(self.held[rows[i]]) for i in order], READ_BUDGET, READ_BUDGET / 32):
            streams = [torch.tensor(self.held[rows[order[g]]], device=lm.device) for g in group]
            ids = torch.nn.utils.rnn.pad_sequence(
                streams, batch_first=True
            )  # nothing looks at what stands to its right
            hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
            for g, row, stream in zip(group, hidden, streams, strict=True):
                found[order[g]] = row[start[order[g]] : len(stream)].clone()  # the whole pass need not stay
        return torch.cat(found)


def one_pass(
    lm: PreTrainedModel,
    cache: SlotCache,
    rows: np.ndarray,
    start: np.ndarray,
    chunks: Sequence[Sequence[int]],
    ragged: bool = False,
) -> Tensor:
    """One pass over new tokens of slots `rows` (R,), which hold `start` (R,) of them: hidden states (N, D) of all N
    tokens, chunk behind chunk.

    Where it is not `ragged`, chunks of different lengths are padded on the right, which is only right where no layer is
    recurrent.
    """
    for row, length in zip(rows.tolist(), start.tolist(), strict=True):
        cache.desk.cut(row, length)
    sizes = np.array([len(c) for c in chunks])
    return (ragged_pass if ragged else padded_pass)(lm, cache, rows, start, sizes, chunks)


def ragged_pass(
    lm: PreTrainedModel,
    cache: SlotCache,
    rows: np.ndarray,
    start: np.ndarray,
    sizes: np.ndarray,
    chunks: Sequence[Sequence[int]],
) -> Tensor:
    """`one_pass` for models of which `reads_ragged`: see ragged.py."""
    count = int(sizes.sum())
    few_kernels = lm.device.type == "cpu" and lm.dtype == torch.bfloat16
    # attention in groups does not know of more tokens than there are
    more = round_up(count) - count if few_kernels and takes(lm.device, lm.dtype) else 0
    cache.at_ragged(rows, start, sizes, more, lm)
    ids = torch.tensor([[*(token for chunk in chunks for token in chunk), *[0] * more]], device=lm.device)
    with attending(lm):
        output = lm.base_model(
            input_ids=ids, position_ids=cache.places[None], past_key_values=cache, use_cache=True, slots=cache
        )
    return output.last_hidden_state[0, :count]


def padded_pass(
    lm: PreTrainedModel,
    cache: SlotCache,
    rows: np.ndarray,
    start: np.ndarray,
    sizes: np.ndarray,
    chunks: Sequence[Sequence[int]],
) -> Tensor:
    """`one_pass` for all models that keep what they have read: chunks side by side, as wide as the longest."""
    width = int(sizes.max())
    span, missing, order = span_of(rows), None, None
    if width == 1 and span is None and lm.device.type == "cpu":
        order, missing = cache.seat(rows, start)
        rows, start, chunks = rows[order], start[order], [chunks[i] for i in order]
    tokens = np.zeros((len(chunks), width), dtype=np.int64)
    for i, chunk in enumerate(chunks):
        tokens[i, : len(chunk)] = chunk
    offsets = np.arange(width)[None]
    positions = start[:, None] + offsets
    real = offsets < sizes[:, None]
    end = int(positions[real].max()) + 1
    device = lm.device
    query = torch.from_numpy(np.minimum(positions, end - 1)).to(device)
    cache.at(
        torch.from_numpy(rows).to(device),
        torch.from_numpy(np.where(real, positions, cache.context)).to(device),
        end,
        span,
        missing,
    )
    hidden = at_device(lm, cache, torch.from_numpy(tokens).to(device), query)
    if order is not None:
        hidden = hidden[np.argsort(order)]
    return hidden.flatten(0, 1)[torch.from_numpy(np.flatnonzero(real)).to(device)]


def at_device(lm: PreTrainedModel, cache: SlotCache, ids: Tensor, query: Tensor) -> Tensor:
    """The forward pass itself: tokens (R, n) at places (R, n), in the rows of the cache: hidden states (R, n, D)."""
    if cache.masked:
        # (R, 1, n, end): a token sees itself and what stands before it in its own slot
        end = cache.looked.end
        keys, queries = torch.arange(end, device=ids.device), query[:, None, :, None]
        blocked = keys > queries
        mask: Any = torch.zeros(blocked.shape, dtype=lm.dtype, device=ids.device).masked_fill_(blocked, -torch.inf)
        if cache.window and cache.window < end:
            sliding = mask.masked_fill(keys <= queries - cache.window, -torch.inf)
            kinds = getattr(lm.config.get_text_config(), "layer_types", None)  # who lists its layers takes both masks
            mask = {FULL: mask, SLIDING: sliding} if kinds else sliding
        output = lm.base_model(
            input_ids=ids, attention_mask=mask, position_ids=query, past_key_values=cache, use_cache=True
        )
    else:  # Mamba's family: no layer attends, or knows its tokens' places
        output = lm.base_model(input_ids=ids, cache_params=cache, use_cache=True)
    cache.save()
    if not all(list(layer.stored()) for layer in cache.states):
        raise Unheld(f"{type(lm).__name__} keeps its states in itself, not in a cache")
    return output.last_hidden_state

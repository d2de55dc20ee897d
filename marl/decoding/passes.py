"""Forward passes over new tokens of many streams, padded on the right to one length."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from marl.decoding.cache import FULL, READ_BUDGET, RECURRENT, SLIDING, NotCacheable, SlotCache
from marl.decoding.packing import groups_within
from marl.model.branches import attention_mask, sees

Branch = tuple[int, Sequence[int]]  # how many of a stream's first tokens it goes on from, and its own tokens


class WholeStreams:
    """Replaces the cache for models that no slot can hold: each pass reads whole streams again."""

    def __init__(self, slots: int) -> None:
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self.states: list[Any] = []
        self.nbytes = 0

    def clear(self, slot: int) -> None:
        self.held[slot] = []

    def copy(self, slot: int, to: Sequence[int], length: int) -> None:
        for other in to:
            self.held[other] = self.held[slot][:length]

    def read(self, lm: PreTrainedModel, rows: np.ndarray, start: np.ndarray, chunks: Sequence[Sequence[int]]) -> Tensor:
        """Reads new tokens behind the first `start` (R,) of each row. Returns hidden states (N, D) of the new ones."""
        for row, known, chunk in zip(rows, start, chunks, strict=True):
            self.held[row] = [*self.held[row][:known], *chunk]
        order = sorted(range(len(rows)), key=lambda i: len(self.held[rows[i]]), reverse=True)
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        for group in groups_within([len(self.held[rows[i]]) for i in order], READ_BUDGET):
            streams = [torch.tensor(self.held[rows[order[g]]], device=lm.device) for g in group]
            ids = torch.nn.utils.rnn.pad_sequence(streams, batch_first=True)
            hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
            for g, row, stream in zip(group, hidden, streams, strict=True):
                found[order[g]] = row[start[order[g]] : len(stream)].clone()  # so that the whole pass is freed
        return torch.cat(found)

    def read_beside(self, lm: PreTrainedModel, rows: np.ndarray, branches: Sequence[Sequence[Branch]]) -> Tensor:
        """Reads each branch behind the start of its stream. Returns hidden states (Q, D) of their last tokens."""
        found = []
        for row, own in zip(rows, branches, strict=True):
            for start, ids in own:
                stream = torch.tensor([[*self.held[row][:start], *ids]], device=lm.device)
                found.append(lm.base_model(input_ids=stream, use_cache=False).last_hidden_state[:, -1])
        return torch.cat(found)


def one_pass(
    lm: PreTrainedModel, cache: SlotCache, rows: np.ndarray, start: np.ndarray, chunks: Sequence[Sequence[int]]
) -> Tensor:
    """Reads new tokens into slots `rows` (R,), which hold `start` (R,) tokens.

    Returns hidden states (N, D) of all N tokens, chunk behind chunk. Chunks of different lengths are padded, which is
    only right where no layer is recurrent.
    """
    sizes = np.array([len(c) for c in chunks])
    width = int(sizes.max())
    tokens = np.zeros((len(chunks), width), dtype=np.int64)
    for i, chunk in enumerate(chunks):
        tokens[i, : len(chunk)] = chunk
    offsets = np.arange(width)[None]
    positions = start[:, None] + offsets
    real = offsets < sizes[:, None]
    end = int(positions[real].max()) + 1
    device = lm.device
    query = torch.from_numpy(np.minimum(positions, end - 1)).to(device)
    written = torch.from_numpy(np.where(real, positions, cache.context)).to(device)
    cache.at(torch.from_numpy(rows).to(device), written, end, span_of(rows))
    hidden = run_model(lm, cache, torch.from_numpy(tokens).to(device), query)
    return hidden.flatten(0, 1)[torch.from_numpy(np.flatnonzero(real)).to(device)]


def pass_beside(
    lm: PreTrainedModel, cache: SlotCache, rows: np.ndarray, branches: Sequence[Sequence[Branch]]
) -> Tensor:
    """Reads branches of the streams in slots `rows` (R,), several of each, and stores nothing.

    Returns hidden states (Q, D) of the Q branches' last tokens, row behind row.
    """
    width = max(sum(len(ids) for _, ids in own) for own in branches)
    tokens, branch, position_ids, shared = np.zeros((4, len(rows), width), dtype=np.int64)
    branch -= 1  # padding, which only padding sees
    last = []
    for r, own in enumerate(branches):
        end = 0
        for number, (start, ids) in enumerate(own, start=1):
            here = slice(end, end + len(ids))
            tokens[r, here], branch[r, here], shared[r, here] = ids, number, start
            position_ids[r, here] = start + np.arange(len(ids))
            end += len(ids)
            last.append(r * width + end - 1)
    held, device = int(shared.max()), lm.device
    read, numbers, positions, known = (
        torch.from_numpy(each).to(device) for each in (tokens, branch, position_ids, shared)
    )
    before = torch.arange(held, device=device)
    seen = torch.cat([before < known[:, :, None], sees(numbers, positions)], 2)  # (R, W, held + W)
    mask = attention_mask(lm, seen, positions, torch.cat([before.expand(len(rows), held), positions], 1))
    cache.at(torch.from_numpy(rows).to(device), positions, held, None, load=False)
    cache.beside = True
    try:
        hidden = lm.base_model(
            input_ids=read, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state
    finally:
        cache.beside = False
    return hidden.flatten(0, 1)[torch.tensor(last, device=device)]


def span_of(rows: np.ndarray) -> slice | None:
    """The rows as a range; None unless they are neighbours."""
    return slice(int(rows[0]), int(rows[-1]) + 1) if (np.diff(rows) == 1).all() else None


def run_model(lm: PreTrainedModel, cache: SlotCache, ids: Tensor, query: Tensor) -> Tensor:
    """Computes the pass itself: tokens (R, n) at the positions `query` (R, n). Returns (R, n, D)."""
    if cache.masked:
        # (R, 1, n, end): a token sees itself and what stands before it in its own slot
        keys, queries = torch.arange(cache.end, device=ids.device), query[:, None, :, None]
        blocked = keys > queries
        mask: Any = torch.zeros(blocked.shape, dtype=lm.dtype, device=ids.device).masked_fill_(blocked, -torch.inf)
        if cache.window and cache.window < cache.end:
            sliding = mask.masked_fill(keys <= queries - cache.window, -torch.inf)
            kinds = getattr(lm.config.get_text_config(), "layer_types", None)
            others = {SLIDING: sliding, **dict.fromkeys(RECURRENT)}
            # models that list layers take a mask for each kind
            mask = {kind: others.get(kind, mask) for kind in (FULL, *kinds)} if kinds else sliding
        output = lm.base_model(
            input_ids=ids, attention_mask=mask, position_ids=query, past_key_values=cache, use_cache=True
        )
    elif cache.carried:
        hidden, left = carry(lm, ids, cache.carried.given)
        cache.carried.take(left)
        return hidden
    else:  # Mamba's family: without attention or positions
        output = lm.base_model(input_ids=ids, cache_params=cache, use_cache=True)
    cache.save()
    if not all(list(layer.stored()) for layer in cache.states):
        raise NotCacheable(f"{type(lm).__name__} keeps its states in itself, not in a cache")
    return output.last_hidden_state


def carry(lm: PreTrainedModel, ids: Tensor, state: Sequence[Tensor] | None) -> tuple[Tensor, Sequence[Tensor]]:
    """Reads tokens (R, n) behind a state, (R, D, layers) each. Returns hidden states (R, n, D) and the next state."""

    def alone(row: Tensor, *own: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        found = lm.base_model(input_ids=row[None], state=[each[None] for each in own], use_cache=True)
        return found.last_hidden_state[0], tuple(each[0] for each in found.state)

    if state is not None and ids.shape == (len(ids), 1):  # transformers mixes up rows of one token each
        return torch.vmap(alone)(ids, *state)
    output = lm.base_model(input_ids=ids, state=state, use_cache=True)
    return output.last_hidden_state, output.state

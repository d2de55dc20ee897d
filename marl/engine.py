"""Batched incremental decoding: every agent's view lives in one slot of a preallocated key/value cache.

Each call reads only new tokens, for rows of any length at once. What it leaves out: text, games, when to read what
(agents.py). Recurrent and sliding-window models are refused by name: their state is no list of keys and values.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from marl.errors import UserError
from marl.policy import Policy, choice_logits


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values for all slots, (S, L + 1, H, D); the last position takes the writes of padding."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _, heads, _, width = key_states.shape
        shape = (self.cache.slots, self.cache.context + 1, heads, width)
        self.keys = torch.zeros(shape, dtype=key_states.dtype, device=key_states.device)
        self.values = torch.zeros(
            (*shape[:3], value_states.shape[3]), dtype=value_states.dtype, device=key_states.device
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes (R, H, n, D) at the current rows and positions; returns the rows' keys and values (R, H, end, D)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        c = self.cache
        self.keys[c.rows[:, None], c.positions] = key_states.transpose(1, 2)
        self.values[c.rows[:, None], c.positions] = value_states.transpose(1, 2)
        rows = c.rows if c.span is None else c.span  # a range of slots is a view, anything else a copy
        return self.keys[rows, : c.end].transpose(1, 2), self.values[rows, : c.end].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.end, 0

    def get_seq_length(self) -> int:
        return self.cache.end

    def get_max_length(self) -> int:
        return self.cache.context

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class SlotCache(Cache):
    """A preallocated cache, read and written at the rows and positions that `at` sets for the next forward pass."""

    def __init__(self, layers: int, slots: int, context: int) -> None:
        self.slots, self.context = slots, context
        self.rows = self.positions = torch.empty(0, dtype=torch.int64)
        self.span: slice | None = None
        self.end = 0
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    def at(self, rows: Tensor, positions: Tensor, end: int, span: slice | None) -> None:
        self.rows, self.positions, self.end, self.span = rows, positions, end, span


class Engine:
    """Reads tokens into slots and samples from what comes out. `lengths` (S,) says how much each slot holds."""

    def __init__(self, policy: Policy, slots: int, context: int) -> None:
        config = policy.lm.config.get_text_config()
        if context > policy.context:
            raise UserError(
                f"model.context={context} is more than the model can read ({policy.context} tokens): lower it"
            )
        window = getattr(config, "sliding_window", None) or 0
        listed = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
        # a configuration that does not list its layers has one kind of them
        kinds = set(listed or ["sliding_attention" if window else "full_attention"])
        slides = "sliding_attention" in kinds and window < context
        if slides or kinds - {"full_attention", "sliding_attention"} or not _attends(policy):
            raise UserError(
                f"{type(policy.lm).__name__} keeps more than keys and values of its whole context (layers: "
                f"{', '.join(sorted(kinds))}), so its cache cannot be preallocated: choose a model with full attention"
            )
        self.policy, self.slots, self.context = policy, slots, context
        self.cache = SlotCache(config.num_hidden_layers, slots, context)
        self.lengths = np.zeros(slots, dtype=np.int64)
        self._free = list(range(slots))  # a heap: the lowest free slot is taken, whatever was freed before
        self.tokens_read = 0

    def allocate(self) -> int:
        """An empty slot."""
        if not self._free:
            raise RuntimeError(f"all {self.slots} slots are taken")
        slot = heapq.heappop(self._free)
        self.lengths[slot] = 0
        return slot

    def free(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    @torch.no_grad()
    def read(self, slots: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        """Appends a chunk of new tokens to each slot. Returns hidden states (R, n, D), padded on the right.

        Slots must be distinct; chunks must not be empty.
        """
        sizes = np.array([len(c) for c in chunks])
        rows = np.asarray(slots, dtype=np.int64)
        start = self.lengths[rows]
        if int((start + sizes).max()) > self.context:
            what = "an episode outgrew its slot" if int(start[(start + sizes).argmax()]) else "a prompt is too long"
            raise UserError(
                f"{what}: a stream of {int((start + sizes).max())} tokens does not fit "
                f"model.context={self.context}; raise model.context (the model reads up to {self.policy.context}) or "
                "lower the game's message and turn limits"
            )
        width = int(sizes.max())
        tokens = np.zeros((len(chunks), width), dtype=np.int64)
        for i, chunk in enumerate(chunks):
            tokens[i, : len(chunk)] = chunk
        offsets = np.arange(width)[None]
        positions = start[:, None] + offsets
        real = offsets < sizes[:, None]
        end = int(positions[real].max()) + 1
        device = self.policy.device
        query = torch.from_numpy(np.minimum(positions, end - 1)).to(device)
        self.cache.at(
            torch.from_numpy(rows).to(device),
            torch.from_numpy(np.where(real, positions, self.context)).to(device),
            end,
            slice(int(rows[0]), int(rows[-1]) + 1) if (np.diff(rows) == 1).all() else None,
        )
        # (R, 1, n, end): a token sees itself and what stands before it in its own slot
        blocked = torch.arange(end, device=device) > query[:, None, :, None]
        mask = torch.zeros(blocked.shape, dtype=self.policy.lm.dtype, device=device).masked_fill_(blocked, -torch.inf)
        hidden = self.policy.hidden(
            torch.from_numpy(tokens).to(device),
            attention_mask=mask,
            position_ids=query,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.lengths[rows] += sizes
        self.tokens_read += int(sizes.sum())
        return hidden

    @torch.no_grad()
    def score(self, slot: int, prefix: Sequence[int], texts: Sequence[Sequence[int]], temperature: float) -> np.ndarray:
        """Log-probability of each text, (A,), as speech after `prefix`, which the slot holds at least as the start.

        Texts must not be empty. The slot stays as it is; A free slots are needed meanwhile. Temperature 0 counts as 1.
        """
        known = len(prefix) - 1  # the prefix's last token is read again: what follows it is asked for
        assert known <= self.lengths[slot], (known, self.lengths[slot])
        scratch = [self.allocate() for _ in texts]
        for layer in self.cache.layers:
            assert isinstance(layer, SlotLayer) and layer.keys is not None and layer.values is not None
            layer.keys[scratch, :known] = layer.keys[slot, :known]
            layer.values[scratch, :known] = layer.values[slot, :known]
        self.lengths[scratch] = known
        hidden = self.read(scratch, [[prefix[-1], *text[:-1]] for text in texts])  # (A, n, D)
        for other in scratch:
            self.free(other)
        scores = []
        for row, text in zip(hidden, texts, strict=True):  # one by one: a large vocabulary times A is too much at once
            shaped = self.policy.speech_logits(self.policy.logits(row[: len(text)]), temperature or 1.0)  # (n, V)
            ids = torch.tensor(text, device=shaped.device)
            scores.append(float(shaped.double().log_softmax(-1).gather(1, ids[:, None]).sum()))
        return np.array(scores)

    def rewind(self, slot: int, length: int) -> None:
        """Forgets all but the slot's first `length` tokens."""
        assert length <= self.lengths[slot], (length, self.lengths[slot])
        self.lengths[slot] = length

    @torch.no_grad()
    def sample(
        self, hidden: Tensor, legal: Sequence[tuple[int, ...]], temperature: float, uniform: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """One token for each of R rows, from hidden states (R, D): out of its legal ids, or speech where it has none.

        Temperature 0 takes the likeliest token. Else
        `uniform` (R,) in [0, 1) decides (inverse of the cumulative distribution), so that a row's sample does not
        depend on the rows beside it. Returns ids (R,) and their log-probabilities (R,) under the sampled distribution.
        """
        logits = self.policy.logits(hidden)
        greedy, temperature = temperature == 0, temperature or 1.0
        speech = torch.tensor([not ids for ids in legal], device=logits.device)
        shaped = self.policy.speech_logits(logits, temperature)
        if not bool(speech.all()):
            width = max(len(ids) for ids in legal)
            padded = torch.tensor([[*ids, *[-1] * (width - len(ids))] for ids in legal], device=logits.device)
            chosen = ~speech
            shaped[chosen] = choice_logits(logits[chosen], padded[chosen], temperature)
        logprobs = shaped.log_softmax(-1)
        if greedy:
            best = logprobs.argmax(-1)
            return best.cpu().numpy(), np.zeros(len(best), dtype=np.float32)
        cumulative = logprobs.double().exp().cumsum(-1)
        u = torch.from_numpy(uniform).to(logits.device)[:, None] * cumulative[:, -1:]
        ids = torch.searchsorted(cumulative, u, right=True).clamp_max(logits.shape[1] - 1)
        return ids[:, 0].cpu().numpy(), logprobs.gather(1, ids)[:, 0].cpu().numpy()


def _attends(policy: Policy) -> bool:
    config = policy.lm.config.get_text_config()
    return bool(getattr(config, "num_attention_heads", 0)) and not getattr(policy.lm, "_is_stateful", False)


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), each a function of its own seed and counter only (splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        z = seeds.astype(np.uint64) + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) / float(1 << 53)

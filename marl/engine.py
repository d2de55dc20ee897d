"""Batched incremental decoding: every agent's view lives in one slot of a preallocated cache.

A slot holds keys and values (attention), a state (recurrent layers), or both. Each call reads only new tokens, for rows
of any length at once. Of models that keep something else, whole streams are read again at each call, which is slow
(`WholeStreams`). What it leaves out: text, games, when to read what (agents.py).
"""

from __future__ import annotations

import heapq
import inspect
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from marl.errors import UserError
from marl.grouping import cheapest_groups
from marl.kernels import round_up, takes
from marl.policy import MISFITS, NO_MODEL, Policy, check_context, choice_logits, reading
from marl.ragged import Group, Rows, attending, group_of, split
from marl.sharding import is_split
from marl.varlen import plain, windows

FULL, SLIDING = ATTENTION = ("full_attention", "sliding_attention")  # kinds of layers, as configurations name them
RECURRENT = ("linear_attention", "conv")
BOTH = "hybrid"
NOTHING = ("moe", "mlp")

READ_BUDGET = 8192  # tokens in one pass that reads, with their padding where there is any
# Where attention is compiled: bytes of their hidden states at most. What each layer makes of them is three or four
# times as wide, and stays in a processor's caches. Measured at widths 128 to 512, in float32 and bfloat16.
NEAR, FEWEST = 1 << 20, 256
STRETCH = 128  # captured steps reach into slots by multiples of this


class Desk:
    """Which slots have a second copy of their keys and values, side by side at places 0, 1, ..., and how much of each.

    Attention wants a pass's rows side by side. Those that speak seldom are: one seat in each game. Copied for each of
    their tokens, they would cost several times what attention itself does; here a slot is copied once, when it begins
    to speak, and then only grows. (`Writer`, for fixed shapes, copies all of them once for several tokens.)
    """

    def __init__(self) -> None:
        self.slots: list[int] = []  # by place; -1 where nobody's
        self.held: dict[int, tuple[int, int]] = {}  # by slot: its place, and how many of its tokens are there

    def clear(self) -> None:
        self.slots, self.held = [], {}

    def spill(self) -> None:
        """Everybody keeps the place, and nothing is there: so that games don't depend on how many spoke before."""
        self.held = {slot: (place, 0) for slot, (place, _) in self.held.items()}

    def cut(self, slot: int, length: int) -> None:
        """What stands in the slot behind its first `length` tokens is not what it was."""
        if slot in self.held:
            place, known = self.held[slot]
            self.held[slot] = place, min(known, length)

    def seat(self, slots: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[tuple[int, int, int, int]]]:
        """Gives R slots, of which each holds so many tokens and reads one more, the first R places.

        Returns which of them stands at each place, (R,), and what is missing there: place, slot, from where, up to
        where.
        """
        size = len(slots)
        self.slots += [-1] * (size - len(self.slots))
        which = [-1] * size
        coming = []
        for i, slot in enumerate(slots):
            place, _ = self.held.get(slot, (size, 0))
            if place < size:
                which[place] = i
            else:
                coming.append(i)
        for place, i in zip([place for place in range(size) if which[place] < 0], coming, strict=True):
            if slots[i] in self.held:  # further back: copied again rather than moved
                self.slots[self.held[slots[i]][0]] = -1
            self.held.pop(self.slots[place], None)
            self.slots[place], which[place] = slots[i], i
            self.held[slots[i]] = place, 0
        missing = []
        for place, i in enumerate(which):
            known = self.held[slots[i]][1]
            if known < lengths[i]:
                missing.append((place, slots[i], known, lengths[i]))
            self.held[slots[i]] = place, lengths[i] + 1
        return which, missing


def has_desk(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, decode_steps: int = 1) -> bool:
    """Whether slots that speak have second copies: not where attention reads them where they stand."""
    if device.type != "cpu" or decode_steps > 1:
        return decode_steps > 1
    return not (takes(device, dtype) and plain(config) and asks_attention(config))


def read_budget(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> int:
    """How many tokens such a model's engine best reads in one pass."""
    if device.type != "cpu" or has_desk(config, device, dtype):
        return READ_BUDGET
    return min(max(NEAR // (config.get_text_config().hidden_size * dtype.itemsize), FEWEST), READ_BUDGET)


def places_for(rows: int, slots: int) -> int:
    """How many places a desk has for so many rows: the next power of two, but no more than there are slots."""
    return min(1 << (rows - 1).bit_length(), max(rows, slots))


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values for all slots, (S, L + 1, H, D); the last position takes the writes of padding."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache: SlotCache = weakref.proxy(cache)  # or its memory would stay until the next garbage collection
        self.desk: list[Tensor] = []  # keys and values (P, L + 1, H, D) of the slots at the desk's places

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
            SlotLayer.lazy_initialization(self, key_states, value_states)
        assert self.keys is not None and self.values is not None
        c = self.cache
        if c.ragged:
            self.keys[c.rows, c.positions] = key_states[0].transpose(0, 1)
            self.values[c.rows, c.positions] = value_states[0].transpose(0, 1)
            return key_states, value_states  # attention looks up those of each group
        self.keys[c.rows[:, None], c.positions] = key_states.transpose(1, 2)
        self.values[c.rows[:, None], c.positions] = value_states.transpose(1, 2)
        keys, values = self.look_up(c.looked)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def look_up(self, of: Rows) -> tuple[Tensor, Tensor]:
        """What these slots hold, keys and values (R, end, H, D)."""
        assert self.keys is not None and self.values is not None
        if of.span is not None:
            return self.keys[of.span, : of.end], self.values[of.span, : of.end]
        if of.missing is None:  # three times as fast as indexing, and the same
            keys, values = (each[:, : of.end].index_select(0, of.rows) for each in (self.keys, self.values))
            return keys, values
        self.make_room()
        places = torch.arange(len(of.rows), device=of.rows.device)
        for copied, each in zip(self.desk, (self.keys, self.values), strict=True):
            for place, slot, start, end in of.missing:
                copied[place, start:end] = each[slot, start:end]
            copied[places, of.last] = each[of.rows, of.last]
        keys, values = (copied[: len(of.rows), : of.end] for copied in self.desk)
        return keys, values

    def make_room(self) -> None:
        """Gives the desk as many places as it is to have."""
        if self.keys is not None and self.values is not None and len(next(iter(self.desk), ())) < self.cache.seats:
            shape = (self.cache.seats, *self.keys.shape[1:3])  # zeros, for what is masked counts 0 times what is there
            self.desk = [each.new_zeros(*shape, each.shape[3]) for each in (self.keys, self.values)]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.looked.end, 0

    def get_seq_length(self) -> int:
        return self.cache.looked.end

    def get_max_length(self) -> int:
        return self.cache.context

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class StateLayer(LinearAttentionLayer):
    """One recurrent layer's states for all slots, (S, ...) each: the model finds and leaves those of a pass's rows.

    An empty slot's states are zeros, which is what models start from.
    """

    def __init__(self, cache: SlotCache, number_of_states: int) -> None:
        super().__init__(number_of_states)
        self.cache: SlotCache = weakref.proxy(cache)
        self.all_conv_states: dict[int, Tensor] = {}
        self.all_recurrent_states: dict[int, Tensor] = {}

    def stored(self) -> Iterator[Tensor]:
        yield from self.all_conv_states.values()
        yield from self.all_recurrent_states.values()

    def load(self) -> None:
        """Puts the states of the next pass's rows where the model looks for them."""
        for i, states in self.all_conv_states.items():
            self.conv_states[i] = states[self.cache.chosen]
        for i, states in self.all_recurrent_states.items():
            self.recurrent_states[i] = states[self.cache.chosen]

    def save(self) -> None:
        """Keeps the states that the pass left."""
        for every, own in (
            (self.all_conv_states, self.conv_states),
            (self.all_recurrent_states, self.recurrent_states),
        ):
            for i, states in own.items():
                if states is not None:
                    if i not in every:
                        every[i] = states.new_zeros(self.cache.slots, *states.shape[1:])
                    every[i][self.cache.chosen] = states


class StateAndSlotLayer(StateLayer, SlotLayer):  # type: ignore[override]  # as are those of transformers
    """A layer with keys and values and states."""

    def __init__(self, cache: SlotCache, number_of_states: int) -> None:
        SlotLayer.__init__(self, cache)
        StateLayer.__init__(self, cache, number_of_states)


class SlotCache(Cache):
    """A preallocated cache, read and written at the rows and positions that `at` sets for the next forward pass."""

    def __init__(
        self, kinds: Sequence[str], slots: int, context: int, number_of_states: int, masked: bool, window: int = 0
    ) -> None:
        """`kinds`: of layers (see `layer_kinds`); `number_of_states`: in one recurrent layer; `masked`: whether the
        model takes masks and positions beside its cache; `window`: how many tokens, itself among them, one sees in
        sliding layers."""
        self.slots, self.context, self.masked, self.window = slots, context, masked, window
        self.rows = self.positions = self.places = torch.empty(0, dtype=torch.int64)
        self.looked = Rows(self.rows, 0)
        self.ragged, self.attended = False, 0  # whether the next pass is, and how many of its layers have attended
        self._chunks: tuple[np.ndarray, np.ndarray, np.ndarray, torch.dtype]  # of a ragged pass
        self._groups: list[Group] | None = None
        self.desk, self.seats = Desk(), 0  # and how many it has room for
        layers: list[Any] = []
        for kind in kinds:
            if kind in RECURRENT:
                layers.append(StateLayer(self, number_of_states))
            else:
                layers.append(StateAndSlotLayer(self, number_of_states) if kind == BOTH else SlotLayer(self))
        super().__init__(layers=layers)
        self.states = [layer for layer in layers if isinstance(layer, StateLayer)]

    def at(
        self,
        rows: Tensor,
        positions: Tensor,
        end: int,
        span: slice | None,
        missing: list[tuple[int, int, int, int]] | None = None,
    ) -> None:
        """The next pass reads padded chunks at `positions` (R, n) of slots `rows` (R,); see `Rows`."""
        self.rows, self.positions, self.ragged = rows, positions, False
        self.looked = Rows(rows, end, span, missing, None if missing is None else positions[:, 0])
        for layer in self.states:
            layer.load()

    def at_ragged(self, rows: np.ndarray, start: np.ndarray, sizes: np.ndarray, more: int, lm: PreTrainedModel) -> None:
        """The next pass reads so many tokens of each slot (R,), which holds `start`, one behind the other, and then
        `more` that are nobody's."""
        owners, nobody = np.repeat(rows, sizes), np.zeros(more, dtype=np.int64)
        places = np.arange(len(owners)) + np.repeat(start - (sizes.cumsum() - sizes), sizes)

        def put(own: np.ndarray, others: np.ndarray) -> Tensor:
            return torch.from_numpy(np.concatenate([own, others])).to(lm.device)

        self.rows, self.places, self.ragged = put(owners, nobody), put(places, nobody), True  # (N,)
        self.positions = put(places, nobody + self.context)
        self.looked, self.attended = Rows(self.rows, int((start + sizes).max())), 0
        assert self.looked.end <= self.context, (self.looked.end, self.context)
        self._chunks, self._groups = (rows, start, sizes, lm.dtype), None

    @property
    def groups(self) -> list[Group]:
        """Of a ragged pass: made where attention asks for them."""
        if self._groups is None:
            self._groups = grouped(self, *self._chunks)
        return self._groups

    def seat(self, rows: np.ndarray, start: np.ndarray) -> tuple[list[int], list[tuple[int, int, int, int]]]:
        """See `Desk.seat`."""
        self.make_room(len(rows))
        return self.desk.seat(rows.tolist(), start.tolist())

    def make_room(self, rows: int) -> None:
        """For so many at the desk. Where it grows all is copied again, which should not come often."""
        if rows > self.seats:
            self.seats = places_for(rows, self.slots)
            self.desk.spill()

    def fill(self, rows: Tensor, end: int) -> None:
        """Puts the first `end` tokens of all these slots (R,) to the desk, whatever is there: for fixed shapes."""
        self.make_room(len(rows))
        self.desk.clear()
        for layer in self.layers:
            if isinstance(layer, SlotLayer) and layer.keys is not None and layer.values is not None:
                layer.make_room()
                for copied, each in zip(layer.desk, (layer.keys, layer.values), strict=True):
                    copied[: len(rows), :end] = each[:, :end].index_select(0, rows)

    @property
    def chosen(self) -> Tensor | slice:
        """The pass's rows; a range of slots is a view, anything else a copy."""
        return self.rows if self.looked.span is None else self.looked.span

    def save(self) -> None:
        """To be called after each forward pass."""
        for layer in self.states:
            layer.save()

    def clear(self, slot: int) -> None:
        """Makes the slot an empty one. Keys and values are left: nothing looks at what stands behind a row's end."""
        for layer in self.states:
            for states in layer.stored():
                states[slot] = 0

    def copy(self, slot: int, to: Sequence[int], length: int) -> None:
        """Copies what a slot holds, the keys and values of its first `length` tokens, to other slots."""
        for other in to:
            self.desk.cut(other, 0)
        for layer in self.layers:
            if isinstance(layer, SlotLayer) and layer.keys is not None and layer.values is not None:
                layer.keys[to, :length] = layer.keys[slot, :length]
                layer.values[to, :length] = layer.values[slot, :length]
        for layer in self.states:
            for states in layer.stored():
                states[to] = states[slot].clone()

    @property
    def nbytes(self) -> int:
        """What all slots take, once there was a first pass."""
        held = [t for layer in self.layers if isinstance(layer, SlotLayer) for t in (layer.keys, layer.values)]
        held += [states for layer in self.states for states in layer.stored()]
        return sum(t.nbytes for t in held if t is not None)


class Unheld(Exception):
    """A slot cannot hold what a model's layers keep; the message says why, beginning with the model's name."""


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


def layer_kinds(lm: PreTrainedModel) -> list[str]:
    """The kind of each layer. Raises Unheld where a slot cannot hold what a layer keeps."""
    config = lm.config.get_text_config()
    listed = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    # a configuration that does not list its layers has one kind of them
    kinds = list(listed or [SLIDING if window_of(config) else FULL] * config.num_hidden_layers)
    own = not listed and (getattr(lm, "_is_stateful", False) or not getattr(config, "num_attention_heads", 0))
    if own or set(kinds) - {*ATTENTION, *RECURRENT, BOTH, *NOTHING}:
        what = "a state of its own make" if own else ", ".join(sorted(set(kinds)))
        raise Unheld(f"{type(lm).__name__} keeps what a slot cannot hold (layers: {what})")
    return kinds


def window_of(config: PreTrainedConfig) -> int:
    """How many tokens one sees in sliding layers, itself among them; 0 where there are none."""
    return getattr(config, "sliding_window", None) or 0


@dataclass(frozen=True)
class Size:
    """Bytes of one slot, of the given context, 0 for a model that no slot can hold; of a model's weights; and of what
    recurrent layers keep in a slot, of which nobody has second copies."""

    slot: int
    weights: int
    states: int = 0


def size_of(config: PreTrainedConfig, context: int, dtype: torch.dtype = torch.float32) -> Size:
    """What a model of this configuration takes, found without allocating it: one token is read on `meta`. It is found
    once in a process. UserError where the model cannot read so much."""
    check_context(config, context)
    key = (type(config), config.to_json_string(use_diff=False), context, dtype)
    if key not in _SIZES:
        _SIZES[key] = _find_size(config, context, dtype)
    return _SIZES[key]


_SIZES: dict[tuple[type[PreTrainedConfig], str, int, torch.dtype], Size] = {}


def _find_size(config: PreTrainedConfig, context: int, dtype: torch.dtype) -> Size:
    with reading(config.name_or_path, NO_MODEL), torch.device("meta"), torch.no_grad():
        # the default implementation of experts looks at the tokens' numbers, which are not there
        lm = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="batched_mm").eval()
        weights = sum(p.nbytes for p in lm.parameters())
        try:
            cache = slot_cache(lm, 1, context)
            one_pass(lm, cache, np.array([0]), np.array([0]), [[0]])
        except (Unheld, *MISFITS):
            return Size(0, weights)
    return Size(cache.nbytes, weights, sum(each.nbytes for layer in cache.states for each in layer.stored()))


def asks_attention(config: PreTrainedConfig) -> bool:
    """Whether each layer of such a model asks for attention as `ragged.attention` gives it, by a pass over a token on
    `meta`: not where it attends in code of its own. It is found once in a process."""
    key = (type(config), config.to_json_string(use_diff=False))
    if key not in _ASKS:
        with torch.device("meta"), torch.no_grad():
            lm = AutoModelForCausalLM.from_config(config, experts_implementation="batched_mm").eval()
            try:
                cache = slot_cache(lm, 1, 1)
                one_pass(lm, cache, np.array([0]), np.array([0]), [[0]], ragged=True)
                _ASKS[key] = cache.attended == len(cache.layers)
            except (Unheld, UserError, *MISFITS):
                _ASKS[key] = False
    return _ASKS[key]


_ASKS: dict[tuple[type[PreTrainedConfig], str], bool] = {}


def slot_cache(lm: PreTrainedModel, slots: int, context: int) -> SlotCache:
    """An empty cache for the model. Raises Unheld as `layer_kinds` does."""
    config = lm.config.get_text_config()
    states = getattr(config, "number_of_conv_states", 1)
    masked, kinds = "past_key_values" in inspect.signature(lm.base_model.forward).parameters, layer_kinds(lm)
    if not masked and {*kinds} & {*ATTENTION, BOTH}:
        raise Unheld(f"{type(lm).__name__} keeps nothing of what it has read (it takes no past_key_values)")
    return SlotCache(kinds, slots, context, states, masked, window_of(config))


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


def grouped(
    cache: SlotCache, rows: np.ndarray, start: np.ndarray, sizes: np.ndarray, dtype: torch.dtype
) -> list[Group]:
    """The groups of a ragged pass: which slots attention looks at together."""
    device, first, groups = cache.rows.device, sizes.cumsum() - sizes, []
    for which in split(sizes):
        which = which[np.argsort(rows[which], kind="stable")]
        end, span, missing, last = int((start + sizes)[which].max()), span_of(rows[which]), None, None
        if int(sizes[which].max()) == 1 and span is None and device.type == "cpu":
            order, missing = cache.seat(rows[which], start[which])
            which = which[order]
            last = torch.from_numpy(start[which]).to(device)
        looked = Rows(torch.from_numpy(rows[which]).to(device), end, span, missing, last)
        groups.append(group_of(looked, first[which], start[which], sizes[which], dtype))
    return groups


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


class Writer:
    """Speech at fixed shapes: steps that sample a token for each of R rows without asking the host in between.

    What a step reads and changes stands in tensors of its own that stay where they are, so that on a GPU it is captured
    once, as a CUDA graph, and replayed for as long as the parameters stay where they are, too. A row without tokens
    left writes where nobody reads.
    """

    def __init__(
        self,
        policy: Policy,
        cache: SlotCache,
        rows: int,
        end: int,
        temperature: float,
        pauses: Tensor,
        span: slice | None = None,
    ) -> None:
        """`end`: how far into their slots rows may get. `temperature`: 0 takes the likeliest token. `pauses` (V,):
        the tokens after which a row has none left. `span`: the slots, where they stand side by side."""
        self.policy, self.cache, self.end, self.temperature = policy, cache, end, temperature
        self.pauses, self.span = pauses, span
        device = policy.device
        self.slots, self.ids, self.places, self.left = torch.zeros(4, rows, dtype=torch.int64, device=device)  # (R,)
        self.uniform = torch.zeros(rows, dtype=torch.float64, device=device)
        self.logprobs = torch.zeros(rows, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def step(self) -> None:
        """Reads `ids` at `places` of `slots`, samples those that follow; `left` is 0 after what may be an end."""
        alive = self.left > 0
        nowhere = torch.full_like(self.places, self.cache.context)
        missing: list[tuple[int, int, int, int]] | None = [] if self.span is None else None
        self.cache.at(self.slots, torch.where(alive, self.places, nowhere)[:, None], self.end, self.span, missing)
        query = torch.where(alive, self.places, 0)[:, None]
        hidden = at_device(self.policy.lm, self.cache, self.ids[:, None], query)[:, 0]  # (R, D)
        shaped = self.policy.speech_logits(self.policy.logits(hidden), self.temperature or 1.0)
        ids, logprobs = draw(shaped.log_softmax(-1), None if self.temperature == 0 else self.uniform)
        self.ids.copy_(ids)
        self.logprobs.copy_(logprobs)
        self.places += alive
        self.left.sub_(alive.long()).masked_fill_(self.pauses[ids], 0)

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Makes a CUDA graph of a step. No row has tokens left meanwhile, so that no slot changes."""
        self.left.zero_()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(3):  # as the manual of CUDA graphs asks for
                    self.step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self.step()
        except RuntimeError as error:
            name, reason = type(self.policy.lm).__name__, str(error).strip().splitlines()[0]
            raise UserError(
                f"algo.decode_steps: {name} cannot be captured as a CUDA graph ({reason}); set it to 1"
            ) from error
        self.graph = graph

    @torch.no_grad()
    def write(
        self, slots: np.ndarray, ids: np.ndarray, places: np.ndarray, left: np.ndarray, uniform: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Goes on with r <= R rows, (r,) each, `uniform` (r, K): K steps. Returns what was sampled, (r, K), its
        log-probabilities, (r, K), and how many of these count, (r,)."""
        rows, steps = uniform.shape
        self.left.zero_()
        given = ((self.slots, slots), (self.ids, ids), (self.places, places), (self.left, left))
        for buffer, values in given:
            buffer[:rows] = torch.from_numpy(np.asarray(values, dtype=np.int64)).to(buffer.device)
        chances = torch.zeros(steps, len(self.uniform), dtype=torch.float64)
        chances[:, :rows] = torch.from_numpy(uniform.T)
        chances = chances.to(self.uniform.device)
        if self.span is None:
            self.cache.fill(self.slots, self.end)
        told: list[Tensor] = []
        for step in range(steps):
            self.uniform.copy_(chances[step])
            counts = (self.left > 0).double()
            if self.graph is None:
                self.step()
            else:
                self.graph.replay()
            told.append(torch.stack([self.ids.double(), self.logprobs.double(), counts]))
        sampled, logprobs, counts = torch.stack(told, -1)[:, :rows].cpu().numpy()  # the one word to the host
        return sampled.astype(np.int64), logprobs.astype(np.float32), counts.sum(1).astype(np.int64)


def draw(logprobs: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """One id for each row of (R, V), and its log-probability: the inverse of the cumulative distribution at `uniform`
    (R,) in [0, 1), in double precision. Without `uniform` the likeliest, whose log-probability is 0."""
    if uniform is None:
        return logprobs.argmax(-1), torch.zeros(len(logprobs), device=logprobs.device)
    cumulative = running_sums(logprobs.double().exp())
    ids = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    ids = ids.clamp_max(logprobs.shape[1] - 1)
    return ids[:, 0], logprobs.gather(1, ids)[:, 0]


def running_sums(values: Tensor) -> Tensor:
    """Cumulative sums of (R, V) along V. On a GPU torch's own differ from call to call, and are refused where it may
    take deterministic algorithms only: there in log2(V) steps, each of which adds what stands twice as far back."""
    if not (values.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return values.cumsum(-1)
    return doubling_sums(values)


def doubling_sums(values: Tensor) -> Tensor:
    """Cumulative sums along the last dimension by doubling (Hillis and Steele 1986)."""
    back = 1
    while back < values.shape[-1]:
        values = torch.cat([values[..., :back], values[..., back:] + values[..., :-back]], -1)
        back *= 2
    return values


@torch.no_grad()
def goes_on(lm: PreTrainedModel) -> bool:
    """Whether a pass over several tokens goes on from the states of its slots; where not, one over a single token does.

    Mamba's in transformers 5.23 starts over. Raises Unheld for a model whose pieces don't make the whole either way.
    """
    zero, before, after = np.array([0]), [0, 1], [2, 3, 4, 5]

    def read(pieces: Sequence[Sequence[int]], factor: float) -> Tensor:
        """Hidden states (4, D) of what follows two tokens, whose recurrent states are magnified, so that they tell."""
        cache = slot_cache(lm, 1, len(before) + len(after))
        one_pass(lm, cache, zero, zero, [before])
        for layer in cache.states:
            for states in layer.all_recurrent_states.values():
                states *= factor
        starts = [len(before) + sum(map(len, pieces[:i])) for i in range(len(pieces))]
        return torch.cat([one_pass(lm, cache, zero, np.array([i]), [p]) for i, p in zip(starts, pieces, strict=True)])

    def same(a: Tensor, b: Tensor) -> bool:
        return bool((a - b).abs().max() <= nearness(lm) * b.abs().max())

    single = [[i] for i in after]
    ids = torch.tensor([before + after], device=lm.device)
    whole = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(before) :]
    several = same(read([after], 1000.0), read(single, 1000.0))
    if not same(read([after] if several else single, 1.0), whole):
        raise Unheld(f"{type(lm).__name__} does not read in pieces what it reads as a whole")
    return several


@torch.no_grad()
def make_states(lm: PreTrainedModel, cache: SlotCache) -> None:
    """Gives each slot the states that an empty one has. Models read on from these by other code than where there are
    none yet, to the same up to rounding; but the first games of an engine, as where a run goes on, are to be read like
    any later ones."""
    one_pass(lm, cache, np.array([0]), np.array([0]), [[0]])
    cache.clear(0)


def check_slots(lm: PreTrainedModel) -> None:
    """Raises Unheld for a model that slots don't give what a whole pass does, as one that takes no cache at all and
    whose passes see nothing but their own tokens."""
    if why := unlike(lm, ragged=False):
        raise Unheld(f"{type(lm).__name__} {why}")


def reads_ragged(lm: PreTrainedModel) -> bool:
    """Whether passes need no padding: not where a layer looks back no further than a window, or attends in a way of its
    own (`ragged.attention`)."""
    short = windows(lm.config.get_text_config())  # longer than the streams below, they would not show
    return set(layer_kinds(lm)) == {FULL} and not short and not unlike(lm, ragged=True)


def unlike(lm: PreTrainedModel, ragged: bool) -> str:
    """Why slots don't give what a whole pass does; empty where they do. Looked at once in a process for each
    configuration."""
    key = (type(lm), lm.config.to_json_string(use_diff=False), lm.dtype, str(lm.device), ragged)
    if key not in _UNLIKE:
        try:
            _UNLIKE[key] = "" if _alike(lm, ragged) else "does not read in pieces what it reads as a whole"
        except torch.OutOfMemoryError:
            raise
        except (*MISFITS, AssertionError, UserError) as error:
            told = str(error).strip().splitlines() or [type(error).__name__]
            what = "attends in a way of its own" if ragged else "keeps what a slot cannot hold"
            _UNLIKE[key] = f"{what} ({told[0][:200]})"
    return _UNLIKE[key]


_UNLIKE: dict[tuple[type, str, torch.dtype, str, bool], str] = {}


@torch.no_grad()
def _alike(lm: PreTrainedModel, ragged: bool) -> bool:
    """Two streams of unequal length, in slots that are not side by side: in pieces, token by token, and in pieces."""
    vocabulary = lm.config.get_text_config().vocab_size
    streams = [[(7 * i + row) % vocabulary for i in range(length)] for row, length in enumerate((24, 15))]
    rows, lengths = np.array([0, 2]), np.zeros(2, dtype=np.int64)
    cache = slot_cache(lm, 3, len(streams[0]))
    found: list[list[Tensor]] = [[], []]
    for sizes in ((9, 4), (1, 1), (1, 1), (6, 1), (7, 8)):
        chunks = [s[n : n + size] for s, n, size in zip(streams, lengths.tolist(), sizes, strict=True)]
        hidden = one_pass(lm, cache, rows, lengths, chunks, ragged)
        for own, states in zip(found, hidden.split(sizes), strict=True):
            own.append(states)
        lengths = lengths + np.array(sizes)
    for stream, own in zip(streams, found, strict=True):
        ids = torch.tensor([stream], device=lm.device)
        whole = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        if not bool((torch.cat(own) - whole).abs().max() <= nearness(lm) * whole.abs().max()):
            return False
    return True


def nearness(lm: PreTrainedModel) -> float:
    """How far apart the same states may be when they are computed in other pieces, as a share of the largest."""
    return 1e-3 if lm.dtype in (torch.float32, torch.float64) else 0.1


@torch.no_grad()
def slowness(lm: PreTrainedModel, slots: int, context: int) -> tuple[float, int]:
    """How much longer half a context takes, which is read again, than a token alone, as from a cache: measured, once in
    a process, in as many rows as are read at a time. Returns that, and the number of rows."""
    rows, half = max(min(slots, READ_BUDGET // max(context // 2, 1)), 1), max(context // 2, 1)
    key = (type(lm), lm.config.to_json_string(use_diff=False), lm.dtype, str(lm.device), rows, half)

    def seconds(length: int) -> float:
        ids = torch.zeros(rows, length, dtype=torch.int64, device=lm.device)
        spent = []
        for _ in range(5):  # the first is warm-up, too
            began = time.perf_counter()
            lm.base_model(input_ids=ids, use_cache=False).last_hidden_state.sum().item()
            spent.append(time.perf_counter() - began)
        return min(spent)

    if key not in _SLOWNESS:
        _SLOWNESS[key] = seconds(half) / seconds(1)
    return _SLOWNESS[key], rows


_SLOWNESS: dict[tuple[Any, ...], float] = {}


class Engine:
    """Reads tokens into slots and samples from what comes out. `lengths` (S,) says how much each slot holds."""

    def __init__(self, policy: Policy, slots: int, context: int, alike: PreTrainedModel | None = None) -> None:
        """`alike`: the model that the policy's is a copy of in bfloat16. Whether slots can hold it is seen there, where
        what is forgotten is more than rounding."""
        check_context(policy.lm.config, context)
        lm = alike or policy.lm
        self.policy, self.slots, self.context = policy, slots, context
        self.cache: SlotCache | WholeStreams
        self.unheld = ""  # why there is no cache, if so
        self.ragged = False  # whether passes are without padding; tests unset it
        try:
            self.cache = slot_cache(policy.lm, slots, context)
            self._goes_on = not self.cache.states or goes_on(lm)
            if self.cache.states:
                make_states(policy.lm, self.cache)
            if not self.cache.states and not is_split(policy):
                check_slots(lm)
                # in bfloat16 a CPU makes kernels for each new number of tokens, which is another in every ragged pass
                device, dtype = policy.device, policy.lm.dtype
                made_anew = dtype == torch.bfloat16 and device.type == "cpu" and not takes(device, dtype)
                self.ragged = not made_anew and reads_ragged(lm)
        except Unheld as reason:
            self.cache, self._goes_on, self.unheld = WholeStreams(slots), True, str(reason)
        self.read_budget = READ_BUDGET  # tokens that a pass best reads
        if self.ragged:
            self.read_budget = read_budget(policy.lm.config, policy.device, policy.lm.dtype)
        self.lengths = np.zeros(slots, dtype=np.int64)
        self._free = list(range(slots))  # a heap: the lowest free slot is taken, whatever was freed before
        self.tokens_read = 0
        self.few_shapes = policy.device.type == "cuda"  # of `write`'s steps, since each is captured; tests set it, too
        self._may_end: Tensor | None = None
        self._writers: dict[tuple[int, int, float], Writer] = {}  # by shape
        self._captured_at: tuple[int, ...] = ()
        self._pool: Any = None  # of the graphs' memory
        self._stream: torch.cuda.Stream | None = None

    @property
    def can_write(self) -> bool:
        """Whether `write` is for this model: a recurrent layer's states would move on in rows that have ended."""
        return isinstance(self.cache, SlotCache) and not self.cache.states

    def allocate(self) -> int:
        """An empty slot."""
        if not self._free:
            raise RuntimeError(f"all {self.slots} slots are taken")
        slot = heapq.heappop(self._free)
        self._empty(slot)
        return slot

    def free(self, slot: int) -> None:
        heapq.heappush(self._free, slot)
        if len(self._free) == self.slots and isinstance(self.cache, SlotCache):
            self.cache.desk.clear()  # so that the next games don't depend on those before

    def _empty(self, slot: int) -> None:
        self.lengths[slot] = 0
        self.cache.clear(slot)

    @torch.no_grad()
    def read(self, slots: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        """Appends a chunk of new tokens to each slot. Returns hidden states (N, D) of all N tokens, chunk behind chunk.

        Slots must be distinct; chunks must not be empty.
        """
        sizes = np.array([len(c) for c in chunks])
        assert sizes.all(), "an empty chunk"
        rows = np.asarray(slots, dtype=np.int64)
        start = self.lengths[rows]
        self._check_room(start, sizes)
        if not self.cache.states:
            return self._pass(rows, chunks)
        # Padding would move a state on, so that rows are read in pieces, each for all rows that have as much to read.
        parts: list[list[Tensor]] = [[] for _ in chunks]
        done = np.zeros_like(sizes)
        while (done < sizes).any():
            which, size = self._piece(self.lengths[rows], sizes - done)
            pieces = [chunks[i][done[i] : done[i] + size] for i in which]
            for i, states in zip(which, self._pass(rows[which], pieces).split(size), strict=True):
                parts[i].append(states)
            done[which] += size
        return torch.cat([states for own in parts for states in own])

    def _check_room(self, start: np.ndarray, sizes: np.ndarray) -> None:
        """That so many more tokens fit into slots that hold `start`."""
        if int((start + sizes).max()) > self.context:
            raise self.outgrown(int((start + sizes).max()), begun=bool(start[(start + sizes).argmax()]))

    def outgrown(self, tokens: int, begun: bool) -> UserError:
        """What to say of a stream that no slot holds: of a game that has begun, or of the first that a player reads."""
        what = "an episode outgrew its slot" if begun else "a prompt is too long"
        most = self.policy.context
        way = f"raise model.context (the model reads up to {most}), " if most > self.context else ""
        return UserError(
            f"{what}: a stream of {tokens} tokens does not fit model.context={self.context}; {way}lower the game's "
            "message and turn limits, or say the same in fewer tokens, as with env.style=compact"
        )

    def _piece(self, start: np.ndarray, left: np.ndarray) -> tuple[np.ndarray, int]:
        """Which rows are to be read next, and how many tokens of each, where `left` (R,) are unread after `start`."""
        if self._goes_on:
            size = 1 << (int(left.max()).bit_length() - 1)  # the largest power of two: few passes, whatever the lengths
            return np.flatnonzero(left >= size), size
        new = (start == 0) & (left > 0)
        if new.any():
            size = int(left[new].max())
            return np.flatnonzero(new & (left == size)), size
        return np.flatnonzero(left > 0), 1

    def _pass(self, rows: np.ndarray, chunks: Sequence[Sequence[int]]) -> Tensor:
        if isinstance(self.cache, WholeStreams):
            hidden = self.cache.read(self.policy.lm, rows, self.lengths[rows], chunks)
        else:
            hidden = one_pass(self.policy.lm, self.cache, rows, self.lengths[rows], chunks, self.ragged)
        sizes = [len(chunk) for chunk in chunks]
        self.lengths[rows] += sizes
        self.tokens_read += sum(sizes)
        return hidden

    @torch.no_grad()
    def score(self, slot: int, prefix: Sequence[int], texts: Sequence[Sequence[int]], temperature: float) -> np.ndarray:
        """Log-probability of each text, (A,), as speech after `prefix`, which the slot holds at least as the start.

        Texts must not be empty. The slot stays as it is; A free slots are needed meanwhile. Temperature 0 counts as 1.
        """
        known = len(prefix) - 1  # the prefix's last token is read again: what follows it is asked for
        assert known <= self.lengths[slot], (known, self.lengths[slot])
        scratch = [self.allocate() for _ in texts]
        source = slot
        if self.cache.states and known:  # a state has no way back to an earlier token
            source = scratch[0]
            self.read([source], [prefix[:known]])
        if known:
            self.cache.copy(source, [other for other in scratch if other != source], known)
        self.lengths[scratch] = known
        hidden = self.read(scratch, [[prefix[-1], *text[:-1]] for text in texts]).split([len(text) for text in texts])
        for other in scratch:
            self.free(other)
        scores = []
        for row, text in zip(hidden, texts, strict=True):  # one by one: a large vocabulary times A is too much at once
            shaped = self.policy.speech_logits(self.policy.logits(row), temperature or 1.0)  # (n, V)
            ids = torch.tensor(text, device=shaped.device)
            scores.append(float(shaped.double().log_softmax(-1).gather(1, ids[:, None]).sum()))
        return np.array(scores)

    def rewind(self, slot: int, prefix: Sequence[int]) -> None:
        """Forgets all but `prefix`, which the slot holds as its start."""
        assert len(prefix) <= self.lengths[slot], (len(prefix), self.lengths[slot])
        if self.cache.states and len(prefix) < self.lengths[slot]:  # a state has no way back: it is made again
            self._empty(slot)
            if prefix:
                self.read([slot], [prefix])
        self.lengths[slot] = len(prefix)

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
        width, least = max(map(len, legal)), min(map(len, legal))
        if width:
            padded = torch.tensor([[*ids, *[-1] * (width - len(ids))] for ids in legal], device=logits.device)
        if least:  # nobody speaks
            shaped = choice_logits(logits, padded, temperature)
        else:
            shaped = self.policy.speech_logits(logits, temperature)
            if width:
                chosen = torch.tensor([bool(ids) for ids in legal], device=logits.device)
                shaped[chosen] = choice_logits(logits[chosen], padded[chosen], temperature)
        ids, found = draw(shaped.log_softmax(-1), None if greedy else torch.from_numpy(uniform).to(logits.device))
        return ids.cpu().numpy(), found.cpu().numpy()

    @torch.no_grad()
    def write(
        self, slots: Sequence[int], ids: Sequence[int], left: Sequence[int], uniform: np.ndarray, temperature: float
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Goes on with speech in slots (R,) whose last ids (R,) are unread: up to K tokens each, as `uniform` (R, K)
        says, at most `left` (R,), and none after one that may be an end. Returns ids and log-probabilities.

        The same as `read` and `sample` K times (up to rounding), without a word to the host between. For engines that
        `can_write`.
        """
        assert isinstance(self.cache, SlotCache) and self.can_write
        rows, steps = np.asarray(slots, dtype=np.int64), uniform.shape[1]
        start = self.lengths[rows]
        self._check_room(start, np.ones_like(start))
        for row, length in zip(rows.tolist(), start.tolist(), strict=True):
            self.cache.desk.cut(row, length)
        allowed = np.minimum(np.minimum(left, steps), self.context - start)
        size, end = len(rows), int((start + allowed).max())
        if self.few_shapes:
            far = min(-(-end // STRETCH) * STRETCH, self.context)
            writer = self._kept(1 << (size - 1).bit_length(), far, temperature)
        else:
            writer = Writer(self.policy, self.cache, size, end, temperature, self._pauses(), span_of(rows))
        sampled, logprobs, counts = writer.write(rows, np.asarray(ids), start, allowed, uniform)
        self.lengths[rows] += counts
        self.tokens_read += int(counts.sum())
        each = list(zip(sampled.tolist(), logprobs.tolist(), counts.tolist(), strict=True))
        return [own[:count] for own, _, count in each], [own[:count] for _, own, count in each]

    def _pauses(self) -> Tensor:
        """Which tokens (V,) may end a reply."""
        if self._may_end is None:
            self._may_end = torch.zeros(self.policy.speech_mask.shape, dtype=torch.bool, device=self.policy.device)
            self._may_end[sorted(self.policy.tokens.may_end)] = True
        return self._may_end

    def _kept(self, size: int, end: int, temperature: float) -> Writer:
        """The writer of this shape: a new one where there is none yet, or the model or the desk has moved since."""
        assert isinstance(self.cache, SlotCache)
        self.cache.make_room(size)
        moving = [*self.policy.parameters(), *self.policy.buffers()]
        for layer in self.cache.layers:
            if isinstance(layer, SlotLayer):
                layer.make_room()
                moving += layer.desk
        there = tuple(tensor.data_ptr() for tensor in moving)
        if self._captured_at != there:
            self._writers, self._captured_at, self._pool = {}, there, None
        key = (size, end, temperature)
        if key not in self._writers:
            self._writers[key] = Writer(self.policy, self.cache, *key, self._pauses())
            if self.policy.device.type == "cuda":
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                self._stream = self._stream or torch.cuda.Stream()
                self._writers[key].capture(self._pool, self._stream)
        return self._writers[key]


def span_of(rows: np.ndarray) -> slice | None:
    """The rows as a range, where they stand side by side."""
    return slice(int(rows[0]), int(rows[-1]) + 1) if (np.diff(rows) == 1).all() else None


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), each a function of its own seed and counter only (splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        z = seeds.astype(np.uint64) + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) / float(1 << 53)

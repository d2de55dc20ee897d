"""The slot cache: keys, values and recurrent states of many streams, for `transformers` models."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from marl.kernels.ragged import Group, Rows, group_of, split

FULL, SLIDING = ATTENTION = ("full_attention", "sliding_attention")  # kinds of layers, as configurations name them
RECURRENT = ("linear_attention", "conv")
BOTH = "hybrid"
NOTHING = ("moe", "mlp")
READ_BUDGET = 8192  # tokens in one pass that reads, with their padding where there is any


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


def slot_cache(lm: PreTrainedModel, slots: int, context: int) -> SlotCache:
    """An empty cache for the model. Raises Unheld as `layer_kinds` does."""
    config = lm.config.get_text_config()
    states = getattr(config, "number_of_conv_states", 1)
    masked, kinds = "past_key_values" in inspect.signature(lm.base_model.forward).parameters, layer_kinds(lm)
    if not masked and {*kinds} & {*ATTENTION, BOTH}:
        raise Unheld(f"{type(lm).__name__} keeps nothing of what it has read (it takes no past_key_values)")
    return SlotCache(kinds, slots, context, states, masked, window_of(config))


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


def span_of(rows: np.ndarray) -> slice | None:
    """The rows as a range, where they stand side by side."""
    return slice(int(rows[0]), int(rows[-1]) + 1) if (np.diff(rows) == 1).all() else None

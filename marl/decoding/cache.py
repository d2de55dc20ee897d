"""The slot cache: keys, values and recurrent states of many streams, for `transformers` models."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from marl.model.branches import FULL, SLIDING

ATTENTION = (FULL, SLIDING)  # kinds of layers, as configurations name them
RECURRENT = ("linear_attention", "conv")
BOTH = "hybrid"
NOTHING = ("moe", "mlp")
CARRIED = "carried"  # RWKV: not layers, but the whole model, takes a state and gives it back
READ_BUDGET = 8192  # padded tokens in one pass that reads


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer for all slots, (S, L + 1, H, D); writes of padding go to the last position."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache: SlotCache = weakref.proxy(cache)  # a cycle would keep the memory until the next garbage collection

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = (self.cache.slots, self.cache.context + 1, key_states.shape[1])
        self.keys = key_states.new_zeros(*shape, key_states.shape[3])
        self.values = value_states.new_zeros(*shape, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes (R, H, n, D) at the current rows and positions; returns the rows' keys and values (R, H, end, D).

        Beside the streams nothing is written, and what was given stands behind: (R, H, end + n, D).
        """
        if not self.is_initialized:
            SlotLayer.lazy_initialization(self, key_states, value_states)
        assert self.keys is not None and self.values is not None
        c = self.cache
        if c.beside:
            held = [(each[:, : c.end].index_select(0, c.rows)).transpose(1, 2) for each in (self.keys, self.values)]
            return torch.cat([held[0], key_states], 2), torch.cat([held[1], value_states], 2)
        self.keys[c.rows[:, None], c.positions] = key_states.transpose(1, 2)
        self.values[c.rows[:, None], c.positions] = value_states.transpose(1, 2)
        if c.span is not None:
            keys, values = self.keys[c.span, : c.end], self.values[c.span, : c.end]
        else:  # three times as fast as indexing
            keys, values = (each[:, : c.end].index_select(0, c.rows) for each in (self.keys, self.values))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.end + (query_length if self.cache.beside else 0), 0

    def get_seq_length(self) -> int:
        return self.cache.end

    def get_max_length(self) -> int:
        return self.cache.context

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class StateLayer(LinearAttentionLayer):
    """States of one recurrent layer for all slots, (S, ...) each. The model reads and leaves those of a pass's rows.

    The states of an empty slot are zeros, which models start from.
    """

    def __init__(self, cache: SlotCache, number_of_states: int) -> None:
        super().__init__(number_of_states)
        self.cache: SlotCache = weakref.proxy(cache)
        self.all_conv_states: dict[int, Tensor] = {}
        self.all_recurrent_states: dict[int, Tensor] = {}

    def stored(self) -> Iterator[Tensor]:
        yield from self.all_conv_states.values()
        yield from self.all_recurrent_states.values()

    def clear(self, slot: int) -> None:
        for states in self.stored():
            states[slot] = 0

    def load(self) -> None:
        """Puts the states of the next pass's rows where the model looks for them."""
        for i, states in self.all_conv_states.items():
            self.conv_states[i] = states[self.cache.chosen]
        for i, states in self.all_recurrent_states.items():
            self.recurrent_states[i] = states[self.cache.chosen]

    def save(self) -> None:
        """Stores the states that the pass left."""
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
    """A layer with keys, values and states."""

    def __init__(self, cache: SlotCache, number_of_states: int) -> None:
        SlotLayer.__init__(self, cache)
        StateLayer.__init__(self, cache, number_of_states)


class CarriedState:
    """The state that RWKV takes and gives back, for all slots: five tensors (S, D, layers)."""

    EMPTY = (0.0, 0.0, 0.0, 0.0, -1e30)  # as `transformers` begins: the last holds logarithms of the largest weight

    def __init__(self, cache: SlotCache) -> None:
        self.cache: SlotCache = weakref.proxy(cache)
        self.all_recurrent_states: dict[int, Tensor] = {}
        self.given: list[Tensor] | None = None  # of the pass's rows; None before the first pass

    def stored(self) -> Iterator[Tensor]:
        yield from self.all_recurrent_states.values()

    def clear(self, slot: int) -> None:
        for states, empty in zip(self.stored(), self.EMPTY, strict=False):
            states[slot] = empty

    def load(self) -> None:
        """Sets `given` to a copy, in which the model writes."""
        if self.all_recurrent_states:
            self.given = [states[self.cache.chosen].clone() for states in self.stored()]

    def take(self, left: Sequence[Tensor]) -> None:
        """Stores what a pass left, (R, D, layers) each."""
        for i, (states, empty) in enumerate(zip(left, self.EMPTY, strict=True)):
            if i not in self.all_recurrent_states:
                self.all_recurrent_states[i] = states.new_full((self.cache.slots, *states.shape[1:]), empty)
            self.all_recurrent_states[i][self.cache.chosen] = states

    def save(self) -> None:
        """Does nothing: `take` has stored the state."""


class SlotCache(Cache):
    """A preallocated cache. `at` sets the rows and positions that the next forward pass reads and writes."""

    def __init__(
        self,
        kinds: Sequence[str],
        slots: int,
        context: int,
        number_of_states: int = 1,
        masked: bool = False,
        window: int = 0,
    ) -> None:
        """Builds an empty cache.

        kinds: of layers, see `layer_kinds`; [CARRIED]: of the whole model. number_of_states: in one recurrent layer.
        masked: whether the model takes masks and positions beside its cache. window: tokens that one sees in sliding
        layers, itself included.
        """
        self.slots, self.context, self.masked, self.window = slots, context, masked, window
        self.beside = False  # whether a pass reads branches, of which nothing is stored
        self.at(torch.empty(0, dtype=torch.int64), torch.empty(0, 0, dtype=torch.int64), 0, None, load=False)
        layers: list[Any] = []
        self.carried = CarriedState(self) if CARRIED in kinds else None
        for kind in () if self.carried else kinds:
            if kind in RECURRENT:
                layers.append(StateLayer(self, number_of_states))
            else:
                layers.append(StateAndSlotLayer(self, number_of_states) if kind == BOTH else SlotLayer(self))
        super().__init__(layers=layers)
        self.states: list[StateLayer | CarriedState] = [x for x in layers if isinstance(x, StateLayer)]
        if self.carried:
            self.states = [self.carried]

    def at(self, rows: Tensor, positions: Tensor, end: int, span: slice | None, load: bool = True) -> None:
        """Sets what the next pass reads: chunks at `positions` (R, n) of slots `rows` (R,), up to token `end`.

        span: the rows as a range, where they are neighbours; a view then replaces a copy.
        """
        self.rows, self.positions, self.end, self.span = rows, positions, end, span
        for layer in self.states if load else ():
            layer.load()

    @property
    def chosen(self) -> Tensor | slice:
        """The pass's rows, as a range if possible."""
        return self.rows if self.span is None else self.span

    def save(self) -> None:
        """Stores states; to be called after each forward pass."""
        for layer in self.states:
            layer.save()

    def clear(self, slot: int) -> None:
        """Empties a slot. Its keys and values may stay: no mask reaches behind a row's end."""
        for layer in self.states:
            layer.clear(slot)

    def copy(self, slot: int, to: Sequence[int], length: int) -> None:
        """Copies a slot's states, and the keys and values of its first `length` tokens, to other slots."""
        for layer in self.layers:
            if isinstance(layer, SlotLayer) and layer.keys is not None and layer.values is not None:
                layer.keys[to, :length] = layer.keys[slot, :length]
                layer.values[to, :length] = layer.values[slot, :length]
        for stateful in self.states:
            for states in stateful.stored():
                states[to] = states[slot].clone()

    def states_of(self, rows: np.ndarray) -> list[Tensor]:
        """Copies the states of slots (R,)."""
        return [states[rows] for layer in self.states for states in layer.stored()]

    def restore(self, rows: np.ndarray, kept: Sequence[Tensor]) -> None:
        """Puts back what `states_of` copied. Keys and values may stay: no mask reaches behind a row's end."""
        for states, own in zip((each for layer in self.states for each in layer.stored()), kept, strict=True):
            states[rows] = own

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, once there was a first pass."""
        held = [t for layer in self.layers if isinstance(layer, SlotLayer) for t in (layer.keys, layer.values)]
        held += [states for layer in self.states for states in layer.stored()]
        return sum(t.nbytes for t in held if t is not None)


class NotCacheable(Exception):
    """Raised where a slot cannot hold what a model's layers keep; the message begins with the model's name."""


def layer_kinds(lm: PreTrainedModel) -> list[str]:
    """Lists the kind of each layer. Raises NotCacheable where a slot cannot hold what a layer keeps."""
    config = lm.config.get_text_config()
    listed = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    # a configuration that does not list its layers has one kind of them
    kinds = list(listed or [SLIDING if window_of(config) else FULL] * config.num_hidden_layers)
    own = not listed and not getattr(config, "num_attention_heads", 0)
    if own or set(kinds) - {*ATTENTION, *RECURRENT, BOTH, *NOTHING}:
        what = "a state of its own make" if own else ", ".join(sorted(set(kinds)))
        raise NotCacheable(f"{type(lm).__name__} keeps what a slot cannot hold (layers: {what})")
    return kinds


def window_of(config: PreTrainedConfig) -> int:
    """Number of tokens that one sees in sliding layers, itself included; 0 without such layers."""
    return getattr(config, "sliding_window", None) or 0


def slot_cache(lm: PreTrainedModel, slots: int, context: int) -> SlotCache:
    """Builds an empty cache for the model. Raises NotCacheable as `layer_kinds` does."""
    config, takes = lm.config.get_text_config(), inspect.signature(lm.base_model.forward).parameters
    if "state" in takes:
        return SlotCache([CARRIED], slots, context)
    limits: list[Any] = [module.time_step_limit for module in lm.modules() if getattr(module, "time_step_limit", None)]
    if any(tuple(limit) != (0.0, math.inf) for limit in limits):  # as Zamba2's and Nemotron-H's
        raise NotCacheable(f"{type(lm).__name__} keeps a state that single tokens move without its time_step_limit")
    states = getattr(config, "number_of_conv_states", 1)
    masked, kinds = "past_key_values" in takes, layer_kinds(lm)
    if not masked and {*kinds} & {*ATTENTION, BOTH}:
        raise NotCacheable(f"{type(lm).__name__} keeps nothing of what it has read (it takes no past_key_values)")
    return SlotCache(kinds, slots, context, states, masked, window_of(config))

"""Facts about a model that are found by trying it: a slot's size, its attention and speed, independence of streams."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from marl.common.errors import UserError
from marl.decoding.cache import FULL, READ_BUDGET, SlotCache, Unheld, layer_kinds, slot_cache
from marl.decoding.passes import one_pass
from marl.kernels.cpu import takes
from marl.kernels.varlen import plain, windows
from marl.model.policy import MISFITS, NO_MODEL, check_context, reading

# Where attention is compiled: bytes of their hidden states at most. What each layer makes of them is three or four
# times as wide, and stays in a processor's caches. Measured at widths 128 to 512, in float32 and bfloat16.
NEAR, FEWEST = 1 << 20, 256


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

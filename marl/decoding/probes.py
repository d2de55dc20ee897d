"""Facts about a model that are found by trying it: the size of a slot, and whether reading in pieces is right."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from marl.common.errors import UserError
from marl.decoding.cache import NotCacheable, slot_cache
from marl.decoding.passes import one_pass
from marl.model.branches import MISFITS
from marl.model.loading import NO_MODEL, check_context, reading


@dataclass(frozen=True)
class Size:
    """Bytes of one slot (0 for a model that no slot can hold), and of the model's weights."""

    slot: int
    weights: int


def size_of(config: PreTrainedConfig, context: int, dtype: torch.dtype = torch.float32) -> Size:
    """Finds a model's size without allocating it: one token is read on torch's `meta` device, once per process.

    UserError where the model cannot read so much.
    """
    check_context(config, context)
    key = (type(config), config.to_json_string(use_diff=False), context, dtype)
    if key not in _SIZES:
        _SIZES[key] = _find_size(config, context, dtype)
    return _SIZES[key]


_SIZES: dict[tuple[type[PreTrainedConfig], str, int, torch.dtype], Size] = {}


def _find_size(config: PreTrainedConfig, context: int, dtype: torch.dtype) -> Size:
    with reading(config.name_or_path, NO_MODEL), torch.device("meta"), torch.no_grad():
        lm = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=None,
            experts_implementation="batched_mm",  # the default one looks at numbers, which `meta` has not
        ).eval()
        weights = sum(p.nbytes for p in lm.parameters())
        try:
            cache = slot_cache(lm, 1, context)
            one_pass(lm, cache, np.array([0]), np.array([0]), [[0]])
        except (NotCacheable, *MISFITS):
            return Size(0, weights)
    return Size(cache.nbytes, weights)


@torch.no_grad()
def reads_chunks(lm: PreTrainedModel) -> bool:
    """Tells whether a pass over several tokens continues from a slot's recurrent states. If not, single tokens do.

    Mamba's in transformers 5.23 starts over. Raises NotCacheable for a model that is right neither way.
    """
    zero, before, after = np.array([0]), [0, 1], [2, 3, 4, 5]

    def read(pieces: Sequence[Sequence[int]], factor: float) -> Tensor:
        """Hidden states (4, D) of what follows two tokens, whose recurrent states are magnified to make them matter."""
        cache = slot_cache(lm, 1, len(before) + len(after))
        one_pass(lm, cache, zero, zero, [before])
        for layer in cache.states:
            for states in layer.all_recurrent_states.values():
                states *= factor
        starts = [len(before) + sum(map(len, pieces[:i])) for i in range(len(pieces))]
        return torch.cat([one_pass(lm, cache, zero, np.array([i]), [p]) for i, p in zip(starts, pieces, strict=True)])

    single = [[i] for i in after]
    ids = torch.tensor([before + after], device=lm.device)
    with trying(lm):
        whole = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(before) :]
        several = _near(lm, read([after], 1000.0), read(single, 1000.0))
        right = _near(lm, read([after] if several else single, 1.0), whole)
    if not right:
        raise NotCacheable(f"{type(lm).__name__} does not read in pieces what it reads as a whole")
    return several


@contextmanager
def trying(lm: PreTrainedModel) -> Iterator[None]:
    """Turns errors of a model that needs another cache into NotCacheable."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (*MISFITS, AssertionError, UserError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise NotCacheable(f"{type(lm).__name__} keeps what a slot cannot hold ({lines[0][:200]})") from error


def check_slots(lm: PreTrainedModel) -> None:
    """Raises NotCacheable if reading in pieces is not one whole pass. Tries it once per process and configuration."""
    key = (type(lm), lm.config.to_json_string(use_diff=False), lm.dtype, str(lm.device))
    if key not in _UNLIKE:
        try:
            with trying(lm):
                alike = _alike(lm)
            _UNLIKE[key] = "" if alike else f"{type(lm).__name__} does not read in pieces what it reads as a whole"
        except NotCacheable as error:
            _UNLIKE[key] = str(error)
    if why := _UNLIKE[key]:
        raise NotCacheable(why)


_UNLIKE: dict[tuple[type, str, torch.dtype, str], str] = {}


@torch.no_grad()
def _alike(lm: PreTrainedModel) -> bool:
    """Reads two streams in pieces, in slots that are no neighbours, and compares with whole passes."""
    vocabulary = lm.config.get_text_config().vocab_size
    streams = [[(7 * i + row) % vocabulary for i in range(length)] for row, length in enumerate((24, 15))]
    rows, lengths = np.array([0, 2]), np.zeros(2, dtype=np.int64)
    cache = slot_cache(lm, 3, len(streams[0]))
    found: list[list[Tensor]] = [[], []]
    for sizes in ((9, 4), (1, 1), (1, 1), (6, 1), (7, 8)):
        chunks = [s[n : n + size] for s, n, size in zip(streams, lengths.tolist(), sizes, strict=True)]
        hidden = one_pass(lm, cache, rows, lengths, chunks)
        for own, states in zip(found, hidden.split(sizes), strict=True):
            own.append(states)
        lengths = lengths + np.array(sizes)
    for stream, own in zip(streams, found, strict=True):
        ids = torch.tensor([stream], device=lm.device)
        if not _near(lm, torch.cat(own), lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]):
            return False
    return True


def _near(lm: PreTrainedModel, a: Tensor, b: Tensor) -> bool:
    """Tells whether states are equal up to rounding, as a share of the largest."""
    tolerance = 1e-3 if lm.dtype in (torch.float32, torch.float64) else 0.1
    return bool((a - b).abs().max() <= tolerance * b.abs().max())

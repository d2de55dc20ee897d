"""Rows of different lengths one behind the other in a single pass, without padding.

All layers but attention work token by token, so attention alone has to know where a row begins. It is told by the
rows' lengths: on a GPU in half precision a kernel of torch reads them all at once, on a CPU compiled code (kernels.py),
elsewhere they are read one by one. On a CPU the same code reads padded rows, too, faster than torch's (`compiled`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from marl.common.errors import UserError
from marl.kernels.cpu import attend_rows, learns, takes

VARLEN = "rows_of_their_own_lengths"
UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias")  # what some models ask of attention beside causality


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    row_lengths: Sequence[int] | None = None,
    row_ends: Tensor | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each token to its own row, as `transformers` calls it.

    query: (1, H, N, D), key and value: (1, G, N, D), G heads shared by H. `row_lengths` sum to N; `row_ends`
    (rows + 1,) int32 are their cumulative sums from 0 on. Without them B rows of T tokens: (B, H, T, D), (B, G, T, D).
    Returns (1, N, H, D) or (B, T, H, D). Raises UserError where a layer asks for attention of another kind.
    """
    check_plain(attention_mask, dropout, asked)
    device = query.device.type
    # as scaled_dot_product_attention is: autocast does not know of the kernels
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    query, key, value = (each.to(dtype) for each in (query, key, value))
    if learns(query, value):
        return _compiled(query, key, value, scaling, row_ends), None
    if row_lengths is None or row_ends is None:
        gqa = key.shape[1] < query.shape[1]
        states = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
        return states.transpose(1, 2).contiguous(), None
    shared = query.shape[1] // key.shape[1]
    if has_kernel(query, dtype):
        key, value = (each.repeat_interleave(shared, 1) for each in (key, value))
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        longest = max(row_lengths)
        found = varlen_attn(q, k, v, row_ends, row_ends, longest, longest, scale=scaling, window_size=(-1, 0))
        assert isinstance(found, Tensor), "asked for nothing beside it"
        return found[None], None
    rows = zip(*(each.split(list(row_lengths), 2) for each in (query, key, value)), strict=True)
    results = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=shared > 1) for q, k, v in rows
    ]
    return torch.cat(results, 2).transpose(1, 2).contiguous(), None


def _compiled(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, ends: Tensor | None) -> Tensor:
    """`attention` by kernels.py."""
    size, heads, length, width = query.shape
    begins = torch.arange(size + 1) * length if ends is None else ends.long()
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))  # (N, heads, D)
    scale = width**-0.5 if scaling is None else scaling
    found, _ = attend_rows(q, k, v, begins, scale)
    return found.view(size, length, heads, width)


def check_plain(attention_mask: Tensor | None, dropout: float, asked: Mapping[str, Any]) -> None:
    """Raises UserError where a layer asks for more of attention than causality: `asked` is what else it hands over."""
    other = [name for name in UNKNOWN if asked.get(name) is not None]
    if other or attention_mask is not None or dropout:
        raise UserError(f"its attention has a {other[0] if other else 'mask' if dropout == 0 else 'dropout'}")


def has_kernel(query: Tensor, dtype: torch.dtype) -> bool:
    return query.is_cuda and dtype in (torch.bfloat16, torch.float16)


AttentionInterface.register(VARLEN, attention)


@contextmanager
def varlen(lm: PreTrainedModel) -> Iterator[None]:
    """Within, the model's attention is that of `read_rows`, also where a backward pass computes a layer again. Raises
    UserError for a model whose attention is its own."""
    before = lm.config._attn_implementation
    lm.set_attn_implementation(VARLEN)
    if lm.config._attn_implementation != VARLEN:  # it has only warned
        raise UserError("it attends in code of its own")
    try:
        yield
    finally:
        lm.set_attn_implementation(before)


def plain(config: PreTrainedConfig) -> bool:
    """Whether every layer is attention to all that came before, by what the configuration says."""
    text = config.get_text_config()
    return set(getattr(text, "layer_types", None) or ("full_attention",)) == {"full_attention"} and not windows(text)


def compiled(lm: PreTrainedModel) -> bool:
    """Whether padded rows are read within `varlen(lm)`, too: where compiled code is at hand, and what is read within is
    what the model reads by itself. This is tried out once in a process for each configuration."""
    if not (takes(lm.device, lm.dtype) and lm.dtype == torch.float32 and plain(lm.config)):
        return False
    key = (type(lm), lm.config.to_json_string(use_diff=False))
    if key not in _COMPILED:
        try:
            # whoever asks first, a frozen reference or a learner, within autocast or not
            with torch.enable_grad(), torch.autocast(lm.device.type, enabled=False):
                _COMPILED[key] = not _misread(lm, bf16=True, padded=True)
        except (UserError, KeyError, TypeError, ValueError, RuntimeError, AttributeError):
            _COMPILED[key] = False
    return _COMPILED[key]


_COMPILED: dict[tuple[type, str], bool] = {}


def read_rows(lm: PreTrainedModel, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Last hidden states (B, T, D) of tokens (B, T), of which each row's first `lengths` (B,) are read; 0 behind them.
    To be called within `varlen(lm)`."""
    inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    inside[0, 0] = True  # a batch of padding has a token too
    places = inside.nonzero()
    rows = inside.sum(1)
    read = lm.base_model(
        input_ids=tokens[inside][None],
        position_ids=places[None, :, 1],
        use_cache=False,
        row_lengths=[length for length in rows.tolist() if length],
        row_ends=nn.functional.pad(rows[rows > 0].cumsum(0), (1, 0)).to(torch.int32),
    ).last_hidden_state
    hidden = read.new_zeros(*tokens.shape, read.shape[-1])
    hidden[inside] = read[0]
    return hidden


def check_varlen(lm: PreTrainedModel, bf16: bool = False) -> None:
    """Raises UserError for a model that does not read a row behind another as it reads it alone: one with recurrent
    layers, with windows, or with attention in code of its own. `bf16`: it is read under autocast too, and back."""
    text = lm.config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ())} - {"full_attention"}
    # Some models have these in a mask alone, which is not made here, and rows as short as those below would not show.
    why = ", ".join([*sorted(kinds), *(f"{name}={getattr(text, name)}" for name in windows(text))])
    try:
        why = why or _misread(lm, bf16)
    except torch.OutOfMemoryError:
        raise
    except UserError as error:
        why = str(error)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    if why:
        raise UserError(f"algo.update.padding_free=true: not with {type(lm).__name__} ({why}); leave it out")


def windows(config: PreTrainedConfig) -> list[str]:
    """The settings of a configuration by which a token sees no more than some before it."""
    return [name for name in ("sliding_window", "attention_chunk_size") if getattr(config, name, None)]


def _misread(lm: PreTrainedModel, bf16: bool, padded: bool = False) -> str:
    """Tries it; what is wrong, or nothing. `padded`: rows are side by side, and end together."""
    size = min(16, lm.config.get_text_config().vocab_size)
    tokens = torch.stack([torch.arange(size), torch.arange(size).flip(0)]).to(lm.device)
    lengths = torch.tensor([size, size], device=lm.device)

    def whole() -> Tensor:
        return lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state

    def read() -> Tensor:
        return whole() if padded else read_rows(lm, tokens, lengths)

    with torch.no_grad():
        alone = whole()
        with varlen(lm):
            together = read()
    if bf16:
        embedded: list[Tensor] = []  # which have gradients, though all weights were frozen
        hook = lm.get_input_embeddings().register_forward_hook(
            lambda _, given, made: embedded.append(made.requires_grad_())
        )
        try:
            with varlen(lm), torch.autocast(lm.device.type, torch.bfloat16):
                total = read().float().sum()
            torch.autograd.grad(total, embedded)
        finally:
            hook.remove()
    same = torch.allclose(together, alone, atol=1e-4, rtol=1e-3)
    return "" if same else "it reads a row behind another otherwise than alone"

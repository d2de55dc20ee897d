"""What a CPU computes in other ways than torch by itself does, because it is faster.

- Causal attention as compiled C: over the slots of a cache, and over whole rows with gradients. torch's own wants rows
  side by side, padded to one length and beside a mask, decodes at a third of the speed of memory, and learns at a
  fraction of that of products.
- The norms of a Llama and its kin, also in C, for which torch goes over memory a dozen times, back and forth.
- Large matrix products by oneDNN on processors of AMD, where it is twice as fast as torch's MKL.

kernels.c is built when the project is installed, for processors with AVX512, with its products of bfloat16 or without,
and for those with AVX2. Where there is none of it (no compiler, another processor), attention and norms are torch's:
slower, and up to rounding the same. `quicken` gives a model norms and products; attention is asked for by those who
compute it (ragged.py, varlen.py).
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# --- Attention ---

# By pyproject.toml, the better first: AVX512 with products of bfloat16, AVX512, AVX2.
BUILDS = ("marl.kernels._cpu_v4_bf16", "marl.kernels._cpu_v4", "marl.kernels._cpu_v3")
TILE, LANES, PAIRED = 4, 16, 32  # queries at once, numbers of the widest vector, widths with pairs, as in kernels.c
PARTS = 8  # pieces of work of a row at most: each has gradients of its keys and values of its own


SOURCE = Path(__file__).with_suffix(".c")


@functools.cache
def load(name: str) -> ctypes.CDLL | None:
    """This build, where there is one that this processor runs, unless its source has been edited since."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return None
    # Only in a checkout do times tell of edits: an installed package's are its installer's.
    checkout = SOURCE.exists() and (SOURCE.parents[2] / "pyproject.toml").exists()
    if checkout and SOURCE.stat().st_mtime > Path(spec.origin).stat().st_mtime:
        warnings.warn(
            f"{SOURCE.name} has changed since it was built: attention and norms are torch's, which is slower, until "
            "the project is installed again (pip install -e . or make)",
            stacklevel=2,
        )
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:  # as where torch brings no OpenMP that it could use
        return None
    return library if library.runs() else None


@functools.cache
def best() -> str:
    """The name of the best build that this processor runs; empty where there is none."""
    return next((name for name in BUILDS if load(name) is not None), "")


def in_use() -> str:
    """What of this is used on this machine's CPU, in words."""
    compiled = f"attention and norms {best().partition('_cpu_')[2]}" if best() else ""
    return ", ".join(filter(None, (compiled, "oneDNN" if has_faster_products() else ""))) or "torch"


def takes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `attend` is for slots of these numbers on this device, and `norm` for such numbers."""
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and bool(best())


def learns(query: Tensor, value: Tensor) -> bool:
    """Whether `attend_rows` is for heads of these widths, on their device; numbers of any kind."""
    width = query.shape[-1]
    return takes(query.device, torch.float32) and width == value.shape[-1] and width % LANES == 0


def _call(function: str, *arguments: Any) -> None:
    library = load(best())
    assert library is not None, "asked for without `takes`"
    given: list[Any] = []
    for each in arguments:
        if isinstance(each, Tensor):
            assert each.is_contiguous(), (each.shape, each.stride())
            given.append(ctypes.c_void_p(each.data_ptr()))
        else:
            given.append(ctypes.c_float(each) if isinstance(each, float) else ctypes.c_long(each))
    getattr(library, function)(*given)


@torch.library.custom_op("marl::attend", mutates_args=())
def attend(queries: Tensor, keys: Tensor, values: Tensor, rows: Tensor, places: Tensor, scale: float) -> Tensor:
    """Causal attention of N tokens, each to its own slot up to itself: softmax(scale q k) v.

    queries (N, H, D), keys (S, L, G, D), values (S, L, G, E), G heads shared by H, float32 or bfloat16; `rows` and
    `places` (N,) int64: each token's slot, and where it stands there. Returns (N, H, E), added up in float32; of
    bfloat16 whose D and E are multiples of 32 the weights are rounded to it. A token's result is the same to the last
    bit whatever is read beside it, while all that is read are numbers.
    """
    (count, heads, inside), (_, length, shared, outside) = queries.shape, values.shape
    assert keys.shape == (*values.shape[:3], inside) and heads % shared == 0, (queries.shape, keys.shape, values.shape)
    assert rows.shape == places.shape == (count,), (rows.shape, places.shape, count)
    assert rows.dtype == places.dtype == torch.int64
    assert queries.dtype == keys.dtype == values.dtype, (queries.dtype, keys.dtype, values.dtype)
    assert queries.dtype in (torch.float32, torch.bfloat16), queries.dtype
    threads, room = torch.get_num_threads(), -(-length // LANES) * LANES
    whole: dict[str, Any] = {"dtype": torch.float32}
    found, scores = queries.new_empty(count, heads, outside, **whole), queries.new_empty(threads, TILE, room, **whole)
    tiles = rows.new_empty(count + 1)
    _call(
        "attend", queries.contiguous(), keys, values, rows, places, found, scores, tiles, scale,
        count, heads, shared, inside, outside, length, room, int(keys.dtype == torch.bfloat16), threads,
    )  # fmt: skip
    return found.to(queries.dtype)


@attend.register_fake
def _(queries: Tensor, keys: Tensor, values: Tensor, rows: Tensor, places: Tensor, scale: float) -> Tensor:
    return queries.new_empty(*queries.shape[:2], values.shape[3])


@torch.library.custom_op("marl::attend_rows", mutates_args=())
def attend_rows(queries: Tensor, keys: Tensor, values: Tensor, begins: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of rows that stand one behind the other: softmax(scale q k) v, with gradients.

    queries (N, H, D), keys and values (N, G, D), G heads shared by H, D a multiple of 16; `begins` (R + 1,) int64:
    where each row begins, and N. Returns (N, H, D), as precise as the queries, and (N, H), which has no gradient: the
    logarithms of the sums of e^score. Computed by blocks of keys (Dao 2023, FlashAttention-2), added up in float32; of
    bfloat16 whose D is a multiple of 32 the weights, and their gradients, are rounded to it. The gradient's last digits
    depend on the number of threads.
    """
    assert keys.shape == values.shape and len(keys) == len(queries) == int(begins[-1]), (queries.shape, keys.shape)
    assert queries.shape[1] % keys.shape[1] == 0 == queries.shape[2] % LANES, (queries.shape, keys.shape)
    assert begins.dtype == torch.int64, begins.dtype
    q, k, v = _alike(queries, keys, values)
    (count, heads, width), shared, rows, parts = queries.shape, keys.shape[1], len(begins) - 1, _parts(begins, keys)
    found, totals = q.new_zeros(q.shape, dtype=torch.float32), q.new_zeros(count, heads, dtype=torch.float32)
    logarithms = torch.full_like(totals, -torch.inf)
    _call(
        "attend_rows", q, k, v, begins, found, logarithms, totals, scale,
        rows, parts, heads, shared, width, int(q.dtype == torch.bfloat16), torch.get_num_threads(),
    )  # fmt: skip
    return found.to(queries.dtype), logarithms


def _alike(*tensors: Tensor) -> list[Tensor]:
    """Each (N, heads, D) as it is read: in bfloat16 where all are, and D allows pairs."""
    half = all(each.dtype == torch.bfloat16 and each.shape[2] % PAIRED == 0 for each in tensors)
    return [each.to(torch.bfloat16 if half else torch.float32).contiguous() for each in tensors]


def _parts(begins: Tensor, keys: Tensor) -> int:
    """Pieces of work of a row, so that every thread has some."""
    return min(-(-torch.get_num_threads() // max((len(begins) - 1) * keys.shape[1], 1)), PARTS)


@attend_rows.register_fake
def _(queries: Tensor, keys: Tensor, values: Tensor, begins: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return queries.new_empty(queries.shape), queries.new_empty(queries.shape[:2], dtype=torch.float32)


@torch.library.custom_op("marl::attend_rows_back", mutates_args=())
def attend_rows_back(
    slopes: Tensor, queries: Tensor, keys: Tensor, values: Tensor, begins: Tensor, found: Tensor, logarithms: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values, from those of `attend_rows`'s result, (N, H, D)."""
    q, k, v, o, s = _alike(queries, keys, values, found, slopes)
    (_, heads, width), shared, rows, parts = queries.shape, keys.shape[1], len(begins) - 1, _parts(begins, keys)
    to_queries = q.new_zeros(q.shape, dtype=torch.float32)
    to_keys, to_values = q.new_zeros(2, parts, *keys.shape, dtype=torch.float32)
    _call(
        "attend_back", q, k, v, begins, o, logarithms, s, to_queries, to_keys, to_values, scale,
        rows, parts, heads, shared, width, int(q.dtype == torch.bfloat16), torch.get_num_threads(),
    )  # fmt: skip
    return to_queries.to(queries.dtype), to_keys.sum(0).to(keys.dtype), to_values.sum(0).to(values.dtype)


@attend_rows_back.register_fake
def _(
    slopes: Tensor, queries: Tensor, keys: Tensor, values: Tensor, begins: Tensor, found: Tensor, logarithms: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return queries.new_empty(queries.shape), keys.new_empty(keys.shape), values.new_empty(values.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _back(ctx: Any, slopes: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *attend_rows_back(slopes, *ctx.saved_tensors, ctx.scale), None, None


attend_rows.register_autograd(_back, setup_context=_keep)


# --- Norms ---

FEW = 1 << 14  # numbers that one thread is done with before another has begun


def _norm(x: Tensor, weight: Tensor, eps: float, half: bool) -> tuple[Tensor, Tensor]:
    """`norm`, but without gradients and unknown to torch, which spares a fifth of a millisecond a pass."""
    x, weight, (*rows, width) = x.contiguous(), weight.contiguous(), x.shape
    assert weight.shape == (width,) and width % LANES == 0, (x.shape, weight.shape)
    found = x.new_empty(x.shape, dtype=torch.bfloat16 if half else torch.promote_types(x.dtype, weight.dtype))
    inverse = x.new_empty(rows, dtype=torch.float32)
    parts = torch.get_num_threads() if x.numel() > FEW else 1
    _call("norm", x, weight, found, inverse, float(eps), inverse.numel(), width, parts, *_halves(x, weight, found))
    return found, inverse


@torch.library.custom_op("marl::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, eps: float, half: bool) -> tuple[Tensor, Tensor]:
    """w x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich 2019), with gradients.

    x (..., D), weight (D,), float32 or bfloat16, D a multiple of 16. Returns (..., D), in bfloat16 if `half`, else as
    precise as the more precise of the two, and (...), which has no gradient: by what x was multiplied. Computed in
    float32; a row's result is the same to the last bit whatever stands beside it. The last digits of the weight's
    gradient depend on the number of threads.
    """
    return _norm(x, weight, eps, half)


@norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, half: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.bfloat16 if half else torch.promote_types(x.dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("marl::norm_back", mutates_args=())
def norm_back(slopes: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight, from that of `norm`'s result."""
    slopes, x, weight = slopes.contiguous(), x.contiguous(), weight.contiguous()
    parts = min(torch.get_num_threads(), max(inverse.numel(), 1))
    to_x, to_weight = torch.empty_like(x), inverse.new_zeros(parts, len(weight))
    kinds = _halves(slopes, x, weight)
    _call("norm_back", slopes, x, weight, inverse, to_x, to_weight, inverse.numel(), len(weight), parts, *kinds,
          torch.get_num_threads())  # fmt: skip
    return to_x, to_weight.sum(0).to(weight.dtype)


@norm_back.register_fake
def _(slopes: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:2], output[1])


def _norm_back(ctx: Any, slopes: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *norm_back(slopes, *ctx.saved_tensors), None, None


norm.register_autograd(_norm_back, setup_context=_keep_norm)


def _halves(*tensors: Tensor) -> list[int]:
    return [int(each.dtype == torch.bfloat16) for each in tensors]


class Norm(nn.Module):
    """`LlamaRMSNorm`, by `norm`. In a layer its result is in bfloat16 within autocast, as the products behind it would
    have it; the last one's stays as it is, since values are made of it in float32."""

    weight: Tensor
    variance_epsilon: float
    of_a_layer = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        cast = torch.is_autocast_enabled("cpu")
        known = all(takes(each.device, each.dtype) for each in (hidden_states, self.weight))
        if not known or len(self.weight) % LANES or (cast and torch.get_autocast_dtype("cpu") != torch.bfloat16):
            return super().forward(hidden_states)
        seen = torch.is_grad_enabled() or torch.compiler.is_compiling() or type(hidden_states) is not Tensor
        half = cast and self.of_a_layer
        return (norm if seen else _norm)(hidden_states, self.weight, self.variance_epsilon, half)[0]


def _computes_as(kind: type[nn.Module], other: type[nn.Module]) -> bool:
    """Whether the two have the same `forward`, instruction by instruction: many models copy Llama's layers."""
    own, its = (getattr(each.forward, "__code__", None) for each in (kind, other))
    parts = "co_code", "co_consts", "co_names", "co_varnames"
    if None in (own, its) or kind.forward.__closure__ is not None:  # within a decorator, which all have in common
        return False
    return all(getattr(own, part) == getattr(its, part) for part in parts)


@functools.cache
def _compiled(kind: type[nn.Module]) -> type[nn.Module]:
    """`Norm` for layers of this kind, under their name, so that a model may be copied, but not pickled."""
    return type(kind.__name__, (Norm, kind), {"__module__": kind.__module__})


# --- Products ---

# Multiply-adds from which on they are oneDNN's: it makes a kernel for each shape, in a third of a millisecond, which is
# what it saves here (54 and 120 billion a second on a core of Zen 5).
LARGE = 1 << 25


def round_up(count: int) -> int:
    """The next of eight numbers from one power of two to the next: so many rows of bfloat16 are multiplied on a CPU,
    since oneDNN makes a kernel for every other number of them."""
    unit = max((1 << (count - 1).bit_length()) // 16, 1) if count else 1
    return -(-count // unit) * unit


@functools.cache
def has_faster_products() -> bool:
    """Whether this processor is one on which oneDNN's products in float32 are faster than those of torch's MKL."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    with suppress(OSError):  # another system
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    return False


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., D) times weight (V, D) transposed, and bias: (..., V). Without gradients where it is oneDNN's."""
    if has_faster_products() and _may(x, weight):
        if not (weight.is_contiguous() or weight.t().is_contiguous()):
            weight = weight.contiguous()  # for gaps oneDNN has nothing but its reference, a thousandth as fast
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return nn.functional.linear(x, weight, bias)


def _may(x: Tensor, weight: Tensor) -> bool:
    large = x.dim() > 1 and x.numel() * len(weight) >= LARGE
    return large and x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32


class _Product(torch.autograd.Function):
    """`product`, with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows, given = slopes.reshape(-1, slopes.shape[-1]), x.reshape(-1, x.shape[-1])  # (N, V), (N, D)
        to_weight = None
        if ctx.needs_input_grad[1]:  # what stands first is copied across: the narrower one
            wide = rows.shape[1] > given.shape[1]
            to_weight = product(given.t(), rows.t()).t() if wide else product(rows.t(), given.t())
        to_x = product(slopes, weight.t()) if ctx.needs_input_grad[0] else None
        return to_x, to_weight, rows.sum(0) if ctx.biased else None


class Linear(nn.Linear):
    """torch's, with `product`."""

    def forward(self, x: Tensor) -> Tensor:
        if not _may(x, self.weight) or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters())):
            return _Product.apply(x, self.weight, self.bias)
        return product(x, self.weight, self.bias)


def quicken(model: nn.Module) -> None:
    """Gives the model's layers what is faster on this processor; weights, names and what is saved stay as they are."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm  # whoever has no model need not wait for it

    for name, module in model.named_modules():
        kind: Any = type(module)
        if kind is nn.Linear and has_faster_products():
            module.__class__ = Linear
        elif best() and _computes_as(kind, LlamaRMSNorm):
            module.__class__ = _compiled(kind)
            module.of_a_layer = any(part.isdigit() for part in name.split("."))

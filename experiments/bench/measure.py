"""Instruments of the benchmark: a stopwatch of phases, peak memory, counted work, and the rates of this machine.

The limit of a phase is the larger of two times: its multiply-adds at the rate of matrix products of the model's own
shapes, and the bytes that it must touch at the rate of copying, both measured here and now. What is counted is named in
`limits`.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from marl.decoding.cache import READ_BUDGET
from marl.decoding.engine import Engine
from marl.model.policy import Policy
from marl.model.tokens import Tokens

# In the order in which tables list them. `mixed` are passes in which some seats read and others write; `capture` is the
# making of captured steps, once for each shape (GPUs only); `cache` the copying of caches between turns (baselines
# only); `bookkeeping` the rest of a rollout: who is asked what, groups of seats, streams, turns.
PHASES = (
    "game", "text", "tokenising", "prefill", "questions", "decode", "mixed", "sampling", "beliefs", "capture", "cache",
    "bookkeeping", "collation", "update",
)  # fmt: skip
STEPS = 9  # of decoding, alone
TIMINGS, MOMENT = 5, 0.005  # of a product or a copy, and the seconds that each lasts at least
ON_DEVICE = {"prefill", "questions", "decode", "mixed", "sampling", "beliefs", "capture", "cache", "update"}


class Stopwatch:
    """Seconds by phase. Phases nest, and each counts only what no inner one does, so that they add up to the whole."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the block's time as this phase's. On a GPU it waits for the phase's work, so that no other phase pays
        for it."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            if name in ON_DEVICE:
                self._synchronize()
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, clocked as this phase."""

        @functools.wraps(function)
        def clocked(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return clocked

    @contextmanager
    def on(self, owner: object, name: str, *methods: str) -> Iterator[None]:
        """Clocks these methods of this one object inside the block."""
        with replaced(owner, {method: self.wrap(name, getattr(owner, method)) for method in methods}):
            yield

    @contextmanager
    def on_tokens(self, tokens: Tokens) -> Iterator[None]:
        """Counts encoding as tokenising and decoding as text inside the block."""
        with ExitStack() as stack:
            stack.enter_context(self.on(tokens, "tokenising", "encode", "label"))
            stack.enter_context(self.on(tokens, "text", "reply_text", "ends", "within"))
            yield

    def env(self, make_env: Callable[[], Any]) -> Callable[[], Any]:
        """The same environments, clocked: the rules and the writing of what players read cannot be told apart."""

        def make() -> Any:
            env = make_env()
            env.reset, env.step = self.wrap("game", env.reset), self.wrap("game", env.step)
            return env

        return make


@contextmanager
def replaced(owner: object, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Gives this one object these methods in place of its own, inside the block."""
    before = {name: vars(owner)[name] for name in methods if name in vars(owner)}
    for name, method in methods.items():
        setattr(owner, name, method)
    try:
        yield
    finally:
        for name in methods:
            delattr(owner, name)  # the class's own shows again
        for name, method in before.items():
            setattr(owner, name, method)


class PeakMemory:
    """The rise of memory above where it stood at the start, in bytes.

    Of the process (resident set; Linux only) or, on a GPU, of what torch allocated. Memory that was freed before is
    handed back to the system first, or taking it again would be no rise. None where the system cannot tell.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()  # caches and their layers know each other
        with suppress(OSError, AttributeError):  # another C library keeps what was freed
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.before = self._start()

    def _start(self) -> int | None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # forgets the old peak
        except OSError:
            return None
        return _status("VmRSS")

    def rise(self) -> int | None:
        if self.before is None:
            return None
        now = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else _status("VmHWM")
        return None if now is None else max(now - self.before, 0)


def _status(field: str) -> int | None:
    """A figure that Linux keeps of this process in kB, in bytes; None on other systems."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


@contextmanager
def on_processor() -> Iterator[list[float]]:
    """Yields a list that holds the processor seconds that this process got in a second, once the block ends."""
    share: list[float] = []
    wall, own = time.perf_counter(), time.process_time()
    yield share
    share.append((time.process_time() - own) / (time.perf_counter() - wall))


@dataclass
class Counts:
    """Work of forward passes over cached rows."""

    passes: int = 0
    tokens: int = 0  # read
    attended: int = 0  # pairs of a token and one that it sees
    cached: int = 0  # tokens of rows' caches, once a pass: what attention must load
    outputs: int = 0  # tokens that went through the output layer within these passes: captured steps sample there, too

    def add(self, start: np.ndarray, sizes: np.ndarray) -> None:
        """One pass over rows (R,) that hold `start` tokens and read `sizes` more."""
        self.passes += 1
        self.tokens += int(sizes.sum())
        self.attended += int((sizes * start + sizes * (sizes + 1) // 2).sum())
        self.cached += int((start + sizes).sum())

    @property
    def rows(self) -> int:
        """Tokens of a pass, on average: one for each row where each reads one."""
        return max(round(self.tokens / max(self.passes, 1)), 1)


@dataclass(frozen=True)
class Shape:
    """A model's size: weights of its layers, of its output layer, and what one token costs beside them."""

    body: int  # weights of the matrices between embedding and output
    head: int
    parameters: int
    attention: int  # multiply-adds of one attended pair, all layers
    cache: int  # numbers that one token keeps, all layers
    matrices: tuple[tuple[int, int], ...]  # (in, out) of each matrix between embedding and output
    output: tuple[int, int]  # that of the output layer

    @classmethod
    def of(cls, policy: Policy) -> Shape:
        config = policy.lm.config.get_text_config()
        matrices = [m for m in policy.lm.base_model.modules() if isinstance(m, torch.nn.Linear)]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            body=sum(m.weight.numel() for m in matrices),
            head=policy.lm.get_output_embeddings().weight.numel(),
            parameters=sum(p.numel() for p in policy.lm.parameters()),
            attention=2 * config.num_attention_heads * head_dim * config.num_hidden_layers,
            cache=2 * config.num_key_value_heads * head_dim * config.num_hidden_layers,
            matrices=tuple((m.in_features, m.out_features) for m in matrices),
            output=(config.hidden_size, policy.lm.get_output_embeddings().weight.shape[0]),
        )


@dataclass(frozen=True)
class Rates:
    """Rates of this machine at this moment: multiply-adds a second, and bytes a second of copying (read + written)."""

    read: float  # through all of the model's matrices, each by itself, as many rows as a pass that reads may have
    decode: float  # the same with as many rows as passes that decode had
    mixed: float  # with as many as those in which some read and some write
    output: float  # through the output layer, one row for each slot
    update: float  # forward and backward, as many rows as a pass of the update has; in float32 or under autocast
    weights: float  # copying as much as the model's weights, which a processor's own cache may hold
    cache: float  # copying as much as all slots


def measure_rates(
    shape: Shape,
    rows: int,
    mixed: int,
    slots: int,
    budget: int,
    cache_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Rates:
    """Matrix products at the model's own shapes, and copies of buffers of its sizes (256 MB at most).

    `rows`: of passes that decoded, `mixed`: of those that read as well; `budget`: those of an update's pass.
    """
    return Rates(
        read=_product_rate(shape.matrices, READ_BUDGET, dtype, device),
        decode=_product_rate(shape.matrices, rows, dtype, device),
        mixed=_product_rate(shape.matrices, mixed, dtype, device),
        output=_product_rate((shape.output,), slots, dtype, device),
        update=_product_rate((*shape.matrices, shape.output), budget, dtype, device, backward=True),
        weights=_copy_rate(shape.parameters * dtype.itemsize, device),
        cache=_copy_rate(min(cache_bytes, 1 << 28), device),
    )


def _product_rate(
    matrices: Sequence[tuple[int, int]], rows: int, dtype: torch.dtype, device: torch.device, backward: bool = False
) -> float:
    """Multiply-adds a second of rows through these matrices, (in, out) each, as the model multiplies; backward: of both
    gradients as well."""
    macs = seconds = 0.0
    for (inside, outside), count in Counter(matrices).items():
        x = torch.randn(rows, inside, device=device).to(dtype)
        weight = torch.randn(outside, inside, device=device).to(dtype)
        y = torch.randn(rows, outside, device=device).to(dtype)
        products = [functools.partial(torch.nn.functional.linear, x, weight)]
        if backward:
            products += [functools.partial(torch.nn.functional.linear, *both) for both in ((y, weight.T), (y.T, x.T))]
        macs += count * len(products) * rows * inside * outside
        seconds += count * sum(_seconds(product, device) for product in products)
    return macs / seconds


def _copy_rate(size: int, device: torch.device) -> float:
    source = torch.ones(max(size // 4, 1), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(functools.partial(target.copy_, source), device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The shortest of some timings of a call, each over as many calls as take a moment."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    call()
    repeats, best = 1, float("inf")
    for _ in range(TIMINGS):
        wait()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        wait()
        one = max((time.perf_counter() - began) / repeats, 1e-9)
        best = min(best, one)
        repeats = max(1, min(1000, int(MOMENT / one)))
    return best


@dataclass(frozen=True)
class UpdateCounts:
    """Work of an update: tokens and attended pairs of its rows, positions whose logits are needed, passes, steps."""

    tokens: int
    attended: int
    outputs: int
    passes: int
    steps: int


def limits(
    shape: Shape,
    rates: Rates,
    size: int,
    counts: dict[str, Counts],
    sampled: int,
    answers: int,
    update: UpdateCounts,
) -> dict[str, dict[str, float]]:
    """Returns, by phase, its multiply-adds (`macs`), seconds of `arithmetic`, of `memory`, and the larger as `limit`.
    `size`: bytes of one number.

    Prefill, decode and mixed passes: every token goes once through the layers, each pair of attention counts once; a
    pass reads the weights once and each row's keys and values once, and writes new ones. The passes are those that this
    engine made. Sampling and belief answers: one output row each, counted as decode where sampling is part of it.
    The update, in float32: three times the products of a forward pass (one forward, two backward); weights and
    gradients once forward and once backward a pass, and AdamW's 7 numbers a weight a step. Activations, and all that is
    no product, are not counted.
    """
    prefill, decode, mixed = counts["prefill"], counts["decode"], counts["mixed"]
    found = {
        "prefill": _of_passes(shape, rates, size, prefill, rates.read, prefill.passes),
        "decode": _of_passes(shape, rates, size, decode, rates.decode, decode.passes),
        "mixed": _of_passes(shape, rates, size, mixed, rates.mixed, mixed.passes),
    }
    for phase, outputs in (("sampling", sampled - decode.outputs), ("beliefs", answers)):
        found[phase] = _larger(outputs * shape.head, outputs * shape.head / rates.output, 0.0)
    macs = 3 * (update.tokens * shape.body + update.attended * shape.attention + update.outputs * shape.head)
    numbers = (4 * update.passes + 7 * update.steps) * shape.parameters
    found["update"] = _larger(macs, macs / rates.update, 4 * numbers / rates.weights)
    return found


def _of_passes(shape: Shape, rates: Rates, size: int, c: Counts, rate: float, passes: float) -> dict[str, float]:
    """Limit of so many passes, whose products run at this rate."""
    body, head = c.tokens * shape.body + c.attended * shape.attention, c.outputs * shape.head
    memory = passes * shape.body * size / rates.weights + (c.cached + c.tokens) * shape.cache * size / rates.cache
    return _larger(body + head, body / rate + head / rates.output, memory)


def _larger(macs: float, arithmetic: float, memory: float) -> dict[str, float]:
    return {"macs": macs, "arithmetic": arithmetic, "memory": memory, "limit": max(arithmetic, memory)}


def step_alone(policy: Policy, rows: int, context: int, decode_steps: int, device: torch.device) -> dict[str, Any]:
    """A decode step with every row at work: seconds, multiply-adds and limit of one token in each of so many slots that
    the context is full of. `decode_steps`: so many at a time, with their sampling, where that is more than one.

    In games passes have as many rows as players happen to speak, and fewer where contexts are short: that their tokens
    cost less in longer contexts says nothing of attention. The median of STEPS, after one that is not counted.

    Beside it what two parts take alone, for one token in each slot: torch's own `attention` over keys and values of
    this size, and the `products` with the layers' matrices.
    """
    engine, shape = Engine(policy, rows + 1, context), Shape.of(policy)
    slots = [slot for slot in range(rows + 1) if slot != 1]  # not neighbours, as in games
    several = decode_steps if engine.can_write else 1
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    spent: list[float] = []

    def step() -> None:
        engine.lengths[:] = start
        if several > 1:
            engine.write(slots, [0] * rows, [several] * rows, np.full((rows, several), 0.5), 1.0)
        else:
            engine.read(slots, [[0]] * rows)

    start = max(context - several, 0)
    for _ in range(STEPS + 1):
        wait()
        began = time.perf_counter()
        step()
        wait()
        spent.append(time.perf_counter() - began)
    counts = Counts()
    for place in range(several):
        counts.add(np.full(rows, start + place), np.ones(rows, dtype=np.int64))
    counts.outputs = counts.tokens * (several > 1)
    size = next(policy.lm.parameters()).dtype
    rates = measure_rates(shape, rows, rows, rows, rows, engine.cache.nbytes, size, device)
    limit = _of_passes(shape, rates, size.itemsize, counts, rates.decode, counts.passes)
    return {
        "rows": rows, "context": context, "seconds": median(spent[1:]) / several, "macs": limit["macs"] / several,
        "limit": limit["limit"] / several, "attention": _attention_alone(policy, rows, context, device),
        "products": rows * shape.body / rates.decode,
    }  # fmt: skip


def _attention_alone(policy: Policy, rows: int, context: int, device: torch.device) -> float:
    """Seconds of attention of one token in each of so many rows to a whole context, in all layers."""
    config = policy.lm.config.get_text_config()
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    dtype = next(policy.lm.parameters()).dtype
    query = torch.randn(rows, shared, heads // shared, width, device=device).to(dtype)  # heads that share are queries
    key, value = (torch.randn(rows, context, shared, width, device=device).to(dtype).transpose(1, 2) for _ in "kv")
    mask = torch.zeros(rows, 1, 1, context, dtype=dtype, device=device)
    call = functools.partial(torch.nn.functional.scaled_dot_product_attention, query, key, value, attn_mask=mask)
    return config.num_hidden_layers * _seconds(call, device)

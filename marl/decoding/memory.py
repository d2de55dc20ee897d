"""Whether models, their caches and what a pass computes fit into memory: asked before anything expensive.

Passes are not computed for it, but gone through with tensors that have shapes and no numbers (torch's fake tensors),
counting what is alive at a time. What it leaves out: games, episodes, and the batch, about 100 bytes a token.
"""

from __future__ import annotations

import copy
import ctypes
import os
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from marl.common.errors import UserError
from marl.decoding.cache import ATTENTION, SlotLayer, Unheld, layer_kinds, places_for, slot_cache
from marl.decoding.passes import one_pass
from marl.decoding.probes import asks_attention, has_desk, read_budget, size_of
from marl.kernels.cpu import has_faster_products, quicken, takes
from marl.kernels.varlen import plain, varlen
from marl.model.policy import recomputing

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LARGE = 100 * MIB  # weights, or a cache, whose passes are worth a second of asking
# By torch on a CPU, of kernels for bfloat16, where the commands set FEW_KERNELS: measured, also with AMX; and of those
# for float32, where oneDNN makes them, too.
KEPT, KEPT_AMX, KEPT_FLOAT = 64 * MIB, 128 * MIB, 32 * MIB
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
# What a process takes for what an update has alive, on a CPU, in float32 and in bfloat16: measured, see
# tests/experiments/test_benchmark.py. With norms compiled, less goes back and forth between the two.
WASTE, WASTE_HALF = 1.33, 1.22


@dataclass(frozen=True)
class Slots:
    """One player's cache slots: `seats` for each game that is played at a time, and `more`; a slot's size in bytes, 0
    for a model that has none (engine.py). `config`: of a model whose passes count, too, where its `weights` (in bytes)
    or its slots are large; `copy`: bytes of a model that plays in another's place, in `dtype`; `decode_steps`: of
    whoever speaks; `states`: of a slot's bytes those of recurrent layers; `games`: how many are played in all, where
    that is known: never more of them at a time."""

    seats: int
    size: int
    more: int = 0
    config: PreTrainedConfig | None = None
    weights: int = 0
    copy: int = 0
    dtype: torch.dtype = torch.float32
    decode_steps: int = 1
    states: int = 0
    games: int | None = None

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        context: int,
        seats: int,
        more: int = 0,
        bf16: bool = False,
        decode_steps: int = 1,
        games: int | None = None,
    ) -> Slots:
        """A model's. `bf16`: a copy plays, see `PlayConfig.play_bf16`."""
        dtype = torch.bfloat16 if bf16 else torch.float32
        played = size_of(config, context, dtype)
        copied = played.weights if bf16 else 0
        return cls(seats, played.slot, more, config, played.weights, copied, dtype, decode_steps, played.states, games)

    def at_once(self, concurrency: int) -> int:
        """Games that are played at a time."""
        return concurrency if self.games is None else min(concurrency, self.games)

    def count(self, concurrency: int) -> int:
        """Slots."""
        return self.seats * self.at_once(concurrency) + self.more

    def desk(self, concurrency: int, device: torch.device) -> int:
        """Bytes of the second copies of slots that speak at a time, one in each game (`Desk`)."""
        speaking = min(max(self.at_once(concurrency), self.more), self.count(concurrency))
        if self.config is None or speaking < 2 or not has_desk(self.config, device, self.dtype, self.decode_steps):
            return 0
        return (self.size - self.states) * places_for(speaking, self.count(concurrency))

    def large(self, concurrency: int) -> bool:
        """Whether what its passes take matters."""
        return max(self.weights, self.size * self.count(concurrency)) >= LARGE


@dataclass(frozen=True)
class Fit:
    """How many games at a time fit into memory, and one line that says what their caches take."""

    concurrency: int
    line: str


def check_memory(
    caches: Sequence[Slots],
    models: int,
    *,
    concurrency: int,
    setting: str,
    context: int,
    device: torch.device,
    learning: int = 0,
    later: Sequence[Slots] = (),
) -> Fit:
    """How many games at a time fit beside the models and what a pass computes: `concurrency`, or the most below it.

    `models` and `learning`, a pass of an update, are in bytes. `later` are caches that are made when the others are
    gone. `setting` is what `concurrency` is called on the command line. UserError where not even one game fits.
    """
    models += max(sum(each.copy for each in phase) for phase in (caches, later))
    phases = [[each for each in phase if each.size] for phase in (caches, later)]
    free = free_memory(device)

    def of_phase(phase: Sequence[Slots], games: int) -> int:
        return sum(each.size * each.count(games) + each.desk(games, device) for each in phase)

    def taken(games: int) -> int:
        return max(of_phase(phase, games) for phase in phases)

    def playing(games: int) -> int:
        return max(
            (
                playing_bytes(
                    each.config,
                    device,
                    slots=each.count(games),
                    speaking=max(each.at_once(games), each.more),
                    context=context,
                    dtype=each.dtype,
                )
                for phase in phases
                for each in phase
                if each.config is not None and each.large(concurrency)
            ),
            default=0,
        )

    def fits(games: int) -> bool:
        return taken(games) + models + learning <= free and taken(games) + models + playing(games) <= free

    fitting = concurrency
    if not fits(concurrency):
        fitting = bisect_left(range(1, concurrency), True, key=lambda games: not fits(games))  # the last that fits
    if not fitting:
        hopeless = taken(1) + models > free  # over slots that no machine has, a pass takes minutes to make up
        widest = max(0 if hopeless else playing(1), learning)
        raise UserError(
            f"Not enough memory: even {setting}=1 needs {readable(taken(1) + models + widest)} (cache "
            f"{readable(taken(1))}, models {readable(models)}, a pass {readable(widest)}), and {readable(free)} are "
            f"free ({device.type}). Use a smaller model.context than {context}, "
            + ("a smaller algo.update.token_budget, " if learning else "")
            + "or a smaller model."
        )
    largest = max(phases, key=lambda phase: of_phase(phase, fitting))
    counts: dict[int, int] = {}
    for each in largest:
        counts[each.size] = counts.get(each.size, 0) + each.count(fitting)
    what = " and ".join(f"{count} slots of {readable(size)}" for size, count in counts.items()) or "no slots"
    line = f"cache: {what}, {readable(taken(fitting))}"
    if any(each.desk(fitting, device) for each in largest):
        line += " with copies of those that speak"
    if fitting < concurrency:
        line += f"; {setting} lowered from {concurrency} to {fitting}: {readable(free)} are free ({device.type})"
    return Fit(fitting, line)


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class Alive(TorchDispatchMode):
    """Within, counts the bytes of all tensors that are made: those alive now, and the `most` at a time.

    A processor without instructions for bfloat16 makes a product of such matrices in float32 first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, int] = {}  # bytes of each storage, by its address
        self._twice = not has_bf16_instructions()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}  # views, and what is written in place
        for storage in storages(made):
            if storage._cdata not in self._known and storage._cdata not in given:
                self._known[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._forget, storage._cdata)
        if self._twice and func in PRODUCTS and made.dtype == torch.bfloat16 and made.device.type == "cpu":
            self.most = max(self.most, self.now + 4 * made.numel())
        return made

    def _forget(self, storage: int) -> None:
        self.now -= self._known.pop(storage)


def has_bf16_instructions() -> bool:
    """Of this machine's processor; True where torch cannot tell."""
    return not cpu_abilities() or cpu_has("amx_bf16", "avx512_bf16", "bf16")  # the last is ARM's


def cpu_has(*names: str) -> bool:
    return any(cpu_abilities().get(name) for name in names)


def cpu_abilities() -> Mapping[str, Any]:
    """Instructions of this machine's processor, by torch's names; empty where torch cannot tell."""
    return getattr(torch.cpu, "get_capabilities", dict)()  # older versions have none


def storages(values: Any) -> Iterator[torch.UntypedStorage]:
    return (each.untyped_storage() for each in tree_leaves(values) if isinstance(each, torch.Tensor))


def peak_bytes(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, work: Callable[[PreTrainedModel], object]
) -> int:
    """What `work` with a model of this configuration takes at most, beside the model's weights and their gradients.

    Found without computing. 0 for what cannot be foretold so: models with recurrent layers, or with experts.
    """
    with FakeTensorMode(), torch.device(device):
        lm = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
        if not attends(lm):
            return 0
        quicken(lm)
        for parameter in lm.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with Alive() as alive:
            work(lm)
    return alive.most


def attends(lm: PreTrainedModel) -> bool:
    """Whether the model has nothing but attention and dense layers, and slots can hold it."""
    try:
        kinds = layer_kinds(lm)
    except Unheld:
        return False
    return set(kinds) <= set(ATTENTION) and not any("experts" in name for name, _ in lm.named_modules())


def playing_bytes(
    config: PreTrainedConfig,
    device: torch.device,
    *,
    slots: int,
    speaking: int,
    context: int,
    dtype: torch.dtype = torch.float32,
) -> int:
    """The most that an engine takes beside its cache and its desk, in the widest pass over full slots: a token for each
    that speaks, or `read_budget` new ones in all, of as many slots as that goes round."""
    caches: list[int] = []
    budget = max(read_budget(config, device, dtype), context)  # a slot's new tokens are read at once
    ragged = device.type == "cpu" and not has_desk(config, device, dtype)

    def play(lm: PreTrainedModel) -> None:
        cache = slot_cache(lm, slots, context)
        several = min(max(-(-budget // max(slots, 1)), 2), context)
        for size, most in ((1, min(speaking, slots)), (several, max(budget // several, 1))):
            rows = np.delete(np.arange(min(most + 1, slots)), [1] if slots > 2 and most > 1 else [])  # not side by side
            start = np.full(len(rows), context - size)
            if not ragged:
                cache.seat(rows, start)  # as if copied already: copying takes no memory, and here seconds
            with torch.no_grad():
                hidden = one_pass(lm, cache, rows, start, [[0] * size] * len(rows), ragged)
                head(lm, hidden[size - 1 :: size]).log_softmax(-1).double().exp().cumsum(-1)
        desks = [each for layer in cache.layers if isinstance(layer, SlotLayer) for each in layer.desk]
        caches.append(cache.nbytes + sum(each.nbytes for each in desks))

    return peak_bytes(config, dtype, device, play) - sum(caches) + kept_kernels(device, dtype)


def learning_bytes(
    config: PreTrainedConfig,
    device: torch.device,
    *,
    rows: int,
    length: int,
    replies: int,
    bf16: bool = False,
    gradient_checkpointing: bool = False,
) -> int:
    """The most that a pass of an update takes over rows of this length, of which `replies` tokens each are scored."""

    compiled = reads_compiled(config, device)

    def learn(lm: PreTrainedModel) -> None:
        with (
            torch.autocast(device.type, torch.bfloat16, enabled=bf16),
            recomputing(lm) if gradient_checkpointing else nullcontext(),
            varlen(lm) if compiled else nullcontext(),
        ):
            ids = torch.zeros(rows, length, dtype=torch.int64)
            hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
            logprobs = (head(lm, hidden[:, :replies]) + torch.zeros(config.vocab_size)).log_softmax(-1)
            entropy = (logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)
            (logprobs.gather(-1, ids[:, :replies, None])[..., 0] + entropy).sum().backward()

    most = peak_bytes(config, torch.float32, device, learn)
    kept = kept_kernels(device, torch.bfloat16 if bf16 else torch.float32)
    return round(most * (WASTE_HALF if bf16 else WASTE)) + kept if device.type == "cpu" else most


def reads_compiled(config: PreTrainedConfig, device: torch.device) -> bool:
    """Whether an update reads rows by compiled attention, see `varlen.compiled`."""
    return takes(device, torch.float32) and plain(config) and asks_attention(config)


def kept_kernels(device: torch.device, dtype: torch.dtype) -> int:
    """Bytes that torch keeps on this processor once it has multiplied such numbers."""
    if device.type != "cpu":
        return 0
    if dtype == torch.bfloat16:
        return KEPT_AMX if cpu_has("amx_bf16") else KEPT
    return KEPT_FLOAT if dtype == torch.float32 and has_faster_products() else 0


@contextmanager
def sparing() -> Iterator[None]:
    """Within, what is freed goes back to the system at once from 4 MiB on; at the end everything that was freed.

    Passes that play are of ever other sizes. What glibc keeps of them between what lives, blocks of up to 32 MiB, would
    stand beside what they take next, and beside what learning takes. An update's sizes come again, and it is faster
    with the memory at hand: there glibc's own ways hold. Nothing where there is no such library, or where the
    environment says from what size on it should do so.
    """
    tuned = "MALLOC_MMAP_THRESHOLD_" in os.environ or "malloc.mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if tuned or not set_malloc(4 * MIB):
        yield
        give_back()
        return
    try:
        yield
    finally:
        set_malloc(32 * MIB)  # where glibc comes to by itself
        give_back()


def set_malloc(threshold: int) -> bool:
    """Has glibc ask the system for each block of so many bytes or more; whether it does (mallopt(3))."""
    with suppress(OSError, AttributeError):  # another system, another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        return bool(mallopt(M_MMAP_THRESHOLD, threshold) and mallopt(M_TRIM_THRESHOLD, 2 * threshold))
    return False


def give_back() -> None:
    """Returns to the system what this process has freed and its C library keeps, up to some 20 ms; nothing where there
    is no such call."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def head(lm: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    output: nn.Module = lm.get_output_embeddings()
    return output(hidden).float()


def readable(size: int) -> str:
    unit, name = (GIB, "GiB") if size >= GIB / 10 else (MIB, "MiB") if size >= MIB / 10 else (KIB, "KiB")
    return f"{size / unit:.1f} {name}"


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still take on the device; of main memory, its share among torchrun's processes."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for what comes
        return torch.cuda.mem_get_info(device)[0] + kept
    known = [system_memory(), *cgroup_memory()]
    return max(min(known), 0) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def system_memory() -> int:
    """Bytes of main memory that can be had; all that there are where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_memory(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Bytes left below each memory limit of the control groups that this process is in (cgroups of version 1 or 2)."""
    left = []
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, usage, cached = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        group = top / path.lstrip("/")  # in a container it may lie elsewhere, with its limit at the top
        for folder in (group, *group.parents):
            if folder.is_relative_to(top) and (folder / limit).exists():
                most = (folder / limit).read_text().strip()
                if most != "max":
                    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    used = int((folder / usage).read_text()) - int(stat[cached])  # cached files make room
                    left.append(int(most) - used)
    return left

"""Checks, before anything expensive, how many games at a time fit into memory.

A formula over the model's shape says what a pass takes. Left out: games, episodes, and the batch (about 100 bytes a
token).
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from marl.common.errors import UserError
from marl.decoding.cache import READ_BUDGET
from marl.decoding.probes import size_of
from marl.model.policy import MOST_LOGITS

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Slots:
    """Cache slots of one player: `per_game` for each game, and `more`."""

    per_game: int
    size: int  # bytes of a slot; 0 for a model without a cache
    more: int = 0
    config: PreTrainedConfig | None = None  # of the model; None where its passes are small beside the cache
    copy: int = 0  # bytes of the bfloat16 copy that plays, if any
    games: int | None = None  # in all, where known; no more of them are played at a time
    dtype: torch.dtype = torch.float32  # that the player computes in

    @classmethod
    def of(
        cls, config: PreTrainedConfig, context: int, per_game: int, more: int = 0, bf16: bool = False,
        games: int | None = None, dtype: torch.dtype = torch.float32,
    ) -> Slots:  # fmt: skip
        """Slots of a model with this configuration and weights of this type; `bf16`: a copy in bfloat16 plays."""
        dtype = torch.bfloat16 if bf16 else dtype
        played = size_of(config, context, dtype)
        return cls(per_game, played.slot, more, config, played.weights if bf16 else 0, games, dtype)

    def count(self, concurrency: int) -> int:
        """Number of slots."""
        return self.per_game * min(concurrency, self.games or concurrency) + self.more

    def playing(self, concurrency: int, context: int) -> int:
        """Bytes of the player's widest pass."""
        if self.config is None:
            return 0
        return playing_bytes(self.config, slots=self.count(concurrency), context=context, dtype=self.dtype)


@dataclass(frozen=True)
class Fit:
    """The number of games at a time that fits into memory, a line for the user, and bytes of a game's slots."""

    concurrency: int
    line: str
    game: int = 0


def check_memory(
    caches: Sequence[Slots], models: int, *, concurrency: int, setting: str, context: int, device: torch.device,
    learning: int = 0, later: Sequence[Slots] = (),
) -> Fit:  # fmt: skip
    """Finds how many games at a time fit: `concurrency`, or the most below it.

    models: bytes of weights, gradients and moments. learning: bytes of an update's widest pass.
    later: caches that are made when the others are gone. setting: the command line's name for `concurrency`.
    UserError where not even one game fits.
    """
    phases = [[each for each in phase if each.size] for phase in (caches, later)]
    models += max(sum(each.copy for each in phase) for phase in (caches, later))
    free = free_memory(device)

    def cache(games: int) -> int:
        return max(sum(each.size * each.count(games) for each in phase) for phase in phases)

    def widest(games: int) -> int:
        """Bytes of the widest pass: games and updates take turns."""
        return max([learning, *(each.playing(games, context) for phase in phases for each in phase)])

    def needed(games: int) -> int:
        return cache(games) + models + widest(games)

    fitting = concurrency
    if needed(concurrency) > free:
        fitting = bisect_left(range(1, concurrency), True, key=lambda games: needed(games) > free)
    if not fitting:
        smaller = "a smaller algo.update.token_budget, " if learning else ""
        raise UserError(
            f"Not enough memory: even {setting}=1 needs {readable(needed(1))} (cache {readable(cache(1))}, models "
            f"{readable(models)}, a pass {readable(widest(1))}), and {readable(free)} are free ({device.type}). "
            f"Use a smaller model.context than {context}, {smaller}or a smaller model."
        )
    counts: dict[int, int] = {}
    for each in max(phases, key=lambda phase: sum(each.size * each.count(fitting) for each in phase)):
        counts[each.size] = counts.get(each.size, 0) + each.count(fitting)
    what = " and ".join(f"{count} slots of {readable(size)}" for size, count in counts.items()) or "no slots"
    line = f"cache: {what}, {readable(cache(fitting))}"
    if fitting < concurrency:
        line += f"; {setting} lowered from {concurrency} to {fitting}: {readable(free)} are free ({device.type})"
    return Fit(fitting, line, cache(2) - cache(1))


class Shape:
    """Numbers that one token takes in a model: hidden state, inner MLP state, queries, keys and values, logits."""

    def __init__(self, config: PreTrainedConfig) -> None:
        text = config.get_text_config()
        heads = getattr(text, "num_attention_heads", 0) or 1
        self.hidden, self.layers, self.vocabulary = text.hidden_size, text.num_hidden_layers, text.vocab_size
        head = getattr(text, "head_dim", None) or self.hidden // heads
        self.queries, self.keys = heads * head, (getattr(text, "num_key_value_heads", None) or heads) * head
        self.inner = getattr(text, "intermediate_size", None) or 4 * self.hidden


def playing_bytes(config: PreTrainedConfig, *, slots: int, context: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that the widest pass over full slots takes beside the cache, within a fifth on a CPU.

    Such a pass reads READ_BUDGET tokens, or one slot's context, and samples a token for each slot. Keys and values of
    one layer are gathered and copied once, and the mask has a number for each token and place.
    """
    shape, size = Shape(config), dtype.itemsize
    tokens, rows = min(max(READ_BUDGET, context), slots * context), min(slots, READ_BUDGET // 8)
    mlp, attention = 2 * shape.hidden + 3 * shape.inner, 2 * shape.hidden + 4 * shape.queries + 3 * shape.keys
    states = 1.6 * tokens * max(mlp, attention) * size
    gathered = 2 * rows * context * 2 * shape.keys * size
    mask = tokens * context * (size + 2)
    logits = slots * shape.vocabulary * (2 * 4 + 2 * 8)  # sums of probabilities are in double precision
    return round(max(states + gathered + mask, logits))


def learning_bytes(
    config: PreTrainedConfig, *, rows: int, length: int, replies: int, bf16: bool = False,
    gradient_checkpointing: bool = False, beside: bool = False, split: bool = False,
) -> int:  # fmt: skip
    """Bytes that an update's pass over rows of this length takes; `replies` tokens of each row are scored.

    A layer's gradients take about as much as its activations. Right within a fifth on a CPU. `beside`: questions stand
    behind the rows, which are then up to twice as long, and attention has a mask. `split`: the model's parameters are
    shared among ranks, and all logits are made at once.
    """
    length = 2 * length if beside else length
    mask = rows * length**2 * 3 * 4 if beside else 0  # and what it is made of
    shape, tokens = Shape(config), rows * length
    layer = 6 * shape.hidden + 4 * shape.inner + 4 * shape.queries + 4 * shape.keys
    kept = 3 * shape.layers * shape.hidden + 2.4 * layer if gradient_checkpointing else (shape.layers + 1) * layer
    size = 2.6 if bf16 else 4  # norms and sums stay in float32
    logits = rows * replies * shape.vocabulary
    return round(tokens * kept * size + (logits if split else min(logits, MOST_LOGITS)) * 4 * 5) + mask


def readable(size: int) -> str:
    """A number of bytes in words."""
    unit, name = (GIB, "GiB") if size >= GIB / 10 else (MIB, "MiB") if size >= MIB / 10 else (KIB, "KiB")
    return f"{size / unit:.1f} {name}"


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still take on the device: of main memory, its share among torchrun's processes.

    Jobs of a sweep that share the device each take at most their part of the whole, since all may start at once. What
    other programs hold is not shared out.
    """
    jobs = int(os.environ.get("JOBS_PER_DEVICE", "1"))  # set by experiments/setup/devices.py
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for reuse
        free, whole = torch.cuda.mem_get_info(device)
        return min(free + kept, whole // jobs)
    limits = [system_memory(), *cgroup_memory()]
    free, whole = min(left for _, left in limits), min(size for size, _ in limits)
    return max(min(free, whole // jobs), 0) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def system_memory() -> tuple[int, int]:
    """Bytes of main memory, and of them available; all where the system does not say."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return whole, int(line.split()[1]) * 1024
    return whole, whole


def cgroup_memory(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[tuple[int, int]]:
    """Each memory limit of this process's control groups (cgroups version 1 or 2), and the bytes left below it."""
    found = []
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
                    found.append((int(most), int(most) - used))
    return found

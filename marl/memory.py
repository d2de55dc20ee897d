"""Whether models and their caches fit into memory: asked before anything expensive.

What it leaves out: what a pass computes meanwhile, which is small where an update's `token_budget` is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from marl.errors import UserError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Slots:
    """One player's cache slots: `seats` for each game that is played at a time, and `more`; a slot's size in bytes, 0
    for a model that has none (engine.py)."""

    seats: int
    size: int
    more: int = 0

    def count(self, concurrency: int) -> int:
        return self.seats * concurrency + self.more


def check_memory(
    caches: Sequence[Slots], models: int, *, concurrency: int, setting: str, context: int, device: torch.device
) -> str:
    """One line that says what the caches take. UserError where they and the models (in bytes) are more than is free.

    `setting` is what `concurrency` is called on the command line.
    """
    counts: dict[int, int] = {}
    caches = [each for each in caches if each.size]
    for each in caches:
        counts[each.size] = counts.get(each.size, 0) + each.count(concurrency)
    taken = sum(size * count for size, count in counts.items())
    what = " and ".join(f"{count} slots of {readable(size)}" for size, count in counts.items()) or "no slots"
    free = free_memory(device)
    if taken + models > free:
        game = sum(each.seats * each.size for each in caches)  # bytes that a further game takes
        fitting = (free - models - sum(each.more * each.size for each in caches)) // max(game, 1)
        fits = sum(each.count(fitting) for each in caches)
        way = f"{setting}={fitting} would fit ({fits} slots)" if fitting > 0 else f"not even {setting}=1 fits"
        raise UserError(
            f"{setting}={concurrency} and model.context={context}: the cache takes {what}, {readable(taken)}, and "
            f"models take {readable(models)}, but {readable(free)} of memory are free ({device.type}): {way}; or lower "
            "model.context, or take a smaller model"
        )
    return f"cache: {what}, {readable(taken)}"


def readable(size: int) -> str:
    unit, name = (GIB, "GiB") if size >= GIB / 10 else (MIB, "MiB") if size >= MIB / 10 else (KIB, "KiB")
    return f"{size / unit:.1f} {name}"


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still take on the device; of main memory, its share among torchrun's processes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
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

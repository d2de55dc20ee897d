"""Several processes that train as one: `torchrun -m experiments.train ...`.

Games are shared out and their episodes collected, so every rank sees the whole batch and computes the same advantages;
of each minibatch a rank reads its share of the rows, and gradients are summed. What a run learns does not depend on the
number of ranks, except for the order in which numbers are added. What this leaves out: parameters that are split among
ranks (sharding.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from marl.common.errors import UserError

T = TypeVar("T")
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # gloo's words
GRACE = 2.0  # seconds, so that torchrun takes the process that ended by itself for the first that failed
PATIENCE = timedelta(hours=12)  # one rank may train a base, or evaluate, while the others wait


@dataclass(frozen=True)
class Ranks:
    """This process among the run's processes. With one of them nothing here does anything."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's part of the items: every `size`-th one."""
        return items[self.rank :: self.size]

    def collect(self, shared: Sequence[T]) -> list[T]:
        """All ranks' parts, in the order that they were shared out from."""
        if self.size == 1:
            return list(shared)
        parts = self.objects(list(shared))
        return [parts[i % self.size][i // self.size] for i in range(sum(len(part) for part in parts))]

    def objects(self, mine: T) -> list[T]:
        """What every rank has here, by rank."""
        parts: list[Any] = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(parts, mine)
        return parts

    def add(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def add_gradients(self, model: nn.Module) -> None:
        """Sums the gradients over ranks; a parameter without one on this rank counts as 0. One that has none on any
        keeps none, so that optimisers leave it alone, as in one process."""
        if self.size == 1:
            return
        parameters = [p for p in model.parameters() if p.requires_grad]
        has = self.add(torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device))
        with_gradient = [p for p, count in zip(parameters, has.tolist(), strict=True) if count]
        if not with_gradient:
            return
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in with_gradient])
        self.add(flat)
        for p, summed in zip(with_gradient, flat.split([p.numel() for p in with_gradient]), strict=True):
            p.grad = summed.view_as(p).clone()

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            dist.barrier()


ONE = Ranks()


@contextmanager
def torchrun_ranks(device: torch.device) -> Iterator[Ranks]:
    """The ranks that torchrun started; one, where it did not start this process."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ONE
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield Ranks(dist.get_rank(), size)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(words in str(error) for words in LOST):
            raise
        time.sleep(GRACE)
        raise UserError("another process of this run has ended; what it said itself tells why") from error
    finally:
        dist.destroy_process_group()

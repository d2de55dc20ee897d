"""Data parallelism: several processes train as one (`torchrun -m experiments.train ...`).

Ranks share games and collect all episodes, so that each computes the same batch and advantages. Each reads its share of
a minibatch's rows, and gradients are summed: the number of ranks changes results by rounding only.
"""

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
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # errors of gloo
GRACE = 2.0  # seconds, so that torchrun reports the process that failed by itself as the first failure
PATIENCE = timedelta(hours=12)  # one rank may train a base, or evaluate, while the others wait


@dataclass(frozen=True)
class Ranks:
    """This process among the run's processes. With a single process every method does nothing."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Tells whether this process writes the run's files."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's share of the items: every `size`-th one."""
        return items[self.rank :: self.size]

    def collect(self, shared: Sequence[T]) -> list[T]:
        """All ranks' items, in the order before `share`."""
        parts = self.objects(list(shared))
        return [parts[i % self.size][i // self.size] for i in range(sum(len(part) for part in parts))]

    def objects(self, mine: T) -> list[T]:
        """Gathers `mine` of every rank, by rank."""
        parts: list[Any] = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(parts, mine)
        return parts

    def add(self, values: Tensor) -> Tensor:
        """Sums values over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def add_gradients(self, model: nn.Module) -> None:
        """Sums gradients over ranks; a missing one counts as 0.

        A parameter without a gradient on any rank keeps none, so that optimisers skip it, as in one process.
        """
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
        """Waits for all ranks."""
        if self.size > 1:
            dist.barrier()


ONE = Ranks()


@contextmanager
def torchrun_ranks(device: torch.device) -> Iterator[Ranks]:
    """Joins the ranks that torchrun started; a single rank without torchrun. UserError if another rank is lost."""
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
        raise UserError("Another process of this run has ended. Its own message says why.") from error
    finally:
        dist.destroy_process_group()

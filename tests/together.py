"""Several processes for one test. They start fast, because they share what this one has imported."""

from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def together(work: Callable[..., None], processes: int, *args: Any) -> None:
    """Calls `work(rank, *args)` in each process, and raises what one of them raises."""
    mp.start_processes(work, args, nprocs=processes, start_method="fork")

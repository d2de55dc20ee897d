"""Several processes of one test, which start fast: what they import is imported once."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def together(work: Callable[..., None], processes: int, *args: Any) -> None:
    """Calls `work(rank, *args)` in each process, and raises what one of them raises."""
    multiprocessing.set_forkserver_preload(["tests.marl.algorithms.test_toy_game"])
    mp.start_processes(work, args, nprocs=processes, start_method="forkserver")

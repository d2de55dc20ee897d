"""A device's limits, measured, and how near to them decoding and updates come."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

REPEATS = 10
COPIED = {"cuda": 1 << 30, "cpu": 1 << 26}  # bytes: well above the caches of either
SIDE = {"cuda": 8192, "cpu": 1024}  # of the square matrices


@dataclass(frozen=True)
class Limits:
    """Bytes a second of a large copy, read and written; and FLOP/s of a large matrix product, by number format."""

    bytes_per_second: float
    flops: dict[str, float]

    def decode_share(self, weights: int, cache: int, passes_per_second: float) -> float:
        """Returns (weights + cache) * passes/s / (bytes/s): how much of the bandwidth decoding makes use of.

        A pass must read all `weights` and the keys and values `cache` of its rows' streams once, in bytes (Pope et al.
        2022, Efficiently Scaling Transformer Inference, section 2.1). What it reads or copies besides lowers the share.
        """
        return (weights + cache) * passes_per_second / self.bytes_per_second

    def update_share(self, parameters: int, tokens_per_second: float, dtype: str) -> float:
        """Returns 6 * parameters * tokens/s / (FLOP/s): how much of the arithmetic an update makes use of.

        A token takes 2 FLOP a parameter forward and 4 backward (Kaplan et al. 2020, Scaling Laws for Neural Language
        Models, section 2.1). As there, `parameters` has no embeddings, and products of attention are left out; logits,
        of scored tokens alone, are too. So the share is a little too low.
        """
        return 6 * parameters * tokens_per_second / self.flops[dtype]


def measure_limits(device: torch.device, dtypes: Iterable[str]) -> Limits:
    """Measures a device in the formats given, with the best of REPEATS tries each; about a second."""
    source = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = 2 * source.nbytes / shortest(lambda: target.copy_(source), device)
    flops, side = {}, SIDE[device.type]
    for dtype in dtypes:
        a, b = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
        flops[dtype] = 2 * side**3 / shortest(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
    return Limits(copying, flops)


def shortest(call: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of the fastest of REPEATS calls, after one that does not count."""
    call()
    return min(clocked(call, device) for _ in range(REPEATS))


def clocked(call: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds that a call takes, its work on a GPU included."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began

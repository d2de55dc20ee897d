"""Random draws: one token for each row, from a generator of its own."""

import numpy as np
import torch
from torch import Tensor


def draw(logprobs: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draws one id for each row of log-probabilities (R, V). Returns ids (R,) and their log-probabilities (R,).

    Takes the inverse of the cumulative distribution at `uniform` (R,) in [0, 1), in double precision. Without `uniform`
    takes the likeliest id, with log-probability 0.
    """
    if uniform is None:
        return logprobs.argmax(-1), torch.zeros(len(logprobs), device=logprobs.device)
    probs = logprobs.double().exp()
    if probs.is_cuda and torch.are_deterministic_algorithms_enabled():  # torch's own sums are not, on a GPU
        cumulative = doubling_sums(probs)
    else:
        cumulative = probs.cumsum(-1)
    ids = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    ids = ids.clamp_max(logprobs.shape[1] - 1)
    return ids[:, 0], logprobs.gather(1, ids)[:, 0]


def doubling_sums(values: Tensor) -> Tensor:
    """Cumulative sums along the last dimension in log2(V) steps (Hillis and Steele 1986)."""
    back = 1
    while back < values.shape[-1]:
        values = torch.cat([values[..., :back], values[..., back:] + values[..., :-back]], -1)
        back *= 2
    return values


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1): each depends on its own seed and counter alone (splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        z = seeds.astype(np.uint64) + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) / float(1 << 53)

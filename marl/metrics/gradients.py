"""Signal and noise of a gradient that is estimated from batches of games.

With g_b the gradient of batch b of B: noise = sum_b |g_b - mean|^2 / (B - 1), and signal = |mean|^2 - noise / B, an
unbiased estimate of the squared length of the expected gradient. The ratio says how much of one batch's step is signal.
All is read off the inner products of the batches' gradients, (B, B).
"""

from collections.abc import Callable

import numpy as np

from marl.metrics.stats import Floats, Interval, jackknife


def signal_to_noise(products: Floats) -> float:
    """Estimates signal / noise of one batch; below 0 where noise hides the signal."""
    batches = len(products)
    mean = products.sum() / batches**2
    noise = (np.trace(products) - batches * mean) / (batches - 1)
    return float(mean / noise - 1 / batches)


def over_batches(measure: Callable[[Floats], float], products: Floats, batches: int) -> Interval:
    """Measures with an interval over batches: `products` may hold several kinds of gradients, each of all batches."""
    number = np.arange(len(products)) % batches
    left = [measure(products[np.ix_(number != b, number != b)]) for b in range(batches)]
    return jackknife(measure(products), left)

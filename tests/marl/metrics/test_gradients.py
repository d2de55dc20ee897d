"""Signal and noise of gradients: by hand, and without bias where both are known."""

import numpy as np
import pytest

from marl.metrics.gradients import over_batches, signal_to_noise


def test_two_batches_by_hand() -> None:
    """The mean of (3, 0) and (1, 0) is (2, 0), noise (1 + 1) / 1 = 2, signal 4 - 2 / 2 = 3."""
    gradients = np.array([[3.0, 0.0], [1.0, 0.0]])
    assert signal_to_noise(gradients @ gradients.T) == pytest.approx(3 / 2)
    apart = np.eye(2)  # orthogonal gradients have nothing in common: (.5 - 1 / 2) / 1
    assert signal_to_noise(apart) == pytest.approx(0.0)


def test_the_estimate_is_that_of_the_distribution() -> None:
    """Expected gradient of squared length 4, noise of 100 dimensions: .04, also from few batches."""
    rng = np.random.default_rng(0)
    expected = np.zeros(100)
    expected[0] = 2.0
    found = []
    for _ in range(2000):
        gradients = expected + rng.standard_normal((8, 100))
        found.append(signal_to_noise(gradients @ gradients.T))
    assert np.mean(found) == pytest.approx(0.04, abs=0.002)


def test_the_interval_holds_the_truth() -> None:
    """About 95 of 100 intervals over 32 batches hold the ratio that the distribution has."""
    rng = np.random.default_rng(1)
    expected = np.zeros(100)
    expected[0] = 2.0
    inside = 0
    for _ in range(200):
        gradients = expected + rng.standard_normal((32, 100))
        found = over_batches(signal_to_noise, gradients @ gradients.T, 32)
        inside += found.low <= 0.04 <= found.high
    assert 180 <= inside <= 198


def test_kinds_are_compared_batch_by_batch() -> None:
    """Two kinds of three batches: without one, traces are 66 - 11, 66 - 22 and 66 - 33, whose variance is 242 / 3."""
    found = over_batches(lambda products: float(np.trace(products)), np.diag([1.0, 2, 3, 10, 20, 30]), 3)
    half = 1.959964 * np.sqrt(2 * 242 / 3)
    assert (found.mean, found.n) == (66, 3)
    assert (found.low, found.high) == pytest.approx((66 - half, 66 + half))

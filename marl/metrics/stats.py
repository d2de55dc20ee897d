"""Means with 95 % intervals, for values that come in clusters: turns within games, games within training seeds.

Turns of one game depend on each other, and so do games of one trained network, so intervals are over the larger unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri, stdtrit

from marl.metrics.wording import number

Floats = NDArray[np.float64]
LEVEL = 0.95
Z = float(ndtri((1 + LEVEL) / 2))  # half-width of a standard normal interval
DRAWS = 2000
DRAWS_AT_ONCE = 4_000_000  # cluster indices in memory while resampling: 32 MB


@dataclass(frozen=True)
class Interval:
    """A mean, its interval, and the number `n` of independent units (games or seeds).

    `low` and `high` are nan for a single unit, which has no spread.
    """

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if math.isnan(self.low):
            return number(self.mean)
        return f"{number(self.mean)} [{number(self.low)}, {number(self.high)}]"

    def within(self, least: float, most: float) -> Interval:
        """Cuts the interval to the possible range of the mean; nan stays nan."""
        return Interval(self.mean, max(self.low, least), min(self.high, most), self.n)

    def to_json(self) -> dict[str, float | int | None]:
        """Plain numbers. JSON has no nan, so None stands for it."""
        finite = {name: value if math.isfinite(value) else None for name, value in vars(self).items()}
        return {**finite, "n": self.n}

    @staticmethod
    def from_json(data: Mapping[str, float | int | None]) -> Interval:
        """The inverse of `to_json`."""
        mean, low, high = (
            math.nan if data[name] is None else float(data[name] or 0) for name in ("mean", "low", "high")
        )
        return Interval(mean, low, high, int(data["n"] or 0))


Metrics = dict[str, Interval]
ByGame = list[tuple[int, float]]  # (number of the game, value)


# --- Over the games of a run ------------------------------------------------------------------------------------------
def bootstrap_ratio(
    numerators: ArrayLike, denominators: ArrayLike, clusters: ArrayLike | None = None, *, rng: np.random.Generator
) -> Interval:
    """Sum of `numerators` over sum of `denominators`, both (n,), with a percentile bootstrap that resamples whole
    `clusters` (n,), such as games. None makes each place its own cluster; the interval's `n` counts clusters.

    Source: Efron and Tibshirani 1993, chapter 13. Raises ValueError if the denominators sum to zero.
    """
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    assert top.shape == bottom.shape and top.ndim == 1, (top.shape, bottom.shape)
    if clusters is not None:
        index = np.unique(np.asarray(clusters), return_inverse=True)[1]
        top, bottom = (np.bincount(index, weights=each).astype(np.float64) for each in (top, bottom))
    if not bottom.sum() > 0:
        raise ValueError("the denominators sum to zero: no observation to take a mean of")
    mean, units = float(top.sum() / bottom.sum()), len(top)
    if units == 1:
        return Interval(mean, math.nan, math.nan, 1)
    ratios: list[Floats] = []
    rows = max(1, DRAWS_AT_ONCE // units)
    for start in range(0, DRAWS, rows):
        picked = rng.integers(units, size=(min(rows, DRAWS - start), units))
        below = bottom[picked].sum(1)
        ratios.append(top[picked].sum(1)[below > 0] / below[below > 0])  # a draw of empty units has no ratio
    return percentiles(mean, np.concatenate(ratios), units)


def bootstrap_mean(values: ArrayLike, clusters: ArrayLike | None = None, *, rng: np.random.Generator) -> Interval:
    """Mean of `values` (n,), an interval as of `bootstrap_ratio`. Raises ValueError if there is no value."""
    array = np.asarray(values, dtype=np.float64)
    return bootstrap_ratio(array, np.ones_like(array), clusters, rng=rng)


def percentiles(mean: float, resampled: Floats, n: int) -> Interval:
    """The percentile interval of resampled means."""
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high), n)


def mean_metrics(values: Mapping[str, ByGame], rng: np.random.Generator) -> Metrics:
    """Means with intervals over games; without those that have no value.

    A flag that holds always or never leaves nothing to resample: its interval is Wilson's, over the games.
    """
    found = {}
    for name, pairs in values.items():
        if not pairs:
            continue
        games, amounts = zip(*pairs, strict=True)
        if isinstance(amounts[0], bool) and len(set(amounts)) == 1:
            units = len(set(games))
            found[name] = wilson(units * int(amounts[0]), units)
        else:
            found[name] = bootstrap_mean(amounts, games, rng=rng)
    return found


def paired_difference(a: ArrayLike, b: ArrayLike, *, rng: np.random.Generator) -> Interval:
    """Mean of `a - b`, both (games,), where `a[i]` and `b[i]` are the same game played twice."""
    return bootstrap_mean(np.subtract(a, b, dtype=np.float64), rng=rng)


def independent_difference(a: Interval, b: Interval) -> Interval:
    """`a - b` of two independent figures with an interval from both of theirs (Newcombe 1998, method 10)."""
    low = math.hypot(a.mean - a.low, b.high - b.mean)
    high = math.hypot(a.high - a.mean, b.mean - b.low)
    return Interval(a.mean - b.mean, a.mean - b.mean - low, a.mean - b.mean + high, a.n + b.n)


def wilson(successes: int, n: int) -> Interval:
    """A rate with the Wilson score interval (Wilson 1927), which holds near 0 and 1."""
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"successes must lie between 0 and n, and n above 0, not {successes} of {n}")
    share = successes / n
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    # Exactly 0 and 1 at the ends; rounding would miss them by a hair.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return Interval(share, low, high, n)


def rate(flags: Sequence[bool] | NDArray[np.bool_]) -> Interval:
    """The share of games for which the flag holds, with Wilson's interval."""
    return wilson(int(np.sum(flags)), len(flags))


def jackknife(mean: float, without: Sequence[float] | Floats) -> Interval:
    """Delete-one-game jackknife interval; `without[g]` is the statistic without game g.

    Source: Efron and Tibshirani 1993, chapter 11.
    """
    n = len(without)
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = Z * math.sqrt((n - 1) * float(np.var(without)))
    return Interval(mean, mean - half, mean + half, n)


# --- Over training seeds ----------------------------------------------------------------------------------------------
def seed_mean(means: ArrayLike) -> Interval:
    """Mean over training seeds, (seeds,), with Student's t interval.

    Three seeds give a wide interval that covers 95 %; a bootstrap over three seeds would cover about 70 %.
    """
    values = np.asarray(means, dtype=np.float64)
    mean, seeds = float(values.mean()), len(values)
    if seeds == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = float(stdtrit(seeds - 1, (1 + LEVEL) / 2)) * float(values.std(ddof=1)) / math.sqrt(seeds)
    return Interval(mean, mean - half, mean + half, seeds)


def interquartile_mean(means: ArrayLike, *, rng: np.random.Generator) -> Interval:
    """Mean of the middle half of the seeds' means, (seeds,), with a percentile bootstrap over seeds.

    With fewer than four seeds it is the plain mean, and below ten the interval is too narrow. Source: Agarwal et al.
    2021, arXiv:2108.13264.
    """
    values = np.asarray(means, dtype=np.float64)
    middle, seeds = float(_middle_half(values)), len(values)
    if seeds == 1:
        return Interval(middle, math.nan, math.nan, 1)
    resampled = _middle_half(values[rng.integers(seeds, size=(DRAWS, seeds))])
    return percentiles(middle, resampled, seeds)


def _middle_half(values: Floats) -> Floats:
    """Returns the mean over the last axis without its lowest and highest quarter."""
    size = values.shape[-1]
    cut = size // 4
    middle: Floats = np.partition(values, (cut, size - cut - 1), axis=-1)[..., cut : size - cut].mean(axis=-1)
    return middle


def seeds_and_games(values: ArrayLike, *, rng: np.random.Generator) -> Interval:
    """Mean of values (seeds, games) in games that all seeds met, with a bootstrap over seeds and over games.

    Source: Owen 2007, "The pigeonhole bootstrap". With fewer than ten seeds the interval is too narrow. `n` counts
    seeds.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"values must be of shape (seeds, games), at least one of each, not {array.shape}")
    seeds, games = array.shape
    times = [rng.multinomial(size, np.full(size, 1 / size), size=DRAWS) for size in (seeds, games)]
    means = ((times[0] @ array) * times[1]).sum(1) / array.size  # (draws,)
    return percentiles(float(array.mean()), means, seeds)


# --- Planning an experiment -------------------------------------------------------------------------------------------
def power(a: float, b: float, seeds: int, games: int, between: float = 0.0, level: float = LEVEL) -> float:
    """Probability that an experiment tells arms apart that win shares `a` and `b` of their games.

    Each arm has `seeds` runs of `games` evaluation games; the runs' rates spread with standard deviation `between`.
    Several seeds: two-sided t-test of pairs (Cohen 1988, chapter 2). One seed: two-sided test of two proportions
    (Fleiss, Levin and Paik 2003, chapter 4).
    """
    from scipy.stats import ncf  # a second to import, and needed here alone

    spread = math.sqrt((between**2 * 2 + (a * (1 - a) + b * (1 - b)) / games) / seeds)  # of the difference
    effect = abs(a - b) / spread
    if seeds == 1:
        critical = float(ndtri((1 + level) / 2))
        return float(ndtr(effect - critical) + ndtr(-critical - effect))
    critical = float(stdtrit(seeds - 1, (1 + level) / 2))
    # The square of a noncentral t is a noncentral F, which scipy computes without gaps; far out it is 1.
    return float(ncf.sf(critical**2, 1, seeds - 1, effect**2)) if effect < 10 * critical else 1.0


def games_needed(
    a: float, b: float, seeds: int, between: float = 0.0, wanted: float = 0.8, level: float = LEVEL
) -> int | None:
    """The fewest evaluation games a run with which `power` reaches `wanted`; None if 2^24 are too few."""
    low, high = 0, 1 << 24  # power(low) < wanted <= power(high)
    if power(a, b, seeds, high, between, level) < wanted:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(a, b, seeds, middle, between, level) >= wanted else (middle, high)
    return high

"""Means with 95 % intervals, for games that come in clusters: turns within games, games within training seeds.

Two turns of one game are not independent, and neither are two games of one trained network. So an interval is always
taken over the larger unit: over games within a run, over seeds across runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import ncf, norm, t, trim_mean

from marl.metrics.wording import number

Floats = NDArray[np.float64]
DRAWS_AT_ONCE = 4_000_000  # cluster indices held in memory while resampling: 32 MB


@dataclass(frozen=True)
class Interval:
    """A mean, its interval, and the number `n` of independent units (games or seeds) that it rests on.

    `low` and `high` are nan where nothing can be said: a single unit has no spread.
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
        """The same, its ends no further out than a mean can be: Student's t knows no bounds."""
        return Interval(self.mean, max(self.low, least), min(self.high, most), self.n)  # nan stays nan

    def to_json(self) -> dict[str, float | int | None]:
        """Plain numbers; None for what is not finite, since JSON has no nan."""
        finite = {name: value if math.isfinite(value) else None for name, value in vars(self).items()}
        return {**finite, "n": self.n}

    @staticmethod
    def from_json(data: dict[str, float | int | None]) -> Interval:
        """The inverse of `to_json`."""
        mean, low, high = (
            math.nan if data[name] is None else float(data[name] or 0) for name in ("mean", "low", "high")
        )
        return Interval(mean, low, high, int(data["n"] or 0))


def bootstrap_ratio(
    numerators: ArrayLike, denominators: ArrayLike, *, rng: np.random.Generator, level: float = 0.95, draws: int = 2000
) -> Interval:
    """Sum of `numerators` over sum of `denominators`, both of shape (units,), with a percentile bootstrap over units.

    For refused replies per turn, words per message and the like, where each game brings its own denominator. Source:
    Efron and Tibshirani 1993, chapter 13. Raises ValueError if the denominators sum to zero: nothing was observed.
    """
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if top.shape != bottom.shape or top.ndim != 1:
        raise ValueError(
            f"numerators and denominators must be two equally long vectors, not {top.shape}, {bottom.shape}"
        )
    if not bottom.sum() > 0:
        raise ValueError("the denominators sum to zero: no observation to take a mean of")
    mean, units = float(top.sum() / bottom.sum()), len(top)
    if units == 1:
        return Interval(mean, math.nan, math.nan, 1)
    ratios: list[Floats] = []
    rows = max(1, DRAWS_AT_ONCE // units)
    for start in range(0, draws, rows):
        picked = rng.integers(units, size=(min(rows, draws - start), units))
        below = bottom[picked].sum(1)
        ratios.append(top[picked].sum(1)[below > 0] / below[below > 0])  # a draw of empty units has no ratio
    low, high = np.quantile(np.concatenate(ratios), [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, float(low), float(high), units)


def bootstrap_mean(
    values: ArrayLike,
    clusters: ArrayLike | None = None,
    *,
    rng: np.random.Generator,
    level: float = 0.95,
    draws: int = 2000,
) -> Interval:
    """Mean of `values`, shape (n,), with a percentile bootstrap that resamples whole `clusters`, shape (n,).

    `clusters` names the unit that each value comes from, the game for example; by default every value is its own.
    `n` of the result counts clusters. Raises ValueError if there is no value.
    """
    array = np.asarray(values, dtype=np.float64)
    if clusters is None:
        return bootstrap_ratio(array, np.ones_like(array), rng=rng, level=level, draws=draws)
    names, index = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(index, weights=array, minlength=len(names))
    counts = np.bincount(index, minlength=len(names))
    return bootstrap_ratio(sums, counts, rng=rng, level=level, draws=draws)


def paired_difference(
    a: ArrayLike,
    b: ArrayLike,
    clusters: ArrayLike | None = None,
    *,
    rng: np.random.Generator,
    level: float = 0.95,
    draws: int = 2000,
) -> Interval:
    """Mean of `a - b`, both of shape (n,), where `a[i]` and `b[i]` are the same game played twice.

    Pairing removes the luck of the draw. `clusters` as in `bootstrap_mean`. Raises ValueError if the shapes differ.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.shape != second.shape:
        raise ValueError(
            f"a and b must hold the same games in the same order, not shapes {first.shape} and {second.shape}"
        )
    return bootstrap_mean(first - second, clusters, rng=rng, level=level, draws=draws)


# Pages ask for the same two or three of these a thousand times.
@cache
def _normal_quantile(share: float) -> float:
    return float(norm.ppf(share))


@cache
def _t_quantile(share: float, freedom: int) -> float:
    return float(t.ppf(share, freedom))


def wilson(successes: int, n: int, level: float = 0.95) -> Interval:
    """A rate with the Wilson score interval (Wilson 1927), which behaves at 0 and at 1, where games often end up."""
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"successes must lie between 0 and n, and n above 0, not {successes} of {n}")
    z = _normal_quantile((1 + level) / 2)
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # At 0 and at n the bound is exactly 0 or 1; rounding would put it a hair off.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return Interval(rate, low, high, n)


def seed_mean(means: ArrayLike, level: float = 0.95) -> Interval:
    """Mean over training seeds, shape (seeds,), with Student's t interval.

    The spread between seed means holds the luck of training and that of playing the evaluation games, so nothing below
    the seed is needed. Which games were drawn is in it only if each seed is evaluated on games of its own; on the
    same games for all, the interval is for those games, and comparisons between arms are the sharper for it. With three
    seeds this covers 95 % where a bootstrap over seeds covers little over 70 %; it is wide because three seeds say
    little.
    """
    values = np.asarray(means, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"means must be a vector with one mean for each seed, not of shape {values.shape}")
    mean, seeds = float(values.mean()), len(values)
    if seeds == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = _t_quantile((1 + level) / 2, seeds - 1) * float(values.std(ddof=1)) / math.sqrt(seeds)
    return Interval(mean, mean - half, mean + half, seeds)


def interquartile_mean(
    means: ArrayLike, *, rng: np.random.Generator, level: float = 0.95, draws: int = 2000
) -> Interval:
    """Mean of the middle half of the seeds' means, shape (seeds,), with a percentile bootstrap over seeds.

    One seed that failed, or one that was lucky, does not move it. A quarter of the seeds, rounded down, is left out at
    either end, so with fewer than four it is the plain mean. The bootstrap is too narrow for few seeds (of three it
    covers little over 70 %), so below ten seeds `seed_mean`'s interval is the one to argue from. Source: Agarwal et al.
    2021, arXiv:2108.13264. Their package rliable is not used: it brings arch, pandas and seaborn for what is one call
    of scipy here. Raises ValueError if there is no seed.
    """
    values = np.asarray(means, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"means must be a vector with one mean for each seed, not of shape {values.shape}")
    middle, seeds = float(trim_mean(values, 0.25)), len(values)
    if seeds == 1:
        return Interval(middle, math.nan, math.nan, 1)
    resampled = trim_mean(values[rng.integers(seeds, size=(draws, seeds))], 0.25, axis=1)
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(middle, float(low), float(high), seeds)


def performance_profile(means: ArrayLike, thresholds: ArrayLike, level: float = 0.95) -> list[Interval]:
    """The share of seeds whose mean is at least each threshold: how an arm does from its worst seed to its best.

    `means` has shape (seeds,), `thresholds` (thresholds,); intervals are Wilson's at each threshold by itself. An arm
    whose profile is nowhere below another's is the better one whatever is asked for. Source: Agarwal et al. 2021,
    arXiv:2108.13264, section 4.2. Raises ValueError if there is no seed.
    """
    values = np.asarray(means, dtype=np.float64)
    reached = (values[None, :] >= np.asarray(thresholds, dtype=np.float64)[:, None]).sum(1)  # (thresholds,)
    return [wilson(int(count), len(values), level) for count in reached]


def seeds_and_games(values: ArrayLike, *, rng: np.random.Generator, level: float = 0.95, draws: int = 2000) -> Interval:
    """Mean of values (seeds, games), where all seeds met the same games, with a bootstrap over seeds and over games.

    Each draw takes seeds with replacement, games with replacement, and the values where they cross (Owen 2007, "The
    pigeonhole bootstrap"): were games drawn anew for each seed, the luck that all seeds share would be averaged away.
    Use it with ten seeds or more; with fewer it is too narrow, and `seed_mean` is the honest choice. With one seed it
    is the bootstrap over games. `n` counts seeds.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"values must be of shape (seeds, games), at least one of each, not {array.shape}")
    seeds, games = array.shape
    times = [rng.multinomial(size, np.full(size, 1 / size), size=draws) for size in (seeds, games)]
    means = ((times[0] @ array) * times[1]).sum(1) / array.size  # (draws,)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(array.mean()), float(low), float(high), seeds)


# --- Planning ---------------------------------------------------------------------------------------------------------
def power(a: float, b: float, seeds: int, games: int, between: float = 0.0, level: float = 0.95) -> float:
    """How probable it is that an experiment tells arms that win `a` and `b` of their games apart.

    Each arm has `seeds` runs of `games` evaluation games, and the rates of its runs spread around its own with standard
    deviation `between`. Of several seeds the runs' differences are tested, as `arm_differences` does (two-sided t-test
    of pairs, power from the noncentral t distribution: Cohen 1988, chapter 2), as if the runs of a pair shared nothing
    but their number; a single seed has only its games (two-sided test of two proportions: Fleiss, Levin & Paik 2003,
    chapter 4), which says nothing of other seeds.
    """
    spread = math.sqrt((between**2 * 2 + (a * (1 - a) + b * (1 - b)) / games) / seeds)  # of the difference
    effect = abs(a - b) / spread
    if seeds == 1:
        critical = float(norm.ppf((1 + level) / 2))
        return float(norm.sf(critical - effect) + norm.cdf(-critical - effect))
    freedom = seeds - 1
    critical = float(t.ppf((1 + level) / 2, freedom))
    # The square of a noncentral t is a noncentral F, which scipy computes without gaps; far out it is 1.
    return float(ncf.sf(critical**2, 1, freedom, effect**2)) if effect < 10 * critical else 1.0


def games_needed(
    a: float, b: float, seeds: int, between: float = 0.0, wanted: float = 0.8, level: float = 0.95, most: int = 1 << 24
) -> int | None:
    """The fewest evaluation games a run with which `power` reaches `wanted`; None where no number up to `most` does."""
    if power(a, b, seeds, most, between, level) < wanted:
        return None
    low, high = 0, most  # power(low) < wanted <= power(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(a, b, seeds, middle, between, level) >= wanted else (middle, high)
    return high


Metrics = dict[str, Interval]

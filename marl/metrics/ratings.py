"""Ratings of a population by Bradley and Terry's model, with teams. Left out: ratings that change over time."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from envs.among_us.state import Role
from marl.metrics.among_us import of_among_us
from marl.metrics.stats import Floats, Interval, Metrics, percentiles
from marl.types import Episode

RIDGE = 0.01  # of squared ratings, beside the log-likelihood: it keeps a player who always wins finite
DRAWS, STEPS = 500, 50  # of the bootstrap; of Newton's method at most
FIRST = "first side"  # what the first side is worth, whoever plays it
ELO = 400 / math.log(10)  # Elo points of one unit
RATED = ("rating", "score/1v6", "score/population")  # metrics of a population of players
RATED_TWO = ("rating", "score/1v1", "score/population")  # of a game for two


class Match(NamedTuple):
    """A game between two sides, by the names of their players; a name stands once for each seat.

    `result`: 1 if the first side won, 0 if the second did, ½ for a draw. `seed`: games of one (training) seed are
    resampled together.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    result: float
    seed: int = 0


def match_of(episode: Episode, seed: int = 0) -> Match:
    """The match that a game was: crew against imposters, or with one role the first seat against the others.

    In Among Us nobody wins when time runs out: a draw. In other games the more points win.
    """
    if of_among_us(episode.facts):
        crew = tuple(player for agent, player in episode.players.items() if episode.roles[agent] != Role.IMPOSTER)
        guilty = tuple(player for agent, player in episode.players.items() if episode.roles[agent] == Role.IMPOSTER)
        result = {"crewmates": 1.0, "imposters": 0.0}.get(str(episode.outcome["winner"]), 0.5)
        return Match(crew, guilty, result, seed)
    one, *others = sorted(episode.players)
    points = episode.outcome["points"]
    theirs = max(points[agent] for agent in others)
    result = 0.5 + 0.5 * float(np.sign(points[one] - theirs))
    return Match((episode.players[one],), tuple(episode.players[agent] for agent in others), result, seed)


def ratings(matches: Sequence[Match], rng: np.random.Generator, ridge: float = RIDGE) -> Metrics:
    """Each player's rating in natural units with a 95 % interval, and what the first side is worth (`FIRST`).

    A side is as strong as its members' mean; log-odds of the first side are the difference, plus `FIRST`. Ratings add
    up to 0. Maximum likelihood with a small ridge; intervals resample games within seeds. Source: Bradley and Terry
    1952; teams as by Huang, Weng and Lin 2006. Raises ValueError without a match, or for a result outside 0 to 1.
    """
    if not matches:
        raise ValueError("ratings: no game was given, so nobody can be rated")
    if bad := [match for match in matches if not 0 <= match.result <= 1 or not (match.first and match.second)]:
        raise ValueError(f"ratings: {bad[0]} needs two sides and a result from 0 to 1")
    names = sorted({name for match in matches for name in (*match.first, *match.second)})
    x = np.zeros((len(matches), len(names) + 1))
    x[:, -1] = 1.0
    for row, match in zip(x, matches, strict=True):
        for side, sign in ((match.first, 1), (match.second, -1)):
            for name in side:
                row[names.index(name)] += sign / len(side)
    # Games alike in seed, sides and result count as one row with a weight.
    rows, index = np.unique(
        np.column_stack([x, [m.result for m in matches], [m.seed for m in matches]]), axis=0, return_inverse=True
    )
    x, results, seeds = rows[:, :-2], rows[:, -2], rows[:, -1]
    weights = np.bincount(index.ravel(), minlength=len(rows)).astype(float)
    (found,) = fit(x, results, weights[None], ridge)
    drawn = np.zeros((DRAWS, len(rows)))
    for seed in np.unique(seeds):
        own = seeds == seed
        size = int(weights[own].sum())
        drawn[:, own] = rng.multinomial(size, weights[own] / size, size=DRAWS)
    resampled = fit(x, results, drawn, ridge, found)
    return {name: percentiles(float(found[i]), resampled[:, i], len(matches)) for i, name in enumerate((*names, FIRST))}


def fit(x: Floats, results: Floats, weights: Floats, ridge: float, start: Floats | None = None) -> Floats:
    """Maximises the sum of weights * log-likelihood - ridge / 2 * squares by Newton's method: ratings (draws, P).

    `x` (games, P): how each rating enters the log-odds of the first side; `weights` (draws, games).
    """
    size = x.shape[1]
    found = np.zeros((len(weights), size)) + (0.0 if start is None else start)
    outer = (x[:, :, None] * x[:, None]).reshape(len(x), -1)  # (games, P * P)

    def objective(at: Floats) -> Floats:
        odds = at @ x.T
        return (weights * (results * odds - np.logaddexp(0, odds))).sum(1) - ridge / 2 * np.square(at).sum(1)

    for _ in range(STEPS):
        wins = 0.5 * (1 + np.tanh(found @ x.T / 2))  # the logistic function
        slope = (weights * (results - wins)) @ x - ridge * found
        curve = (weights * wins * (1 - wins)) @ outer
        step = np.linalg.solve(curve.reshape(-1, size, size) + ridge * np.eye(size), slope[:, :, None])[:, :, 0]
        now = objective(found)
        while (far := objective(found + step) < now - 1e-9).any():
            step[far] /= 2
        found += step
        if np.abs(step).max() < 1e-8:
            break
    return found


def elo(rating: Interval) -> Interval:
    """The rating in Elo points: 400 / log(10) times it, 0 for the population's mean."""
    return Interval(ELO * rating.mean, ELO * rating.low, ELO * rating.high, rating.n)


def table_ratings(seats: Sequence[Sequence[str]], scores: Floats, rng: np.random.Generator) -> Metrics:
    """Each player's rating in natural units, from games of any number of seats, each with a score (games, seats).

    Two seats of different players are a match that the higher score wins; players' ratings add up to 0. Intervals
    resample whole games. Raises ValueError where no game has two different players.
    """
    names = sorted({name for game in seats for name in game})
    rows, results, games = [], [], []
    for number, (game, found) in enumerate(zip(seats, scores, strict=True)):
        for i in range(len(game)):
            for j in range(i):
                if game[i] != game[j]:
                    rows.append((names.index(game[i]), names.index(game[j])))
                    results.append(0.5 + 0.5 * float(np.sign(found[i] - found[j])))
                    games.append(number)
    if not rows:
        raise ValueError("ratings: no game has two different players, so nobody can be rated")
    x = np.zeros((len(rows), len(names)))
    x[np.arange(len(rows)), [i for i, _ in rows]] = 1
    x[np.arange(len(rows)), [j for _, j in rows]] = -1
    (found,) = fit(x, np.array(results), np.ones((1, len(rows))), RIDGE)
    drawn = rng.multinomial(len(seats), np.full(len(seats), 1 / len(seats)), size=DRAWS).astype(float)
    resampled = fit(x, np.array(results), drawn[:, games], RIDGE, found)
    return {name: percentiles(float(found[i]), resampled[:, i], len(seats)) for i, name in enumerate(names)}

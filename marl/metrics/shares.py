"""Means and shares over games, with intervals."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from envs.core import TurnKind
from envs.dond import rules as dond_rules
from marl.metrics.stats import Interval, Metrics, bootstrap_mean, wilson
from marl.types import Episode, Turn

Valued = list[tuple[int, float]]  # (number of the game, value)


def mean_metrics(values: Mapping[str, Valued], rng: np.random.Generator) -> Metrics:
    """Means with intervals over games; names without a value are left out.

    If a flag holds always or never, there is nothing to resample: then the games are counted (Wilson).
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


def context(episode: Episode) -> dond_rules.Context:
    """The pool and both players' values in a game of Deal or No Deal (read from a file, they are lists)."""
    counts, (first, second) = episode.facts["counts"], episode.facts["values"]
    return dond_rules.Context(tuple(counts), (tuple(first), tuple(second)))


def rate(flags: Sequence[bool] | np.ndarray) -> Interval:
    """The share of games for which the flag holds."""
    return wilson(int(np.sum(flags)), len(flags))


def spoken(episode: Episode, players: Collection[str] | None = None) -> list[Turn]:
    """The SPEAK turns of these players (names in `Episode.players`; None: of all), in order."""
    return [t for t in episode.turns if t.kind == TurnKind.SPEAK and counts_turn(t, episode, players)]


def counts_turn(turn: Turn, episode: Episode, players: Collection[str] | None) -> bool:
    return players is None or episode.players[turn.agent] in players

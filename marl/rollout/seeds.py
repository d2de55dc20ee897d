"""Seeds: a run's games, draws and orders all follow from its seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

GAMES, SHUFFLE, EVALUATION, RENAME, WARM_START, SAMPLING, RESAMPLED = 1, 2, 3, 4, 5, 6, 7  # parts of a run's seed


@dataclass(frozen=True)
class Game:
    """A game to play: the seed that determines it given the actions, and a start position if any.

    `sampling` seeds what its players draw; None: the game's own seed does.
    """

    seed: int
    options: Mapping[str, Any] | None = None
    sampling: int | None = None


@dataclass(frozen=True)
class Seeds:
    """Seeds of the parts of training."""

    games: int  # which games are dealt
    sampling: int | None  # what players draw in them; None: each game's own seed
    shuffling: int  # the order of rows, and the new names in renamed rows

    @classmethod
    def of(cls, seed: int) -> Seeds:
        """Takes one seed for all."""
        return cls(seed, None, seed)

    def draw(self, iteration: int, count: int, group: int = 1) -> list[Game]:
        """Draws the games of an iteration (0-based); each start is played `group` times, with other draws."""
        assert count % group == 0, (count, group)
        games = draw_games(self.games, GAMES, iteration, count=count // group, sampling=self.sampling)
        if group == 1:
            return games
        return [replace(game, sampling=(self.sampling or 0) * group + k) for game in games for k in range(group)]


def draw_games(seed: int, *path: int, count: int, sampling: int | None = None) -> list[Game]:
    """Draws `count` games, always the same for a seed and a path (a part of the run, an iteration)."""
    states = np.random.SeedSequence([seed, *path]).generate_state(count, np.uint64)
    return [Game(int(s >> np.uint64(1)), sampling=sampling) for s in states]


def shuffle_seed(seed: int, iteration: int, part: int = SHUFFLE) -> int:
    """Seeds the order of rows in an iteration's update, or (RENAME) the new names in its rows."""
    return int(np.random.SeedSequence([seed, part, iteration]).generate_state(1)[0])


def sampling_seed(game: Game, seat: int) -> int:
    """Seeds all that a seat draws in a game, by the game and the seat's number, whatever else is played."""
    if game.sampling is None:
        return (game.seed * 16 + seat) % (1 << 63)
    drawn = np.random.SeedSequence([game.sampling, SAMPLING, game.seed, seat]).generate_state(1, np.uint64)
    return int(drawn[0] >> np.uint64(1))

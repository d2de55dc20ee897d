"""Seeds: the games, draws and orders of a run all follow from its seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

GAMES, SHUFFLE, EVALUATION, RENAME, WARM_START, SAMPLING = 1, 2, 3, 4, 5, 6  # named places of a run's seed


@dataclass(frozen=True)
class Game:
    """One game to play: the seed that determines it given the actions, and a start position if any. `sampling` seeds
    what its players draw, where that is not to follow from the game's own seed."""

    seed: int
    options: Mapping[str, Any] | None = None
    sampling: int | None = None


@dataclass(frozen=True)
class Seeds:
    """Of the parts of a run's training: which games are dealt, what players draw in them (None: each game's own, so
    that a game is played alike wherever it is), and in which order rows are learned from and by which other names
    they are read. What a model begins with has its base's seed."""

    games: int
    sampling: int | None
    shuffling: int

    @classmethod
    def of(cls, seed: int) -> Seeds:
        """One for all."""
        return cls(seed, None, seed)

    def draw(self, iteration: int, count: int) -> list[Game]:
        """The games of an iteration (0-based)."""
        return draw_games(self.games, GAMES, iteration, count=count, sampling=self.sampling)


def draw_games(seed: int, *path: int, count: int, sampling: int | None = None) -> list[Game]:
    """`count` games from a named place in the run (its seed, a part, an iteration): the same place, the same games."""
    states = np.random.SeedSequence([seed, *path]).generate_state(count, np.uint64)
    return [Game(int(s >> np.uint64(1)), sampling=sampling) for s in states]


def shuffle_seed(seed: int, iteration: int, place: int = SHUFFLE) -> int:
    """Seeds the order of rows in an iteration's update, or (RENAME) which names its rows get."""
    return int(np.random.SeedSequence([seed, place, iteration]).generate_state(1)[0])


def sampling_seed(game: Game, seat: int) -> int:
    """Seeds all that one seat draws in one game, choices and words: of its game and its number alone (and of `sampling`
    where the game has it), so that a game is the same whatever is played beside it."""
    if game.sampling is None:
        return (game.seed * 16 + seat) % (1 << 63)
    drawn = np.random.SeedSequence([game.sampling, SAMPLING, game.seed, seat]).generate_state(1, np.uint64)
    return int(drawn[0] >> np.uint64(1))

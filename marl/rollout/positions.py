"""Plays games of simultaneous orders among players of several kinds, all at once (see `planning/lookahead.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from marl.model.orders import OrderNet
from marl.planning.lookahead import Game, Orders, Search, States, draw, search
from marl.planning.pikl import Floats, Ints


class Player(Protocol):
    def begin(self, games: int, rng: np.random.Generator) -> None: ...

    def orders(self, states: States, rows: Ints, rng: np.random.Generator) -> Orders: ...  # of every seat


@dataclass(frozen=True)
class NetPlayer:
    """A player that plays its network's proposal (`how` None), or its plan near the anchor (None: a uniform one)."""

    game: Game
    net: OrderNet
    how: Search | None = None
    anchor: OrderNet | None = None

    def begin(self, games: int, rng: np.random.Generator) -> None:
        pass

    def orders(self, states: States, rows: Ints, rng: np.random.Generator) -> Orders:
        if self.how is None:
            legal = self.game.legal(states)
            return draw(self.net.proposed(self.game.features(states), legal), legal, 1, rng)[:, 0]
        return search(self.game, states, self.net, self.anchor, self.how, rng).drawn(
            rng, agent=self.how.agent is not None
        )


class Played(NamedTuple):
    """Positions with the orders given there, and how each game ended."""

    states: States  # (P, W)
    orders: Orders  # (P, L)
    game: Ints  # (P,)
    scores: Floats  # (G, n)


def play(game: Game, players: Sequence[Player], seats: Ints, rng: np.random.Generator) -> Played:
    """Plays G games to their end; `seats` (G, n): index in `players` of each seat's player."""
    states, rows, scores = game.start(len(seats)), np.arange(len(seats)), np.zeros(seats.shape)
    seen: list[tuple[States, Orders, Ints]] = []
    for player in players:
        player.begin(len(seats), rng)
    while len(rows):
        owner = game.owner(states).astype(np.int64)
        orders = np.full(owner.shape, -1)
        for number, player in enumerate(players):
            here = np.flatnonzero((seats[rows] == number).any(1))
            if len(here):
                own = np.take_along_axis(seats[rows[here]], owner[here].clip(0), axis=1) == number
                orders[here] = np.where(
                    own & (owner[here] >= 0), player.orders(states[here], rows[here], rng), orders[here]
                )
        seen.append((states, orders, rows))
        states = game.step(states, orders)
        over = game.over(states)
        scores[rows[over]] = game.scores(states[over])
        states, rows = states[~over], rows[~over]
    every = [np.concatenate(each) for each in zip(*seen, strict=True)]
    return Played(every[0], every[1], every[2], scores)

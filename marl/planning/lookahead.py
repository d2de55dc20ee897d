"""One-step lookahead with learned values: candidates from a proposal, a stage game, and what comes of it.

SearchBot, HedgeBot, BRBot, DORA, DNVI and Diplodocus differ in networks and in `Search` alone:

    regret matching           SearchBot, DORA         Search(solver="regret")
    hedge                     HedgeBot, DNVI          Search(lambdas=(0,))
    best response             BRBot                   Search(lambdas=(inf,), agent=0)
    DiL-piKL                  Diplodocus              Search(lambdas=(.03, .1), agent=.01)

Shapes: S positions, n players, A candidates, L slots. A slot has one player's unit or none, and an order is a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from marl.common.errors import UserError, check_choices, check_counts
from marl.model.orders import OrderNet
from marl.planning.pikl import Bools, Floats, Ints, Settings, sample
from marl.planning.stage import KAPPAS, SOLVERS, Stage, solve_stage

States = NDArray[Any]  # (S, W) rows of a game's own
Orders = NDArray[Any]  # (S, L); -1 where a slot has no unit


class Game(Protocol):
    """A game of simultaneous orders, without any state of its own; `envs/diplomacy/pure.py` is one."""

    players: int
    slots: int
    codes: int
    features_size: int

    def start(self, count: int) -> States: ...
    def owner(self, states: States) -> Orders: ...  # (S, L): the player of each slot's unit, or -1
    def legal(self, states: States) -> Bools: ...  # (S, L, codes)
    def over(self, states: States) -> Bools: ...  # (S,)
    def scores(self, states: States) -> Floats: ...  # (S, n), of sum 1, if the game ended now
    def features(self, states: States) -> NDArray[np.float32]: ...  # (S, F)
    def step(self, states: States, orders: Orders) -> States: ...
    def turned(
        self, states: States, orders: Orders, scores: Floats, by: Ints
    ) -> tuple[States, Orders, Floats]: ...  # what is the same but for who is who


@dataclass(frozen=True)
class Search:
    """Settings of a search. `lambdas`: what everybody is believed to use, each as likely; `agent`: what is played with,
    None for the same. Scores are from 0 to 1, and so lambdas are of that size."""

    solver: str = "pikl"
    lambdas: Sequence[float] = (0.03, 0.1)
    agent: float | None = None
    iterations: int = 16  # draws of each stage game
    candidates: int = 8  # of each player
    random: int = 2  # of these, drawn uniformly from what is legal
    samples: int = 24  # drawn from the proposal, of which the likeliest are candidates
    kappa: str = "published"
    averaging: str = "linear"
    iterate: str = "average"

    def __post_init__(self) -> None:
        check_choices(self, "search", solver=SOLVERS, kappa=KAPPAS)
        check_counts(self, ("iterations", "candidates", "samples"), where="search")
        if not 0 <= self.random < self.candidates:
            raise UserError(
                f"search.random={self.random}: must be from 0 to below search.candidates={self.candidates}, "
                "some of which come from the proposal"
            )
        if self.agent is not None and not self.agent >= 0:
            raise UserError(f"search.agent={self.agent}: must be a lambda, at least 0, or null for search.lambdas")
        self.settings.type_probs(1)

    @property
    def settings(self) -> Settings:
        """The solver's; the agent is a last type that nobody believes in."""
        known, own = list(self.lambdas), [] if self.agent is None else [self.agent]
        beta = [1 / len(known) for _ in known] + [0.0 for _ in own]
        return Settings(self.iterations, [*known, *own], beta, self.averaging, self.iterate)


@dataclass(frozen=True)
class Lookahead:
    """Result of a search in S positions."""

    candidates: Orders  # (S, n, A, L): orders of a player's own units, -1 in other slots
    stage: Stage

    def drawn(self, rng: np.random.Generator, agent: bool = False, explore: float = 0.0) -> Orders:
        """Orders (S, L) of all players: from what they are believed to play, or each as the agent, the last type; with
        probability `explore` a player takes any of its candidates."""
        policy = self.stage.policies[..., -1, :] if agent else self.stage.population
        if explore:
            legal = self.stage.values > -np.inf
            random = rng.random(legal.shape[:2]) < explore
            policy = np.where(random[..., None], legal / np.maximum(legal.sum(-1, keepdims=True), 1), policy)
        picked = sample([policy], 1, rng)[..., 0, 0]  # (S, n)
        orders: Orders = np.take_along_axis(self.candidates, picked[..., None, None], axis=2)[:, :, 0].max(1)
        return orders


def search(
    game: Game,
    states: States,
    net: OrderNet,
    anchor: OrderNet | None,
    how: Search,
    rng: np.random.Generator,
    given: Orders | None = None,
) -> Lookahead:
    """Plans all players' orders in S positions that are not over. `anchor`: None for a uniform one. `given`: legal
    orders (S, L) of all, which are everybody's first candidate."""
    legal, features, owner = game.legal(states), game.features(states), game.owner(states)
    own = owner[:, None, :] == np.arange(game.players)[:, None]  # (S, n, L)
    found, exists = _candidates(net.proposed(features, legal), legal, own, how, rng, given)
    if anchor is None:
        tau = exists / np.maximum(exists.sum(-1, keepdims=True), 1)
    else:
        logs = np.take_along_axis(anchor.proposed(features, legal)[:, None], found.clip(0).swapaxes(-1, -2), axis=-1)
        logs = np.where(exists, np.where(own[..., None], logs, 0.0).sum(-2), -np.inf)  # (S, n, A)
        odds = np.where(exists, np.exp(logs - np.where(exists, logs, -np.inf).max(-1, keepdims=True, initial=-1e9)), 0)
        tau = odds / np.maximum(odds.sum(-1, keepdims=True), 1e-300)
    where = np.nonzero(exists)  # (game, player, candidate) of each leaf

    def worth(before: States, orders: Orders) -> Floats:
        after = game.step(before, orders)
        found = net.expected(game.features(after))
        ended = game.over(after)
        found[ended] = game.scores(after[ended])
        return found  # (leaves, n)

    def utilities(drawn: Ints) -> Floats:
        joint = np.take_along_axis(found, drawn[..., None, None], axis=2)[:, :, 0].max(1)  # (S, L)
        games, players, _ = where
        earned = np.zeros(exists.shape)
        orders = np.where(own[games, players], found[where], joint[games])
        earned[where] = worth(states[games], orders)[np.arange(len(games)), players]
        return earned

    if game.players == 2 and exists.shape[-1] < 2 * how.iterations:  # each pair of actions once is less
        pairs = np.nonzero(exists[:, 0, :, None] & exists[:, 1, None, :])  # (game, first's, second's)
        payoffs = np.zeros((*exists.shape[::2], exists.shape[-1], 2))  # (S, A, A, 2)
        games, first, second = pairs
        payoffs[pairs] = worth(states[games], np.maximum(found[games, 0, first], found[games, 1, second]))

        def utilities(drawn: Ints) -> Floats:
            each = np.arange(len(drawn))
            return np.stack([payoffs[each, :, drawn[:, 1], 0], payoffs[each, drawn[:, 0], :, 1]], axis=1)

    return Lookahead(found, solve_stage(utilities, tau, exists, how.settings, rng, how.solver, how.kappa))


def draw(logprobs: Floats, legal: Bools, count: int, rng: np.random.Generator) -> Orders:
    """Independent orders of all units, (S, count, L), from (S, L, codes); -1 where a slot has no unit."""
    ladder = np.cumsum(np.exp(logprobs) * legal, axis=-1)
    heights = rng.random((*ladder.shape[:2], count)) * ladder[..., -1:]  # (S, L, count)
    picked = (ladder[:, :, None, :] > heights[..., None]).argmax(-1).swapaxes(1, 2)
    return np.where(np.asarray(legal.any(-1))[:, None], picked, -1)


def _candidates(
    logprobs: Floats, legal: Bools, own: Bools, how: Search, rng: np.random.Generator, given: Orders | None
) -> tuple[Orders, Bools]:
    """Different actions of each player (S, n, A, L), and which of them exist (S, n, A): what is given, some drawn
    uniformly, and the likeliest of those drawn from the proposal."""
    uniform, first = np.where(legal, 0.0, -np.inf), [] if given is None else [given[:, None]]
    joint = np.concatenate(
        [*first, draw(uniform, legal, how.random, rng), draw(logprobs, legal, how.samples, rng)], axis=1
    )  # (S, M, L)
    joint = np.where(own[:, :, None], joint[:, None], -1)  # (S, n, M, L)
    each = np.take_along_axis(logprobs[:, None], joint.clip(0).swapaxes(-1, -2), axis=-1)  # (S, n, L, M)
    rank = np.where(own[..., None], each, 0.0).sum(-2)  # (S, n, M)
    rank[..., : how.random + len(first)] += 1e9
    rank[..., : len(first)] += 1e9
    key = joint @ (rng.integers(1, 1 << 40, joint.shape[-1]))  # tells actions apart
    order = np.argsort(key, axis=-1, kind="stable")
    again = np.zeros(key.shape, np.bool_)
    ordered = np.take_along_axis(key, order, axis=-1)
    np.put_along_axis(again, order[..., 1:], ordered[..., 1:] == ordered[..., :-1], axis=-1)
    rank[again | ~own.any(-1, keepdims=True)] = -np.inf
    best = np.argsort(-rank, axis=-1, kind="stable")[..., : how.candidates]
    exists = np.take_along_axis(rank, best, axis=-1) > -np.inf
    found = np.take_along_axis(joint, best[..., None], axis=2)
    return np.where(exists[..., None], found, -1), exists

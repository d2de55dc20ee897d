"""The trainer of one-step lookahead: values of a small Markov game solved exactly, conventions, exact resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from envs.diplomacy.pure import Pure
from marl.agents.scripted.pure import Population
from marl.algorithms.lookahead import Data, Learner, LookaheadConfig, load, regress, save, train_lookahead
from marl.common.errors import UserError
from marl.model.orders import OrderNet
from marl.planning import lookahead
from marl.planning.lookahead import Search, search
from marl.planning.pikl import Bools, Floats, Ints
from marl.rollout.positions import NetPlayer, play

END = 9
# What follows each pair of orders: the first player's score, or 10 + the next position.
NEXT = np.array([
    [[11, 0.2, 0.7], [0.6, 12, 0.1], [0.3, 0.8, 10]],  # position 0, which may come again
    [[0.9, 0.6, 0.8], [0.0, 0.5, 0.9], [0.1, 0.4, 0.2]],
    [[0.1, 0.9, 11], [0.7, 0.2, 0.5], [11, 0.3, 0.6]],
])  # fmt: skip


class Chain:
    """Game of two players with one unit each, three orders, three positions, and an end. A state is a position and the
    first player's score in percent."""

    players, slots, codes, features_size = 2, 2, 3, 3

    def start(self, count: int) -> np.ndarray:
        return np.stack([np.arange(count) % 3, np.zeros(count, int)], axis=1)

    def owner(self, states: np.ndarray) -> np.ndarray:
        return np.broadcast_to(np.arange(2), (len(states), 2))

    def legal(self, states: np.ndarray) -> Bools:
        return np.ones((len(states), 2, 3), bool)

    def over(self, states: np.ndarray) -> Bools:
        return states[:, 0] == END

    def scores(self, states: np.ndarray) -> Floats:
        return np.stack([states[:, 1] / 100, 1 - states[:, 1] / 100], axis=1)

    def features(self, states: np.ndarray) -> np.ndarray:
        return np.eye(3, dtype=np.float32)[states[:, 0] % 3]

    def step(self, states: np.ndarray, orders: np.ndarray) -> np.ndarray:
        found = NEXT[states[:, 0], orders[:, 0], orders[:, 1]]
        ends = found < 10
        place, score = np.where(ends, END, found - 10), np.where(ends, found * 100, 0)
        return np.stack([place, score], axis=1).round().astype(int)

    def turned(
        self, states: np.ndarray, orders: np.ndarray, scores: Floats, by: Ints
    ) -> tuple[np.ndarray, np.ndarray, Floats]:
        return states, orders, scores


def matrix_value(matrix: Floats) -> float:
    """Returns the value of a zero-sum game for the row player, by linear programming."""
    rows, columns = matrix.shape
    found = linprog(
        np.r_[np.zeros(rows), -1], np.c_[-matrix.T, np.ones(columns)], np.zeros(columns), np.r_[np.ones(rows), 0][None],
        [1], [(0, 1)] * rows + [(None, None)],
    )  # fmt: skip
    return float(-found.fun)


def exact_values() -> Floats:
    """The first player's values (3,) by value iteration (Shapley 1953)."""
    values = np.zeros(3)
    for _ in range(100):
        worth = np.where(NEXT < 10, NEXT, values[(NEXT - 10).clip(0).astype(int)])
        values = np.array([matrix_value(matrix) for matrix in worth])
    return values


def net_of(game: Any, seed: int = 0, width: int = 32) -> OrderNet:
    torch.manual_seed(seed)
    return OrderNet(game.features_size, game.players, game.slots, game.codes, width)


SMALL = LookaheadConfig(
    Search("regret", iterations=30, candidates=3, random=2, samples=8), iterations=60, games=64, replay=2000,
    batch=128, updates=8, learning_rate=3e-3,
)  # fmt: skip


@pytest.mark.parametrize("how", [{"solver": "regret"}, pytest.param({"lambdas": (0.0,)}, marks=pytest.mark.slow)])
def test_values_are_those_of_the_game_solved_exactly(how: dict[str, Any]) -> None:
    """DNVI's fixed point in a zero-sum Markov game is its value; uniform play is worth something else."""
    game, config = Chain(), replace(SMALL, search=replace(SMALL.search, **how))
    learner, seen = Learner(game, net_of(game), config), []
    train_lookahead(game, learner, None, config, 0, lambda learner, metrics: seen.append(metrics))
    features = game.features(game.start(3))
    exact, found = exact_values(), learner.net.expected(features)
    assert found[:, 0] == pytest.approx(exact, abs=0.03) and found.sum(1) == pytest.approx(1)
    assert np.abs(uniform_values() - exact).max() > 0.06
    assert len(seen) == config.iterations and seen[-1]["loss/value"] < seen[0]["loss/value"]
    # The proposal learns what is played, so that what never pays is hardly proposed.
    played = np.exp(learner.net.proposed(features, game.legal(game.start(3))))
    assert played[1, 0, 0] > 0.7 and played[1, 1, 1] > 0.7


def uniform_values() -> Floats:
    values = np.zeros(3)
    for _ in range(100):
        values = np.where(NEXT < 10, NEXT, values[(NEXT - 10).clip(0).astype(int)]).mean((1, 2))
    return values


def test_only_anchored_search_keeps_the_convention() -> None:
    """Search near an anchor meets where the anchor does, in a game of pure coordination, and so does a player among
    others that play the anchor. Search without an anchor may meet anywhere."""
    game = Meeting()
    anchor = net_of(game)
    data = Data(game.start(64), np.full((64, 2), 2), np.full((64, 2), 0.5))
    learner = Learner(game, anchor, SMALL)
    regress(game, learner, data, replace(SMALL, proposal_weight=1.0), 30, np.random.default_rng(0))
    how = Search(lambdas=(0.1,), iterations=40, candidates=3, random=2, samples=8)
    near = search(game, game.start(16), net_of(game), anchor, how, np.random.default_rng(0))
    assert (near.drawn(np.random.default_rng(0)) == 2).mean() > 0.95
    free = search(game, game.start(16), net_of(game), None, replace(how, lambdas=(0.0,)), np.random.default_rng(0))
    assert (free.drawn(np.random.default_rng(0)) == 2).mean() < 0.7
    greedy = search(
        game, game.start(16), anchor, anchor, replace(how, lambdas=(1e9,), agent=0.0), np.random.default_rng(0)
    )
    assert (greedy.drawn(np.random.default_rng(0), agent=True) == 2).all()  # the best response to it
    seats = np.tile([0, 1], (40, 1))
    met = play(game, [NetPlayer(game, anchor), NetPlayer(game, anchor, how, anchor)], seats, np.random.default_rng(0))
    assert met.scores[:, 0].mean() > 0.95 and len(met.states) == 40


class Meeting(Chain):
    """Game in which both win by giving the same order. It has one end, where the first score is 1 if they met."""

    def start(self, count: int) -> np.ndarray:
        return np.zeros((count, 2), int)

    def scores(self, states: np.ndarray) -> Floats:
        return np.repeat(states[:, 1:] / 100.0, 2, axis=1)

    def step(self, states: np.ndarray, orders: np.ndarray) -> np.ndarray:
        return np.stack([np.full(len(states), END), 100 * (orders[:, 0] == orders[:, 1])], axis=1)


def test_a_stopped_training_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    game, config = Pure(2), LookaheadConfig(Search(iterations=3, candidates=4), 6, 8, replay=30, batch=16, updates=2)
    anchor = net_of(game, 1, 8)
    whole, lines = Learner(game, net_of(game, width=8), config), []

    def after(learner: Learner, metrics: dict[str, float]) -> None:
        lines.append(metrics)
        if learner.iteration == 3 and len(lines) == 3:
            save(learner, tmp_path / "kept", note=[1])

    train_lookahead(game, whole, anchor, config, 0, after)
    again = Learner(game, net_of(game, 5, width=8), config)
    load(again, tmp_path / "kept")
    assert again.iteration == 3 and len(again.replay.states) == 24
    train_lookahead(game, again, anchor, config, 0, after)
    assert lines[3:6] == lines[6:] and (again.states == whole.states).all() and len(whole.replay.states) == 30
    for one, other in zip(whole.net.parameters(), again.net.parameters(), strict=True):
        assert torch.equal(one, other)
    for mine, theirs in zip(whole.replay, again.replay, strict=True):
        assert (mine == theirs).all()
    (tmp_path / "kept" / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"damaged file state.json\. Remove that folder"):
        load(again, tmp_path / "kept")
    save(whole, tmp_path / "kept")
    with pytest.raises(UserError, match="is damaged, or of another version"):
        load(Learner(game, net_of(game, width=16), config), tmp_path / "kept")


def test_given_orders_are_the_first_candidates() -> None:
    """All three orders are candidates here, so a policy held fast by the anchor has the anchor's probabilities."""
    game, net = Chain(), net_of(Chain())
    regress(
        game, Learner(game, net, SMALL), Data(game.start(3), np.array([[0, 1], [1, 2], [2, 0]]), np.full((3, 2), 0.5)),
        replace(SMALL, proposal_weight=1.0), 10, np.random.default_rng(0),
    )  # fmt: skip
    states, given = game.start(30), np.arange(60).reshape(30, 2) % 3
    how = Search(lambdas=(1e9,), agent=0.0, iterations=20, candidates=4, random=3, samples=64)
    found = search(game, states, net, net, how, np.random.default_rng(0), given)
    for player in range(2):
        assert (found.candidates[:, player, 0, player] == given[:, player]).all()
    exact = np.exp(net.proposed(game.features(states), game.legal(states)))
    wanted = np.take_along_axis(exact, given[..., None], -1)[..., 0]
    assert found.stage.policies[:, :, 0, 0] == pytest.approx(wanted, abs=1e-5) and np.ptp(wanted) > 0.1
    assert (np.abs(found.stage.policies[:, :, 1, 0] - wanted) > 0.1).any()  # nothing holds the agent


def test_candidates_are_different_legal_actions_of_ones_own_units() -> None:
    game, rng = Pure(4), np.random.default_rng(2)
    population = Population(game)
    states = play(game, [population], np.zeros((6, 7), int), rng).states
    found = search(game, states, net_of(game), None, Search(iterations=2), rng)
    legal, owner = game.legal(states), game.owner(states)
    exists = found.stage.values > -np.inf
    for s in range(0, len(states), 7):
        for power in range(7):
            own = owner[s] == power
            rows = found.candidates[s, power][exists[s, power]]
            assert bool(len(rows)) == bool(own.any()) and len({tuple(row) for row in rows}) == len(rows) <= 8
            assert (rows[:, ~own] == -1).all()
            assert all(legal[s, place, order] for row in rows for place, order in enumerate(row) if own[place])
    orders = found.drawn(rng, explore=0.5)
    assert ((orders >= 0) == (owner >= 0)).all()
    assert (np.take_along_axis(legal, orders.clip(0)[..., None], -1)[..., 0] | (owner < 0)).all()


def test_each_pair_of_actions_of_two_players_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are those of evaluating pairs draw by draw."""
    game, states = Chain(), Chain().start(6)
    net = OrderNet(game.features_size, game.players, game.slots, game.codes, width=8)
    with torch.no_grad():
        net.values[-1].weight.normal_(generator=torch.Generator().manual_seed(0))
    caught: list[Any] = []
    solve = lookahead.solve_stage

    def noting(utilities: Any, *rest: Any) -> Any:
        caught.append(utilities)
        return solve(utilities, *rest)

    monkeypatch.setattr(lookahead, "solve_stage", noting)
    for iterations in (1, 8):  # three actions each: three are fewer than two times eight
        how = Search(lambdas=(0,), iterations=iterations, candidates=3, random=0)
        search(game, states, net, None, how, np.random.default_rng(0))
    by_draw, at_once = caught
    for pair in np.ndindex(3, 3):
        drawn = np.tile(pair, (6, 1))
        np.testing.assert_allclose(by_draw(drawn), at_once(drawn), atol=1e-6)
    assert np.ptp(at_once(np.zeros((6, 2), int))) > 0.1

"""The arrays of the maps for two against the adjudicator of the package."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`: pip install 'diplomacy==1.1.2'")

from envs.diplomacy.board import Board, Kind, unit_of
from envs.diplomacy.duel import MAPS, Duel


@pytest.fixture(scope="module", params=MAPS)
def game(request: pytest.FixtureRequest) -> Duel:
    return Duel(request.param, years=2)


def drawn(game: Duel, states: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws legal orders, in which many units go where others do, and support often fits."""
    legal = game.legal(states)
    fought = rng.integers(0, game.slots, (len(states), 1, 1))
    toward = game.steps[0][game.goal, fought].clip(max=20)  # (S, P, codes): steps from a place that all look at
    eager = rng.random((len(states), 1, 1)) < 0.7
    orders = ((rng.random(legal.shape) - 0.2 * eager * toward + 9) * legal).argmax(-1)
    for row, place in zip(*np.nonzero(game.owner(states) >= 0), strict=True):
        other = rng.choice(np.flatnonzero(game.owner(states)[row] >= 0))
        goal = game.goal[other, orders[row, other]] if game.own[other, orders[row, other]] else other
        fits = legal[row, place] & (game.source[place] == other) & (game.goal[place] == goal)
        if place != other and fits.any() and rng.random() < 0.6:
            orders[row, place] = fits.argmax()
    return orders


def crowded(game: Duel, rng: np.random.Generator) -> np.ndarray:
    """Draws a position with sixteen units of both sides near one another, in which most centres are owned."""
    state = game.start(1)
    units, forms, owned = game.parts(state)
    units[:], forms[:], owned[:] = -1, 0, rng.permutation(np.repeat([0, 1, -1], [14, 14, 6]))
    near = np.argsort(game.steps.min(0)[rng.integers(game.slots)], kind="stable")[:22]
    for place in rng.permutation(near)[:16]:
        own = [form for form in range(3) if game.near[place, form].any()]
        units[0, place], forms[0, place] = rng.integers(2), rng.choice(own)
    return state


def set_up(game: Duel, board: Board, state: np.ndarray) -> None:
    """Puts a position of the arrays on the board."""
    owned = game.parts(state)[2][0]
    units = units_of(game, state[0])
    centres = {
        power: tuple(game.provinces[p] for p in game.centres[owned == player])
        for player, power in enumerate(game.powers)
    }
    first = Board(board.map_name, years=game.years).state()
    board.restore(
        replace(
            first, units=tuple(tuple(units[p]) for p in board.powers), influence=tuple(() for _ in board.powers),
            centres=tuple(centres[p] for p in board.powers), options=None,
        )
    )  # fmt: skip


def test_the_first_orders_are_those_of_the_board(game: Duel) -> None:
    states = game.start(1)
    assert states.shape == (1, 2 * 75 + 34 + 2) and game.scores(states).tolist() == [[0.5, 0.5]]
    assert game.features(states).shape == (1, game.features_size) and game.win == 18
    legal = game.legal(states)[0]
    texts = {game.order_text(states[0], p, c) for p in range(game.slots) for c in np.flatnonzero(legal[p])}
    options = Board(game_map(game)).options()
    board = {order for own in options.values() for given in own.values() for order in given}
    assert {order for order in board if "VIA" not in order and " C " not in order} == texts


def game_map(game: Duel) -> str:
    return MAPS["GERMANY" in game.powers]


@pytest.mark.parametrize("games", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_whole_games_are_those_of_the_package(game: Duel, games: int) -> None:
    """The board takes the retreats, builds and disbandments that the arrays make by rule, and checks that they are
    allowed."""
    rng, board = np.random.default_rng(games), Board(game_map(game), years=game.years)
    fights = 0
    for number in range(games):
        states = game.start(1) if number % 10 == 0 else crowded(game, rng)
        set_up(game, board, states)
        while not game.over(states)[0]:
            assert board.kind is Kind.MOVES
            orders = drawn(game, states, rng)
            mine: dict[str, list[str]] = {power: [] for power in game.powers}
            for place in np.flatnonzero(game.owner(states)[0] >= 0):
                text = game.order_text(states[0], place, orders[0, place])
                mine[game.powers[game.owner(states)[0, place]]].append(text)
            board.process(mine)
            assert not board.corrections
            states = game.step(states, orders)
            wanted = units_of(game, states[0])
            while not board.over and board.kind is not Kind.MOVES:
                fights += board.kind is Kind.RETREATS
                board.process(by_rule(game, board, wanted))
                assert not [each for own in board.corrections.values() for each in own if "missing" not in each]
            owned = board.owned()
            for player, power in enumerate(game.powers):
                held = game.centres[game.parts(states)[2][0] == player]
                assert sorted(game.provinces[p] for p in held) == list(owned[power])
                if not board.over:
                    assert sorted(board.units()[power]) == sorted(wanted[power]), (board.phase, mine)
            assert board.over == game.over(states)[0]
            assert board.scores() == pytest.approx(game.scores(states)[0])
    assert fights > 3


def units_of(game: Duel, state: np.ndarray) -> dict[str, list[str]]:
    """The units of each power as the package names them."""
    units, forms, _ = (part[0] for part in game.parts(state[None]))
    return {
        power: [f"{'F' if forms[p] else 'A'} {game.names[p, forms[p]]}" for p in np.flatnonzero(units == player)]
        for player, power in enumerate(game.powers)
    }


def by_rule(game: Duel, board: Board, wanted: dict[str, list[str]]) -> dict[str, list[str]]:
    """Orders of retreats and builds by the rules of this project."""
    owned, found = board.owned(), {}
    for power, own in board.options().items():
        if board.kind is Kind.RETREATS:
            for unit, options in own.items():
                ways = [order for order in options if " R " in order]
                rank = [(order.split()[3][:3] not in owned[power], order.split()[3]) for order in ways]
                found.setdefault(power, []).append(ways[rank.index(min(rank))] if ways else f"{unit} D")
        elif next(iter(own), "").startswith("BUILD"):
            options = next(iter(own.values()))
            first = [f"{unit} B" for unit in Board(board.map_name).units()[power]]
            places = game.builds[game.powers.index(power)]
            ordered = sorted(first, key=lambda order: [game.provinces[p] for p, _ in places].index(order[2:5]))
            found[power] = [order for order in ordered if order in options][: len(own)]
        elif own:
            found[power] = [f"{unit} D" for unit in board.units()[power] if unit not in wanted[power]]
    assert all(unit_of(order) for orders in found.values() for order in orders)
    return found

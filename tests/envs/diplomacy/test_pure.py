"""The arrays of `pure` against the adjudicator of the package, and what is known of the map."""

import importlib.util

import numpy as np
import pytest

from envs.diplomacy.adjudication import adjudicate
from envs.diplomacy.pure import (
    CODES,
    FROM,
    HOMES,
    PLACES,
    POWERS,
    SEASON,
    TO,
    WIDTH,
    YEAR,
    N,
    Pure,
    Small,
    order_text,
)  # fmt: skip

GAME = Pure(years=4)


def order(text: str) -> int:
    """The code of an order such as `VIE - LON`, `LON H`, `PAR S VIE - LON`, `PAR S LON`."""
    words = [HOMES.index(word) for word in text.split() if word in HOMES]
    if " S " in text:
        return words[1] * N + words[-1]
    return words[0] * N + words[-1]


def drawn(states: Small, rng: np.random.Generator) -> Small:
    """Draws legal orders, in which support often fits."""
    legal = GAME.legal(states)
    fought = rng.integers(0, N, (len(states), 1, 1)) == TO  # a province that many look at
    found = ((rng.random(legal.shape) + 0.5 * (rng.random(legal.shape) < 0.4) * fought) * legal).argmax(-1)
    rows = np.arange(len(states))
    for place in range(N):
        other = rng.integers(0, N, len(states))
        theirs = found[rows, other]
        code = other * N + np.where(FROM[theirs] == other, TO[theirs], other)
        fits = legal[rows, place, code] & (rng.random(len(states)) < 0.5)
        found[:, place] = np.where(fits, code, found[:, place])
    return found.astype(np.int8)


def of(powers: str, *orders: str) -> tuple[list[bool], list[int]]:
    """Returns which moves succeed, and the power in each province afterwards (-1 for none). `powers` has a digit for
    each province, or a dot for an empty one."""
    units = np.array([[-1 if each == "." else int(each) for each in powers]], np.int8)
    codes = (PLACES * (N + 1)).astype(np.int8)[None].copy()  # everybody holds
    for each in orders:
        codes[0, HOMES.index(each.split()[0])] = order(each)
    states = GAME.start(1)
    states[:, :N] = units
    won = adjudicate(units.T, FROM[codes].T, TO[codes].T, PLACES[:, None])[:, 0]
    return won.tolist(), GAME.step(states, codes)[0, :N].tolist()


def test_orders_and_first_position() -> None:
    states = GAME.start(2)
    assert states.shape == (2, WIDTH) and GAME.legal(states).sum(-1).tolist() == [[43] * N] * 2
    assert GAME.scores(states) == pytest.approx(1 / 7) and not GAME.over(states).any()
    assert GAME.features(states).shape == (2, GAME.features_size)
    states[:, :N] = [0, -1, -1, 1, -1, -1, -1]
    assert GAME.legal(states).sum(-1)[0].tolist() == [13, 0, 0, 13, 0, 0, 0]  # hold, six moves, six supports


@pytest.mark.parametrize(
    ("powers", "orders", "after"),
    [
        ("0123456", ["VIE - LON", "PAR - LON"], [0, 1, 2, 3, 4, 5, 6]),  # all bounce
        ("0123456", ["VIE - LON", "LON - VIE"], [0, 1, 2, 3, 4, 5, 6]),  # head to head
        ("0123456", ["VIE - LON", "LON - PAR", "PAR - VIE"], [2, 0, 1, 3, 4, 5, 6]),  # a circle
        ("0123456", ["VIE - LON", "PAR S VIE - LON"], [-1, 0, 2, 3, 4, 5, 6]),  # nowhere to go: the attacker came
        ("01234.6", ["VIE - LON", "PAR S VIE - LON"], [-1, 0, 2, 3, 4, 1, 6]),  # goes to the empty province
        ("0123456", ["VIE - LON", "PAR S VIE - LON", "BER - PAR"], [0, 1, 2, 3, 4, 5, 6]),  # support is cut
        ("0123456", ["VIE - LON", "PAR S VIE - LON", "LON - PAR"], [-1, 0, 2, 3, 4, 5, 6]),  # not by the attacked one
        ("0023456", ["VIE - PAR", "LON S VIE - PAR"], [-1, 0, 0, 3, 4, 5, 6]),
        ("0003456", ["VIE - PAR", "LON S VIE - PAR"], [0, 0, 0, 3, 4, 5, 6]),  # not against one's own
        ("0123456", ["VIE - LON", "PAR S VIE - LON", "LON H", "BER S LON"], [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_known_positions(powers: str, orders: list[str], after: list[int]) -> None:
    assert of(powers, *orders)[1] == after


def test_a_year_has_a_winner_and_an_end() -> None:
    states = GAME.start(1)
    hold = (PLACES * (N + 1)).astype(np.int8)[None]
    for half in range(2 * GAME.years):
        assert not GAME.over(states).any() and states[0, [SEASON, YEAR]].tolist() == [half % 2, half // 2]
        states = GAME.step(states, hold)
    assert GAME.over(states).all() and GAME.scores(states) == pytest.approx(1 / 7)
    won = GAME.start(1)
    won[:, N : 2 * N] = [0, 0, 0, 0, 1, 1, 2]
    assert GAME.over(won).all() and GAME.scores(won)[0].tolist() == [1, 0, 0, 0, 0, 0, 0]
    won[:, N : 2 * N] = [0, 0, 0, 1, 1, 2, 3]
    assert not GAME.over(won).any() and GAME.scores(won)[0] == pytest.approx(np.array([9, 4, 1, 1, 0, 0, 0]) / 15)
    for bad in (0, 101):
        with pytest.raises(ValueError, match="years must be"):
            Pure(bad)


def test_turning_the_powers_round_the_table_gives_the_same_game() -> None:
    rng = np.random.default_rng(3)
    states = GAME.start(200)
    for _ in range(6):
        by = rng.integers(0, N, len(states))
        orders = drawn(states, rng)
        turned, theirs, scores = GAME.turned(states, orders, GAME.scores(states), by)
        assert (GAME.scores(turned) == scores).all()
        here = np.take_along_axis(GAME.legal(turned), theirs[..., None].astype(int), -1)[..., 0]
        assert (here == (turned[:, :N] >= 0)).all()
        states = GAME.step(states, orders)
        again = GAME.turned(states, orders, GAME.scores(states), by)[0]
        after = GAME.step(turned, theirs)
        plain = np.r_[0 : 2 * N, SEASON, YEAR]  # of several attackers the last province counts, which turns
        assert (after[:, plain] == again[:, plain]).all()
        states = states[~GAME.over(states)]


@pytest.mark.skipif(importlib.util.find_spec("diplomacy") is None, reason="needs the package diplomacy")
@pytest.mark.parametrize("games", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_whole_games_are_those_of_the_package(games: int) -> None:
    """The board takes the retreats and builds that the arrays make by rule, checks that they are allowed, and ends up
    the same."""
    from envs.diplomacy.board import Board, Kind

    assert CODES == 49
    rng, board = np.random.default_rng(games), Board("pure", years=GAME.years)
    first = board.state()
    for _ in range(games):
        board.restore(first)
        states = GAME.start(1)
        while not GAME.over(states)[0]:
            assert board.kind is Kind.MOVES
            orders = drawn(states, rng)
            mine = {power: [] for power in POWERS}
            for place in np.flatnonzero(states[0, :N] >= 0):
                mine[POWERS[states[0, place]]].append(order_text(place, orders[0, place]))
            legal = {power: {o for options in own.values() for o in options} for power, own in board.options().items()}
            assert all(set(own) <= legal[power] for power, own in mine.items())
            board.process(mine)
            before, states = states, GAME.step(states, orders)
            while not board.over and board.kind is not Kind.MOVES:
                given: dict[str, list[str]] = {}
                for power, own in board.options().items():
                    home = POWERS.index(power)
                    for unit, options in own.items():
                        if board.kind is Kind.ADJUSTMENTS:
                            given[power] = [o for o in options if o.endswith("B")]
                            continue
                        ways = [HOMES.index(o[-3:]) for o in options if " R " in o]
                        rank = [
                            -1 if w == home else (w - home) % N + (0 if before[0, N + w] == home else N) for w in ways
                        ]
                        if ways:
                            way = HOMES[ways[int(np.argmin(rank))]]
                            given.setdefault(power, []).append(f"{unit} R {way}")
                board.process(given)
                assert not board.corrections
            units = [next((i for i, p in enumerate(POWERS) if f"A {h}" in board.units()[p]), -1) for h in HOMES]
            owned = [next((i for i, p in enumerate(POWERS) if h in board.owned()[p]), -1) for h in HOMES]
            assert states[0, N : 2 * N].tolist() == owned
            assert board.over == GAME.over(states)[0]
            if not board.over:
                assert states[0, :N].tolist() == units
            assert board.scores() == pytest.approx(GAME.scores(states)[0])

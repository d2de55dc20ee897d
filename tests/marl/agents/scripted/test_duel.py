"""Scripted players of the maps for two: what they order is legal, and has a reason."""

import numpy as np
import pytest

pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`: pip install 'diplomacy==1.1.2'")

from envs.diplomacy.duel import Duel
from marl.agents.scripted.duel import TEMPERS, DuelPopulation
from marl.rollout.positions import play

GAME = Duel(years=4)


def test_orders_are_legal_in_whole_games() -> None:
    played = play(GAME, [DuelPopulation(GAME)], np.zeros((20, 2), np.int64), np.random.default_rng(0))
    legal, owner = GAME.legal(played.states), GAME.owner(played.states)
    chosen = np.take_along_axis(legal, played.orders.clip(0)[..., None].astype(np.int64), -1)[..., 0]
    assert (chosen == (owner >= 0)).all() and ((played.orders < 0) == (owner < 0)).all()
    np.testing.assert_allclose(played.scores.sum(1), 1)


@pytest.mark.parametrize("temper", TEMPERS)
def test_temperaments_differ_in_where_they_go(temper: str) -> None:
    """Players without mistakes are moved four times: grabbers hold more than eight centres, attackers come within two
    steps of the other's homes, and guards do not."""
    players = DuelPopulation(GAME, mistakes=0.0)
    states, rng = GAME.start(30), np.random.default_rng(0)
    players.begin(30, rng)
    players.tempers[:] = TEMPERS.index(temper)
    rows = np.arange(30)
    for _ in range(4):
        states = GAME.step(states, players.orders(states, rows, rng))
    units, _, owned = GAME.parts(states)
    centres = (owned >= 0).sum(1).mean()
    there = np.mean([GAME.from_home[1][units[row] == 0].min() for row in rows])
    if temper == "grab":
        assert centres > 8  # six of them are homes
    elif temper == "attack":
        assert there <= 2
    elif temper == "guard":
        assert there > 2


def test_who_goes_where_a_friend_goes_supports_it() -> None:
    players = DuelPopulation(GAME, mistakes=0.0)
    players.begin(1, np.random.default_rng(0))
    players.tempers[:] = TEMPERS.index("attack")
    state = GAME.start(1)
    units, forms, owned = GAME.parts(state)
    number = {name: i for i, name in enumerate(GAME.provinces)}
    units[:], forms[:], owned[:] = -1, 0, -1
    units[0, [number["BUR"], number["GAS"], number["PAR"]]] = [0, 0, 1]  # AUSTRIA round PAR
    owned[0, GAME.centres == number["PAR"]] = 1
    orders = players.orders(state, np.arange(1), np.random.default_rng(0))[0]
    texts = [GAME.order_text(state[0], number[name], orders[number[name]]) for name in ("BUR", "GAS")]
    assert texts == ["A BUR - PAR", "A GAS S A BUR - PAR"]

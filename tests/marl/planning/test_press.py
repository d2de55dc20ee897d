"""Planning with talk in Diplomacy, against stage games that are solved by hand or by brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envs.diplomacy.pure import CODES, HOMES, POWERS, N, Pure, order_text
from marl.common.errors import UserError
from marl.planning import pikl
from marl.planning.press import PressConfig, payoffs, plan_order

VIE, LON, PAR, BER, ROM, MOS, CON = range(N)
START = Pure().start(1)
FALL = START.copy()
FALL[0, 3 * N] = 1


def certain(**orders: str) -> np.ndarray:
    """Anchors (N, CODES): these orders by province, `source goal`, or to hold."""
    found = np.zeros((N, CODES))
    for place in range(N):
        source, goal = (
            HOMES.index(each) for each in orders.get(HOMES[place], f"{HOMES[place]} {HOMES[place]}").split()
        )
        found[place, source * N + goal] = 1.0
    return found


def planned(anchors: np.ndarray, pairs: np.ndarray | None = None, state: np.ndarray = START, **settings: Any) -> Any:
    """Returns a plan for PAR. Nobody has told PAR anything, unless `pairs` says so."""
    if pairs is None:
        pairs = np.stack([np.broadcast_to(anchors[PAR], anchors.shape), anchors], axis=1)
    return plan_order(state, PAR, anchors[PAR], pairs, PressConfig(**settings), np.random.default_rng(0))


def anything(anchors: np.ndarray) -> np.ndarray:
    """Returns the anchors with PAR doing anything legal, all equally likely."""
    legal = Pure().legal(START)[0, PAR]
    found = anchors.copy()
    found[PAR] = legal / legal.sum()
    return found


def test_a_payoff_is_the_score_if_every_unit_kept_what_it_stands_in() -> None:
    rng, legal = np.random.default_rng(1), Pure().legal(START)
    orders = (rng.random((40, *legal.shape[1:])) * legal).argmax(-1)
    found = payoffs(START, orders)
    assert np.allclose(found.sum(-1), 1)
    assert np.array_equal(found, payoffs(FALL, orders))  # in spring as in fall, where it is the game's own
    after = Pure().step(np.repeat(FALL, 40, axis=0), orders)
    assert np.array_equal(found, Pure().scores(after)) and len({*map(tuple, found.tolist())}) > 1


def test_who_is_supported_goes_where_the_support_takes_it() -> None:
    plan = planned(anything(certain(BER="PAR CON")), candidates=43)
    assert order_text(PAR, plan.own) == "A PAR - CON"
    assert plan.values[plan.chosen] == pytest.approx(4 / 9)  # two centres, and five powers with one
    alone = planned(anything(certain()), candidates=43)
    assert alone.values.max() == pytest.approx(1 / 7)


def test_values_are_those_of_every_order_against_what_the_others_do() -> None:
    anchors = anything(certain(BER="PAR CON", ROM="ROM MOS", LON="ROM MOS"))
    plan = planned(anchors, candidates=43)
    orders = np.tile(anchors.argmax(-1), (len(plan.orders), 1))
    orders[:, PAR] = plan.orders
    assert np.allclose(plan.values, payoffs(START, orders)[:, POWERS.index("FRANCE")])


def test_games_of_two_are_those_of_brute_force() -> None:
    state = FALL.copy()
    state[0, [VIE, MOS, CON, ROM]] = -1  # three units are left: LON, PAR, BER
    legal = Pure().legal(state)[0]
    rng = np.random.default_rng(2)
    anchors = np.where(legal, rng.random(legal.shape) ** 4, 0.0)
    anchors[LON] = 0.0
    anchors[LON, LON * N + LON] = 1.0  # which is certain, so that nothing is drawn in the game of PAR and BER
    anchors = anchors / np.maximum(anchors.sum(-1, keepdims=True), 1e-9)
    plan = planned(anchors, state=state, candidates=4, lambdas=(0.05,), iterations=200)
    row = plan.others.tolist().index(BER)
    ours, theirs = np.zeros((4, 4)), np.zeros((4, 4))
    for a, own in enumerate(plan.orders):
        for b, other in enumerate(plan.theirs[row]):
            orders = np.zeros((1, N), np.int64)
            orders[0, [LON, PAR, BER]] = LON * N + LON, own, other
            (scores,) = payoffs(state, orders)
            ours[a, b], theirs[a, b] = scores[PAR], scores[BER]
    assert np.allclose(plan.gains[row], ours)
    taus = [each / each.sum() for each in (anchors[PAR, plan.orders], anchors[BER, plan.theirs[row]])]
    settings = PressConfig(lambdas=(0.05,), iterations=200).settings
    wanted = pikl.solve([ours, theirs], taus, settings).population[1]
    assert np.allclose(plan.expected[row], wanted, atol=1e-9)


def test_values_are_means_over_what_the_others_may_do() -> None:
    """BER supports PAR into CON or not, and ROM cuts that support or not: each half of the time."""
    anchors = anything(certain())
    anchors[BER] = anchors[ROM] = 0.0
    anchors[BER, [PAR * N + CON, BER * N + BER]] = 0.5
    anchors[ROM, [ROM * N + BER, ROM * N + ROM]] = 0.5
    plan = planned(anchors, candidates=43, draws=4000, lambdas=(1e3,))  # everybody plays its anchor
    move = int(np.flatnonzero(plan.orders == PAR * N + CON)[0])
    assert plan.values[move] == pytest.approx(0.25 * 4 / 9 + 0.75 / 7, abs=0.01)


def test_what_a_pair_says_is_believed_of_the_other_alone() -> None:
    """BER has promised its support to PAR; everything else that is known says that everybody holds."""
    anchors = anything(certain())
    pairs = np.stack([np.broadcast_to(anchors[PAR], anchors.shape), anchors], axis=1)
    pairs[BER, 1] = certain(BER="PAR CON")[BER]
    plan = planned(anchors, pairs, candidates=43)
    assert order_text(PAR, plan.own) == "A PAR - CON" and plan.values.max() == pytest.approx(4 / 9)


def test_the_reader_is_expected_to_order_what_is_worth_most_and_plausible() -> None:
    anchors = anything(certain())
    anchors[BER] = 0.0
    anchors[BER, [BER * N + BER, PAR * N + CON, PAR * N + MOS]] = 0.85, 0.1, 0.05
    plan = planned(anchors, candidates=43, lambdas=(1e3,))
    moves = {int(code): i for i, code in enumerate(plan.orders)}
    plan = type(plan)(**{**vars(plan), "chosen": moves[PAR * N + CON]})
    assert plan.of_reader(BER, 0.1) == PAR * N + CON  # more than a tenth of .85
    assert plan.of_reader(BER, 0.2) == BER * N + BER
    plan = type(plan)(**{**vars(plan), "chosen": moves[PAR * N + MOS]})
    assert plan.of_reader(BER, 0.1) == BER * N + BER  # .05 is less


@pytest.mark.parametrize(
    "bad",
    [{"lambdas": ()}, {"strength": -1.0}, {"floor": 0.0}, {"candidates": 0}, {"plausible": 2.0}, {"iterations": 0}],
)
def test_bad_settings_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"cicero.press.{next(iter(bad))}"):
        PressConfig(**bad)

"""Seats of `pure` in texts: what they know is the position as arrays, and what they plan is what is ordered."""

import numpy as np
import pytest

from envs import diplomacy_v0
from envs.core import Style
from envs.diplomacy.pure import POWERS, N, Pure, Small
from marl.agents.pure import PurePlayer
from marl.common.errors import UserError

pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`")
GAME = Pure(5)


def bold(game: Pure, states: Small, rng: np.random.Generator) -> Small:
    """Legal orders at random, many of them about one province, so that units are dislodged."""
    fought = np.arange(N * N) % N == states[0].sum() % N
    legal = game.legal(states)
    return (rng.random(legal.shape) * legal * (1 + 2.0 * fought)).argmax(-1).astype(np.int8)


@pytest.mark.parametrize("style", Style)
def test_seats_know_the_position_and_order_what_they_plan(style: Style) -> None:
    """Every position that a seat plans in follows, by the arrays, from the position before and the orders that all
    seats planned there. The games are whole games of the package."""
    dislodged = 0
    for seed in range(3):
        env = diplomacy_v0.parallel_env(years=GAME.years, press="private", style=style)
        seen, infos = env.reset(seed=seed)
        seats = {agent: PurePlayer(bold, number) for number, agent in enumerate(env.possible_agents)}
        states, phases = GAME.start(1), 0
        while env.agents:
            replies = {}
            for agent, each in seen.items():
                if each["turn"]:
                    replies[agent] = seats[agent].reply(each["text"], each["options"])
                else:
                    seats[agent].observe(each["text"])
            planned = [seat for seat in seats.values() if seat.planned[0] == seat.seen.phases > phases]
            if planned:
                phases, orders = planned[0].seen.phases, np.full((1, N), -1, np.int8)
                for seat in planned:
                    assert seat.position().tolist() == states.tolist()
                    own = states[0, :N] == POWERS.index(seat.seen.power)
                    orders[0, own] = seat.planned[1][own]
                assert ((orders >= 0) == (states[:, :N] >= 0)).all()  # everybody has planned
                states = GAME.step(states, orders)
            seen, _, _, _, infos = env.step(replies)
            assert not any(info["error"] for info in infos.values())
            dislodged += any("dislodged" in fate for fate in env.board.results.values())
        outcome = infos["player_0"]["outcome"]
        of = {power: outcome["points"][agent] for agent, power in outcome["powers"].items()}
        assert GAME.over(states)[0] and GAME.scores(states)[0] == pytest.approx([of[power] for power in POWERS])
    assert dislodged


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"map_name": "standard_germany_italy"}, r"knows the map pure alone, and met .*\. Seat another player"),
        ({"win_centres": 6}, r"wins by 4 centres, not by 6\. Seat another player"),
    ],
)
def test_other_maps_and_victories_are_refused(rules: dict[str, object], said: str) -> None:
    seen, _ = diplomacy_v0.parallel_env(**rules).reset(seed=0)
    with pytest.raises(UserError, match=said):
        PurePlayer(bold, 0).observe(seen["player_0"]["text"])

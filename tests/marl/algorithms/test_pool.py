"""Past selves: what is kept, who plays when, and how wins count."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from marl.algorithms.pool import Pool
from marl.model.policy import Policy
from marl.rollout.cast import RoleConfig
from marl.storage.checkpoint import read_card
from marl.types import Payment
from tests.marl.episodes import meeting_game
from tests.marl.models import tiny_policy


def pool(folder: Path, learner: Policy, pick: str = "uniform", memory: dict[str, float] | None = None) -> Pool:
    seats = RoleConfig("rival", "base", 0.5, pool=2, pick=pick)
    return Pool(seats, learner, tiny_policy(), folder, 7, {} if memory is None else memory, {"game": "among_us"})


def mark(policy: Policy, value: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(value)


def marked(policy: Policy) -> set[float]:
    return {round(float(p.detach().flatten()[0]), 3) for p in policy.parameters()}


def test_past_selves_play_as_they_were_and_a_stopped_run_draws_the_same(tmp_path: Path) -> None:
    learner = tiny_policy()
    played = pool(tmp_path / "whole", learner)
    drawn, here = [], None
    for iteration in range(7):
        mark(learner, iteration / 10)
        played.begin(iteration)
        drawn.append(played.drawn)
        assert played.drawn in range(0, iteration + 1, 2)
        assert marked(played.policy) == {played.drawn / 10}
    assert len(set(drawn)) > 1
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == [f"rival-00000{n}" for n in (0, 2, 4, 6)]
    assert read_card(played.place(4))["iteration"] == 4 and read_card(played.place(4))["game"] == "among_us"
    here = pool(tmp_path / "whole", learner)  # begins anew at iteration 5, with the folder that is there
    again = []
    for iteration in (5, 6):
        mark(learner, iteration / 10)
        here.begin(iteration)
        again.append(here.drawn)
        assert marked(here.policy) == {here.drawn / 10}
    assert again == drawn[5:]


def test_past_selves_that_win_more_play_more(tmp_path: Path) -> None:
    memory = {"0/games": 8.0, "0/wins": 0.0, "2/games": 8.0, "2/wins": 8.0}
    by_wins = pool(tmp_path, tiny_policy(), "wins", memory).chances(5)
    # (0 + 1) / 10, (8 + 1) / 10, and 1 / 2 for the one that has not played yet.
    assert by_wins == pytest.approx({0: 0.1 / 1.5, 2: 0.9 / 1.5, 4: 0.5 / 1.5})
    assert pool(tmp_path, tiny_policy(), memory=memory).chances(5) == pytest.approx({0: 1 / 3, 2: 1 / 3, 4: 1 / 3})


def test_wins_are_counted_by_who_played(tmp_path: Path) -> None:
    each = pool(tmp_path, tiny_policy())
    each.drawn = 2
    game = meeting_game()
    past = replace(game, players={**game.players, "player_0": "past_rival"})
    won = replace(past, payments=(Payment("player_0", 12, 1.0),))
    lost = replace(past, payments=tuple(Payment(f"player_{i}", 12, 1.0) for i in range(1, 6)))
    each.note([won, lost, won, game])  # in the last one it does not play
    assert Counter(each.memory) == Counter({"2/games": 3.0, "2/wins": 2.0})
    everybody = replace(game, players=dict.fromkeys(game.players, "past_rival"))
    each.note([everybody])
    assert each.memory["2/games"] == 3.0

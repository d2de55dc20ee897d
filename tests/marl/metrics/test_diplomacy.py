"""Metrics of Diplomacy against figures by hand; they need no package."""

import numpy as np
import pytest

from marl.metrics.diplomacy import diplomacy_metrics
from marl.types import Episode


def episode(held_by: str, points: list[float], centres: list[int], winner: str | None, year: int) -> Episode:
    """A game of three seats, of the players whose first letters these are."""
    agents = [f"player_{seat}" for seat in range(3)]
    names = {"a": "alice", "b": "bob"}
    outcome = {
        "winner": winner, "how": "solo" if winner else "years", "year": year, "messages": 4,
        "points": dict(zip(agents, points, strict=True)), "centres": dict(zip(agents, centres, strict=True)),
        "powers": dict(zip(agents, ("FRANCE", "ITALY", "TURKEY"), strict=True)),
    }  # fmt: skip
    players = {agent: names[letter] for agent, letter in zip(agents, held_by, strict=True)}
    return Episode(0, players, dict.fromkeys(agents, "power"), {}, (), (), (), outcome, 1)


def test_scores_centres_and_solos_by_player() -> None:
    games = [episode("aab", [0, 0, 1], [1, 0, 4], "TURKEY", 3), episode("abb", [0.5, 0.25, 0.25], [2, 1, 1], None, 5)]
    found = {name: interval.mean for name, interval in diplomacy_metrics(games, np.random.default_rng(0)).items()}
    assert found == pytest.approx({
        "game/solo": 0.5, "game/years": 4, "game/messages": 4, "game/score": 2 / 6, "game/centres": 9 / 6,
        "game/score/alice": 0.5 / 3, "game/centres/alice": 1, "game/solo/alice": 0,
        "game/score/bob": 1.5 / 3, "game/centres/bob": 2, "game/solo/bob": 1 / 3,
    })  # fmt: skip
    alone = diplomacy_metrics([episode("aaa", [1, 0, 0], [4, 0, 0], "FRANCE", 2)], np.random.default_rng(0))
    assert set(alone) == {"game/solo", "game/years", "game/messages", "game/score", "game/centres"}


def test_scores_of_some_players_alone() -> None:
    games = [episode("aab", [0, 0, 1], [1, 0, 4], "TURKEY", 3), episode("abb", [0.5, 0.25, 0.25], [2, 1, 1], None, 5)]
    found = diplomacy_metrics(games, np.random.default_rng(0), {"alice"})
    assert found["game/score"] == found["game/score/alice"] and found["game/centres"].mean == 1
    assert "game/score" not in diplomacy_metrics(games, np.random.default_rng(0), {"carol"})

"""Metrics that are logged of an iteration, against figures worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from envs.core import TurnKind
from marl.metrics.evaluation import metrics
from marl.metrics.training import episode_metrics
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from tests.marl.batches import PLANNED
from tests.marl.episodes import ejection_game, meeting_game


def test_crewmates_that_learn() -> None:
    found = episode_metrics([meeting_game(), meeting_game(1, "crewmates")], {"learner"})
    assert found["game/win_rate/crewmates"] == 0.5
    assert found["vote/imposter"] == pytest.approx(1 / 3)  # Green, not Blue, and Yellow voted for nobody
    assert found["vote/witness"] == pytest.approx(1 / 3)  # Green
    assert found["talk/names_imposter"] == 1 / 4  # Pink's does not count
    answers = [0.9, 0.25, 0.55, 0.45]  # Green's and Blue's
    assert found["belief/log_loss"] == pytest.approx(-np.log(answers).mean())


def test_a_player_that_sits_in_no_game_has_no_score() -> None:
    found = episode_metrics([meeting_game(), ejection_game()], {"rare"})
    assert "game/score" not in found and found["game/win_rate/crewmates"] == 0.5 and found["talk/turns"] == 0
    agent = scripted("dond", "mixture")
    games = rollout(draw_games(3, count=8), everyone(agent), env_maker({"game": "dond"}), 8)
    assert any(game.outcome["deal"] for game in games)
    found = episode_metrics(games, {"rare"})
    assert not [name for name in found if "score" in name or "points" in name] and all(map(np.isfinite, found.values()))


def test_entropy_of_choices() -> None:
    game = ejection_game()
    chances = iter((0.5, 0.25, 1.0, 0.125))  # of the four choices; what was said has none to do with it
    turns = tuple(
        replace(t, logprobs=(float(np.log(next(chances))),) if t.kind == TurnKind.CHOOSE else (-9.0, -9.0))
        for t in game.turns
    )
    found = episode_metrics([replace(game, turns=turns)], {"learner"})
    assert found["choices/entropy"] == pytest.approx(np.log(2) * (1 + 2 + 0 + 3) / 4)
    assert "choices/entropy" not in episode_metrics([game], {"learner"})  # no model, no probabilities


def test_floored_anchors_are_a_mean_over_plans() -> None:
    game, shares = ejection_game(), iter((0.25, 0.0, 0.5, 0.0))
    turns = tuple(
        replace(t, planned=replace(PLANNED, floored=next(shares))) if t.kind == TurnKind.CHOOSE else t
        for t in game.turns
    )
    planned = [replace(game, turns=turns)]
    assert episode_metrics(planned, {"learner"})["plan/floored"] == 0.75 / 4
    assert metrics(planned, "among_us", players={"learner"})["plan/floored"].mean == 0.75 / 4
    assert "plan/floored" not in episode_metrics([game], {"learner"})
    assert "plan/floored" not in metrics([game], "among_us")


def test_figures_equal_those_of_evaluation() -> None:
    games = [meeting_game(), ejection_game()]
    found, table = episode_metrics(games, {"learner"}), metrics(games, "among_us", players={"learner"})
    shared = [name for name in table if name in found and name != "belief/accuracy"]  # there, ties count in part
    assert len(shared) == 10
    assert {name: found[name] for name in shared} == pytest.approx({name: table[name].mean for name in shared})


def test_a_speaker_without_room_has_no_length() -> None:
    game = meeting_game()
    *_, lost = (t for t in game.turns if t.kind == TurnKind.SPEAK)
    turns = tuple(
        replace(t, start=9, message="") if t is lost else replace(t, start=0, reply_ids=(1, 2)) for t in game.turns
    )
    games = [replace(game, turns=turns)]
    assert games[0].outgrown
    assert episode_metrics(games, {"learner"})["talk/tokens_per_turn"] == 2
    assert metrics(games, "among_us", players={"learner"})["talk/tokens_per_turn"].mean == 2


def test_figures_of_negotiations_equal_those_of_evaluation() -> None:
    agent = scripted("dond", "mixture")
    games = rollout(draw_games(3, count=40), everyone(agent), env_maker({"game": "dond", "objective": 0.5}), 40)
    found, table = episode_metrics(games, {"mixture"}), metrics(games, "dond", 0.5)
    names = (
        "game/score", "game/score_agreed", "game/points", "game/agreement", "game/pareto", "game/pareto_agreed",
        "talk/turns", "talk/vocabulary", "talk/cut", "errors/aborted",
    )  # fmt: skip
    assert 0 < found["game/agreement"] < 1 and found["talk/vocabulary"] > 20
    assert found["talk/inverted_explicit"] <= found["talk/inverted"] < found["talk/inverted_chance"] < 0.1
    assert {name: found[name] for name in names} == pytest.approx({name: table[name].mean for name in names})
    # Some games end with replies that were refused: of a turn that never came to anything.
    broken = [replace(g, turns=(*g.turns[:-1], *2 * [replace(g.turns[-1], error="no tag")])) for g in games[:9]]
    tried = [*broken, *games[9:]]
    of_tables = metrics(tried, "dond", 0.5)["errors/per_turn"].mean
    assert episode_metrics(tried, {"mixture"})["errors/per_turn"] == pytest.approx(of_tables)
    assert of_tables > episode_metrics(games, {"mixture"})["errors/per_turn"]
    points = np.array([[game.outcome["points"][agent] for agent in game.players] for game in games])
    scores, deal = points + 0.5 * points[:, ::-1], np.array([game.outcome["deal"] for game in games])
    assert found["game/score_sd"] == pytest.approx(scores.std())
    assert found["game/score_agreed_sd"] == pytest.approx(scores[deal].std())

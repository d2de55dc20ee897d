"""Planted ratings are recovered, and a match is what the game was."""

import math
from dataclasses import replace

import numpy as np
import pytest

from marl.metrics.ratings import ELO, FIRST, Match, elo, match_of, ratings, table_ratings
from tests.marl.episodes import deal_game, episode, failed_game, meeting_game, propose

PLANTED = {"a": 1.0, "b": 0.25, "c": -0.25, "d": -1.0}
CREW_IS_WORTH = 0.4


def planted(rng: np.random.Generator, games: int, sides: tuple[int, int] = (4, 1)) -> list[Match]:
    """Games of random sides, of which the first is as strong as its mean, plus what it is worth."""
    found = []
    for game in range(games):
        one, two = (tuple(str(n) for n in rng.choice(list(PLANTED), size)) for size in sides)
        odds = np.mean([PLANTED[n] for n in one]) - np.mean([PLANTED[n] for n in two]) + CREW_IS_WORTH
        found.append(Match(one, two, float(rng.random() < 1 / (1 + math.exp(-odds))), game % 3))
    return found


@pytest.mark.parametrize("sides", [(1, 1), (4, 1), (6, 1)])
def test_planted_ratings_are_recovered(sides: tuple[int, int]) -> None:
    found = ratings(planted(np.random.default_rng(0), 4000, sides), np.random.default_rng(1))
    for name, rating in {**PLANTED, FIRST: CREW_IS_WORTH}.items():
        assert found[name].mean == pytest.approx(rating, abs=0.25), (name, found)
    assert sum(found[name].mean for name in PLANTED) == pytest.approx(0, abs=1e-6)


def test_intervals_cover() -> None:
    """Intervals of 95 % hold the planted rating in at least 88 % of cases: 40 sets of games, four players."""
    covered = [
        found[name].low <= PLANTED[name] <= found[name].high
        for seed in range(40)
        for found in [ratings(planted(np.random.default_rng(seed), 300, (1, 1)), np.random.default_rng(seed))]
        for name in PLANTED
    ]
    assert 0.88 <= np.mean(covered) <= 1.0


def test_two_players_by_hand() -> None:
    """Three wins of four, in both orders alike: the odds are 3 to 1, a ridge of nothing apart."""
    one, two = ("a",), ("b",)
    games = [Match(one, two, 1.0)] * 3 + [Match(one, two, 0.0)] + [Match(two, one, 0.0)] * 3 + [Match(two, one, 1.0)]
    found = ratings(games, np.random.default_rng(0), ridge=1e-7)
    assert found["a"].mean - found["b"].mean == pytest.approx(math.log(3), abs=1e-6)
    assert found[FIRST].mean == pytest.approx(0, abs=1e-6)
    assert elo(found["a"]).mean - elo(found["b"]).mean == pytest.approx(400 * math.log10(3), abs=1e-4)
    assert abs(ELO - 173.7178) < 1e-4
    draws = ratings([Match(one, two, 0.5)] * 5, np.random.default_rng(0))
    assert draws["a"].mean == pytest.approx(0, abs=1e-9)


def test_a_player_that_always_wins_has_a_finite_rating() -> None:
    found = ratings([Match(("a",), ("b",), 1.0)] * 30, np.random.default_rng(0))
    assert all(math.isfinite(i.mean) for i in found.values()) and found["a"].mean > 1


def test_matches_of_games() -> None:
    game = meeting_game()
    match = match_of(game, 7)
    assert match == Match(("learner",) * 4 + ("base",), ("base",), 0.0, 7)
    assert match_of(replace(game, outcome={**game.outcome, "winner": "crewmates"})).result == 1.0
    assert match_of(replace(game, outcome={**game.outcome, "winner": None})).result == 0.5
    assert match_of(deal_game(players=("x", "y"))) == Match(("x",), ("y",), 1.0)  # 9 points to 4
    assert match_of(failed_game()).result == 0.5
    lost = episode([propose("player_0", 0, (1, 0, 0))], claims=((1, 0, 0), (0, 1, 3)), players=("x", "y"))
    assert match_of(lost).result == 0.0


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="no game was given"):
        ratings([], np.random.default_rng(0))
    with pytest.raises(ValueError, match="a result from 0 to 1"):
        ratings([Match(("a",), ("b",), 2.0)], np.random.default_rng(0))


def test_ratings_from_games_of_many_seats() -> None:
    """Scores whose differences are logistic, with what the players are worth, give the ratings back; a game that is
    there twice narrows nothing that whole games don't."""
    rng, names = np.random.default_rng(0), list(PLANTED)
    seats = [[str(n) for n in rng.choice(names, 5)] for _ in range(600)]
    strengths = np.array([[PLANTED[name] for name in row] for row in seats])
    scores = strengths + rng.gumbel(size=strengths.shape)  # differences of Gumbels are logistic
    found = table_ratings(seats, scores, np.random.default_rng(1))
    middle = np.mean([PLANTED[name] for name in names])
    for name in names:
        assert found[name].mean == pytest.approx(PLANTED[name] - middle, abs=0.2)
        assert found[name].low < found[name].mean < found[name].high and found[name].n == 600
    two = table_ratings([["a", "b"]] * 4 + [["b", "a"]], np.array([[1, 0.0]] * 3 + [[0, 1]] + [[1, 1]]), rng)
    assert two["a"].mean - two["b"].mean == pytest.approx(math.log(3.5 / 1.5), abs=0.02)
    with pytest.raises(ValueError, match="nobody can be rated"):
        table_ratings([["a", "a"]], np.zeros((1, 2)), rng)

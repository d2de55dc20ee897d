"""A crew with a password is found, one without is found at the stated rate."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from envs.core import TurnKind
from marl.common.errors import UserError
from marl.metrics.codes import Speaker, detected, listened_to, password_metrics, speakers
from marl.types import Episode, Turn
from tests.marl.episodes import deal_game, meeting_game

FORMS = [f"form {i}" for i in range(30)]


def games(
    rng: np.random.Generator, count: int = 60, password: float = 0.0, form: str = "form 3", again: float = 0.5
) -> list[Speaker]:
    """Games of four crewmates and an imposter, two or more messages each. Crewmates say the password with this
    probability, else anything; everybody likes to repeat itself, and imposters live longer."""
    found = []
    for game in range(count):
        for seat in range(5):
            said: list[str] = []
            for _ in range(2 + 2 * (seat == 0) * (game % 2)):
                drawn = said[-1] if said and rng.random() < again else str(rng.choice(FORMS))
                said.append(form if seat and rng.random() < password else drawn)
            found.append(Speaker(game, game, Counter(said), int(seat == 0)))
    return found


def test_a_password_is_found() -> None:
    share, p = detected(games(np.random.default_rng(0), password=0.8), np.random.default_rng(1))
    assert share.mean > 0.9 and share.low > 0.85 and p < 0.01
    always = games(np.random.default_rng(0), password=1.0)
    assert detected(always, np.random.default_rng(1), 20)[0].mean == 1.0


def test_without_a_code_it_is_found_at_the_stated_rate() -> None:
    found = [detected(games(np.random.default_rng(s), 30), np.random.default_rng(s), 39) for s in range(200)]
    positives = sum(p <= 0.05 for _, p in found)
    assert 3 <= positives <= 18  # of 200 at .05: the binomial's 99 % interval
    assert np.mean([share.mean for share, _ in found]) == pytest.approx(0.5, abs=0.02)


def meeting(password: bool, seed: int) -> Episode:
    """Returns `meeting_game` with other words: the crew says a password if there is one, and everybody else says
    anything."""
    game = meeting_game(seed)
    rng = np.random.default_rng(seed)
    text = ["i saw nothing", "i was in {}", "did anyone see {}"]
    turns = []
    for turn in game.turns:
        if turn.kind is TurnKind.SPEAK:
            crew = password and turn.role == "crewmate"
            said = "blue sky" if crew else str(rng.choice(text)).format(rng.choice(["lab", "red"]))
            turn = replace(turn, text=said, message=said)
        turns.append(turn)
    return replace(game, turns=tuple(turns), facts={**game.facts, "height": 2})


def test_the_whole_way_from_games() -> None:
    coded, plain = ([meeting(password, seed) for seed in range(40)] for password in (True, False))
    found = password_metrics(coded, np.random.default_rng(0), ["learner"], permutations=50)
    assert found["talk/password"].mean == 1.0 and found["talk/password_p"].mean == pytest.approx(1 / 51)
    assert 0.3 < password_metrics(plain, np.random.default_rng(0), permutations=50)["talk/password"].mean < 0.7


def test_speakers_and_votes_by_hand() -> None:
    people = speakers([meeting_game()])
    assert [(p.label, sum(p.forms.values())) for p in people] == [(1, 1), (0, 1), (0, 2), (0, 1), (0, 1)]
    # In the order of the living: Red, Blue, Green, Yellow, Pink. Green and Pink vote for Red, Blue and Red for Green.
    assert [p.label for p in listened_to([meeting_game()])] == [1, 0, 1, 0, 0]
    # The learners Blue, Green and Yellow alone: Green votes for Red, Blue for Green.
    assert [p.label for p in listened_to([meeting_game()], ["learner"])] == [1, 0, 1, 0, 0]
    assert [p.label for p in listened_to([meeting_game()], ["base"])] == [1, 0, 1, 0, 0]


def test_other_games_are_refused() -> None:
    with pytest.raises(UserError, match="no games of Among Us"):
        password_metrics([deal_game()], np.random.default_rng(0))
    silent = replace(meeting_game(), turns=tuple(t for t in meeting_game().turns if t.kind is not TurnKind.SPEAK))
    assert "talk/password" not in password_metrics([silent], np.random.default_rng(0))


def test_a_turn_without_words_counts_as_no_form() -> None:
    mute = replace(meeting_game(), turns=(*meeting_game().turns, Turn("player_0", "imposter", 20, TurnKind.SPEAK, "")))
    assert [p.forms for p in speakers([mute])] == [p.forms for p in speakers([meeting_game()])]

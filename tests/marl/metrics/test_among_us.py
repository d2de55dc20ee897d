"""Metrics of finished games of Among Us, against what players noted down while they played them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.core import TurnKind
from marl.agents.scripted.among_us import RandomPlayer
from marl.agents.scripted.among_us_language import Statement
from marl.agents.text import TextAgent
from marl.metrics.among_us import Message, read_game, template
from marl.rollout.games import env_maker
from marl.rollout.rollout import rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode, Turn
from tests.marl.episodes import meeting_game


class Notes(RandomPlayer):
    """Plays at random and writes down, at each message, who lives and whom it has seen kill. Often replies nonsense."""

    def __init__(self, seed: int, notes: list[tuple[set[str], set[str]]]) -> None:
        super().__init__(seed)
        self.notes = notes

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        reply = super().reply(text, options)
        return "what?" if options and self.rng.random() < 0.2 else reply

    def speak(self) -> Statement:
        self.notes.append((set(self.others()), set(self.kills) & set(self.living)))
        return super().speak()


@cache
def play(games: int, **settings: Any) -> tuple[list[Episode], dict[int, list[tuple[set[str], set[str]]]]]:
    """Random games, and everybody's notes by the seed of its seat."""
    notes: dict[int, list[tuple[set[str], set[str]]]] = defaultdict(list)
    agent = TextAgent("random", lambda seed, role: Notes(seed, notes[seed]))
    make_env = env_maker({"game": "among_us", "style": "compact", **settings})
    cast = lambda game, env: dict.fromkeys(env.possible_agents, agent)  # noqa: E731
    return rollout(draw_games(3, 1, count=games), cast, make_env, 32), notes


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"style": "natural", "task_steps": 5, "walk_steps": 1, "cooldown": 1},
        {"players": 7, "imposters": 2, "imposters_report": True, "cooldown": 3, "tasks": 10, "task_steps": 9},
    ],
    ids=["default", "natural", "many"],
)
def test_games_are_read_as_players_lived_them(settings: dict[str, Any]) -> None:
    episodes, notes = play(30, **settings)
    knowers = 0
    for episode in episodes:
        record = read_game(episode)
        names, guilty = episode.facts["names"], {episode.facts["names"][a] for a in episode.facts["imposters"]}
        own = defaultdict(list)
        for message in record.messages:
            assert set(message.imposters) == guilty & set(message.others)
            own[message.turn.agent].append((set(message.others), set(message.seen)))
            knowers += bool(message.seen)
        for seat, agent in enumerate(names):
            assert own[agent] == notes.get((episode.seed * 16 + seat) % (1 << 63), []), (episode.seed, agent)
        assert [m.turn for m in record.messages] == [turn for turn in episode.turns if turn.message]
        crew = [vote for vote in record.votes if vote.turn.role == "crewmate"]
        assert len(crew) == episode.outcome["votes"]
        assert sum(vote.right for vote in crew) == episode.outcome["votes_for_imposter"]
        assert sum(map(bool, record.ejected)) == episode.outcome["ejections"]
        assert record.reports >= episode.outcome["discussions"] >= len(record.ejected)
        for vote in record.votes:
            at_once = [names[other.turn.agent] for other in record.votes if other.turn.step == vote.turn.step]
            assert sorted(vote.living) == sorted(at_once) and set(vote.imposters) == guilty & set(at_once)
    assert knowers > 10
    assert any(turn.error.endswith("skip.") for episode in episodes for turn in episode.turns)


def test_a_discussion_by_hand() -> None:
    record = read_game(meeting_game())
    assert (record.ejected, record.reports) == (("",), 1)
    assert [vote.target for vote in record.votes] == ["Green", "Green", "Red", "", "Red"]
    assert [message.seen for message in record.messages] == [("Red",), (), (), (), (), ("Red",)]
    named = [("Red",), ("Green",), ("Green",), ("Red", "Green"), (), ()]
    assert [message.named for message in record.messages] == named
    assert [message.accused for message in record.messages] == [("Red",), (), ("Green",), (), (), ()]
    assert {message.others for message in record.messages if message.turn.agent == "player_2"} == {
        ("Red", "Blue", "Yellow", "Pink")
    }


def test_a_vote_in_which_all_are_refused_is_a_vote() -> None:
    error = "'pnik' is none of the options (red, skip). It counts as skip."
    game = meeting_game()
    record = read_game(replace(game, turns=tuple(replace(t, error=error) if t.step == 12 else t for t in game.turns)))
    assert [vote.target for vote in record.votes] == [""] * 5 and record.ejected == ("",)


def said(
    text: str, others: tuple[str, ...] = ("Red", "Blue", "Pink"), imposters: tuple[str, ...] = ("Red",)
) -> Message:
    turn = Turn("player_0", "crewmate", 0, TurnKind.SPEAK, text, message=text)
    return Message(turn, tuple(others), tuple(imposters), ())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("It's RED!", ("Red",)),
        ("pink,blue", ("Blue", "Pink")),
        ("Red's lying", ("Red",)),
        ("I reddened, she was tired of blueberries", ()),
        ("green did it", ()),  # dead, or the speaker itself
        ("", ()),
    ],
)
def test_names_are_whole_words_of_living_others(text: str, named: tuple[str, ...]) -> None:
    assert said(text).named == named


def test_accusations_are_those_of_the_grammar() -> None:
    assert said("I think it is Red. Blue was near the body.").accused == ("Red", "Blue")
    assert said("i saw green kill yellow").accused == ()
    assert said("i trust red").accused == () and said("i trust red").named == ("Red",)


@given(st.integers(1, 6), st.data())
def test_chance_is_that_of_names_drawn_at_random(size: int, data: st.DataObject) -> None:
    others = tuple("ABCDEF"[:size])
    imposters = others[: data.draw(st.integers(0, size))]
    count = data.draw(st.integers(0, size))
    message = said("", others, imposters)
    draws = list(combinations(others, count))
    assert message.chance(count) == pytest.approx(sum(message.meets(drawn) for drawn in draws) / len(draws))


def test_templates() -> None:
    assert template("i saw red kill  orange in lab") == "i saw {name} kill {name} in {room}"
    assert template("Orange and I were in room (1,0).") == "{name} and i were in {room}."
    assert template("I came from (0, 1)!") == "i came from {room}!"
    assert template("nothing here, tired") == "nothing here, tired"

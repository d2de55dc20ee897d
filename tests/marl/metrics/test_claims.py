"""Claims in games written out by hand, and of players who tell the truth or lie."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from envs.core import Style, TurnKind
from marl.agents.scripted.among_us import CarefulCrewmate, RandomPlayer
from marl.agents.scripted.among_us_language import FORMS, Statement, Topic
from marl.agents.text import TextAgent
from marl.metrics.among_us import Moves, Reply, story
from marl.metrics.claims import FACTS, VERDICTS, claim_metrics, claims_of, counted
from marl.report.transcripts import episode_from_json, episode_to_json
from marl.rollout.games import env_maker
from marl.rollout.rollout import rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode, Turn
from tests.marl.episodes import beliefs, episode, imposter_game, meeting_game, message, propose


def found(texts: list[str], speaker: str = "Green") -> list[bool | None]:
    """Truth of each claim in these messages of one player in `meeting_game`."""
    game = meeting_game()
    agent = next(agent for agent, name in game.facts["names"].items() if name == speaker)
    role = game.roles[agent]
    moves = [t for t in game.turns if t.step < 6]
    said = [Turn(agent, role, 6 + i, TurnKind.SPEAK, text, message=text) for i, text in enumerate(texts)]
    game = replace(game, turns=(*moves, *said), facts={**game.facts, "height": 2})
    return [claim.true for claim in claims_of(game)]


# In a grid of two by two all start in bridge, east of which lies galley. Red kills Orange in bridge; Green sees it.
# Blue and Pink have walked to galley by then, and Pink comes back. Yellow does a task in bridge. Green reports.
@pytest.mark.parametrize(
    ("text", "true"),
    [
        ("red killed orange i saw it", True),
        ("i saw red kill blue", False),
        ("i saw blue kill orange", False),
        ("I saw Red kill Orange.", True),
        ("i last saw orange with red", True),
        ("yellow was the last one with orange", True),  # stood there, busy
        ("orange was alone with blue", False),
        ("pink was near the body", True),  # came back
        ("i saw blue run from the body", False),  # had set off for galley when Red killed
        ("i last saw blue with pink", True),  # both in galley, before Pink came back
        ("pink was in galley", True),
        ("i saw red in galley", False),
        ("i met purple in bridge", False),  # nobody of this game
        ("i was with blue in bridge", True),
        ("pink and i were in galley", False),
        ("i was in bridge", True),
        ("i came from galley", False),
        ("i was in reactor", False),  # outside the grid
        ("i did a task in bridge", False),
        ("red is the imposter", True),
        ("it is not red", False),
        ("blue is innocent", True),
        ("it was not me", True),
        ("red: the clever fox", None),
    ],
)
def test_claims_by_hand(text: str, true: bool | None) -> None:
    assert found([text]) == [true]


def test_what_claims_nothing() -> None:
    assert found(["i saw nothing", "where were you red", "hello there", "let us skip the vote"]) == []
    assert found(["it was not me", "i did a task in bridge"], "Red") == [False, False]
    assert found(["i did a task in bridge"], "Yellow") == [True]
    assert found(["red is the imposter. I was in room (0,0). Blue killed Orange. I saw it"]) == [True, True, False]


def test_chance_is_the_share_of_such_claims_that_are_true() -> None:
    game = meeting_game()
    game = replace(game, facts={**game.facts, "height": 2})
    kill, with_green, vote = claims_of(game)[:3]
    assert (kill.topic, kill.true, kill.chance) == ("kill", True, 1 / 4)  # Red, of Red, Blue, Yellow and Pink
    assert (with_green.topic, with_green.true) == ("with", False)
    # Red was with each of four others in bridge, and nowhere else: 4 of 4 names x 4 rooms.
    assert with_green.chance == 4 / 16
    assert (vote.topic, vote.true, vote.chance) == ("accuse", False, 1 / 4)


def test_metrics_by_hand() -> None:
    game = meeting_game()
    game = replace(game, facts={**game.facts, "height": 2})
    metrics = claim_metrics([game, game], np.random.default_rng(0))
    means = {name: interval.mean for name, interval in metrics.items()}
    assert means["talk/true_claims"] == 0.5 and means["talk/true_claims/imposter"] == 0.0
    assert means["talk/true_claims/kill"] == 1.0 and means["talk/true_chance"] == 0.25
    assert means["talk/claims"] == 2 / 6 and means["talk/unverifiable"] == 1 / 3  # "RED, or green?" claims something
    assert means["talk/true_verdicts"] == 0.0
    # Blue and Pink hear of Red at step 6: .25 to .55, .25 to .35; Pink hears "vote for green" between steps 7 and 9.
    assert means["speech/credulity_true"] == pytest.approx(0.2) and means["speech/believed_true"] == pytest.approx(0.45)
    assert means["speech/credulity_false"] == pytest.approx((0.85 - 0.65) / 3)
    only = claim_metrics([game], np.random.default_rng(0), ["base"])
    assert "talk/true_claims/kill" not in only and only["talk/true_claims"].mean == 0.0


class Says(CarefulCrewmate):
    """Says where it was, or that it was where there is no room."""

    def __init__(self, seed: int, truth: bool) -> None:
        super().__init__(seed)
        self.truth = truth

    def speak(self) -> Statement:
        start = ((self.width - 1) // 2, 0)
        return Statement(Topic.WHERE, room=self.rng.choice([*self.visited] or [start]) if self.truth else (4, 4))


@cache
def played(truth: bool, style: Style) -> list[Episode]:
    agent = TextAgent("said", lambda seed, role: Says(seed, truth) if role == "crewmate" else RandomPlayer(seed))
    make_env = env_maker({"game": "among_us", "style": style.value})
    cast = lambda game, env: dict.fromkeys(env.possible_agents, agent)  # noqa: E731
    return rollout(draw_games(5, 1, count=25), cast, make_env, 32)


@pytest.mark.parametrize("style", list(Style))
@pytest.mark.parametrize("truth", [True, False])
def test_honest_players_and_liars_are_told_apart(truth: bool, style: Style) -> None:
    metrics = claim_metrics(played(truth, style), np.random.default_rng(0))
    assert metrics["talk/true_claims/crewmate"].mean == float(truth)


def test_places_are_those_of_the_game() -> None:
    """Rooms in the replay are those that the game told its players."""
    settings = {"game": "among_us", "style": "compact", "players": 6, "cooldown": 2}
    looks: dict[tuple[int, str], set[Any]] = {}

    class Watcher(RandomPlayer):
        def _look(self, event: Any) -> None:
            super()._look(event)
            looks.setdefault((self.key, self.me), set()).add(event.room)

    def watcher(seed: int, role: str) -> Watcher:
        player = Watcher(seed)
        player.key = seed >> 4  # the game's seed, but for lost bits
        return player

    agent = TextAgent("watcher", watcher)
    cast = lambda game, env: dict.fromkeys(env.possible_agents, agent)  # noqa: E731
    checked = 0
    for game in rollout(draw_games(9, 1, count=20), cast, env_maker(settings), 32):
        replies = [Reply(t.agent, t.step, t.kind.name, t.text, t.error, t) for t in game.turns]
        rooms: dict[str, set[Any]] = {}
        for chapter in story(game.facts, replies):
            for snapshot in chapter.rooms.values() if isinstance(chapter, Moves) else ():
                for name, room in snapshot.items():
                    rooms.setdefault(name, set()).add(room)
        for name, own in rooms.items():
            seen = looks.get(((game.seed * 16 % (1 << 63)) >> 4, name), set())
            assert seen <= own, (game.seed, name, seen, own)  # a walker that never arrives never looks
            checked += len(seen)
    assert checked > 100


def test_every_topic_of_the_grammar_is_a_fact_a_verdict_or_neither() -> None:
    assert {*FACTS, *VERDICTS} | {Topic.ASK, Topic.UNSURE} == set(FORMS)


# --- Deal or No Deal --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("i want 3 balls", [("count", True)]),
        ("give me four balls and 1 hat", [("count", False), ("count", True)]),
        ("i'll take 2 of the hats", [("count", False)]),
        ("i want 2 swords , a book", [("invented", False), ("count", True)]),
        ("books are worth 5 to me , 3 points for each ball", []),
        ("i have 10 points , 2 ways", []),
        ("i want the balls", []),
        ("no hats for me", []),
    ],
)
def test_counts_against_the_pool(text: str, read: list[tuple[str, bool]]) -> None:
    assert counted(text, (1, 1, 3)) == read


def test_a_dialogue_by_hand() -> None:
    """Values (0, 1, 3) and (1, 3, 2) of 1 book, 1 hat and 3 balls: one truth, one lie, one invented item."""
    game = episode(
        [
            message("player_0", 0, "balls are worth 3 to me"),
            message("player_1", 1, "books are worth 9 to me"),
            message("player_0", 2, "i want 3 balls , you get 2 swords"),
            message("player_1", 3, "ok deal"),
            propose("player_0", 4, (1, 0, 3)),
            propose("player_1", 5, (1, 1, 0)),
        ],
        [
            *beliefs("player_1", 0, [0.1, 0.1, 0.1]), *beliefs("player_1", 1, [0.1, 0.1, 0.7]),
            *beliefs("player_0", 1, [0.2, 0.2, 0.2]), *beliefs("player_0", 2, [0.1, 0.2, 0.2]),
        ],
    )  # fmt: skip
    means = {name: i.mean for name, i in claim_metrics([game, game], np.random.default_rng(0)).items()}
    assert means["talk/true_claims"] == 0.5 and means["talk/claims"] == 0.5
    assert means["talk/invented"] == 0.25
    assert means["talk/agreed_kept"] == 0.5  # player_1 claims what is left of 3 balls, player_0 more
    assert means["speech/credulity_true"] == pytest.approx(0.6)
    assert means["speech/credulity_false"] == pytest.approx(0.9 / 10 - 0.8 / 10)  # in 9 points
    assert not any(name.endswith(("negotiator", "value")) for name in means)


def test_what_items_are_worth_moves_no_belief_in_what_is_claimed() -> None:
    hearing = beliefs("player_1", 0, [0.1, 0.1, 0.1]) + beliefs("player_1", 1, [0.1, 0.1, 0.7])
    asked = [replace(belief, question=replace(belief.question, later="balls")) for belief in hearing]
    said = [message("player_0", 0, "balls are worth 3 to me"), propose("player_0", 1, (1, 0, 3))]
    credulous = [
        any(name.startswith("speech/") for name in claim_metrics([episode(said, heard)], np.random.default_rng(0)))
        for heard in (hearing, asked)
    ]
    assert credulous == [True, False]


def test_another_game_has_no_log() -> None:
    with pytest.raises(ValueError, match="Among Us and Deal or No Deal only"):
        claims_of(replace(imposter_game(), facts={}))


def test_transcripts_are_read_as_their_episodes() -> None:
    game = meeting_game()
    game = replace(game, facts={**game.facts, "height": 2})
    again = episode_from_json(episode_to_json(game))
    one, two = (claim_metrics([e], np.random.default_rng(0)) for e in (game, again))
    assert {name: i.mean for name, i in one.items()} == pytest.approx(
        {name: i.mean for name, i in two.items()}, abs=1e-3
    )  # beliefs are rounded
    assert episode_to_json(again)["beliefs"] == episode_to_json(game)["beliefs"]

"""Measures of negotiation, on games written by hand and on games whose truth is known."""

import dataclasses
import hashlib
import os
from pathlib import Path

import pytest

from envs import dond_v0
from envs.core import END
from envs.dond import replies as dond_replies
from envs.dond.replies import proposal_text
from envs.dond.rules import Triple, rest
from envs.human_dond import HumanEnding, HumanView, read_split
from marl.agents.scripted.dond_language import understand
from marl.metrics.negotiation import (
    Line,
    Talk,
    explicit,
    human_talk,
    inverted_figures,
    read_talk,
    stated_values,
    talk_of,
)
from marl.report.transcripts import episode_to_json
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode

DATA = Path(os.environ.get("DOND_DATA", Path(__file__).resolve().parents[3] / "../shared/data/dond"))
COUNTS: Triple = (1, 1, 3)
VALUES: tuple[Triple, Triple] = ((0, 1, 3), (1, 9, 0))


def talk(*lines: tuple[int, str] | tuple[int, Triple], counts: Triple = COUNTS) -> Talk:
    made = [Line(seat, said) if isinstance(said, str) else Line(seat, "", said) for seat, said in lines]
    return Talk(counts, VALUES, tuple(made))


def test_a_kept_split_and_an_accepted_one() -> None:
    reading = read_talk(talk((0, "i want the balls"), (1, "deal"), (0, (0, 0, 3)), (1, (1, 1, 0))))
    first, second = reading.claims
    assert (first.stated, first.table, first.claim) == ((0, 0, 3), (0, 0, 3), (0, 0, 3))
    assert (second.stated, second.table) == (None, (1, 1, 0))  # it named none, and took the other side
    assert first.telling and second.telling and not first.inverted and not second.inverted
    assert not first.worse and not second.worse and reading.understood == 2
    assert first.chance == second.chance == 1 / 16  # 2 x 2 x 4 claims


def test_inverted_proposals() -> None:
    """Claims are inverted if players claim what the talk gave to their partner: they agree, with swapped shares.
    Another wrong claim is not inverted."""
    first, second = read_talk(talk((0, "i want the balls"), (1, "deal"), (0, (1, 1, 0)), (1, (0, 0, 3)))).claims
    assert first.inverted and second.inverted and first.worse and second.worse
    other = read_talk(talk((0, "i want the balls"), (1, "deal"), (0, (1, 0, 3)))).claims[0]
    assert not other.inverted and other.claim != other.stated  # another mistake


def test_the_last_split_counts_from_each_side() -> None:
    reading = read_talk(talk((0, "i want the balls"), (1, "no , you take 2 balls , i take the rest"), (0, (0, 0, 2))))
    (claim,) = reading.claims
    assert claim.stated == (0, 0, 3) and claim.table == (0, 0, 2) and not claim.inverted
    assert not claim.stated_explicit and claim.table_explicit


def test_a_split_in_halves_tells_nothing() -> None:
    (claim,) = read_talk(talk((0, "i take 1 book 1 hat 1 ball"), (0, (1, 1, 1)), counts=(2, 2, 2))).claims
    assert claim.table == (1, 1, 1) and not claim.telling and not claim.inverted
    (blind,) = read_talk(talk((0, "lovely weather"), (0, (1, 1, 1)))).claims
    assert blind.table is None and not blind.telling


def test_claims_about_own_values() -> None:
    reading = read_talk(talk((0, "balls are worth 3 to me"), (1, "hats are worth 5 to me"), (0, "i don't need books")))
    assert [(v.seat, v.item, v.value, v.true) for v in reading.values] == [
        (0, 2, 3, True),
        (1, 1, 5, False),
        (0, 0, 0, True),
    ]
    # b + h + 3 l = 10: l = 3 leaves b + h = 1 (2 vectors), of 11 + 8 + 5 + 2 = 26 in all; h = 5 leaves b + 3 l = 5
    # (l = 0, 1); b = 0 leaves h + 3 l = 10 (l = 0..3)
    assert [v.chance for v in reading.values] == [2 / 26, 2 / 26, 4 / 26]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("the hats are worth 3 points to you", {}),
        ("you get 3 points for each hat", {}),
        ("balls have no value for you", {}),
        ("are the hats worth 2 points ?", {}),
        ("if the hats are worth nothing , take them", {}),
        ("your hats are worth 3 points", {}),
        ("both balls are worth 4 to me", {}),
        ("the balls are worth 4 points in total", {}),
        ("i don't want the hat", {}),  # a wish
        ("the hat isn't worth 10 points", {}),
        ("hats have a value of 0", {1: 0}),
        ("books are of no value to me so you can have them all", {0: 0}),
        ("books are only 1 point for me . i can do a hat", {0: 1}),
        ("basketballs are worth 4 to me , what about you ?", {2: 4}),
        ("i get 3 points for each hat", {1: 3}),
        ("i don’t need the book", {0: 0}),
        ("9 points", {}),
    ],
)
def test_what_is_told_of_own_values(message: str, expected: dict[int, int]) -> None:
    assert stated_values(message) == expected


def test_scripts_are_read_as_they_understand_each_other() -> None:
    """A digest holds what scripts understand, because it decides what they say and so what bases learn."""
    make_env = env_maker({"game": "dond", "style": "natural", "split": "all", "max_entries": 50})
    games = rollout(draw_games(5, count=150), everyone(scripted("dond", "mixture")), make_env, 150)
    messages = [(turn.message, game.facts["counts"]) for game in games for turn in game.turns if turn.message]
    read = [stated_values(message) for message, _ in messages]
    heard = [understand(*message).values for message in messages]
    assert read == [{item: value for item, value in enumerate(values) if value is not None} for values in heard]
    assert sum(map(bool, read)) > 100
    meant = [(message, dataclasses.astuple(understand(message, counts))) for message, counts in messages]
    assert hashlib.sha256(repr(meant).encode()).hexdigest()[:16] == "9c371734d74c43ef"


@pytest.mark.parametrize(
    ("message", "full"),
    [
        ("i want the hats", False),
        ("i take the hats and you get the rest", True),
        ("1 book 0 hats 2 balls for me", True),
        ("you can have everything", True),
        ("i can't give you the rest", False),
        ("books and basketballs", False),
        ("hello", False),
    ],
)
def test_explicit(message: str, full: bool) -> None:
    assert explicit(message) is full


def careful_games(count: int = 40) -> list[Episode]:
    return rollout(draw_games(3, count=count), everyone(scripted("dond", "careful")), dond_v0.parallel_env, count)


def with_claims_turned(episode: Episode) -> Episode:
    """The same game, in which everybody proposes what it means to leave."""
    counts = episode.facts["counts"]
    turns = []
    for turn in episode.turns:
        if not turn.message and not turn.error:
            claim = dond_replies.parse_reply(turn.text, counts, False, 1)
            assert isinstance(claim, dond_replies.Proposal)
            turn = dataclasses.replace(turn, text=f"{proposal_text(rest(claim.claim, counts))} {END}")
        turns.append(turn)
    return dataclasses.replace(episode, turns=tuple(turns))


def test_careful_scripts_are_honest_and_never_inverted_until_they_are_turned() -> None:
    games = careful_games()
    readings = [read_talk(talk_of(game)) for game in games]
    values = [v for r in readings for v in r.values]
    claims = [c for r in readings for c in r.claims if c.telling]
    assert len(values) >= 6 * 35 and all(v.true for v in values)  # all three of both, in nearly every game
    found = inverted_figures(games, {"careful"})
    assert len(claims) > 60 and found["talk/inverted"] == found["talk/inverted_explicit"] == 0.0
    assert found["talk/inverted_chance"] == pytest.approx(sum(c.chance for c in claims) / len(claims))
    kept = [c.claim == c.table for c in claims]
    turned = [c for game in games for c in read_talk(talk_of(with_claims_turned(game))).claims if c.telling]
    assert [c.inverted for c in turned] == kept and sum(kept) > 0.9 * len(kept)
    assert inverted_figures(games, {"nobody"}) == {}


def test_a_transcript_reads_like_its_episode() -> None:
    for game in careful_games(5):
        assert talk_of(episode_to_json(game)) == talk_of(game)
        assert talk_of(game, {"careful"}).measured == (0, 1) and talk_of(game, {"x"}).measured == ()


def test_a_human_dialogue() -> None:
    view = HumanView(
        0, COUNTS, VALUES[0], VALUES[1], (("THEM", "i want the hat"), ("YOU", "i take the balls"), ("THEM", None)),
        (0, 0, 3), (1, 1, 0), HumanEnding.DEAL,
    )  # fmt: skip
    reading = read_talk(human_talk(view))
    assert reading.messages == ("i take the balls",)
    (claim,) = reading.claims
    assert claim.claim == claim.stated == (0, 0, 3) and not claim.inverted


@pytest.mark.skipif(
    not (DATA / "data.txt").is_file(), reason=f"needs the human dialogues: no {DATA}/data.txt; set DOND_DATA"
)
def test_people_hardly_ever_invert() -> None:
    """The grammar reads most of the test views, and people claim what was said far more often than its rest."""
    readings = [read_talk(human_talk(view)) for view in read_split(DATA, "test").views]
    claims = [c for r in readings for c in r.claims]
    telling = [c for c in claims if c.telling]
    assert len(telling) > 0.7 * len(claims)
    value_claims = [value for r in readings for value in r.values]
    assert len(value_claims) > 20 and sum(v.true for v in value_claims) > 0.75 * len(value_claims) > 1.5 * sum(
        v.chance for v in value_claims
    )
    assert sum(c.inverted for c in telling) / len(telling) < 0.06
    assert sum(c.claim == c.table for c in telling) / len(telling) > 0.5

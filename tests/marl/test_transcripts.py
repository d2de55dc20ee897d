"""Transcripts: what is written is what is read, and a reader sees what each message did."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.core import TurnKind
from marl.errors import UserError
from marl.transcripts import Shift, episode_to_json, read_episodes, render_text, shifts, write_episodes
from tests.marl.episodes import aborted_game, deal_game, episode, failed_game, imposter_game, message


def test_episode_to_json() -> None:
    found = episode_to_json(deal_game(7))
    assert json.loads(json.dumps(found, allow_nan=False)) == found  # JSON's own types, all the way down
    assert (found["seed"], found["steps"], found["roles"]["player_1"]) == (7, 4, "negotiator")
    assert found["facts"] == {"counts": [1, 1, 3], "values": [[0, 1, 3], [1, 3, 2]], "first": 0, "objective": 1.0}
    assert found["outcome"]["points"] == {"player_0": 9, "player_1": 4}
    assert found["turns"][0] == {
        "agent": "player_0", "role": "negotiator", "step": 0, "kind": "SPEAK",
        "text": "[message] i want the balls [END]",
        "message": "i want the balls", "error": "", "rewards": {"speaking": 1.2}, "tokens": 6, "logprob": -3.0,
    }  # fmt: skip
    assert len(found["questions"]) == 6  # three about each player
    belief = found["beliefs"][9]
    question = found["questions"][belief["question"]]
    assert (belief["listener"], belief["step"], question["answer"]) == ("player_1", 1, "0")
    assert belief["probs"] == [0.3] + [0.07] * 10


def test_numbers_of_numpy_and_enums_become_plain() -> None:
    odd = replace(deal_game(), facts={"a": np.arange(2), "b": np.float32(0.5), 3: TurnKind.SPEAK, "c": (None, True)})
    assert episode_to_json(odd)["facts"] == {"a": [0, 1], "b": 0.5, "3": 2, "c": [None, True]}
    with pytest.raises(TypeError, match="plain data, not object"):
        episode_to_json(replace(deal_game(), facts={"a": object()}))


def test_files_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "episodes" / "base.jsonl"
    games = [
        deal_game(0),
        failed_game(1),
        aborted_game(2),
        episode([message("player_0", 0, 'line\nbreak "quote" é \u2028 x')]),
    ]
    write_episodes(path, games)
    assert read_episodes(path) == [episode_to_json(game) for game in games]
    assert [p.name for p in path.parent.iterdir()] == ["base.jsonl"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "games.jsonl"
    write_episodes(path, [deal_game()])
    with pytest.raises(TypeError):
        write_episodes(path, [failed_game(), replace(deal_game(), facts={"a": object()})])
    assert read_episodes(path) == [episode_to_json(deal_game())]


@pytest.mark.parametrize("line", ["{not json", "[]", '{"turns": []}'])
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "games.jsonl"
    write_episodes(path, [deal_game()])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=r"games\.jsonl, line 2: expected a transcript"):
        read_episodes(path)


def test_shifts_are_of_the_other_listeners_around_the_message() -> None:
    transcript = episode_to_json(deal_game())
    first, second, propose, _ = transcript["turns"]
    assert shifts(transcript, first) == [
        Shift("player_1", "books", "0", 0.1, 0.3),
        Shift("player_1", "hats", "1", 0.1, 0.3),
        Shift("player_1", "balls", "3", 0.1, 0.9),
    ]
    assert [(s.listener, s.before, s.after) for s in shifts(transcript, second)] == [("player_0", 0.2, 0.5)] * 3
    assert shifts(transcript, propose) == []


def test_a_listener_that_was_never_asked_before_has_no_shift() -> None:
    transcript = episode_to_json(imposter_game())
    lime, red = transcript["turns"][2], transcript["turns"][5]
    assert shifts(transcript, lime) == []  # Blue is asked for the first time after this message
    assert shifts(transcript, red) == [Shift("Blue", "Who is the imposter?", "Red", 0.5, 0.4)]


def test_render_text() -> None:
    assert render_text(episode_to_json(deal_game(0, ("learner", "scripted")))) == (
        """\
                            books   hats  balls
pool                            1      1      3
player_0 (learner) values       0      1      3
player_1 (scripted) values      1      3      2

player_0  i want the balls
            player_1 believes books=0 0.10 -> 0.30, hats=1 0.10 -> 0.30, balls=3 0.10 -> 0.90  (+1.20)
            reward: speaking +1.20
player_1  ok i take book & hat
            player_0 believes books=1 0.20 -> 0.50, hats=3 0.20 -> 0.50, balls=2 0.20 -> 0.50  (+0.90)
player_0  proposes (0 books, 0 hats, 3 balls)
player_1  proposes (1 books, 1 hats, 0 balls)
            reward: game +13.00

Deal: player_0 9, player_1 4; together 13 of at most 13"""
    )


def test_render_text_of_other_endings() -> None:
    assert "player_1  give me all   (refused: no tag)" in render_text(episode_to_json(failed_game()))
    assert render_text(episode_to_json(failed_game())).endswith("No deal: the two claims do not add up to the pool")
    assert render_text(episode_to_json(aborted_game())).endswith("No deal: too many refused replies in a row")
    other = render_text(episode_to_json(imposter_game()))
    assert other.startswith("Red (base): imposter\nBlue (learner): crewmate\n")
    assert "Blue believes Who is the imposter?=Red 0.50 -> 0.40  (-0.10)" in other
    assert other.endswith("crewmates won (ejected)")
    assert render_text(episode_to_json(imposter_game(None))).endswith("nobody won (ejected)")


def test_model_text_cannot_drive_the_terminal() -> None:
    game = episode([message("player_0", 0, "\x1b[2Jgone\nsecond\x07")])
    text = render_text(episode_to_json(game))
    assert "player_0  �[2Jgone second�" in text and "\x1b" not in text

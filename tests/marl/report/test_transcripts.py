"""Transcripts: what is written is what is read, and a reader sees what each message did."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs.among_us.state import Act
from envs.core import TurnKind
from marl.common.errors import UserError
from marl.metrics.among_us import Meeting, Moves
from marl.report.games import Form, forms
from marl.report.transcripts import episode_to_json, read_episodes, write_episodes
from marl.report.views import Shift, fates, game_view, outcome_text, render_text, shifts, story_of
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Turn
from tests.marl.episodes import aborted_game, deal_game, episode, failed_game, imposter_game, meeting_game, message


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


def test_belief_in_any_of_several_true_answers_counts() -> None:
    """Were Green an imposter, too, Blue would believe the truth as much as it believes in Red and in Green."""
    game = meeting_game()
    first = next(b for b in game.beliefs if b.listener == "player_1")
    beliefs = tuple(
        replace(b, question=replace(b.question, also=("green",))) if b.listener == "player_1" else b
        for b in game.beliefs
    )
    transcript = episode_to_json(replace(game, beliefs=beliefs))
    assert {tuple(q.get("also", ())) for q in transcript["questions"]} == {("green",), ()}
    (meeting,) = (part for part in game_view(transcript)["chapters"] if part["kind"] == "meeting")
    red, green = (first.probs[first.question.candidates.index(name)] for name in ("red", "green"))
    before = meeting["before"]
    assert before["Blue"] == pytest.approx(red + green) and red == 0.25 and green > 0
    turn = next(turn for turn in transcript["turns"] if turn["message"])
    shift = next(s for s in shifts(transcript, turn) if s.listener == "player_1")
    assert shift.before == before["Blue"]


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


def test_claims_in_parts_name_their_items() -> None:
    """A count is a turn of its own in format=structured. A number that is said is no claim, nor is a refused one."""
    words, *_ = deal_game().turns

    def chosen(agent: str, text: str, error: str = "") -> Turn:
        return replace(words, agent=agent, kind=TurnKind.CHOOSE, text=text, message="", rewards={}, error=error)

    turns = [
        replace(words, text="3 [END]", message="3", rewards={}), chosen("player_0", "proposal"),
        chosen("player_0", "0"), chosen("player_1", "2", "form"), chosen("player_1", "1"), chosen("player_1", "1"),
        chosen("player_0", "0"), chosen("player_0", "3"), chosen("player_1", "0"),
    ]  # fmt: skip
    text = render_text(episode_to_json(replace(deal_game(), turns=tuple(turns), beliefs=())))
    assert text.splitlines()[5:-2] == [
        "player_0  3", "player_0  proposal", "player_0  claims 0 books", "player_1  2   (refused: form)",
        "player_1  claims 1 book", "player_1  claims 1 hat", "player_0  claims 0 hats", "player_0  claims 3 balls",
        "player_1  claims 0 balls",
    ]  # fmt: skip


def test_a_message_that_was_cut_is_said_to_be_cut() -> None:
    found = episode_to_json(episode([message("player_0", 0, "i want", cut=True), message("player_1", 1, "no")]))
    assert [turn.get("cut") for turn in found["turns"]] == [True, None]
    assert "player_0  i want   (cut at its limit)\nplayer_1  no\n" in render_text(found)
    game = meeting_game()
    turns = tuple(replace(t, cut=t.message == "vote for green") for t in game.turns)
    meeting = render_text(episode_to_json(replace(game, turns=turns)))
    assert "  Blue:    vote for green   (cut at its limit)\n" in meeting and meeting.count("(cut") == 1


def test_render_text_of_other_endings() -> None:
    assert "player_1  give me all   (refused: no tag)" in render_text(episode_to_json(failed_game()))
    assert render_text(episode_to_json(failed_game())).endswith("No deal: the two claims do not add up to the pool")
    assert render_text(episode_to_json(aborted_game())).endswith("No deal: too many refused replies in a row")
    other = render_text(episode_to_json(imposter_game()))
    assert other.startswith("Red (base): imposter\nBlue (learner): crewmate\n")
    assert "Blue believes Who is the imposter?=Red 0.50 -> 0.40  (-0.10)" in other
    assert other.endswith("crewmates won (ejected)")
    assert render_text(episode_to_json(imposter_game(None))).endswith("\n\nejected")


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ({"how": "the right colour is named", "winner": None, "right": True}, "the right colour is named"),
        ({"how": "checkmate", "winner": "white"}, "white won (checkmate)"),
        ({"how": "two\nlines", "winner": "\x1b[2J"}, "�[2J won (two lines)"),
        ({"right": True, "steps": 3}, "right True, steps 3"),  # recorded before a game had to say how it ended
    ],
)
def test_a_game_of_ones_own_ends_in_its_own_words(outcome: dict[str, Any], said: str) -> None:
    game = replace(imposter_game(), outcome=outcome)
    assert outcome_text(episode_to_json(game)) == said


def test_model_text_cannot_drive_the_terminal() -> None:
    game = episode([message("player_0", 0, "\x1b[2Jgone\nsecond\x07")])
    text = render_text(episode_to_json(game))
    assert "player_0  �[2Jgone second�" in text and "\x1b" not in text


def test_render_text_of_among_us() -> None:
    assert render_text(episode_to_json(meeting_game())) == (
        """\
Red*    imposter  base     alive
Blue    crewmate  learner  alive
Green   crewmate  learner  alive
Yellow  crewmate  learner  alive
Orange  crewmate  learner  killed in step 2 by Red
Pink    crewmate  base     alive

steps 0 to 4: 11 moves
  step 2: Red kills Orange in bridge (0,0), seen by Green
  step 4: Green reports the body of Orange in bridge (0,0)

Green found the body of Orange in bridge (0,0). Belief in Red: Green 0.90, Blue 0.25, Pink 0.25
  Green:   red killed orange i saw it
           Blue 0.25 -> 0.55, Pink 0.25 -> 0.35  (+0.40)
  Red*:    i was with green in lab
           Blue 0.55 -> 0.45  (-0.10)
  Blue:    vote for green
           Pink 0.35 -> 0.15  (-0.20)
  Pink:    RED, or green?
  Yellow:  i saw nothing
           Pink 0.15 -> 0.20  (+0.05)
  Green:   who was in bridge
  votes: Red for Green, Blue for Green, Green for Red, Yellow for skip, Pink for Red
  Green 2, Red 2, skip 1: nobody is voted out

Nobody wins: time ran out"""
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"style": "natural", "imposters_report": True},
        {"style": "compact", "players": 7, "imposters": 2, "width": 1, "height": 3, "cooldown": 1},
        {"style": "natural", "messages_each": 0, "max_steps": 80},
    ],
)
def test_the_story_of_any_game_ends_as_the_game_did(settings: dict[str, object]) -> None:
    """Deaths, discussions, votes and rooms worked out from choices alone are those that the environment counted."""
    make_env = env_maker({"game": "among_us", **settings})
    games = rollout(draw_games(5, count=16), everyone(scripted("among_us", "random")), make_env, 8)
    seen = dict.fromkeys(("kills", "discussions", "ejections"), 0)
    for game in games:
        transcript = episode_to_json(game)
        replayed = story_of(transcript)
        meetings = [chapter for chapter in replayed if isinstance(chapter, Meeting)]
        kills = [deed for c in replayed if isinstance(c, Moves) for deed in c.deeds if deed.act is Act.KILL]
        counted = {
            "kills": len(kills),
            "discussions": len(meetings),
            "ejections": sum(bool(meeting.ejected) for meeting in meetings),
        }
        assert counted == {name: game.outcome[name] for name in counted}
        ends = fates(game.facts["names"].values(), replayed)
        alive = {agent: ends[name] == "alive" for agent, name in game.facts["names"].items()}
        assert alive == game.outcome["alive"]
        assert all(meeting.reports for meeting in meetings)
        assert sum(len(meeting.messages) for meeting in meetings) == game.outcome["messages"]
        assert render_text(transcript).endswith(outcome_text(transcript))
        seen = {name: seen[name] + count for name, count in counted.items()}
    assert all(seen.values()), seen  # none of it was checked on nothing


def test_forms_are_counted_with_whom_they_name() -> None:
    """Green, Blue and Yellow learn; Red, who is the imposter, and Pink do not."""
    game = episode_to_json(meeting_game())
    assert forms([game, game], "learner") == [
        Form("{name} killed {name} i saw it", 2, 2, 2),
        Form("vote for {name}", 2, 2, 0),
        Form("i saw nothing", 2, 0, 0),
        Form("who was in {room}", 2, 0, 0),
    ]
    for turn in game["turns"]:
        turn["message"] = turn["message"].replace("vote for green", "Purple KILLED Purple i saw it")
    # Purple does not play in this game: the same form, which names nobody.
    assert forms([game], "learner")[0] == Form("{name} killed {name} i saw it", 2, 1, 1)
    assert [form.text for form in forms([game], "base")] == ["i was with {name} in {room}", "{name}, or {name}?"]
    assert forms([game], "nobody") == [] and forms([], "learner") == []
    assert forms([episode_to_json(deal_game())], "learner")[0].naming == 0

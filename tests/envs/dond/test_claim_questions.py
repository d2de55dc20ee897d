"""Deal or No Deal with questions about what the partner will claim."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import marl
from envs import dond_v0 as dond
from envs.core import END, Style
from envs.dond.texts import claim_questions
from envs.human_dond import replay
from experiments.setup.players import check_players
from experiments.webapp.timeline import timeline_of
from marl.agents.model import ModelAgent
from marl.agents.scripted.dond import make_player
from marl.agents.text import TextAgent
from marl.common.errors import UserError
from marl.learning.batch import collate
from marl.metrics.beliefs import belief_metrics
from marl.metrics.claims import claims_of, credulity
from marl.metrics.messages import message_metrics
from marl.pretraining.corpus import human_row
from marl.report.transcripts import episode_from_json, episode_to_json
from marl.report.views import render_text, topic
from marl.rollout.cast import RoleConfig
from marl.rollout.games import env_maker, without_later
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Belief
from tests.composing import DOND
from tests.marl.episodes import beliefs, episode, message, propose
from tests.marl.intents.test_annotation import view
from tests.marl.planners import negotiator

START = {"counts": (1, 2, 3), "values": ((0, 2, 2), (1, 3, 1)), "first": 0}
SETTINGS = {"game": "dond", "style": "compact", "questions": "claims"}


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("natural", "How many hats will your partner claim?"),
        ("brief", "hats for your partner?"),
        ("compact", "<hats?>"),
    ],
)
def test_both_are_asked_and_answered_at_the_end(style: str, text: str) -> None:
    env = dond.parallel_env(style=style, questions="claims")
    _, infos = env.reset(seed=0, options=START)
    for reply in (f"[message] i want the balls {END}", None):
        for info in infos.values():
            asked = info["questions"]
            assert asked[1].text == text and [len(q.candidates) for q in asked] == [2, 3, 4]
            assert not any(q.answer for q in asked) and "answers" not in info
        if reply:
            *_, infos = env.step({"player_0": reply})
    *_, infos = env.step({"player_1": f"[propose] (1 books, 2 hats, 0 balls) {END}"})
    assert not any(info["questions"] or "answers" in info for info in infos.values())
    *_, infos = env.step({"player_0": f"[propose] (0 books, 0 hats, 3 balls) {END}"})
    assert infos["player_0"]["answers"] == {"books": "1", "hats": "2", "balls": "0"}
    assert infos["player_1"]["answers"] == {"books": "0", "hats": "0", "balls": "3"}
    assert asked[2].answered(infos["player_0"]["answers"]).answer == "0"


def test_a_player_whose_partner_made_no_claim_gets_no_answer() -> None:
    env = dond.parallel_env(questions="claims", max_entries=2)
    env.reset(seed=0, options=START)
    env.step({"player_0": f"[message] hi {END}"})
    *_, infos = env.step({"player_1": f"[propose] (1 books, 0 hats, 0 balls) {END}"})
    assert infos["player_0"]["outcome"]["how"] == "limit"
    assert infos["player_0"]["answers"]["books"] == "1" and "answers" not in infos["player_1"]


def test_played_games_hold_what_the_partner_claimed() -> None:
    agent = TextAgent("mixture", partial(make_player, "mixture"))
    episodes = rollout(draw_games(6, 1, count=20), everyone(agent), env_maker(SETTINGS), 20)
    for game in episodes:
        for seat, claim in enumerate(reversed(game.outcome["claims"])):
            wanted = {} if claim is None else dict(zip(("books", "hats", "balls"), map(str, claim), strict=True))
            assert game.answers.get(f"player_{seat}", {}) == wanted
    assert any(claim for game in episodes for claim in game.outcome["claims"])


@pytest.mark.parametrize("style", Style)
def test_what_was_asked_is_told_wherever_a_game_is_shown(style: Style) -> None:
    asked = claim_questions(style, (1, 2, 3))
    claimed = [question.answered({"books": "1", "hats": "0", "balls": "2"}) for question in asked]
    heard = [
        Belief("player_1", "negotiator", s, 0, q, np.full(len(q.candidates), 0.25)) for s in (0, 1) for q in claimed
    ]
    game = episode([message("player_0", 0, "i want a book"), propose("player_0", 1, (1, 0, 2))], heard)
    transcript = episode_to_json(game)
    assert [belief.question for belief in episode_from_json(transcript).beliefs] == claimed * 2
    assert "believes books claimed=1 0.25 -> 0.25, hats claimed=0 0.25 -> 0.25, balls" in render_text(transcript)
    assert timeline_of(transcript)["asked"] == "the other will claim"
    of_values = episode_to_json(replace(game, beliefs=beliefs("player_1", 0, [0.1, 0.1, 0.1])))
    assert timeline_of(of_values)["asked"] == "an item is worth to the other"


def test_a_question_about_the_order_of_a_unit_is_a_topic_of_its_own() -> None:
    assert topic({"text": "What will A PAR order?", "later": "PAR"}) == "What will A PAR order?"


def test_questions_about_values_are_the_default_and_change_no_identity() -> None:
    assert without_later({"game": "dond", "questions": "values", "format": "free"}) == {"game": "dond"}
    assert without_later({"game": "dond", "questions": "claims"})["questions"] == "claims"
    with pytest.raises(ValueError, match="questions must be values or claims"):
        dond.parallel_env(questions="both")


def test_what_reads_beliefs_does_not_take_claims_for_values() -> None:
    """Measures of truthfulness and talk leave these beliefs out. Transcripts keep the question, and Watch shows what is
    asked."""
    settings = {**SETTINGS, "format": "structured", "max_entries": 8}
    agent = ModelAgent("learner", negotiator(), slots=16, context=1024, max_new_tokens=24, temperature=0.7)
    episodes = rollout(draw_games(7, 7, count=8), everyone(agent), env_maker(settings), 8)
    assert any(episode.beliefs for episode in episodes)
    talk = [replace(e, turns=tuple(replace(t, message="hats are worth 1 to me" if t.message else "") for t in e.turns))
            for e in episodes]  # fmt: skip
    assert any(claim.topic == "value" for episode in talk for claim in claims_of(episode))
    assert not any(credulity(episode, claims_of(episode)) for episode in talk)
    found, _, effects = message_metrics(episodes, settings, {"learner": agent}, {"learner"}, 1)
    assert effects and not any(name.startswith(("talk/said", "talk/claim/")) for name in found)
    for game in episodes:
        written = json.loads(json.dumps(episode_to_json(game)))
        again = episode_from_json(written)
        assert [b.question for b in again.beliefs] == [b.question for b in game.beliefs]
        assert "belief/prior_log_loss" not in belief_metrics([again], np.random.default_rng(0))
        assert not game.beliefs or timeline_of(written)["asked"] == "the other will claim"


def test_players_asked_about_values_are_refused_where_claims_are_asked(finished: Path) -> None:
    cast = {"negotiator": RoleConfig("learner", partner=str(finished), partners=1.0)}
    values = {**SETTINGS, "questions": "values"}
    check_players(cast, values, env_maker(values)())
    with pytest.raises(UserError, match=r"learned with env\.questions=values\. Set it so; here it is claims"):
        check_players(cast, SETTINGS, env_maker(SETTINGS)())


def test_a_persons_dialogue_is_read_without_answers() -> None:
    """Studies of runs that were asked about claims read people's dialogues as those runs read games."""
    steps = replay(view("i want the balls", "deal"), dond.parallel_env(style="compact", questions="claims"))
    episode, agent = human_row(steps, negotiator().tokens, 0)
    assert any(questions for what, *_, questions in steps if what == "observe") and not episode.beliefs
    assert collate([(episode, agent)], {}).reply.sum() > 0


def test_a_run_learns_from_them_and_pays_for_them(tmp_path: Path) -> None:
    claims = ("env.format=structured", "env.max_entries=8")  # where even an untrained model makes some
    folder = marl.train(*DOND, "env.questions=claims", *claims, "base.games=40", f"runs={tmp_path}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("loss/listening") for line in lines) and any("reward/speaking" in line for line in lines)
    assert np.isfinite([line["belief/log_loss"] for line in lines if "belief/log_loss" in line]).all()
    report = (folder / "report.html").read_text()
    assert "each is asked what the other will claim" in report and "more players alive" not in report

"""Belief questions about the future: what will the speaker do? The answer comes with the deed."""

from collections.abc import Mapping
from typing import Any

import pytest

from envs.core import END, Question, Step, TextGame, TurnKind, View, clean
from marl.agents.model import ModelAgent
from marl.learning.batch import collate, rows_of
from marl.rewards.speaking import SpeakingReward
from marl.rollout.resampling import resample
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from tests.marl.hint import ASK, FACTS, SEATS, hint_policy


class Intent(TextGame):
    """Game of two seats. One says something, then does one of two things. The other is asked before and after the
    message which it will be and, if `idle`, also something that nobody will ever know."""

    metadata = {"name": "intent", "render_modes": []}  # noqa: RUF012
    facts: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, idle: bool = False) -> None:
        super().__init__(SEATS, max_text=40, max_reply=20)
        self.later = ("deed", "never") if idle else ("deed",)

    def begin(self, rng: Any, options: Mapping[str, Any]) -> dict[str, View]:
        self.clock = 0
        return {SEATS[0]: View("speaker", "say", TurnKind.SPEAK), SEATS[1]: self.asked("listen")}

    def asked(self, text: str) -> View:
        return View("listener", text, questions=tuple(Question(ASK, FACTS, "", later=name) for name in self.later))

    def play(self, actions: Mapping[str, Any]) -> Step:
        self.clock += 1
        if self.clock == 1:
            said = clean(str(actions[SEATS[0]]).split(END)[0], 20)
            speaker = View("speaker", "", TurnKind.CHOOSE, FACTS, message=said, span=(0, len(said)), entry="message")
            return Step({SEATS[0]: speaker, SEATS[1]: self.asked(f"heard {said}")}, dict.fromkeys(SEATS, 0.0))
        views = {
            SEATS[0]: View("speaker", entry="choice"),
            SEATS[1]: View("listener", answers={"deed": actions[SEATS[0]]}),
        }
        return Step(views, dict.fromkeys(SEATS, 0.0), {"how": "done", "winner": None})

    def privileged(self, agent: str) -> tuple[float, ...]:
        return ()


@pytest.mark.parametrize("idle", [False, True])
def test_questions_get_their_answers_and_unanswered_ones_are_left_out(idle: bool) -> None:
    agent = ModelAgent("learner", hint_policy(0), slots=16, context=32, max_new_tokens=4)
    games = draw_games(0, count=8)
    episodes = rollout(games, everyone(agent), lambda: Intent(idle), 8)
    deeds = [next(t.text for t in e.turns if t.kind == TurnKind.CHOOSE) for e in episodes]
    assert len(set(deeds)) == 2
    for episode, deed in zip(episodes, deeds, strict=True):
        assert [(b.step, b.question.answer) for b in episode.beliefs] == [(0, deed), (1, deed)]
        assert episode.answers == {SEATS[1]: {"deed": deed}}
        before, after = episode.beliefs
        assert SpeakingReward()(episode)[0] == pytest.approx(after.truth - before.truth)
    batch = collate(rows_of(episodes, ["learner"]), {})
    assert [FACTS[i] for i in batch.answer.tolist()] == [deed for deed in deeds for _ in range(2)]

    other = resample(episodes, lambda: Intent(idle), {"learner": agent}, ["learner"], 2)
    for episode, deed in zip(other, deeds, strict=True):
        heard = next(turn.instead for turn in episode.turns if turn.message)
        assert [[b.question.answer for b in each] for each in heard] == [[deed], [deed]]


def test_a_question_has_its_answer_or_will_have_it() -> None:
    with pytest.raises(ValueError, match="must be different ones of the candidates"):
        Question(ASK, FACTS, "")
    question = Question(ASK, FACTS, "", later="deed")
    assert question.answered({}) is None and question.answered({"deed": "green"}) is None
    assert question.answered({"deed": "blue"}) == Question(ASK, FACTS, "blue", later="deed")
    known = Question(ASK, FACTS, "red")
    assert known.answered({}) is known

"""Rewards by hand: the game's own at turns, and what a message did to its listeners."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from envs.core import Question, TurnKind
from marl.common.errors import UserError
from marl.metrics.beliefs import belief_changes
from marl.rewards import Reward, add_rewards
from marl.rewards.game import GameReward
from marl.rewards.speaking import FLOOR, SpeakingReward
from marl.types import Belief, Episode, Payment, Turn

WHO = Question("who?", ("x", "y"), "x")
WHAT = Question("what?", ("p", "q", "r"), "q")


def turn(agent: str, step: int, message: str = "", role: str = "crewmate") -> Turn:
    return Turn(agent, role, step, TurnKind.SPEAK if message else TurnKind.CHOOSE, message, message=message)


def belief(listener: str, step: int, truth: float, question: Question = WHO, role: str = "crewmate") -> Belief:
    probs = np.full(len(question.candidates), (1 - truth) / (len(question.candidates) - 1))
    probs[question.answer_index] = truth
    return Belief(listener, role, step, 0, question, probs)


def episode(
    turns: list[Turn], beliefs: list[Belief] | None = None, payments: list[Payment] | None = None, **players: str
) -> Episode:
    return Episode(0, players, {}, {}, tuple(turns), tuple(beliefs or []), tuple(payments or []), {}, len(turns))


# -- the game's ------------------------------------------------------------------------------------------------------
def test_payments_go_to_the_latest_turn() -> None:
    turns = [turn("a", 0), turn("b", 1), turn("a", 2), turn("b", 3), turn("a", 5)]
    payments = [
        Payment("a", 0, 1.0),  # in the step of its turn
        Payment("a", 1, 2.0),  # while it waited
        Payment("b", 0, 100.0),  # before it had done anything
        Payment("b", 3, 4.0),
        Payment("a", 4, 8.0),
        Payment("a", 5, 16.0),
        Payment("b", 9, 32.0),
        Payment("b", 9, 64.0),
        Payment("c", 9, 128.0),  # nobody here
    ]
    game = episode(turns, payments=payments)
    assert GameReward(scale=1.0)(game).tolist() == [3.0, 0.0, 8.0, 100.0, 16.0]
    assert GameReward(scale=0.5)(game).tolist() == [1.5, 0.0, 4.0, 50.0, 8.0]


def test_a_turn_for_which_a_stream_had_no_room_is_paid_nothing() -> None:
    """The turn has no tokens that could learn from the payment, so the last turn with tokens gets it. Scripts have no
    tokens."""
    spoken = replace(turn("a", 0), start=3, reply_ids=(7, 8))
    outgrown = replace(turn("a", 1), start=9)
    assert outgrown.outgrown and not spoken.outgrown and not turn("a", 1).outgrown
    game = episode([spoken, outgrown, turn("b", 1)], payments=[Payment("a", 2, 1.0), Payment("b", 2, 2.0)])
    assert GameReward(scale=1.0)(game).tolist() == [1.0, 0.0, 2.0] and game.outgrown


# -- speaking of several imposters ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("answer", "also"), [("red", "pink"), ("pink", "red")])
def test_belief_in_either_imposter_is_paid_alike(answer: str, also: str) -> None:
    """Belief that moves from a crewmate to an imposter is paid alike for both imposters. Between the two it is paid
    nothing."""
    who = Question("who?", ("red", "blue", "pink"), answer, (also,))
    believed = ([0.2, 0.6, 0.2], [0.2, 0.4, 0.4], [0.4, 0.2, 0.4], [0.1, 0.2, 0.7])
    heard = [Belief("b", "crewmate", step, 0, who, np.array(probs)) for step, probs in enumerate(believed)]
    assert [b.truth for b in heard] == pytest.approx([0.4, 0.6, 0.8, 0.8])
    said = [turn("a", 0, "it is pink"), turn("a", 1, "it is red"), turn("a", 2, "no, pink")]
    assert SpeakingReward()(episode(said, heard)).tolist() == pytest.approx([0.2, 0.2, 0.0])
    logs = SpeakingReward(of="log_probability")(episode(said, heard))
    assert logs.tolist() == pytest.approx([math.log(0.6 / 0.4), math.log(0.8 / 0.6), 0.0])


# -- speaking --------------------------------------------------------------------------------------------------------

# Three seats, two messages. Truths:        at the start   after a's   after b's
HEARD = [
    belief("a", 0, 0.5), belief("a", 1, 0.6), belief("a", 2, 0.9),
    belief("b", 0, 0.5), belief("b", 1, 0.7), belief("b", 2, 0.75),
    belief("c", 0, 0.2), belief("c", 1, 0.1), belief("c", 2, 0.4),
]  # fmt: skip
TALK = episode([turn("a", 0, "one"), turn("b", 1, "two"), turn("c", 2)], HEARD, a="learner", b="learner", c="base")


@pytest.mark.parametrize(
    ("settings", "paid"),
    [
        ({}, [0.1, 0.6]),  # a's message: b +.2, c -.1; b's: a +.3, c +.3
        ({"listeners": "all"}, [0.2, 0.65]),  # and a's own +.1, b's own +.05
        ({"players": ("base",)}, [-0.1, 0.3]),
        ({"players": ("learner",)}, [0.2, 0.3]),
        ({"players": ("learner", "base")}, [0.1, 0.6]),
        ({"players": ("nobody",)}, [0.0, 0.0]),
        (
            {"of": "log_probability"},
            [math.log(0.7 / 0.5) + math.log(0.1 / 0.2), math.log(0.9 / 0.6) + math.log(0.4 / 0.1)],
        ),
    ],
)
def test_a_message_is_paid_what_it_did_to_its_listeners(settings: dict[str, Any], paid: list[float]) -> None:
    np.testing.assert_allclose(SpeakingReward(**settings)(TALK), [*paid, 0.0], atol=1e-12)


def test_log_probabilities_have_a_floor() -> None:
    certain = episode([turn("a", 0, "no")], [belief("b", 0, 0.5), belief("b", 1, 0.0)], a="x", b="x")
    np.testing.assert_allclose(SpeakingReward(of="log_probability")(certain), [math.log(FLOOR / 0.5)], atol=1e-12)
    assert SpeakingReward()(certain).tolist() == [-0.5]


def test_adversaries_earn_the_negative_and_are_no_listeners() -> None:
    beliefs = [b if b.listener != "c" else replace(b, role="imposter") for b in HEARD]
    turns = [turn("a", 0, "one", role="imposter"), turn("b", 1, "two")]
    game = episode(turns, beliefs, a="x", b="x", c="x")
    np.testing.assert_allclose(SpeakingReward()(game), [-0.2, 0.3], atol=1e-12)
    np.testing.assert_allclose(SpeakingReward(adversaries=())(game), [0.1, 0.6], atol=1e-12)


def test_questions_add_up_and_are_compared_with_themselves() -> None:
    beliefs = [
        belief("b", 0, 0.5), belief("b", 0, 0.2, WHAT), belief("b", 1, 0.6), belief("b", 1, 0.9, WHAT),
        belief("b", 3, 0.8, WHAT),  # the first question was not asked this time
    ]  # fmt: skip
    game = episode([turn("a", 0, "one"), turn("a", 2, "two")], beliefs, a="x", b="x")
    np.testing.assert_allclose(SpeakingReward()(game), [0.1 + 0.7, -0.1], atol=1e-12)


def test_a_message_that_changes_nothing_was_heard_all_the_same() -> None:
    """The first message counts as heard though the listener's belief stays below the floor of log-probabilities."""
    unheard_game = episode(
        [turn("a", 1, "hello"), turn("a", 3, "it is c"), turn("a", 5, "bye")],
        [belief("b", 1, 1e-6), belief("b", 2, 2e-6), belief("b", 4, 0.1)],
    )
    reward = SpeakingReward(of="log_probability")
    assert [len(each) for each in reward.changes(unheard_game)] == [1, 1, 0]
    np.testing.assert_allclose(reward(unheard_game), [0.0, np.log(0.1 / FLOOR), 0.0])
    np.testing.assert_allclose(belief_changes(unheard_game, "log_probability"), [0.0, np.log(0.1 / FLOOR), np.nan])


@pytest.mark.parametrize(
    ("turns", "beliefs", "paid"),
    [
        ([turn("a", 0, "one"), turn("a", 1, "two")], [(0, 0.1), (1, 0.5)], [0.4, 0.0]),  # nobody was asked after two
        ([turn("a", 0, "one")], [(1, 0.9)], [0.0]),  # a first question has nothing before it
        ([turn("a", 5, "late")], [(0, 0.1), (3, 0.5), (6, 0.6)], [0.1]),  # the belief before is the latest one
        ([turn("a", 0)], [(0, 0.1), (1, 0.9)], [0.0]),  # nothing was said
    ],
)
def test_a_message_is_paid_by_the_beliefs_right_before_and_after(
    turns: list[Turn], beliefs: list[tuple[int, float]], paid: list[float]
) -> None:
    game = episode(turns, [belief("b", step, truth) for step, truth in beliefs], a="x", b="x")
    np.testing.assert_allclose(SpeakingReward()(game), paid, atol=1e-12)


def test_rewards_are_filled_in_by_name_and_unweighted() -> None:
    terms: dict[str, Reward] = {"game": GameReward(weight=0.0, scale=1.0), "speaking": SpeakingReward(weight=7.0)}
    paid = replace(TALK, payments=(Payment("c", 2, 5.0),))
    (filled,) = add_rewards([paid], terms)
    assert [set(t.rewards) for t in filled.turns] == [{"game", "speaking"}, {"game", "speaking"}, {"game"}]
    assert [t.rewards["game"] for t in filled.turns] == [0.0, 0.0, 5.0]
    assert [t.rewards["speaking"] for t in filled.turns[:2]] == pytest.approx([0.1, 0.6])  # of messages only
    assert not paid.turns[0].rewards  # the episode that was given stays as it was
    assert [t.rewards for t in add_rewards([paid], {})[0].turns] == [{}] * 3


@dataclass(frozen=True)
class Returns:
    """A user's own reward, which returns this."""

    returned: Any
    weight: float = 1.0

    def __call__(self, episode: Episode) -> Any:
        return self.returned


def test_a_reward_of_ones_own_may_be_any_list_of_numbers_and_is_named_if_it_raises() -> None:
    for amounts in ([1, 0.5, -2.0], (1, 0.5, -2), np.array([1, 0.5, -2], dtype=np.float32)):
        (filled,) = add_rewards([TALK], {"mine": Returns(amounts)})
        assert [t.rewards for t in filled.turns] == [{"mine": 1.0}, {"mine": 0.5}, {"mine": -2.0}]
    line = (divides := lambda self, episode: 1 / len(episode.payments)).__code__.co_firstlineno
    with pytest.raises(UserError) as error:
        add_rewards([TALK], {"bad": type("Divides", (Returns,), {"__call__": divides})(None)})
    said = f"reward.bad: Divides raised ZeroDivisionError: division by zero ({__file__}, line {line})"
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ([1.0, 2.0], "[1.0, 2.0] of shape (2,)"),
        (0.5, "0.5 of shape ()"),
        (None, "None of shape ()"),
        ([0.0, math.nan, 0.0], "[0.0, nan, 0.0] of shape (3,)"),
        ([[0.0], [], []], "[[0.0], [], []]"),
        ({"a": 1.0}, "{'a': 1.0}"),
        (["one", "two", "three"], "['one', 'two', 'three']"),
    ],
    ids=repr,
)
def test_what_is_no_number_for_each_turn_is_refused(returned: Any, shown: str) -> None:
    with pytest.raises(UserError) as error:
        add_rewards([TALK], {"game": GameReward(scale=1.0), "mine": Returns(returned)})
    assert str(error.value) == (
        f"reward.mine: returned {shown}. Return finite numbers of shape (3,), one for each turn."
    )

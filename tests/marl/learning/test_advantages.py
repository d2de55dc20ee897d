"""GAE against a double loop and numbers worked out by hand; credit of speech, token by token."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marl.learning.advantages import Credit, add_advantages, gae
from marl.learning.batch import collate, rows_of
from marl.rewards import Reward
from marl.rewards.speaking import SpeakingReward
from marl.types import Episode, TokenBatch, Turn
from tests.marl.batches import chose, paying, proposed, said, talk, three_turns

real = st.floats(-10, 10, width=32)
share = st.floats(0, 1, width=32)


@given(st.lists(st.tuples(real, real), max_size=8), share, share)
def test_gae_is_the_discounted_sum_of_later_errors(
    turns: list[tuple[float, float]], gamma: float, gae_lambda: float
) -> None:
    rewards = torch.tensor([r for r, _ in turns], dtype=torch.float64)
    values = torch.tensor([v for _, v in turns], dtype=torch.float64)
    advantages, returns = gae(rewards, values, gamma, gae_lambda)
    count = len(turns)
    for u in range(count):
        naive = 0.0
        for k in range(count - u):
            following = float(values[u + k + 1]) if u + k + 1 < count else 0.0
            error = float(rewards[u + k]) + gamma * following - float(values[u + k])
            naive += (gamma * gae_lambda) ** k * error
        assert float(advantages[u]) == pytest.approx(naive, abs=1e-9)
        assert float(returns[u]) == pytest.approx(naive + float(values[u]), abs=1e-9)


def test_gae_by_hand() -> None:
    rewards, values = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, 1.0, 1.0])
    # errors .5, 1, 1 with gamma 1; then 1 + .5 x 1 = 1.5 and .5 + .5 x 1.5 = 1.25
    advantages, returns = gae(rewards, values, 1.0, 0.5)
    assert advantages.tolist() == [1.25, 1.5, 1.0] and returns.tolist() == [1.75, 2.5, 2.0]
    # errors 0, .5, 1 with gamma .5; then .5 + .25 x 1 = .75 and 0 + .25 x .75 = .1875
    advantages, _ = gae(rewards, values, 0.5, 0.5)
    assert advantages.tolist() == [0.1875, 0.75, 1.0]
    # lambda 1: what follows in total, less the value
    assert gae(rewards, values, 1.0, 1.0)[0].tolist() == [2.5, 2.0, 1.0]
    assert gae(rewards, values, 1.0, 0.0)[0].tolist() == [0.5, 1.0, 1.0]


# Two players: each says something and then proposes. Tokens of a row: observed, [tag, x, y, end], observed, [tag, end].
TALK = [
    [said(0, value=0.5, game=0.0, speaking=0.25), proposed(2, value=1.0, game=2.0)],
    [said(1, value=0.0, game=0.0, speaking=-0.25), proposed(3, value=0.0, game=1.0)],
]
GAME = [[1.0, 1.0], [0.5, 1.0]]  # advantages of the game's reward, gamma 1, lambda .5: of message, of proposal
SPEAKING = 2 * 0.5**0.5  # of a speaking reward of +.25 against one of -.25, with weight 2


def credited(talk_of: list[list[Turn]], credit: Credit, weights: dict[str, float]) -> TokenBatch:
    seats = rows_of([talk(*talk_of)], {"learner"})
    return add_advantages(collate(seats, paying(**weights)), paying(**weights), credit)


def rows(*per_row: list[float]) -> torch.Tensor:
    """Message of tag, x, y, end and proposal of two tokens, each after one token that was read."""
    return torch.tensor([[0, tag, m, m, m, 0, p, p] for tag, m, p in per_row])


@pytest.mark.parametrize(
    ("speech", "normalize", "advantages", "returns"),
    [
        # a: rewards .5, 2; errors 1, 1; advantages 1.5, 1. b: rewards -.5, 1; errors -.5, 1; advantages 0, 1.
        ("common", False, rows([1.5, 1.5, 1.0], [0.0, 0.0, 1.0]), [[2.0, 2.0], [0.0, 1.0]]),
        ("separate", False, rows([1.0, 1.0 + SPEAKING, 1.0], [0.5, 0.5 - SPEAKING, 1.0]), [[1.5, 2.0], [0.5, 1.0]]),
        ("separate_raw", False, rows([1.0, 1.0 + 0.5, 1.0], [0.5, 0.5 - 0.5, 1.0]), [[1.5, 2.0], [0.5, 1.0]]),
        ("separate_only", False, rows([1.0, SPEAKING, 1.0], [0.5, -SPEAKING, 1.0]), [[1.5, 2.0], [0.5, 1.0]]),
        # the game's 1, 1, .5, 1 have mean .875 and standard deviation .25; messages and returns are not normalised
        ("separate", True, rows([0.5, 0.5 + SPEAKING, 0.5], [-1.5, -1.5 - SPEAKING, 0.5]), [[1.5, 2.0], [0.5, 1.0]]),
    ],
)
def test_credit_of_a_message_and_its_end(
    speech: str, normalize: bool, advantages: torch.Tensor, returns: list[list[float]]
) -> None:
    credit = Credit(gamma=1.0, gae_lambda=0.5, normalize=normalize, speech=speech)
    batch = credited(TALK, credit, {"game": 1.0, "speaking": 2.0})
    torch.testing.assert_close(batch.advantages, advantages, atol=1e-6, rtol=1e-6)
    if not normalize:  # tags and proposals: the game's, exactly
        assert batch.advantages[~batch.message].equal(advantages[~batch.message])
    assert batch.returns[batch.decision].view(2, 2).tolist() == returns and not batch.returns[~batch.decision].any()


def test_each_reward_of_messages_is_normalised_by_itself() -> None:
    """The unit of a reward makes no difference, nor does who else heard or was paid."""
    pays: dict[str, Reward] = {"speaking": SpeakingReward(weight=2.0), "other": SpeakingReward(weight=-0.5)}
    talks = [[said(0, speaking=0.25, other=1.0)], [said(1, speaking=-0.25, other=5.0)], [said(2, other=9.0)]]
    batch = collate(rows_of([talk(*talks)], {"learner"}), pays)
    found = add_advantages(batch, pays, Credit(speech="separate_only")).advantages[:, 2].tolist()
    assert found == pytest.approx([SPEAKING + 0.5, -SPEAKING, -0.5], abs=1e-5)  # a weight below 0 turns it around
    together = add_advantages(batch, pays, Credit(speech="common", normalize=False))
    assert not together.rewards.any() and together.returns[:, 1].tolist() == [0.0, -3.0, -4.5]


@pytest.mark.parametrize("heard", [1, 2])
def test_separate_only_gives_messages_that_nobody_heard_nothing(heard: int) -> None:
    """Unheard messages are also left out when two heard ones are normalised. A single heard message gets nothing,
    because there is no other to compare it with."""
    talks = [
        [said(0, value=0.5, game=0.0, speaking=0.25), proposed(2, value=1.0, game=2.0)],
        [said(1, value=0.0, game=0.0, speaking=-0.25 * (heard - 1)), said(3, game=1.0, speaking=0.0)],
    ]
    credit = Credit(gamma=1.0, gae_lambda=0.5, normalize=False, speech="separate_only")
    batch = credited(talks, credit, {"game": 1.0, "speaking": 2.0})
    first, *others = batch.advantages[batch.message].view(3, 3).tolist()
    assert first == pytest.approx([SPEAKING * (heard - 1)] * 3) and others[1] == [0.0] * 3
    assert others[0] == pytest.approx([-SPEAKING * (heard - 1)] * 3)
    assert batch.advantages[0, 6:8].tolist() == [1.0, 1.0], "the proposal keeps the game's advantage"


def test_speech_is_normalised_over_heard_messages() -> None:
    """Proposals, choices and refused replies are not messages, however many there are."""
    talks = [
        [said(0, speaking=1.0), proposed(2, speaking=0.0), chose(4, speaking=0.0)],
        [said(1, speaking=2.0), proposed(3, speaking=0.0), said(5, speaking=6.0, body=(0, 2))],
    ]
    batch = credited(talks, Credit(speech="separate_only"), {"game": 1.0, "speaking": 0.5})
    at = [float(batch.advantages[r, t]) for r, t in ((0, 2), (1, 2), (1, 9))]
    # 1, 2, 6: mean 3, standard deviation sqrt(7)
    assert at == pytest.approx([0.5 * x / 7**0.5 for x in (-2, -1, 3)], abs=1e-6)
    messages = batch.advantages[batch.message].view(3, 3)
    assert messages.equal(messages[:, :1].expand(3, 3))  # the same for every token of a message


@pytest.mark.parametrize("speech", ["common", "separate", "separate_raw", "separate_only"])
@pytest.mark.parametrize("normalize", [False, True])
def test_weight_zero_is_the_games_advantage_exactly(speech: str, normalize: bool) -> None:
    credit = Credit(gae_lambda=0.7, normalize=normalize, speech=speech)
    zero = credited(TALK, credit, {"game": 0.3, "speaking": 0.0})
    silent = [[replace(t, rewards={"game": t.rewards["game"]}) for t in own] for own in TALK]
    absent = credited(silent, Credit(gae_lambda=0.7, normalize=normalize, speech="common"), {"game": 0.3})
    assert zero.advantages.equal(absent.advantages) and zero.returns.equal(absent.returns)
    assert zero.advantages.any()


def test_messages_worth_the_same_get_no_credit_of_their_own() -> None:
    """Rounding must not be blown up to the size of a signal."""
    amount = 0.1
    talks = [[said(2 * u, speaking=amount) for u in range(7)], [said(2 * u + 1, speaking=amount) for u in range(6)]]
    batch = credited(talks, Credit(speech="separate_only"), {"speaking": 0.3})
    assert float(batch.advantages.abs().max()) < 1e-2


def test_a_single_message_has_nothing_to_be_compared_with() -> None:
    batch = credited([[said(0, speaking=1.0, game=1.0)]], Credit(normalize=False), {"game": 1.0, "speaking": 1.0})
    assert batch.advantages.tolist() == [[0, 1, 1, 1, 1]]


def test_rows_without_turns_are_harmless() -> None:
    quiet: Episode = replace(three_turns(), turns=three_turns().turns[:1])
    rewards = paying(game=1.0)
    filled = add_advantages(collate([(quiet, "a"), (quiet, "b")], rewards), rewards, Credit(normalize=False))
    assert filled.advantages.tolist() == [[0, 0, 0, 0, 1.5, 1.5, 1.5, 1.5, 0, 0, 0, 0], [0.0] * 12]


@pytest.mark.parametrize("speech", ["common", "separate", "separate_only"])
@pytest.mark.parametrize(("stopped", "went_on"), [(1.0, 0.6), (0.3, 0.9)])
def test_the_gradient_of_stopping_is_exact(speech: str, stopped: float, went_on: float) -> None:
    """Half of all messages earn 0. The others say `a`, then end (earning `stopped`) or say `b` and end (`went_on`).

    Rows stand in proportion to their probabilities. The exact gradient of the mean reward with respect to the logit of
    ending after `a` is p (1 - p) (stopped - went_on) / 2, divided by the rewards' standard deviation.
    """
    end, a, b, other, rows = 44, 40, 41, 42, 400
    said_ids = [(a, end)] * (rows // 4) + [(a, b, end)] * (rows // 4) + [(other, end)] * (rows // 2)
    earned = [stopped] * (rows // 4) + [went_on] * (rows // 4) + [1e-12] * (rows // 2)
    talks = [
        talk([said(0, body=(0, len(ids) - 1), game=0.0, speaking=s)]) for ids, s in zip(said_ids, earned, strict=True)
    ]
    credit = Credit(speech=speech)
    rewards = paying(game=1.0, speaking=1.0)
    batch = add_advantages(collate(rows_of(talks, {"learner"}), rewards), rewards, credit)
    # d log p(token) / d logit of stopping, p = 1/2; the second token of `a` rows decides
    score = torch.zeros(batch.shape)
    score[: rows // 4, 2], score[rows // 4 : rows // 2, 2] = 0.5, -0.5
    found = float((batch.advantages * score).sum() / rows)
    true = 0.5 * 0.25 * (stopped - went_on) / float(torch.tensor(earned).std())
    assert found == pytest.approx(true, rel=1e-4)


def test_a_message_that_the_game_cut_ends_where_it_was_cut() -> None:
    """Tokens after the last word that was heard are no part of the message."""
    episode = talk([said(0, body=(1, 3), game=0.0)])
    for cut, last in ((False, 4), (True, 3)):
        turn = replace(episode.turns[0], cut=cut)
        batch = collate(rows_of([replace(episode, turns=(turn,))], {"learner"}), {})
        assert batch.message.nonzero()[:, 1].tolist() == list(range(2, last + 1)), cut

"""Masks, written out by hand for a game of three turns."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from marl.learning.batch import collate, rows_of
from marl.types import BY_TOKEN, Episode, Kind, Planned, TokenBatch
from tests.marl.batches import chose, paying, talk, three_turns

P, OBS, Q, C, S = Kind.PAD, Kind.OBSERVATION, Kind.QUESTION, Kind.CHOICE, Kind.SPEECH
REWARDS = paying(game=0.5, speaking=2.0)


def hand(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


def flags(*rows: str) -> Tensor:
    return torch.tensor([[mark == "x" for mark in row.replace(" ", "")] for row in rows])


@pytest.fixture
def batch() -> TokenBatch:
    episode = three_turns()
    return collate([(episode, "a"), (episode, "b")], REWARDS)


def test_every_token_of_the_three_turn_game(batch: TokenBatch) -> None:
    assert batch.shape == (2, 12)
    assert batch.tokens.tolist() == [
        [1, 20, 30, 2, 40, 41, 42, 43, 0, 0, 0, 0],
        [1, 30, 31, 41, 42, 30, 2, 44, 45, 9, 2, 51],
    ]
    assert batch.kind.tolist() == [
        [OBS, OBS, Q, OBS, S, S, S, S, P, P, P, P],
        [OBS, Q, Q, OBS, OBS, Q, OBS, S, S, OBS, OBS, C],
    ]
    #                                   0         4         8
    assert batch.decision.equal(flags(".... x... ....", ".... ...x ...x"))
    assert batch.body.equal(flags("    .... .xx. ....", ".... .... ...."))
    assert batch.message.equal(flags(" .... .xxx ....", ".... .... ...."))
    assert batch.reply.equal(flags("   .... xxxx ....", ".... ...x x..x"))
    assert batch.imitate.equal(flags(" .... xxxx ....", ".... .... ...x"))  # not what was refused
    assert batch.logprobs.equal(
        hand([0, 0, 0, 0, -0.1, -0.2, -0.3, -0.4, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, -0.5, -0.6, 0, 0, -0.7])
    )
    assert batch.values.equal(hand([0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0.25, 0, 0, 0, -0.5]))
    # .5 x 2 at the message and .5 x 3 at the choice; 2 x .25, credited to the message
    assert batch.rewards.equal(hand([0, 0, 0, 0, 1.0, 0, 0, 0, 0, 0, 0, 0], [0.0] * 11 + [1.5]))
    assert batch.message_rewards.equal(hand([0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0], [0.0] * 12)[..., None])
    for name in ("advantages", "returns", "reference_logprobs"):
        assert not getattr(batch, name).any() and getattr(batch, name).shape == (2, 12), name
    assert batch.privileged.equal(hand([1, 0], [0, 1]))
    assert batch.legal.shape == (2, 12, 3) and int((batch.legal >= 0).sum()) == 3
    assert batch.legal[1, 11].tolist() == [50, 51, 52]


def test_plans_stand_where_there_is_a_choice(batch: TokenBatch) -> None:
    assert batch.planned.equal(flags(".... .... ....", ".... .... ...x"))
    assert batch.plan_ids[1, 11].tolist() == [50, 51, 52]
    assert batch.plan[1, 11].tolist() == [0.25, 0.75, 0.0]
    assert batch.plan[~batch.planned].sum() == 0


def with_plan(planned: Planned) -> Episode:
    """The refused reply of the three-turn game, tokens 44 and 45, as a planned claim of two tokens."""
    episode = three_turns()
    turns = tuple(replace(turn, planned=planned if turn.step == 1 else None) for turn in episode.turns)
    return replace(episode, turns=turns)


def test_a_claims_plan_by_token() -> None:
    """Four claims: 44 45, 44 46, 47 45 and 47 46 48. The one that was played goes through 44."""
    claims = ((44, 45), (44, 46), (47, 45), (47, 46, 48))
    planned = Planned(("a", "b", "c", "d"), claims, (0.25,) * 4, (0.0,) * 4, (0.1, 0.3, 0.2, 0.4), 0, played=False)
    found = collate([(with_plan(planned), "b")], {})
    assert found.planned.equal(flags(".... ...x x..."))
    assert found.plan_ids[0, 7:9].tolist() == [[44, 47], [45, 46]]
    torch.testing.assert_close(found.plan[0, 7:9], torch.tensor([[0.4, 0.6], [0.25, 0.75]]))
    # where all claims go on alike there is nothing to learn, and nothing where the plan never gets
    same = replace(planned, ids=((44, 45), (44, 46), (44, 49), (44, 46, 48)))
    assert collate([(with_plan(same), "b")], {}).planned.equal(flags(".... .... x..."))
    # after a choice also what must follow, so that the policy says nothing else
    forced = replace(planned, ids=((44, 45), (47, 45), (47, 46), (47, 46, 48)))
    found = collate([(with_plan(forced), "b")], {})
    assert found.planned.equal(flags(".... ...x x...")) and found.plan_ids[0, 8].tolist() == [45, -1]
    never = replace(planned, plan=(0.0, 0.0, 0.5, 0.5))
    assert collate([(with_plan(never), "b")], {}).planned.equal(flags(".... ...x ...."))


def test_replies_drawn_from_a_plan_are_no_samples_of_the_policy() -> None:
    planned = Planned(("a", "b"), ((44, 45), (46, 45)), (0.5, 0.5), (0.0, 0.0), (0.5, 0.5), 0)
    with pytest.raises(AssertionError, match="planner's, no sample of its policy"):
        collate([(with_plan(planned), "b")], {})
    assert collate([(with_plan(planned), "b")], {}, drawn_from_plans=True).planned.sum() == 2


def test_legal_sets_of_different_sizes_are_padded() -> None:
    episode = talk([chose(0, legal=(40, 41, 42, 43)), chose(2, legal=(40,))], [chose(1, legal=(40, 44))])
    batch = collate(rows_of([episode], {"learner"}), {})
    assert batch.legal[0].tolist() == [[-1] * 4, [40, 41, 42, 43], [-1] * 4, [40, -1, -1, -1]]
    assert batch.legal[1].tolist() == [[-1] * 4, [40, 44, -1, -1], [-1] * 4, [-1] * 4]


def test_belief_questions_keep_row_position_candidates_and_answer(batch: TokenBatch) -> None:
    assert batch.row.tolist() == [0, 1, 1, 1]
    assert batch.position.tolist() == [2, 1, 2, 5]
    assert batch.candidates.tolist() == [[50, 51, -1], [50, 51, -1], [60, 61, 62], [50, 51, -1]]
    assert batch.answer.tolist() == [1, 1, 0, 1]
    assert all(batch.kind[r, p] == Kind.QUESTION for r, p in zip(batch.row, batch.position, strict=True))


def test_several_true_answers_stand_beside_the_first(batch: TokenBatch) -> None:
    assert batch.also.shape == (4, 0)
    episode = three_turns()
    beliefs = tuple(
        replace(b, question=replace(b.question, answer=b.question.candidates[1], also=b.question.candidates[::2]))
        if len(b.candidate_ids) == 3
        else b
        for b in episode.beliefs
    )
    several = collate([(replace(episode, beliefs=beliefs), "a"), (replace(episode, beliefs=beliefs), "b")], REWARDS)
    assert several.answer.tolist() == [1, 1, 1, 1] and several.also.tolist() == [[-1, -1], [-1, -1], [0, 2], [-1, -1]]
    assert several.select(torch.tensor([0])).also.tolist() == [[-1, -1]]


def test_rewards_of_weight_zero_pay_nothing() -> None:
    """The reward here is NaN, which 0 times the reward would spread."""
    episode = three_turns()
    turns = (replace(episode.turns[0], rewards={"game": 2.0, "speaking": float("nan")}), *episode.turns[1:])
    batch = collate([(replace(episode, turns=turns), "a")], paying(game=0.5, speaking=0.0))
    assert batch.rewards[0, 4] == 1.0 and batch.message_rewards.shape == (1, 8, 0)
    assert not collate([(episode, "a")], {}).rewards.any()


def test_imitation_can_be_kept_from_rows() -> None:
    episode = three_turns()
    batch = collate([(episode, "a"), (episode, "b")], REWARDS, imitate=[False, True])
    assert batch.imitate.equal(flags(".... .... ....", ".... .... ...x"))


def test_silent_roles_are_not_asked() -> None:
    episode = three_turns()
    batch = collate([(episode, "a"), (episode, "b")], REWARDS, silent_roles=("listener",))
    assert batch.row.tolist() == [0] and batch.position.tolist() == [2] and batch.candidates.tolist() == [[50, 51]]
    nobody = collate([(episode, "b")], REWARDS, silent_roles=("listener",))
    assert nobody.row.shape == nobody.answer.shape == (0,) and nobody.candidates.shape[0] == 0


def test_only_seats_of_the_named_players_with_a_stream_become_rows() -> None:
    first = replace(three_turns(), players={"a": "learner", "b": "base"})
    second = replace(
        three_turns(), players={"a": "scripted", "b": "learner"}, streams={"b": three_turns().streams["b"]}
    )
    assert rows_of([first, second], {"learner"}) == [(first, "a"), (second, "b")]
    assert rows_of([first, second], {"base", "scripted"}) == [(first, "b")]
    assert rows_of([first, second], {"nobody"}) == []


def test_select_keeps_rows_and_questions_aligned(batch: TokenBatch) -> None:
    short = batch.select(torch.tensor([0]))
    assert short.shape == (1, 8)  # cut to its own length
    swapped = batch.select(torch.tensor([1, 0]))
    assert swapped.shape == (2, 12)
    for name in BY_TOKEN:
        assert getattr(short, name).equal(getattr(batch, name)[:1, :8]), name
        assert getattr(swapped, name).equal(getattr(batch, name).flip(0)), name
    assert swapped.privileged.equal(batch.privileged.flip(0)) and short.privileged.equal(batch.privileged[:1])
    assert short.row.tolist() == [0] and short.position.tolist() == [2] and short.answer.tolist() == [1]
    # each question still points at its own token, with its own candidates and answer
    assert swapped.row.tolist() == [1, 0, 0, 0] and swapped.position.tolist() == [2, 1, 2, 5]
    assert swapped.candidates.equal(batch.candidates) and swapped.answer.equal(batch.answer)
    assert [int(swapped.tokens[r, p]) for r, p in zip(swapped.row, swapped.position, strict=True)] == [30, 30, 31, 30]

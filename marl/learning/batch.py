"""Episodes -> TokenBatch: the only place where tokens are marked.

A row is one seat's stream, and behind it the questions that were asked beside it. Marked here: which tokens are
decisions, messages and choices, with the ids that were legal (`choice_logits` in model/policy.py masks a vote by them),
and which replies imitation may learn from. `advantages.py` says what they are worth, `losses/` what is learned from
them.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from marl.planning.planner import next_tokens
from marl.rewards import Reward, of_messages
from marl.types import INSIDERS, Belief, Episode, Kind, TokenBatch, Turn

Row = tuple[Episode, str]  # one agent of one episode: a row of the batch


class BeliefTarget(NamedTuple):
    """Target of a belief in one row: a belief question, or a choice that says what is believed (`vote`)."""

    row: int
    position: int
    candidates: Sequence[int]
    answer: int
    also: Sequence[int]
    vote: bool


def rows_of(episodes: Sequence[Episode], players: Collection[str]) -> list[Row]:
    """Lists the seats that any of these players held, in order: the rows of a batch."""
    return [
        (e, agent) for e in episodes for agent, player in e.players.items() if player in players and agent in e.streams
    ]


def collate(
    rows: Sequence[Row],
    rewards: Mapping[str, Reward],
    *,
    imitate: Sequence[bool] | None = None,
    silent_roles: Collection[str] = INSIDERS,
    votes: bool = False,
    drawn_from_plans: bool = False,
) -> TokenBatch:
    """Pads the rows' streams on the right and marks every token.

    `rewards` fill `rewards` and `message_rewards`, by where they are credited; at weight 0 they pay nothing. `imitate`
    marks the rows that imitation learns from (None: all), but for refused replies. Beliefs of `silent_roles` are left
    out. `votes`: choices that say what is believed stand beside the questions, read where they were sampled.
    `drawn_from_plans`: replies may be a planner's; then no loss may compare the policy with `logprobs`.
    Advantages, returns and reference log-probabilities are left at 0.
    """
    assert rows, "an empty batch has no shape"
    asking = [[x for x in e.beliefs if x.listener == agent and x.role not in silent_roles] for e, agent in rows]
    branches = [branches_of(len(e.streams[agent]), own) for (e, agent), own in zip(rows, asking, strict=True)]
    turns_of = [[t for t in episode.turns if t.agent == agent and t.reply_ids] for episode, agent in rows]
    plans = {id(t): next_tokens(t.planned) for turns in turns_of for t in turns if t.planned}
    columns, weights = of_messages(rewards), {name: r.weight for name, r in rewards.items() if r.weight}
    size = len(rows)
    length = max(max(len(e.streams[agent]), *own.values(), 0) for (e, agent), own in zip(rows, branches, strict=True))
    a = _blank(
        (size, length),
        columns=len(columns),
        options=max((len(t.legal) for turns in turns_of for t in turns), default=0),
        planned=max((len(after) for following in plans.values() for after in following), default=0),
    )
    asked: list[BeliefTarget] = []
    for b, ((episode, agent), turns) in enumerate(zip(rows, turns_of, strict=True)):
        stream = episode.streams[agent]
        a["tokens"][b, : len(stream)] = stream.tokens
        a["kind"][b, : len(stream)] = stream.kinds
        a["position_ids"][b, : len(stream)] = np.arange(len(stream))
        for number, ((position, ids), end) in enumerate(branches[b].items(), start=1):
            here = slice(end - len(ids), end)
            a["tokens"][b, here], a["kind"][b, here], a["branch"][b, here] = ids, Kind.QUESTION, number
            a["position_ids"][b, here] = position + 1 + np.arange(len(ids))
        learn = imitate is None or imitate[b]
        for turn in turns:
            assert drawn_from_plans or turn.planned is None or not turn.planned.played, (
                f"{agent}'s reply in step {turn.step} is a planner's, no sample of its policy"
            )
            start, end = turn.start, turn.start + len(turn.reply_ids)
            a["decision"][b, start] = True
            a["body"][b, start + turn.body[0] : start + turn.body[1]] = True
            a["message"][b, start + turn.body[0] : _message_end(turn)] = True
            a["logprobs"][b, start:end] = turn.logprobs
            a["values"][b, start] = turn.value
            a["imitate"][b, start:end] = learn and not turn.error
            a["legal"][b, start, : len(turn.legal)] = turn.legal
            following = plans.get(id(turn), [])
            # What stands before the first choice is the policy's own decision: to make a claim at all.
            first = next((i for i, after in enumerate(following) if len(after) > 1), len(following))
            for t, after in enumerate(following[first:], start=start + first):
                a["plan_ids"][b, t, : len(after)] = list(after)
                a["plan"][b, t, : len(after)] = list(after.values())
            for name, weight in weights.items():
                weighted = weight * turn.rewards.get(name, 0.0)
                if name in columns:
                    a["message_rewards"][b, start, columns.index(name)] = weighted
                else:
                    a["rewards"][b, start] += weighted
        asked += [
            BeliefTarget(
                b, branches[b][x.position, x.branch] - 1 if x.branch else x.position, x.candidate_ids,
                x.question.answer_index, x.question.also_indices, False,
            )
            for x in asking[b]
        ]  # fmt: skip
        asked += [
            BeliefTarget(b, turn.start - 1, turn.legal, turn.truths[0], turn.truths[1:], True)
            for turn in turns
            if votes and turn.truths and turn.role not in silent_roles
        ]
    privileged = np.array([episode.privileged.get(agent, ()) for episode, agent in rows], dtype=np.float32)
    return TokenBatch(
        **{name: torch.from_numpy(array) for name, array in a.items()},
        privileged=torch.from_numpy(privileged.reshape(size, -1)),
        row=torch.tensor([a.row for a in asked], dtype=torch.int64),
        position=torch.tensor([a.position for a in asked], dtype=torch.int64),
        candidates=_padded([a.candidates for a in asked]),
        answer=torch.tensor([a.answer for a in asked], dtype=torch.int64),
        vote=torch.tensor([a.vote for a in asked], dtype=torch.bool),
        also=_padded([a.also for a in asked]),
    )


def branches_of(length: int, beliefs: Sequence[Belief]) -> dict[tuple[int, tuple[int, ...]], int]:
    """Lays the branches of a stream of `length` tokens behind it, one after another: the end of each in the row, by the
    position that it goes on from and its tokens."""
    ends: dict[tuple[int, tuple[int, ...]], int] = {}
    for each in beliefs:
        if each.branch and (each.position, each.branch) not in ends:
            length += len(each.branch)
            ends[each.position, each.branch] = length
    return ends


def _message_end(turn: Turn) -> int:
    """Returns where a message ends in its stream, its end marker included: to stop is a decision about the message,
    unless the game cut the message before."""
    first, last = turn.body
    if first == last:  # no message
        return turn.start + first
    return turn.start + (last if turn.cut else len(turn.reply_ids))


def _blank(shape: tuple[int, int], columns: int, options: int, planned: int) -> dict[str, np.ndarray]:
    """Makes the fields with axes (B, T), all empty."""
    flags = {name: np.zeros(shape, bool) for name in ("decision", "body", "message", "imitate")}
    real = ("logprobs", "reference_logprobs", "values", "rewards", "advantages", "returns")
    return {
        "tokens": np.zeros(shape, np.int64),
        "kind": np.zeros(shape, np.int8),
        "branch": np.zeros(shape, np.int64),
        "position_ids": np.zeros(shape, np.int64),
        **flags,
        **{name: np.zeros(shape, np.float32) for name in real},
        "message_rewards": np.zeros((*shape, columns), np.float32),
        "legal": np.full((*shape, options), -1, np.int64),
        "plan_ids": np.full((*shape, planned), -1, np.int64),
        "plan": np.zeros((*shape, planned), np.float32),
    }


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Returns the rows as one tensor, (rows, longest), padded with -1."""
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], dtype=torch.int64).view(len(rows), width)

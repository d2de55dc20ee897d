"""Episodes -> TokenBatch: the only place where tokens are marked.

A row is one seat's stream, and behind it the questions that were asked beside it. Marked here: which tokens are
decisions, messages and choices, with the ids that were legal (`reply_logits` in model/policy.py masks a vote by them),
and which replies imitation may learn from. `advantages.py` says what they are worth, `losses/` what is learned from
them.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from marl.model.policy import padded
from marl.planning.planner import next_tokens
from marl.rewards import Reward, of_messages
from marl.types import BY_TOKEN, INSIDERS, Belief, Episode, Kind, Stream, TokenBatch, Turn

Row = tuple[Episode, str]  # one agent of one episode: a row of the batch
Branches = dict[tuple[int, tuple[int, ...]], int]  # ends of branches in the row, by where they begin and their tokens
IDS = ("legal", "plan_ids")  # fields padded with -1


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
    """Marks every token of the rows' streams, and pads them on the right.

    `rewards` fill `rewards` and `message_rewards`, by where they are credited; at weight 0 they pay nothing. `imitate`
    marks the rows that imitation learns from (None: all), but for refused replies. Beliefs of `silent_roles` are left
    out. `votes`: choices that say what is believed stand beside the questions, read where they were sampled.
    `drawn_from_plans`: replies may be a planner's; then no loss may compare the policy with `logprobs`.
    Advantages, returns and reference log-probabilities are left at 0.
    """
    assert rows, "an empty batch has no shape"
    marked: list[dict[str, NDArray[Any]]] = []
    targets: list[BeliefTarget] = []
    for b, (episode, agent) in enumerate(rows):
        turns = [turn for turn in episode.turns if turn.agent == agent and turn.reply_ids]
        for turn in turns:
            assert drawn_from_plans or turn.planned is None or not turn.planned.played, (
                f"{agent}'s reply in step {turn.step} is a planner's, no sample of its policy"
            )
        beliefs = [x for x in episode.beliefs if x.listener == agent and x.role not in silent_roles]
        branches = branches_of(len(episode.streams[agent]), beliefs)
        marked.append(mark(episode.streams[agent], branches, turns, rewards, imitate is None or imitate[b]))
        for x in beliefs:
            position = branches[x.position, x.branch] - 1 if x.branch else x.position
            answer, also = x.question.answer_index, x.question.also_indices
            targets.append(BeliefTarget(b, position, x.candidate_ids, answer, also, vote=False))
        for turn in turns:
            if votes and turn.truths and turn.role not in silent_roles:
                targets.append(BeliefTarget(b, turn.start - 1, turn.legal, turn.truths[0], turn.truths[1:], vote=True))
    privileged = np.array([episode.privileged.get(agent, ()) for episode, agent in rows], dtype=np.float32)
    return TokenBatch(
        **{name: _stacked([row.pop(name) for row in marked], -1 if name in IDS else 0) for name in BY_TOKEN},
        privileged=torch.from_numpy(privileged.reshape(len(rows), -1)),
        row=torch.tensor([t.row for t in targets], dtype=torch.int64),
        position=torch.tensor([t.position for t in targets], dtype=torch.int64),
        candidates=padded([t.candidates for t in targets]),
        answer=torch.tensor([t.answer for t in targets], dtype=torch.int64),
        vote=torch.tensor([t.vote for t in targets], dtype=torch.bool),
        also=padded([t.also for t in targets]),
    )


def branches_of(length: int, beliefs: Sequence[Belief]) -> Branches:
    """Lays the branches of a stream of `length` tokens behind it, one after another."""
    ends: Branches = {}
    for each in beliefs:
        if each.branch and (each.position, each.branch) not in ends:
            length += len(each.branch)
            ends[each.position, each.branch] = length
    return ends


def mark(
    stream: Stream, branches: Branches, turns: Sequence[Turn], rewards: Mapping[str, Reward], imitate: bool
) -> dict[str, NDArray[Any]]:
    """Marks the tokens of one row: the fields of a TokenBatch with axes (T, ...), not yet padded to other rows."""
    plans = [next_tokens(turn.planned) if turn.planned else [] for turn in turns]
    columns = of_messages(rewards)
    row = _unmarked(
        max([len(stream), *branches.values()]),
        columns=len(columns),
        options=max((len(turn.legal) for turn in turns), default=0),
        planned=max((len(after) for plan in plans for after in plan), default=0),
    )
    row["tokens"][: len(stream)] = stream.tokens
    row["kind"][: len(stream)] = stream.kinds
    row["position_ids"][: len(stream)] = np.arange(len(stream))
    for number, ((position, ids), end) in enumerate(branches.items(), start=1):
        here = slice(end - len(ids), end)
        row["tokens"][here], row["kind"][here], row["branch"][here] = ids, Kind.QUESTION, number
        row["position_ids"][here] = position + 1 + np.arange(len(ids))
    for turn, plan in zip(turns, plans, strict=True):
        start, end = turn.start, turn.start + len(turn.reply_ids)
        row["decision"][start] = True
        row["body"][start + turn.body[0] : start + turn.body[1]] = True
        row["message"][start + turn.body[0] : _message_end(turn)] = True
        row["logprobs"][start:end] = turn.logprobs
        row["values"][start] = turn.value
        row["imitate"][start:end] = imitate and not turn.error
        row["legal"][start, : len(turn.legal)] = turn.legal
        # Tokens before the first choice are the policy's own decision: to make a claim at all.
        first = next((i for i, after in enumerate(plan) if len(after) > 1), len(plan))
        for t, after in enumerate(plan[first:], start=start + first):
            row["plan_ids"][t, : len(after)] = list(after)
            row["plan"][t, : len(after)] = list(after.values())
        for name, reward in rewards.items():
            if reward.weight:  # 0 times NaN is NaN
                weighted = reward.weight * turn.rewards.get(name, 0.0)
                if name in columns:
                    row["message_rewards"][start, columns.index(name)] = weighted
                else:
                    row["rewards"][start] += weighted
    return row


def _message_end(turn: Turn) -> int:
    """Returns where a message ends in its stream, its end marker included: to stop is a decision about the message,
    unless the game cut the message before."""
    first, last = turn.body
    if first == last:  # no message
        return turn.start + first
    return turn.start + (last if turn.cut else len(turn.reply_ids))


def _unmarked(length: int, columns: int, options: int, planned: int) -> dict[str, NDArray[Any]]:
    """Makes the fields of a row of so many tokens, all empty."""
    ids = {name: np.zeros(length, np.int64) for name in ("tokens", "branch", "position_ids")}
    flags = {name: np.zeros(length, bool) for name in ("decision", "body", "message", "imitate")}
    real = ("logprobs", "reference_logprobs", "values", "rewards", "advantages", "returns")
    return {
        **ids,
        **flags,
        **{name: np.zeros(length, np.float32) for name in real},
        "kind": np.zeros(length, np.int8),
        "message_rewards": np.zeros((length, columns), np.float32),
        "legal": np.full((length, options), -1, np.int64),
        "plan_ids": np.full((length, planned), -1, np.int64),
        "plan": np.zeros((length, planned), np.float32),
    }


def _stacked(rows: Sequence[NDArray[Any]], fill: int) -> Tensor:
    """Stacks one field of all rows, padded with `fill` to the largest of them, (B, T, ...)."""
    shape = np.max([row.shape for row in rows], axis=0)
    whole = np.full((len(rows), *shape), fill, rows[0].dtype)
    for place, row in zip(whole, rows, strict=True):
        place[tuple(map(slice, row.shape))] = row
    return torch.from_numpy(whole)

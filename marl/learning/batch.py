"""Episodes -> TokenBatch: the only place where masks are made.

A row is one seat's stream. What enters a row at which token is decided here and nowhere else; what it is worth is
decided in advantages.py, what is learned from it in losses/.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from marl.planning.planner import next_tokens
from marl.types import Belief, Episode, TokenBatch

Seat = tuple[Episode, str]


def seats_of(episodes: Sequence[Episode], players: Collection[str]) -> list[Seat]:
    """The seats that any of these players held, in order: the rows of a batch. Seats of frozen players never are."""
    return [
        (e, agent) for e in episodes for agent, player in e.players.items() if player in players and agent in e.streams
    ]


def collate(
    seats: Sequence[Seat],
    weights: Mapping[str, float],
    *,
    separate_speech: bool = False,
    imitate: Callable[[Episode, str], bool] = lambda episode, agent: True,
    privileged: Callable[[Episode, str], Sequence[float]] = lambda episode, agent: (),
    silent_roles: Collection[str] = (),
    drawn_from_plans: bool = False,
) -> TokenBatch:
    """Pads the seats' streams on the right and marks every token.

    `weights` of the rewards by name: terms of weight 0 pay nothing. With `separate_speech` the speaking reward goes to
    `speaking`, otherwise into `rewards`. `imitate` selects rows that imitation learns from: their replies except those
    that the game refused. `silent_roles` are not asked (their beliefs train no listener). `drawn_from_plans`: replies
    that a planner drew may be among the rest; their log-probabilities are the plan's, so that no term may compare the
    policy's with them. Advantages, returns and reference log-probabilities are left at 0.
    """
    assert seats, "an empty batch has no shape"
    size, length = len(seats), max(len(episode.streams[agent]) for episode, agent in seats)
    choices = max((len(t.legal) for e, agent in seats for t in e.turns if t.agent == agent), default=0)
    plans = {id(t): next_tokens(t.planned) for e, agent in seats for t in e.turns if t.agent == agent and t.planned}
    widest = max((len(after) for following in plans.values() for after in following), default=0)
    long, real, flag = np.int64, np.float32, np.bool_
    shapes: dict[str, tuple[type, tuple[int, ...]]] = {
        "tokens": (long, ()), "kind": (np.int8, ()), "decision": (flag, ()), "body": (flag, ()), "message": (flag, ()),
        "logprobs": (real, ()), "reference_logprobs": (real, ()), "values": (real, ()), "rewards": (real, ()),
        "speaking": (real, ()), "advantages": (real, ()), "returns": (real, ()), "imitate": (flag, ()),
        "legal": (long, (choices,)), "plan_ids": (long, (widest,)), "plan": (real, (widest,)),
    }  # fmt: skip
    a: dict[str, np.ndarray] = {name: np.zeros((size, length, *tail), dtype) for name, (dtype, tail) in shapes.items()}
    a["legal"] -= 1
    a["plan_ids"] -= 1
    asked: list[tuple[int, Belief]] = []
    for b, (episode, agent) in enumerate(seats):
        stream = episode.streams[agent]
        a["tokens"][b, : len(stream)] = stream.tokens
        a["kind"][b, : len(stream)] = stream.kinds
        learn = imitate(episode, agent)
        for turn in episode.turns:
            if turn.agent != agent or not turn.reply_ids:
                continue
            assert drawn_from_plans or turn.planned is None or not turn.planned.played, (
                f"{agent}'s reply in step {turn.step} is a planner's, no sample of its policy"
            )
            start, end = turn.start, turn.start + len(turn.reply_ids)
            a["decision"][b, start] = True
            first, last = turn.body
            a["body"][b, start + first : start + last] = True
            if first < last:  # to stop is a decision about the message, unless the game cut the message before
                a["message"][b, start + first : start + last if turn.cut else end] = True
            a["logprobs"][b, start:end] = turn.logprobs
            a["values"][b, start] = turn.value
            a["imitate"][b, start:end] = learn and not turn.error
            if turn.legal:
                a["legal"][b, start, : len(turn.legal)] = turn.legal
            following = plans.get(id(turn), [])
            # Before the first choice stands what the policy itself decided: that it claims at all.
            first = next((i for i, after in enumerate(following) if len(after) > 1), len(following))
            for t, after in enumerate(following[first:], start=start + first):
                a["plan_ids"][b, t, : len(after)] = list(after)
                a["plan"][b, t, : len(after)] = list(after.values())
            for name, amount in turn.rewards.items():
                into = "speaking" if separate_speech and name == "speaking" else "rewards"
                if weights.get(name, 0.0):
                    a[into][b, start] += weights[name] * amount
        asked.extend(
            (b, belief) for belief in episode.beliefs if belief.listener == agent and belief.role not in silent_roles
        )
    candidates = _padded([belief.candidate_ids for _, belief in asked])
    also = _padded([belief.question.also_indices for _, belief in asked])
    hidden = np.array([privileged(episode, agent) for episode, agent in seats], dtype=real)
    return TokenBatch(
        **{name: torch.from_numpy(array) for name, array in a.items()},
        privileged=torch.from_numpy(hidden.reshape(size, -1)),
        row=torch.tensor([b for b, _ in asked], dtype=torch.int64),
        position=torch.tensor([belief.position for _, belief in asked], dtype=torch.int64),
        candidates=candidates,
        answer=torch.tensor([belief.question.answer_index for _, belief in asked], dtype=torch.int64),
        also=also,
    )


def _padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """As one tensor, (rows, longest), with -1 after the shorter ones."""
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], dtype=torch.int64).view(len(rows), width)

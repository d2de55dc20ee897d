"""The nouns that everything passes through, with their shapes.

Axes: `B` rows (one agent's view of one episode), `T` tokens, `U` turns, `N` belief questions, `K` candidates.
Index `t` always describes token `t`: its kind, its log-probability given what stands before it, its advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envs.among_us.state import Role
from envs.core import Question, TurnKind


class Kind(IntEnum):
    """What a token of a stream is."""

    PAD = 0
    OBSERVATION = 1  # read: prompts, what others said, corrections, the cue to reply
    QUESTION = 2  # a belief question; the answer is read off after its last token and never appended
    CHOICE = 3  # one token, sampled out of a legal set
    SPEECH = 4  # sampled from the vocabulary


@dataclass
class Stream:
    """One agent's view of one episode: everything it read and wrote, as token ids, in order. Both lists: (T,)."""

    tokens: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)

    def append(self, ids: list[int], kind: Kind) -> None:
        self.tokens.extend(ids)
        self.kinds.extend([kind] * len(ids))

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Planned:
    """What a planner weighed before a reply (planner.py): its A actions, in one order throughout."""

    actions: tuple[str, ...]  # (A,) a claim, a name or skip
    ids: tuple[tuple[int, ...], ...]  # (A,) each as a whole reply
    anchor: tuple[float, ...]  # (A,) a language model's probabilities, the player's own or a frozen one's
    values: tuple[float, ...]  # (A,) what each is expected to be worth
    plan: tuple[float, ...]  # (A,) the planned probabilities
    chosen: int  # index of the action that was played
    played: bool = True  # whether that was drawn from the plan; else it is the policy's own sample
    floored: float = 0.0  # share of the anchors' probabilities, the others' too where they were read, that were raised


@dataclass(frozen=True)
class Turn:
    """One reply of one agent, at the `step`-th call of the environment's `step` (from 0).

    `reply_ids` stand in the agent's stream at `start : start + len(reply_ids)`. Players without a model have no
    stream: `reply_ids` is empty and `start` is -1. It is empty, too, where a model's stream had no room for more.
    `logprobs` are those of the distribution that was sampled from (temperature, legal mask). `body` is the range
    within `reply_ids` that others got to hear: empty for choices, proposals and refused replies. `legal` are the
    token ids that a CHOOSE reply was sampled from, empty for SPEAK.
    """

    agent: str
    role: str
    step: int
    kind: TurnKind
    text: str
    reply_ids: tuple[int, ...] = ()
    start: int = -1
    logprobs: tuple[float, ...] = ()
    value: float = 0.0
    legal: tuple[int, ...] = ()
    body: tuple[int, int] = (0, 0)
    message: str = ""  # what the others heard; empty where nothing was said
    error: str = ""  # why the game refused the reply; empty where it did not
    cut: bool = False  # unfinished: it met the limit of its tokens, or of what the game passes on
    thoughts: str = ""  # what an endpoint's model wrote for itself; nobody in the game reads it
    planned: Planned | None = None  # None: the reply is the policy's own sample
    rewards: dict[str, float] = field(default_factory=dict)  # by term, unweighted

    @property
    def outgrown(self) -> bool:
        """Whether a model's stream had no room for it."""
        return self.start >= 0 and not self.reply_ids


@dataclass(frozen=True)
class Belief:
    """A listener's answer to a belief question that fell due after `step` environment steps (0: at reset).

    A message spoken in `Turn.step == s` is heard in the observations after `s + 1` steps: the belief it meets has
    `step <= s`, the belief it leaves has `step == s + 1`. `position` is the index of the question's last token in the
    listener's stream. `probs` has shape (K,) and sums to one; `candidate_ids` are the K token ids it was read from.
    """

    listener: str
    role: str
    step: int
    position: int
    question: Question
    probs: np.ndarray
    candidate_ids: tuple[int, ...] = ()

    @property
    def truth(self) -> float:
        """Probability of the true answer; of several, of any of them."""
        return float(self.pooled[self.question.answer_index])

    @property
    def pooled(self) -> np.ndarray:
        """`probs` (K,) with the probability of all true answers in the place of the first, and 0 for the others."""
        return pooled(self.probs, self.question.answer_index, self.question.also_indices)


def pooled(probs: np.ndarray, answer: int, also: Sequence[int]) -> np.ndarray:
    """`probs` (K,) with the probability of all these candidates in the place of `answer`."""
    if not also:
        return probs
    together = probs.copy()
    together[answer] += probs[list(also)].sum()
    together[list(also)] = 0.0
    return together


@dataclass(frozen=True)
class Payment:
    """What the environment paid `agent` in its `step`-th step (from 0)."""

    agent: str
    step: int
    amount: float


@dataclass(frozen=True)
class Episode:
    """A finished game. `streams` has an entry for every seat that a language model (or a recorded player) held.

    `players` names who held each seat (`learner`, `base`, `scripted`, ...). `outcome` is the game's own summary, the
    same for every seat. `facts` is the game's hidden state at the start (contexts, roles), for analysts; `privileged`
    is what of it a privileged critic sees at each seat, as numbers.
    """

    seed: int
    players: dict[str, str]
    roles: dict[str, str]
    streams: dict[str, Stream]
    turns: tuple[Turn, ...]
    beliefs: tuple[Belief, ...]
    payments: tuple[Payment, ...]
    outcome: dict[str, Any]
    steps: int
    facts: dict[str, Any] = field(default_factory=dict)
    privileged: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def outgrown(self) -> bool:
        """Whether it has a turn for which a model's stream had no room."""
        return any(turn.outgrown for turn in self.turns)


@dataclass
class TokenBatch:
    """Rows of tokens, padded on the right, and everything that the losses read. Made in `batch.py` only.

    `logprobs`, `reference_logprobs`: of each sampled token, 0 elsewhere. `values`, `rewards`, `speaking`, `returns`: at
    the first token of a reply (`decision`), 0 elsewhere. `advantages`: at every token of a reply. `legal`: the legal
    ids of CHOICE tokens. `imitate`: reply tokens that imitation may learn from. `plan_ids`, `plan`: at reply tokens
    from a plan's first choice on, the tokens that might follow and their planned probabilities, given the reply so far.
    `privileged`: what only a privileged critic sees.
    """

    tokens: Tensor  # (B, T) int64
    kind: Tensor  # (B, T) int8, values of Kind
    decision: Tensor  # (B, T) bool: the first token of a reply
    body: Tensor  # (B, T) bool: reply tokens that others got to hear
    message: Tensor  # (B, T) bool: the body and the tokens that end it, which the speaking reward is credited to
    logprobs: Tensor  # (B, T)
    reference_logprobs: Tensor  # (B, T)
    values: Tensor  # (B, T) the critic's, at decisions
    rewards: Tensor  # (B, T) weighted sum of what enters the common GAE, at decisions
    speaking: Tensor  # (B, T) weighted speaking reward with a credit of its own, at decisions
    advantages: Tensor  # (B, T)
    returns: Tensor  # (B, T)
    imitate: Tensor  # (B, T) bool
    legal: Tensor  # (B, T, O) int64: legal ids of CHOICE tokens, -1 elsewhere; O may be 0
    plan_ids: Tensor  # (B, T, P) int64, padded with -1; P may be 0
    plan: Tensor  # (B, T, P), 0 where plan_ids are -1
    privileged: Tensor  # (B, F)
    row: Tensor  # (N,) int64
    position: Tensor  # (N,) int64: index of the question's last token
    candidates: Tensor  # (N, K) int64, padded with -1
    answer: Tensor  # (N,) int64: index into the candidates
    also: Tensor  # (N, A) int64: indices of further candidates that are as true, padded with -1; A may be 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens.shape[0], self.tokens.shape[1]

    @property
    def reply(self) -> Tensor:
        """(B, T) bool: tokens that the agent sampled."""
        return (self.kind == Kind.CHOICE) | (self.kind == Kind.SPEECH)

    @property
    def planned(self) -> Tensor:
        """(B, T) bool: tokens for which there is a plan."""
        return (self.plan_ids >= 0).any(-1)

    @property
    def lengths(self) -> Tensor:
        """(B,) int64: how many tokens each row has."""
        return (self.kind != Kind.PAD).sum(1)

    def select(self, rows: Tensor, length: int | None = None) -> TokenBatch:
        """The given rows (int64 indices), cut to their longest or to `length`, with the questions before that."""
        length = int(self.lengths[rows].max()) if length is None else length
        new_row = torch.full((self.tokens.shape[0],), -1, dtype=torch.int64)
        new_row[rows] = torch.arange(len(rows))
        asked = (new_row[self.row] >= 0) & (self.position < length)
        by_token = {name: getattr(self, name)[rows, :length] for name in BY_TOKEN}
        return TokenBatch(
            **by_token,
            privileged=self.privileged[rows],
            row=new_row[self.row[asked]],
            position=self.position[asked],
            candidates=self.candidates[asked],
            answer=self.answer[asked],
            also=self.also[asked],
        )

    def to(self, device: torch.device) -> TokenBatch:
        return TokenBatch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


# The fields of a TokenBatch that have axes (B, T).
BY_TOKEN = ("tokens", "kind", "decision", "body", "message", "logprobs", "reference_logprobs", "values", "rewards",
            "speaking", "advantages", "returns", "imitate", "legal", "plan_ids", "plan")  # fmt: skip
INSIDERS = (Role.IMPOSTER.value,)  # roles that know the answers to belief questions

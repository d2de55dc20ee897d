"""The nouns that everything passes through, with their shapes.

Axes: `B` rows (one agent's stream in one episode), `T` tokens, `U` turns, `N` belief questions, `K` candidates.
Index `t` always describes token `t`: its kind, its log-probability given what stands before it, its advantage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envs.among_us.state import Role
from envs.core import Question, TurnKind


class Kind(IntEnum):
    """Kind of a stream's token."""

    PAD = 0
    OBSERVATION = 1  # read: prompts, what others said, corrections, the cue to reply
    QUESTION = 2  # a belief question, whose answer is read off its last token and never appended; also text that no
    # loss learns to write: an intent, the rest of a chosen option behind its first token
    CHOICE = 3  # one token, sampled out of a legal set
    SPEECH = 4  # sampled from the vocabulary


@dataclass
class Stream:
    """One agent's side of one episode: all that it read and wrote, in order; (T,) each."""

    tokens: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)

    def append(self, ids: list[int], kind: Kind) -> None:
        self.tokens.extend(ids)
        self.kinds.extend([kind] * len(ids))

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Planned:
    """A planner's notes on a reply (`planning/planner.py`): A actions, in one order throughout."""

    actions: tuple[str, ...]  # (A,) a claim, a name or skip
    ids: tuple[tuple[int, ...], ...]  # (A,) each as a whole reply
    anchor: tuple[float, ...]  # (A,) a language model's probabilities, the player's own or a frozen one's
    values: tuple[float, ...]  # (A,) what each is expected to be worth
    plan: tuple[float, ...]  # (A,) the planned probabilities
    chosen: int  # index of the action that was played
    played: bool = True  # drawn from the plan; false: the policy's own sample
    floored: float = 0.0  # share of the anchors' probabilities that were raised to the floor


@dataclass(frozen=True)
class Turn:
    """One reply of one agent, at the `step`-th call of the environment's `step` (from 0).

    `reply_ids` stand in the agent's stream at `start : start + len(reply_ids)`. They are empty for players without a
    model (`start` is -1) and if the model's stream had no room (`outgrown`). `logprobs` are those of the distribution
    that was sampled from (temperature, legal mask).
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
    legal: tuple[int, ...] = ()  # token ids that a CHOOSE reply was sampled from; empty for SPEAK
    truths: tuple[int, ...] = ()  # of a choice that says what is believed, as a vote: indices of the true options
    body: tuple[int, int] = (0, 0)  # range of `reply_ids` that others heard; empty for all but messages
    message: str = ""  # what the others heard
    error: str = ""  # why the game refused the reply; empty if it did not
    cut: bool = False  # unfinished: it met the limit of its tokens, or of what the game passes on
    thoughts: str = ""  # what an endpoint's model wrote for itself; nobody in the game reads it
    planned: Planned | None = None
    rewards: dict[str, float] = field(default_factory=dict)  # by term, unweighted
    instead: tuple[tuple[Belief, ...], ...] = ()  # beliefs after each message that was drawn instead
    otherwise: tuple[str, ...] = ()  # those messages, as replies

    @property
    def outgrown(self) -> bool:
        """Tells whether a model's stream had no room for the reply."""
        return self.start >= 0 and not self.reply_ids


@dataclass(frozen=True)
class Belief:
    """A listener's answer to a belief question that fell due after `step` environment steps (0: at reset).

    A message spoken in `Turn.step == s` is heard in the observations after `s + 1` steps: the belief before it has
    `step <= s`, the belief after it has `step == s + 1`.
    """

    listener: str
    role: str
    step: int
    position: int  # index of the question's last token in the listener's stream, or of the last one before a branch
    question: Question
    probs: np.ndarray  # (K,), sums to one
    candidate_ids: tuple[int, ...] = ()  # (K,) the tokens it was read from
    branch: tuple[int, ...] = ()  # of a question beside the stream: its tokens, read behind `position`

    @property
    def asked(self) -> tuple[str, str]:
        """The listener, and the question."""
        return self.listener, self.question.text

    @property
    def truth(self) -> float:
        """Probability of the true answer; if several are true, their sum."""
        return float(self.pooled[self.question.answer_index])

    @property
    def pooled(self) -> np.ndarray:
        """Returns `probs` (K,) with all true answers pooled into the first."""
        return pooled(self.probs, self.question.answer_index, self.question.also_indices)


def answered(beliefs: Sequence[Belief], answers: Mapping[str, Mapping[str, str]]) -> list[Belief]:
    """The beliefs with answers that became known later (`answers`: by agent); those that never did are left out."""
    found = [(belief, belief.question.answered(answers.get(belief.listener, {}))) for belief in beliefs]
    return [replace(belief, question=question) for belief, question in found if question is not None]


def pooled(probs: np.ndarray, answer: int, also: Sequence[int]) -> np.ndarray:
    """Moves the probabilities (K,) of the candidates `also` to the candidate `answer`."""
    if not also:
        return probs
    together = probs.copy()
    together[answer] += probs[list(also)].sum()
    together[list(also)] = 0.0
    return together


@dataclass(frozen=True)
class Payment:
    """A payment by the environment to `agent` in its `step`-th step (from 0)."""

    agent: str
    step: int
    amount: float


@dataclass(frozen=True)
class Episode:
    """A finished game.

    `players` names who held each seat (`learner`, `base`, `scripted`, ...); `streams` has those of language models and
    recorded players. `outcome` is the game's own summary. `facts` is its hidden state at the start, for analysts;
    `privileged` is what of it a privileged critic sees at each seat, as numbers.
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
    answers: dict[str, dict[str, str]] = field(default_factory=dict)  # by agent, to questions answered `later`

    def paid(self, agent: str) -> float:
        """Sums what the environment paid a seat."""
        return sum(payment.amount for payment in self.payments if payment.agent == agent)

    @property
    def outgrown(self) -> bool:
        """Tells whether a model's stream had no room for some reply."""
        return any(turn.outgrown for turn in self.turns)


@dataclass
class TokenBatch:
    """Rows of tokens, padded on the right, and everything that the losses read. Made in `learning/batch.py` only.

    Questions that were asked beside a stream stand behind it, as branches (`model/branches.py`). A decision is the
    first token of a reply. What is said to stand at some tokens is 0 (ids: -1) elsewhere.
    """

    tokens: Tensor  # (B, T) int64
    kind: Tensor  # (B, T) int8, values of Kind
    branch: Tensor  # (B, T) int64: number of the token's branch, from 1; 0 in the stream
    position_ids: Tensor  # (B, T) int64: how many tokens the model has read before the token
    decision: Tensor  # (B, T) bool
    body: Tensor  # (B, T) bool: reply tokens that others heard
    message: Tensor  # (B, T) bool: the body and the token that ends it, which get a message's credit
    logprobs: Tensor  # (B, T) of reply tokens, when they were sampled
    reference_logprobs: Tensor  # (B, T) of the reply tokens that a loss compares
    values: Tensor  # (B, T) the critic's, at decisions
    rewards: Tensor  # (B, T) weighted sum of the rewards credited to turns, at decisions
    message_rewards: Tensor  # (B, T, M) weighted, each reward credited to messages, at decisions; M may be 0
    advantages: Tensor  # (B, T) at reply tokens
    returns: Tensor  # (B, T) at decisions
    imitate: Tensor  # (B, T) bool: reply tokens that imitation may learn from
    legal: Tensor  # (B, T, O) int64: legal ids of CHOICE tokens, padded with -1; O may be 0
    plan_ids: Tensor  # (B, T, P) int64: from a plan's first choice on, the tokens that may follow; P may be 0
    plan: Tensor  # (B, T, P) their planned probabilities, given the reply so far
    privileged: Tensor  # (B, F) what only a privileged critic sees
    row: Tensor  # (N,) int64
    position: Tensor  # (N,) int64: index of the question's last token
    candidates: Tensor  # (N, K) int64, padded with -1
    answer: Tensor  # (N,) int64: index into the candidates
    vote: Tensor  # (N,) bool: no question but a choice that says what is believed, among the options that were legal
    also: Tensor  # (N, A) int64: indices of further candidates that are as true, padded with -1; A may be 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens.shape[0], self.tokens.shape[1]

    @property
    def reply(self) -> Tensor:
        """Tokens that the agent sampled, (B, T) bool."""
        return (self.kind == Kind.CHOICE) | (self.kind == Kind.SPEECH)

    @property
    def planned(self) -> Tensor:
        """Tokens for which there is a plan, (B, T) bool."""
        return (self.plan_ids >= 0).any(-1)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each row, (B,) int64."""
        return (self.kind != Kind.PAD).sum(1)

    def select(self, rows: Tensor, length: int | None = None) -> TokenBatch:
        """Takes the given rows (int64 indices), cut to `length` (default: their longest), with their questions."""
        length = int(self.lengths[rows].max()) if length is None else length
        new_row = torch.full((self.tokens.shape[0],), -1, dtype=torch.int64)
        new_row[rows] = torch.arange(len(rows))
        asked = (new_row[self.row] >= 0) & (self.position < length)
        by_question = {name: getattr(self, name)[asked] for name in BY_QUESTION}
        by_question["row"] = new_row[by_question["row"]]
        by_token = {name: getattr(self, name)[rows, :length] for name in BY_TOKEN}
        return TokenBatch(**by_token, privileged=self.privileged[rows], **by_question)

    def to(self, device: torch.device) -> TokenBatch:
        return TokenBatch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


# Fields of a TokenBatch with axes (B, T).
BY_TOKEN = ("tokens", "kind", "branch", "position_ids", "decision", "body", "message", "logprobs", "reference_logprobs",
            "values", "rewards", "message_rewards", "advantages", "returns", "imitate", "legal", "plan_ids",
            "plan")  # fmt: skip
# Fields with an axis N.
BY_QUESTION = ("row", "position", "candidates", "answer", "vote", "also")
INSIDERS = (Role.IMPOSTER.value,)  # roles that know the answers to belief questions

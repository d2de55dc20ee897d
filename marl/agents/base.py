"""The interface between games and players: a `Request` to each seat that sees something, a `Reply` where one is due.

An `Agent` plays any number of seats in any number of games at once. A `Player` is one seat of one game in plain text;
`TextAgent` (text.py) makes an agent of players.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from envs.core import Question, TurnKind
from marl.model.tokens import Asked
from marl.types import Belief, Planned, Stream

Key = tuple[int, str]  # a seat: (the game's index in its rollout, agent)


@dataclass(frozen=True)
class Request:
    """An observation of one seat, and the reply that it asks for."""

    key: Key
    seed: int  # the seat's own in this episode
    role: str
    step: int
    turn: TurnKind  # WAIT: read only; CHOOSE: reply with one of `options`; SPEAK: reply with a message
    text: str  # what is new
    options: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()  # belief questions asked after the text
    privileged: tuple[float, ...] = ()  # what only a privileged critic sees


@dataclass(frozen=True)
class Reply:
    """A reply's text. Language models also say what it was made of."""

    key: Key
    text: str
    ids: tuple[int, ...] = ()  # tokens as sampled
    start: int = -1  # position of the first in the seat's stream
    logprobs: tuple[float, ...] = ()  # one a token
    value: float = 0.0
    legal: tuple[int, ...] = ()  # tokens of the options
    planned: Planned | None = None
    thoughts: str = ""  # of an endpoint's model, before it replied
    cut: bool = False  # an endpoint's model met its limit of tokens


class Agent(Protocol):
    """Plays any number of seats at once. An agent that reads one style only says so in its attribute `style`."""

    name: str  # in `Episode.players`

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        """Reads the requests; returns the replies that are ready, at least one while any is owed.

        A reply may come in a later call, after others. Requests with turn WAIT get none.
        """
        ...

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        """Ends the games of these seats; returns their streams and beliefs, if the agent keeps any."""
        ...


class Player(Protocol):
    """One seat of one game, in plain text: a script, chance or a person."""

    def observe(self, text: str) -> None: ...

    def reply(self, text: str, options: Sequence[str] = ()) -> str: ...


def beliefs_of(agent: str, role: str, asked: Sequence[Asked], probs: Sequence[np.ndarray]) -> list[Belief]:
    """Answered questions as beliefs."""
    return [
        Belief(agent, role, a.step, a.position, a.question, p, a.candidate_ids, a.branch)
        for a, p in zip(asked, probs, strict=True)
    ]


def uniform_beliefs(agent: str, role: str, asked: Sequence[Asked]) -> list[Belief]:
    """Beliefs of a seat that has no opinion: every candidate is equally probable."""
    sizes = [len(a.candidate_ids) for a in asked]
    return beliefs_of(agent, role, asked, [np.full(size, 1 / size) for size in sizes])

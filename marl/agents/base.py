"""The interface between a game and its players: `Request`, `Reply`, `Agent`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from envs.core import Question, TurnKind
from marl.model.tokens import Asked
from marl.types import Belief, Planned, Stream

Key = tuple[int, str]  # (game's index in its rollout, agent)


@dataclass(frozen=True)
class Request:
    """What one seat sees now, and whether it must reply. `seed` is the seat's own seed in this episode."""

    key: Key
    seed: int
    role: str
    step: int
    turn: TurnKind
    text: str
    options: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()
    privileged: tuple[float, ...] = ()


@dataclass(frozen=True)
class Reply:
    """A reply's text, and for language models what it was made of (see `Turn`).

    Of an endpoint's model also what it thought, and whether the reply was cut at its limit before its end.
    """

    key: Key
    text: str
    ids: tuple[int, ...] = ()
    start: int = -1
    logprobs: tuple[float, ...] = ()
    value: float = 0.0
    legal: tuple[int, ...] = ()
    planned: Planned | None = None
    thoughts: str = ""
    cut: bool = False


class Agent(Protocol):
    """Plays any number of seats at once. `style`, where it has one, is the style of wording that it reads and writes,
    whatever the game's; None: the game's."""

    name: str  # who this is in `Episode.players`

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        """Reads the requests; returns replies to some that are owed (at least one while any is)."""
        ...

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        """The games of these seats are over: their streams and beliefs, where the agent keeps any."""
        ...


class Player(Protocol):
    """One seat of one game, in plain text: what scripts, chance and people are."""

    def observe(self, text: str) -> None: ...

    def reply(self, text: str, options: Sequence[str] = ()) -> str: ...


def beliefs_of(agent: str, role: str, asked: Sequence[Asked], probs: Sequence[np.ndarray]) -> list[Belief]:
    """Answered questions as beliefs."""
    return [
        Belief(agent, role, a.step, a.position, a.question, p, a.candidate_ids)
        for a, p in zip(asked, probs, strict=True)
    ]

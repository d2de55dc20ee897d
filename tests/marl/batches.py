"""A three-turn game written out token by token, and any seat with any turns, for tests of masks and credit."""

from collections.abc import Sequence

import numpy as np

from envs.core import Question, TurnKind
from marl.rewards import Reward
from marl.rewards.game import GameReward
from marl.rewards.speaking import SpeakingReward
from marl.types import Belief, Episode, Kind, Payment, Planned, Stream, Turn

OBS, Q, C, S = Kind.OBSERVATION, Kind.QUESTION, Kind.CHOICE, Kind.SPEECH

COLOUR = Question("which?", ("red", "blue"), "blue")
NUMBER = Question("how many?", ("one", "two", "three"), "one")
PLANNED = Planned(
    actions=("red", "blue", "green"), ids=((50,), (51,), (52,)), anchor=(0.3, 0.4, 0.3), values=(0.0, 1.0, 0.5),
    plan=(0.25, 0.75, 0.0), chosen=1, played=False,
)  # fmt: skip


def paying(**weights: float) -> dict[str, Reward]:
    """Rewards of these weights, by name; `speaking` is credited to messages."""
    return {
        n: SpeakingReward(weight=w) if n == "speaking" else GameReward(weight=w, scale=1.0) for n, w in weights.items()
    }


def stream(*pieces: tuple[int, Kind]) -> Stream:
    return Stream([token for token, _ in pieces], [kind for _, kind in pieces])


def three_turns() -> Episode:
    """`a` says something (a tag, two heard tokens, an end), `b` is refused, then `b` chooses one of three.

    For the choice a plan is noted, of which it was no sample. `a` is asked one question, `b` two at the start, of two
    and three candidates, and one after the message.
    """
    a = stream((1, OBS), (20, OBS), (30, Q), (2, OBS), (40, S), (41, S), (42, S), (43, S))
    b = stream(
        (1, OBS), (30, Q), (31, Q), (41, OBS), (42, OBS), (30, Q), (2, OBS), (44, S), (45, S), (9, OBS), (2, OBS),
        (51, C),
    )  # fmt: skip
    return Episode(
        seed=5,
        players={"a": "learner", "b": "learner"},
        roles={"a": "speaker", "b": "listener"},
        streams={"a": a, "b": b},
        turns=(
            Turn("a", "speaker", 0, TurnKind.SPEAK, "[message] x y [END]", (40, 41, 42, 43), 4,
                 (-0.1, -0.2, -0.3, -0.4), 0.5, body=(1, 3), message="x y", rewards={"game": 2.0, "speaking": 0.25}),
            Turn("b", "listener", 1, TurnKind.SPEAK, "hm", (44, 45), 7, (-0.5, -0.6), 0.25, error="no tag",
                 rewards={"game": 0.0, "speaking": 0.0}),
            Turn("b", "listener", 2, TurnKind.CHOOSE, "blue", (51,), 11, (-0.7,), -0.5, legal=(50, 51, 52),
                 planned=PLANNED, rewards={"game": 3.0, "speaking": 0.0}),
        ),
        beliefs=(
            Belief("a", "speaker", 0, 2, COLOUR, np.array([0.5, 0.5]), (50, 51)),
            Belief("b", "listener", 0, 1, COLOUR, np.array([0.5, 0.5]), (50, 51)),
            Belief("b", "listener", 0, 2, NUMBER, np.array([0.2, 0.3, 0.5]), (60, 61, 62)),
            Belief("b", "listener", 1, 5, COLOUR, np.array([0.25, 0.75]), (50, 51)),
        ),
        payments=(Payment("a", 2, 2.0), Payment("b", 2, 3.0)),
        outcome={},
        steps=3,
        privileged={"a": (1.0, 0.0), "b": (0.0, 1.0)},
    )  # fmt: skip


def talk(*seats: Sequence[Turn]) -> Episode:
    """A game in which each seat has these turns, each after one token that it read; tokens and logprobs are made up.

    Seats are `a`, `b`, ... A choice is one token, a message its body and an end after it, any other reply two tokens.
    """
    names = "abcdef"[: len(seats)]
    streams: dict[str, Stream] = {}
    turns: list[Turn] = []
    for name, own in zip(names, seats, strict=True):
        streams[name] = Stream()
        for turn in own:
            streams[name].append([7], OBS)
            size = 1 if turn.kind == TurnKind.CHOOSE else turn.body[1] + 1 if turn.message else 2
            kept = {key: getattr(turn, key) for key in ("value", "rewards", "body", "error", "legal", "message")}
            turns.append(
                Turn(name, "negotiator", turn.step, turn.kind, "", tuple(range(40, 40 + size)), len(streams[name]),
                     (-1.0,) * size, **kept)
            )  # fmt: skip
            streams[name].append(list(range(40, 40 + size)), C if turn.kind == TurnKind.CHOOSE else S)
    return Episode(
        seed=0,
        players=dict.fromkeys(names, "learner"),
        roles=dict.fromkeys(names, "negotiator"),
        streams=streams,
        turns=tuple(turns),
        beliefs=(),
        payments=(),
        outcome={},
        steps=len(turns),
    )


def said(step: int, value: float = 0.0, body: tuple[int, int] = (1, 3), **rewards: float) -> Turn:
    """A message with a tag before its body and an end after it."""
    return Turn("", "", step, TurnKind.SPEAK, "", value=value, body=body, message="m", rewards=rewards)


def proposed(step: int, value: float = 0.0, **rewards: float) -> Turn:
    """A reply of two tokens that nobody hears."""
    return Turn("", "", step, TurnKind.SPEAK, "", value=value, rewards=rewards)


def chose(step: int, value: float = 0.0, legal: tuple[int, ...] = (40, 41), **rewards: float) -> Turn:
    return Turn("", "", step, TurnKind.CHOOSE, "", value=value, legal=legal, rewards=rewards)

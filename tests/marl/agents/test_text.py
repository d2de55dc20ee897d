"""Players without a model: what they read, and what is recorded of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from envs.core import END
from marl.agents.base import Player, Reply
from marl.agents.text import TextAgent
from marl.model.policy import Policy
from tests.marl.agents.test_model import CHOOSE, NAMES, QUESTION, SPEAK, WAIT, model, policies, request  # noqa: F401

# --- Players without a model ---


class Parrot:
    """Says what it read, and how often; chooses the last option."""

    def __init__(self, seed: int, role: str) -> None:
        self.made_from, self.read = (seed, role), []

    def observe(self, text: str) -> None:
        self.read.append(text)

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        self.read.append(text)
        return options[-1] if options else f"[message] {len(self.read)} {END}"


def parrots(**settings: Any) -> tuple[TextAgent, list[Parrot]]:
    made: list[Parrot] = []

    def make(seed: int, role: str) -> Player:
        made.append(Parrot(seed, role))
        return made[-1]

    return TextAgent("parrot", make, **settings), made


def test_one_player_a_seat_reads_everything_in_order() -> None:
    agent, made = parrots()
    assert agent.act([request(0, WAIT, "a"), request(1, SPEAK, "b")]) == [Reply((1, "player_0"), f"[message] 1 {END}")]
    replies = agent.act([request(0, SPEAK, "c", 1), request(1, CHOOSE, "d", 1, options=("x", "y"))])
    assert [(r.key[0], r.text) for r in replies] == [(0, f"[message] 2 {END}"), (1, "y")]
    assert [(p.made_from, p.read) for p in made] == [
        ((100, "negotiator"), ["a", "c"]),
        ((101, "negotiator"), ["b", "d"]),
    ]
    assert agent.finish([(0, "player_0")]) == {}
    agent.act([request(0, WAIT, "a new game"), request(1, WAIT, "e")])
    assert [p.read for p in made] == [["a", "c"], ["b", "d", "e"], ["a new game"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_player_leaves_the_stream_a_model_would_have_read(
    name: str,
    policies: dict[str, Policy],  # noqa: F811
) -> None:
    """The same requests and replies: the model is made to say, token by token, what the player said."""
    policy = policies[name]
    recorder, _ = parrots(tokens=policy.tokens)
    exchanges = [
        request(3, SPEAK, "books 1 2", questions=(QUESTION,)),
        request(3, WAIT, "them: 5\n", 1, questions=(QUESTION,)),
        request(3, CHOOSE, "cut", 2, options=("go on", "1", "2")),
        request(3, CHOOSE, "", 3, options=("1", "2")),
        request(3, SPEAK, "", 4),
        request(3, WAIT, "no deal\n", 5, questions=(QUESTION,)),
    ]
    recorded = [recorder.act([r]) for r in exchanges]
    script = [token for replies in recorded for reply in replies for token in reply.ids]
    agent = model(policy, max_new_tokens=40)

    def say(hidden: torch.Tensor, *rest: object) -> tuple[np.ndarray, np.ndarray]:
        assert len(hidden) == 1
        return np.array([script.pop(0)]), np.zeros(1)

    agent.engine.sample = say  # type: ignore[method-assign,assignment]
    for r, replies in zip(exchanges, recorded, strict=True):
        for ours, theirs in zip(agent.act([r]), replies, strict=True):
            for name in ("text", "ids", "start", "legal"):
                assert getattr(ours, name) == getattr(theirs, name)
            assert theirs.logprobs == (0.0,) * len(theirs.ids)
    key = (3, "player_0")
    (stream, beliefs), (other, answered) = recorder.finish([key])[key], agent.finish([key])[key]
    assert stream == other and not script
    for a, b in zip(beliefs, answered, strict=True):
        assert (a.listener, a.role, a.step, a.position, a.question, a.candidate_ids) == (
            b.listener, b.role, b.step, b.position, b.question, b.candidate_ids,
        )  # fmt: skip
        np.testing.assert_allclose(a.probs, np.full(11, 1 / 11))
    assert recorder.finish([key]) == {}

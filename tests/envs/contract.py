"""Checks that hold for every environment, with any settings and any replies."""

from collections.abc import Sequence
from random import Random
from typing import Any

from envs.core import TurnKind

FIELDS = {"role", "questions", "error", "message", "span", "entry"}
ONCE = {"outcome", "truths", "answers"}  # fields that only some steps have


def check_contract(env: Any, observations: dict[str, Any], infos: dict[str, Any]) -> None:
    assert list(observations) == list(infos) == env.possible_agents
    for agent, seen in observations.items():
        assert env.observation_space(agent).contains(seen), seen
        assert bool(seen["options"]) == (seen["turn"] == TurnKind.CHOOSE)
        assert len(set(seen["options"])) == len(seen["options"])
        assert set(infos[agent]) - ONCE == FIELDS
    assert env.state_space.contains(env.state())
    assert sum(seen["turn"] == TurnKind.SPEAK for seen in observations.values()) <= 1
    assert env.agents or not any(seen["turn"] for seen in observations.values())


def play_oddly(env: Any, seed: int, rng: Random, odd: Sequence[Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Plays a game in which replies are often among `odd`, and checks each step. Returns the last rewards and infos."""
    observations, infos = env.reset(seed=seed)
    rewards: dict[str, float] = {}
    while env.agents:
        check_contract(env, observations, infos)
        replies = {
            agent: rng.choice(odd) if rng.random() < 0.3 else rng.choice(seen["options"] or odd)
            for agent, seen in observations.items()
        }
        before = observations
        observations, rewards, _, _, infos = env.step(replies)
        for agent, info in infos.items():
            seen, reply = before[agent], replies[agent]
            word = reply.strip() if isinstance(reply, str) else ""
            assert bool(info["entry"]) == bool(seen["turn"])
            assert bool(info["error"]) == (seen["turn"] == TurnKind.CHOOSE and word not in seen["options"])
    check_contract(env, observations, infos)
    return rewards, infos

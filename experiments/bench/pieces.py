"""Speed of a game's rules, without any model."""

import time
from collections.abc import Callable
from random import Random
from typing import Any

from envs.core import END, TurnKind
from marl.rollout.seeds import draw_games

SAID = f"i did not do it {END}"


def game_alone(make_env: Callable[[], Any], games: int, seed: int) -> dict[str, float]:
    """Games of players who take any option and always say the same, one after another, in processor seconds.

    An agent-step is one living player in one call of `step`.
    """
    env, rng, agent_steps = make_env(), Random(seed), 0
    drawn = draw_games(seed, count=games)
    began = time.process_time()
    for game in drawn:
        observations, _ = env.reset(seed=game.seed)
        while env.agents:
            agent_steps += len(getattr(env, "living", env.agents))  # where players die, they stay in `agents`
            observations, *_ = env.step({agent: _any(seen, rng) for agent, seen in observations.items()})
    seconds = time.process_time() - began
    return {
        "games": games,
        "agent_steps": agent_steps,
        "games_per_second": games / seconds,
        "agent_steps_per_second": agent_steps / seconds,
    }


def _any(seen: dict[str, Any], rng: Random) -> str:
    if seen["turn"] == TurnKind.CHOOSE:
        return rng.choice(seen["options"])
    return SAID if seen["turn"] == TurnKind.SPEAK else ""

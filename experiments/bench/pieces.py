"""Timings of what self-play needs besides a model: a game's rules and the planners' solver.

Processor seconds of this process, so that others on the machine count little. Left out: everything with a model in it
(benchmark.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from envs.core import END, TurnKind
from marl.planning.pikl import Settings, solve
from marl.rollout.seeds import draw_games

STAGE_GAMES = ((1, 2, 5), (1000, 2, 5), (1000, 2, 20), (1000, 5, 5))  # how many at once, players, actions of each
SAID = f"i did not do it {END}"


def game_alone(make_env: Callable[[], Any], games: int, seed: int) -> dict[str, float]:
    """Games of players who take any option and always say the same, one after another.

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


def solver_alone(
    iterations: int, seed: int, sizes: Sequence[tuple[int, int, int]] = STAGE_GAMES
) -> list[dict[str, float]]:
    """DiL-piKL with one lambda and exact expectations on random payoffs; seconds for an iteration of all games."""
    rng, found = np.random.default_rng(seed), []
    for games, players, actions in sizes:
        payoffs = [rng.random((games, *[actions] * players)) for _ in range(players)]
        began = time.process_time()
        solve(payoffs, settings=Settings(iterations=iterations))
        seconds = (time.process_time() - began) / iterations
        found.append({"games": games, "players": players, "actions": actions, "seconds_per_iteration": seconds})
    return found

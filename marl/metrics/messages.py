"""All measures of messages together: what they gave away, did and were worth, and whether they were true."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl.agents.base import Agent
from marl.agents.model import ModelAgent
from marl.metrics.among_us import of_among_us
from marl.metrics.claims import claim_metrics
from marl.metrics.codes import password_metrics
from marl.metrics.influence import Effect, compared, influence_metrics
from marl.metrics.lies import lie_metrics
from marl.metrics.listener import listener_metrics
from marl.metrics.meant import meant_metrics
from marl.metrics.stats import Metrics
from marl.rollout.games import env_maker, exchangeable
from marl.types import Episode


def message_metrics(
    episodes: Sequence[Episode], env: Mapping[str, Any], agents: Mapping[str, Agent], measured: set[str], draws: int
) -> tuple[Metrics, list[Episode], list[Effect]]:
    """Measures these players' messages in every way that the game has.

    Returns the metrics, and what `compared` does: the episodes with what might have been said, and effects of messages.
    Leaves out what a message tells of values if listeners are asked about claims, or if players are told intents, which
    follow from their values.
    """
    rng = np.random.default_rng(0)
    among_us, make_env = of_among_us(episodes[0].facts), env_maker(env)
    whole = env.get("format") != "structured"  # claims in parts are not weighed
    intent_conditioned = any(getattr(agent, "tells", False) for agent in agents.values())
    of_values = not among_us and env.get("questions", "values") == "values" and not intent_conditioned
    found: Metrics = listener_metrics(episodes, make_env, agents, rng, claims=whole) if of_values else {}
    heard, effects = compared(episodes, make_env, agents, measured, draws)
    found |= influence_metrics(effects, rng)
    found |= claim_metrics(episodes, rng, measured)
    policies = {name: agent.policy for name, agent in agents.items() if isinstance(agent, ModelAgent)}
    found |= lie_metrics(policies, episodes, rng, measured)
    if among_us:
        found |= meant_metrics(episodes, agents, exchangeable(env), rng, measured)
        found |= password_metrics(episodes, rng, measured)
    return found, heard, effects

"""Casts: one player holds each role, and a partner may hold some of its seats.

`learner` and `rival` learn; all others are frozen: `base`, a finished run's folder, scripted players by name, and past
selves of a learner (`pool`; marl/algorithms/pool.py). Which seats of a role a partner holds follows from the game's
seed, so the same games have the same cast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from marl.agents.base import Agent
from marl.common.errors import UserError, check_choices, check_range
from marl.rollout.rollout import Cast
from marl.rollout.seeds import Game

LEARNERS = ("learner", "rival")  # each has a policy of its own
PAST = "past_"  # past_rival: past selves of the rival
PICKS = ("uniform", "wins")
CAST = 4  # a part of a game's seed


@dataclass(frozen=True)
class RoleConfig:
    """Seats of one role: `player` holds all but `partners` of them, which `partner` holds.

    1.25 partners mean one in each game and two in a quarter of the games. With a `pool` past selves of `player` are the
    partners instead. One is kept every `pool` iterations. Each iteration draws one for all its games, uniformly or by
    how often it `wins`.
    """

    player: str = "learner"
    partner: str = "base"
    partners: float = 0.0
    pool: int = 0
    pick: str = "uniform"

    def __post_init__(self) -> None:
        check_range(self, "cast.*", "[0, inf)", "partners", "pool")
        check_choices(self, "cast.*", pick=PICKS)
        for name in (self.player, self.partner):
            if name.startswith(PAST):
                raise UserError(f"cast.*: {name} is no player to name. Set cast.*.pool for past selves")
        if self.pool and self.player not in LEARNERS:
            raise UserError(
                f"cast.*.pool={self.pool}: {self.player} does not learn, so it has no past selves; must be 0"
            )

    @property
    def partner_player(self) -> str:
        """Name of the player in the partners' seats: the partner, or the player's past selves."""
        return f"{PAST}{self.player}" if self.pool else self.partner

    def without_pool(self) -> RoleConfig:
        """Returns the same seats without past selves, as in evaluation: the player holds theirs."""
        return replace(self, partners=0.0, pool=0, pick="uniform") if self.pool else self


OFF = {"pool": 0, "pick": "uniform"}  # newer settings when off: no part of a run's identity


def cast_settings(config: RoleConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a role's seats, without those of OFF."""
    settings = asdict(config) if isinstance(config, RoleConfig) else config
    return {name: value for name, value in settings.items() if (name, value) not in OFF.items()}


def players_of(cast: Mapping[str, RoleConfig]) -> list[str]:
    """Names all who play, each once."""
    names: list[str] = []
    for config in cast.values():
        names += [config.player, config.partner_player] if config.partners else [config.player]
    return list(dict.fromkeys(names))


def learners_of(cast: Mapping[str, RoleConfig]) -> list[str]:
    """Names all who learn, in the order of LEARNERS. Raises UserError if nobody does."""
    found = [name for name in LEARNERS if name in players_of(cast)]
    if not found:
        played = ", ".join(f"cast.{role}.player={config.player}" for role, config in cast.items())
        raise UserError(f"{played}: nobody learns; let one of them be {' or '.join(LEARNERS)}")
    return found


def seats_per_player(cast: Mapping[str, RoleConfig], env: Any) -> dict[str, int]:
    """Counts how many seats of a game each player may hold at most.

    Raises UserError if the cast's roles are not the game's, or if a role has fewer seats than partners.
    """
    _, infos = env.reset(seed=0)
    roles = [info["role"] for info in infos.values()]
    if set(cast) != set(roles):
        raise UserError(f"cast: it names the roles {', '.join(cast)}; the game's are {', '.join(sorted(set(roles)))}")
    most = dict.fromkeys(players_of(cast), 0)
    for role, config in cast.items():
        size, partners = roles.count(role), math.ceil(config.partners)
        if partners > size:
            raise UserError(
                f"cast.{role}.partners={config.partners}: this role has {size} seats; must be at most {size}"
            )
        most[config.player] += size - math.floor(config.partners)
        if partners:
            most[config.partner_player] += partners
    return most


def by_role(cast: Mapping[str, RoleConfig], agents: Mapping[str, Agent]) -> Cast:
    """Seats each game's players by role; `agents` holds everybody in `players_of(cast)`."""

    def assign(game: Game, env: Any) -> Mapping[str, Agent]:
        (only, *more) = cast
        roles = env.facts["roles"] if more else dict.fromkeys(env.possible_agents, only)
        rng = np.random.default_rng([game.seed, CAST])
        held: dict[str, Agent] = {}
        for role, config in cast.items():
            own = [agent for agent in env.possible_agents if roles[agent] == role]
            held |= dict.fromkeys(own, agents[config.player])
            count = math.floor(config.partners + rng.random())
            for place in rng.permutation(len(own))[:count].tolist() if count else []:
                held[own[place]] = agents[config.partner_player]
        return held

    return assign


def alternating(first: Agent, second: Agent) -> Cast:
    """Seats two players of a game with one role, who change seats from game to game."""

    def assign(game: Game, env: Any) -> Mapping[str, Agent]:
        names = list(env.possible_agents)
        turned = game.seed % 2
        return {name: (first, second)[(i + turned) % 2] for i, name in enumerate(names)}

    return assign

"""Who plays whom: each role is held by a learner or by somebody frozen, and some of its seats by somebody else.

`learner` and `rival` learn; everybody else is frozen: `base`, a finished run's folder, scripted players by name. Which
seats of a role a partner holds is a function of the game's seed, so that the same games have the same cast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from marl.agents.base import Agent
from marl.common.errors import UserError
from marl.rollout.rollout import Cast
from marl.rollout.seeds import Game

LEARNERS = ("learner", "rival")  # each a policy of its own that learns
CAST = 4  # a named place of a game's seed


@dataclass(frozen=True)
class Seats:
    """The seats of one role: all are `player`'s, except `partners` of them in each game, which are `partner`'s.

    A fraction is the share of games that have one more: 1.25 is one partner in each game and two in a quarter of them.
    """

    player: str = "learner"
    partner: str = "base"
    partners: float = 0.0

    def __post_init__(self) -> None:
        if self.partners < 0:
            raise UserError(f"cast.*.partners={self.partners}: must not be negative")


def players_of(cast: Mapping[str, Seats]) -> list[str]:
    """The names of all who play, each once."""
    names = [name for seats in cast.values() for name in (seats.player, *([seats.partner] * bool(seats.partners)))]
    return list(dict.fromkeys(names))


def learners_of(cast: Mapping[str, Seats]) -> list[str]:
    """Those of them who learn, in the order of LEARNERS. UserError where nobody does."""
    found = [name for name in LEARNERS if name in players_of(cast)]
    if not found:
        played = ", ".join(f"cast.{role}.player={seats.player}" for role, seats in cast.items())
        raise UserError(f"{played}: nobody learns; let one of them be {' or '.join(LEARNERS)}")
    return found


def places(cast: Mapping[str, Seats], env: Any) -> dict[str, int]:
    """How many seats of a game each player may hold at most.

    Refuses a cast whose roles are not the game's, or with more partners than a role has seats.
    """
    _, infos = env.reset(seed=0)
    roles = [info["role"] for info in infos.values()]
    if set(cast) != set(roles):
        raise UserError(f"cast: it names the roles {', '.join(cast)}; the game's are {', '.join(sorted(set(roles)))}")
    most = dict.fromkeys(players_of(cast), 0)
    for role, seats in cast.items():
        size, partners = roles.count(role), math.ceil(seats.partners)
        if partners > size:
            raise UserError(f"cast.{role}.partners={seats.partners}: there are only {size} seats of this role")
        most[seats.player] += size - math.floor(seats.partners)
        if partners:
            most[seats.partner] += partners
    return most


def by_role(cast: Mapping[str, Seats], agents: Mapping[str, Agent]) -> Cast:
    """Seats each game's players by role; `agents` holds everybody in `players_of(cast)`."""

    def seat(game: Game, env: Any) -> Mapping[str, Agent]:
        (only, *more) = cast
        roles = env.facts["roles"] if more else dict.fromkeys(env.possible_agents, only)
        rng = np.random.default_rng([game.seed, CAST])
        held: dict[str, Agent] = {}
        for role, seats in cast.items():
            places = [agent for agent in env.possible_agents if roles[agent] == role]
            held |= dict.fromkeys(places, agents[seats.player])
            count = math.floor(seats.partners + rng.random())
            for place in rng.permutation(len(places))[:count].tolist() if count else []:
                held[places[place]] = agents[seats.partner]
        return held

    return seat

"""The study of players who plan in Diplomacy as arrays: its settings, checked, and its players by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envs.diplomacy.duel import MAPS, Duel
from envs.diplomacy.pure import WIN, Pure, Small
from experiments.setup.config import make
from marl.agents.pure import PurePlayer
from marl.agents.scripted.duel import DuelPopulation
from marl.agents.scripted.pure import Population
from marl.agents.text import TextAgent
from marl.algorithms.lookahead import Learner, LookaheadConfig, load
from marl.common.errors import UserError, check_choices, check_count
from marl.common.files import digest, read_json, reading
from marl.model.orders import OrderNet
from marl.planning.lookahead import Search
from marl.rollout.positions import NetPlayer, Player
from marl.storage.checkpoint import folder_digest

SCRIPTED, ANCHOR = "scripted", "SL"  # players that are always there
PURE = "pure"
STARTS = ("nothing", "anchor")
FORMAT = 1  # of what is kept; raised where the same settings come to something else
SETTINGS = "settings.json"  # in a study's folder: what its players are made of
OWN = ("years", "width", "anchor", "train", "every", "arms", "bots", "search", "games")  # settings that name the folder


@dataclass(frozen=True)
class Arm:
    """A player that learns, or with `start` None one that plans with the anchor's networks."""

    anchored: bool
    search: Mapping[str, Any]
    play: Mapping[str, Any] = field(default_factory=dict)
    start: str | None = None


@dataclass(frozen=True)
class Plane:
    """A grid of lambdas: what everybody is believed to use, and what is played with. `games` 0: none."""

    games: int  # of each point, one among six, with the anchor and with the scripted
    positions: int  # of the scripted population, whose orders each point is asked about
    players: Sequence[str]
    lambdas: Sequence[float]

    def __post_init__(self) -> None:
        check_count(self.games, "plane.games", 0)
        check_count(self.positions, "plane.positions", 2)
        for name in ("players", "lambdas"):
            given = list(getattr(self, name))
            if not given or len(set(map(str, given))) < len(given):
                raise UserError(f"plane.{name}={given}: name at least one, each once")
        for each in self.lambdas:
            if isinstance(each, bool) or not isinstance(each, int | float) or not each >= 0:
                raise UserError(f"plane.lambdas={list(self.lambdas)}: must be numbers, each at least 0")


@dataclass(frozen=True)
class Study:
    """All settings, checked."""

    game: Pure | Duel
    seeds: Sequence[int]
    width: int
    anchor: LookaheadConfig
    anchor_games: int
    train: LookaheadConfig
    every: int
    arms: Mapping[str, Arm]  # those that learn
    bots: Mapping[str, Arm]
    search: Mapping[str, Any]
    games: Mapping[str, int]
    folder: Path
    settings: Mapping[str, Any]  # plain, as the folder keeps them

    @staticmethod
    def of(plain: Mapping[str, Any], seeds: Any, folder: Path | None = None, out: Path | None = None) -> Study:
        """Reads plain settings. `folder`: the study's; None: one in `out`, named after the settings. UserError for
        values that make no study."""
        own = {name: plain[name] for name in OWN}
        map_name = plain.get("map_name", PURE)
        if map_name not in (PURE, *MAPS):
            raise UserError(
                f"map_name={map_name}: players who plan need a map as arrays. Take one of {', '.join((PURE, *MAPS))}"
            )
        if map_name != PURE:
            own = {"map_name": map_name, **own}
        for name in ("years", "width", "every"):
            check_count(own[name], name)
        if own["years"] > 100:
            raise UserError(f"years={own['years']}: a game has at most 100. Choose fewer")
        seeds = seeds if isinstance(seeds, list) else [seeds]
        for seed in seeds:
            check_count(seed, "seeds", 0)
        if not seeds or len(set(seeds)) < len(seeds):
            raise UserError(f"seeds={seeds}: name at least one, each once")
        for name, value in own["games"].items():
            check_count(value, f"games.{name}", 2)
        check_count(own["anchor"]["games"], "anchor.games")
        arms = {name: make(Arm, settings, f"arms.{name}") for name, settings in own["arms"].items()}
        bots = {name: make(Arm, settings, f"bots.{name}") for name, settings in own["bots"].items()}
        if taken := {SCRIPTED, ANCHOR, *bots} & set(arms) | {SCRIPTED, ANCHOR} & set(bots):
            raise UserError(f"arms.{min(taken)}: that is another player's name. Give it one of its own")
        for name, arm in arms.items():
            check_choices(arm, f"arms.{name}", start=STARTS)
        anchor = {name: value for name, value in own["anchor"].items() if name != "games"}
        study = Study(
            make_game(map_name, own["years"]), seeds, own["width"],
            make(LookaheadConfig, {**anchor, "iterations": 1, "games": 1, "proposal_weight": 1.0}, "anchor"),
            own["anchor"]["games"], make(LookaheadConfig, own["train"], "train"), own["every"], arms, bots,
            own["search"], own["games"], folder or Path(out or ".") / digest({**own, "format": FORMAT}), own,
        )  # fmt: skip
        for name in [*bots, *arms]:
            study.how(name)
            study.how(name, rated=False)
        return study

    @property
    def planners(self) -> dict[str, Arm]:
        return {**self.bots, **self.arms}

    @property
    def names(self) -> list[str]:
        return [SCRIPTED, ANCHOR, *self.bots, *self.arms]

    def net(self, seed: int) -> OrderNet:
        """An untrained network."""
        with torch.random.fork_rng(devices=[]):  # what the process draws later stays the same
            torch.manual_seed(seed)
            return OrderNet(self.game.features_size, self.game.players, self.game.slots, self.game.codes, self.width)

    def how(self, name: str, rated: bool = True) -> Search:
        """Returns how a player plans, when it is rated or when it learns."""
        arm = self.planners[name]
        return make(Search, {**self.search, **arm.search, **(arm.play if rated else {})}, f"{name}.search")

    def trained(self, name: str, seed: int) -> OrderNet:
        """The networks that a player ended its training with."""
        config = self.anchor if name == ANCHOR else self.train
        learner = Learner(self.game, self.net(seed), config)
        load(learner, self.folder / f"{name}-s{seed}")
        return learner.net

    def player(self, name: str, seed: int) -> Player:
        """A player of positions, by name."""
        return scripted_of(self.game) if name == SCRIPTED else self.net_player(name, seed)

    def net_player(self, name: str, seed: int) -> NetPlayer:
        """A player with networks, by name."""
        anchor = self.trained(ANCHOR, seed)
        if name == ANCHOR:
            return NetPlayer(self.game, anchor)
        net = self.trained(name, seed) if name in self.arms else anchor
        return NetPlayer(self.game, net, self.how(name), anchor if self.planners[name].anchored else None)


@functools.cache
def make_game(map_name: str, years: int) -> Pure | Duel:
    """A map as arrays, made once: one for two takes half a second.

    UserError where it needs the package of the game, and that is missing.
    """
    try:
        return Pure(years) if map_name == PURE else Duel(map_name, years)
    except ImportError as error:
        raise UserError(str(error)) from error


def scripted_of(game: Pure | Duel) -> Population | DuelPopulation:
    """The scripted population of a map."""
    return Population(game) if isinstance(game, Pure) else DuelPopulation(game)


# --- In the game's texts ----------------------------------------------------------------------------------------------
def is_planner(name: str) -> bool:
    """Tells whether this names a study's player, as in runs/lookahead/STUDY/piKL-s0."""
    path = Path(name)
    return "/" in name and (path.parent / SETTINGS).is_file() and "-s" in path.name


def check_planner(name: str, env: Mapping[str, Any]) -> tuple[Study, str, int]:
    """Returns a study's player as study, name there and seed, without loading it.

    `env`: its game, and more settings if they are known. UserError for another game or map, and for a player that the
    study does not have or has not trained.
    """
    for setting, known in (("game", ("diplomacy",)), ("map_name", ("pure",)), ("win_centres", (WIN, None))):
        if (given := env.get(setting, known[0])) not in known:
            raise UserError(f"{name} plays pure Diplomacy alone, and env.{setting}={given}. Seat another player")
    study, called, seed = _found(name)
    if not isinstance(study.game, Pure):
        raise UserError(f"{name} plays {study.settings['map_name']}, not pure. Take a player of pure")
    return study, called, seed


def planner_agent(name: str, env: Mapping[str, Any]) -> TextAgent:
    """Loads a study's player who reads and writes the texts of `env=diplomacy env.map_name=pure`. It says nothing.

    UserError: see `check_planner`, and for damaged networks.
    """
    study, called, seed = check_planner(name, env)
    player = study.net_player(called, seed)

    def plan(game: Pure, states: Small, rng: np.random.Generator) -> Small:
        orders: Small = replace(player, game=game).orders(states, np.arange(len(states)), rng)
        return orders

    return TextAgent(Path(name).name, lambda seed, role: PurePlayer(plan, seed))


def planner_digest(name: str) -> str:
    """Returns the digest of what decides how a study's player plays."""
    study, called, seed = _found(name)
    folders = [study.folder / f"{each}-s{seed}" for each in dict.fromkeys((ANCHOR, called))]
    return digest({"settings": study.settings, "nets": [folder_digest(each) for each in folders if each.is_dir()]})


def _found(name: str) -> tuple[Study, str, int]:
    """A player's study, its name there and its seed."""
    path = Path(name)
    called, _, number = path.name.rpartition("-s")
    seed = int(number) if number.isdecimal() else 0
    with reading(path.parent / SETTINGS):
        study = Study.of(read_json(path.parent / SETTINGS), seed, path.parent)
    known = [each for each in study.names if each != SCRIPTED]
    if called not in known or number != str(seed):
        raise UserError(f"{name}: that study has no such player. Take one of {', '.join(known)}, as in {known[-1]}-s0")
    for each in dict.fromkeys((ANCHOR, called if called in study.arms else ANCHOR)):
        if not (path.parent / f"{each}-s{seed}.json").is_file():  # which is there once it is trained to its end
            raise UserError(f"{name}: {each}-s{seed} is not trained. Finish it with python -m experiments.lookahead")
    return study, called, seed

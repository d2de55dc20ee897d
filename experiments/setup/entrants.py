"""Finds the players that a command names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.launch.terminal import say
from experiments.setup.config import Parts, make, plain
from experiments.setup.players import (
    bare,
    called_in_games,
    check_plans,
    is_run,
    policy_folder,
    run_of,
    run_policy,
    style_of,
)
from experiments.setup.stages import base_folder
from marl.agents.base import Agent
from marl.agents.chat import CHAT
from marl.agents.dubbed import SILENCE, Dubbed
from marl.agents.model import ModelAgent, model_agent
from marl.common.errors import UserError, check_sizes
from marl.common.files import reading
from marl.model.policy import Policy
from marl.planning.planner import SUFFIX, PlannerConfig, planning_agent
from marl.pretraining.base import base_policy
from marl.rollout.cast import Seats, by_role
from marl.rollout.games import scripted, seats
from marl.rollout.rollout import Cast
from marl.rollout.seeds import Game
from marl.storage.checkpoint import load_policy, started_from
from marl.storage.folder import CONFIG, run_settings


def turn_about(first: Agent, second: Agent) -> Cast:
    """Two players of a game with one role: they change seats from game to game."""

    def seat(game: Game, env: Any) -> Mapping[str, Agent]:
        names = list(env.possible_agents)
        turned = game.seed % 2
        return {name: (first, second)[(i + turned) % 2] for i, name in enumerate(names)}

    return seat


def role_against_role(first: Agent, second: Agent, cast: Mapping[str, Seats], partner: Agent | None) -> Cast:
    """The first player holds the first role of the cast, with its partner where one is given, the second all others."""
    (name, own), *others = cast.items()
    agents = {"first": first, "second": second, "partner": partner or first}
    seating = {name: Seats("first", "partner", own.partners if partner else 0.0)}
    return by_role({**seating, **{role: Seats("second") for role, _ in others}}, agents)


def find_player(
    name: str,
    cfg: DictConfig,
    parts: Parts,
    device: torch.device,
    beside: str,
    setting: str = "players",
) -> Agent:
    """A player by name (see the module's docstring); `beside` is the other player's name. `setting`: what names it."""
    if name == CHAT and parts.chat is not None:
        return parts.chat
    limits, game, places = parts.algo, parts.env["game"], seats(parts.env)
    if is_model(name):
        if bare(name) == "base":
            called, (policy, style) = name, find_base(cfg, parts, device, beside)
        else:
            called, policy = called_in_games(name), run_policy(name, game, device)
            style = style_of(policy_folder(name), parts.env)
        if name.endswith(SUFFIX):
            planner = planner_config(cfg)
            return planning_agent(called, policy, limits, places, cfg.temperature, planner, game, style=style)
        return model_agent(called, policy, limits, places, cfg.temperature, style)
    return text_player(name, game, setting)


def is_model(name: str) -> bool:
    """Whether this names a language model. UserError as of `is_run`."""
    return bare(name) == "base" or is_run(name)


def text_player(name: str, game: str, setting: str = "players") -> Agent:
    """A player without a model, by name. UserError, naming the setting, where there is none."""
    try:
        return scripted(game, "" if name == "scripted" else name)
    except UserError as error:
        raise UserError(
            f"{setting}: {name} is neither a run's folder nor base, scripted, random or chat. {error}"
        ) from error


def check_names(names: Sequence[str], voices: Sequence[str | None], game: str) -> None:
    """Refuses players that are not there, and voices that they cannot have, before a base is made for any."""
    for name in names:
        if not is_model(name) and name != CHAT:
            text_player(name, game)
    for number, (name, voice) in enumerate(zip(names, voices, strict=False)):
        if voice is not None and not is_model(name):
            raise UserError(f"voices[{number}]={voice}: {name} is no language model; only those take another's voice")
        if voice not in (None, "silence") and not is_model(voice):
            raise UserError(f"voices[{number}]={voice}: is no language model; name a run's folder, base or silence")


def find_base(cfg: DictConfig, parts: Parts, device: torch.device, beside: str) -> tuple[Policy, str | None]:
    """The base of the run that `beside` names, else of the configuration; and the style that it reads."""
    folder = base_beside(beside)
    if folder is not None:
        return load_policy(folder, device), style_of(folder, parts.env)
    policy, _ = configured_base(cfg, parts, device)
    return policy, parts.env.get("style")


def configured_base(cfg: DictConfig, parts: Parts, device: torch.device) -> tuple[Policy, Path | None]:
    """The base of the configuration, and its folder: that of training's split of contexts, whichever is played."""
    env = {**parts.env, **({"split": "train"} if "split" in parts.env else {})}
    return base_policy(
        parts.model, parts.base, env, cache=Path(cfg.cache), human_data=cfg.data.dond, device=device, report=say
    )


def base_beside(name: str) -> Path | None:
    """Where the base is kept that the run of this name began with; None where it names no run."""
    if not is_run(name):
        return None
    if started_from(policy_folder(name)) is None:
        raise UserError(f"players: {name} started from an untouched model; evaluate that with model=hf players=[base]")
    return base_folder(run_of(name), policy_folder(name))


def planner_config(cfg: DictConfig) -> PlannerConfig:
    """How players plan. UserError for plans that would only be noted: an evaluation learns from none."""
    found = make(PlannerConfig, plain(cfg.planner), "planner") if cfg.planner else PlannerConfig()
    if found.choose == "own":
        raise UserError("planner.choose=own: only training notes plans without playing them; must be sample or best")
    return found


def with_planners(cfg: DictConfig, names: Sequence[str], game: str) -> list[str]:
    """The players' names, of whom those plan that end in `+plan`. UserError where somebody could not plan."""
    planner_config(cfg)
    alone = bool(cfg.planner) and not any(name.endswith(SUFFIX) for name in names)
    found = [name + SUFFIX if alone and number == 0 else name for number, name in enumerate(names)]
    for number, (name, voice) in enumerate(zip(found, [*cfg.voices, None, None], strict=False)):
        try:
            check_plans(name, game)
        except UserError as error:
            raise UserError(f"players[{number}]={error}") from error
        if name.endswith(SUFFIX) and game == "dond" and voice is not None:
            raise UserError(
                f"voices[{number}]={voice} would make the proposals of players[{number}]={name} too, so that none is "
                "planned; choose voices=[] or planner=none"
            )
    return found


def voiced(player: Agent, voice: str | None, cfg: DictConfig, parts: Parts, device: torch.device, beside: str) -> Agent:
    """The player with another's voice: its messages are `voice`'s, or none at all (`silence`)."""
    if voice is None:
        return player
    assert isinstance(player, ModelAgent)  # as `check_names` saw
    speaker = SILENCE if voice == "silence" else find_player(voice, cfg, parts, device, beside)
    assert speaker is SILENCE or isinstance(speaker, ModelAgent)
    return Dubbed(player, speaker, player.name)


def as_in_runs(cfg: DictConfig, names: Sequence[str]) -> DictConfig:
    """The configuration with the game, cast and limits that the runs among the players were evaluated in; without a run
    a base plays contexts that it did not learn from.

    What the command line says of `env`, `cast` and `algo` wins. UserError if two runs play games, or have limits, that
    differ in a setting of which it says nothing; and if it asks for another game, model or base than a run's. Styles
    may differ: every model reads its own.
    """
    given: list[str] = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    own = OmegaConf.from_dotlist([o for o in given if o.startswith(("env.", "cast.", "algo."))])
    settings = {}
    for name in names:
        path = run_of(name) / CONFIG
        if path.is_file():
            run_folder = path.parent
            run = OmegaConf.create(run_settings(run_folder))  # plain data: it refers to nothing
            with reading(run_folder):
                env, cast = OmegaConf.merge(run.env, run.eval.env), OmegaConf.merge(run.cast, run.eval.cast)
                found = {"env": env, "cast": cast, "algo": run.algo, "model": run.model, "base": run.base}
                check_sizes(plain(OmegaConf.create(found)), str(run_folder))
            check_decided(given, cfg, run, name)
            settings[name] = OmegaConf.merge(OmegaConf.create(found), own)
    if not settings:
        game = cfg.get("env") or {}
        of_base = any(bare(name) == "base" or is_run(name) for name in names)  # a base may be named by its folder
        if of_base and "split" in game and "split" not in own.get("env", {}):
            settings["base"] = OmegaConf.create({"env": {**game, "split": "test"}})
        else:
            return cfg
    limits = ("algo.max_new_tokens", "algo.context")
    games = [
        {f"env.{key}": value for key, value in plain(each.env).items()}
        | {limit: OmegaConf.select(each, limit) for limit in limits}
        for each in settings.values()
    ]
    keys = dict.fromkeys(key for game in games for key in game)
    keys.pop("env.style", None)  # each reads its own
    differ = sorted(key for key in keys if any(game.get(key) != games[0].get(key) for game in games))
    if differ:
        raise UserError(
            f"players: the runs {' and '.join(settings)} differ in {', '.join(differ)}: choose for all, as in "
            f"{differ[0]}={'null' if (first := games[0].get(differ[0])) is None else first}"
        )
    merged = OmegaConf.create({**cfg, **next(iter(settings.values()))})
    assert isinstance(merged, DictConfig)
    return merged


def check_decided(given: Sequence[str], cfg: DictConfig, run: DictConfig, name: str) -> None:
    """Refuses what the command line says of the game, the model or the base where a run says otherwise: the run plays
    by its own."""
    tells = {"env": "env.game", "model": "model.kind", "base": "base.data"}  # what sets a group's choices apart
    for override in given:
        key = override.partition("=")[0]
        if override == "base=human" and cfg.data.dond:  # nobody need have said it: the data imply it
            continue
        if key in tells or key.startswith(("model.", "base.")):
            wanted, own = (OmegaConf.select(each, tells.get(key, key)) for each in (cfg, run))
            if wanted != own:
                limit = f"algo.{key.rpartition('.')[2]}"
                other = f"; {limit} limits it here" if OmegaConf.select(run, limit, default=None) is not None else ""
                raise UserError(f"{override}: {name} decides that, by {tells.get(key, key)}={own}; leave it out{other}")

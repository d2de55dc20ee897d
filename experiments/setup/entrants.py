"""Finds the players that a command names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.launch.terminal import say
from experiments.setup.config import plain
from experiments.setup.lookahead import is_planner
from experiments.setup.players import (
    bare,
    called_in_games,
    check_game,
    check_plans,
    is_run,
    model_player,
    player_config,
    policy_folder,
    reads_intents,
    run_of,
    run_policy,
    style_of,
    text_agent,
)
from experiments.setup.spec import PlaySpec, Spec
from experiments.setup.stages import base_folder
from marl.agents.base import Agent
from marl.agents.chat import CHAT
from marl.agents.dubbed import SILENCE, Dubbed
from marl.agents.model import ModelAgent
from marl.common.errors import UserError, check_sizes, prefixed
from marl.common.files import reading
from marl.intents.agent import CICERO
from marl.model.loading import longest_stream
from marl.model.policy import Policy
from marl.planning.planner import SUFFIX
from marl.pretraining.base import base_policy
from marl.rollout.cast import RoleConfig, by_role
from marl.rollout.games import player_count
from marl.rollout.rollout import Cast
from marl.storage.checkpoint import frozen_base, model_digest, started_from
from marl.storage.folder import CONFIG, run_settings

TELLS = {"env": "env.game", "model": "model.kind", "base": "base.data"}  # the setting that sets a group's choices apart


def role_against_role(first: Agent, second: Agent, cast: Mapping[str, RoleConfig], partner: Agent | None) -> Cast:
    """Seats the first player in the cast's first role, with its partner if there is one, the second in all others."""
    (name, own), *others = cast.items()
    agents = {"first": first, "second": second, "partner": partner or first}
    own_role = {name: RoleConfig("first", "partner", own.partners if partner else 0.0)}
    return by_role({**own_role, **{role: RoleConfig("second") for role, _ in others}}, agents)


def find_player(name: str, spec: PlaySpec, device: torch.device, beside: str, setting: str = "players") -> Agent:
    """Makes a player by name. `beside`: the other player's name, whose base `base` means; `setting`: what names it."""
    if name == CHAT and spec.chat is not None:
        return spec.chat
    limits, game, seats_per_game = spec.algo, spec.env["game"], player_count(spec.env)
    if not is_model(name):
        return text_player(name, spec.env, setting)
    if bare(name) == "base":
        called, (policy, style) = name, find_base(spec, device, beside)
    else:
        called, policy = called_in_games(name), run_policy(name, game, device)
        style = style_of(policy_folder(name), spec.env)
    how = (spec.planner, spec.cicero)
    return model_player(name, called, policy, limits, seats_per_game, spec.temperature, *how, game, style)


def is_model(name: str) -> bool:
    """Returns whether this names a language model. UserError as of `is_run`."""
    return bare(name) == "base" or is_run(name)


def text_player(name: str, env: str | Mapping[str, Any], setting: str = "players") -> Agent:
    """Makes a player without a language model, by name. `env`: the game, or its settings. UserError, naming the
    setting, where there is none."""
    try:
        return text_agent(name, {"game": env} if isinstance(env, str) else env)
    except UserError as error:
        if is_planner(name):
            raise
        raise UserError(
            f"{setting}: {name} is neither a run's folder nor base, scripted, random or chat. {error}"
        ) from error


def check_names(names: Sequence[str], voices: Sequence[str | None], game: str) -> None:
    """Refuses players that do not exist, and voices that they cannot have."""
    for name in names:
        if not is_model(name) and name != CHAT:
            text_player(name, game)
    for number, (name, voice) in enumerate(zip(names, voices, strict=False)):
        if voice is not None and not is_model(name):
            raise UserError(f"voices[{number}]={voice}: {name} is no language model; only those take another's voice")
        if voice not in (None, "silence") and not is_model(voice):
            raise UserError(f"voices[{number}]={voice}: is no language model. Name a run's folder, base or silence.")
        if voice is not None and name.endswith((SUFFIX, CICERO)) and game == "dond":
            raise UserError(
                f"voices[{number}]={voice} would make the proposals of players[{number}]={name} too, so that none is "
                "planned. Choose voices=[] or planner=none."
            )
        if voice not in (None, "silence") and (who := next(filter(reads_intents, (name, voice)), "")):
            raise UserError(
                f"voices[{number}]={voice}: {who} reads intents, which another's voice is not told. Choose voices=[]."
            )


def find_base(spec: Spec, device: torch.device, beside: str) -> tuple[Policy, str | None]:
    """Loads the base of the run that `beside` names, else of the configuration. Returns it with the style it reads."""
    if (folder := trained_base(spec, beside)) is not None:
        return frozen_base(str(folder), model_digest(str(folder)), device), style_of(folder, spec.env)
    policy, _ = configured_base(spec, device)
    return policy, spec.env.get("style")


def trained_base(spec: Spec, beside: str) -> Path | None:
    """Finds what `base` means beside this player: the folder of its run's base; None for the configuration's own base,
    as beside no run, or beside one on the untouched model that the configuration names too."""
    untouched = spec.model.kind == "hf" and spec.base.data == "none" and is_run(beside)
    if untouched and started_from(policy_folder(beside)) is None:
        return None
    return base_beside(beside, spec.env["game"])


def configured_base(spec: Spec, device: torch.device) -> tuple[Policy, Path | None]:
    """Loads or trains the base of the configuration, on training's split of contexts. Returns it with its folder."""
    env = {**spec.env, **({"split": "train"} if "split" in spec.env else {})}
    return base_policy(
        spec.model, spec.base, env, cache=spec.cache, human_data=spec.human_data, device=device, report=say
    )


def base_beside(name: str, game: str) -> Path | None:
    """Finds the base that the run of this name began with; None where it names no run. UserError for another game."""
    if not is_run(name):
        return None
    check_game(name, game)
    if started_from(policy_folder(name)) is None:
        raise UserError(f"players: {name} started from an untouched model; evaluate that with model=hf players=[base]")
    return base_folder(run_of(name), policy_folder(name))


def with_planners(names: Sequence[str], env: Mapping[str, Any], first_plans: bool) -> list[str]:
    """Returns the players' names, those who plan with `+plan`. `first_plans`: the first does where nobody else does."""
    alone = first_plans and not any(name.endswith((SUFFIX, CICERO)) for name in names)
    found = [name + SUFFIX if alone and number == 0 else name for number, name in enumerate(names)]
    for number, name in enumerate(found):
        with prefixed(f"players[{number}]="):
            check_plans(name, env)
    return found


def with_voice(player: Agent, voice: str | None, spec: PlaySpec, device: torch.device, beside: str) -> Agent:
    """Returns the player with another's voice: its messages are `voice`'s, or none at all (`silence`)."""
    if voice is None:
        return player
    assert isinstance(player, ModelAgent)  # as `check_names` saw
    speaker = SILENCE if voice == "silence" else find_player(voice, spec, device, beside)
    assert speaker is SILENCE or isinstance(speaker, ModelAgent)
    return Dubbed(player, speaker, player.name)


def as_in_runs(cfg: DictConfig, names: Sequence[str]) -> DictConfig:
    """Returns the configuration with the game, cast and limits in which the runs among the players were evaluated.

    What the command line says of `env`, `cast` and `algo` wins. Without a run a base plays the test contexts. Where
    players that talk with a plan read less than `algo.context`, all read as little. UserError where two runs differ
    in a setting of which the command line says nothing, styles apart, and where it asks for another game, model or
    base than a run's.
    """
    cfg = evaluated_as(cfg, names)
    talkers = [name for name in names if name.endswith(CICERO) and is_run(name)]
    if not talkers:
        return cfg
    context = min(cfg.algo.context, *(longest_stream(player_config(name)) for name in talkers))
    return OmegaConf.create({**cfg, "algo": {**cfg.algo, "context": context}})


def evaluated_as(cfg: DictConfig, names: Sequence[str]) -> DictConfig:
    """Returns what `as_in_runs` does, with `algo.context` as the runs or the command line have it."""
    given: list[str] = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    own = OmegaConf.from_dotlist([o for o in given if o.startswith(("env.", "cast.", "algo."))])
    runs: dict[str, DictConfig] = {}
    for name in names:
        folder = run_of(name)
        if not (folder / CONFIG).is_file():
            continue
        run = OmegaConf.create(run_settings(folder))  # plain data: it refers to nothing
        with reading(folder):
            env, cast = OmegaConf.merge(run.env, run.eval.env), OmegaConf.merge(run.cast, run.eval.cast)
            found = {"env": env, "cast": cast, "algo": run.algo, "model": run.model, "base": run.base}
            check_sizes(plain(OmegaConf.create(found)), str(folder))
        check_decided(given, cfg, run, name)
        merged = OmegaConf.merge(OmegaConf.create(found), own)
        assert isinstance(merged, DictConfig)
        runs[name] = merged
    if runs:
        check_same_games(runs)
        return OmegaConf.create({**cfg, **next(iter(runs.values()))})
    game = cfg.get("env") or {}
    of_base = any(bare(name) == "base" or is_run(name) for name in names)  # a base may be named by its folder
    if of_base and "split" in game and "split" not in own.get("env", {}):
        return OmegaConf.create({**cfg, "env": {**game, "split": "test"}})
    return cfg


def check_same_games(runs: Mapping[str, DictConfig]) -> None:
    """Refuses runs whose games or limits differ. Each reads its own style."""
    games = [
        {f"env.{key}": value for key, value in plain(run.env).items() if key != "style"}
        | {limit: OmegaConf.select(run, limit) for limit in ("algo.max_new_tokens", "algo.context")}
        for run in runs.values()
    ]
    keys = dict.fromkeys(key for game in games for key in game)
    differ = sorted(key for key in keys if any(game.get(key) != games[0].get(key) for game in games))
    if differ:
        first = games[0].get(differ[0])
        raise UserError(
            f"players: the runs {' and '.join(runs)} differ in {', '.join(differ)}: choose for all, as in "
            f"{differ[0]}={'null' if first is None else first}"
        )


def check_decided(given: Sequence[str], cfg: DictConfig, run: DictConfig, name: str) -> None:
    """Refuses an override of the game, model or base where the run, which plays by its own, says otherwise."""
    for override in given:
        key = override.partition("=")[0]
        if override == "base=human" and cfg.data.dond:  # data.dond brings it
            continue
        if key in TELLS or key.startswith(("model.", "base.")):
            wanted, own = (OmegaConf.select(each, TELLS.get(key, key)) for each in (cfg, run))
            if wanted != own:
                limit = f"algo.{key.rpartition('.')[2]}"
                other = f"; {limit} limits it here" if OmegaConf.select(run, limit, default=None) is not None else ""
                raise UserError(
                    f"{override}: {name} decides that, by {TELLS.get(key, key)}={own}. Leave it out{other}."
                )

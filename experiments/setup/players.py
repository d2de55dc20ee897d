"""From names on the command line to whoever plays: `base`, a run's folder, scripted players, `random`, `chat`.

A language model whose name ends in `+plan`, as in `base+plan`, plans its claims or votes (marl/planning/planner.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from marl.agents.base import Agent
from marl.agents.chat import CHAT
from marl.agents.model import PlayConfig, model_agent
from marl.common.errors import UserError
from marl.decoding.memory import Slots
from marl.decoding.probes import size_of
from marl.model.policy import Policy, load_config
from marl.planning.planner import GAMES as PLANNED
from marl.planning.planner import SLOTS, SUFFIX, PlannerConfig, planning_agent
from marl.rollout.cast import LEARNERS, Seats, places, players_of
from marl.rollout.games import env_maker, scripted
from marl.storage.checkpoint import folder_digest, load_policy, read_card, started_from
from marl.storage.folder import CARD, CONFIG, run_settings

OWN_NAMES = (*LEARNERS, "base", "trained", "untrained", CHAT)  # in episodes, of players who are no other run


def is_run(name: str) -> bool:
    """Tells if this names a finished run's folder, or a second learner's in it. UserError for another path."""
    if policy_folder(name).is_dir():
        return True
    if "/" in name:
        raise UserError(f"{name} is not the folder of a finished run (it has no policy/)")
    return False


def in_runs(name: str, runs: str) -> str:
    """A player by name: where only the folder `runs` has a finished run of this name, the run's own folder."""
    there = f"{runs}/{name}"
    return there if not policy_folder(name).is_dir() and policy_folder(there).is_dir() else name


def run_of(name: str) -> Path:
    """The folder of the run that a player comes from: RUN for RUN and for RUN/rival."""
    return policy_folder(name).parent


def called_in_games(name: str) -> str:
    """What a run's player is called in episodes: by its folder; a second learner with its run's name before it, so that
    it is never taken for somebody who learns now."""
    path = Path(name)
    return f"{path.parent.name}/{path.name}" if policy_folder(name) == Path(bare(name)) else path.name


def one_run(runs: str | Path, pattern: str, setting: str) -> Path:
    """The one finished run in `runs` whose name matches. UserError, naming the setting, where it is not one."""
    try:
        found = sorted(card.parent for card in Path(runs).glob(f"{pattern}/{CARD}"))
    except (ValueError, NotImplementedError):  # what is no pattern of a name, as one that begins with a slash
        found = []
    if len(found) != 1:
        names = ", ".join(run.name for run in found)
        matching = f"{len(found)} finished runs match: {names}" if found else "no finished run matches"
        raise UserError(f"{setting}={pattern}: must be one run's name; in {runs} {matching}")
    return found[0]


def bare(name: str) -> str:
    """The name without what says that its player plans."""
    return name.removesuffix(SUFFIX)


def check_plans(name: str, game: str) -> None:
    """Refuses a name that ends in `+plan` for somebody, or in a game, that cannot plan."""
    if not name.endswith(SUFFIX):
        return
    if game not in PLANNED:
        raise UserError(f"{name}: env.game={game} has nothing to plan; leave out {SUFFIX}")
    if bare(name) in LEARNERS:
        raise UserError(
            f"{name}: a learner plans with algo=pikl, or learns from plans with loss=plan; leave out {SUFFIX}"
        )
    if bare(name) != "base" and not is_run(name):
        raise UserError(f"{name}: {bare(name)} has no policy to plan from; name a run's folder or base")


def planner_of(limits: PlayConfig) -> PlannerConfig:
    """How players plan beside a learner with these settings: as its own plans are made, and they are played."""
    found: PlannerConfig = getattr(limits, "planner", PlannerConfig())
    return replace(found, choose="sample") if found.choose == "own" else found


def played_as(cast: Mapping[str, Seats], limits: PlayConfig) -> dict[str, Any]:
    """What decides, beside their names, how these players play: which policies runs' folders hold, and how planners
    plan. Empty where nobody is either."""
    names = players_of(cast)
    found = {name: policy_folder(name) for name in names if bare(name) not in (*LEARNERS, "base", CHAT)}
    runs = {name: folder_digest(folder) for name, folder in found.items() if folder.is_dir()}
    planner = asdict(planner_of(limits)) if any(name.endswith(SUFFIX) for name in names) else {}
    return {**({"policies": runs} if runs else {}), **({"planner": planner} if planner else {})}


def policy_folder(name: str) -> Path:
    """The policy's folder: RUN/policy for RUN, whose first learner that is; RUN/rival for RUN/rival."""
    folder = Path(bare(name))
    return folder if (folder / "policy.json").is_file() else folder / "policy"


def style_of(folder: Path, env: Mapping[str, Any]) -> str | None:
    """The style in which the policy in this folder was trained: by a base's card, or its run's config.yaml.

    None where neither says it, or the game has no styles. UserError for a style that the game does not have.
    """
    found: Any = read_card(folder)
    if not found.get("made_of") and (folder.parent / CONFIG).is_file():
        found = {"made_of": run_settings(folder.parent)}
    for key in ("made_of", "env", "style"):
        found = found.get(key) if isinstance(found, dict) else None
    if found is None or "style" not in env:
        return None
    try:
        env_maker({**env, "style": found})
    except UserError as error:
        raise UserError(f"{folder}: it was trained in another version of this game ({error}). Name another") from error
    return str(found)


def check_game(name: str, game: str) -> None:
    """Refuses a run of another game."""
    trained_on = read_card(policy_folder(name)).get("game")
    if not isinstance(trained_on, str):
        raise UserError(f"{name}: its policy.json does not say of which game it is")
    if trained_on != game:
        raise UserError(f"{name} was trained on {trained_on}, and env.game={game}: choose env={trained_on}")


def run_policy(name: str, game: str, device: torch.device, like: Policy | None = None) -> Policy:
    """The policy that a run ended with. `like`: who it is to play with; another tokenizer or game is refused."""
    check_game(name, game)
    policy = load_policy(policy_folder(name), device, None if like is None else like.privileged_size)
    if like is not None and policy.tokens.tokenizer.get_vocab() != like.tokens.tokenizer.get_vocab():
        raise UserError(
            f"{name}, which started from {started_from(policy_folder(name)) or 'an untouched model'}, has another "
            f"tokenizer ({policy.tokens.size} tokens) than the base of this run, {like.lm.name_or_path} "
            f"({like.tokens.size} tokens): let both start from the same base, or the same model.name"
        )
    return policy


def check_players(cast: Mapping[str, Seats], game: str, env: Any) -> None:
    """Refuses, before anything expensive, a cast that this game cannot have, or players that are not there."""
    held = places(cast, env)
    for role, seats in cast.items():
        if seats.player in LEARNERS and not held[seats.player]:
            raise UserError(f"cast.{role}.partners={seats.partners:g}: leaves no seat to {seats.player}, who learns")
    runs: dict[str, str] = {}
    for name in players_of(cast):
        if name not in (*LEARNERS, "base", CHAT):
            try:
                check_plans(name, game)
                if bare(name) == "base":
                    continue
                if is_run(name):
                    check_game(name, game)
                    own = called_in_games(name)
                    if bare(own) in OWN_NAMES:
                        raise UserError(f"{name}: in games it would pass for another player of that name; rename it")
                    other = runs.setdefault(own, name)
                    if other != name:
                        raise UserError(f"{name} and {other} would be called the same in transcripts; rename a folder")
                else:
                    scripted(game, "" if name == "scripted" else name)
            except UserError as error:
                role = next(role for role, seats in cast.items() if name in (seats.player, seats.partner))
                raise UserError(
                    f"cast.{role}: {name} is none of learner, rival, base, chat, a finished run or a scripted player. "
                    f"{error}"
                ) from error


def player_config(name: str) -> PreTrainedConfig:
    """The configuration of a run's language model."""
    return load_config(str(policy_folder(name)))


def player_slots(
    cast: Mapping[str, Seats], env: Any, limits: PlayConfig, configs: Mapping[str, PreTrainedConfig]
) -> tuple[list[Slots], int]:
    """The cache slots of all models that `seat_players` seats for `limits.games` games, and the bytes of the runs' that
    it loads.

    `configs` has the configurations of the base and the learners, by name.
    """
    caches, loaded = [], 0
    for name, seats in places(cast, env).items():
        run = bare(name) not in configs and is_run(name)
        if run or bare(name) in configs:
            config = player_config(name) if run else configs[bare(name)]
            more = SLOTS if name.endswith(SUFFIX) else 0
            caches.append(Slots.of(config, limits.context, seats, more, limits.play_bf16, limits.games))
            loaded += size_of(config, limits.context).weights * run
    return caches, loaded


def seat_players(
    cast: Mapping[str, Seats],
    table: Any,
    env: Mapping[str, Any],
    base: Policy,
    limits: PlayConfig,
    temperature: float,
    learners: Mapping[str, tuple[str, Policy]] | None = None,
    chat: Agent | None = None,
) -> dict[str, Agent]:
    """Everybody in the cast, by name. `table`: an environment; `env`: the settings in which base and learners were
    trained, whose style they read. `learners`: stand-ins for them, as (what they are called in episodes, policy);
    without any they are left out. Two names that are called the same are one player. `chat`: the player of that name.
    Who plans does as `algo.planner` says."""
    game, own_style = env["game"], env.get("style")
    policies: dict[str, Policy] = {}  # by what they are called
    styles: dict[str, str | None] = {}  # of runs, the same way
    called: dict[str, str] = {}
    found: dict[str, Agent] = {}
    for name in players_of(cast):
        if name in LEARNERS:
            if learners is None:
                continue
            called[name], policies[called[name]] = learners[name][0], learners[name][1]
        elif bare(name) == "base":
            called[name], policies[name] = name, base
        elif name == CHAT and chat is not None:
            found[name] = chat
        elif is_run(name):
            called[name] = called_in_games(name)
            policies[called[name]] = run_policy(name, game, base.device, base)
            styles[called[name]] = style_of(policy_folder(name), env)
        else:
            found[name] = scripted(game, "" if name == "scripted" else name)
    held = places(cast, table)
    for name in set(called.values()):
        room = sum(held[n] for n, other in called.items() if other == name)
        style = styles.get(name, own_style)
        agent: Agent
        if name.endswith(SUFFIX):
            agent = planning_agent(
                name, policies[name], limits, room, temperature, planner_of(limits), game, style=style
            )
        else:
            agent = model_agent(name, policies[name], limits, room, temperature, style)
        found |= {n: agent for n, other in called.items() if other == name}
    return found

"""Players by name: `base`, a run's folder, scripted players, `random`, `chat`.

A language model whose name ends in `+plan`, as in `base+plan`, plans its claims or votes (marl/planning/planner.py). A
folder of `experiments.studies.intents`, `among_us_intents` or `press_intents` with `+cicero` talks with a plan, too
(marl/intents: agent.py, among_us_agent.py, press_agent.py). A player of `experiments.lookahead`, as
runs/lookahead/STUDY/piKL-s0, plays `pure` Diplomacy (experiments/setup/lookahead.py).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from experiments.setup.config import make
from experiments.setup.lookahead import check_planner, is_planner, planner_agent, planner_digest
from marl.agents.base import Agent
from marl.agents.chat import CHAT
from marl.agents.model import PlayConfig, model_agent, model_agent_settings
from marl.agents.text import TextAgent
from marl.common.errors import UserError
from marl.common.files import digest, read_json
from marl.decoding.memory import Slots
from marl.decoding.probes import size_of
from marl.intents.agent import (
    ACTION,
    CICERO,
    NONSENSE,
    PARTS,
    CiceroAgent,
    CiceroConfig,
    IntentConditionedAgent,
    Parts,
    intent_conditioned_agent,
)
from marl.intents.among_us_agent import TableAgent
from marl.intents.press_agent import PressAgent
from marl.intents.streams import INTENT_ARMS
from marl.intents.talker import Talker
from marl.model.loading import load_config
from marl.model.lora import adapter_bytes, read_adapter
from marl.model.policy import Policy
from marl.planning.planner import GAMES as PLANNED
from marl.planning.planner import SLOTS, SUFFIX, PlannerConfig, planning_agent
from marl.rollout.cast import LEARNERS, PAST, RoleConfig, players_of, seats_per_player
from marl.rollout.games import env_maker, game_module, scripted
from marl.storage.checkpoint import adapter_base, folder_digest, is_adapter, load_policy, read_card, started_from
from marl.storage.folder import CARD, CONFIG, run_around, run_settings

WITH_INTENTS = {  # games where one talks with a plan: the study that makes players, and one of them
    "dond": ("intents", "intents-both-s0"),
    "among_us": ("among_us_intents", "among-us-intents-s0"),
    "diplomacy": ("press_intents", "press-s0"),
}
TALKERS: dict[str, type[Talker[Any]]] = {"dond": CiceroAgent, "among_us": TableAgent, "diplomacy": PressAgent}
ASKS = {"dond": "questions", "among_us": "belief"}  # the setting that says what belief questions ask
RESERVED = (*LEARNERS, "base", "trained", "untrained", CHAT)  # names in episodes that no other run may have


def is_run(name: str) -> bool:
    """Returns whether this names a finished run's folder, or a second learner's in it. UserError for other paths, those
    of a study's players excepted (`is_planner`)."""
    if policy_folder(name).is_dir():
        return True
    if is_planner(name):
        return False
    if "/" in name:
        if not Path(name).is_dir():
            raise UserError(f"{name}: there is no such folder. Name a finished run's.")
        if (Path(name) / "config.json").is_file():
            raise UserError(f"{name} is a model, not a run. Play it as base, with model=hf model.name={name}.")
        raise UserError(f"{name} has no policy/. Name a finished run's folder, or finish it with its own command.")
    return False


def in_runs(name: str, runs: str) -> str:
    """Returns the path of a run, or of a study's player, that only the folder `runs` has; every other name as it is."""
    there = f"{runs}/{name}"
    found = policy_folder(there).is_dir() or is_planner(there)
    return there if found and not (policy_folder(name).is_dir() or is_planner(name)) else name


def run_of(name: str) -> Path:
    """Returns the folder of a player's run: RUN for RUN, RUN/rival and RUN/pool/learner-000008, a past self."""
    return run_around(policy_folder(name))


def called_in_games(name: str) -> str:
    """Returns a run's player's name in episodes: its folder's, or RUN/rival for a second learner, which is thus never
    taken for the `rival` that learns now, or RUN/pool/learner-000008 for a past self."""
    path = Path(name)
    run = run_of(name)
    return str(path.relative_to(run.parent)) if policy_folder(name) == Path(bare(name)) else path.name


def one_run(runs: str | Path, pattern: str, setting: str) -> Path:
    """Finds the one finished run in `runs` whose name matches. UserError, naming the setting, unless there is one."""
    found = sorted(card.parent for card in Path(runs).glob(f"*/{CARD}") if fnmatchcase(card.parent.name, pattern))
    if len(found) != 1:
        names = ", ".join(run.name for run in found)
        matching = f"{len(found)} finished runs match: {names}" if found else "no finished run matches"
        raise UserError(f"{setting}={pattern}: must be one run's name; in {runs} {matching}")
    return found[0]


def bare(name: str) -> str:
    """Returns the name without `+plan` or `+cicero`."""
    return name.removesuffix(SUFFIX).removesuffix(CICERO)


def action_model(name: str, intents_folder: Path | None = None) -> Path | None:
    """Returns the folder of the model that plans for a player, if it is there. `intents_folder`: see `caches_of`."""
    found: Any = bare(name) if name.endswith(CICERO) else intents_folder or intent_settings_of(name).get("intents")
    return Path(found) / ACTION if found and (Path(found) / ACTION).is_dir() else None


def more_slots(name: str, cicero: CiceroConfig, intents_folder: Path | None = None) -> tuple[int, int]:
    """Returns how many cache slots a player takes beside those of its seats, to weigh claims or to draw messages: of
    its own model, and of the one that plans for it. `intents_folder`: see `caches_of`."""
    if name.endswith(CICERO):
        return TALKERS.get(str(read_card(policy_folder(name)).get("game")), CiceroAgent).more_slots(cicero)
    if action_model(name, intents_folder):
        return IntentConditionedAgent.more_slots(cicero)
    return SLOTS if name.endswith(SUFFIX) else 0, 0


def caches_of(
    name: str, config: PreTrainedConfig, context: int, seats: int, cicero: CiceroConfig,
    intents_folder: Path | None = None, **how: Any,
) -> list[Slots]:  # fmt: skip
    """Returns the caches of a language model's player and of the model that plans for it.

    `intents_folder`: the folder of the intents that this learner reads (`algo.intents`). `how`: see `Slots.of`.
    """
    own, planning = more_slots(name, cicero, intents_folder)
    found = [Slots.of(config, context, seats, own, **how)]
    if action := action_model(name, intents_folder):
        dtype = player_dtype(str(action))
        found.append(Slots.of(player_config(str(action)), context, 0, planning, dtype=dtype))
    return found


def check_plans(name: str, env: Mapping[str, Any]) -> None:
    """Refuses `+plan` or `+cicero` for a player that cannot plan so, or in a game without plans."""
    game = env["game"]
    if name.endswith((SUFFIX, CICERO)):
        check_whole_claims(env, name)
    if name.endswith(CICERO):
        if game not in WITH_INTENTS:
            raise UserError(f"{name}: env.game={game} has no intents; leave out {CICERO}")
        if not (Path(bare(name)) / PARTS).is_file():
            study, example = WITH_INTENTS[game]
            raise UserError(
                f"{name}: {bare(name)} has no intents; name a folder that experiments.studies.{study} wrote, such as "
                f"runs/{example}{CICERO}"
            )
        check_questions(name, env)
    if not name.endswith(SUFFIX):
        return
    if game not in PLANNED:
        raise UserError(f"{name}: env.game={game} has nothing to plan. Leave out {SUFFIX}.")
    if name.removesuffix(SUFFIX).endswith(CICERO):
        raise UserError(f"{name}: it plans as it is. Leave out {SUFFIX}.")
    if bare(name) in LEARNERS:
        raise UserError(
            f"{name}: a learner plans with algo=pikl, or learns from plans with loss=plan. Leave out {SUFFIX}."
        )
    if bare(name) != "base" and not is_run(name):
        raise UserError(f"{name}: {bare(name)} has no policy to plan from. Name a run's folder or base.")
    if intent_settings_of(name):
        raise UserError(f"{name}: it learned under intents (algo.intents), which plans leave out. Leave out {SUFFIX}.")


def check_whole_claims(env: Mapping[str, Any], who: str) -> None:
    """Refuses settings of Deal or No Deal with which `who` could not plan."""
    for setting, value in (("format", "free"), ("questions", "values")) if env["game"] == "dond" else ():
        if (given := env.get(setting, value)) != value:
            raise UserError(
                f"env.{setting}={given}: {who} plans whole claims by beliefs about values. Set it to {value}."
            )


def text_agent(name: str, env: Mapping[str, Any]) -> TextAgent:
    """Makes a player without a language model: scripted, chance, or one of a study of lookahead."""
    return planner_agent(name, env) if is_planner(name) else scripted(env["game"], "" if name == "scripted" else name)


def planner_of(limits: PlayConfig) -> PlannerConfig:
    """Returns how players plan beside a learner: with its own settings, but they play what they plan."""
    found: PlannerConfig = getattr(limits, "planner", PlannerConfig())
    return replace(found, choose="sample") if found.choose == "own" else found


def played_as(cast: Mapping[str, RoleConfig], limits: PlayConfig) -> dict[str, Any]:
    """Returns what decides how these players play, beside their names: digests of runs' policies, and settings of
    planners. Empty where nobody is either."""
    names = players_of(cast)
    found = {name: policy_folder(name) for name in names if bare(name) not in (*LEARNERS, "base", CHAT)}
    runs = {name: player_digest(name) for name, folder in found.items() if folder.is_dir()}
    runs |= {name: planner_digest(name) for name in found if is_planner(name)}
    planner = asdict(planner_of(limits)) if any(name.endswith(SUFFIX) for name in names) else {}
    talkers = {name: intents_digest(name) for name in names if name.endswith(CICERO)}
    cicero: dict[str, Any] = {"models": talkers, "settings": asdict(cicero_of(limits))} if talkers else {}
    if (intents_folder := intents_of(limits)) and {*names} & {*LEARNERS}:
        cicero |= {"learners": folder_digest(intents_folder / ACTION), "settings": asdict(cicero_of(limits))}
    about = {"policies": runs, "planner": planner, "cicero": cicero}
    return {name: how for name, how in about.items() if how}


def cicero_of(limits: PlayConfig) -> CiceroConfig:
    """Returns how players talk with a plan beside a learner."""
    found: CiceroConfig = getattr(limits, "cicero", CiceroConfig())
    return found


def intents_of(limits: PlayConfig) -> Path | None:
    """Returns the folder whose action model plans what learners read (`algo.intents`)."""
    found = getattr(limits, "intents", None)
    return Path(found) if found else None


def intent_settings_in(algo: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings `intents` and `cicero` of a run whose learners are told intents, from its `algo.*`; empty
    for other runs."""
    how = make(CiceroConfig, algo.get("cicero") or {}, "algo.cicero")
    return {"intents": algo["intents"], "cicero": how} if algo.get("intents") else {}


def intent_settings_of(name: str) -> dict[str, Any]:
    """Returns `intent_settings_in` of the run that a player's name means; empty if it means none. UserError where the
    folder of its intents is gone."""
    run = run_of(name)
    found = intent_settings_in(run_settings(run)["algo"]) if (run / CONFIG).is_file() else {}
    if found and not (Path(found["intents"]) / ACTION).is_dir():
        raise UserError(
            f"{run.name} learned under the intents of {found['intents']} (algo.intents), which is not there. Put it "
            f"back, or name its new place in {run / CONFIG}"
        )
    return found


def player_digest(name: str) -> str:
    """Returns the digest of a run's policy, with that of the model that plans the intents which it is told, if any."""
    intent_settings = intent_settings_of(name)
    action = f" told {folder_digest(Path(intent_settings['intents']) / ACTION)}" if intent_settings else ""
    return folder_digest(policy_folder(name)) + action


def reads_intents(name: str) -> bool:
    """Returns whether this player reads intents in its own stream."""
    parts = Path(bare(name)) / PARTS
    trained_on_intents = name.endswith(CICERO) and parts.is_file() and read_json(parts).get("arm") in INTENT_ARMS
    return trained_on_intents or bool(intent_settings_of(name))


def check_intents(limits: PlayConfig, env: Mapping[str, Any]) -> None:
    """Refuses `algo.intents` in another game, folders that no study wrote, and an action model of another style."""
    intents_folder, game = intents_of(limits), env["game"]
    if intents_folder and game != "dond":
        raise UserError(f"algo.intents={intents_folder}: learners of env.game={game} are told none. Set it to null")
    if intents_folder and not (intents_folder / PARTS).is_file():
        raise UserError(
            f"algo.intents={intents_folder}: no intents were trained here. Name a folder of experiments.studies.intents"
        )
    if intents_folder and (style := style_of(intents_folder / ACTION, env)) not in (None, env["style"]):
        raise UserError(
            f"env.style={env['style']}: the action model of algo.intents={intents_folder} reads {style}. Set it so."
        )


def intents_digest(name: str) -> str:
    """Returns the digest of the models that a player talks with, beside its policy."""
    folder = Path(bare(name))
    ensemble = {p.name: p.read_bytes().hex() for p in sorted((folder / NONSENSE).glob("*"))}
    return digest({"action": folder_digest(folder / ACTION), "nonsense": ensemble})


def model_player(
    name: str,
    called: str,
    policy: Policy,
    limits: PlayConfig,
    seats_per_game: int,
    temperature: float,
    planner: PlannerConfig,
    cicero: CiceroConfig,
    game: str,
    style: str | None,
) -> Agent:
    """Makes a language model's player: plain, one that plans (`+plan`), or one that talks with a plan (`+cicero`).

    A run that learned under intents is told them here, too (`algo.intents`). `name`: as the command names it;
    `called`: in episodes.
    """
    if name.endswith(CICERO):
        parts = Parts.load(Path(bare(name)), policy.device, policy, game)
        own = model_agent_settings(limits, seats_per_game, temperature)
        if game == "among_us":
            return TableAgent(called, parts, cicero, style=style, **own)
        talker = PressAgent if game == "diplomacy" else CiceroAgent
        return talker(called, parts, cicero, game, style=style, **own)
    if name.endswith(SUFFIX):
        return planning_agent(called, policy, limits, seats_per_game, temperature, planner, game, style=style)
    if intent_settings := intent_settings_of(name):
        folder = Path(intent_settings["intents"])
        return intent_conditioned_agent(
            called, policy, limits, seats_per_game, temperature, folder, intent_settings["cicero"], style
        )
    return model_agent(called, policy, limits, seats_per_game, temperature, style)


def policy_folder(name: str) -> Path:
    """Returns a policy's folder: RUN/policy for RUN, whose first learner it is; RUN/rival for RUN/rival."""
    folder = Path(bare(name))
    return folder if (folder / "policy.json").is_file() else folder / "policy"


def learned_in(folder: Path, setting: str) -> Any:
    """Returns a setting of the game that a policy learned in, from a base's card or its run's config.yaml.

    None if neither says it.
    """
    found: Any = read_card(folder)
    run = run_around(folder)
    if not found.get("made_of") and (run / CONFIG).is_file():
        found = {"made_of": run_settings(run)}
    for key in ("made_of", "env", setting):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def check_questions(name: str, env: Mapping[str, Any]) -> None:
    """Refuses a run that learned to answer other belief questions than this game asks, which may read alike."""
    setting = ASKS.get(env["game"], "")
    usual = getattr(game_module(env["game"]), "LATER", {}).get(setting)
    asked, learned = env.get(setting, usual), learned_in(policy_folder(name), setting) or usual
    if asked != learned:
        raise UserError(f"{name} learned with env.{setting}={learned}. Set it so; here it is {asked}.")


def style_of(folder: Path, env: Mapping[str, Any]) -> str | None:
    """Returns the style that a policy was trained in, from a base's card or its run's config.yaml.

    None if neither says it, or the game has no styles. UserError for a style that the game doesn't have.
    """
    found = learned_in(folder, "style")
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
        raise UserError(f"{name}: its policy.json does not say of which game it is. Name another run.")
    if trained_on != game:
        raise UserError(f"{name} was trained on {trained_on}, and env.game={game}: choose env={trained_on}")


def run_policy(name: str, game: str, device: torch.device, like: Policy | None = None) -> Policy:
    """Loads a run's last policy. Refuses another game, and another tokenizer than that of `like`.

    An adapter over `like` shares its weights; other adapters share their own base's.
    """
    check_game(name, game)
    policy = load_policy(policy_folder(name), device, None if like is None else like.privileged_size, like)
    if like is not None and policy.tokens.tokenizer.get_vocab() != like.tokens.tokenizer.get_vocab():
        raise UserError(
            f"{name}, which started from {started_from(policy_folder(name)) or 'an untouched model'}, has another "
            f"tokenizer ({policy.tokens.size} tokens) than the base of this run, {like.lm.name_or_path} "
            f"({like.tokens.size} tokens). Let both start from the same base or model.name."
        )
    return policy


def check_players(cast: Mapping[str, RoleConfig], env: Mapping[str, Any], table: Any) -> None:
    """Refuses a cast that this game cannot have, and players that do not exist. `table`: an environment of `env`."""
    game, held = env["game"], seats_per_player(cast, table)
    for role, config in cast.items():
        if config.player in LEARNERS and not held[config.player]:
            raise UserError(f"cast.{role}.partners={config.partners:g}: leaves no seat to {config.player}, who learns")
        if config.pool and not config.partners:
            raise UserError(
                f"cast.{role}.pool={config.pool}: past selves hold no seat. Set cast.{role}.partners, as 0.5 for half "
                "of the games."
            )
    pooled = [config.player for config in cast.values() if config.pool]
    if len(set(pooled)) < len(pooled):
        raise UserError(
            f"cast.*.pool: two roles have past selves of {pooled[0]}, which is one player. Set one pool to 0"
        )
    named: dict[str, str] = {}  # by name in episodes
    for name in players_of(cast):
        if name not in (*LEARNERS, "base", CHAT) and not name.startswith(PAST):
            try:
                check_plans(name, env)
                if bare(name) == "base":
                    continue
                if is_run(name):
                    check_game(name, game)
                    check_questions(name, env)
                    if bare(called_in_games(name)) in RESERVED:
                        raise UserError(f"{name}: in games it would pass for another player of that name; rename it")
                elif is_planner(name):
                    check_planner(name, env)
                else:
                    text_agent(name, env)
                other = named.setdefault(called_in_games(name), name)
                if other != name:
                    raise UserError(f"{name} and {other} would be called the same in transcripts; rename a folder")
            except UserError as error:
                role = next(role for role, config in cast.items() if name in (config.player, config.partner_player))
                raise UserError(
                    f"cast.{role}: {name} is none of learner, rival, base, chat, a finished run or a scripted player. "
                    f"{error}"
                ) from error


def player_config(name: str) -> PreTrainedConfig:
    """Loads the configuration of a run's language model."""
    return load_config(str(policy_folder(name)))


def player_dtype(name: str) -> torch.dtype:
    """Returns the type of the weights that a run's player computes with."""
    folder = policy_folder(name)
    return torch.bfloat16 if is_adapter(folder) and adapter_base(folder)[2] else torch.float32


def bytes_of_players(names: Iterable[str], context: int, held: Collection[str] = ()) -> int:
    """Returns the bytes of these runs' weights. Adapters over one base share it. `held`: digests of models that are
    counted already."""
    total, bases = 0, set(held)
    for folder in dict.fromkeys(policy_folder(name) for name in names):
        config = load_config(str(folder))
        if not is_adapter(folder):
            total += size_of(config, context).weights
            continue
        total += adapter_bytes(config, read_adapter(folder))
        _, digest, bf16 = adapter_base(folder)
        if digest not in bases:
            bases.add(digest)
            total += size_of(config, context, torch.bfloat16 if bf16 else torch.float32).weights
    return total


def player_slots(
    cast: Mapping[str, RoleConfig],
    env: Any,
    limits: PlayConfig,
    configs: Mapping[str, PreTrainedConfig],
    dtype: torch.dtype = torch.float32,
    held: Collection[str] = (),
) -> tuple[list[Slots], int]:
    """Returns the caches that `seat_players` needs for `limits.games` games, and the bytes of the runs that it loads.

    `configs`: configurations of the base and the learners, by name. `dtype`: of their weights. `held`: see
    `bytes_of_players`.
    """
    caches, runs, past = [], [], 0
    for name, count in seats_per_player(cast, env).items():
        known = bare(name).removeprefix(PAST)
        run = known not in configs and is_run(name)
        if run or known in configs:
            config = player_config(name) if run else configs[known]
            weights = player_dtype(name) if run else dtype
            intents_folder = intents_of(limits) if name in LEARNERS else None
            caches += caches_of(
                name, config, limits.context, count, cicero_of(limits), intents_folder, bf16=limits.play_bf16,
                games=limits.games, dtype=weights,
            )  # fmt: skip
            action = action_model(name, intents_folder)
            runs += [name] * run + [str(action)] * (action is not None)
            past += size_of(config, limits.context, weights).weights * name.startswith(PAST)
    return caches, past + bytes_of_players(runs, limits.context, held)


def seat_players(
    cast: Mapping[str, RoleConfig],
    table: Any,
    env: Mapping[str, Any],
    base: Policy,
    limits: PlayConfig,
    temperature: float,
    learners: Mapping[str, tuple[str, Policy]] | None = None,
    chat: Agent | None = None,
    strangers: bool = False,
    past: Mapping[str, Policy] | None = None,
) -> dict[str, Agent]:
    """Makes all players of a cast, by name.

    `table`: an environment of the game. `env`: settings that base and learners were trained in, whose style they read.
    `learners`: their name in episodes and their policy; without any, learners are left out. `chat`: the player of that
    name. `strangers`: runs may have another tokenizer than the base, since players hear each other's words only.
    `past`: the policies of past selves, by name. Two names that mean one player in episodes share it.
    """
    game, own_style = env["game"], env.get("style")
    policies: dict[str, Policy] = {}  # by name in episodes
    styles: dict[str, str | None] = {}  # of runs, by name in episodes
    called: dict[str, str] = {}  # names in episodes, by name
    found: dict[str, Agent] = {}
    for name in players_of(cast):
        if name in LEARNERS:
            if learners is None:
                continue
            called[name], policies[called[name]] = learners[name][0], learners[name][1]
        elif name.startswith(PAST) and past is not None:
            called[name], policies[name] = name, past[name]
        elif bare(name) == "base":
            called[name], policies[name] = name, base
        elif name == CHAT and chat is not None:
            found[name] = chat
        elif is_run(name):
            called[name] = called_in_games(name)
            policies[called[name]] = run_policy(name, game, base.device, None if strangers else base)
            styles[called[name]] = style_of(policy_folder(name), env)
        else:
            found[name] = text_agent(name, env)
    held = seats_per_player(cast, table)
    for name in set(called.values()):
        room_for = sum(held[n] for n, other in called.items() if other == name)
        style = styles.get(name, own_style)
        asked = next(n for n, other in called.items() if other == name)
        how = (planner_of(limits), cicero_of(limits))
        agent: Agent
        if asked in LEARNERS and (intents_folder := intents_of(limits)):
            agent = intent_conditioned_agent(
                name, policies[name], limits, room_for, temperature, intents_folder, cicero_of(limits), style
            )
        else:
            agent = model_player(asked, name, policies[name], limits, room_for, temperature, *how, game, style)
        found |= {n: agent for n, other in called.items() if other == name}
    return found

"""From a composed configuration to the parts of a run: all are built, and bad values refused, before any model."""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from marl.agents.chat import CHAT, ChatAgent, ChatConfig, check_nothing_secret, known_secrets
from marl.algorithms.filtered_bc import FilteredBCConfig
from marl.algorithms.ppo import PPOConfig
from marl.algorithms.rl_pikl import RLPiklConfig
from marl.common.errors import LARGEST, UserError, check_length, check_sizes, check_temperature, check_text
from marl.common.files import digest
from marl.common.secrets import hidden, told
from marl.losses import READS, Loss, any_reads, needs
from marl.planning.planner import GAMES as PLANNED
from marl.pretraining.config import BaseConfig, ModelConfig
from marl.rewards import CREDITS, Reward, credits_messages, is_game
from marl.rollout.cast import Seats, players_of
from marl.rollout.games import env_maker, exchangeable, scripted
from marl.storage.folder import ELSEWHERE

T = TypeVar("T")
OF_CHAT = ("model", "temperature", "max_tokens", "extra")  # what of a chat's settings makes it another player


@dataclass(frozen=True)
class SeedsConfig:
    """Seeds of parts of training where they are not to follow from `seed`."""

    games: int | None = None
    sampling: int | None = None
    shuffling: int | None = None

    def __post_init__(self) -> None:
        for name, n in vars(self).items():
            if n is not None and n < 0:
                raise UserError(f"seeds.{name}={n}: must be a whole number, at least 0, or null")


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation games. `every` iterations (0: only at the end) `games` are played, at the end `final_games`. `env`:
    game settings that differ from training; `cast`: who plays, where that differs."""

    every: int = 5
    games: int = 128
    final_games: int = 1000
    temperature: float = 1.0
    seed: int = 7
    env: Mapping[str, Any] = field(default_factory=dict)
    cast: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("games", 0), ("final_games", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UserError(f"eval.{name}={getattr(self, name)}: must be at least {least}")
        check_temperature(self.temperature, "eval.temperature")

    def seating(self, cast: Mapping[str, Seats]) -> dict[str, Seats]:
        """Who plays in evaluation."""
        settings = {role: dataclasses.asdict(seats) for role, seats in cast.items()}
        for role, changes in self.cast.items():
            settings[role] = {**settings.get(role, {}), **changes}
        return cast_of(settings, "eval.cast")


@dataclass(frozen=True)
class Parts:
    """What a training run is made of, built from its configuration."""

    env: Mapping[str, Any]
    cast: Mapping[str, Seats]  # who plays each role
    model: ModelConfig
    base: BaseConfig
    algo: PPOConfig | FilteredBCConfig | RLPiklConfig
    rewards: Mapping[str, Reward]
    losses: Mapping[str, Loss]
    privileged: bool  # whether the critic sees hidden facts
    chat: ChatAgent | None = None  # the player behind an endpoint, where one plays


CRITICS = ("private", "privileged")
HUMAN_ONLY = ("epochs", "permute_items", "deals_only", "claim", "keep", "human_games")  # settings of `base`


def build(cfg: DictConfig, players: Sequence[str] = (), stops: bool = False, learns: bool = True) -> Parts:
    """Builds all parts; the player `chat` where it is one of `players`, by name (`stops`: see `ChatAgent`).

    Where nobody `learns`, there are no rewards and losses, and no class that a setting names is imported: such settings
    may come from a run's folder.

    Raises UserError naming the setting, its value and what it should be.
    """
    settings = plain(cfg)
    algo = dict(settings["algo"])
    kind = algo.pop("kind")
    configs: dict[str, type[PPOConfig] | type[FilteredBCConfig] | type[RLPiklConfig]] = {
        "ppo": PPOConfig, "filtered_bc": FilteredBCConfig, "pikl": RLPiklConfig
    }  # fmt: skip
    if not isinstance(kind, str) or kind not in configs:
        raise UserError(f"algo.kind={kind}: must be one of {', '.join(configs)}")
    losses = terms(settings["loss"], "loss") if learns else {}
    plans = any_reads(losses, "planned")
    if kind == "filtered_bc" and plans:
        raise UserError("loss=plan: algo=filtered_bc imitates games as they were played; drop it, or take algo=ppo")
    lacks = {"filtered_bc": ("advantages", "returns"), "pikl": ("advantages",)}.get(kind, ())  # what batches have not
    losses = {name: loss for name, loss in losses.items() if not any(needs(loss, what) for what in lacks)}
    if kind == "pikl" and learns:
        if not plans:
            raise UserError("loss: with algo=pikl the policy learns from plans, and there is no loss.plan; keep it")
        of_game, mistake = settings["env"], (algo.get("planner") or {}).get("mistake")
        if algo.get("value") == "plan" and of_game["game"] == "among_us" and (of_game["imposters"] != 1 or mistake):
            raise UserError(
                f"algo.value=plan: with env.imposters={of_game['imposters']} and algo.planner.mistake={mistake} a plan "
                "does not say how probable a win by the vote is; take paid, or one imposter and mistake 0"
            )
    for name, loss in losses.items():
        if kind != "ppo" and needs(loss, "reference"):
            raise UserError(
                f"loss.{name}.estimator={getattr(loss, 'estimator', '')}: algo={kind} does not learn from plain "
                "samples of the policy, which it takes; must be exact"
            )
    if plans and settings["env"]["game"] not in PLANNED:
        raise UserError(f"loss.plan: env.game={settings['env']['game']} has nothing to plan; leave it out (~loss.plan)")
    if learns and not any(loss.weight for loss in losses.values()):
        raise UserError(f"loss: with algo={kind} every weight is 0, so there is nothing to learn; raise one")
    if "chat" in settings:
        check_nothing_secret(settings["chat"]["url"], settings["chat"]["key"])
    check_text(settings["data"]["dond"], "data.dond")
    seed = settings.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError(f"seed={seed}: must be a whole number, at least 0")
    make(SeedsConfig, settings.get("seeds", {}), "seeds")
    for name in {"shard", "deterministic"} & settings.keys():
        if not isinstance(settings[name], bool):
            raise UserError(f"{name}={settings[name]}: must be true or false")
    model = dict(settings["model"])
    model.pop("max_new_tokens", None)  # read by algo
    critic = model.pop("critic", "private")
    if critic not in CRITICS:
        raise UserError(f"model.critic={critic}: must be one of {', '.join(CRITICS)}")
    env, lm, base = settings["env"], make(ModelConfig, model, "model"), make(BaseConfig, settings["base"], "base")
    if base.data == "none" and lm.kind == "tiny":
        raise UserError("base=none: a model from scratch knows no word yet; choose base=scripted, or model=hf")
    if settings["data"]["dond"] and base.data != "human":
        folder = settings["data"]["dond"]
        raise UserError(f"data.dond={folder}: base={base.data} does not read it; drop one, or take base=human")
    if base.data == "human" and env["game"] != "dond":
        raise UserError(f"base=human: people played Deal or No Deal, not env.game={env['game']}; choose base=scripted")
    if base.lessons and base.data == "human":
        raise UserError(f"base.lessons={list(base.lessons)}: only scripted players answer; must be [] with base=human")
    env_maker(env)  # its own mistakes first, under their own names
    if base.players:
        _scripted(env["game"], base.players, "base.players")
    for number, lesson in enumerate(base.lessons):
        _scripted(env["game"], lesson.players, f"base.lessons[{number}]")
        try:
            env_maker({**env, **lesson.env})
        except UserError as error:
            raise UserError(f"base.lessons[{number}]: {error}") from error
    for name, loss in losses.items():
        if loss.reads == "renamed" and not exchangeable(env):
            raise UserError(
                f"loss.{name}.renamed=true: env.game={env['game']} has no names that can stand for one another; "
                "set it to false"
            )
    rewards = terms(settings["reward"], "reward") if learns else {}
    for name, reward in rewards.items():
        if (credited := getattr(reward, "credits", "turn")) not in CREDITS:
            raise UserError(f"reward.{name}.credits={credited!r}: must be one of {', '.join(CREDITS)}")
    try:
        learner = make(configs[kind], algo, "algo")
    except UserError as error:  # the planner's class is also used elsewhere, and does not know where it stands here
        raise UserError(f"algo.{error}" if str(error).startswith("planner.") else str(error)) from error
    return Parts(
        env=env,
        cast=cast_of(settings["cast"]),
        model=lm,
        base=base,
        algo=learner,
        rewards=rewards,
        losses=losses,
        privileged=critic == "privileged",
        chat=ChatAgent(make(ChatConfig, settings["chat"], "chat"), stops) if CHAT in players else None,
    )


def check_read(parts: Parts) -> None:
    """UserError for a setting that this learner or this base does not read: runs of several names would be one and the
    same. Of what is to be trained alone, for whoever is only played has been trained."""
    algo, base = parts.algo, parts.base
    kind = "ppo" if isinstance(algo, PPOConfig) else "pikl" if isinstance(algo, RLPiklConfig) else "filtered_bc"
    for name, reward in parts.rewards.items() if kind != "ppo" else ():
        learned = is_game(reward) or (kind == "pikl" and not credits_messages(reward))
        if reward.weight and not learned:
            raise UserError(
                f"reward.{name}.weight={reward.weight:g}: algo={kind} learns nothing from it; must be 0, which "
                "measures it, or take algo=ppo"
            )
    for name, loss in parts.losses.items():
        if kind == "pikl" and needs(loss, "filter") and loss.weight:
            raise UserError(
                f"loss.{name}.weight={loss.weight:g}: algo=pikl imitates plans, and by this it would imitate every "
                "seat; must be 0"
            )
    if algo.update.target_kl is not None and not any(needs(loss, "advantages") for loss in parts.losses.values()):
        raise UserError(
            f"algo.update.target_kl={algo.update.target_kl:g}: how far the policy has moved is known only beside a "
            "loss on advantages, as loss.policy; must be null without one"
        )
    if base.players and base.data == "human":
        raise UserError(
            f"base.players={base.players}: base=human learns from people; leave it out, or take base=scripted, and no "
            "data.dond"
        )
    for name in HUMAN_ONLY if base.data == "scripted" else ():
        if getattr(base, name) != getattr(BaseConfig, name):
            raise UserError(
                f"base.{name}={getattr(base, name)}: base=scripted does not read it; leave it out, or take base=human"
            )


def _scripted(game: str, players: str, where: str) -> None:
    try:
        scripted(game, players)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def cast_of(settings: Mapping[str, Any], where: str = "cast") -> dict[str, Seats]:
    """Who plays each role, from the settings `cast.ROLE.*`."""
    return {role: make(Seats, seats, f"{where}.{role}") for role, seats in settings.items()}


def terms(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The named terms of `reward` or `loss`, each from its `_target_`."""
    built: dict[str, Any] = {}
    for name, fields in settings.items():
        if fields is None:  # left out, as `~loss.NAME` does on the command line
            continue
        if not isinstance(fields, Mapping) or not isinstance(fields.get("_target_"), str):
            raise UserError(
                f"{_given(f'{where}.{name}', fields)} has no _target_: give the whole term, as "
                f"conf/{where}/default.yaml does"
            )
        module, _, called = fields["_target_"].rpartition(".")
        try:
            target = getattr(importlib.import_module(module), called)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{where}.{name}._target_={fields['_target_']}: there is no such class") from error
        # A loss says what it reads of the outputs; a reward reads the whole episode.
        fits = isinstance(target, type) and dataclasses.is_dataclass(target)
        has = {f.name for f in dataclasses.fields(target)} | set(dir(target)) if fits else set()
        if "weight" not in has or ("reads" in has) != (where == "loss"):
            needs = "a dataclass with weight and reads" if where == "loss" else "a dataclass with weight, and no reads"
            raise UserError(f"{where}.{name}._target_={fields['_target_']}: is no class of a {where}, which is {needs}")
        built[name] = make(target, {k: v for k, v in fields.items() if k != "_target_"}, f"{where}.{name}")
        if where == "loss":
            if built[name].weight < 0:
                weight = f"loss.{name}.weight={built[name].weight:g}"
                raise UserError(f"{weight}: would learn the opposite; must be 0 (measured only) or above")
            _check_reads(built[name].reads, f"loss.{name}.reads")
    return built


def _check_reads(reads: Any, where: str) -> None:
    """Refuses what no forward pass computes: a term that reads it would learn from zeros."""
    if not isinstance(reads, str) or reads not in READS:
        raise UserError(f"{where}={reads!r}: must be one of {', '.join(READS)}")


def _given(name: str, value: Any) -> str:
    """What was given, as it may be shown."""
    return told([f"{name}={value}"])


def make(kind: type[T], settings: Mapping[str, Any], where: str) -> T:
    """A dataclass from plain settings, nested ones too, with every value checked against its annotation."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    hints, known = typing.get_type_hints(kind), {f.name for f in fields}
    if not isinstance(settings, Mapping):
        raise UserError(f"{_given(where, settings)}: must be settings of {kind.__name__}: {', '.join(sorted(known))}")
    for f in fields:
        if f.default is f.default_factory is dataclasses.MISSING and f.name not in settings:
            raise UserError(f"{where}.{f.name} is missing")
    for name in settings:
        if name not in known:
            raise UserError(f"{where}.{name} is no setting of {kind.__name__}; known: {', '.join(sorted(known))}")
    values = {name: _value(hints[name], value, f"{where}.{name}") for name, value in settings.items()}
    return kind(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        (hint,) = (h for h in typing.get_args(hint) if h is not type(None))
        origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return make(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{_given(where, value)}: must be a list")
        kind = typing.get_args(hint)[0]
        return tuple(_value(kind, part, f"{where}[{i}]") for i, part in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise UserError(f"{_given(where, value)}: must be a group of settings, as in {{KEY: VALUE}}")
        of_each = typing.get_args(hint)[1]
        return {key: _value(of_each, each, f"{where}.{key}") for key, each in value.items()}
    if origin is Sequence:
        if not isinstance(value, list | tuple):
            raise UserError(f"{_given(where, value)}: must be a list")
        return value
    wanted = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}.get(hint)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= LARGEST:
            raise UserError(f"{where}={value}: must be a number from {-LARGEST:g} to {LARGEST:g}")
        return float(value)
    if wanted is not None and (not isinstance(value, hint) or (hint is int and isinstance(value, bool))):
        raise UserError(f"{_given(where, value)}: must be {wanted}")
    if hint is int:
        check_sizes(value, where)
    return value


def plain(cfg: DictConfig) -> dict[str, Any]:
    """A configuration as ordinary dicts and lists, resolved."""
    container = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(container, dict)
    return {str(k): v for k, v in container.items()}


def cast_names(settings: Mapping[str, Any]) -> list[str]:
    """Everybody who plays in a run's training or evaluation, by name."""
    cast, changed = cast_of(settings["cast"]), make(EvalConfig, settings["eval"], "eval")
    return list(dict.fromkeys([*players_of(cast), *players_of(changed.seating(cast))]))


def identity(cfg: DictConfig) -> dict[str, Any]:
    """The settings that make a run what it is, resolved.

    Left out are terms that are null, a GPU's number, what is for speed or memory where it is off, seeds that follow
    from `seed`, and an endpoint's settings where nobody plays through one. What might be a secret is there as its
    digest: another secret makes another run, for a name alone does not say whether a value only opens the door.
    """
    settings = {name: value for name, value in plain(cfg).items() if name not in ELSEWHERE}
    settings["device"] = str(settings["device"]).partition(":")[0]
    for part in ("reward", "loss"):
        settings[part] = {name: term for name, term in settings[part].items() if term is not None}
    algo = settings["algo"]
    steps = algo["update"]
    faster = ((algo, "decode_steps", 1), (algo, "play_bf16", False), (steps, "gradient_checkpointing", False))
    for part, name, off in faster:
        if part[name] == off:
            del part[name]
    own_seeds = {part: n for part, n in (settings.pop("seeds", None) or {}).items() if n is not None}
    if own_seeds:
        settings["seeds"] = own_seeds
    chat = settings.pop("chat", None)
    if chat is not None and CHAT in cast_names(settings):
        settings["chat"] = behind_endpoint(chat)
    return dict(hidden(settings))


def behind_endpoint(chat: Mapping[str, Any]) -> dict[str, Any]:
    """What of the settings `chat.*` makes it another player, as it may be kept."""
    return dict(hidden({name: chat[name] for name in OF_CHAT}, known_secrets(chat["key"], chat["extra"])))


def config_hash(cfg: DictConfig) -> str:
    """The digest of the identity."""
    return digest(identity(cfg))


def run_folder(cfg: DictConfig) -> Path:
    """`runs/NAME-ARM-sSEED-HASH`: the same configuration, the same folder. UserError where its name is too long."""
    folder = f"{cfg.name}-{cfg.arm}-s{cfg.seed}-{config_hash(cfg)[:8]}"
    check_length(folder, "name, arm and seed")
    return Path(cfg.runs) / folder

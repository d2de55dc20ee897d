"""The specification of a command: its composed configuration as one frozen object, built once and checked.

`run_spec(cfg)` is everything that `experiments.train` is told, `play_spec(cfg, players)` what commands are told that
only play. Whoever asks where a value in force comes from finds it here: the learning rate is
`spec.algo.update.learning_rate`, set by the files that the defaults of `conf/train.yaml` list, the last one winning,
and by the command line (`algo.anneal_lr` lets it fall over the iterations: marl/algorithms/training.py).
Whatever depends on this machine (devices, memory, files of other runs) is checked later, by whoever reads it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from experiments.setup.checks import (
    check_base_is_read,
    check_intents_are_read,
    check_learners,
    check_losses,
    check_rewards,
)
from experiments.setup.config import EvalConfig, SeedsConfig, cast_of, losses_of, make, plain, terms
from experiments.setup.players import one_run
from marl.agents.chat import CHAT, ChatAgent, ChatConfig, check_nothing_secret, known_secrets
from marl.algorithms.filtered_bc import FilteredBCConfig
from marl.algorithms.ppo import PPOConfig
from marl.algorithms.rl_pikl import RLPiklConfig
from marl.common.errors import UserError, check_choices, check_length, check_text, prefixed
from marl.common.files import digest
from marl.common.secrets import hidden
from marl.intents.agent import CiceroConfig
from marl.losses import Loss
from marl.model.lora import AdapterConfig
from marl.planning.planner import PlannerConfig
from marl.pretraining.config import BaseConfig, ModelConfig
from marl.rewards import Reward
from marl.rollout.cast import RoleConfig, cast_settings, learners_of, players_of
from marl.rollout.games import env_maker, scripted, without_later
from marl.storage.checkpoint import CheckpointConfig
from marl.storage.folder import ELSEWHERE

Algo = PPOConfig | FilteredBCConfig | RLPiklConfig
ALGOS: dict[str, type[Algo]] = {"ppo": PPOConfig, "filtered_bc": FilteredBCConfig, "pikl": RLPiklConfig}
AS_GIVEN = ("name", "seed", "tracker", "device", "threads", "shard", "deterministic", "progress")  # of a run
CRITICS = ("private", "privileged")
# No part of a run's identity: what is for speed or memory alone, and what came later, where it is off (`switched_on`).
OFF = (("decode_steps", 1), ("play_bf16", False), ("gradient_checkpointing", False), ("advantage", "gae"), ("group", 1),
       ("scale", True), ("votes", 0.0), ("baseline", "before"), ("samples", 4), ("questions", "stream"),
       ("lora", None), ("intents", None))  # fmt: skip
OF_CHAT = ("model", "temperature", "max_tokens", "extra")  # what of a chat's settings makes it another player


@dataclass(frozen=True)
class Spec:
    """The game, who plays it, and what models are: the part that every command has."""

    env: Mapping[str, Any]
    cast: Mapping[str, RoleConfig]  # who plays each role
    model: ModelConfig
    critic: str  # what it sees: `private`, or `privileged` for hidden facts too
    base: BaseConfig
    algo: Algo
    human_data: str | None  # folder of the human dialogues
    runs: Path
    cache: Path  # where base models are kept

    def __post_init__(self) -> None:
        base, game = self.base, self.env["game"]
        check_choices(self, "model", critic=CRITICS)
        check_text(self.human_data, "data.dond")
        if base.data == "none" and self.model.kind == "tiny":
            raise UserError("base=none: a model from scratch knows no word yet. Choose base=scripted, or model=hf.")
        if self.human_data and base.data != "human":
            raise UserError(
                f"data.dond={self.human_data}: base={base.data} does not read it. Drop one, or take base=human."
            )
        if base.data == "human" and game != "dond":
            raise UserError(f"base=human: people played Deal or No Deal, not env.game={game}. Choose base=scripted.")
        if base.data == "human" and self.env.get("format", "free") != "free":
            raise UserError(
                f"env.format={self.env['format']}: people's dialogues are in the free form. Take it, or base=scripted."
            )
        if base.data == "human" and self.env.get("questions", "values") != "values":
            raise UserError(
                f"env.questions={self.env['questions']}: base=human learns to answer questions about values. Take "
                "values, or base=scripted."
            )
        if base.lessons and base.data == "human":
            raise UserError(
                f"base.lessons={list(base.lessons)}: only scripted players answer; must be [] with base=human"
            )
        env_maker(self.env)
        if base.players:
            with prefixed("base.players: "):
                scripted(game, base.players)
        for number, lesson in enumerate(base.lessons):
            with prefixed(f"base.lessons[{number}]: "):
                scripted(game, lesson.players)
                env_maker({**self.env, **lesson.env})


@dataclass(frozen=True)
class PlaySpec(Spec):
    """A command that plays and does not learn."""

    temperature: float
    concurrency: int  # games at a time
    planner: PlannerConfig  # how players plan whose names end in +plan
    cicero: CiceroConfig  # and those who talk with a plan, +cicero
    chat: ChatAgent | None  # the player behind an endpoint, where one plays

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.planner.choose == "own":
            raise UserError(
                "planner.choose=own: only training notes plans without playing them; must be sample or best"
            )


@dataclass(frozen=True)
class RunSpec(Spec):
    """A training run."""

    name: str
    arm: str
    seed: int
    seeds: SeedsConfig
    init: Mapping[str, str]  # by learner, the run that it starts from
    rewards: Mapping[str, Reward]
    losses: Mapping[str, Loss]
    eval: EvalConfig
    checkpoint: CheckpointConfig
    tracker: Mapping[str, Any]
    chat: ChatConfig | None  # of the player behind an endpoint, where one plays
    device: str
    threads: int | None
    shard: bool
    deterministic: bool
    progress: bool
    measured: Sequence[str]  # terms whose weight the arm sets to 0
    identity: Mapping[str, Any]  # the settings that make the run what it is

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise UserError(f"seed={self.seed}: must be a whole number, at least 0")
        for name in ("shard", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)}: must be true or false")
        if self.shard and self.model.lora:
            raise UserError("shard=true: an adapter has no weights to split. Set it to false, or model.lora to null.")
        if self.algo.play_bf16 and self.model.dtype == torch.bfloat16:
            raise UserError(
                "algo.play_bf16=true: with model.lora.bf16=true all weights are in bfloat16. Set one to false."
            )
        check_length(self.folder.name, "name, arm and seed")
        check_losses(self)
        check_intents_are_read(self)
        check_rewards(self)
        check_base_is_read(self.base)
        check_learners(self)

    @property
    def kind(self) -> str:
        """The learner, as `algo=KIND` names it."""
        return next(name for name, config in ALGOS.items() if type(self.algo) is config)

    @property
    def hash(self) -> str:
        """The digest of the identity."""
        return digest(dict(self.identity))

    @property
    def folder(self) -> Path:
        """`runs/NAME-ARM-sSEED-HASH`: the same configuration, the same folder."""
        return self.runs / f"{self.name}-{self.arm}-s{self.seed}-{self.hash[:8]}"

    @property
    def config_yaml(self) -> str:
        """The identity, as the run's folder keeps it."""
        return OmegaConf.to_yaml(OmegaConf.create(dict(self.identity)))

    @property
    def learners(self) -> list[str]:
        """Names of the learners; the first one's policy is the run's."""
        return learners_of(self.cast)

    @property
    def test_env(self) -> dict[str, Any]:
        """The game of evaluation."""
        return {**self.env, **self.eval.env}

    @property
    def test_cast(self) -> dict[str, RoleConfig]:
        """Names of the players in evaluation."""
        return self.eval.evaluation_cast(self.cast)


# --- From the configuration -------------------------------------------------------------------------------------------
def run_spec(cfg: DictConfig) -> RunSpec:
    """Builds the specification of a training run. UserError, naming the setting, for one that it cannot have."""
    settings = plain(cfg)
    for learner, pattern in settings["init"].items():
        check_text(pattern, f"init.{learner}")
        if pattern is not None and "*" in pattern:  # stands for the one finished run that it matches
            settings["init"][learner] = one_run(settings["runs"], pattern, f"init.{learner}").name
    measured = zero_weights(settings)
    common = common_settings(settings)
    evaluation = make(EvalConfig, settings["eval"], "eval")
    names = {*players_of(common["cast"]), *players_of(evaluation.evaluation_cast(common["cast"]))}
    chats = CHAT in names
    return RunSpec(
        **common,
        **{name: settings[name] for name in AS_GIVEN},
        arm=str(settings["arm"]),  # `arm=0` is a number to the command line
        seeds=make(SeedsConfig, settings["seeds"], "seeds"),
        init={learner: run for learner, run in settings["init"].items() if run is not None},
        rewards=terms(settings["reward"], "reward"),
        losses=losses_of(settings),
        eval=evaluation,
        checkpoint=make(CheckpointConfig, settings["checkpoint"], "checkpoint"),
        chat=make(ChatConfig, settings["chat"], "chat") if chats else None,
        measured=measured,
        identity=identity(settings, chats),
    )


def play_spec(cfg: DictConfig, players: Sequence[str] = (), partners: bool = False) -> PlaySpec:
    """Builds the specification of a command that plays. `players`: by name; `partners`: those of the cast play, too.

    No class that a setting names is imported, since settings may come from somebody else's run.
    """
    settings = plain(cfg)
    common = common_settings(settings)
    common["cast"] = {role: seats.without_pool() for role, seats in common["cast"].items()}
    beside = [seats.partner for seats in common["cast"].values() if partners and seats.partners]
    chats = CHAT in (*players, *beside)
    return PlaySpec(
        **common,
        temperature=settings.get("temperature", 1.0),
        concurrency=settings["concurrency"],
        planner=make(PlannerConfig, settings.get("planner") or {}, "planner"),
        cicero=make(CiceroConfig, settings.get("cicero") or {}, "cicero"),
        chat=ChatAgent(make(ChatConfig, settings["chat"], "chat"), stops=False) if chats else None,
    )


def common_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the fields of `Spec`."""
    algo, model = dict(settings["algo"]), dict(settings["model"])
    kind = algo.pop("kind")
    if not isinstance(kind, str) or kind not in ALGOS:
        raise UserError(f"algo.kind={kind}: must be one of {', '.join(ALGOS)}")
    model.pop("max_new_tokens", None)  # algo.max_new_tokens refers to it
    critic = model.pop("critic", "private")
    if "chat" in settings:
        check_nothing_secret(settings["chat"]["url"], settings["chat"]["key"])
    lm = make(ModelConfig, model, "model")  # before algo, which takes some of its settings
    if kind == "filtered_bc" and "planner" in algo:  # loss=plan brings it
        raise UserError(f"loss=plan: algo={kind} imitates games as they were played. Drop it, or take algo=ppo.")
    try:
        learner = make(ALGOS[kind], algo, "algo")
    except UserError as error:  # a planner does not know that it stands in algo here
        raise UserError(f"algo.{error}" if str(error).startswith(("planner.", "cicero.")) else str(error)) from error
    return {
        "env": settings["env"],
        "cast": cast_of(settings["cast"]),
        "model": lm,
        "critic": critic,
        "base": make(BaseConfig, settings["base"], "base"),
        "algo": learner,
        "human_data": settings["data"]["dond"],
        "runs": Path(settings["runs"]),
        "cache": Path(settings["cache"]),
    }


def zero_weights(settings: dict[str, Any]) -> list[str]:
    """Sets the weight of every term to 0 that the arm does not train (`only`); returns those that had another."""
    if settings["arm"] not in settings["only"]:
        return []
    kept, measured = settings["only"][settings["arm"]], []
    if not isinstance(kept, list):
        raise UserError(f"only.{settings['arm']}={kept}: must be a list of terms, as in [reward.game,loss.policy]")
    for group in ("reward", "loss"):
        for name, term in settings[group].items():
            if isinstance(term, dict) and f"{group}.{name}" not in kept and term.get("weight", 1.0) != 0:
                term["weight"] = 0.0
                measured.append(f"{group}.{name}")
    return measured


def identity(settings: Mapping[str, Any], chats: bool = False) -> dict[str, Any]:
    """Returns the settings that make a run what it is. `chats`: a player behind an endpoint plays.

    Leaves out terms that are null, a GPU's number, settings of speed or memory that are off, seeds that follow from
    `seed`, and an endpoint's settings if nobody plays through one. A value that might be a secret is there as its
    digest.
    """
    found = {name: value for name, value in settings.items() if name not in ELSEWHERE}
    found["device"] = str(found["device"]).partition(":")[0]
    found["env"] = without_later(found["env"])
    found["cast"] = {role: cast_settings(seats) for role, seats in found["cast"].items()}
    for part in ("reward", "loss"):
        found[part] = {name: switched_on(term) for name, term in found[part].items() if term is not None}
    found["model"] = switched_on(found["model"])
    if lora := found["model"].get("lora"):
        found["model"]["lora"] = {**asdict(AdapterConfig()), **lora}
    found["algo"] = switched_on(found["algo"])
    found["algo"]["update"] = switched_on(found["algo"]["update"])
    if seeds := {part: n for part, n in (found.pop("seeds", None) or {}).items() if n is not None}:
        found["seeds"] = seeds
    chat = found.pop("chat", None)
    if chats:
        found["chat"] = behind_endpoint(chat)
    return dict(hidden(found))


def switched_on(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings without those of OFF. A term of the user's keeps all of its own: its defaults may differ."""
    if not str(settings.get("_target_", "marl.")).startswith("marl."):
        return dict(settings)
    return {name: value for name, value in settings.items() if (name, value) not in OFF}


def behind_endpoint(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what of the settings `chat.*` makes it another player, secrets as digests."""
    return dict(hidden({name: chat[name] for name in OF_CHAT}, known_secrets(chat["key"], chat["extra"])))

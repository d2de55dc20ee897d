"""The YAML files are the source of defaults: a dataclass of the library has none, or the same one."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments.setup.config import EvalConfig, SeedsConfig, make
from marl.agents.chat import ChatConfig
from marl.algorithms.filtered_bc import FilteredBCConfig
from marl.algorithms.lookahead import LookaheadConfig
from marl.algorithms.ppo import PPOConfig
from marl.algorithms.rl_pikl import RLPiklConfig
from marl.intents.agent import CiceroConfig
from marl.losses.entropy import EntropyLoss
from marl.losses.imitation import ImitationLoss
from marl.losses.kl import KLLoss
from marl.losses.listening import ListeningLoss
from marl.losses.plan import PlanLoss
from marl.losses.policy import PolicyLoss
from marl.losses.value import ValueLoss
from marl.losses.world_model import WorldModelLoss
from marl.model.lora import AdapterConfig
from marl.planning.intents import IntentConfig
from marl.planning.lookahead import Search
from marl.planning.planner import PlannerConfig
from marl.pretraining.config import BaseConfig, ModelConfig
from marl.rewards.game import GameReward
from marl.rewards.speaking import SpeakingReward
from marl.rollout.cast import RoleConfig
from marl.storage.checkpoint import CheckpointConfig

# Each dataclass that the configuration fills, the file of its defaults, and where it stands in that file.
FILLED = {
    AdapterConfig: "model/smollm2.yaml model.lora",
    BaseConfig: "base/scripted.yaml",
    ChatConfig: "chat/default.yaml",
    CiceroConfig: "cicero/default.yaml",
    CheckpointConfig: "train.yaml checkpoint",
    EntropyLoss: "loss/default.yaml entropy",
    EvalConfig: "train.yaml eval",
    FilteredBCConfig: "algo/filtered_bc.yaml algo",
    GameReward: "reward/default.yaml game",
    ImitationLoss: "loss/default.yaml imitation",
    IntentConfig: "cicero/default.yaml plan",
    KLLoss: "loss/default.yaml kl",
    ListeningLoss: "loss/default.yaml listening",
    LookaheadConfig: "lookahead.yaml train",
    ModelConfig: "model/tiny.yaml",
    PPOConfig: "algo/ppo.yaml",
    PlanLoss: "loss/plan.yaml plan",
    PlannerConfig: "planner/pikl.yaml",
    PolicyLoss: "loss/default.yaml policy",
    RLPiklConfig: "algo/pikl.yaml algo",
    RoleConfig: "env/dond.yaml cast.negotiator",
    Search: "lookahead.yaml search",
    SeedsConfig: "train.yaml seeds",
    SpeakingReward: "reward/default.yaml speaking",
    ValueLoss: "loss/default.yaml value",
    WorldModelLoss: "loss/default.yaml world_model",
}

# Fields that no file sets: their default is the only one.
ONLY_IN_CODE = {
    "BaseConfig.human_games",  # base/human.yaml
    "BaseConfig.held_out_games",  # base/human.yaml
    "BaseConfig.keep",  # base/human.yaml
    "LookaheadConfig.search",  # a part of its own
    "BaseConfig.vary",  # a game's file sets it
    "PPOConfig.planner",  # loss=plan brings conf/planner/noted.yaml
    "FilteredBCConfig.cicero",  # +cicero@algo.cicero=default brings conf/cicero/default.yaml
    "PPOConfig.cicero",
    "RLPiklConfig.cicero",
    "RLPiklConfig.planner",  # conf/planner/pikl.yaml
    "UpdateConfig.temperature",  # the trainer sets it to the rollout's
    "WorldModelLoss.after_questions",
}


def in_yaml(where: str) -> Mapping[str, Any]:
    """The settings at this place of a file."""
    file, _, path = where.partition(" ")
    cfg = OmegaConf.load(f"conf/{file}")
    return typing.cast(Mapping[str, Any], OmegaConf.to_container(OmegaConf.select(cfg, path) if path else cfg))


def check(kind: type, found: Mapping[str, Any], where: str) -> None:
    """Compares each default of a dataclass with the file's, nested dataclasses too."""
    for field in dataclasses.fields(kind):
        name = f"{kind.__name__}.{field.name}"
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if value is dataclasses.MISSING:
            continue
        if field.name not in found:
            assert name in ONLY_IN_CODE or field.name == "reads", f"{where} does not set {name}, default {value}"
        elif isinstance(found[field.name], str) and "${" in found[field.name]:
            continue  # follows from another setting
        elif dataclasses.is_dataclass(value):
            wanted = make(type(value), found[field.name], where)
            assert value == wanted, f"{name}: {value} in the code, {wanted} in {where}"
        else:
            wanted = tuple(found[field.name]) if isinstance(value, tuple) else found[field.name]
            assert value == wanted, f"{name}: {value} in the code, {wanted} in {where}"


@pytest.mark.parametrize("kind", FILLED, ids=lambda kind: kind.__name__)
def test_dataclass_has_the_defaults_of_its_file(kind: type) -> None:
    check(kind, in_yaml(FILLED[kind]), FILLED[kind])


def test_planners_of_learners_have_the_defaults_of_their_files() -> None:
    noted = {**in_yaml("planner/pikl.yaml"), "choose": in_yaml("planner/noted.yaml")["choose"]}
    assert PPOConfig().planner == make(PlannerConfig, noted, "planner")
    assert RLPiklConfig().planner == PlannerConfig()


def test_settings_of_human_data_alone_have_the_defaults_of_their_file() -> None:
    human = in_yaml("base/human.yaml")
    alone = ("human_games", "held_out_games", "keep")
    assert {name: getattr(BaseConfig(), name) for name in alone} == {name: human[name] for name in alone}


def test_every_default_term_is_compared() -> None:
    targets = {f"{kind.__module__}.{kind.__qualname__}" for kind in FILLED}
    for file in ("loss/default.yaml", "reward/default.yaml", "loss/plan.yaml"):
        terms = {name: term for name, term in in_yaml(file).items() if name != "defaults"}
        assert {term["_target_"] for term in terms.values()} <= targets

"""Configurations as the command line makes them."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from experiments.setup.spec import run_spec

# Games of Among Us that soon meet a killing, and speak once each of it: most of what a test's run takes is its games.
BRIEF = ("env.max_steps=24", "env.messages_each=1", "env.cooldown=2")


def configure(command: str, *overrides: str) -> DictConfig:
    """What `python -m experiments.COMMAND OVERRIDES` would run."""
    with initialize_config_module("conf", version_base="1.3"):
        return compose(command, overrides=list(overrides))


def composed_once(command: str, *overrides: str) -> Callable[..., DictConfig]:
    """Returns a function from further values (`KEY=VALUE` in YAML, no groups) to settings; it composes only once, since
    that takes a third of a second."""
    composed = cache(lambda: configure(command, *overrides))

    def settings(*values: str) -> DictConfig:
        cfg = copy.deepcopy(composed())
        OmegaConf.set_struct(cfg, False)
        found = OmegaConf.merge(cfg, OmegaConf.from_dotlist(list(values)))
        assert isinstance(found, DictConfig)
        return found

    return settings


def run_folder(cfg: DictConfig) -> Path:
    """Returns the folder that a training run of this configuration writes into."""
    return run_spec(cfg).folder


def identity(cfg: DictConfig) -> dict[str, Any]:
    """Returns the settings that make this training run what it is."""
    return dict(run_spec(cfg).identity)


def config_hash(cfg: DictConfig) -> str:
    """Returns the digest of the identity."""
    return run_spec(cfg).hash

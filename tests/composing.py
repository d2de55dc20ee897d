"""Configurations as the command line makes them."""

from hydra import compose, initialize_config_module
from omegaconf import DictConfig


def configure(command: str, *overrides: str) -> DictConfig:
    """What `python -m experiments.COMMAND OVERRIDES` would run."""
    with initialize_config_module("conf", version_base="1.3"):
        return compose(command, overrides=list(overrides))

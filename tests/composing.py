"""Configurations as the command line makes them."""

from hydra import compose, initialize_config_module
from omegaconf import DictConfig

# Games of Among Us that soon meet a killing, and speak once each of it: most of what a test's run takes is its games.
BRIEF = ("env.max_steps=24", "env.messages_each=1", "env.cooldown=2")


def configure(command: str, *overrides: str) -> DictConfig:
    """What `python -m experiments.COMMAND OVERRIDES` would run."""
    with initialize_config_module("conf", version_base="1.3"):
        return compose(command, overrides=list(overrides))

"""Configurations as the command line makes them. Their files are composed once for all tests: that takes a third of a
second, and values on top of them take a hundredth."""

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

import conf
from experiments.setup.spec import run_spec

# Short games of Among Us with an early kill and one message each: games take most of the time of a test's run.
BRIEF = ("env.max_steps=24", "env.messages_each=1", "env.cooldown=2")

SHAPE = ("model.hidden_size=32", "model.layers=1", "model.intermediate_size=64")

# Small runs: two seconds each, after four for their base. With fewer games the base says nothing that Deal or No Deal
# accepts: every game is aborted, and nothing is learned from any.
SMALL = (
    "progress=false", "threads=1", "device=cpu", *SHAPE, "algo.iterations=2", "algo.games=4", "algo.concurrency=4",
    "algo.max_new_tokens=8", "eval.every=1", "eval.games=2", "eval.final_games=4", "checkpoint.every=1",
)  # fmt: skip
DOND = ("experiment=dond_quickstart", *SMALL, "env.max_entries=4", "env.max_errors=2", "base.games=200", "base.rows=2",
        "base.learning_rate=1e-2")  # fmt: skip
AMONG_US_BASE = (  # runs with these share a base, where they share `bases`
    "env=among_us", *BRIEF, *SHAPE, "env.tasks=2", "base.games=20", "base.rows=16",
    "base.lessons=[{players:random,steps:1}]",
)  # fmt: skip
AMONG_US = (
    *AMONG_US_BASE, *(each for each in SMALL if each not in SHAPE),
    "algo.update={learning_rate: 1e-3, rows: null, epochs: 1, minibatches: 2}",
    "loss.listening.votes=0",  # with votes, these few games happen to have no messages
)  # fmt: skip


def configure(command: str, *overrides: str) -> DictConfig:
    """Returns what `python -m experiments.COMMAND OVERRIDES` would run."""
    given = [parsed(override) for override in overrides]
    chosen = [o for o in given if chooses_file(o.key_or_group) and not isinstance(o.value(), dict)]
    cfg = copied(files(command, *(str(o.input_line) for o in chosen)))
    for override in given:
        parent, _, name = override.key_or_group.rpartition(".")
        if override.is_delete() and override not in chosen:
            with open_dict(cfg):
                del OmegaConf.select(cfg, parent)[name]
        elif override not in chosen:
            OmegaConf.update(cfg, override.key_or_group, override.value(), force_add=override.is_add())
    return cfg


@functools.cache
def parsed(override: str) -> Override:
    """Parses an override as the command line does."""
    return OverridesParser.create().parse_override(override)


def copied(pickled: bytes) -> DictConfig:
    """Returns a copy of a configuration, five times as fast as copy.deepcopy."""
    cfg: DictConfig = pickle.loads(pickled)
    return cfg


@functools.cache
def files(command: str, *choices: str) -> bytes:
    """Composes the files of a command, with these choices among them. libyaml reads them ten times as fast."""
    fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with patch.object(yaml, "SafeLoader", fast), initialize_config_module("conf", version_base="1.3"):
        return pickle.dumps(compose(command, overrides=list(choices)))


def cases(table: str) -> pytest.MarkDecorator:
    """Parametrises a test by `overrides` and `said`, a pattern; each line of the table is `OVERRIDES | PATTERN`."""
    rows = [line.partition(" | ") for line in table.strip("\n").splitlines()]
    return pytest.mark.parametrize(("overrides", "said"), [(given.split(), said) for given, _, said in rows])


def chooses_file(key: str) -> bool:
    """Returns whether an override chooses a file of a group, and does not change a setting."""
    return "/" in key or (Path(str(conf.__file__)).parent / key.partition("@")[0]).is_dir()


def composed_once(command: str, *overrides: str) -> Callable[..., DictConfig]:
    """Returns a function from further values (`KEY=VALUE` in YAML, no groups) to settings; it composes only once, since
    that takes a third of a second."""
    composed = functools.cache(lambda: pickle.dumps(configure(command, *overrides)))

    def settings(*values: str) -> DictConfig:
        cfg = copied(composed())
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

"""Runs that tests stop, and what tests read of runs."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from safetensors.torch import load_file

from experiments import learning, train


@contextmanager
def without_pages() -> Iterator[None]:
    """Training leaves an empty report: a real one takes as long as a small run's games."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "build_report", lambda folders, out_path, title: Path(out_path).touch())
        yield


def stop(cfg: DictConfig, iteration: int, saved: bool = True) -> None:
    """Trains until a checkpoint was saved, or with `saved=False` was about to be, after so many iterations."""
    save = learning.save_training

    def stopping(checkpoints: Path, number: int, *rest: Any) -> None:
        if number < iteration or saved:
            save(checkpoints, number, *rest)
        if number == iteration:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(learning, "save_training", stopping)
        train.main(cfg)


def typed(monkeypatch: pytest.MonkeyPatch, command: str, *overrides: str) -> None:
    """Sets `overrides` as if they had been typed; typed settings win over a run's own."""
    with initialize_config_module("conf", version_base="1.3"):
        whole = compose(command, overrides=list(overrides), return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", whole)


def lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file, by line feeds alone: messages may hold other ends of lines."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def logged(run: Path, phase: str) -> dict[int, dict[str, Any]]:
    """A run's metrics of this phase, by iteration."""
    return {row["iteration"]: row for row in lines(run / "metrics.jsonl") if row["phase"] == phase}


def texts(path: Path) -> list[list[str]]:
    """Everything that was said and done in recorded games."""
    return [[turn["text"] for turn in game["turns"]] for game in lines(path)]


def weights(policy: Path) -> dict[str, torch.Tensor]:
    """The numbers of a saved policy and its critic."""
    head = load_file(policy / "value_head.safetensors")
    return {**load_file(policy / "model.safetensors"), **{f"value.{name}": tensor for name, tensor in head.items()}}


def identical(one: Path, other: Path) -> bool:
    """Returns whether two saved policies are the same to the last bit."""
    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)

"""Runs that go on from where shorter ones ended are those that nobody cut short."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from experiments import train
from marl.checkpoint import copy_folder, load_policy, read_card, save_policy
from marl.config import identity, run_folder
from marl.files import read_json
from marl.longer import BEGUN_AS, shorter_run, take_up
from tests.composing import configure
from tests.experiments.test_resume import SMALL
from tests.torture import contents

STEADY = (*SMALL, "algo.anneal_lr=false", "eval.every=1")
FILTERED = ("algo=filtered_bc", "algo.keep=all", "eval.every=1", *SMALL[1:])


def run(at: Path, iterations: int, *overrides: str) -> Path:
    cfg = configure("train", *overrides, f"algo.iterations={iterations}", f"runs={at}/runs", f"cache={at}/bases")
    train.main(cfg)
    return run_folder(cfg)


def made(folder: Path) -> dict[str, str]:
    """What the run left, without the one note of where it began."""
    for path in (folder / "run.json", *folder.glob("checkpoints/*/state.json")):
        path.write_text(json.dumps({name: noted for name, noted in read_json(path).items() if name != BEGUN_AS}))
    return contents(folder)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two iterations, with its base in `bases` beside `runs`."""
    return run(tmp_path_factory.mktemp("short"), 2, *STEADY)


@pytest.fixture
def place(short: Path, tmp_path: Path) -> Path:
    """A copy of all that."""
    shutil.copytree(short.parents[1], tmp_path / "place")
    return tmp_path / "place"


def check(at: Path, settings: tuple[str, ...], begins_at: int, bases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trains four iterations where two have been trained, and elsewhere, and compares."""
    ended = next((at / "runs").glob("*/run.json")).parent
    left = contents(ended)
    capsys.readouterr()
    longer = run(at, 4, *settings)
    said = capsys.readouterr().out
    assert f"goes on from its iteration-00000{begins_at}" in said and f"continuing after iteration {begins_at}" in said
    assert "training the base" not in said
    assert read_json(longer / "run.json")[BEGUN_AS] == ended.name
    shutil.copytree(bases, at / "whole" / "bases", dirs_exist_ok=True)
    assert made(longer) == made(run(at / "whole", 4, *settings)) and contents(ended) == left


def test_a_longer_run_goes_on_from_a_shorter_one(
    short: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the base is in the cache no more, and the first try was killed."""
    shutil.rmtree(place / "bases")

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("marl.longer._copy_record", stop)
        run(place, 4, *STEADY)
    check(place, STEADY, 2, short.parents[1] / "bases", capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "begins_at"),
    [
        pytest.param(FILTERED, 2, id="filtered_bc"),
        # Its end was evaluated because it was the end: a longer run has no such line.
        pytest.param((*STEADY, "eval.every=3"), 1, id="evaluated at the end"),
        pytest.param((*STEADY, "eval.every=0", "eval.games=0"), 2, id="never evaluated"),
    ],
)
def test_so_do_others(
    settings: tuple[str, ...], begins_at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, 2, *settings)
    check(tmp_path, settings, begins_at, tmp_path / "bases", capsys)


def longer(at: Path, *overrides: str) -> Path:
    """The folder of a run that is about to begin."""
    cfg = configure("train", *STEADY, "algo.iterations=4", *overrides, f"runs={at}/runs", f"cache={at}/bases")
    folder = run_folder(cfg)
    folder.mkdir()
    OmegaConf.save(OmegaConf.create(identity(cfg)), folder / "config.yaml")
    return folder


def test_the_longest_of_the_same_settings_is_found(short: Path, place: Path) -> None:
    found = shorter_run(longer(place))
    assert found is not None and found.name == short.name
    assert shorter_run(longer(place, "name=twice")) == found
    assert shorter_run(longer(place, "seed=5")) is None
    assert shorter_run(longer(place, "algo.update.learning_rate=2e-3")) is None
    assert shorter_run(longer(place, "algo.anneal_lr=true")) is None  # even if the other one fell as well
    assert shorter_run(longer(place, "algo.iterations=1")) is None
    (found / "run.json").unlink()
    assert shorter_run(longer(place, "algo.iterations=5")) is None  # it has not ended


def remakes_the_base(at: Path) -> None:
    (base,) = (at / "bases").glob("dond-*")
    policy, card = load_policy(base), read_card(base)
    with torch.no_grad():
        next(policy.lm.parameters()).add_(0.01)
    save_policy(base, policy, {name: value for name, value in card.items() if name != "privileged_size"})


def loses_the_base(at: Path) -> None:
    shutil.rmtree(at / "bases")
    shutil.rmtree(next((at / "runs").glob("*/reference")))


def damages_checkpoints(at: Path) -> None:
    for weights in at.glob("runs/*/checkpoints/*/learner.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])


def loses_the_best(at: Path) -> None:
    """It may be the longer run's best as well, and would be looked for there."""
    newest = max(at.glob("runs/*/checkpoints/iteration-*"))
    best = {"best": {"iteration": 0, "score": 1.0}}
    copy_folder(newest, newest, {"state.json": json.dumps({**read_json(newest / "state.json"), **best})})
    for other in newest.parent.iterdir():
        if other != newest:
            shutil.rmtree(other)


@pytest.mark.parametrize("happens", [remakes_the_base, loses_the_base, loses_the_best, damages_checkpoints])
def test_nothing_is_taken_that_would_not_be_the_same(happens: Callable[[Path], None], place: Path) -> None:
    happens(place)
    folder = longer(place)
    found = shorter_run(folder)
    assert found is not None and take_up(found, folder, {}, place / "bases") is None
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


def test_nor_with_other_files(place: Path) -> None:
    folder = longer(place)
    found = shorter_run(folder)
    assert found is not None and take_up(found, folder, {"contexts": "of others"}, place / "bases") is None

"""Runs that go on from where shorter ones ended are those that nobody cut short."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from experiments import train
from experiments.setup.config import identity, make, plain, run_folder
from marl.common.files import read_json
from marl.pretraining.base import base_folder, base_settings
from marl.pretraining.config import BaseConfig, ModelConfig
from marl.storage.checkpoint import CheckpointConfig, copy_folder, load_policy, read_card, save_policy
from marl.storage.extend import BEGUN_AS, Longer, Unfit, shorter_run, take_up
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
        patch.setattr("marl.storage.extend.write_text", stop)
        run(place, 4, *STEADY)
    check(place, STEADY, 2, short.parents[1] / "bases", capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "begins_at"),
    [
        pytest.param(FILTERED, 2, id="filtered_bc"),
        # Its end was evaluated because it was the end: a longer run has no such line.
        pytest.param((*STEADY, "eval.every=3"), 1, id="evaluated at the end"),
    ],
)
def test_so_do_others(
    settings: tuple[str, ...], begins_at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, 2, *settings)
    check(tmp_path, settings, begins_at, tmp_path / "bases", capsys)


def begun(at: Path, *overrides: str) -> Longer:
    """A run that is to begin, and would note of itself what the first run noted."""
    cfg = configure("train", *STEADY, "algo.iterations=4", *overrides, f"runs={at}/runs", f"cache={at}/bases")
    folder = run_folder(cfg)
    folder.mkdir()
    OmegaConf.save(OmegaConf.create(identity(cfg)), folder / "config.yaml")
    state = read_json(max(at.glob("runs/*/checkpoints/*")) / "state.json")
    notes = {name: state[name] for name in ("commits", "made_with", "inputs")}
    made_of = base_settings(
        make(ModelConfig, *part(cfg, "model")), make(BaseConfig, *part(cfg, "base")), plain(cfg.env)
    )
    return Longer(folder, notes, base_folder(at / "bases", made_of), CheckpointConfig(1, 2), tables=False)


def part(cfg: DictConfig, name: str) -> tuple[dict[str, Any], str]:
    return {k: v for k, v in plain(cfg[name]).items() if k not in ("max_new_tokens", "critic")}, name


def test_the_longest_of_the_same_settings_is_found(short: Path, place: Path) -> None:
    found = shorter_run(begun(place).folder)
    assert found is not None and found.name == short.name
    assert shorter_run(begun(place, "name=twice").folder) == found
    for other in ("seed=5", "algo.update.learning_rate=2e-3", "algo.anneal_lr=true", "algo.iterations=1"):
        assert shorter_run(begun(place, other).folder) is None
    assert shorter_run(begun(place, "~algo.iterations").folder) is None
    (found / "run.json").unlink()
    assert shorter_run(begun(place, "algo.iterations=5").folder) is None  # it has not ended


@pytest.mark.parametrize("falls", ["algo.anneal_lr=true", "~algo.anneal_lr"])
def test_a_run_whose_learning_rate_falls_begins_anew(falls: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "shorter_run", lambda folder: pytest.fail("looked for"))
    monkeypatch.setattr(train, "open_tracker", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(place, 4, *STEADY, falls)


def remake(at: Path) -> None:
    (base,) = (at / "bases").glob("dond-*")
    policy, card = load_policy(base), read_card(base)
    with torch.no_grad():
        next(policy.lm.parameters()).add_(0.01)
    save_policy(base, policy, {name: value for name, value in card.items() if name != "privileged_size"})


def lose_base(at: Path) -> None:
    shutil.rmtree(at / "bases")
    shutil.rmtree(next((at / "runs").glob("*/reference")))


def damage_reference(at: Path) -> None:
    shutil.rmtree(at / "bases")
    (next((at / "runs").glob("*/reference")) / "checksums.json").unlink()


def rewrite(at: Path, **noted: Any) -> None:
    """Gives the newest checkpoint other notes."""
    newest = max(at.glob("runs/*/checkpoints/iteration-*"))
    copy_folder(newest, newest, {"state.json": json.dumps(read_json(newest / "state.json") | noted)})
    for other in newest.parent.iterdir():
        if other != newest:
            shutil.rmtree(other)


def damage(at: Path, pattern: str, data: bytes) -> None:
    for path in at.glob(f"runs/*/{pattern}"):
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("happens", "told"),
    [
        (remake, "had another base"),
        (lose_base, "had another base"),
        (damage_reference, "had another base"),
        (lambda at: damage(at, "checkpoints/*/learner.safetensors", b"0"), "has no whole checkpoint"),
        (lambda at: damage(at, "metrics.jsonl", b""), "has lost some of its metrics"),
        (lambda at: damage(at, "metrics.jsonl", b"\xff\n1\n"), "has lost some of its metrics"),
        (lambda at: damage(at, "episodes/iteration-*.jsonl", b"\xff"), "has a file that cannot be read"),
        (lambda at: damage(at, "run.json", b'{"arm": "x", "seeds": [1]}'), "was edited"),
        (lambda at: rewrite(at, commits=["another"]), "was made with other code"),
        (lambda at: rewrite(at, inputs={"contexts": "others"}), "was made with other files"),
        (lambda at: rewrite(at, made_with=[]), "was made with other libraries, hardware or settings of speed"),
        (lambda at: rewrite(at, run="another"), "has not all the checkpoints"),
        (lambda at: rewrite(at, best={"iteration": 0, "score": 1.0}), "has not all the checkpoints"),
        (rewrite, "has not all the checkpoints"),  # which lose the one before
    ],
)
def test_nothing_is_taken_that_would_not_be_the_same(happens: Callable[[Path], None], told: str, place: Path) -> None:
    longer = begun(place)
    happens(place)
    found = shorter_run(longer.folder)
    assert found is not None
    with pytest.raises(Unfit, match=told):
        take_up(found, longer)
    assert [path.name for path in longer.folder.iterdir()] == ["config.yaml"]


def test_why_a_run_begins_anew_is_said(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "git_commit", lambda: "another")
    monkeypatch.setattr(train, "open_tracker", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(place, 4, *STEADY)
    assert "fewer iterations, but was made with other code: this run begins anew" in capsys.readouterr().out

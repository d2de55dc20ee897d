"""What a run refuses to go on with, what it tells of, and what it keeps."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from experiments import learning, train
from experiments.setup import devices, work
from marl.common.errors import UserError
from marl.common.files import read_json
from marl.report.transcripts import read_episodes
from marl.storage.checkpoint import load_policy, read_card, save_policy
from marl.storage.folder import hardware
from marl.storage.tracking import JsonlTracker
from tests.composing import configure, run_folder
from tests.marl.models import hf_tokenizer, random_lm, save
from tests.torture import contents

SMALL = (
    "experiment=dond_quickstart", "progress=false", "threads=1", "base.games=24", "base.rows=16",
    "model.hidden_size=16", "model.layers=1", "model.heads=2", "model.intermediate_size=32", "algo.games=4",
    "algo.concurrency=4", "algo.max_new_tokens=8", "eval.games=3", "eval.final_games=3", "checkpoint.every=1",
)  # fmt: skip


def four_iterations(tmp_path: Path, *overrides: str) -> DictConfig:
    small = [setting for setting in SMALL if "model=hf" not in overrides or not setting.startswith("model.")]
    return configure("train", *small, "algo.iterations=4", f"runs={tmp_path}", *overrides)


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Trains two of four iterations, as if killed then, and gives the run's folder."""

    def start(*overrides: str) -> Path:
        cfg = four_iterations(tmp_path, *overrides)
        save = learning.save_training

        def saving(folder: Path, iteration: int, *rest: Any) -> None:
            save(folder, iteration, *rest)
            if iteration == 2:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(learning, "save_training", saving)
            with pytest.raises(KeyboardInterrupt):
                train.main(cfg)
        return run_folder(cfg)

    return start


def go_on(tmp_path: Path, *overrides: str) -> None:
    train.main(four_iterations(tmp_path, *overrides))


def test_a_checkpoint_of_another_run_is_refused(stopped: Callable[..., Path], tmp_path: Path) -> None:
    first, second = stopped(), stopped("seed=5")
    shutil.rmtree(second / "checkpoints")
    shutil.copytree(first / "checkpoints", second / "checkpoints")
    with pytest.raises(UserError, match=rf"iteration-000002 is of the run {first.name}: put it back there, or remove"):
        go_on(tmp_path, "seed=5")
    assert len(list((second / "checkpoints").iterdir())) == 2 and not (second / "run.json").exists()


def test_a_run_goes_on_from_before_a_damaged_checkpoint(
    stopped: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And ends as the one that was never stopped."""
    folder = stopped()
    weights = folder / "checkpoints" / "iteration-000002" / "learner.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    go_on(tmp_path)
    said = capsys.readouterr().out
    assert said.count("iteration-000002: damaged file learner.safetensors; going back") == 1
    assert "continuing after iteration 1" in said
    shutil.copytree(tmp_path / "bases", tmp_path / "whole" / "bases")
    go_on(tmp_path / "whole")
    assert contents(folder) == contents(tmp_path / "whole" / folder.name)


def test_a_base_that_was_made_again_otherwise_is_refused(
    stopped: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it the run puts its own into the cache again, and ends as if nothing had been."""
    folder = stopped()
    (base,) = (tmp_path / "bases").glob("dond-*")
    shutil.copytree(base, tmp_path / "whole" / "bases" / base.name)
    policy, card = load_policy(base), read_card(base)
    with torch.no_grad():
        next(policy.lm.parameters()).add_(0.01)
    save_policy(base, policy, {name: value for name, value in card.items() if name != "privileged_size"})
    with pytest.raises(UserError, match="is not the base that this run began with: it was made again"):
        go_on(tmp_path)
    shutil.rmtree(base)
    go_on(tmp_path)
    said = capsys.readouterr().out
    put_back = f"copying {folder / 'reference'} there"
    assert put_back in said and "training the base" not in said.split(put_back)[1]
    go_on(tmp_path / "whole")
    assert contents(folder) == contents(tmp_path / "whole" / folder.name)


def test_another_version_of_an_untouched_model_is_refused(stopped: Callable[..., Path], tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(single_digits=True)
    lm = random_lm("llama", len(tokenizer), context=2048)
    name = save(tmp_path / "model", lm, tokenizer)
    untouched = ("model=hf", f"model.name={name}", "base=none", "model.context=2048", "env.max_errors=1")
    stopped(*untouched)
    with torch.no_grad():
        next(lm.parameters()).mul_(1.5)
    lm.save_pretrained(name)
    with pytest.raises(UserError, match=r"model is not the base that this run began with: .*another version"):
        go_on(tmp_path, *untouched)


CONTEXTS = "1 4 4 1 1 2\n1 0 4 2 1 2\n"
OTHERS = "3 1 1 5 2 1\n3 2 1 2 2 1\n"


def test_an_edited_file_of_contexts_is_refused(stopped: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "contexts.txt"
    file.write_text(CONTEXTS)
    own = (f"env.contexts={file}", "env.split=all", "eval.env.split=all")
    stopped(*own)
    file.write_text(OTHERS)
    with pytest.raises(UserError, match=r"contexts\.txt is not what this run began with: .* put the old one back, or"):
        go_on(tmp_path, *own)


def test_games_of_the_base_are_of_the_same_contexts(tmp_path: Path) -> None:
    file, facts = tmp_path / "contexts.txt", []
    for seed, text in enumerate((CONTEXTS, OTHERS)):
        file.write_text(text)
        cfg = configure(
            "train", *SMALL, "algo.iterations=1", f"seed={seed}", f"+eval.env.contexts={file}", "eval.env.split=all",
            f"runs={tmp_path}",
        )  # fmt: skip
        train.main(cfg)
        games = [read_episodes(run_folder(cfg) / "episodes" / f"{name}.jsonl") for name in ("base", "trained")]
        facts.append([[game["facts"]["counts"] for game in each] for each in games])
    (first, trained), (second, again) = facts
    assert first == trained and second == again and first[0] == [1, 4, 1] and second[0] == [3, 1, 2]


@pytest.mark.parametrize(
    "place",
    [
        "cast.negotiator={{partner:{0},partners:1}}",
        "+eval.cast.negotiator={{partner:{0},partners:1}}",
        "init.learner={0}",
    ],
)
def test_another_run_that_was_replaced_is_refused(stopped: Callable[..., Path], tmp_path: Path, place: str) -> None:
    stopped()
    (base,) = (tmp_path / "bases").glob("dond-*")
    policy, other = load_policy(base), tmp_path / "other"
    save_policy(other / "policy", policy, {"game": "dond"})
    own = (place.format(other), "seed=1")
    stopped(*own)
    with torch.no_grad():
        next(policy.lm.parameters()).add_(0.01)
    save_policy(other / "policy", policy, {"game": "dond"})
    with pytest.raises(UserError, match=rf"{other} is not what this run began with: it was made again"):
        go_on(tmp_path, *own)


def test_other_software_or_hardware_is_told(
    stopped: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stopped()
    monkeypatch.setattr(work, "hardware", lambda: {**hardware(), "instructions": "AVX9"})
    go_on(tmp_path)
    told = f"this run was begun with instructions={hardware()['instructions']}, here AVX9: its last digits"
    assert told in capsys.readouterr().out
    made_with = read_json(folder / "run.json")["made_with"]
    assert [each["instructions"] for each in made_with] == [hardware()["instructions"], "AVX9"]
    assert {"torch", "transformers", "device", "deterministic", "processes", "threads"} <= made_with[0].keys()


def test_a_folder_that_is_moved_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = configure("train", *SMALL, "algo.iterations=2", f"runs={tmp_path}")
    save = learning.save_training

    def moving(folder: Path, iteration: int, *rest: Any) -> None:
        save(folder, iteration, *rest)
        folder.parent.rename(tmp_path / "moved")

    monkeypatch.setattr(learning, "save_training", moving)
    with pytest.raises(UserError, match=r"was moved or removed during its run\. Put it back"):
        train.main(cfg)
    assert not run_folder(cfg).exists(), "something was left at the old place"


def test_a_finished_run_whose_configuration_was_edited_is_refused(tmp_path: Path) -> None:
    cfg = configure("train", *SMALL, "algo.iterations=1", f"runs={tmp_path}")
    train.main(cfg)
    settings = OmegaConf.load(run_folder(cfg) / "config.yaml")
    settings.algo.games = 999
    OmegaConf.save(settings, run_folder(cfg) / "config.yaml")
    with pytest.raises(UserError, match=r"config\.yaml was edited \(algo\.games=999, here 4\)"):
        train.main(cfg)


def test_damaged_games_of_the_base_are_named_and_then_played_again(
    stopped: Callable[..., Path], tmp_path: Path
) -> None:
    folder = stopped()
    go_on(tmp_path)
    (kept,) = tmp_path.glob("bases/*/evaluations/*/evaluation.json")
    whole = kept.read_bytes()
    for cut in (whole[:40], b'{"conditions": {"base": {"game/score": 1}}}'):
        kept.write_bytes(cut)
        (folder / "run.json").unlink(missing_ok=True)
        with pytest.raises(UserError, match=r"evaluations/\w+/evaluation\.json: expected .*remove this file"):
            go_on(tmp_path)
    kept.unlink()
    go_on(tmp_path)
    assert kept.read_bytes() == whole


def test_games_of_a_base_that_cannot_be_written_are_kept_with_the_run(
    stopped: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As beside a base that others made, in a cache that they alone may write."""
    folder = stopped()
    (base,) = (tmp_path / "bases").glob("dond-*")
    (base / "evaluations").touch()  # no folder can be made here, by nobody
    go_on(tmp_path)
    assert f"the base's games are kept in the run's folder, since {base / 'evaluations'}" in capsys.readouterr().out
    mine = (folder / "base" / "evaluation.json").read_bytes()
    (base / "evaluations").unlink()
    (folder / "run.json").unlink()
    go_on(tmp_path)
    (shared,) = base.glob("evaluations/*/evaluation.json")
    assert shared.read_bytes() == mine


def test_the_best_is_kept_where_it_was_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between two checkpoints that are due."""
    scores = iter([0.0, 3.0, 9.0, 1.0, 2.0])  # of the base, and after each iteration
    monkeypatch.setattr(learning, "watch", lambda *_: next(scores))
    cfg = configure(
        "train", *SMALL[:-1], "algo.iterations=4", "eval.every=1", "checkpoint.every=4", "checkpoint.keep=1",
        f"runs={tmp_path}",
    )  # fmt: skip
    train.main(cfg)
    kept = sorted(path.name for path in (run_folder(cfg) / "checkpoints").iterdir())
    assert kept == ["iteration-000002", "iteration-000004"]


def test_metrics_are_on_the_disk_before_a_checkpoint_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, save = JsonlTracker.sync, learning.save_training
    monkeypatch.setattr(JsonlTracker, "sync", lambda tracker: done.append("sync") or sync(tracker))
    monkeypatch.setattr(learning, "save_training", lambda *given: done.append("save") or save(*given))
    train.main(configure("train", *SMALL, "algo.iterations=2", f"runs={tmp_path}"))
    assert done == ["sync", "save"] * 2


def test_threads_of_one_job_are_not_those_of_the_next() -> None:
    before = torch.get_num_threads()
    devices.set_threads(before + 1)
    devices.set_threads(before + 2)
    assert torch.get_num_threads() == before + 2
    devices.set_threads(None)
    devices.set_threads(None)
    assert torch.get_num_threads() == before

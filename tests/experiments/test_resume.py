"""Resuming a run: what is refused, what is printed, and what is kept."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from experiments import learning, train
from experiments.setup import devices, work
from marl.common.errors import UserError
from marl.common.files import read_json
from marl.report.transcripts import read_episodes
from marl.storage.checkpoint import folder_digest, load_policy, read_card, read_state, save_policy
from marl.storage.folder import hardware
from marl.storage.tracking import JsonlTracker
from tests import runs
from tests.composing import DOND, configure, run_folder
from tests.marl.models import hf_tokenizer, random_lm, save
from tests.torture import contents

pytestmark = pytest.mark.usefixtures("no_pages")


def three_iterations(folder: Path, *overrides: str) -> DictConfig:
    return configure("train", *DOND, "algo.iterations=3", "eval.every=3", f"runs={folder}", *overrides)


def go_on(folder: Path, *overrides: str) -> Path:
    """Trains to the end."""
    cfg = three_iterations(folder, *overrides)
    train.main(cfg)
    return run_folder(cfg)


def stop(folder: Path, *overrides: str) -> Path:
    """Trains two of three iterations, as if killed then. Returns the run's folder."""
    cfg = three_iterations(folder, *overrides)
    runs.stop(cfg, 2)
    return run_folder(cfg)


@pytest.fixture(scope="module")
def begun(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a run that was stopped, and its base."""
    folder = tmp_path_factory.mktemp("begun")
    digest = read_state(stop(folder, f"cache={bases}") / "checkpoints" / "iteration-000002")["base"]
    base = next(path for path in bases.glob("dond-*") if folder_digest(path) == digest)
    shutil.copytree(base, folder / "bases" / base.name, ignore=shutil.ignore_patterns("evaluations"))
    return folder


@pytest.fixture(scope="module")
def whole(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the files of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(begun / "bases", folder / "bases")
    return contents(go_on(folder))


@pytest.fixture
def stopped(begun: Path, tmp_path: Path) -> Path:
    """The folder of a run that was stopped, with its base in `tmp_path / "bases"`."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    return run_folder(three_iterations(tmp_path))


def test_a_checkpoint_of_another_run_is_refused(stopped: Path, tmp_path: Path) -> None:
    first, second = stopped, stop(tmp_path, "seed=5")
    shutil.rmtree(second / "checkpoints")
    shutil.copytree(first / "checkpoints", second / "checkpoints")
    with pytest.raises(UserError, match=rf"iteration-000002 is of the run {first.name}: put it back there, or remove"):
        go_on(tmp_path, "seed=5")
    assert len(list((second / "checkpoints").iterdir())) == 2 and not (second / "run.json").exists()


def test_a_run_goes_on_from_before_a_damaged_checkpoint(
    stopped: Path, whole: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends with the same files as one that was never stopped."""
    weights = stopped / "checkpoints" / "iteration-000002" / "learner.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    go_on(tmp_path)
    said = capsys.readouterr().out
    assert said.count("iteration-000002: damaged file learner.safetensors; going back") == 1
    assert "continuing after iteration 1" in said
    assert contents(stopped) == whole


def test_a_base_that_has_changed_is_refused(
    stopped: Path, whole: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deleting the changed base helps: the run then puts its own copy into the cache, and ends as if never stopped."""
    (base,) = (tmp_path / "bases").glob("dond-*")
    policy, card = load_policy(base), read_card(base)
    with torch.no_grad():
        next(policy.lm.parameters()).add_(0.01)
    save_policy(base, policy, {name: value for name, value in card.items() if name != "privileged_size"})
    with pytest.raises(UserError, match="is not the base that this run began with: it was made again"):
        go_on(tmp_path)
    shutil.rmtree(base)
    go_on(tmp_path)
    said = capsys.readouterr().out
    put_back = f"copying {stopped / 'reference'} there"
    assert put_back in said and "training the base" not in said.split(put_back)[1]
    assert contents(stopped) == whole


def test_another_version_of_an_untouched_model_is_refused(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(single_digits=True)
    lm = random_lm("llama", len(tokenizer), context=2048)
    name = save(tmp_path / "model", lm, tokenizer)
    cfg = configure(
        "train", "model=hf", f"model.name={name}", "base=none", "model.context=2048", "env.max_errors=1",
        "algo.games=2", "algo.iterations=2", "algo.max_new_tokens=4", "eval.games=0", "checkpoint.every=1",
        f"runs={tmp_path}", "progress=false",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning.AfterIteration, "evaluate", lambda *_: 1 / 0)  # before the last checkpoint
        with pytest.raises(ZeroDivisionError):
            train.main(cfg)
    with torch.no_grad():
        next(lm.parameters()).mul_(1.5)
    lm.save_pretrained(name)
    with pytest.raises(UserError, match=r"model is not the base that this run began with: .*another version"):
        train.main(cfg)


CONTEXTS = "1 4 4 1 1 2\n1 0 4 2 1 2\n"
OTHERS = "3 1 1 5 2 1\n3 2 1 2 2 1\n"


def test_an_edited_file_of_contexts_is_refused(bases: Path, tmp_path: Path) -> None:
    file = tmp_path / "contexts.txt"
    file.write_text(CONTEXTS)
    own = (f"env.contexts={file}", "env.split=all", "eval.env.split=all", "base.games=20", f"cache={bases}")
    stop(tmp_path, *own)
    file.write_text(OTHERS)
    with pytest.raises(UserError, match=r"contexts\.txt is not what this run began with: .* Put the old one back, or"):
        go_on(tmp_path, *own)


def test_games_of_the_base_are_of_the_same_contexts(bases: Path, tmp_path: Path) -> None:
    file, facts = tmp_path / "contexts.txt", []
    for seed, text in enumerate((CONTEXTS, OTHERS)):
        file.write_text(text)
        cfg = configure(
            "train", *DOND, "algo.iterations=1", f"seed={seed}", f"+eval.env.contexts={file}", "eval.env.split=all",
            f"runs={tmp_path}", f"cache={bases}",
        )  # fmt: skip
        train.main(cfg)
        games = [read_episodes(run_folder(cfg) / "episodes" / f"{name}.jsonl") for name in ("base", "trained")]
        facts.append([[game["facts"]["counts"] for game in each] for each in games])
    (first, trained), (second, again) = facts
    assert first == trained and second == again and first[0] == [1, 4, 1] and second[0] == [3, 1, 2]


@pytest.mark.parametrize(
    "place", ["cast.negotiator={{partner:{0},partners:1}}", pytest.param("init.learner={0}", marks=pytest.mark.slow)]
)
def test_another_run_that_was_replaced_is_refused(stopped: Path, tmp_path: Path, place: str) -> None:
    (base,) = (tmp_path / "bases").glob("dond-*")
    policy, other = load_policy(base), tmp_path / "other"
    save_policy(other / "policy", policy, {"game": "dond"})
    own = (place.format(other), "seed=1")
    stop(tmp_path, *own)
    with torch.no_grad():
        next(policy.lm.parameters()).add_(0.01)
    save_policy(other / "policy", policy, {"game": "dond"})
    with pytest.raises(UserError, match=rf"{other} is not what this run began with: it was made again"):
        go_on(tmp_path, *own)


def test_other_software_or_hardware_is_told(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(work, "hardware", lambda: {**hardware(), "instructions": "AVX9"})
    go_on(tmp_path)
    warning = f"this run was begun with instructions={hardware()['instructions']}, here AVX9: its last digits"
    assert warning in capsys.readouterr().out
    made_with = read_json(stopped / "run.json")["made_with"]
    assert [each["instructions"] for each in made_with] == [hardware()["instructions"], "AVX9"]
    assert {"torch", "transformers", "device", "deterministic", "processes", "threads"} <= made_with[0].keys()


def test_a_folder_that_is_moved_away_is_named(bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = configure("train", *DOND, f"runs={tmp_path / 'runs'}", f"cache={bases}")
    save = learning.save_training

    def moving(folder: Path, iteration: int, *rest: Any) -> None:
        save(folder, iteration, *rest)
        folder.parent.rename(tmp_path / "moved")

    monkeypatch.setattr(learning, "save_training", moving)
    with pytest.raises(UserError, match=r"was moved or removed during its run\. Put it back"):
        train.main(cfg)
    assert not run_folder(cfg).exists(), "something was left at the old place"


def test_damaged_games_of_the_base_are_named_and_then_played_again(stopped: Path, tmp_path: Path) -> None:
    go_on(tmp_path)
    (kept,) = tmp_path.glob("bases/*/evaluations/*/evaluation.json")
    whole = kept.read_bytes()
    for cut in (whole[:40], b'{"conditions": {"base": {"game/score": 1}}}'):
        kept.write_bytes(cut)
        (stopped / "run.json").unlink(missing_ok=True)
        with pytest.raises(UserError, match=r"evaluations/\w+/evaluation\.json: expected .*emove"):
            go_on(tmp_path)
    kept.unlink()
    go_on(tmp_path)
    assert kept.read_bytes() == whole


def test_games_of_a_base_that_cannot_be_written_are_kept_with_the_run(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache that somebody else made may be read-only. Once it can be written, the base's games are kept there."""
    (base,) = (tmp_path / "bases").glob("dond-*")
    (base / "evaluations").touch()  # a file, where the folder would be made
    go_on(tmp_path)
    assert f"the base's games are kept in the run's folder, since {base / 'evaluations'}" in capsys.readouterr().out
    mine = (stopped / "base" / "evaluation.json").read_bytes()
    (base / "evaluations").unlink()
    (stopped / "run.json").unlink()
    go_on(tmp_path)
    (shared,) = base.glob("evaluations/*/evaluation.json")
    assert shared.read_bytes() == mine


def test_the_best_is_kept_where_it_was_evaluated(bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iteration 2 has the best evaluation, so its checkpoint is kept though only iteration 4 was due."""
    scores = iter([0.0, 3.0, 9.0, 1.0, 2.0])  # the base's, then one for each iteration
    monkeypatch.setattr(learning, "watch", lambda *_: next(scores))
    cfg = configure(
        "train", *DOND, "algo.iterations=4", "eval.every=1", "checkpoint.every=4", "checkpoint.keep=1",
        f"runs={tmp_path}", f"cache={bases}",
    )  # fmt: skip
    train.main(cfg)
    kept = sorted(path.name for path in (run_folder(cfg) / "checkpoints").iterdir())
    assert kept == ["iteration-000002", "iteration-000004"]


def test_metrics_are_on_the_disk_before_a_checkpoint_counts_them(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, save = JsonlTracker.sync, learning.save_training
    monkeypatch.setattr(JsonlTracker, "sync", lambda tracker: done.append("sync") or sync(tracker))
    monkeypatch.setattr(learning, "save_training", lambda *given: done.append("save") or save(*given))
    train.main(configure("train", *DOND, "eval.games=0", f"runs={tmp_path}", f"cache={bases}"))
    assert done == ["sync", "save"] * 2


def test_threads_of_one_job_are_not_those_of_the_next() -> None:
    before = torch.get_num_threads()
    devices.set_threads(before + 1)
    devices.set_threads(before + 2)
    assert torch.get_num_threads() == before + 2
    devices.set_threads(None)
    devices.set_threads(None)
    assert torch.get_num_threads() == before

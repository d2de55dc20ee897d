"""Policies and checkpoints come back to the last bit, damage is noticed, and no file is ever unpickled."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from marl.algorithms.ppo import PPOConfig, train_ppo
from marl.common.errors import UserError
from marl.common.files import write_json
from marl.learning.advantages import Credit
from marl.learning.config import UpdateConfig
from marl.learning.update import Learner
from marl.losses import Loss
from marl.losses.entropy import EntropyLoss
from marl.losses.kl import KLLoss
from marl.losses.listening import ListeningLoss
from marl.losses.policy import PolicyLoss
from marl.losses.value import ValueLoss
from marl.model.optim import OPTIMIZERS, Optimizer
from marl.model.policy import Policy
from marl.rewards import Reward
from marl.rewards.game import GameReward
from marl.rewards.speaking import SpeakingReward
from marl.rollout.seeds import Seeds
from marl.storage.checkpoint import (
    checkpoints_in,
    load_training,
    newest_checkpoint,
    optimizer_tensors,
    prune,
    save_training,
    verify_folder,
    write_folder,
)
from marl.types import Episode
from tests.marl.hint import hint_policy, training
from tests.marl.models import tiny_policy

ROOT = Path(__file__).resolve().parents[3]


def same(a: Policy, b: Policy) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def flip(path: Path) -> None:
    """Turns one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


# -- training ----------------------------------------------------------------------------------------------------------

LOSSES: dict[str, Loss] = {
    "policy": PolicyLoss(),
    "value": ValueLoss(),
    "entropy": EntropyLoss(),
    "kl": KLLoss(),
    "listening": ListeningLoss(),
}
UPDATE = UpdateConfig(learning_rate=1e-3, minibatches=2, epochs=2)


def adamw(policy: Policy) -> torch.optim.AdamW:
    return torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.01)


def by_name(policy: Policy) -> dict[str, tuple[Policy, torch.optim.Optimizer]]:
    return {"learner": (policy, adamw(policy))}


def ppo(
    policy: Policy, optimizer: Optimizer, start: int, iterations: int, after: Any, seeds: Seeds | None = None
) -> None:
    rewards: dict[str, Reward] = {"game": GameReward(scale=1.0), "speaking": SpeakingReward()}
    config = PPOConfig(
        iterations=iterations, games=12, concurrency=8, max_new_tokens=2, context=32, credit=Credit(), update=UPDATE
    )
    one = Learner("learner", policy, hint_policy(0), optimizer)
    train_ppo(training([one], LOSSES, rewards=rewards, seeds=seeds or Seeds.of(4), start=start, after=after), config)


def test_each_part_of_training_has_its_own_seed() -> None:
    """Another order of rows learns otherwise from the same games. Other draws play the same deals otherwise."""
    found = []
    for seeds in (Seeds.of(4), Seeds.of(4), Seeds(4, None, 5), Seeds(4, 0, 4), Seeds(5, None, 4)):
        policy, seen = hint_policy(0), list[Episode]()
        ppo(policy, adamw(policy), 0, 1, lambda iteration, metrics, episodes, seen=seen: seen.extend(episodes), seeds)
        weights = torch.cat([p.detach().flatten() for p in policy.parameters()])
        found.append(([e.seed for e in seen], [[t.text for t in e.turns] for e in seen], weights))
    (deals, said, weights), again, order, draws, games = found
    assert again[:2] == (deals, said) and torch.equal(again[2], weights)
    assert order[:2] == (deals, said) and not torch.equal(order[2], weights)
    assert draws[0] == deals and draws[1] != said and not torch.equal(draws[2], weights)
    assert not set(games[0]) & set(deals)


def test_a_continued_run_knows_the_running_means_of_returns(tmp_path: Path) -> None:
    """Checkpoints of algo.advantage=rae keep the running means with all their digits."""
    config = PPOConfig(
        iterations=4, games=12, concurrency=8, max_new_tokens=2, context=32, advantage="rae", update=UPDATE
    )

    def train(policy: Policy, optimizer: Optimizer, memory: dict[str, dict[str, float]], start: int) -> None:
        def note(iteration: int, metrics: dict[str, float], episodes: Sequence[Episode]) -> None:
            if iteration == 2 and not start:
                save_training(tmp_path, 2, {"learner": (policy, optimizer)}, {"memory": memory}, keep=2)

        one = Learner("learner", policy, hint_policy(0), optimizer)
        made = training([one], {"policy": PolicyLoss()}, seeds=Seeds.of(0), start=start, after=note, memory=memory)
        train_ppo(made, config)

    whole, again = hint_policy(0), hint_policy(1)
    means: dict[str, dict[str, float]] = {}
    train(whole, adamw(whole), means, 0)
    resumed = adamw(again)
    state = load_training(newest_checkpoint(tmp_path), {"learner": (again, resumed)})
    assert state is not None and state["memory"]["learner"].keys() == {"speaker", "listener"}
    train(again, resumed, state["memory"], 2)
    assert state["memory"] == means
    assert all(a.equal(b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_a_continued_run_is_the_run_that_was_never_stopped(tmp_path: Path) -> None:
    whole = hint_policy(0)
    optimizer = adamw(whole)
    log, again = dict[int, dict[str, float]](), dict[int, dict[str, float]]()

    def note(iteration: int, metrics: dict[str, float], episodes: Sequence[Episode]) -> None:
        log[iteration] = {k: v for k, v in metrics.items() if not k.startswith(("speed/", "time/"))}
        if iteration == 2:
            save_training(tmp_path, 2, {"learner": (whole, optimizer)}, {"note": "half"}, keep=2)

    ppo(whole, optimizer, 0, 4, note)
    assert sorted(log) == [1, 2, 3, 4]

    continued = hint_policy(1)  # other weights: everything has to come from the checkpoint
    resumed = adamw(continued)
    state = load_training(newest_checkpoint(tmp_path), {"learner": (continued, resumed)})
    assert state == {"note": "half", "iteration": 2}

    def compare(iteration: int, metrics: dict[str, float], episodes: Sequence[Episode]) -> None:
        again[iteration] = {k: v for k, v in metrics.items() if not k.startswith(("speed/", "time/"))}

    ppo(continued, resumed, state["iteration"], 4, compare)
    assert again == {3: log[3], 4: log[4]}
    assert same(whole, continued)
    ours, theirs = optimizer_tensors(optimizer), optimizer_tensors(resumed)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert any(k.endswith(".exp_avg_sq") for k in ours)


def steps(policy: Policy, optimizer: Optimizer, count: int) -> None:
    """Takes some steps that need the optimiser's memory."""
    for i in range(count):
        optimizer.zero_grad()
        sum((p * (i + 1)).pow(2).sum() for p in policy.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_the_optimiser_comes_back_to_the_bit(kind: str, tmp_path: Path) -> None:
    def optimiser(policy: Policy) -> Optimizer:
        return OPTIMIZERS[kind](policy, 1e-3, 0.01)

    policy = tiny_policy()
    optimizer = optimiser(policy)
    steps(policy, optimizer, 3)
    save_training(tmp_path, 1, {"learner": (policy, optimizer)}, {}, keep=1)
    other = tiny_policy()
    restored = optimiser(other)
    load_training(newest_checkpoint(tmp_path), {"learner": (other, restored)})
    steps(policy, optimizer, 2)
    steps(other, restored, 2)
    assert same(policy, other)
    if kind != "sgd":  # which has nothing to remember
        fresh = tiny_policy()
        load_training(newest_checkpoint(tmp_path), {"learner": (fresh, optimiser(tiny_policy()))})
        steps(fresh, optimiser(fresh), 2)  # the same weights with an optimiser that remembers nothing go elsewhere
        assert not same(policy, fresh)


def resume(folder: Path, reports: list[str] | None = None) -> tuple[dict[str, Any] | None, Policy]:
    """The state and policy of the newest whole checkpoint; `reports` gets what is said of damaged ones."""
    policy = hint_policy(0)
    newest = newest_checkpoint(folder, (reports if reports is not None else []).append)
    return load_training(newest, by_name(policy)), policy


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def numbered(*iterations: int) -> list[str]:
    return [f"iteration-{number:06d}" for number in iterations]


def saved(folder: Path, count: int, keep: int = 10) -> list[Policy]:
    """Checkpoints after iterations 1, 2, ..., each of other weights."""
    policies = []
    for i in range(1, count + 1):
        policy = hint_policy(i)
        trained = by_name(policy)
        for parameter in policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        trained["learner"][1].step()
        save_training(folder, i, trained, {}, keep)
        policies.append(policy)
    return policies


def test_the_newest_is_loaded_and_the_last_ones_stay(tmp_path: Path) -> None:
    policies = saved(tmp_path, 4, keep=2)
    assert names(tmp_path) == numbered(3, 4)
    state, policy = resume(tmp_path)
    assert state == {"iteration": 4} and same(policy, policies[-1])
    for other in ("iteration-000002.bak", "iteration-0000021"):  # no checkpoints of ours
        shutil.copytree(tmp_path / "iteration-000003", tmp_path / other)
    flip(tmp_path / "iteration-000004" / "learner.safetensors")
    assert resume(tmp_path)[0] == {"iteration": 3}  # and a damaged one does not push out a good one
    save_training(tmp_path, 4, by_name(hint_policy(9)), {}, keep=1)
    assert names(tmp_path) == sorted(["iteration-000002.bak", *numbered(4), "iteration-0000021"])
    save_training(tmp_path, 0, by_name(hint_policy(5)), {}, keep=1)  # begun anew, with an optimizer that never stepped
    state, policy = resume(tmp_path)
    assert state == {"iteration": 0} and same(policy, hint_policy(5))


def test_the_best_stays_and_pushes_out_no_regular_one(tmp_path: Path) -> None:
    for iteration in (3, 4, 5, 6, 9, 10, 11):  # every third, and each that was the best so far
        best = min(iteration, 10)
        save_training(tmp_path, iteration, by_name(hint_policy(iteration)), {}, keep=2, best=best, every=3)
    assert names(tmp_path) == numbered(6, 9, 10, 11)
    save_training(tmp_path, 12, by_name(hint_policy(12)), {}, keep=1, best=12, every=3)
    assert names(tmp_path) == numbered(12)


def without_a_line(path: Path) -> None:
    """Drops the learner's line of the checksums, so that a flipped bit in its file would go unnoticed."""
    sums = json.loads(path.read_text())
    write_json(path, {name: digest for name, digest in sums.items() if name != "learner.safetensors"})


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("learner.safetensors", flip),
        ("learner-optimizer.safetensors", Path.unlink),
        ("state.json", lambda path: path.write_bytes(path.read_bytes()[:-9])),
        ("checksums.json", flip),
        ("checksums.json", Path.unlink),
        ("checksums.json", without_a_line),
        ("checksums.json", lambda path: path.write_text("{}")),
    ],
)
def test_a_damaged_newest_is_reported_and_the_one_before_it_used(name: str, damage: Any, tmp_path: Path) -> None:
    policies, reports = saved(tmp_path, 3), list[str]()
    damage(tmp_path / "iteration-000003" / name)
    state, policy = resume(tmp_path, reports)
    assert state == {"iteration": 2} and same(policy, policies[1])
    assert len(reports) == 1 and "iteration-000003" in reports[0] and "going back" in reports[0]
    assert name in reports[0] or name == "checksums.json"  # a wrong sum speaks against the file that it is of
    assert damage is not without_a_line or "does not list learner.safetensors" in reports[0]


def test_nothing_is_loaded_from_nothing_and_if_all_are_damaged_all_are_reported(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert resume(folder)[0] is None
    saved(tmp_path, 2)
    for path in tmp_path.iterdir():
        flip(path / "learner.safetensors")
    reports: list[str] = []
    state, policy = resume(tmp_path, reports)
    assert state is None and len(reports) == 2 and same(policy, hint_policy(0))
    assert reports[0].endswith("; going back to the checkpoint before it")
    assert reports[1].endswith("; no checkpoint is left, and the run begins anew")


def test_remains_of_checkpoints_after_a_kill_are_deleted(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    (tmp_path / "iteration-000001" / "state.json").unlink()
    shutil.copytree(tmp_path / "iteration-000002", tmp_path / ".iteration-000002.old")
    (tmp_path / ".iteration-000004.new").mkdir()
    prune(tmp_path, 3, keep=2)
    assert names(tmp_path) == [path.name for path in checkpoints_in(tmp_path)] == numbered(2, 3)


def seal(folder: Path) -> None:
    """Makes the checksums fit the files as they are, as another version of this project would leave them."""
    sums = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.name != "checksums.json"}
    (folder / "checksums.json").write_text(json.dumps(sums))


def noting(**notes: Any) -> Callable[[Path], None]:
    """Puts other notes into a checkpoint's state."""

    def change(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**state, **notes}))

    return change


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints."""
    folder = tmp_path_factory.mktemp("three")
    saved(folder, 3)
    return folder


def of_another_model(folder: Path) -> None:
    policy = tiny_policy()
    save_training(folder.parent / "other", 3, by_name(policy), {}, keep=9)
    for path in (folder.parent / "other" / "iteration-000003").iterdir():
        shutil.copy(path, folder)


def moments(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Changes what the optimiser of a checkpoint kept."""

    def apply(folder: Path) -> None:
        found = load_file(folder / "learner-optimizer.safetensors")
        change(found)
        save_file(found, folder / "learner-optimizer.safetensors")

    return apply


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (noting(iteration="3"), "in state.json iteration is 3"),
        (noting(iteration=9), "in state.json iteration is 9"),
        (noting(base=[]), r"in state.json base is \[\]"),
        (noting(wall_time="abc"), "in state.json wall_time is 'abc'"),
        (noting(commits=[5]), r"in state.json commits is \[5\]"),
        (noting(best={"iteration": 1, "score": "a"}), "in state.json best is"),
        (lambda folder: (folder / "state.json").write_text("[1]"), "state.json: expected one JSON object"),
        (lambda folder: (folder / "learner.safetensors").write_bytes(b"old"), "does not fit learner as it is now"),
        (of_another_model, "does not fit learner as it is now"),
        (noting(format=2), r"saved by another version of this project \(format 2, here 1\)"),
        (moments(lambda t: t.update({"0.exp_avg": torch.zeros(2, 3)})), r"0\.exp_avg of shape \(2, 3\) is of no"),
        (moments(lambda t: t.update({"-1.exp_avg": torch.zeros(1)})), r"not the optimiser's: -1\.exp_avg"),
        (moments(lambda t: t.pop("stepped")), r"does not say which parameters were stepped"),
        (moments(lambda t: t.pop("0.step")), r"not the optimiser's: 0\.step"),
        (moments(lambda t: t.update({"0.exp_avg": torch.zeros(())})), r"0\.exp_avg of shape \(\) is of no parameter"),
        (moments(lambda t: t.update(stepped=torch.tensor([0, 999]))), r"it has moments of 2 parameters"),
        (moments(lambda t: t["0.exp_avg"].fill_(torch.nan)), r"0\.exp_avg is not finite"),
    ],
)
def test_a_whole_checkpoint_of_something_else_is_refused_in_one_line(
    change: Any, said: str, three: Path, tmp_path: Path
) -> None:
    shutil.copytree(three, tmp_path / "run")
    change(tmp_path / "run" / "iteration-000003")
    seal(tmp_path / "run" / "iteration-000003")
    with pytest.raises(UserError, match=said) as error:
        resume(tmp_path / "run")
    assert "\n" not in str(error.value) and "iteration-000003" in str(error.value)


# -- writing -----------------------------------------------------------------------------------------------------------
def fill(text: str) -> Callable[[Path], None]:
    def write(to: Path) -> None:
        (to / "a").write_text(text)
        (to / "b").write_text(text * 2)

    return write


def test_an_error_while_writing_leaves_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write_folder(folder, fill("old"))

    def fail(to: Path) -> None:
        (to / "a").write_text("new")
        raise OSError("the disk is full")

    with pytest.raises(UserError, match=r"folder cannot be written \(the disk is full\)"):
        write_folder(folder, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    assert (folder / "a").read_text() == "old" and verify_folder(folder) == ""
    write_folder(folder, fill("new"))
    assert (folder / "a").read_text() == "new" and verify_folder(folder) == ""


def test_the_old_folder_comes_back_where_the_new_one_cannot_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = saved(tmp_path, 1)
    replace = os.replace

    def refusing(old: Path, new: Path) -> None:
        if str(old).endswith(".new") and new.name == "iteration-000001":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(old, new)

    monkeypatch.setattr(os, "replace", refusing)
    with pytest.raises(UserError, match="make room there"):
        save_training(tmp_path, 1, by_name(hint_policy(9)), {}, keep=1)
    assert same(resume(tmp_path)[1], policies[0]) and names(tmp_path) == numbered(1)

"""Several processes that train as one: sharing out, collecting, summing; and the toy game learned by two of them."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from marl.common.distributed import ONE, Ranks
from marl.common.errors import UserError
from marl.model.policy import Policy
from marl.storage.checkpoint import check_alike, load_training, newest_checkpoint, save_training
from tests.marl.algorithms.test_toy_game import BOTH, STEPS, play, train
from tests.marl.hint import hint_policy
from tests.together import together


def test_one_process_does_nothing() -> None:
    values = torch.ones(2)
    assert ONE.share([1, 2, 3]) == [1, 2, 3] and ONE.collect([1, 2, 3]) == [1, 2, 3] and ONE.objects("x") == ["x"]
    assert ONE.add(values) is values and values.tolist() == [1, 1] and ONE.first


def _collectives(rank: int, size: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    ranks = Ranks(rank, size)
    for count in range(8):  # more and fewer items than processes
        assert ranks.collect(ranks.share(list(range(count)))) == list(range(count))
    assert ranks.objects(rank) == list(range(size))
    assert ranks.add(torch.tensor([1.0, float(rank)])).tolist() == [size, sum(range(size))]
    model = nn.Linear(1, 2)
    if rank:  # the first has no gradient
        model.weight.grad = torch.full((2, 1), float(rank))
    ranks.add_gradients(model)
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[sum(range(size))]] * 2
    assert model.bias.grad is None  # none has one: no optimiser shall move it
    dist.destroy_process_group()


def test_three_processes_share_and_sum(tmp_path: Path) -> None:
    together(_collectives, 3, 3, str(tmp_path))


def _first_update(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/first", rank=rank, world_size=size)
    steps = replace(
        STEPS, optimizer="sgd", learning_rate=0.3
    )  # AdamW's first step makes as much of rounding as of signal
    policy = train(0, *BOTH, iterations=1, ranks=Ranks(rank, size), steps=steps)
    torch.save([p.detach() for p in policy.parameters()], f"{folder}/{rank}-of-{size}.pt")
    if size > 1:
        dist.destroy_process_group()


def test_the_first_update_of_two_with_half_the_games_each_is_that_of_one(tmp_path: Path) -> None:
    _first_update(0, 1, str(tmp_path))
    together(_first_update, 2, 2, str(tmp_path))
    alone, first, second = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("0-of-1", "0-of-2", "1-of-2")
    )
    moved = max(float((a - b.detach()).abs().max()) for a, b in zip(alone, hint_policy(0).parameters(), strict=True))
    apart = max(float((a - b).abs().max()) for a, b in zip(alone, first, strict=True))
    assert moved > 1e-2 and apart < 2e-6, (moved, apart)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _toy(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    policy = train(0, *BOTH, ranks=Ranks(rank, 2))
    torch.save([p.detach() for p in policy.parameters()], f"{folder}/{rank}.pt")
    if rank == 0:
        (Path(folder) / "accuracy").write_text(str(play(policy).accuracy))
    dist.destroy_process_group()


@pytest.mark.slow  # twenty seconds; the first update is compared above
def test_two_processes_learn_the_toy_game(tmp_path: Path) -> None:
    together(_toy, 2, str(tmp_path))
    assert float((tmp_path / "accuracy").read_text()) >= 0.9
    ours, others = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))  # they never part


NEWEST = Path("checkpoints/iteration-000002")
SEEN = {  # what a rank's own disk has done to it: which rank, and what
    "alike": (1, lambda: None),
    "the first passes one over": (0, lambda: (NEWEST / "learner.safetensors").write_bytes(b"x")),
    "damaged": (1, lambda: (NEWEST / "learner.safetensors").write_bytes(b"x")),
    "gone": (1, lambda: shutil.rmtree(NEWEST)),
    "another": (1, lambda: save_training(Path("checkpoints"), 2, *_trained(5), {}, 9)),
}
SAID = {
    "damaged": "damaged file learner.safetensors, as process 1 of 2 reads it: let all",
    "gone": "checksums.json cannot be read .* as process 1 of 2 reads it",
    "another": "iteration-000002 is another one, as process 1 of 2 reads it",
}


def _trained(seed: int) -> list[dict[str, tuple[Policy, torch.optim.Optimizer]]]:
    policy = hint_policy(seed)
    return [{"learner": (policy, torch.optim.AdamW(policy.parameters()))}]


def _go_on(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ranks = Ranks(rank, 2)
    for case, (who, change) in SEEN.items():
        here = Path(folder, case, str(rank))
        here.mkdir(parents=True)
        os.chdir(here)  # the same names, and a disk of one's own
        for iteration in (1, 2):
            save_training(Path("checkpoints"), iteration, *_trained(iteration), {}, 9)
        if rank == who:
            change()
        newest, (trained,) = newest_checkpoint(Path("checkpoints"), lambda line: None), _trained(0)
        if case in SAID:
            with pytest.raises(UserError, match=SAID[case]):
                load_training(newest, trained, ranks)
        else:
            state = load_training(newest if ranks.first else None, trained, ranks)
            expected = 1 if case == "the first passes one over" else 2
            assert state == {"iteration": expected}
            pairs = zip(trained["learner"][0].parameters(), hint_policy(expected).parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
    assert load_training(None if ranks.first else NEWEST, _trained(0)[0], ranks) is None
    check_alike({"base": hint_policy(3)}, ranks)
    with pytest.raises(UserError, match=r"^learner: process 1 of 2 has other parameters than the first one"):
        check_alike({"base": hint_policy(3), "learner": hint_policy(rank)}, ranks)
    dist.destroy_process_group()


def test_all_ranks_go_on_from_what_the_first_has_or_none_does(tmp_path: Path) -> None:
    together(_go_on, 2, str(tmp_path))

"""Two ranks, each with all parameters or with a part: the updates and checkpoints of one process."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from marl.common.distributed import Ranks
from marl.learning.config import UpdateConfig
from marl.learning.renaming import Renaming
from marl.learning.update import Learner, make_optimizer, update
from marl.losses import Loss
from marl.losses.listening import ListeningLoss
from marl.model.policy import Policy
from marl.model.sharding import Shards, like
from marl.storage.checkpoint import load_training, newest_checkpoint, save_training
from marl.types import TokenBatch
from tests.marl.hint import hint_policy
from tests.marl.models import random_lm, small_tokens, with_critic
from tests.marl.updates import TERMS, noisy, play, to_batch
from tests.together import together

# Rows do not divide evenly, so that ranks have passes without rows; in one case most rows have no questions.
CASES: dict[str, tuple[dict[str, Loss], UpdateConfig]] = {
    "every term": (TERMS, UpdateConfig(learning_rate=1e-3, optimizer="sgd", rows=7, token_budget=60)),
    "renamed": (
        {"listening": ListeningLoss(weight=0.3, renamed=True)},
        UpdateConfig(learning_rate=1e-2, optimizer="sgd", minibatches=2, token_budget=40),
    ),
    "listening alone": (
        {"listening": ListeningLoss(weight=0.3)},
        UpdateConfig(learning_rate=0.1, optimizer="sgd", rows=3, token_budget=20),
    ),
}


def learner(policy: Policy, config: UpdateConfig, ranks: Ranks | None = None) -> Learner:
    shards = Shards(policy, ranks) if ranks else None
    optimizer = make_optimizer(shards.split if shards else policy, config)
    return Learner("learner", policy, noisy(copy.deepcopy(hint_policy(0, privileged_size=2)), 1), optimizer, shards)


def learn(who: Learner, batch: TokenBatch, case: str, ranks: Ranks | None = None) -> dict[str, float]:
    losses, config = CASES[case]
    rename = Renaming(torch.tensor([[7, 8]]), who.reference.tokens.size) if case == "renamed" else None
    with who.training() as policy:
        return update(
            policy, who.reference, batch, losses, who.optimizer, config, torch.Generator().manual_seed(0),
            rename=rename, ranks=ranks or Ranks(),
        )  # fmt: skip


def apart(a: Policy, b: Policy) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def asked_rarely(batch: TokenBatch) -> TokenBatch:
    """Returns the batch with the questions of its first rows alone, so that many passes have none."""
    keep = batch.row < 4
    fields = {name: getattr(batch, name)[keep] for name in ("row", "position", "candidates", "answer", "vote", "also")}
    return TokenBatch(**{**vars(batch), **fields})


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ranks = Ranks(rank, 2)
    start = noisy(hint_policy(0, privileged_size=2), 0)
    batch = to_batch(play(start, 8))
    for case, (_, config) in CASES.items():
        own = asked_rarely(batch) if case == "listening alone" else batch
        one, both = learner(copy.deepcopy(start), config), learner(copy.deepcopy(start), config, ranks)
        assert both.shards is not None
        held = [p.to_local().numel() for p in both.shards.split.parameters() if isinstance(p, DTensor)]
        assert sum(held) <= 0.6 * sum(p.numel() for p in start.parameters()) and apart(both.policy, start) == 0
        alone = learn(one, own, case)
        assert apart(one.policy, start) > 1e-4, case  # something was learned
        whole = [learner(copy.deepcopy(start), config)] if case == "every term" else []
        for who in (both, *whole):  # sharded, and whole on each rank
            shared = learn(who, own, case, ranks)
            assert apart(one.policy, who.policy) < 2e-6, (case, apart(one.policy, who.policy))
            assert alone.keys() == shared.keys()
            assert all(abs(alone[name] - shared[name]) < 1e-4 for name in alone), (case, alone, shared)
    _without_gradient(ranks)
    _muon(ranks, start)
    _checkpoints(Path(folder), ranks, start, batch)
    dist.destroy_process_group()


def _without_gradient(ranks: Ranks) -> None:
    """Checks that a gradient on one rank alone counts as 0 on the other. A parameter without any gradient keeps none,
    or optimisers would decay it, or move it by an old moment."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(3)])
    model[0].grad = torch.tensor([1.0, 2.0]) * (ranks.rank + 1)
    model[1].grad = torch.tensor([5.0, 6.0]) if ranks.first else None
    ranks.add_gradients(model)
    assert model[0].grad.tolist() == [3.0, 6.0] and model[1].grad is not None and model[1].grad.tolist() == [5.0, 6.0]
    assert model[2].grad is None


def _muon(ranks: Ranks, start: Policy) -> None:
    """A step by gradients of full rank: of others Muon magnifies the rounding."""
    config = UpdateConfig(learning_rate=1e-3, optimizer="muon")
    one, both = learner(copy.deepcopy(start), config), learner(copy.deepcopy(start), config, ranks)
    generator = torch.Generator().manual_seed(0)
    with both.training() as split:
        for p, part in zip(one.policy.parameters(), split.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            part.grad = like(part, p.grad)
        one.optimizer.step()
        both.optimizer.step()
    assert apart(one.policy, both.policy) < 0.1 * apart(one.policy, start), apart(one.policy, both.policy)


def _checkpoints(folder: Path, ranks: Ranks, start: Policy, batch: TokenBatch) -> None:
    """Checks that checkpoints of sharded parameters are loaded whole, and the reverse: three updates that alternate
    between the two equal three by one process."""
    config = UpdateConfig(learning_rate=1e-3, minibatches=2, token_budget=64)
    CASES["adamw"] = (TERMS, config)
    one = learner(copy.deepcopy(start), config)
    for _ in range(3):
        learn(one, batch, "adamw")
    for name, order in {"split first": (True, False, True), "whole first": (False, True, False)}.items():
        for number, split in enumerate(order):
            who = learner(copy.deepcopy(start), config, ranks if split else None)
            trained = {"learner": (who.policy, who.optimizer)}
            state = load_training(newest_checkpoint(folder / name), trained)
            assert (state is None) if number == 0 else (state is not None and state["iteration"] == number)
            ranks.wait()  # before one of them writes the next
            if who.shards is not None:
                who.shards.take()
            learn(who, batch, "adamw", ranks if split else None)
            if split:
                save_training(folder / name, number + 1, trained, {}, 9, ranks)
            elif ranks.first:
                save_training(folder / name, number + 1, trained, {}, 9)
            ranks.wait()
        assert apart(one.policy, who.policy) < 1e-5, (name, apart(one.policy, who.policy))


def test_two_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    together(_rank, 2, str(tmp_path))
    split, whole = (load_file(tmp_path / n / "iteration-000001/learner-optimizer.safetensors") for n in
                    ("split first", "whole first"))  # fmt: skip
    assert {n: t.shape for n, t in split.items()} == {n: t.shape for n, t in whole.items()} and len(split) > 10
    assert all(torch.allclose(split[n], whole[n], atol=1e-5) for n in split)


def _architecture(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for kind in ("gpt2", "qwen3", "mamba2"):
        policy = with_critic(Policy(random_lm(kind, small_tokens().size), small_tokens()))
        shards = Shards(copy.deepcopy(policy), Ranks(rank, 2))
        tokens = torch.arange(12).view(2, 6)
        with shards.training() as split:
            split.logits(split.hidden(tokens)).pow(2).mean().backward()
            assert all(isinstance(p, DTensor) for p in split.parameters())
            found = split.lm.get_input_embeddings().weight.grad
            assert isinstance(found, DTensor)
            found = found.full_tensor()
        policy.logits(policy.hidden(tokens)).pow(2).mean().backward()
        expected = policy.lm.get_input_embeddings().weight.grad
        assert torch.allclose(found, 2 * expected, rtol=1e-4, atol=1e-6), kind  # both ranks read the same rows
    dist.destroy_process_group()


@pytest.mark.slow
def test_models_of_other_kinds_can_be_split(tmp_path: Path) -> None:
    together(_architecture, 2, str(tmp_path))

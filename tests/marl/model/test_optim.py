"""The optimisers of our own: Muon on a CPU beside that of torch, and what its directions are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from marl.model.optim import Muon, MuonAndAdamW, orthogonal
from marl.model.policy import Policy
from tests.marl.models import random_lm, small_tokens

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan 2024


def test_a_direction_has_the_singular_vectors_of_its_matrix_and_values_near_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((6, 6), (4, 9), (9, 4)):
        matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        inner = u.T @ orthogonal(matrix, COEFFICIENTS, 5) @ v.T  # the singular values alone, in their old order
        assert inner.diagonal().min() > 0.6 and inner.diagonal().max() < 1.3
        assert (inner - inner.diagonal().diag()).abs().max() < 1e-9


def test_muon_steps_as_that_of_torch_does_but_for_its_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((16, 16), (8, 24), (24, 8), (8, 8))]
    ours, theirs = ([nn.Parameter(value.clone()) for value in start] for _ in range(2))
    settings = {"lr": 0.05, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    steppers = Muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for number in range(4):
        for mine, other in zip(ours[:-1], theirs[:-1], strict=True):  # the last one never has a gradient
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        for stepper in steppers:
            stepper.step()
        for mine, other, value in zip(ours[:-1], theirs[:-1], start, strict=False):
            apart, moved = (mine - other).norm(), (mine - value).norm()
            assert apart < 0.02 * moved and moved > 0.1, (number, apart, moved)
    assert torch.equal(ours[-1], start[-1])
    for mine, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert torch.equal(steppers[0].state[mine]["momentum_buffer"], steppers[1].state[other]["momentum_buffer"])


@pytest.mark.parametrize(
    ("architecture", "not_for_muon"),
    [("llama", {"embed_tokens.weight", "lm_head.weight"}), ("gpt2", {"wte.weight", "wpe.weight"}),
     ("mamba", {"embeddings.weight", "A_log"})],
)  # fmt: skip
def test_muon_takes_matrices_that_multiply_states_and_nothing_else(architecture: str, not_for_muon: set[str]) -> None:
    policy = Policy(random_lm(architecture, 64), small_tokens())
    muon, _ = MuonAndAdamW(policy, 1e-3, 0.0).parts
    taken = {id(p) for group in muon.param_groups for p in group["params"]}
    left = [name for name, p in policy.lm.named_parameters() if p.dim() == 2 and id(p) not in taken]
    assert taken and {name for end in not_for_muon for name in left if name.endswith(end)} == set(left)
    assert all(any(name.endswith(end) for name in left) for end in not_for_muon)

"""The optimisers of our own: Muon on a CPU beside that of torch, and what its directions are."""

import pytest
import torch

from marl.model.optim import BETAS, MuonAndAdamW, orthogonal
from marl.model.policy import Policy
from tests.marl.models import random_lm, small_tokens


def test_a_direction_has_the_singular_vectors_of_its_matrix_and_values_near_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((6, 6), (4, 9), (9, 4)):
        matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        inner = u.T @ orthogonal(matrix) @ v.T  # the singular values alone, in their old order
        assert inner.diagonal().min() > 0.6 and inner.diagonal().max() < 1.3
        assert (inner - inner.diagonal().diag()).abs().max() < 1e-9


def test_muon_steps_as_that_of_torch_does_but_for_its_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (Policy(random_lm("llama", 64), small_tokens()) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    steps = MuonAndAdamW(ours, 0.05, 0.1)
    chosen = {id(p) for p in steps.param_groups[0]["params"]}
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    matrices = [other for mine, other in pairs if id(mine) in chosen]
    others = [other for mine, other in pairs if id(mine) not in chosen]
    alike = (
        torch.optim.Muon(matrices, 0.05, 0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, 0.05, betas=BETAS, weight_decay=0.1),
    )
    start = [mine.detach().clone() for mine, _ in pairs]
    for _ in range(4):
        for mine, other in pairs:
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        for stepper in (steps, *alike):
            stepper.step()
    for before, (mine, other) in zip(start, pairs, strict=True):
        apart, moved = (mine - other).norm(), (mine - before).norm()
        assert apart <= (0.03 * moved if id(mine) in chosen else 0) and moved > 0.01, (apart, moved)


@pytest.mark.parametrize(
    ("architecture", "not_for_muon"),
    [("llama", {"embed_tokens.weight", "lm_head.weight"}), ("gpt2", {"wte.weight", "wpe.weight"}),
     ("mamba", {"embeddings.weight", "A_log"})],
)  # fmt: skip
def test_muon_takes_matrices_that_multiply_states_and_nothing_else(architecture: str, not_for_muon: set[str]) -> None:
    policy = Policy(random_lm(architecture, 64), small_tokens())
    taken = {id(p) for p in MuonAndAdamW(policy, 1e-3, 0.0).param_groups[0]["params"]}
    left = [name for name, p in policy.lm.named_parameters() if p.dim() == 2 and id(p) not in taken]
    assert taken and {name for end in not_for_muon for name in left if name.endswith(end)} == set(left)
    assert all(any(name.endswith(end) for name in left) for end in not_for_muon)

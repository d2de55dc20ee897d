"""Optimisers that a configuration can name: those of torch, and Muon with AdamW."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.pytorch_utils import Conv1D

from marl.model.policy import Policy

BETAS = (0.9, 0.95)  # of the AdamW beside Muon, and of supervised stages
MOMENTUM = 0.95  # of Muon
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Muon's quintic (Jordan 2024)


def trained(policy: Policy) -> list[nn.Parameter]:
    """Lists the parameters that learn: all, or an adapter's and the value head's."""
    return [p for p in policy.parameters() if p.requires_grad]


class MuonAndAdamW(torch.optim.AdamW):
    """Muon (Jordan 2024) for the matrices that multiply hidden states between embedding and output, AdamW for
    everything else (tables of positions and rates of recurrent layers have two axes and are no such matrices).

    Both at the same learning rate: Muon's steps are scaled to the size of AdamW's. On a CPU its directions are computed
    in float32; torch's own Muon takes bfloat16, which is slow there.
    """

    def __init__(self, policy: Policy, learning_rate: float, weight_decay: float) -> None:
        ends = {id(e.weight) for e in (policy.lm.get_input_embeddings(), policy.lm.get_output_embeddings())}
        layers = [module for module in policy.lm.modules() if isinstance(module, nn.Linear | Conv1D)]
        inner = {id(layer.weight) for layer in layers} - ends
        matrices = [p for p in trained(policy) if id(p) in inner]
        chosen = {id(p) for p in matrices}
        others = [p for p in trained(policy) if id(p) not in chosen]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others}]
        super().__init__(groups, learning_rate, betas=BETAS, weight_decay=weight_decay)

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's own expects its moments of every parameter

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        matrices, others = self.param_groups
        for matrix in matrices["params"]:
            if matrix.grad is not None:
                self._muon(matrix, matrices["lr"], matrices["weight_decay"])
        self.param_groups = [others]
        super().step()
        self.param_groups = [matrices, others]

    def _muon(self, matrix: Tensor, rate: float, weight_decay: float) -> None:
        state, gradient = self.state[matrix], matrix.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        ahead = gradient.lerp(momentum, MOMENTUM)  # Nesterov's
        direction = orthogonal(ahead.float() if matrix.device.type == "cpu" else ahead.bfloat16())
        matrix.mul_(1 - rate * weight_decay)
        # Liu et al. 2025: steps of AdamW's size
        matrix.add_(direction.to(matrix.dtype), alpha=-rate * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Brings a matrix's singular values near 1 by `steps` of a quintic Newton-Schulz iteration (Jordan 2024)."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide


def _of_torch(kind: Any) -> Callable[[Policy, float, float], Optimizer]:
    return lambda policy, learning_rate, weight_decay: kind(
        trained(policy), lr=learning_rate, weight_decay=weight_decay
    )


OPTIMIZERS: dict[str, Callable[[Policy, float, float], Optimizer]] = {
    "adamw": _of_torch(torch.optim.AdamW),
    "adam": _of_torch(torch.optim.Adam),
    "sgd": _of_torch(torch.optim.SGD),
    "muon": MuonAndAdamW,
}


ADAM = {"step": True, "exp_avg": False, "exp_avg_sq": False}


def slots_of(optimizer: Optimizer) -> list[dict[str, bool]]:
    """Lists the optimiser's state per parameter, in the order of `param_groups`: names, and whether each is one number
    instead of one per weight."""
    if isinstance(optimizer, MuonAndAdamW):
        matrices, others = (len(group["params"]) for group in optimizer.param_groups)
        return [{"momentum_buffer": False}] * matrices + [ADAM] * others
    slots = ADAM if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) else {}
    return [slots for group in optimizer.param_groups for _ in group["params"]]

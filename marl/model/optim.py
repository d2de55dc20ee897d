"""Optimisers that a configuration can name: those of torch, and Muon with AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from marl.model.policy import Policy

BETAS = (0.9, 0.95)  # of the AdamW beside Muon, and of supervised stages


class Optimizer(Protocol):
    """An optimiser of torch, or several of them behind the same methods."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def step(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Muon(torch.optim.Muon):
    """torch's Muon with Nesterov momentum and steps of AdamW's size; on a CPU its directions are in float32.

    torch computes them in bfloat16, which is slow on a processor without instructions for it.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = group["lr"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                momentum = state["momentum_buffer"]
                momentum.lerp_(matrix.grad, 1 - group["momentum"])
                ahead = matrix.grad.lerp(momentum, group["momentum"])  # Nesterov's
                ahead = ahead.float() if matrix.device.type == "cpu" else ahead.bfloat16()
                matrix.mul_(1 - rate * group["weight_decay"])
                matrix.add_(
                    orthogonal(ahead, group["ns_coefficients"], group["ns_steps"], group["eps"]).to(matrix.dtype),
                    alpha=-rate * 0.2 * math.sqrt(max(matrix.shape)),  # Liu et al. 2025: steps of AdamW's size
                )


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float = 1e-7) -> Tensor:
    """Brings a matrix's singular values near 1 by `steps` of a quintic Newton-Schulz iteration (Jordan 2024)."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide


class MuonAndAdamW:
    """Muon (Jordan 2024) for the matrices that multiply hidden states between embedding and output, AdamW for
    everything else (tables of positions and rates of recurrent layers have two axes and are no such matrices).

    Both at the same learning rate: Muon's steps are scaled to the size of AdamW's.
    """

    def __init__(self, policy: Policy, learning_rate: float, weight_decay: float) -> None:
        ends = {id(e.weight) for e in (policy.lm.get_input_embeddings(), policy.lm.get_output_embeddings())}
        layers = [module for module in policy.lm.modules() if isinstance(module, nn.Linear | Conv1D)]
        matrices = {id(layer.weight) for layer in layers} - ends
        inside = [p for p in policy.lm.parameters() if id(p) in matrices]
        chosen = {id(p) for p in inside}
        others = [p for p in policy.parameters() if id(p) not in chosen]
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            Muon(inside, learning_rate, weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, learning_rate, weight_decay=weight_decay, betas=BETAS),
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """State of one optimiser over Muon's parameters, then AdamW's."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for part, offset in zip(self.parts, self._offsets(), strict=True):
            own = part.state_dict()
            state |= {offset + i: slots for i, slots in own["state"].items()}
            groups += own["param_groups"]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, offset, group in zip(self.parts, self._offsets(), state_dict["param_groups"], strict=True):
            indices = range(offset, offset + len(part.param_groups[0]["params"]))
            state = {i - offset: state_dict["state"][i] for i in indices if i in state_dict["state"]}
            part.load_state_dict({"state": state, "param_groups": [group]})

    def _offsets(self) -> tuple[int, int]:
        return 0, len(self.parts[0].param_groups[0]["params"])


def _of_torch(kind: Any) -> Callable[[Policy, float, float], Optimizer]:
    return lambda policy, learning_rate, weight_decay: kind(
        policy.parameters(), lr=learning_rate, weight_decay=weight_decay
    )


OPTIMIZERS: dict[str, Callable[[Policy, float, float], Optimizer]] = {
    "adamw": _of_torch(torch.optim.AdamW),
    "adam": _of_torch(torch.optim.Adam),
    "sgd": _of_torch(torch.optim.SGD),
    "muon": MuonAndAdamW,
}


def slots_of(optimizer: Optimizer) -> list[dict[str, bool]]:
    """Lists the optimiser's state per parameter, in the order of `param_groups`: names, and whether each is one number
    instead of one per weight."""
    parts: tuple[Any, ...] = getattr(optimizer, "parts", (optimizer,))
    kept = []
    for part in parts:
        some = torch.nn.Parameter(torch.zeros(2, 2))
        some.grad = torch.zeros(2, 2)
        probe = type(part)([some])
        probe.step()
        slots = {name: value.dim() == 0 for name, value in probe.state[some].items() if value is not None}
        kept += [slots for group in part.param_groups for _ in group["params"]]
    return kept

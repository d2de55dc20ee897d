"""Parameters that are split among the ranks while they are trained: FSDP2 (`torch.distributed.fsdp.fully_shard`).

A rank keeps its part of the weights, of their gradients and of the optimiser's moments; in a pass each layer is put
together where it is computed, and taken apart again. Games need whole weights, since ranks play games of different
lengths: outside of updates every rank holds the policy whole. So a device must hold the weights of the policy and of
its reference; what is shared out is the rest, twelve of sixteen bytes a parameter with Adam in float32, and during
updates all of it. What this leaves out: a reference that is split, and weights that don't fit one device even once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from marl.common.distributed import Ranks
from marl.model.policy import Policy


class Shards:
    """The split double of a policy. It is the one that an optimiser steps; the policy itself plays."""

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        """Splits `policy` among all ranks, each of which calls this with the same one. It stays whole itself."""
        self.whole = policy
        memo: dict[int, object] = {id(p): nn.Parameter(p.detach()) for p in policy.parameters()}
        self.split: Policy = copy.deepcopy(policy, memo)  # other modules around the same numbers
        mesh = init_device_mesh(policy.device.type, (ranks.size,))
        blocks = set(policy.lm._no_split_modules or ())  # what transformers calls the layers that stay on one device
        for module in [m for m in self.split.modules() if type(m).__name__ in blocks]:
            fully_shard(module, mesh=mesh)
        fully_shard(self.split, mesh=mesh)
        register_fsdp_forward_method(self.split, "hidden")  # the one way into the layers; the heads come after it
        for module in self.split.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # losses are already divided by the whole minibatch's tokens
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    @contextmanager
    def training(self) -> Iterator[Policy]:
        """Within, the split double, and no whole weights; afterwards the policy holds what was learned.

        Not so after an error, which may be this rank's alone: the others would be waited for in vain.
        """
        for p in self.whole.parameters():
            p.data = p.data.new_empty(0)
        yield self.split
        for p, part in zip(self.whole.parameters(), self.split.parameters(), strict=True):
            p.data = whole(part)

    @torch.no_grad()
    def take(self) -> None:
        """Splits the policy's present weights, such as a checkpoint's."""
        for p, part in zip(self.whole.parameters(), self.split.parameters(), strict=True):
            part.copy_(like(part, p.detach()))


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which each rank has a part, put together; all ranks call this. Any other as it is."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, which all have whole, if that is how `parameter` is held."""
    if not isinstance(parameter, DTensor):
        return tensor
    mesh = parameter.device_mesh
    return distribute_tensor(tensor.to(parameter.device), mesh, parameter.placements, src_data_rank=None)


def is_split(policy: Policy) -> bool:
    """Whether its parameters are parts, so that every rank has to make the same passes."""
    return isinstance(policy, FSDPModule)

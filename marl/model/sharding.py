"""Sharded training by FSDP2 (`torch.distributed.fsdp.fully_shard`): ranks split parameters, gradients and moments.

Ranks play games of different lengths, so outside of updates every rank holds the whole policy: a device must hold the
weights of the policy and its reference. Left out: a sharded reference, and weights that don't fit one device.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from marl.common.distributed import Ranks
from marl.model.policy import Policy


class Shards:
    """Sharded copy of a policy. The optimiser steps the copy; the policy itself plays."""

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        """Shards a copy of `policy` among all ranks; each calls this with the same policy, which stays whole."""
        self.whole = policy
        memo: dict[int, object] = {id(p): nn.Parameter(p.detach()) for p in policy.parameters()}
        self.split: Policy = copy.deepcopy(policy, memo)  # other modules around the same numbers
        mesh = init_device_mesh(policy.device.type, (ranks.size,))
        for layer in [m for m in self.split.modules() if isinstance(m, GradientCheckpointingLayer)]:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.split, mesh=mesh)
        register_fsdp_forward_method(self.split, "hidden")  # the one way into the layers; the heads come after it
        for module in self.split.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # losses are already divided by the whole minibatch's tokens
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    @contextmanager
    def training(self) -> Iterator[Policy]:
        """Yields the sharded copy and frees the whole weights; afterwards the policy holds what was learned.

        After an error the weights stay freed: gathering them would wait for the other ranks forever.
        """
        for p in self.whole.parameters():
            p.data = p.data.new_empty(0)
        yield self.split
        for p, part in zip(self.whole.parameters(), self.split.parameters(), strict=True):
            p.data = whole(part)

    @torch.no_grad()
    def take(self) -> None:
        """Copies the policy's present weights, such as a checkpoint's, into the shards."""
        for p, part in zip(self.whole.parameters(), self.split.parameters(), strict=True):
            part.copy_(like(part, p.detach()))


def whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor; all ranks call this. Any other tensor is returned as it is."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, which all ranks hold whole, if `parameter` is sharded; else `tensor`."""
    if not isinstance(parameter, DTensor):
        return tensor
    mesh = parameter.device_mesh
    return distribute_tensor(tensor.to(parameter.device), mesh, parameter.placements, src_data_rank=None)


def is_split(policy: Policy) -> bool:
    """Tells whether the policy is sharded, so that every rank has to make the same passes."""
    return isinstance(policy, FSDPModule)

"""GRPO: each play against its group's mean, in standard deviations of the group (Shao et al. 2024).

Without `scale` it is (K - 1) / K of RLOO. Dividing weighs groups by how sure their outcome is, which biases the
gradient (Liu et al. 2025).
"""

import torch
from torch import Tensor


def grpo(totals: Tensor, scale: bool) -> tuple[Tensor, float]:
    """Computes the baselines (K,) of a group's plays, and the factor of their advantages."""
    return torch.full_like(totals, float(totals.mean())), 1 / float(totals.std()) if scale else 1.0

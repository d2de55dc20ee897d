"""RLOO: each play against the mean of the others (Kool et al. 2019; Ahmadian et al. 2024)."""

from torch import Tensor


def rloo(totals: Tensor, scale: bool) -> tuple[Tensor, float]:
    """Computes the baselines (K,) of a group's plays, and the factor of their advantages."""
    return (totals.sum() - totals) / (len(totals) - 1), 1.0

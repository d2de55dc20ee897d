"""Settings of an update."""

from dataclasses import dataclass

from marl.common.errors import UserError
from marl.model.optim import OPTIMIZERS


@dataclass(frozen=True)
class UpdateConfig:
    """`epochs` passes over a batch of `minibatches` each; at most `token_budget` padded tokens in a forward pass."""

    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    epochs: int = 1
    minibatches: int = 8
    rows: int | None = None  # rows of a minibatch, instead of their number
    max_grad_norm: float = 0.5
    weight_decay: float = 0.0
    token_budget: int = 2048
    target_kl: float | None = None  # stop once approx_kl exceeds it
    temperature: float = 1.0  # the rollout's, set by the loop: what was sampled is what is scored
    bf16: bool = False  # autocast the forward pass; log-probabilities stay in float32
    gradient_checkpointing: bool = False  # compute activations again in the backward pass: memory and speed only

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches", "token_budget"):
            if getattr(self, name) < 1:
                raise UserError(f"algo.update.{name}={getattr(self, name)}: must be at least 1")
        if self.optimizer not in OPTIMIZERS:
            raise UserError(f"algo.update.optimizer={self.optimizer}: must be one of {', '.join(OPTIMIZERS)}")
        if self.rows is not None and self.rows < 1:
            raise UserError(f"algo.update.rows={self.rows}: must be at least 1, or null")
        if self.target_kl is not None and self.target_kl < 0:
            raise UserError(f"algo.update.target_kl={self.target_kl}: must not be negative; null for none")
        if self.learning_rate < 0 or self.weight_decay < 0 or self.max_grad_norm <= 0:
            raise UserError(
                f"algo.update.learning_rate={self.learning_rate}, weight_decay={self.weight_decay}, max_grad_norm="
                f"{self.max_grad_norm}: the first two must not be negative, the last must be above 0"
            )

"""Settings of an update."""

from dataclasses import dataclass

from marl.common.errors import check_choices, check_range
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
        check_range(self, "algo.update", "[1, inf)", "epochs", "minibatches", "token_budget")
        check_choices(self, "algo.update", optimizer=OPTIMIZERS)
        check_range(self, "algo.update", "[1, inf), or null", "rows")
        check_range(self, "algo.update", "[0, inf), or null for none", "target_kl")
        check_range(self, "algo.update", "[0, inf)", "learning_rate", "weight_decay")
        check_range(self, "algo.update", "(0, inf]", "max_grad_norm")

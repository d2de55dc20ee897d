"""Networks for lookahead: what positions are worth to whom, and which orders to consider."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

UNLIKELY = -1e9  # the logit of an illegal order


class OrderNet(nn.Module):
    """Two perceptrons over a position's features (B, F): scores of sum 1 (B, players), and each unit's orders.

    Orders of several units are proposed independently of each other. `width`: of the hidden layers of `scores`.
    """

    def __init__(self, features: int, players: int, slots: int, codes: int, width: int = 128) -> None:
        super().__init__()
        self.slots, self.codes = slots, codes
        self.values = perceptron(features, players, width)
        self.proposal = perceptron(features, slots * codes, 2 * width)

    def scores(self, features: Tensor) -> Tensor:
        return self.values(features).softmax(-1)  # (B, players)

    def logprobs(self, features: Tensor, legal: Tensor) -> Tensor:
        """(B, slots, codes); a slot without a legal order has any."""
        logits = self.proposal(features).view(-1, self.slots, self.codes)
        return logits.masked_fill(~legal, UNLIKELY).log_softmax(-1)

    @torch.no_grad()
    def expected(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        return self.scores(torch.from_numpy(features)).numpy().astype(np.float64)

    @torch.no_grad()
    def proposed(self, features: NDArray[np.float32], legal: NDArray[np.bool_]) -> NDArray[np.float64]:
        return self.logprobs(torch.from_numpy(features), torch.from_numpy(legal)).numpy().astype(np.float64)


def perceptron(inputs: int, outputs: int, width: int) -> nn.Sequential:
    """Two hidden layers with ReLU; the last layer begins at 0, so that all outputs are alike at first."""
    first, second, last = nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)

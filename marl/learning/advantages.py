"""Advantages: GAE over an agent's turns, and the credit of speech.

gae: Schulman et al. 2016, delta_u = r_u + gamma V_{u+1} - V_u; A_u = sum_k (gamma lambda)^k delta_{u+k}. An agent's
turns are the time steps; a message is one of them, however many tokens it has, so nothing is discounted inside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marl.common.errors import UserError
from marl.types import TokenBatch

CREDITS = ("common", "separate", "separate_raw", "separate_only")


@dataclass(frozen=True)
class Credit:
    """How turns are credited.

    `speech`: where the speaking reward goes. `common`: into the GAE with the game's reward, as published. `separate`:
    each message gets the game's advantage plus the speaking reward, normalised over the batch's messages (mean 0,
    standard deviation = weight). `separate_raw`: the weighted reward as it is, not normalised. `separate_only`: the
    normalised reward instead of the game's advantage, and nothing for a message whose listeners don't count; so two
    things differ from an arm without the speaking reward, whose messages keep the game's advantage.

    A message is its words and the token that ends it: without the end, a message that stops early would be compared
    only with what longer ones earn. Tags, proposals and choices keep the game's advantage.
    """

    gamma: float = 1.0
    gae_lambda: float = 0.95
    normalize: bool = True  # the GAE part, over the batch's decisions
    speech: str = "separate"

    def __post_init__(self) -> None:
        if self.speech not in CREDITS:
            raise UserError(f"algo.credit.speech={self.speech}: must be one of {', '.join(CREDITS)}")
        for name in ("gamma", "gae_lambda"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UserError(f"algo.credit.{name}={getattr(self, name)}: must lie in [0, 1]")

    @property
    def separate(self) -> bool:
        return self.speech != "common"


def gae(rewards: Tensor, values: Tensor, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both (U,), of one agent's turns; the episode ends after the last of them."""
    r, v = rewards.tolist(), values.tolist()
    advantages = [0.0] * len(r)
    following = next_value = 0.0
    for u in range(len(r) - 1, -1, -1):
        following = r[u] + gamma * next_value - v[u] + gamma * gae_lambda * following
        advantages[u], next_value = following, v[u]
    result = torch.tensor(advantages, dtype=rewards.dtype)
    return result, result + values


def add_advantages(batch: TokenBatch, credit: Credit, speaking_weight: float) -> TokenBatch:
    """Fills `advantages` (at every token of a reply) and `returns` (at decisions)."""
    advantages, returns = torch.zeros_like(batch.rewards), torch.zeros_like(batch.rewards)
    for b in range(batch.shape[0]):
        at = batch.decision[b]
        advantages[b, at], returns[b, at] = gae(
            batch.rewards[b, at], batch.values[b, at], credit.gamma, credit.gae_lambda
        )
    if credit.normalize and int(batch.decision.sum()) > 1:
        advantages = torch.where(batch.decision, standardise(advantages, batch.decision), 0.0)
    advantages = spread(batch, advantages)
    # The first tokens of messages whose listeners were asked; where nobody was, the speaking reward is exactly 0 (as
    # it is where all who were asked stay below the floor of log-probabilities, which is seldom, and passed over).
    said = batch.decision & (spread(batch, batch.message, any_token=True) > 0) & (batch.speaking != 0)
    if credit.separate and speaking_weight:
        earned = torch.zeros_like(advantages)
        raw = credit.speech == "separate_raw"
        if raw or int(said.sum()) > 1:
            # `speaking` is weighted already: where it is normalised its sign counts, and its size is set here.
            each = batch.speaking if raw else abs(speaking_weight) * standardise(batch.speaking, said)
            earned = spread(batch, torch.where(said, each, 0.0))
        game = 0.0 if credit.speech == "separate_only" else advantages
        advantages = torch.where(batch.message, game + earned, advantages)
    return replace(batch, advantages=advantages, returns=returns)


def standardise(values: Tensor, mask: Tensor) -> Tensor:
    """(values - mean) / standard deviation, both over the mask; 0 where nothing varies."""
    chosen = values[mask].double()  # in float32 the mean of equal values misses them by as much as the 1e-8
    return ((values - chosen.mean()) / (chosen.std() + 1e-8)).float()


def spread(batch: TokenBatch, values: Tensor, any_token: bool = False) -> Tensor:
    """Gives every token of a reply what stands at the reply's decision (or the sum over its tokens); 0 elsewhere."""
    turn = batch.decision.long().cumsum(1)  # (B, T): the number of the token's turn, from 1
    counted = batch.reply if any_token else batch.decision
    per_turn = torch.zeros(batch.shape[0], int(turn.max()) + 1)
    per_turn.scatter_add_(1, turn, torch.where(counted, values.float(), 0.0))
    return torch.where(batch.reply, per_turn.gather(1, turn), 0.0)

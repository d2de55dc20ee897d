"""Advantages: GAE over an agent's turns, or an estimator without a critic; and the credit of messages (`Credit`).

gae: Schulman et al. 2016, delta_u = r_u + gamma V_{u+1} - V_u; A_u = sum_k (gamma lambda)^k delta_{u+k}. An agent's
turns are the time steps; a message is one of them, however many tokens it has, so nothing is discounted inside it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marl.common.errors import check_choices, check_range
from marl.rewards import Reward, of_messages
from marl.types import TokenBatch

Estimate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # `estimators.Baselines`
SPEECH_CREDITS = ("common", "separate", "separate_raw", "separate_only")


@dataclass(frozen=True)
class Credit:
    """Settings of credit: how turns and messages are credited.

    `speech`: where rewards that are credited to messages go. `common`: into the GAE with the game's reward (Sarkar et
    al. 2025). `separate`: a message gets the game's advantage plus each such reward, normalised over the batch's heard
    messages (mean 0, standard deviation = weight). `separate_raw`: the same with the weighted reward as it is.
    `separate_only`: the normalised rewards instead of the game's advantage, and 0 for a message that nobody heard.

    A message is its words and the token that ends it: without the end, a message that stops early would be compared
    only with what longer ones earn. Tags, proposals and choices keep the game's advantage.
    """

    gamma: float = 1.0
    gae_lambda: float = 0.95
    normalize: bool = True  # the game's part, over the batch's decisions, but for groups without spread
    speech: str = "separate"

    def __post_init__(self) -> None:
        check_choices(self, "algo.credit", speech=SPEECH_CREDITS)
        check_range(self, "algo.credit", "[0, 1]", "gamma", "gae_lambda")


def gae(rewards: Tensor, values: Tensor, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Computes advantages and returns, both (U,), of one agent's turns; the episode ends after the last of them."""
    r, v = rewards.tolist(), values.tolist()
    advantages = [0.0] * len(r)
    following = next_value = 0.0
    for u in range(len(r) - 1, -1, -1):
        following = r[u] + gamma * next_value - v[u] + gamma * gae_lambda * following
        advantages[u], next_value = following, v[u]
    result = torch.tensor(advantages, dtype=rewards.dtype)
    return result, result + values


def add_advantages(
    batch: TokenBatch, rewards: Mapping[str, Reward], credit: Credit, estimate: Estimate | None = None
) -> TokenBatch:
    """Fills `advantages` (at every token of a reply) and `returns` (at decisions) from what the rewards paid.

    `estimate`: the baselines to compare with instead of the critic's.
    """
    paid = batch.rewards + batch.message_rewards.sum(-1) if credit.speech == "common" else batch.rewards
    advantages, returns, compared = torch.zeros_like(paid), torch.zeros_like(paid), batch.decision
    values, gae_lambda = batch.values, credit.gae_lambda
    if estimate is not None:  # the return from each turn on, to which no critic adds anything
        values, gae_lambda = torch.zeros_like(values), 1.0
    for b, at in enumerate(batch.decision):
        advantages[b, at], returns[b, at] = gae(paid[b, at], values[b, at], credit.gamma, gae_lambda)
    if estimate is not None:
        first = batch.decision & (batch.decision.cumsum(1) == 1)
        baselines, factors = estimate((returns * first).sum(1), first.any(1))
        advantages = torch.where(batch.decision, (advantages - baselines[:, None]) * factors[:, None], 0.0)
        compared = batch.decision & (factors != 0)[:, None]  # the others stay at 0
        returns = torch.zeros_like(returns)  # only a critic learns them
    if credit.normalize and int(compared.sum()) > 1:
        advantages = torch.where(compared, standardise(advantages, compared), 0.0)
    advantages = spread(batch, advantages)
    weights = [rewards[name].weight for name in of_messages(rewards)]
    if weights and credit.speech != "common":
        game = 0.0 if credit.speech == "separate_only" else advantages
        advantages = torch.where(batch.message, game + message_credit(batch, weights, credit), advantages)
    return replace(batch, advantages=advantages, returns=returns)


def message_credit(batch: TokenBatch, weights: list[float], credit: Credit) -> Tensor:
    """Sums what each reward that is credited to messages adds to the advantage of every token of a reply, (B, T).

    `weights` (M,): of the columns of `message_rewards`.
    """
    first = batch.decision & (spread(batch, batch.message, any_token=True) > 0)  # the first tokens of messages
    earned = torch.zeros(batch.shape)
    for weight, reward in zip(weights, batch.message_rewards.unbind(-1), strict=True):
        heard = first & (reward != 0)  # a reward is exactly 0 where nobody was asked after the message
        if credit.speech == "separate_raw":
            earned += spread(batch, torch.where(heard, reward, 0.0))
        elif int(heard.sum()) > 1:  # one alone has nothing to be compared with
            # The reward is weighted already, so its sign counts; its size is set here.
            earned += spread(batch, torch.where(heard, abs(weight) * standardise(reward, heard), 0.0))
    return earned


def standardise(values: Tensor, mask: Tensor) -> Tensor:
    """Computes (values - mean) / standard deviation, both over the mask; 0 if nothing varies."""
    chosen = values[mask].double()  # in float32 the mean of equal values misses them by as much as the 1e-8
    return ((values - chosen.mean()) / (chosen.std() + 1e-8)).float()


def spread(batch: TokenBatch, values: Tensor, any_token: bool = False) -> Tensor:
    """Gives every token of a reply the value at the reply's decision (`any_token`: the sum over its tokens), else 0."""
    turn = batch.decision.long().cumsum(1)  # (B, T): the number of the token's turn, from 1
    counted = batch.reply if any_token else batch.decision
    per_turn = torch.zeros(batch.shape[0], int(turn.max()) + 1)
    per_turn.scatter_add_(1, turn, torch.where(counted, values.float(), 0.0))
    return torch.where(batch.reply, per_turn.gather(1, turn), 0.0)

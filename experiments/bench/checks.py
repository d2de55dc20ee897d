"""Checks of a card, without which its speed means nothing. Each takes seconds, on a small random model.

A check returns a figure in words and whether it holds; Unrun, with the reason, where this machine cannot tell.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from experiments.setup.devices import without_bf16
from marl.agents.model import ModelAgent
from marl.learning.advantages import Credit, add_advantages
from marl.learning.batch import collate, rows_of
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.update import autocast, make_optimizer, update
from marl.losses import Loss
from marl.losses.kl import KLLoss
from marl.losses.listening import ListeningLoss
from marl.losses.policy import PolicyLoss
from marl.losses.value import ValueLoss
from marl.model.lora import AdapterConfig, adapted
from marl.model.policy import Policy, tiny_lm
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rewards import Reward, add_rewards
from marl.rewards.game import GameReward
from marl.rollout.games import env_maker, game_module
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.storage.checkpoint import policy_digest
from marl.types import Episode, TokenBatch

ENV = {"game": "dond", "style": "compact", "format": "structured", "max_entries": 6}
GAMES = 8
CLOSE = 1e-4  # nats, in float32
CLOSE_BF16 = 0.05  # nats in the mean: bfloat16 has eight bits of a number
REWARDS: dict[str, Reward] = {"game": GameReward()}
LOSSES: dict[str, Loss] = {
    "policy": PolicyLoss(), "value": ValueLoss(), "kl": KLLoss(0.1), "listening": ListeningLoss(),
}  # fmt: skip


class Unrun(Exception):
    """This machine cannot tell; the message says why."""


def small_policy(device: torch.device) -> Policy:
    """A Llama of two layers whose logits differ by several nats, so that agreement to 1e-4 means something."""
    texts = scripted_texts("dond", [env_maker(ENV)], 0, games=30)
    tokens = Tokens(train_tokenizer(texts, game_module("dond").COMPACT_TOKENS, 512))
    lm = tiny_lm(tokens.size, hidden_size=64, layers=2, heads=4, intermediate_size=192, context=1024)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Policy(lm, tokens).to(device).eval()


def play(policy: Policy, seed: int, bf16: bool = False, decode_steps: int = 1) -> list[Episode]:
    agent = ModelAgent(
        "learner", policy, slots=2 * GAMES, context=1024, max_new_tokens=12, bf16=bf16, decode_steps=decode_steps
    )
    return add_rewards(rollout(draw_games(seed, count=GAMES), everyone(agent), env_maker(ENV), GAMES), REWARDS)


def batch_of(episodes: list[Episode]) -> TokenBatch:
    return add_advantages(collate(rows_of(episodes, {"learner"}), REWARDS), REWARDS, Credit())


@torch.no_grad()
def gaps(policy: Policy, batch: TokenBatch, bf16: bool = False) -> Tensor:
    """Returns how far, in nats, each sampled token's noted log-probability is from the trainer's, (M,)."""
    batch = batch.to(policy.device)
    with autocast(policy.device, UpdateConfig(bf16=bf16)):
        found = forward(policy, batch, 1.0, {"reply": False}).logprobs
    return (found - batch.logprobs)[batch.reply].abs()


def learn(policy: Policy, reference: Policy, batch: TokenBatch, seed: int) -> None:
    """One update of two minibatches, with large steps."""
    config = UpdateConfig(learning_rate=1e-2, minibatches=2, token_budget=8192)
    optimizer = make_optimizer(policy, config)
    update(policy, reference, batch, LOSSES, optimizer, config, torch.Generator().manual_seed(seed))


def sampler_and_trainer(device: torch.device) -> tuple[str, bool]:
    """Log-probabilities as sampled, token by token, and as the update computes them from whole rows."""
    policy = small_policy(device)
    found = gaps(policy, batch_of(play(policy, 0)))
    return f"{found.max():.1e} nats apart at most, {len(found):,} tokens", bool(found.max() < CLOSE)


def captured_steps(device: torch.device) -> tuple[str, bool]:
    """Eight decode steps at a time (on a card from a captured graph) against one at a time, before and after an update:
    a graph must not go on with weights that have moved."""
    policy = small_policy(device)
    reference = copy.deepcopy(policy)
    worst, alike = 0.0, []
    for seed in (0, 1):
        ones, several = play(policy, seed), play(policy, seed, decode_steps=8)
        alike += [a.streams == b.streams for a, b in zip(ones, several, strict=True)]
        batch = batch_of(several)
        worst = max(worst, float(gaps(policy, batch).max()))
        learn(policy, reference, batch, seed)
    return f"{worst:.1e} nats from the trainer's, {sum(alike)} of {len(alike)} games the same", worst < CLOSE


def bfloat16(device: torch.device) -> tuple[str, bool]:
    """Checks what `sampler_and_trainer` does, with both computing in bfloat16."""
    if lacking := without_bf16(device):
        raise Unrun(lacking)
    policy = small_policy(device)
    found = gaps(policy, batch_of(play(policy, 0, bf16=True)), bf16=True)
    return f"{found.mean():.1e} nats apart in the mean, {found.max():.1e} at most", bool(found.mean() < CLOSE_BF16)


def same_bits(device: torch.device) -> tuple[str, bool]:
    """Checks that with `deterministic=true` playing and learning twice gives the same weights, to the last bit."""
    digests = []
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            policy = small_policy(device)
            learn(policy, copy.deepcopy(policy), batch_of(play(policy, 0)), 0)
            digests.append(policy_digest(policy))
    finally:
        torch.use_deterministic_algorithms(before)
    return f"weights {' and '.join(digest[:12] for digest in digests)}", digests[0] == digests[1]


def adapters(device: torch.device) -> tuple[str, bool]:
    """Two adapters over one base: each plays as it is scored, after each update too, and the base stays as it is."""
    base = small_policy(device)
    digest = policy_digest(base)
    one, two = (adapted(base, AdapterConfig(rank=4, alpha=8), seed) for seed in (0, 1))
    at_start = [e.streams for e in play(one, 0)] == [e.streams for e in play(base, 0)]  # B = 0
    worst = 0.0
    for seed in range(2):
        for policy in (one, two):
            batch = batch_of(play(policy, seed))
            worst = max(worst, float(gaps(policy, batch).max()))
            learn(policy, base, batch, seed)
    still = policy_digest(base) == digest
    said = f"{worst:.1e} nats apart at most; the base {'as it was' if still and at_start else 'CHANGED'}"
    return said, worst < CLOSE and still and at_start


CHECKS: dict[str, Callable[[torch.device], tuple[str, bool]]] = {
    "sampler and trainer": sampler_and_trainer,
    "captured decode steps": captured_steps,
    "bfloat16": bfloat16,
    "deterministic twice": same_bits,
    "adapters": adapters,
}

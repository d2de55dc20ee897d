"""Supervised training of a base, one lesson after the other."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from envs.core import TurnKind
from marl.common.errors import UserError
from marl.learning.batch import Row, collate
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.micro_batches import passes
from marl.learning.update import NotFinite, update
from marl.losses import Loss
from marl.losses.listening import log_truth
from marl.model.optim import Optimizer
from marl.model.policy import Policy
from marl.pretraining.config import BaseConfig
from marl.types import INSIDERS, Kind


def fit(
    policy: Policy,
    draw: Iterator[list[Row]],
    steps: int,
    base: BaseConfig,
    losses: Mapping[str, Loss],
    optimizer: Optimizer,
    progress: Callable[[int], None],
    reference: Policy | None = None,
    until: float = 0.0,
) -> tuple[int, float]:
    """Takes supervised steps, with a warm-up and a cosine to a tenth of the optimiser's learning rate. Returns their
    number and the mean listening loss of the last ten that met a question.

    With `until` above 0 the rate is constant, and it stops early, once that listening loss is below `until`.
    """
    config = UpdateConfig(minibatches=1, max_grad_norm=1.0, bf16=base.bf16)
    rates = [group["lr"] for group in optimizer.param_groups]
    recent: deque[float] = deque(maxlen=10)
    taken = 0
    for step in range(steps):
        part = step / max(steps, 1)
        scale = min(1.0, (step + 1) / max(base.warmup * steps, 1))
        scale *= 1.0 if until else 0.55 + 0.45 * math.cos(math.pi * part)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * scale
        shuffle = torch.Generator().manual_seed(step)
        batch = collate(next(draw), {}, silent_roles=INSIDERS)
        try:
            found = update(policy, reference, batch, losses, optimizer, config, shuffle)
        except NotFinite as error:
            raise UserError(
                f"base: the gradient is not finite in step {step + 1}. Lower base.learning_rate={base.learning_rate}, "
                "or that of the lesson"
            ) from error
        taken = step + 1
        progress(taken)
        if "loss/listening" in found:  # else the batch asks nothing
            recent.append(found["loss/listening"])
        if len(recent) == recent.maxlen and sum(recent) / len(recent) < until:
            break
    return taken, sum(recent) / len(recent) if recent else math.inf


@torch.no_grad()
def held_out_figures(
    policy: Policy, held_out: Sequence[Row], bf16: bool = False, progress: Callable[[int], None] = lambda done: None
) -> dict[str, float]:
    """Perplexity per token of replies and per word of messages, and the belief's log-loss before and after all
    messages. bf16: passes compute in bfloat16, as in training; log-probabilities stay in float32."""
    nats = spoken = tokens = words = 0.0
    done = 0
    first: list[float] = []
    last: list[float] = []
    batch = collate(held_out, {}, silent_roles=INSIDERS)
    for part, rows in passes(policy, batch, 16384):
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=bf16):
            out = forward(policy, part, 1.0, {"reply": False, "beliefs": False})
        mask = part.reply & part.imitate
        nats -= float(out.logprobs[mask].sum())
        tokens += int(mask.sum())
        spoken -= float(out.logprobs[mask & (part.kind == Kind.SPEECH)].sum())
        progress(done := done + len(rows))
        truth = -log_truth(part, out.beliefs)
        for row in range(len(rows)):
            asked = truth[part.row == row]
            if len(asked):
                episode, agent = held_out[int(rows[row])]
                step = torch.tensor([b.step for b in episode.beliefs if b.listener == agent], device=asked.device)
                first.append(float(asked[step == step.min()].mean()))
                last.append(float(asked[step == step.max()].mean()))
    for episode, agent in held_out:
        own = [t for t in episode.turns if t.agent == agent and not t.error and t.kind == TurnKind.SPEAK]
        words += sum(len(t.text.split()) for t in own)
    return {
        "perplexity_per_token": math.exp(nats / max(tokens, 1)),
        "perplexity_per_word": math.exp(spoken / max(words, 1)),
        "belief_log_loss_first": float(np.mean(first)) if first else 0.0,
        "belief_log_loss_last": float(np.mean(last)) if last else 0.0,
    }

"""Weights, reduces and steps: the only place where losses are summed.

Each term is divided by its own number of tokens over the whole minibatch, so that micro-batching changes nothing and
terms don't dilute one another. A term of weight 0 is measured on detached outputs: the parameters never feel it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from marl.common.distributed import ONE, Ranks
from marl.common.errors import UserError
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.micro_batches import ends, last_questions, passes
from marl.learning.renaming import Renaming
from marl.losses import Loss, Outputs, any_needs, evaluate, mask_of, needs
from marl.model.optim import OPTIMIZERS, Optimizer
from marl.model.policy import Policy, recomputing
from marl.model.sharding import Shards, is_split, whole
from marl.types import Kind, TokenBatch


class NotFinite(UserError):
    """Raised before a step that would ruin the weights: a loss or the gradient is not finite."""


@dataclass(frozen=True)
class Learner:
    """A learner: its name in the cast, its policy, the frozen reference of its KL term, its optimiser.

    With `shards` (of the policy) the optimiser steps those.
    """

    name: str
    policy: Policy
    reference: Policy
    optimizer: Optimizer
    shards: Shards | None = None

    def training(self) -> AbstractContextManager[Policy]:
        """Gives the module that an update changes: the policy, or its shards, which are gathered into it at exit."""
        return nullcontext(self.policy) if self.shards is None else self.shards.training()


def make_optimizer(policy: Policy, config: UpdateConfig) -> Optimizer:
    """Makes the configured optimiser, over all parameters. UserError if the model cannot be updated as configured."""
    with recomputation(policy, config):
        return OPTIMIZERS[config.optimizer](policy, config.learning_rate, config.weight_decay)


def recomputation(policy: Policy, config: UpdateConfig) -> AbstractContextManager[None]:
    return recomputing(policy.lm) if config.gradient_checkpointing else nullcontext()


def autocast(device: torch.device, config: UpdateConfig) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=config.bf16)


def update(
    policy: Policy,
    reference: Policy | None,
    batch: TokenBatch,
    losses: Mapping[str, Loss],
    optimizer: Optimizer,
    config: UpdateConfig,
    generator: torch.Generator,
    progress: Callable[[int], None] = lambda rows: None,
    rename: Renaming | None = None,
    ranks: Ranks = ONE,
) -> dict[str, float]:
    """Steps on every minibatch. Returns metrics by name, means over all minibatches, without losses that met nothing.

    `generator` orders the rows. `rename` renames rows for terms that read "renamed"; None: these read rows as they are.
    `ranks`: each reads its share of every minibatch; all of them get the whole batch. Raises NotFinite, before a step.
    """
    masks = [mask_of(batch, name, loss) for name, loss in losses.items() if needs(loss, "reference")]
    if masks:
        assert reference is not None, "a loss compares the policy with a reference"
        batch = add_reference(batch, reference, config, ranks, torch.stack(masks).any(0))
    policy.eval()  # no dropout: what was sampled from is what is scored
    totals = Means()
    for rows in minibatches(batch.shape[0], config, generator):
        minibatch = batch.select(rows)
        counts = {name: int(mask_of(minibatch, name, loss).sum()) for name, loss in losses.items()}
        drift = Means()  # from the policy that played
        optimizer.zero_grad(set_to_none=True)
        for group in loss_groups(minibatch, losses, rename):
            for part, part_rows in passes(policy, group.batch, config.token_budget, group.lengths, ranks):
                with autocast(policy.device, config), recomputation(policy, config):
                    outputs = forward(policy, part, config.temperature, group.reads, reference)
                backward(part, outputs, group.losses, counts, totals)
                if any_needs(group.losses, "advantages"):
                    note_drift(drift, part, outputs)
                progress(len(part_rows) if group.batch is minibatch else 0)
        if not is_split(policy):  # else summed in the passes
            ranks.add_gradients(policy)
        norm = whole(nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm))
        if not bool(torch.isfinite(norm)):
            raise NotFinite(
                f"the gradient is not finite ({float(norm)}): lower algo.update.learning_rate or a loss weight"
            )
        optimizer.step()
        if ranks.first:
            totals.add("update/grad_norm", float(norm), 1)
            for name, count in counts.items():
                totals.add(f"loss/{name}", 0.0, count)
        totals.take(drift)
        if config.target_kl is not None and drift.over(ranks).means().get("update/approx_kl", 0.0) > config.target_kl:
            break
    return {**totals.over(ranks).means(), "update/explained_variance": explained_variance(batch)}


def minibatches(size: int, config: UpdateConfig, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields the rows of each minibatch, in a new order in every epoch."""
    for _ in range(config.epochs):
        order = torch.randperm(size, generator=generator)
        yield from order.split(config.rows) if config.rows else order.tensor_split(min(config.minibatches, size))


@dataclass(frozen=True)
class LossGroup:
    """Losses that share forward passes, and the rows that these read."""

    losses: Mapping[str, Loss]
    batch: TokenBatch
    lengths: Tensor  # (B,) int64: how many tokens of each row are read

    @property
    def reads(self) -> dict[str, bool]:
        """Each part of the outputs that is read, and whether it is trained."""
        found: dict[str, bool] = {}
        for loss in self.losses.values():
            part = "beliefs" if loss.reads == "renamed" else loss.reads
            found[part] = found.get(part, False) or loss.weight != 0.0
        return found


def loss_groups(batch: TokenBatch, losses: Mapping[str, Loss], rename: Renaming | None) -> list[LossGroup]:
    """Groups the losses by the rows they read: as they are, or renamed, up to each row's last question."""
    if rename is None:
        return [LossGroup(losses, batch, batch.lengths)]
    renamed = {name: loss for name, loss in losses.items() if loss.reads == "renamed"}
    plain = {name: loss for name, loss in losses.items() if name not in renamed}
    found = [LossGroup(plain, batch, batch.lengths)] if plain else []
    if renamed:
        other = rename(batch)
        found.append(LossGroup(renamed, other, last_questions(other)))
    return found


def backward(
    part: TokenBatch, outputs: Outputs, losses: Mapping[str, Loss], counts: Mapping[str, int], totals: Means
) -> None:
    """Adds the gradient of the weighted sum of losses, each divided by its tokens in the whole minibatch (`counts`)."""
    total = torch.zeros((), device=outputs.logprobs.device)
    for name, loss in losses.items():
        values, mask = evaluate(part, name, loss, outputs)
        if not torch.equal(mask, mask_of(part, name, loss)):
            raise UserError(
                f"loss.{name}: the mask of {type(loss).__name__} depends on the outputs. Make it of the batch alone, "
                "as batch.reply is."
            )
        picked = values[mask]
        mean = picked.sum() / max(counts[name], 1)
        amount = float(mean.detach())
        if loss.weight:
            if not math.isfinite(amount):
                raise NotFinite(why_not_finite(name, loss, picked.detach(), outputs))
            total = total + loss.weight * mean
        totals.add(f"loss/{name}", amount * counts[name], 0)
        del values, picked, mean
    # Drop the graphs of outputs that are only measured, as the entropy is as a rule: they would keep all logits alive
    # while the backward pass makes them again.
    for name, output in vars(outputs).items():
        setattr(outputs, name, output.detach())
    if total.requires_grad:
        total.backward()


def why_not_finite(name: str, loss: Loss, values: Tensor, outputs: Outputs) -> str:
    """Says whether the model's outputs or this loss's own values are not finite."""
    if any(bool(output.isnan().any()) for output in vars(outputs).values()):
        return f"loss.{name}: the model's outputs are not finite. Lower algo.update.learning_rate or a loss weight."
    wrong = int((~values.isfinite()).sum())
    return (
        f"loss.{name}: {type(loss).__name__} returned {float(values.sum())}, not finite at {wrong} of {values.numel()} "
        "places. Mend the term, or lower algo.update.learning_rate or its weight."
    )


@torch.no_grad()
def add_reference(
    batch: TokenBatch, reference: Policy, config: UpdateConfig, ranks: Ranks = ONE, where: Tensor | None = None
) -> TokenBatch:
    """Fills `reference_logprobs` from the frozen reference, under the same temperature and legal sets.

    `where` (B, T): the tokens that matter (None: all replies); others stay 0, and nothing after the last is read.
    """
    result = torch.zeros_like(batch.logprobs)
    where = batch.reply if where is None else where
    kind = batch.kind.masked_fill(batch.reply & ~where, int(Kind.OBSERVATION))
    for part, rows in passes(reference, replace(batch, kind=kind), config.token_budget, ends(where), ranks):
        with autocast(reference.device, config):
            outputs = forward(reference, part, config.temperature, {"reply": False})
        result[rows, : part.shape[1]] = outputs.logprobs.cpu()
    return replace(batch, reference_logprobs=ranks.add(result.to(reference.device)).cpu())


def explained_variance(batch: TokenBatch) -> float:
    """Computes 1 - Var(return - value) / Var(return) of the critic that played; 0 if returns don't vary."""
    returns, values = batch.returns[batch.decision], batch.values[batch.decision]
    variance = returns.var() if len(returns) > 1 else torch.tensor(0.0)
    return float(1 - (returns - values).var() / variance) if float(variance) > 0 else 0.0


@dataclass
class Means:
    """Running means by name."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, name: str, total: float, count: float) -> None:
        self.sums[name] += total
        self.counts[name] += count

    def take(self, other: Means) -> None:
        for name, total in other.sums.items():
            self.add(name, total, other.counts[name])

    def over(self, ranks: Ranks) -> Means:
        """Adds up those of all ranks."""
        whole = Means()
        for part in ranks.objects(self):
            whole.take(part)
        return whole

    def means(self) -> dict[str, float]:
        """Returns the means of what was observed."""
        return {name: total / self.counts[name] for name, total in self.sums.items() if self.counts[name]}


def note_drift(drift: Means, batch: TokenBatch, outputs: Outputs) -> None:
    """Notes approx_kl (k3, Schulman 2020) and clipfrac (beyond 0.2) of replies against the policy that played."""
    mask = batch.reply
    ratio = (outputs.logprobs.detach() - batch.logprobs)[mask]
    drift.add("update/approx_kl", float((ratio.exp() - 1 - ratio).sum()), int(mask.sum()))
    drift.add("update/clipfrac", float(((ratio.exp() - 1).abs() > 0.2).float().sum()), int(mask.sum()))

"""Weights, reduces and steps: the only place where losses are summed.

Each term is divided by its own number of tokens over the whole minibatch, so that micro-batching changes nothing and
terms don't dilute one another. A term of weight 0 is measured on detached outputs: the parameters never feel it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from marl.common.distributed import ONE, Ranks
from marl.common.errors import UserError
from marl.kernels.varlen import check_varlen, compiled, varlen
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.micro_batches import ends, last_questions, micro_batches, padded, passes
from marl.learning.renaming import Renaming
from marl.losses import Loss, Outputs, count_tokens, needs_reference, places, returned
from marl.model.optim import OPTIMIZERS, Optimizer
from marl.model.policy import Policy, recomputing
from marl.model.sharding import Shards, is_split
from marl.model.sharding import whole as whole_tensor
from marl.types import Kind, TokenBatch


class NotFinite(UserError):
    """A step that would leave nothing of the weights, since a rate or a weight is too large."""


def make_optimizer(policy: Policy, config: UpdateConfig) -> Optimizer:
    """The optimiser that the configuration names, over all parameters. Raises UserError where the model cannot be
    updated as configured; of one that is split among ranks `check_model` has to ask before."""
    if not is_split(policy):
        check_model(policy, config)
    return OPTIMIZERS[config.optimizer](policy, config.learning_rate, config.weight_decay)


def check_model(policy: Policy, config: UpdateConfig) -> None:
    """Raises UserError where the model cannot be updated as configured."""
    with recomputation(config, policy):
        pass
    if config.padding_free:
        if policy.device.type == "cuda" and not config.bf16:
            raise UserError("algo.update.padding_free=true: on a GPU only with algo.update.bf16=true, or leave it out")
        check_varlen(policy.lm, config.bf16)


@dataclass(frozen=True)
class Learner:
    """Who learns: its name in the cast, its policy, the frozen reference of its KL term, its optimiser. With `shards`
    (of the policy) the optimiser steps those."""

    name: str
    policy: Policy
    reference: Policy
    optimizer: Optimizer
    shards: Shards | None = None

    def training(self) -> AbstractContextManager[Policy]:
        """Within, what an update changes: the policy, or its shards, which then become the policy."""
        return nullcontext(self.policy) if self.shards is None else self.shards.training()


@torch.no_grad()
def add_reference(
    batch: TokenBatch, reference: Policy, config: UpdateConfig, ranks: Ranks = ONE, where: Tensor | None = None
) -> TokenBatch:
    """Fills `reference_logprobs` from the frozen reference, under the same temperature and legal sets. `where` (B, T):
    the places that matter; the others stay 0, and what comes behind a row's last one is not read."""
    result = torch.zeros_like(batch.logprobs)
    lengths = padded(batch.lengths if where is None else ends(where), batch, config, reference.device)
    for rows in micro_batches(batch, lengths.nonzero()[:, 0], config.token_budget, ranks, lengths):
        if not len(rows):
            continue
        part = batch.select(rows, int(lengths[rows].max()))
        if where is not None:
            unread = part.reply & ~where[rows, : part.shape[1]]
            part = replace(part, kind=part.kind.masked_fill(unread, int(Kind.OBSERVATION)))
        with autocast(config, reference.device), reading_rows(config, reference):
            logprobs = forward(
                reference, part.to(reference.device), config.temperature, {"reply": False},
                padding_free=config.padding_free,
            ).logprobs  # fmt: skip
        result[rows, : part.shape[1]] = logprobs.cpu()
    return replace(batch, reference_logprobs=ranks.add(result.to(reference.device)).cpu())


def autocast(config: UpdateConfig, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=config.bf16)


def recomputation(config: UpdateConfig, policy: Policy) -> AbstractContextManager[None]:
    return recomputing(policy.lm) if config.gradient_checkpointing else nullcontext()


@contextmanager
def reading_rows(config: UpdateConfig, *policies: Policy | None) -> Iterator[None]:
    """Within, forward and backward passes of these policies are without padding, where the settings say so, and on a
    CPU by compiled attention, where that reads what they do."""
    with ExitStack() as stack:
        for policy in policies:
            if policy is not None and (config.padding_free or (not is_split(policy) and compiled(policy.lm))):
                stack.enter_context(varlen(policy.lm))
        yield


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
    """Passes over the batch, a step for each minibatch. Returns metrics by name, means over all minibatches.

    `rename`: for a term that reads beliefs of renamed rows; without it they are read as they are. `ranks`: each reads
    its share of every minibatch; all of them get the whole batch.
    """
    compared = [places(batch, name, loss) for name, loss in losses.items() if needs_reference(loss)]
    if compared and reference is not None:
        batch = add_reference(batch, reference, config, ranks, torch.stack(compared).any(0))
    policy.eval()  # no dropout: what was sampled from is what is scored
    reads: dict[str, bool] = {}
    for loss in losses.values():
        reads[loss.reads] = reads.get(loss.reads, False) or loss.weight != 0.0
    totals = _Means()
    size = batch.shape[0]
    for _ in range(config.epochs):
        order = torch.randperm(size, generator=generator)
        stop = False
        for rows in order.split(config.rows) if config.rows else order.tensor_split(min(config.minibatches, size)):
            whole = batch.select(rows)
            counts = count_tokens(whole, losses)
            optimizer.zero_grad(set_to_none=True)
            own = _Means()  # of this minibatch
            # Terms that read renamed rows have passes of their own, up to each row's last question.
            other = {name: loss for name, loss in losses.items() if loss.reads == "renamed"}
            sides = [(whole, {n: x for n, x in losses.items() if n not in other}, reads, whole.lengths)]
            if other:
                renamed = rename(whole) if rename is not None else whole
                sides.append((renamed, other, {"beliefs": reads["renamed"]}, last_questions(renamed)))
            for side, terms, wanted, lengths in sides:
                asked = lengths.nonzero()[:, 0] if terms else lengths[:0]
                for part, read in passes(policy, side, asked, lengths, config, ranks):
                    with reading_rows(config, policy, reference):
                        with autocast(config, policy.device), recomputation(config, policy):
                            outputs = forward(policy, part, config.temperature, wanted, reference, config.padding_free)
                        total = torch.zeros((), device=policy.device)
                        for name, loss in terms.items():
                            values, mask = returned(part, name, loss, outputs)
                            summed = values[mask].sum() / max(counts[name], 1)
                            amount = float(summed.detach())
                            if loss.weight:
                                if not math.isfinite(amount):
                                    raise NotFinite(why_not_finite(name, loss, values[mask].detach(), outputs))
                                total = total + loss.weight * summed
                            totals.add(f"loss/{name}", amount * counts[name], 0)
                        if total.requires_grad:
                            total.backward()
                    if "policy" in terms:
                        _diagnose(own, part, outputs)
                    progress(read if side is whole else 0)
            if not is_split(policy):  # whose parts have been summed in the passes
                ranks.add_gradients(policy)
            for name, count in counts.items():
                totals.add(f"loss/{name}", 0.0, count if ranks.first else 0)
            norm = whole_tensor(nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm))
            if not bool(torch.isfinite(norm)):
                raise NotFinite(
                    f"the gradient is not finite ({float(norm)}): lower algo.update.learning_rate or a loss weight"
                )
            optimizer.step()
            if ranks.first:
                totals.add("update/grad_norm", float(norm), 1)
            totals.take(own)
            if config.target_kl is not None and own.over(ranks).mean("update/approx_kl") > config.target_kl:
                stop = True
                break
        if stop:
            break
    return {**totals.over(ranks).means(), "update/explained_variance": explained_variance(batch)}


def why_not_finite(name: str, loss: Loss, values: Tensor, outputs: Outputs) -> str:
    """One sentence: the model's own outputs are no numbers any more, or this loss makes none of them."""
    if any(bool(output.isnan().any()) for output in vars(outputs).values()):
        return f"loss.{name}: the model's outputs are not finite; lower algo.update.learning_rate or a loss weight"
    wrong = int((~values.isfinite()).sum())
    return (
        f"loss.{name}: {type(loss).__name__} returned {float(values.sum())}, not finite at {wrong} of {values.numel()} "
        "places; mend the term, or lower algo.update.learning_rate or its weight"
    )


def explained_variance(batch: TokenBatch) -> float:
    """1 - Var(return - value) / Var(return) of the critic that played; 0 where returns don't vary."""
    returns, values = batch.returns[batch.decision], batch.values[batch.decision]
    variance = returns.var() if len(returns) > 1 else torch.tensor(0.0)
    return float(1 - (returns - values).var() / variance) if float(variance) > 0 else 0.0


class _Means:
    """Running means by name."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    def add(self, name: str, total: float, count: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0.0) + count

    def take(self, other: _Means) -> None:
        for name, total in other.sums.items():
            self.add(name, total, other.counts[name])

    def over(self, ranks: Ranks) -> _Means:
        """Of all ranks together."""
        whole = _Means()
        for part in ranks.objects(self):
            whole.take(part)
        return whole

    def mean(self, name: str) -> float:
        return self.sums.get(name, 0.0) / max(self.counts.get(name, 0.0), 1.0)

    def means(self) -> dict[str, float]:
        return {name: self.mean(name) for name in self.sums}


def _diagnose(totals: _Means, batch: TokenBatch, outputs: Outputs) -> None:
    """approx_kl (k3, Schulman 2020) and clipfrac (beyond 0.2) of reply tokens against the policy that played."""
    mask = batch.reply
    ratio = (outputs.logprobs.detach() - batch.logprobs)[mask]
    totals.add("update/approx_kl", float((ratio.exp() - 1 - ratio).sum()), int(mask.sum()))
    totals.add("update/clipfrac", float(((ratio.exp() - 1).abs() > 0.2).float().sum()), int(mask.sum()))

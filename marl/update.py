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

from marl.errors import UserError, naming
from marl.grouping import cheapest_groups
from marl.kernels import round_up
from marl.losses import Loss, Outputs, needs_reference
from marl.optim import OPTIMIZERS, Optimizer
from marl.policy import Policy, choice_logits, recomputing
from marl.ranks import ONE, Ranks
from marl.renaming import Renaming
from marl.sharding import Shards, is_split
from marl.sharding import whole as whole_tensor
from marl.types import Kind, TokenBatch
from marl.varlen import check_varlen, compiled, varlen


@dataclass(frozen=True)
class UpdateConfig:
    """`minibatches` a pass, `epochs` passes; `token_budget` padded tokens in one forward pass (memory only)."""

    optimizer: str = "adamw"
    learning_rate: float = 5e-4
    epochs: int = 1
    minibatches: int = 4
    rows: int | None = None  # rows of a minibatch, instead of their number
    max_grad_norm: float = 0.5
    weight_decay: float = 0.0
    token_budget: int = 2048
    target_kl: float | None = None  # stop the passes once approx_kl exceeds it
    temperature: float = 1.0  # set by the loops to the rollout's: the distribution that was sampled is the one scored
    bf16: bool = False  # autocast the forward pass; log-probabilities stay in float32
    gradient_checkpointing: bool = False  # compute activations again in the backward pass: memory and speed only
    padding_free: bool = False  # rows one behind the other, by attention that knows where each begins: speed only

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


def forward(
    policy: Policy,
    batch: TokenBatch,
    temperature: float,
    reads: Mapping[str, bool],
    reference: Policy | None = None,
    padding_free: bool = False,
) -> Outputs:
    """One pass over a batch. `reads` maps each needed part of the outputs to whether it is trained; `divergence` is
    that from `reference`. `padding_free`: within `reading_rows`, so that padding is not read.

    Parts are computed apart from one another, and those that are not trained without gradient, so that measuring a part
    changes no bit of the others.
    """
    lengths = batch.lengths if padding_free else None
    hidden = policy.hidden(batch.tokens, lengths)  # (B, T, D)
    before = hidden[:, :-1]  # the state that predicts token t stands at t - 1
    zeros = torch.zeros(batch.tokens.shape, device=hidden.device)
    outputs = Outputs(zeros, zeros, zeros, torch.zeros(0, 1, device=hidden.device), zeros)
    if "reply" in reads:
        with torch.set_grad_enabled(torch.is_grad_enabled() and reads["reply"]):
            mask = batch.reply[:, 1:]
            logprobs = reply_logprobs(policy, hidden, batch, temperature)  # (M, V)
            own = logprobs.gather(1, batch.tokens[:, 1:][mask][:, None])[:, 0]
            entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)
            outputs.logprobs = scatter(zeros, mask, own)
            outputs.entropy = scatter(zeros, mask, entropy)
    if "divergence" in reads:
        assert reference is not None, "a divergence is from a reference"
        there = batch.to(reference.device)
        with torch.no_grad():
            states = reference.hidden(there.tokens, there.lengths if padding_free else None)
            theirs = reply_logprobs(reference, states, there, temperature).to(hidden.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and reads["divergence"]):
            ours = reply_logprobs(policy, hidden, batch, temperature)  # (M, V)
            gaps = (ours - theirs).masked_fill(ours == -torch.inf, 0.0)  # what is never sampled is so for both
            outputs.divergence = scatter(zeros, batch.reply[:, 1:], (ours.exp() * gaps).sum(-1))
    if "values" in reads:
        with torch.set_grad_enabled(torch.is_grad_enabled() and reads["values"]):
            mask = batch.decision[:, 1:]
            facts = batch.privileged[mask.nonzero()[:, 0]]
            outputs.values = scatter(zeros, mask, policy.value(before[mask], facts))
    if "planned" in reads:
        with torch.set_grad_enabled(torch.is_grad_enabled() and reads["planned"]):
            mask = batch.planned[:, 1:]
            ids = batch.plan_ids[:, 1:][mask]  # (M, P)
            theirs = reply_logprobs(policy, hidden, batch, temperature, mask).gather(1, ids.clamp_min(0))
            outputs.planned = torch.zeros(batch.plan.shape, device=hidden.device)
            outputs.planned[:, 1:][mask] = theirs.masked_fill(ids < 0, -torch.inf)
    if "beliefs" in reads and (len(batch.row) or is_split(policy)):
        with torch.set_grad_enabled(torch.is_grad_enabled() and reads["beliefs"]):
            logits = policy.logits(hidden[batch.row, batch.position])  # (N, V)
            scores = logits.gather(1, batch.candidates.clamp_min(0))
            outputs.beliefs = scores.masked_fill(batch.candidates < 0, -torch.inf).log_softmax(-1)  # (N, K)
    if "observed" in reads:
        with torch.set_grad_enabled(torch.is_grad_enabled() and reads["observed"]):
            mask = (batch.kind == Kind.OBSERVATION)[:, 1:]
            logprobs = policy.logits(before[mask]).log_softmax(-1)
            outputs.observed = scatter(zeros, mask, logprobs.gather(1, batch.tokens[:, 1:][mask][:, None])[:, 0])
    return outputs


def reply_logprobs(
    policy: Policy, hidden: Tensor, batch: TokenBatch, temperature: float, mask: Tensor | None = None
) -> Tensor:
    """(M, V): what each of the batch's M reply tokens was sampled from, by the policy that has these states. `mask`:
    (B, T - 1), which of them; all."""
    mask = batch.reply[:, 1:] if mask is None else mask
    logits = policy.logits(hidden[:, :-1][mask])
    shaped = policy.speech_logits(logits, temperature)
    chosen = (batch.kind == Kind.CHOICE)[:, 1:][mask]
    if bool(chosen.any()):
        shaped = shaped.clone()
        shaped[chosen] = choice_logits(logits[chosen], batch.legal[:, 1:][mask][chosen], temperature)
    return shaped.log_softmax(-1)


def scatter(zeros: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """Puts the values (M,) back at the mask's places, shifted to the tokens that they describe: (B, T)."""
    result = zeros.clone()
    result[:, 1:][mask] = values.float()
    return result


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


def ends(where: Tensor) -> Tensor:
    """(B,) int64: how many tokens of each row there are up to the last marked one of (B, T) bool; 0 without any."""
    places = torch.arange(1, where.shape[1] + 1, device=where.device)
    return (where * places).amax(1) if where.shape[1] else where.sum(1)


def last_questions(batch: TokenBatch) -> Tensor:
    """(B,) int64: how many tokens of each row there are up to its last belief question; 0 where it is asked nothing."""
    asked = torch.zeros(batch.shape, dtype=torch.bool)
    asked[batch.row, batch.position] = True
    return ends(asked)


def micro_batches(
    batch: TokenBatch, rows: Tensor, token_budget: int, ranks: Ranks = ONE, lengths: Tensor | None = None
) -> list[Tensor]:
    """Splits rows, or this rank's share, into groups of similar length whose padded size stays within the budget.
    `lengths` (B,) int64: how many tokens of each row are read; all.

    Of the ways to do so the cheapest, where a pass costs as much as a sixteenth of the budget beside its tokens
    (measured on a CPU at 2,048; an eighth to a thirty-second did as well). All ranks get the same number of groups;
    where the rows don't go round, the last ones are empty on some.
    """
    lengths = (batch.lengths if lengths is None else lengths)[rows]
    order = torch.argsort(lengths, descending=True, stable=True).tolist()
    # Rows of similar length, one for each rank; the longest is what the others are padded to.
    sets = [order[place : place + ranks.size] for place in range(0, len(order), ranks.size)]
    groups = cheapest_groups([int(lengths[each[0]]) for each in sets], token_budget, token_budget / 16)
    own = [[int(rows[i]) for place in group for i in ranks.share(sets[place])] for group in groups]
    return [torch.tensor(group, dtype=torch.int64) for group in own]


def passes(
    policy: Policy, batch: TokenBatch, rows: Tensor, lengths: Tensor, config: UpdateConfig, ranks: Ranks
) -> Iterator[tuple[TokenBatch, int]]:
    """What this rank reads of these rows, pass after pass, on the policy's device, and how many of them it is."""
    lengths = padded(lengths, batch, config, policy.device)
    for micro in micro_batches(batch, rows, config.token_budget, ranks, lengths):
        if len(micro):
            yield batch.select(micro, int(lengths[micro].max())).to(policy.device), len(micro)
        elif is_split(policy):
            yield blank(batch).to(policy.device), 0


def padded(lengths: Tensor, batch: TokenBatch, config: UpdateConfig, device: torch.device) -> Tensor:
    """(B,) int64: as how many tokens rows of these lengths are read: as they are.

    In bfloat16 on a CPU as up to an eighth more, since kernels are made there for every new shape: so there are eight
    lengths from one power of two to the next. At 1,024 tokens an update took .90 of the time and .87 of the memory.
    """
    if not config.bf16 or config.padding_free or device.type != "cpu":
        return lengths
    return torch.tensor([round_up(n) for n in lengths.tolist()], dtype=torch.int64).clamp_max(batch.shape[1])


def blank(batch: TokenBatch) -> TokenBatch:
    """A row of padding, of which no loss reads anything: a pass that a rank makes because the others do."""
    row = batch.select(torch.tensor([0]))
    nothing = {name: torch.zeros_like(getattr(row, name)) for name in ("decision", "body", "imitate")}
    no_question = {name: getattr(row, name)[:0] for name in ("row", "position", "candidates", "answer", "also")}
    nothing["plan_ids"] = torch.full_like(row.plan_ids, -1)
    return replace(row, kind=torch.full_like(row.kind, int(Kind.PAD)), **nothing, **no_question)


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


def count_tokens(batch: TokenBatch, losses: Mapping[str, Loss]) -> dict[str, int]:
    """How many places each loss averages over in a whole minibatch."""
    return {name: int(places(batch, name, loss).sum()) for name, loss in losses.items()}


def places(batch: TokenBatch, name: str, loss: Loss) -> Tensor:
    """The loss's mask, which no output changes."""
    zeros = torch.zeros(batch.tokens.shape)
    width = max(batch.candidates.shape[1], 1)
    beliefs = torch.zeros(len(batch.row), width)
    outputs = Outputs(zeros, zeros, zeros, beliefs, zeros, torch.zeros_like(batch.plan), zeros)
    return returned(batch, name, loss, outputs)[1]


def returned(batch: TokenBatch, name: str, loss: Loss, outputs: Outputs) -> tuple[Tensor, Tensor]:
    """The loss's values and their mask. UserError, naming the loss, where it raises or returns anything else."""
    with naming(f"loss.{name}", loss):
        found: object = loss(batch, outputs)
    parts = list(found) if isinstance(found, tuple | list) else [found]
    match parts:
        case [Tensor() as values, Tensor(dtype=torch.bool) as mask] if values.shape == mask.shape:
            return values, mask
    told = " and ".join(
        f"Tensor {tuple(part.shape)} of {part.dtype}" if isinstance(part, Tensor) else type(part).__name__
        for part in parts
    )
    raise UserError(
        f"loss.{name}: {type(loss).__name__} returned {told or 'nothing'}; must be values and a bool mask of the same "
        f"shape, here {batch.shape} if there is one for each token, ({len(batch.row)},) for each belief question"
    )


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

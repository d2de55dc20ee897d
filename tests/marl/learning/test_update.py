"""The update: what is summed, over what it is divided, and what a term of weight 0 does (nothing, to the last bit)."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from marl.algorithms.ppo import PPOConfig, train_ppo
from marl.common.errors import UserError
from marl.learning.advantages import Credit
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.micro_batches import micro_batches
from marl.learning.update import Learner, add_reference, explained_variance, update
from marl.losses.imitation import ImitationLoss
from marl.losses.policy import PolicyLoss
from marl.losses.value import ValueLoss
from marl.losses.world_model import WorldModelLoss
from marl.model.policy import Policy
from marl.rewards import Reward
from marl.rewards.game import GameReward
from marl.rewards.speaking import SpeakingReward
from marl.types import Kind, TokenBatch
from tests.marl.hint import hint_policy, training
from tests.marl.updates import READS, TERMS, all_played, another, identical, noisy, played, trained, weights_of


# -- sums and counts ---------------------------------------------------------------------------------------------------
def whole_minibatch(policy: Policy, batch: TokenBatch, rows: Tensor) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Every term as a plain mean over the minibatch in one pass, and the gradient of their weighted sum."""
    part = batch.select(rows)
    outputs = forward(policy, part, 1.0, {**READS, "divergence": True}, another())
    means = {}
    for name, loss in TERMS.items():
        values, mask = loss(part, outputs)
        means[name] = values[mask].mean() if bool(mask.any()) else values.sum() * 0
    policy.zero_grad()
    torch.stack([TERMS[name].weight * mean for name, mean in means.items()]).sum().backward()
    return {n: float(m.detach()) for n, m in means.items()}, {n: p.grad for n, p in policy.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize("token_budget", [1, 40])
def test_each_term_is_its_mean_over_the_minibatch_however_it_is_cut(token_budget: int) -> None:
    """Plain gradient descent at rate 1: the step is the gradient."""
    policy, batch = played()
    reference = another()
    config = UpdateConfig(minibatches=1, max_grad_norm=1e9, token_budget=token_budget)
    batch = add_reference(batch, reference, config)
    means, gradient = whole_minibatch(copy.deepcopy(policy), batch, torch.arange(24))
    before = weights_of(policy)
    metrics = update(policy, reference, batch, TERMS, torch.optim.SGD(policy.parameters(), lr=1.0), config,
                     torch.Generator().manual_seed(0))  # fmt: skip
    for name, mean in means.items():
        assert metrics[f"loss/{name}"] == pytest.approx(mean, abs=1e-6), name
    for name, weight in policy.named_parameters():
        torch.testing.assert_close(before[name] - weight, gradient[name], atol=2e-6, rtol=1e-4)
    assert max(float(g.abs().max()) for g in gradient.values()) > 1e-2


def test_two_minibatches_are_two_steps_each_with_its_own_counts() -> None:
    rows = 5
    policy, batch = played()
    reference = another()
    batch = add_reference(batch, reference, UpdateConfig()).select(torch.arange(rows))
    by_hand = copy.deepcopy(policy)
    totals: dict[str, float] = {}
    counts: dict[str, int] = {}
    for part in torch.randperm(rows, generator=torch.Generator().manual_seed(7)).chunk(2):
        means, gradient = whole_minibatch(by_hand, batch, part)
        chosen = batch.select(part)
        for name, loss in TERMS.items():
            blank = forward(by_hand, chosen, 1.0, READS)
            count = int(loss(chosen, blank)[1].sum())
            totals[name] = totals.get(name, 0.0) + means[name] * count
            counts[name] = counts.get(name, 0) + count
        with torch.no_grad():
            for name, weight in by_hand.named_parameters():
                weight.sub_(0.05 * gradient[name])
    config = UpdateConfig(minibatches=2, max_grad_norm=1e9, token_budget=30)
    metrics = update(policy, reference, batch, TERMS, torch.optim.SGD(policy.parameters(), lr=0.05), config,
                     torch.Generator().manual_seed(7))  # fmt: skip
    for name, weight in policy.named_parameters():
        torch.testing.assert_close(weight, dict(by_hand.named_parameters())[name], atol=1e-6, rtol=1e-5)
    for name in TERMS:
        assert metrics[f"loss/{name}"] == pytest.approx(totals[name] / counts[name], rel=2e-6, abs=1e-6), name


def test_micro_batches_hold_every_row_once_within_the_budget() -> None:
    _, batch = all_played()
    lengths = (batch.kind != Kind.PAD).sum(1)
    rows = torch.tensor([23, 0, 5, 7, 11, 2, 1])
    for budget in (1, 10, 30, 1000):
        groups = micro_batches(batch, rows, budget)
        assert sorted(r for g in groups for r in g.tolist()) == sorted(rows.tolist())
        for group in groups:
            assert len(group) == 1 or len(group) * int(lengths[group].max()) <= budget


def test_a_long_gradient_is_shortened() -> None:
    policy, batch = played()
    before = weights_of(policy)
    metrics = update(policy, None, batch, {"world_model": WorldModelLoss(weight=1.0)},
                     torch.optim.SGD(policy.parameters(), lr=1.0), UpdateConfig(minibatches=1, max_grad_norm=0.01),
                     torch.Generator().manual_seed(0))  # fmt: skip
    step = torch.cat([(before[name] - weight.detach()).flatten() for name, weight in policy.named_parameters()])
    assert metrics["update/grad_norm"] > 0.1 and float(step.norm()) == pytest.approx(0.01, rel=1e-2)


def test_a_loss_without_tokens_is_not_logged() -> None:
    """A logged 0 would look as if everything had been learned."""
    policy, batch = played()
    nothing = replace(batch, imitate=torch.zeros_like(batch.imitate))
    metrics = update(policy, None, nothing, {"imitation": ImitationLoss(1.0), "policy": PolicyLoss()},
                     torch.optim.SGD(policy.parameters(), lr=0.1), UpdateConfig(minibatches=2),
                     torch.Generator().manual_seed(0))  # fmt: skip
    assert "loss/policy" in metrics and "loss/imitation" not in metrics


# -- weight 0 ----------------------------------------------------------------------------------------------------------
@cache
def with_all_terms() -> dict[str, Tensor]:
    return trained(TERMS)


@pytest.mark.parametrize("name", TERMS)
def test_a_term_of_weight_zero_is_a_term_that_is_absent(name: str) -> None:
    without = trained({other: loss for other, loss in TERMS.items() if other != name})
    assert identical(trained({**TERMS, name: replace(TERMS[name], weight=0.0)}), without)  # type: ignore[type-var]
    assert not identical(with_all_terms(), without)  # and it would have made a difference


def test_the_same_update_gives_the_same_bits() -> None:
    assert identical(with_all_terms(), trained(TERMS))
    assert not identical(with_all_terms(), trained(TERMS, seed=1))  # another order of rows


def test_terms_of_weight_zero_are_measured_and_change_nothing() -> None:
    """Weight decay must not move the parameters either."""
    policy, batch = played()
    reference, before = another(), weights_of(policy)
    silent = {name: replace(loss, weight=0.0) for name, loss in TERMS.items()}  # type: ignore[type-var]
    config = UpdateConfig(minibatches=1)
    means, _ = whole_minibatch(copy.deepcopy(policy), add_reference(batch, reference, config), torch.arange(24))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.1)
    metrics = update(policy, reference, batch, silent, optimizer, config, torch.Generator().manual_seed(0))
    assert {name: metrics[f"loss/{name}"] for name in TERMS} == pytest.approx(means, abs=1e-6)
    assert metrics["update/grad_norm"] == 0.0 and identical(weights_of(policy), before)


def test_what_weight_zero_measures_may_even_be_infinite() -> None:
    _, batch = all_played()
    endless = replace(batch, advantages=torch.where(batch.reply, -torch.inf, 0.0))
    without = {name: loss for name, loss in TERMS.items() if name != "policy"}
    assert identical(trained({**TERMS, "policy": PolicyLoss(weight=0.0)}, endless), trained(without))


@pytest.mark.parametrize("speech", ["common", "separate_only"])
def test_a_reward_of_weight_zero_is_a_reward_that_is_absent(speech: str) -> None:
    def after(rewards: dict[str, Reward]) -> dict[str, Tensor]:
        policy = noisy(hint_policy(2), 2)
        config = PPOConfig(
            iterations=2, games=8, concurrency=8, max_new_tokens=2, context=32, credit=Credit(speech=speech),
            update=UpdateConfig(minibatches=2),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        losses = {name: loss for name, loss in TERMS.items() if name != "plan"}  # in this game there is nothing to plan
        one = Learner("learner", policy, copy.deepcopy(policy), optimizer)
        train_ppo(training([one], losses, rewards=rewards), config)
        return weights_of(policy)

    game = GameReward(scale=1.0)
    absent = after({"game": game})
    assert identical(after({"game": game, "speaking": SpeakingReward(weight=0.0)}), absent)
    assert not identical(after({"game": game, "speaking": SpeakingReward(weight=0.5)}), absent)


@pytest.mark.parametrize("without", ["decisions", "both"])
def test_minibatches_without_decisions_or_questions_are_harmless(without: str) -> None:
    """Every minibatch is one row, so that many have no tokens for some term."""
    policy, batch = played()
    if without != "decisions":
        none = torch.zeros(0, dtype=torch.int64)
        batch = replace(batch, row=none, position=none, candidates=torch.zeros(0, 2, dtype=torch.int64), answer=none,
                        vote=torch.zeros(0, dtype=torch.bool), also=torch.zeros(0, 0, dtype=torch.int64))  # fmt: skip
    if without != "questions":
        blank = torch.zeros_like(batch.decision)
        kind = torch.where(batch.reply, torch.tensor(Kind.OBSERVATION, dtype=torch.int8), batch.kind)
        batch = replace(batch, kind=kind, decision=blank, body=blank, message=blank, imitate=blank)
    after = trained(TERMS, batch, minibatches=24)
    assert all(bool(torch.isfinite(w).all()) for w in after.values()) and not identical(after, weights_of(policy))


# -- steps -------------------------------------------------------------------------------------------------------------
class Counting(torch.optim.SGD):
    steps = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.steps += 1
        super().step()


def test_epochs_and_minibatches_are_steps_and_rows_are_told() -> None:
    policy, batch = played()
    optimizer = Counting(policy.parameters(), lr=1e-3)
    reports: list[int] = []
    update(policy, None, batch, {"value": ValueLoss()}, optimizer, UpdateConfig(epochs=3, minibatches=4),
           torch.Generator().manual_seed(0), reports.append)  # fmt: skip
    assert optimizer.steps == 12 and sum(reports) == 3 * 24
    update(policy, None, batch, {"value": ValueLoss()}, optimizer, UpdateConfig(minibatches=100), torch.Generator())
    assert optimizer.steps == 12 + 24  # no more minibatches than rows
    update(policy, None, batch, {"value": ValueLoss()}, optimizer, UpdateConfig(minibatches=10), torch.Generator())
    assert optimizer.steps == 12 + 24 + 10  # also where they don't divide the rows


def test_target_kl_stops_the_passes() -> None:
    def steps(target_kl: float | None) -> int:
        policy, batch = played()
        optimizer = Counting(policy.parameters(), lr=1.0)
        config = UpdateConfig(epochs=5, minibatches=2, max_grad_norm=1.0, target_kl=target_kl)
        update(policy, None, batch, {"policy": PolicyLoss()}, optimizer, config, torch.Generator().manual_seed(0))
        return optimizer.steps

    assert steps(None) == 10 and steps(1e9) == 10
    assert 2 <= steps(1e-4) < 10


def test_a_gradient_that_is_not_finite_is_an_error_before_any_step() -> None:
    policy, batch = played()
    advantages = batch.advantages.clone()
    advantages[batch.reply.nonzero(as_tuple=True)[0][0], batch.reply.nonzero(as_tuple=True)[1][0]] = float("inf")
    before = weights_of(policy)
    with pytest.raises(UserError, match=r"not finite.*learning_rate"):
        optimizer, losses = torch.optim.SGD(policy.parameters(), lr=1.0), {"policy": PolicyLoss()}
        spoiled = replace(batch, advantages=advantages)
        update(policy, None, spoiled, losses, optimizer, UpdateConfig(minibatches=1), torch.Generator())
    assert identical(weights_of(policy), before)


def test_explained_variance_by_hand() -> None:
    _, batch = all_played()
    at = batch.decision
    returns = torch.zeros_like(batch.returns)
    returns[at] = torch.arange(24.0)
    assert explained_variance(replace(batch, returns=returns, values=returns)) == 1.0
    assert explained_variance(replace(batch, returns=returns, values=returns * 0)) == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(replace(batch, returns=returns, values=0.5 * returns)) == pytest.approx(0.75, abs=1e-6)
    assert explained_variance(replace(batch, returns=returns, values=-returns)) == pytest.approx(-3.0, abs=1e-5)
    assert explained_variance(replace(batch, returns=at.float())) == 0.0  # nothing to explain

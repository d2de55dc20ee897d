"""The update: what is summed, over what it is divided, and what a term of weight 0 does (nothing, to the last bit)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from marl.agents.model import ModelAgent
from marl.algorithms.ppo import PPOConfig, train_ppo
from marl.common.errors import UserError
from marl.kernels.varlen import _COMPILED
from marl.learning.advantages import Credit, add_advantages
from marl.learning.batch import collate, seats_of
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.micro_batches import blank, micro_batches, padded
from marl.learning.update import Learner, add_reference, explained_variance, make_optimizer, update
from marl.losses import Loss, Outputs, count_tokens
from marl.losses.entropy import EntropyLoss
from marl.losses.imitation import ImitationLoss
from marl.losses.kl import KLLoss
from marl.losses.listening import ListeningLoss
from marl.losses.plan import PlanLoss
from marl.losses.policy import PolicyLoss
from marl.losses.value import ValueLoss
from marl.losses.world_model import WorldModelLoss
from marl.metrics.training import Progress
from marl.model.policy import Policy
from marl.rewards import Reward, add_rewards
from marl.rewards.game import GameReward
from marl.rewards.speaking import SpeakingReward
from marl.rollout.cast import Seats
from marl.rollout.rollout import rollout
from marl.rollout.seeds import Game, Seeds, draw_games
from marl.types import Episode, Kind, Planned, TokenBatch, Turn
from tests.marl.hint import Hint, hint_policy
from tests.marl.models import hf_policy, small_tokens

TERMS: dict[str, Loss] = {
    "policy": PolicyLoss(weight=1.0),
    "value": ValueLoss(weight=0.5),
    "entropy": EntropyLoss(weight=0.01),
    "kl": KLLoss(weight=0.05),
    "listening": ListeningLoss(weight=0.3),
    "world_model": WorldModelLoss(weight=0.1),
    "imitation": ImitationLoss(weight=0.2),
    "plan": PlanLoss(weight=0.2),
    "exact": KLLoss(weight=0.05, estimator="exact", over="both"),
}
READS = {"reply": True, "values": True, "beliefs": True, "observed": True, "planned": True}
WEIGHTS = {"game": 1.0, "speaking": 0.5}


def noisy(policy: Policy, seed: int) -> Policy:
    """The same model with weights far enough from their start that every token matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.15 * torch.randn(weight.shape, generator=generator))
    return policy.eval()


def another() -> Policy:
    """The reference."""
    return noisy(hint_policy(0, privileged_size=2), 1)


def play(policy: Policy, games: int, temperature: float = 1.0, reference: Policy | None = None) -> list[Episode]:
    """Games of hints; with a reference it holds one seat in each."""
    learner = ModelAgent(
        "learner", policy, slots=2 * games, context=policy.context, max_new_tokens=3, temperature=temperature
    )
    agents = {"learner": learner}
    if reference is not None:
        agents["base"] = ModelAgent("base", reference, slots=games, context=reference.context, max_new_tokens=3)

    def cast(game: Game, env: Any) -> dict[str, ModelAgent]:
        frozen = env.possible_agents[game.seed % 2] if reference is not None else ""
        return {agent: agents["base" if agent == frozen else "learner"] for agent in env.possible_agents}

    episodes = rollout(draw_games(3, 1, count=games), cast, Hint, games)
    return add_rewards(episodes, {"game": GameReward(scale=1.0), "speaking": SpeakingReward()})


def planned(episode: Episode) -> Episode:
    """A plan noted beside every choice: whatever was seen, the first option three times as often as the second."""

    def noted(turn: Turn) -> Turn:
        if not turn.legal:
            return turn
        options = tuple((i,) for i in turn.legal)
        chosen = turn.legal.index(turn.reply_ids[0])
        plan = Planned(("red", "blue"), options, (0.5, 0.5), (1.0, 0.0), (0.75, 0.25), chosen, played=False)
        return replace(turn, planned=plan)

    return replace(episode, turns=tuple(map(noted, episode.turns)))


def to_batch(episodes: list[Episode], players: tuple[str, ...] = ("learner",)) -> TokenBatch:
    batch = collate(
        seats_of(episodes, players), WEIGHTS, separate_speech=True, privileged=lambda e, agent: e.privileged[agent],
        imitate=lambda e, agent: bool(e.outcome["right"]),
    )  # fmt: skip
    return add_advantages(batch, Credit(), WEIGHTS["speaking"])


@cache
def _played() -> tuple[Policy, TokenBatch]:
    policy = noisy(hint_policy(0, privileged_size=2), 0)
    return policy, to_batch([planned(episode) for episode in play(policy, 12)])


def played() -> tuple[Policy, TokenBatch]:
    """A policy of the caller's own, and 24 rows that it played: speech of one to three tokens, choices, questions."""
    policy, batch = _played()
    return copy.deepcopy(policy), batch


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


def identical(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def trained(losses: Mapping[str, Loss], batch: TokenBatch | None = None, **settings: object) -> dict[str, Tensor]:
    """The weights after two minibatches of AdamW, as in a process of its own."""
    _COMPILED.clear()
    policy, own = played()
    reference = another()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.1)
    config = UpdateConfig(**{"minibatches": 2, "token_budget": 64, **settings})  # type: ignore[arg-type]
    update(policy, reference, batch or own, losses, optimizer, config, torch.Generator().manual_seed(0))
    return weights_of(policy)


def test_the_batch_holds_every_kind_of_token() -> None:
    _, batch = _played()
    for kind in (Kind.OBSERVATION, Kind.QUESTION, Kind.CHOICE, Kind.SPEECH, Kind.PAD):
        assert int((batch.kind == kind).sum()) >= 3, kind
    assert batch.imitate.any() and (batch.reply & ~batch.imitate).any() and batch.body.any() and batch.advantages.any()


# -- the distribution that was sampled ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_and_trainer_agree(temperature: float) -> None:
    policy = noisy(hint_policy(1, privileged_size=2), 1)
    episodes = play(policy, 12, temperature)
    batch = to_batch(episodes)
    with torch.no_grad():
        outputs = forward(policy, batch, temperature, READS)
        other = forward(policy, batch, 0.9, READS)
    assert float((outputs.logprobs - batch.logprobs).abs().max()) < 1e-4
    assert float((outputs.values - batch.values).abs().max()) < 1e-4 and batch.values.any()
    assert float((other.logprobs - batch.logprobs).abs().max()) > 1e-2  # another temperature is another distribution
    beliefs = [b for e, a in seats_of(episodes, {"learner"}) for b in e.beliefs if b.listener == a]
    assert len(beliefs) == len(batch.row) == 24
    for n, belief in enumerate(beliefs):
        assert outputs.beliefs[n].exp().tolist() == pytest.approx(belief.probs.tolist(), abs=1e-4)


def test_entropy_is_that_of_the_sampled_distribution() -> None:
    policy, batch = played()
    with torch.no_grad():
        outputs = forward(policy, batch, 0.5, READS)
        logits = policy.logits(policy.hidden(batch.tokens))
    for b, t in batch.reply.nonzero().tolist():
        scores = (logits[b, t - 1] / 0.5).double()
        if batch.kind[b, t] == Kind.CHOICE:
            probs = scores[batch.legal[b, t]].softmax(-1)
        else:
            scores[policy.tokens.unspeakable] = -torch.inf
            probs = scores.softmax(-1)
        entropy = -sum(p * p.log() for p in probs if p > 0)
        assert float(outputs.entropy[b, t]) == pytest.approx(float(entropy), abs=1e-4)
    assert not outputs.entropy[~batch.reply].any() and not outputs.logprobs[~batch.reply].any()


def test_the_exact_divergence_is_that_of_the_sampled_distributions() -> None:
    policy, batch = played()
    reference = another()
    with torch.no_grad():
        found = forward(policy, batch, 0.5, {"divergence": True}, reference).divergence
        logits = [model.logits(model.hidden(batch.tokens)) for model in (policy, reference)]
    for b, t in batch.reply.nonzero().tolist():
        p, q = ((each[b, t - 1] / 0.5).double() for each in logits)
        if batch.kind[b, t] == Kind.CHOICE:
            p, q = p[batch.legal[b, t]].softmax(-1), q[batch.legal[b, t]].softmax(-1)
        else:
            said = torch.ones(len(p), dtype=torch.bool)
            said[policy.tokens.unspeakable] = False
            p, q = p[said].softmax(-1), q[said].softmax(-1)
        assert float(found[b, t]) == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-4)
    assert not found[~batch.reply].any() and float(found.max()) > 0.1


def test_the_first_minibatch_is_on_policy() -> None:
    policy, batch = played()
    metrics = update(policy, None, batch, {"policy": PolicyLoss()}, torch.optim.SGD(policy.parameters(), lr=0.1),
                     UpdateConfig(minibatches=1), torch.Generator().manual_seed(0))  # fmt: skip
    assert abs(metrics["update/approx_kl"]) < 1e-7 and metrics["update/clipfrac"] == 0.0
    assert metrics["loss/policy"] == pytest.approx(-float(batch.advantages[batch.reply].mean()), abs=1e-5)
    assert metrics["update/grad_norm"] > 0


def test_models_with_dropout_are_on_policy_too(tmp_path: Path) -> None:
    """GPT-2 drops a tenth of everything in training mode: then the ratio would not be 1, nor a run repeatable."""
    policy = hf_policy(tmp_path / "gpt2", "gpt2")
    assert policy.lm.config.resid_pdrop > 0
    batch = to_batch(play(policy, 3))
    before = torch.get_rng_state()
    metrics = update(policy, None, batch, {"policy": PolicyLoss()}, torch.optim.SGD(policy.parameters(), lr=0.0),
                     UpdateConfig(minibatches=1), torch.Generator().manual_seed(0))  # fmt: skip
    assert abs(metrics["update/approx_kl"]) < 1e-6 and metrics["update/clipfrac"] == 0.0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_activations_that_are_computed_again_give_the_same_weights(name: str, tmp_path: Path) -> None:
    """Also where a model has dropout, of its own (GPT-2) or in its layers' code (OPT), which must stay off."""
    if name == "opt":
        lm: PreTrainedModel = OPTForCausalLM(
            OPTConfig(vocab_size=small_tokens().size, hidden_size=32, ffn_dim=64, num_hidden_layers=2,
                      num_attention_heads=2, max_position_embeddings=256, word_embed_proj_dim=32, dropout=0.1)
        )  # fmt: skip
        policy = Policy(lm, small_tokens()).eval()
    else:
        policy = hf_policy(tmp_path / name, name)
    batch, reference = to_batch(play(policy, 3)), noisy(copy.deepcopy(policy), 1)
    ends, passes = [], []
    for again in (False, True):
        learner, read = copy.deepcopy(policy), []
        first = next(module for module in learner.lm.modules() if isinstance(module, GradientCheckpointingLayer))
        next(first.children()).register_forward_pre_hook(lambda *_, read=read: read.append(1))
        config = UpdateConfig(minibatches=1, token_budget=1 << 20, gradient_checkpointing=again)
        optimizer = make_optimizer(learner, config)
        update(learner, reference, batch, TERMS, optimizer, config, torch.Generator().manual_seed(0))
        ends.append(weights_of(learner))
        passes.append(len(read))
        assert not any(module.training for module in learner.modules())
        assert "forward" not in vars(first)  # nothing is left switched on
    assert identical(*ends) and not identical(ends[0], weights_of(policy))
    assert passes == [1, 2]


def test_a_model_whose_activations_cannot_be_computed_again_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _ = played()
    monkeypatch.setattr("marl.model.policy.GradientCheckpointingLayer", RuntimeError)  # a model without any
    with pytest.raises(UserError, match=r"gradient_checkpointing=true: not with LlamaForCausalLM; leave it out"):
        make_optimizer(policy, UpdateConfig(gradient_checkpointing=True))
    make_optimizer(policy, UpdateConfig())


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


@pytest.mark.parametrize("token_budget", [1, 40, 100_000])
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


@pytest.mark.parametrize("rows", [8, 5])
def test_two_minibatches_are_two_steps_each_with_its_own_counts(rows: int) -> None:
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


def test_no_term_reads_anything_of_a_blank_row() -> None:
    _, batch = played()
    assert min(count_tokens(batch, TERMS).values()) > 0
    assert set(count_tokens(blank(batch), TERMS).values()) == {0}


def test_micro_batches_hold_every_row_once_within_the_budget() -> None:
    _, batch = _played()
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
    metrics = update(
        policy,
        None,
        batch,
        {"world_model": WorldModelLoss(weight=1.0)},
        torch.optim.SGD(policy.parameters(), lr=1.0),
        UpdateConfig(minibatches=1, max_grad_norm=0.01),
        torch.Generator().manual_seed(0),
    )
    step = torch.cat([(before[name] - weight.detach()).flatten() for name, weight in policy.named_parameters()])
    assert metrics["update/grad_norm"] > 0.1 and float(step.norm()) == pytest.approx(0.01, rel=1e-2)


# -- weight 0 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TERMS)
def test_a_term_of_weight_zero_is_a_term_that_is_absent(name: str) -> None:
    without = {other: loss for other, loss in TERMS.items() if other != name}
    measured = {**TERMS, name: replace(TERMS[name], weight=0.0)}  # type: ignore[type-var]
    assert identical(trained(measured), trained(without))
    assert not identical(trained(TERMS), trained(without))  # and it would have made a difference


@pytest.mark.parametrize("name", TERMS)
def test_a_term_alone_at_weight_zero_changes_nothing(name: str) -> None:
    """Not even by weight decay."""
    policy, _ = played()
    assert identical(trained({name: replace(TERMS[name], weight=0.0)}), weights_of(policy))  # type: ignore[type-var]


def test_terms_of_weight_zero_are_measured() -> None:
    policy, batch = played()
    reference = another()
    silent = {name: replace(loss, weight=0.0) for name, loss in TERMS.items()}  # type: ignore[type-var]
    config = UpdateConfig(minibatches=1)
    means, _ = whole_minibatch(copy.deepcopy(policy), add_reference(batch, reference, config), torch.arange(24))
    metrics = update(policy, reference, batch, silent, torch.optim.SGD(policy.parameters(), lr=1.0), config,
                     torch.Generator().manual_seed(0))  # fmt: skip
    assert {name: metrics[f"loss/{name}"] for name in TERMS} == pytest.approx(means, abs=1e-6)
    assert metrics["update/grad_norm"] == 0.0


def test_what_weight_zero_measures_may_even_be_infinite() -> None:
    _, batch = _played()
    endless = replace(batch, advantages=torch.where(batch.reply, -torch.inf, 0.0))
    without = {name: loss for name, loss in TERMS.items() if name != "policy"}
    assert identical(trained({**TERMS, "policy": PolicyLoss(weight=0.0)}, endless), trained(without))


def test_a_mute_estimator_can_be_measured_beside_the_rest() -> None:
    without = {name: loss for name, loss in TERMS.items() if name != "kl"}
    assert identical(trained({**TERMS, "kl": KLLoss(weight=0.0, estimator="k1")}), trained(without))


@pytest.mark.parametrize("speech", ["common", "separate", "separate_only"])
def test_a_reward_of_weight_zero_is_a_reward_that_is_absent(speech: str) -> None:
    def after(rewards: dict[str, Reward]) -> dict[str, Tensor]:
        policy = noisy(hint_policy(2), 2)
        config = PPOConfig(
            iterations=2,
            games=8,
            concurrency=8,
            max_new_tokens=2,
            context=32,
            credit=Credit(speech=speech),
            update=UpdateConfig(minibatches=2),
        )
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        losses = {name: loss for name, loss in TERMS.items() if name != "plan"}  # in this game there is nothing to plan
        train_ppo(
            [Learner("learner", policy, copy.deepcopy(policy), optimizer)], Hint, rewards, losses, config,
            game="hint", cast={"speaker": Seats(), "listener": Seats()}, frozen={}, seeds=Seeds.of(0), start=0,
            after=lambda iteration, metrics, episodes: None, progress=Progress(),
        )  # fmt: skip
        return weights_of(policy)

    game = GameReward(scale=1.0)
    absent = after({"game": game})
    assert identical(after({"game": game, "speaking": SpeakingReward(weight=0.0)}), absent)
    assert not identical(after({"game": game, "speaking": SpeakingReward(weight=0.5)}), absent)


# -- who is learned from -----------------------------------------------------------------------------------------------


def test_frozen_seats_never_enter() -> None:
    """Half the seats are another's: whatever stands in their streams, turns and beliefs, the batch is the same."""
    policy, reference = noisy(hint_policy(0, privileged_size=2), 0), another()
    episodes = play(policy, 8, reference=reference)
    batch = to_batch(episodes)
    assert batch.shape[0] == 8 and all(sorted(e.players.values()) == ["base", "learner"] for e in episodes)
    own = [(e, a) for e in episodes for a in e.players if e.players[a] == "learner"]
    for b, (episode, agent) in enumerate(own):
        stream = episode.streams[agent].tokens
        assert batch.tokens[b, : len(stream)].tolist() == stream

    spoiled = []
    for episode in episodes:
        (frozen,) = (a for a, player in episode.players.items() if player == "base")
        streams = {
            **episode.streams,
            frozen: replace(episode.streams[frozen], tokens=[9] * len(episode.streams[frozen])),
        }
        turns = tuple(
            replace(t, logprobs=(-99.0,) * len(t.logprobs), value=99.0, rewards={"game": 99.0, "speaking": 99.0})
            if t.agent == frozen
            else t
            for t in episode.turns
        )
        beliefs = tuple(replace(b, position=0) if b.listener == frozen else b for b in episode.beliefs)
        spoiled.append(replace(episode, streams=streams, turns=turns, beliefs=beliefs))
    again = to_batch(spoiled)
    assert identical(vars(batch), vars(again))
    assert not identical(vars(to_batch(episodes, ("base",))), vars(to_batch(spoiled, ("base",))))


@pytest.mark.parametrize("without", ["decisions", "questions", "both"])
def test_minibatches_without_decisions_or_questions_are_harmless(without: str) -> None:
    """Every minibatch is one row; what rows without a term's places say to that term is nothing."""
    policy, batch = played()
    if without != "decisions":
        none = torch.zeros(0, dtype=torch.int64)
        batch = replace(batch, row=none, position=none, candidates=torch.zeros(0, 2, dtype=torch.int64), answer=none,
                        also=torch.zeros(0, 0, dtype=torch.int64))  # fmt: skip
    if without != "questions":
        blank = torch.zeros_like(batch.decision)
        kind = torch.where(batch.reply, torch.tensor(Kind.OBSERVATION, dtype=torch.int8), batch.kind)
        batch = replace(batch, kind=kind, decision=blank, body=blank, message=blank, imitate=blank)
    after = trained(TERMS, batch, minibatches=24)
    assert all(bool(torch.isfinite(w).all()) for w in after.values()) and not identical(after, weights_of(policy))


# -- terms of somebody's own -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mine:
    """What `of` makes of the batch and the outputs."""

    of: Callable[[TokenBatch, Outputs], Any]
    reads: str = "reply"
    weight: float = 0.05

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> Any:
        return self.of(batch, outputs)


def test_a_term_may_work_with_any_of_the_outputs() -> None:
    """All have their shapes, and only zeros in them, when its places are counted."""
    shapes: list[dict[str, tuple[int, ...]]] = []

    def divergence(batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        shapes.append({name: tuple(part.shape) for name, part in vars(outputs).items()})
        return torch.where(batch.reply, outputs.divergence, 0.0), batch.reply

    def planned(batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        return -(batch.plan * outputs.planned.masked_fill(batch.plan_ids < 0, 0.0)).sum(-1), batch.planned

    ours = {"exact": Mine(divergence, "divergence"), "plan": Mine(planned, "planned")}
    theirs = {"exact": TERMS["exact"], "plan": PlanLoss(weight=0.05, form="cross_entropy")}
    assert identical(trained(ours), trained(theirs))
    _, batch = _played()
    assert shapes and count_tokens(batch, ours) == count_tokens(batch, theirs)
    whole = (24, batch.shape[1])
    assert shapes[-1] == {
        **dict.fromkeys(("logprobs", "entropy", "values", "observed", "divergence"), whole),
        "beliefs": tuple(batch.candidates.shape), "planned": tuple(batch.plan.shape),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("of", "told"),
    [
        (lambda b, o: o.logprobs.mean(), r"Tensor \(\) of torch\.float32"),
        (lambda b, o: 0.5, "float"),
        (lambda b, o: None, "NoneType"),
        (lambda b, o: (o.logprobs,), r"Tensor \(12, \d+\) of torch\.float32"),
        (lambda b, o: (o.logprobs, None), r"Tensor \(12, \d+\) of torch\.float32 and NoneType"),
        (
            lambda b, o: (o.logprobs, b.reply.float()),
            r"Tensor \(12, \d+\) of torch\.float32 and Tensor \(12, \d+\) of torch\.float32",
        ),
        (
            lambda b, o: (o.logprobs[:, 1:], b.reply),
            r"Tensor \(12, \d+\) of torch\.float32 and Tensor \(12, \d+\) of torch\.bool",
        ),
        (lambda b, o: (), "nothing"),
    ],
)
def test_a_term_that_returns_no_values_with_their_mask_is_refused(
    of: Callable[[TokenBatch, Outputs], Any], told: str
) -> None:
    said = rf"^loss\.mine: Mine returned {told}; must be values and a bool mask of the same shape, here \(12, \d+\) "
    with pytest.raises(UserError, match=said):
        trained({"policy": TERMS["policy"], "mine": Mine(of)})


def nan(batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
    return torch.where(batch.decision, (outputs.logprobs - 1).log(), outputs.logprobs), batch.reply


def infinite(batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
    return -1 / (outputs.entropy - outputs.entropy), batch.decision


@pytest.mark.parametrize(("of", "told"), [(nan, "nan"), (infinite, "-inf")])
def test_a_term_that_is_not_finite_is_named_before_any_step(
    of: Callable[[TokenBatch, Outputs], Any], told: str
) -> None:
    said = rf"^loss\.bad: Mine returned {told}, not finite at \d+ of \d+ places; mend the term, or lower "
    with pytest.raises(UserError, match=said):
        trained({"policy": TERMS["policy"], "bad": Mine(of)})
    trained({"policy": TERMS["policy"], "bad": Mine(of, weight=0.0)})


def test_a_model_that_is_not_finite_is_no_fault_of_the_term() -> None:
    policy, batch = played()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    with torch.no_grad():
        next(policy.lm.parameters()).fill_(torch.nan)
    with pytest.raises(
        UserError, match=r"^loss\.policy: the model's outputs are not finite; lower algo\.update\.learn"
    ):
        update(policy, None, batch, {"policy": PolicyLoss()}, optimizer, UpdateConfig(), torch.Generator())


@pytest.mark.parametrize(
    ("of", "told"),
    [
        (lambda b, o: (o.logprobs, b.replies), "AttributeError: 'TokenBatch' object has no attribute 'replies'"),
        (lambda b, o: (o.logprobs / [][0], b.reply), "IndexError: list index out of range"),
        # the outputs that places are counted on are zeros, so only the model's own meet this
        (lambda b, o: (1 / 0 if o.entropy.any() else o.entropy, b.reply), "ZeroDivisionError: division by zero"),
    ],
)
def test_a_term_that_raises_is_named_with_its_line(of: Callable[[TokenBatch, Outputs], Any], told: str) -> None:
    with pytest.raises(UserError) as error:
        trained({"policy": TERMS["policy"], "bad": Mine(of)})
    line = of.__code__.co_firstlineno
    assert str(error.value).startswith(f"loss.bad: Mine raised {told} ({__file__}, line {line}); ")


# -- the reference -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_budget", [1, 50, 10_000])
def test_reference_logprobs_are_the_references_of_the_same_tokens(token_budget: int) -> None:
    policy, batch = played()
    config = UpdateConfig(token_budget=token_budget)
    itself = add_reference(batch, policy, config).reference_logprobs
    assert float((itself - batch.logprobs).abs().max()) < 1e-4
    reference = another()
    other = add_reference(batch, reference, config).reference_logprobs
    with torch.no_grad():
        expected = forward(reference, batch, 1.0, {"reply": False}).logprobs
    torch.testing.assert_close(other, expected, atol=1e-5, rtol=1e-5)
    assert not other[~batch.reply].any() and float((other - itself).abs().max()) > 0.1


def test_the_reference_is_read_where_it_is_compared() -> None:
    """The same there as everywhere, in passes whose output layer has no other place."""
    _, batch = played()
    reference, speech = another(), batch.reply & (batch.kind == Kind.SPEECH)
    outputs: list[int] = []
    logits = reference.logits
    reference.logits = lambda hidden: outputs.append(len(hidden)) or logits(hidden)  # type: ignore[method-assign, func-returns-value]
    whole = add_reference(batch, reference, UpdateConfig()).reference_logprobs
    assert sum(outputs) == int(batch.reply.sum()) > int(speech.sum()) > 0
    outputs.clear()
    some = add_reference(batch, reference, UpdateConfig(), where=speech).reference_logprobs
    assert sum(outputs) == int(speech.sum()) and not some[~speech].any()
    torch.testing.assert_close(some[speech], whole[speech], atol=1e-5, rtol=1e-5)


def test_rows_of_half_precision_come_in_few_lengths() -> None:
    """On a CPU: eight from one power of two to the next, less than an eighth more, and no longer than the batch."""
    _, batch = played()
    cpu, lengths = torch.device("cpu"), torch.arange(4097)
    wide = replace(batch, tokens=torch.zeros(1, 4096))
    found = padded(lengths, wide, UpdateConfig(bf16=True), cpu)
    assert found[:17].tolist() == list(range(17))
    assert found[17:33].tolist() == [18, 18, 20, 20, 22, 22, 24, 24, 26, 26, 28, 28, 30, 30, 32, 32]
    assert bool((found >= lengths).all()) and bool((found < lengths + (lengths / 8).clamp_min(1)).all())
    assert len(set(found[1025:2049].tolist())) == 8
    narrow = replace(batch, tokens=torch.zeros(1, 17))
    assert padded(torch.tensor([17]), narrow, UpdateConfig(bf16=True), cpu).tolist() == [17]
    for config, device in (
        (UpdateConfig(), cpu), (UpdateConfig(bf16=True, padding_free=True), cpu),
        (UpdateConfig(bf16=True), torch.device("cuda")),
    ):  # fmt: skip
        assert torch.equal(padded(lengths, wide, config, device), lengths)


def test_the_reference_is_read_at_the_rollouts_temperature() -> None:
    policy = noisy(hint_policy(0, privileged_size=2), 0)
    batch = to_batch(play(policy, 8, temperature=0.5))
    filled = add_reference(batch, policy, UpdateConfig(temperature=0.5))
    assert float((filled.reference_logprobs - batch.logprobs).abs().max()) < 1e-4


@pytest.mark.parametrize("estimator", ["k2", "exact"])
def test_kl_to_oneself_is_zero_and_the_reference_is_left_alone(estimator: str) -> None:
    policy, batch = played()
    reference = copy.deepcopy(policy)
    before = weights_of(reference)
    metrics = update(policy, reference, batch, {"kl": KLLoss(1.0, estimator)},
                     torch.optim.SGD(policy.parameters(), lr=1.0), UpdateConfig(minibatches=1),
                     torch.Generator().manual_seed(0))  # fmt: skip
    assert metrics["loss/kl"] == pytest.approx(0.0, abs=1e-8) and metrics["update/grad_norm"] < 1e-3
    assert identical(weights_of(reference), before) and all(p.grad is None for p in reference.parameters())


@pytest.mark.parametrize(
    "terms", [{"near_base": KLLoss(1.0, over="both")}, {"kl": KLLoss(1.0), "of_choices": KLLoss(1.0, over="choice")}]
)
def test_terms_are_compared_with_the_reference_whatever_they_are_called(terms: dict[str, Loss]) -> None:
    policy, batch = played()
    metrics = update(policy, copy.deepcopy(policy), batch, terms, torch.optim.SGD(policy.parameters(), lr=1.0),
                     UpdateConfig(minibatches=1), torch.Generator().manual_seed(0))  # fmt: skip
    assert [metrics[f"loss/{name}"] for name in terms] == pytest.approx([0.0] * len(terms), abs=1e-8)
    assert metrics["update/grad_norm"] < 1e-3


# -- steps -------------------------------------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    steps = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.steps += 1
        super().step()


def test_epochs_and_minibatches_are_steps_and_rows_are_told() -> None:
    policy, batch = played()
    optimizer = Counting(policy.parameters(), lr=1e-3)
    told: list[int] = []
    update(policy, None, batch, {"value": ValueLoss()}, optimizer, UpdateConfig(epochs=3, minibatches=4),
           torch.Generator().manual_seed(0), told.append)  # fmt: skip
    assert optimizer.steps == 12 and sum(told) == 3 * 24
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


def test_the_generator_decides_the_order() -> None:
    assert identical(trained(TERMS), trained(TERMS))
    policy, batch = played()
    update(policy, policy, batch, TERMS, torch.optim.AdamW(policy.parameters(), lr=1e-3), UpdateConfig(minibatches=2),
           torch.Generator().manual_seed(1))  # fmt: skip
    assert not identical(weights_of(policy), trained(TERMS))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_an_error_before_any_step(bad: float) -> None:
    policy, batch = played()
    advantages = batch.advantages.clone()
    advantages[batch.reply.nonzero(as_tuple=True)[0][0], batch.reply.nonzero(as_tuple=True)[1][0]] = bad
    before = weights_of(policy)
    with pytest.raises(UserError, match=r"not finite.*learning_rate"):
        update(
            policy,
            None,
            replace(batch, advantages=advantages),
            {"policy": PolicyLoss()},
            torch.optim.SGD(policy.parameters(), lr=1.0),
            UpdateConfig(minibatches=1),
            torch.Generator(),
        )
    assert identical(weights_of(policy), before)


def test_explained_variance_by_hand() -> None:
    _, batch = _played()
    at = batch.decision
    returns = torch.zeros_like(batch.returns)
    returns[at] = torch.arange(24.0)
    assert explained_variance(replace(batch, returns=returns, values=returns)) == 1.0
    assert explained_variance(replace(batch, returns=returns, values=returns * 0)) == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(replace(batch, returns=returns, values=0.5 * returns)) == pytest.approx(0.75, abs=1e-6)
    assert explained_variance(replace(batch, returns=returns, values=-returns)) == pytest.approx(-3.0, abs=1e-5)
    assert explained_variance(replace(batch, returns=at.float())) == 0.0  # nothing to explain

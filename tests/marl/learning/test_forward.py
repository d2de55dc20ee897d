"""The forward pass: the distributions that were sampled, of the policy and of the reference."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from marl.common.errors import UserError
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.update import add_reference, make_optimizer, update
from marl.losses import Loss
from marl.losses.kl import KLLoss
from marl.losses.policy import PolicyLoss
from marl.model.policy import Policy
from marl.types import Kind
from tests.marl.models import hf_policy, small_tokens
from tests.marl.updates import READS, TERMS, another, identical, noisy, play, played, to_batch, weights_of


# -- the distribution that was sampled ---------------------------------------------------------------------------------
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


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_activations_that_are_computed_again_give_the_same_weights(name: str, tmp_path: Path) -> None:
    """Dropout must stay off in both passes: GPT-2 has modules for it, OPT has it in the code of its layers."""
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


@pytest.mark.parametrize("estimator", ["k2", "exact"])
def test_logits_in_pieces_give_the_same_update(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces have seven positions here, and only one of them is computed at a time."""
    policy, batch = played()
    terms: dict[str, Loss] = {**TERMS, "kl": KLLoss(weight=0.5, estimator=estimator)}
    ends, largest = [], []
    for most in (1 << 25, 7 * policy.tokens.size):
        monkeypatch.setattr("marl.learning.forward.MOST_LOGITS", most)
        learner, read = copy.deepcopy(policy), []
        learner.lm.get_output_embeddings().register_forward_pre_hook(lambda _, given, n=read: n.append(len(given[0])))
        config = UpdateConfig(minibatches=1, token_budget=1 << 20)
        optimizer = torch.optim.SGD(learner.parameters(), lr=1.0)
        update(learner, another(), batch, terms, optimizer, config, torch.Generator().manual_seed(0))
        ends.append(weights_of(learner))
        largest.append(max(read))
    assert largest[0] > 50 and largest[1] == 7
    for name, weights in ends[0].items():
        torch.testing.assert_close(ends[1][name], weights, atol=1e-5, rtol=1e-5)


class Held(TorchDispatchMode):
    """Notes the most numbers that logits (M, V) held at once, also where autograd alone held them."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.size, self.width = policy.lm.get_output_embeddings().weight.shape  # (V, D)
        self.most = 0
        self.there: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            logits = isinstance(each, torch.Tensor) and each.dim() == 2 and each.shape[1] == self.size
            if logits and len(each) != self.width:  # the layer's own weights
                storage = each.untyped_storage()
                self.there[storage._cdata] = StorageWeakRef(storage), each.numel()
        self.there = {key: ref for key, ref in self.there.items() if not ref[0].expired()}
        self.most = max(self.most, sum(numbers for _, numbers in self.there.values()))
        return found


@pytest.mark.parametrize(
    "weights",
    [
        {},
        {"entropy": 0.0},  # measured beside the policy's term, as by default
        {"policy": 0.0, "imitation": 0.0, "kl": 0.0},
        {"world_model": 0.0, "listening": 0.0, "exact": 0.0, "plan": 0.0},
    ],
    ids=str,
)
def test_logits_are_never_held_for_all_positions(weights: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces have four positions here, and fewer than 12 are held at once in both passes, whichever terms are only
    measured."""
    policy, batch = played()
    size = policy.tokens.size
    terms = {name: replace(loss, weight=weights.get(name, loss.weight)) for name, loss in TERMS.items()}  # type: ignore[type-var]
    terms |= {"last": terms["entropy"]}
    monkeypatch.setattr("marl.learning.forward.MOST_LOGITS", 4 * size)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    config = UpdateConfig(minibatches=1, token_budget=1 << 20)
    with Held(policy) as held:
        update(policy, another(), batch, terms, optimizer, config, torch.Generator().manual_seed(0))
    pieces = held.most / (4 * size)
    assert int(batch.reply.sum()) > 40 and 3 < pieces < 12, pieces


def test_a_model_whose_activations_cannot_be_computed_again_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _ = played()
    monkeypatch.setattr("marl.model.policy.GradientCheckpointingLayer", RuntimeError)  # a model without any
    with pytest.raises(UserError, match=r"gradient_checkpointing=true: not with LlamaForCausalLM. Leave it out"):
        make_optimizer(policy, UpdateConfig(gradient_checkpointing=True))
    make_optimizer(policy, UpdateConfig())


# -- the reference -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("token_budget", [1, 50])
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
    """Log-probabilities of the reference there are those of a full read, and its output layer is computed nowhere
    else."""
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


@pytest.mark.parametrize(
    "terms",
    [{"kl": KLLoss(1.0)}, {"exact": KLLoss(1.0, "exact")},
     {"near_base": KLLoss(1.0), "of_choices": KLLoss(1.0, over="choice")}],
)  # fmt: skip
def test_kl_to_oneself_is_zero_and_the_reference_is_left_alone(terms: dict[str, Loss]) -> None:
    policy, batch = played()
    reference = copy.deepcopy(policy)
    before = weights_of(reference)
    metrics = update(policy, reference, batch, terms,
                     torch.optim.SGD(policy.parameters(), lr=1.0), UpdateConfig(minibatches=1),
                     torch.Generator().manual_seed(0))  # fmt: skip
    assert [metrics[f"loss/{name}"] for name in terms] == pytest.approx([0.0] * len(terms), abs=1e-8)
    assert metrics["update/grad_norm"] < 1e-3
    assert identical(weights_of(reference), before) and all(p.grad is None for p in reference.parameters())


@pytest.mark.parametrize("estimator", ["k2", "exact"])
def test_kl_without_a_reference_is_refused(estimator: str) -> None:
    """Log-probabilities of a missing reference would count as 0, and the loss would push everything said towards
    certainty."""
    policy, batch = played()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    with pytest.raises(AssertionError, match="reference"):
        update(policy, None, batch, {"kl": KLLoss(1.0, estimator)}, optimizer, UpdateConfig(), torch.Generator())

"""Rows one behind the other: what is read, learned and refused is what padded rows would be."""

from __future__ import annotations

import copy
import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, PhimoeConfig, PreTrainedConfig, Qwen2MoeConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from marl.common.errors import UserError
from marl.kernels import varlen as module
from marl.kernels.varlen import attention, check_varlen, read_rows, varlen
from marl.learning.config import UpdateConfig
from marl.learning.update import make_optimizer, update
from tests.marl.models import ARCHITECTURES, RECURRENT, hf_policy, random_lm
from tests.marl.updates import TERMS, noisy, play, to_batch, weights_of

LENGTHS = (5, 1, 7, 0, 3)
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2}  # fmt: skip


def one_by_one(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention (N, H, D) in plain sums."""
    shared = q.shape[1] // k.shape[1]
    result = torch.zeros_like(q)
    for n in range(len(q)):
        for h in range(q.shape[1]):
            scores = (k[: n + 1, h // shared] @ q[n, h]) * scale
            result[n, h] = scores.softmax(0) @ v[: n + 1, h // shared]
    return result


@pytest.mark.parametrize("shared", [1, 2])
def test_a_token_attends_to_its_own_row_up_to_itself(shared: int) -> None:
    lengths = [n for n in LENGTHS if n]
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, sum(lengths), 8, generator=draw)
    k, v = torch.randn(2, 1, 4 // shared, sum(lengths), 8, generator=draw)
    ends = torch.tensor([0, 5, 6, 13, 16], dtype=torch.int32)
    found, _ = attention(torch.nn.Module(), q, k, v, None, scaling=0.3, row_lengths=lengths, row_ends=ends)
    assert found.shape == (1, 16, 4, 8)
    for begin, end in itertools.pairwise(ends.tolist()):
        rows = [each[0, :, begin:end].transpose(0, 1) for each in (q, k, v)]
        torch.testing.assert_close(found[0, begin:end], one_by_one(*rows, 0.3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_are_read_as_if_alone(name: str, tmp_path: Path) -> None:
    policy = noisy(hf_policy(tmp_path, name), 0)
    tokens = torch.randint(0, 100, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor(LENGTHS)
    with torch.no_grad():
        padded = policy.hidden(tokens)
        with varlen(policy.lm):
            found = policy.hidden(tokens, lengths)
        assert torch.equal(policy.hidden(tokens), padded)  # outside all is as before
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(found[row, :length], padded[row, :length], atol=1e-4, rtol=1e-4)
        assert not found[row, length:].any()
    with torch.no_grad(), varlen(policy.lm):
        assert torch.isfinite(read_rows(policy.lm, tokens, torch.zeros(len(LENGTHS), dtype=torch.int64))).all()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_updates_without_padding_end_with_the_same_weights(name: str, again: bool, tmp_path: Path) -> None:
    """Up to rounding, all terms on, also where activations are computed again in the backward pass."""
    policy = hf_policy(tmp_path, name)
    batch, reference = to_batch(play(policy, 6)), noisy(copy.deepcopy(policy), 1)
    assert len(set(batch.lengths.tolist())) > 2
    ends, read = [], []
    for padding_free in (False, True):
        learner = copy.deepcopy(policy)
        first = next(module for module in learner.lm.modules() if isinstance(module, GradientCheckpointingLayer))
        seen: list[int] = []
        next(first.children()).register_forward_pre_hook(
            lambda _, args, kwargs, seen=seen: seen.append((*args, *kwargs.values())[0].shape[:2].numel()),
            with_kwargs=True,
        )
        config = UpdateConfig(
            minibatches=2, token_budget=256, gradient_checkpointing=again, padding_free=padding_free, optimizer="sgd",
            learning_rate=0.1,
        )  # fmt: skip
        optimizer = make_optimizer(learner, config)
        seen.clear()  # of the check
        update(learner, reference, batch, TERMS, optimizer, config, torch.Generator().manual_seed(0))
        ends.append(weights_of(learner))
        read.append(sum(seen))
    assert read[1] == int(batch.lengths.sum()) * (2 if again else 1) < read[0]
    begin = weights_of(policy)
    for weight, padded in ends[0].items():
        torch.testing.assert_close(ends[1][weight], padded, atol=2e-5, rtol=1e-4)
    assert any(float((ends[0][weight] - begin[weight]).abs().max()) > 1e-3 for weight in begin)


@pytest.mark.parametrize("name", [*RECURRENT, "mistral"])
def test_models_that_carry_more_than_attention_from_token_to_token_are_refused(name: str) -> None:
    lm = random_lm(name, 64, 256)
    with pytest.raises(UserError, match=r"algo.update.padding_free=true: not with \w+ \(.+\); leave it out"):
        check_varlen(lm)
    assert lm.config._attn_implementation != module.VARLEN


@pytest.mark.parametrize("config", [
    PhimoeConfig(sliding_window=24, num_local_experts=2, **SHAPE),
    Qwen2MoeConfig(use_sliding_window=True, sliding_window=24, max_window_layers=0, num_experts=2, **SHAPE),
])  # fmt: skip
def test_windows_that_are_in_a_mask_alone_are_refused(config: PreTrainedConfig) -> None:
    """No mask is made for rows beside one another, and short rows read alike."""
    with pytest.raises(UserError, match=r"not with \w+ \(.*sliding.*\); leave it out"):
        check_varlen(AutoModelForCausalLM.from_config(config).eval())


def test_settings_are_refused_before_any_work(tmp_path: Path) -> None:
    policy = hf_policy(tmp_path, "mamba")
    with pytest.raises(UserError, match="padding_free=true: not with MambaForCausalLM"):
        make_optimizer(policy, UpdateConfig(padding_free=True))


def test_the_kernel_is_given_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on GPUs only: here its place is taken by sums over its own arguments, bound to its own signature."""
    signature, calls = inspect.signature(module.varlen_attn), []

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs).arguments
        calls.append(given)
        assert given["window_size"] == (-1, 0)  # causal
        assert given["cu_seq_q"] is given["cu_seq_k"] and given["cu_seq_q"].dtype == torch.int32
        q, k, v = (given[name] for name in ("query", "key", "value"))
        assert q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert given["max_q"] == given["max_k"] == 7
        bounds = given["cu_seq_q"].tolist()
        return torch.cat([
            scaled_dot_product_attention(*(x[a:b].transpose(0, 1) for x in (q, k, v)), is_causal=True,
                                         scale=given["scale"]).transpose(0, 1)
            for a, b in itertools.pairwise(bounds)
        ])  # fmt: skip

    lm = random_lm("llama", 64, 256).eval()
    tokens = torch.randint(0, 64, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor(LENGTHS)
    with torch.no_grad(), varlen(lm), torch.autocast("cpu", torch.bfloat16):
        expected = read_rows(lm, tokens, lengths)
        monkeypatch.setattr(module, "varlen_attn", kernel)
        monkeypatch.setattr(module, "has_kernel", lambda query, dtype: dtype == torch.bfloat16)
        found = read_rows(lm, tokens, lengths)
    assert len(calls) == lm.config.num_hidden_layers
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
    assert float(expected.std()) > 0.3

"""A causal language model of `transformers` with a value head. Left out: files (loading.py), caches, losses."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from marl.common.errors import UserError
from marl.model.branches import read_branches
from marl.model.loading import UNUSABLE, check_rows, load_lm, load_tokens, longest_stream, named_ends, reading
from marl.model.tokens import Tokens

if TYPE_CHECKING:
    from marl.model.lora import Adapter

MOST_LOGITS = 1 << 25  # in one piece: 128 MiB in float32, and five such tensors at a time


class Policy(nn.Module):
    """Language model and value head.

    The critic reads the hidden state before a reply's first token. A privileged critic (`privileged_size` > 0) also
    reads a vector of hidden facts; the language model never does.
    """

    speech_mask: Tensor

    def __init__(self, lm: PreTrainedModel, tokens: Tokens, privileged_size: int = 0) -> None:
        super().__init__()
        if lm.name_or_path:  # loaded, as its tokenizer was
            check_rows(lm, tokens)
        self.lm = lm
        self.tokens = tokens
        self.adapter: Adapter | None = None  # where the language model's weights are another policy's
        tokens.add_ends(named_ends(lm))
        self.new_critic(privileged_size)
        size = lm.get_output_embeddings().weight.shape[0]
        mask = torch.zeros(size)
        mask[tokens.size :] = -torch.inf  # rows that pad the embedding
        mask[[i for i in tokens.unspeakable if i < size]] = -torch.inf
        self.register_buffer("speech_mask", mask, persistent=False)

    def new_critic(self, privileged_size: int) -> None:
        """Makes a new value head, from torch's global generator."""
        # not the configuration's: OPT may project its last states
        self.privileged_size, width = privileged_size, self.lm.get_output_embeddings().weight.shape[1]
        out = nn.Linear(width, 1)
        nn.init.zeros_(out.weight)
        nn.init.zeros_(out.bias)
        self.value_head = nn.Sequential(nn.Linear(width + privileged_size, width), nn.Tanh(), out)

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @cached_property
    def context(self) -> int:
        """The longest stream that the model can read, in tokens."""
        return longest_stream(self.lm.config)

    def hidden(self, tokens: Tensor, branch: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        """Last hidden states (B, T, D) of tokens (B, T). Rows are padded on the right, so causality is mask enough.

        `branch`, `position_ids` (B, T): of rows with branches behind them (`branches.sees`).
        """
        if branch is None or position_ids is None or not bool(branch.any()):
            return self.lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return read_branches(self.lm, tokens, branch, position_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits (..., V) of hidden states (..., D), in float32."""
        head = self.lm.get_output_embeddings()
        return head(hidden.to(head.weight.dtype)).float()  # Mamba's states stay in float32

    def speech_logits(self, logits: Tensor, temperature: float) -> Tensor:
        """Logits (..., V) that speech is sampled from: control tokens are never said."""
        return logits / temperature + self.speech_mask

    def reply_logits(self, hidden: Tensor, is_choice: Tensor, legal: Tensor, temperature: float) -> Tensor:
        """Logits (M, V) that reply tokens are sampled from, when played and when scored, of hidden states (M, D): among
        legal ids (M, O), padded with -1, where `is_choice` (M,) bool, else of speech."""
        logits = self.logits(hidden)
        choices = int(is_choice.sum())
        if choices and choices == len(is_choice):  # as in most steps of Among Us
            return choice_logits(logits, legal, temperature)
        shaped = self.speech_logits(logits, temperature)
        if choices:
            shaped[is_choice] = choice_logits(logits[is_choice], legal[is_choice], temperature)
        return shaped

    def value(self, hidden: Tensor, privileged: Tensor) -> Tensor:
        """State values (...) of hidden states (..., D) and hidden facts (..., F), in float32."""
        features = torch.cat([hidden.float(), privileged], -1) if self.privileged_size else hidden.float()
        with torch.autocast(features.device.type, enabled=False):
            return self.value_head(features).squeeze(-1)


def bf16_copy(policy: Policy) -> Policy:
    """Copies the policy with a language model in bfloat16; its log-probabilities and values stay in float32."""
    copied = copy.deepcopy(policy, {id(policy.adapter): policy.adapter}).eval().requires_grad_(False)
    copied.tokens = policy.tokens
    for name, parameter in copied.lm.named_parameters():  # no buffers: bfloat16 cannot hold rotary angles
        if ".lora_" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    return copied


@torch.no_grad()
def check_bf16(policy: Policy) -> None:
    """Raises UserError for a copy by `bf16_copy` that cannot compute, as the model's buffers in float32 do not fit."""
    try:
        policy.hidden(torch.zeros(1, 1, dtype=torch.int64, device=policy.device))
    except RuntimeError as error:
        if not any(words in str(error) for words in ("dtype", "scalar type", "BFloat16")):  # as out of memory
            raise
        raise UserError(
            f"algo.play_bf16=true: {type(policy.lm).__name__} does not compute in bfloat16. Set it to false."
        ) from error


@torch.no_grad()
def take_weights(policy: Policy, trained: Policy) -> None:
    """Copies a trained policy's weights into `policy`, in place and in its own precision."""
    for own, theirs in zip(policy.parameters(), trained.parameters(), strict=True):
        own.copy_(theirs)


@contextmanager
def recomputing(lm: PreTrainedModel) -> Iterator[None]:
    """Recomputes each layer in the backward pass within the block: less memory, a third more work, the same gradients.

    UserError where the model has no layers that allow it.
    """
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"algo.update.gradient_checkpointing=true: not with {type(lm).__name__}. Leave it out.")
    # The models' own switch works in training mode only, which turns on dropout.
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class has its own


def choice_logits(logits: Tensor, legal: Tensor, temperature: float) -> Tensor:
    """Logits (M, V) that a choice is sampled from, among legal ids (M, O) padded with -1."""
    mask = torch.full_like(logits, -torch.inf)
    # Padding repeats the first legal id, which changes nothing.
    mask.scatter_(1, torch.where(legal >= 0, legal, legal[:, :1]), 0.0)
    return logits / temperature + mask


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Returns lists of ids as one tensor, (rows, longest), padded with -1."""
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], dtype=torch.int64).view(len(rows), width)


def tiny_config(
    vocab_size: int,
    *,
    hidden_size: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 1,
    intermediate_size: int = 384,
    context: int = 512,
) -> LlamaConfig:
    """Configuration of a Llama of about one million parameters."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.06,  # wider than the usual 0.02 of wide models: training starts faster
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )


def tiny_lm(vocab_size: int, *, generator_seed: int = 0, **shape: int) -> LlamaForCausalLM:
    """Builds a model of `tiny_config`, initialised from its own seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator_seed)
        return LlamaForCausalLM(tiny_config(vocab_size, **shape))


def pretrained(
    name: str | Path, privileged_size: int = 0, *, seed: int, exact: bool = False, dtype: torch.dtype = torch.float32
) -> Policy:
    """Loads a model and its tokenizer from a local folder or hub name, with a fresh value head drawn with `seed`.

    `exact`, `dtype`: as in `load_lm`.
    """
    name = str(name)
    lm, tokens = load_lm(name, dtype, exact=exact), load_tokens(name)
    with reading(name, UNUSABLE), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy(lm, tokens, privileged_size)


@contextmanager
def dropout(policy: Policy, rate: float, generator: torch.Generator) -> Iterator[None]:
    """Drops features of embeddings and of attention's and the MLP's outputs within the block. PPO updates use none.

    UserError unless every layer has those of Llama's names: others' outputs would silently stay as they are.
    """

    def drop(module: torch.nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, tuple):  # an MLP of experts, with their scores
            return drop(module, args, out[0]), *out[1:]
        kept = torch.rand(out.shape, generator=generator) >= rate
        return out * (kept / (1 - rate)).to(out.device)

    found = {end: [m for name, m in policy.lm.named_modules() if name.endswith(end)] for end in (".o_proj", ".mlp")}
    layers = policy.lm.config.get_text_config().num_hidden_layers if rate else 0
    if lacking := [end[1:] for end, modules in found.items() if len(modules) < layers]:
        raise UserError(
            f"base.dropout={rate}: {type(policy.lm).__name__} has layers without {' and '.join(lacking)}, whose "
            "outputs it drops. Set it to 0."
        )
    dropping = [policy.lm.get_input_embeddings(), *itertools.chain(*found.values())] if rate else []
    hooks = [module.register_forward_hook(drop) for module in dropping]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

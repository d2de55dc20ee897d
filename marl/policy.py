"""A causal language model of `transformers` with a value head. What it leaves out: caches (engine.py), losses."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from marl.errors import UserError
from marl.kernels import quicken
from marl.tokens import Tokens
from marl.varlen import read_rows

disable_progress_bar()  # of loading and saving a handful of tensors

# What a model raises that wants other inputs, masks or another kind of cache than it is given.
MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Policy(nn.Module):
    """Language model + value head.

    The critic reads the hidden state before a reply's first token. A privileged critic (`privileged_size` > 0) also
    reads a vector of hidden facts; the language model never does.
    """

    speech_mask: Tensor

    def __init__(self, lm: PreTrainedModel, tokens: Tokens, privileged_size: int = 0) -> None:
        super().__init__()
        if lm.name_or_path:  # it was loaded, and so was its tokenizer
            _check_rows(lm, tokens)
        quicken(lm)
        self.lm = lm
        self.tokens = tokens
        named = getattr(lm.generation_config, "eos_token_id", None)
        if isinstance(named, list):
            tokens.add_ends(named)
        width = lm.config.get_text_config().hidden_size
        self.privileged_size = privileged_size
        out = nn.Linear(width, 1)
        nn.init.zeros_(out.weight)
        nn.init.zeros_(out.bias)
        self.value_head = nn.Sequential(nn.Linear(width + privileged_size, width), nn.Tanh(), out)
        size = lm.get_output_embeddings().weight.shape[0]
        mask = torch.zeros(size)
        mask[tokens.size :] = -torch.inf  # rows that only pad the embedding
        mask[[i for i in tokens.unspeakable if i < size]] = -torch.inf
        self.register_buffer("speech_mask", mask, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @property
    def context(self) -> int:
        """The longest stream that the model can read, in tokens."""
        return longest_stream(self.lm.config)

    def hidden(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Last hidden states (B, T, D) of tokens (B, T). Rows are padded on the right, so causality is mask enough.
        With `lengths` (B,), within `varlen(lm)`, padding is not read."""
        if lengths is not None:
            return read_rows(self.lm, tokens, lengths)
        return self.lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits (..., V) of hidden states (..., D), in float32."""
        return self.lm.get_output_embeddings()(hidden).float()

    def speech_logits(self, logits: Tensor, temperature: float) -> Tensor:
        """The distribution that speech is sampled from: control tokens are never said."""
        return logits / temperature + self.speech_mask

    def value(self, hidden: Tensor, privileged: Tensor) -> Tensor:
        """State values (...) of hidden states (..., D) and hidden facts (..., F), in float32."""
        features = torch.cat([hidden.float(), privileged], -1) if self.privileged_size else hidden.float()
        with torch.autocast(features.device.type, enabled=False):
            return self.value_head(features).squeeze(-1)


def longest_stream(config: PreTrainedConfig) -> int:
    """The longest stream that a model of this configuration can read, in tokens."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return 1 << 30 if longest is None else min(int(longest), 1 << 30)


def check_context(config: PreTrainedConfig, context: int, setting: str = "model.context") -> None:
    """UserError where slots of so many tokens are more than the model can read. `setting`: what the user calls them."""
    if context > (longest := longest_stream(config)):
        raise UserError(f"{setting}={context} is more than the model can read ({longest} tokens): lower it")
    text = config.get_text_config()
    told = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    ropes = [rope for rope in told if isinstance(rope, dict)]
    for rope in [*ropes, *(own for whole in ropes for own in whole.values() if isinstance(own, dict))]:  # or by layers
        short = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        if "longrope" in (rope.get("rope_type"), rope.get("type")) and short and context > short:
            raise UserError(
                f"{setting}={context}: the model turns positions another way in passes that go beyond {short} tokens "
                f"(longrope), so that what it says would depend on who shares its pass; set it to {short} at most"
            )


def half(policy: Policy) -> Policy:
    """A copy of the policy whose language model computes in bfloat16, its output layer too; what is made of logits, and
    the value head, stay in float32."""
    copied = copy.deepcopy(policy).eval().requires_grad_(False)
    copied.tokens = policy.tokens  # one vocabulary, and whoever watches it sees both
    for parameter in copied.lm.parameters():  # no buffers: positions are turned by angles that bfloat16 cannot hold
        parameter.data = parameter.data.to(torch.bfloat16)
    return copied


@torch.no_grad()
def take_weights(policy: Policy, trained: Policy) -> None:
    """Gives the policy the numbers of a trained one of the same shape, in its own precision, where they are."""
    for own, theirs in zip(policy.parameters(), trained.parameters(), strict=True):
        own.copy_(theirs)


@contextmanager
def recomputing(lm: PreTrainedModel) -> Iterator[None]:
    """Within, each layer keeps only its input for the backward pass, which computes the rest again: less memory, a
    third more work, the same gradients. Raises UserError where the model has no such layers."""
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"algo.update.gradient_checkpointing=true: not with {type(lm).__name__}; leave it out")
    # The models' own switch works in training mode only, and that brings their dropout.
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class has its own


def choice_logits(logits: Tensor, legal: Tensor, temperature: float) -> Tensor:
    """The distribution that a choice is sampled from: (M, V) logits, legal ids (M, O) padded with -1."""
    mask = torch.full_like(logits, -torch.inf)
    # Padding repeats the first legal id, which changes nothing.
    mask.scatter_(1, torch.where(legal >= 0, legal, legal[:, :1]), 0.0)
    return logits / temperature + mask


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
    """Of a Llama of about one million parameters."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.06,  # wider than the usual 0.02, which is meant for wide models; this one started faster
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )


def tiny_lm(vocab_size: int, *, generator_seed: int = 0, **shape: int) -> LlamaForCausalLM:
    """A model of `tiny_config`, freshly initialised from its own seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator_seed)
        return LlamaForCausalLM(tiny_config(vocab_size, **shape))


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder or hub name."""
    folder = Path(name)
    if no_folder := _no_folder(name):
        raise UserError(f"model.name={name}: no tokenizer can be loaded from it: {no_folder}")
    if folder.is_dir() and not any((folder / f).exists() for f in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"model.name={name}: the folder has no tokenizer (tokenizer.json); save one beside the weights")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"model.name={name}: no tokenizer can be loaded from it: {_first_line(error)}") from error


def load_config(name: str) -> PreTrainedConfig:
    """The configuration of a causal language model in a local folder or of a hub name."""
    if no_folder := _no_folder(name):
        raise UserError(f"model.name={name}: no causal language model can be loaded: {no_folder}")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise UserError(f"model.name={name}: it comes with code of its own, which is never run here") from error
        raise UserError(f"model.name={name}: no causal language model can be loaded: {_first_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        why = f"{config.model_type} is an encoder-decoder, no causal language model"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        why = f"transformers has no causal language model of the kind {config.model_type}"
    else:
        return config
    raise UserError(f"model.name={name}: {why}; name a model that goes on with a text, such as a Llama or a Qwen")


def load_lm(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Any causal language model of `transformers`, from a local folder or hub name; weights as safetensors only."""
    config = load_config(name)
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise UserError(f"model.name={name}: no causal language model can be loaded: {_first_line(error)}") from error
    _check_head(lm, name)
    return lm


def _no_folder(name: str) -> str:
    """What is wrong with a name that must be a folder's, no hub's, where there is no such folder; else nothing."""
    if not (name.startswith(("/", ".", "~")) or name.count("/") > 1) or Path(name).is_dir():
        return ""
    return "there is no such folder" + (" (write out what ~ stands for)" if name.startswith("~") else "")


def _check_rows(lm: PreTrainedModel, tokens: Tokens) -> None:
    """UserError where a stream may hold tokens that the model has no rows for. Special tokens that none ever holds may
    lie beyond them (of images, say), and rows beyond all tokens only pad."""
    layers = lm.get_input_embeddings(), lm.get_output_embeddings()
    rows = min(layer.get_parameter("weight").shape[0] for layer in layers)
    marks, never = tokens.format.marks(), set(tokens.unspeakable)
    if any(i in marks or i not in never for i in range(rows, tokens.size)):
        raise UserError(
            f"model.name={lm.name_or_path}: its tokenizer has {tokens.size} tokens, and the model's embedding only "
            f"{rows} rows; load both, call model.resize_token_embeddings({tokens.size}) and save the model again"
        )


def _check_head(lm: PreTrainedModel, name: str) -> None:
    """Some models bend their logits after the last layer (soft caps, scales); we read them off the layer itself. Some
    see what comes later, or do not read a stream of tokens alone."""
    lm.eval()
    ids = torch.arange(min(8, lm.config.get_text_config().vocab_size))[None]
    head = lm.get_output_embeddings()
    try:
        # what the layer reads is magnified, so that a soft cap shows in a model of small logits too
        with torch.no_grad(), head.register_forward_pre_hook(lambda _, args: (100 * args[0],)):
            whole = lm(input_ids=ids).logits.float()
            ours = head(lm.base_model(input_ids=ids).last_hidden_state).float()
            start = head(lm.base_model(input_ids=ids[:, : ids.shape[1] // 2]).last_hidden_state).float()
    except MISFITS as error:
        raise UserError(
            f"model.name={name}: {type(lm).__name__} does not read tokens as causal language models do: "
            f"{_first_line(error)}"
        ) from error
    if not torch.allclose(whole, ours, atol=1e-3, rtol=1e-3):
        raise UserError(
            f"model.name={name}: {type(lm).__name__} changes its logits after the output layer: not supported"
        )
    near = 1e-3 if lm.dtype == torch.float32 else 0.05  # of the largest
    if not torch.allclose(ours[:, : start.shape[1]], start, atol=near * float(ours.abs().max())):
        raise UserError(
            f"model.name={name}: {type(lm).__name__} sees tokens that come later, so that it is no causal language "
            "model as it is configured"
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

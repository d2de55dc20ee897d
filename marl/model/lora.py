"""Adapters: low-rank updates of frozen weights (LoRA, Hu et al. 2021), by peft, which no other module imports.

An adapted policy has modules of its own around its base's tensors, so that one copy of the base plays every seat. Its
adapter is always on, and its base is the same model with the adapter off: nothing is switched between passes.
Left out: where an adapter's base is found (marl/storage), and other kinds of adapters.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from marl.common.errors import UserError, check_range
from marl.common.files import read_json

if TYPE_CHECKING:
    from marl.model.policy import Policy

SETTINGS_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"  # peft's names
ALL = "all-linear"  # every linear layer but the output layer
PREFIX, NAME = "base_model.model.", "default"  # of tensors in peft's files; of the one adapter of a policy


@dataclass(frozen=True)
class AdapterConfig:
    """W + (alpha / rank) B A in each layer of `targets`: `all-linear`, or a list of layers' names, such as q_proj.

    `dropout`: of an adapter's inputs in supervised training; PPO scores what was sampled and uses none. `bf16`: the
    frozen weights are kept in bfloat16, adapters in float32.
    """

    rank: int = 16
    alpha: int = 32
    targets: Any = ALL
    dropout: float = 0.0
    bf16: bool = False

    def __post_init__(self) -> None:
        check_range(self, "model.lora", "[1, inf)", "rank", "alpha")
        check_range(self, "model.lora", "[0, 1)", "dropout")
        listed = isinstance(self.targets, list | tuple) and all(isinstance(t, str) and t for t in self.targets)
        if not (self.targets == ALL or (listed and self.targets)):
            raise UserError(
                f"model.lora.targets={self.targets}: must be {ALL}, or a list of layers' names, as in [q_proj,v_proj]"
            )

    @property
    def dtype(self) -> torch.dtype:
        """The type of the frozen weights."""
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def form(self) -> tuple[Any, ...]:
        """Settings that two adapters must share for one to go on from the other's weights."""
        targets = self.targets if isinstance(self.targets, str) else tuple(sorted(self.targets))
        return self.rank, self.alpha, targets


@dataclass(frozen=True)
class Adapter:
    """A policy's adapter: its settings, and the frozen policy whose tensors it shares."""

    config: AdapterConfig
    base: Policy


def is_own(name: str) -> bool:
    """Tells whether an adapted policy has this tensor for itself: those of the adapter and the value head."""
    return ".lora_" in name or name.startswith("value_head.")


def adapted(base: Policy, config: AdapterConfig, seed: int = 0) -> Policy:
    """Makes a policy with a new adapter over the base's tensors, and a value head that begins as the base's.

    The adapter changes nothing before its first step (B = 0). `seed` draws A. Move the base to its device before.
    """
    assert base.adapter is None, "an adapter over an adapter"
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in base.lm.parameters()}
    memo[id(base.tokens)] = copy.copy(base.tokens)  # how it reads questions may differ
    policy: Policy = copy.deepcopy(base, memo)
    _inject(policy.lm, config)
    policy.adapter = Adapter(config, base)
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device draws the same
    for name, parameter in policy.lm.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
        if ".lora_A." in name:
            drawn = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            parameter.data.copy_(drawn)
    return policy.eval()


def unadapted(policy: Policy) -> Policy:
    """Makes a policy of an adapter's base, on the same tensors, which reads questions as the adapted one does."""
    assert policy.adapter is not None
    base = copy.copy(policy.adapter.base)  # the base itself may serve other adapters, which read otherwise
    base.tokens = policy.tokens
    return base


def copied(policy: Policy) -> Policy:
    """Copies a policy; an adapted one's copy shares the frozen weights."""
    memo: dict[int, Any] = {}
    if policy.adapter:
        memo = {id(policy.adapter): policy.adapter}
        memo |= {id(weight): weight for name, weight in policy.named_parameters() if not is_own(name)}
    return copy.deepcopy(policy, memo)


@torch.no_grad()
def merged(policy: Policy) -> Policy:
    """Makes a policy without an adapter, whose weights are the base's plus the adapter's, in the base's precision."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    assert policy.adapter is not None
    memo: dict[int, Any] = {id(each): each for each in (policy.tokens, policy.adapter)}
    whole: Policy = copy.deepcopy(policy, memo)
    whole.adapter = None
    for name, module in list(whole.lm.named_modules()):
        if isinstance(module, BaseTunerLayer):
            layer: Any = module.get_base_layer()
            dtype = layer.weight.dtype
            layer.float()  # rounded once, after the sum
            module.merge()
            parent, _, leaf = name.rpartition(".")
            setattr(whole.lm.get_submodule(parent), leaf, layer.to(dtype))
    del whole.lm.peft_config
    return whole.requires_grad_(True).eval()


@contextmanager
def dropping(policy: Policy, generator: torch.Generator) -> Iterator[None]:
    """Drops inputs of the adapter within the block, at the rate of its settings."""
    rate = policy.adapter.config.dropout if policy.adapter else 0.0

    def drop(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kept = torch.rand(args[0].shape, generator=generator) >= rate
        return (args[0] * (kept / (1 - rate)).to(args[0].device), *args[1:])

    layers = [module for name, module in policy.lm.named_modules() if name.endswith(f".lora_A.{NAME}")] if rate else []
    hooks = [layer.register_forward_pre_hook(drop) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def adapter_bytes(config: PreTrainedConfig, adapter: AdapterConfig) -> int:
    """Bytes of an adapter of a model with this configuration. Allocates nothing.

    UserError where the model has no such layers, or an output layer is adapted that shares its weights.
    """
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=None)
        _inject(lm, adapter)
    return sum(p.numel() * 4 for name, p in lm.named_parameters() if ".lora_" in name)


def _inject(lm: PreTrainedModel, config: AdapterConfig) -> None:
    """Puts adapters into the model's layers, in place."""
    layers = chosen_layers(lm, config.targets)
    try:
        import peft
    except ImportError as error:
        raise UserError("model.lora needs the package peft. Install it: pip install peft -c constraints.txt") from error
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=layers,
        fan_in_fan_out=all(isinstance(lm.get_submodule(layer), Conv1D) for layer in layers),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        try:
            peft.inject_adapter_in_model(settings, lm, NAME)
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"model.lora: {type(lm).__name__} cannot be adapted so ({reason}). Name other layers in "
                "model.lora.targets, or set model.lora to null."
            ) from error
    adapted = {name.partition(".lora_A.")[0] for name, _ in lm.named_parameters() if ".lora_A." in name}
    if adapted != {*layers}:  # peft takes layers with the names of experts for the experts
        kept = ",".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers if layer in adapted))
        raise UserError(
            f"model.lora.targets: peft adapts the experts of {type(lm).__name__} in the place of "
            f"{min({*layers} - adapted)}. Set it to {f'[{kept}]' if kept else 'other layers'}."
        )


def chosen_layers(lm: PreTrainedModel, targets: str | Sequence[str]) -> list[str]:
    """Lists the names of the layers that the targets mean. UserError where one means none, or a tied output layer."""
    linear = {name: module for name, module in lm.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    output = lm.get_output_embeddings()
    if targets == ALL:
        return [name for name, module in linear.items() if module is not output]
    found: list[str] = []
    for target in targets:
        named = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not named:
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            raise UserError(
                f"model.lora.targets: {target} names no linear layer of {type(lm).__name__}. It has {known}"
            )
        if output in [linear[name] for name in named] and lm.config.get_text_config().tie_word_embeddings:
            raise UserError(
                f"model.lora.targets: {target} is an output layer that shares its weights with the embedding, so it "
                f"cannot be adapted alone. Leave it out, or take {ALL}"
            )
        found += named
    return list(dict.fromkeys(found))


# --- Files, as peft reads and writes them -----------------------------------------------------------------------------
def adapter_tensors(policy: Policy) -> dict[str, Tensor]:
    """The adapter's tensors under peft's names."""
    own = {name: p for name, p in policy.lm.state_dict().items() if ".lora_" in name}
    return {PREFIX + name.replace(f".{NAME}.", "."): p.cpu().contiguous() for name, p in own.items()}


def adapter_settings(policy: Policy, base: str) -> str:
    """The text of `adapter_config.json` for an adapter of the model `base`, a folder or a hub name."""
    assert policy.adapter is not None
    config = policy.adapter.config
    kept: Any = policy.lm.peft_config[NAME]
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": config.targets if config.targets == ALL else sorted(config.targets),
        "fan_in_fan_out": bool(kept.fan_in_fan_out),
        "bias": "none",
        "inference_mode": True,
    }
    return json.dumps(settings, indent=1)


def read_adapter(folder: Path, bf16: bool = False) -> AdapterConfig:
    """Reads the settings of an adapter's folder. UserError where they are not of a plain LoRA adapter."""
    path = folder / SETTINGS_FILE
    found = read_json(path)
    keys = {"rank": "r", "alpha": "lora_alpha", "targets": "target_modules", "dropout": "lora_dropout"}
    fields: dict[str, Any] = {name: found.get(key) for name, key in keys.items()}
    plain = found.get("peft_type") == "LORA" and isinstance(fields["dropout"], int | float)
    if not plain or type(fields["rank"]) is not int or type(fields["alpha"]) is not int:
        raise UserError(f"{path} does not describe an adapter of this project. Make the run again.")
    try:
        return AdapterConfig(**fields, bf16=bf16)
    except UserError as error:
        raise UserError(f"{path} is damaged ({error}). Make the run again.") from error


def load_adapter(policy: Policy, tensors: dict[str, Tensor], place: str) -> None:
    """Loads an adapter's tensors. UserError, naming the `place`, where they are of another rank or other layers."""
    own = {name: p for name, p in policy.lm.named_parameters() if ".lora_" in name}
    names = {PREFIX + name.replace(f".{NAME}.", "."): name for name in own}
    if other := sorted(names.keys() ^ tensors.keys()):
        raise UserError(f"{place} has other layers than {SETTINGS_FILE} beside it says (as {other[0]}). Restore both.")
    for key, name in names.items():
        if tensors[key].shape != own[name].shape:
            raise UserError(
                f"{place}: {key} has the shape {tuple(tensors[key].shape)}, and by {SETTINGS_FILE} and the base it is "
                f"{tuple(own[name].shape)}. Restore both."
            )
        own[name].data.copy_(tensors[key])

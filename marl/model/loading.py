"""Reads language models and tokenizers of `transformers`, from a folder or the hub, and refuses what cannot be used."""

import copy
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from marl.common.errors import UserError
from marl.model.branches import MISFITS
from marl.model.tokens import MOST_TOKENS, Tokens

disable_progress_bar()

# The largest shapes that are built, several times those of the largest models; checked before anything is allocated.
MOST = {
    "vocab_size": MOST_TOKENS,
    "hidden_size": 1 << 16,
    "num_hidden_layers": 256,
    "num_attention_heads": 1 << 10,
    "num_key_value_heads": 1 << 10,
    "intermediate_size": 1 << 18,
    "max_position_embeddings": 1 << 24,
}
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of types that are not quantised
QUANTISED = ", which is not read here. Name the model in full precision (float32, bfloat16 or float16)."
NO_MODEL, NO_TOKENIZER = "no causal language model can be loaded", "no tokenizer can be loaded from it"
UNUSABLE = "its tokenizer cannot be used"


def longest_stream(config: PreTrainedConfig) -> int:
    """The longest stream that a model of this configuration can read, in tokens."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(int(1 << 30 if longest is None else longest), 1 << 30, _longrope(config) or 1 << 30)


def _longrope(config: PreTrainedConfig) -> int | None:
    """Number of tokens beyond which longrope's positions change in a whole pass; None for other positions."""
    written = config.get_text_config().to_json_string(use_diff=False)
    short = [int(size) for size in re.findall(r'"original_max_position_embeddings": (\d+)', written)]
    return min(short, default=None) if re.search(r'"(rope_)?type": "longrope"', written) else None


def check_context(config: PreTrainedConfig, context: int, setting: str = "model.context") -> None:
    """Raises UserError if streams of so many tokens are more than the model can read. `setting`: its name."""
    if context <= (longest := longest_stream(config)):
        return
    if longest == _longrope(config):
        raise UserError(
            f"{setting}={context}: with longrope, positions change in passes beyond {longest} tokens, so replies "
            f"would depend on who shares a pass. Set it to {longest} at most."
        )
    raise UserError(f"{setting}={context} is more than the model can read ({longest} tokens): lower it")


@contextmanager
def reading(name: str | None, failed: str) -> Iterator[None]:
    """Turns any error while reading a model into a UserError with its name. `failed`: what cannot be done."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    # Configurations, tokenizers, weights and templates raise errors of no common class; a panic of tokenizers is not
    # even an Exception.
    except BaseException as error:
        raise UserError(f"{called(name)}: {failed}: {_short(error)}{_hint(str(name))}") from error


def load_tokens(name: str | Path) -> Tokens:
    """Loads the tokenizer of a local folder or hub name, and reads its chat template."""
    tokenizer = load_tokenizer(name)
    with reading(str(name), UNUSABLE):
        return Tokens(tokenizer)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a local folder or hub name."""
    name = str(name)
    with reading(name, NO_TOKENIZER):
        folder = _folder(name, NO_TOKENIZER)
        if folder.is_dir() and not any(
            (folder / f).exists() for f in ("tokenizer.json", "tokenizer.model", "vocab.json")
        ):
            raise UserError(
                f"{called(name)}: the folder has no tokenizer (tokenizer.json). Save one beside the weights."
            )
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def load_config(name: str | Path) -> PreTrainedConfig:
    """Loads the configuration of a causal language model from a local folder or hub name."""
    name = str(name)
    with reading(name, NO_MODEL):
        if (file := _folder(name, NO_MODEL) / "config.json").is_file():
            _check_counts(name, json.loads(file.read_text(encoding="utf-8")))
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        except ValueError as error:
            if "trust_remote_code" in str(error):
                raise UserError(f"{called(name)}: it comes with code of its own, which is never run here") from error
            raise
        _check_config(name, config)
    if hasattr(config, "rescale_every"):  # RWKV in inference halves its own weights, and those of a saved copy again
        config.rescale_every = 0
    return config


def _folder(name: str, failed: str) -> Path:
    """The folder of this name. UserError if it is not there and the name cannot be the hub's."""
    if (name.startswith(("/", ".", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        home = " (write out what ~ stands for)" if name.startswith("~") else ""
        raise UserError(f"{called(name)}: {failed}: there is no such folder{home}")
    folder = Path(name)
    if folder.is_dir() and any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors")):
        raise UserError(f"{called(name)}: {failed}: the folder has GGUF weights. Name one with safetensors")
    return folder


def load_lm(name: str | Path, dtype: torch.dtype = torch.float32, *, exact: bool = False) -> PreTrainedModel:
    """Loads a causal language model of `transformers` from a local folder or hub name, from safetensors only.

    UserError where a weight is missing or not finite; with `exact` also where the files hold more than the model.
    """
    name = str(name)
    config = load_config(name)
    with reading(name, NO_MODEL):
        if Path(name).is_dir():
            _check_files(name, config)
        verbosity = get_verbosity()
        set_verbosity_error()  # no tables: what they tell is said below
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name,
                config=config,
                dtype=dtype,
                attn_implementation=None,  # not the configuration's, which may need packages or fetch code
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # which are refused below, by name
                output_loading_info=True,
            )
        finally:
            set_verbosity(verbosity)
        lm: PreTrainedModel
        lm, found = loaded
        for key, there, wanted in found["mismatched_keys"]:
            raise _refusal(
                name, f"{key} has the shape {tuple(there)} in its files, and by its config.json {tuple(wanted)}"
            )
        if missing := found["missing_keys"]:
            raise _refusal(name, f"its files lack {min(missing)}")
        if more := found["unexpected_keys"]:
            why = f"by its config.json there is no place for {min(more)}, which its files hold"
            if exact:
                raise _refusal(name, why)
            warnings.warn(f"{called(name)}: {why}; {len(more)} such tensors are left out", stacklevel=2)
        check_finite(lm.state_dict(), called(name))
        _check_head(lm, name)
        _forget_unread_window(lm)
    return lm


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file. UserError where it is damaged, or a number in it is not finite."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({_short(error)}). Restore it, or make it again.") from error
    check_finite(tensors, str(path))
    return tensors


def check_finite(tensors: Mapping[str, Tensor], place: str) -> None:
    """Raises UserError for the first tensor that holds NaN or infinity."""
    for name, tensor in tensors.items():
        # minimum and maximum tell, and take no memory
        if tensor.is_floating_point() and tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise UserError(
                f"{place}: the weights in {name} are not all finite (NaN or infinity). Take an earlier checkpoint, or "
                "another model."
            )


def _refusal(name: str, why: str) -> UserError:
    """Error about a model that cannot be read, with what to do."""
    return UserError(f"{called(name)}: {why}{_hint(name)}")


def called(name: str | None) -> str:
    """Name of a model in errors: its setting, or its folder if that is a policy of this project."""
    return name if name and _is_ours(name) else f"model.name={name}"


def _is_ours(name: str) -> bool:
    return (Path(name) / "policy.json").is_file()


def _hint(name: str) -> str:
    """Second sentence of an error about a model: what to do."""
    files = [path for path in sorted(Path(name).glob("*")) if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            if file.read(30).startswith(b"version https://git-lfs"):
                return f". {path.name} is a Git LFS pointer: run `git lfs pull` in the folder."
    kinds = {path.suffix for path in files}
    if (Path(name) / "adapter_config.json").is_file():
        return ". The folder has an adapter: name its base, or merge the two (marl.merge)."
    if ".safetensors" not in kinds and kinds & {".bin", ".pt", ".pth", ".ckpt"}:
        return ". The folder has pickled weights, which may run code and are not read: save them as safetensors."
    return ". Restore the folder, or make it again." if _is_ours(name) else ". Get the model again, or name another."


def _check_counts(name: str, part: Any) -> None:
    """Refuses counts of layers and labels from which `transformers` would build endless lists."""
    for key, value in part.items() if isinstance(part, dict) else ():
        if key.rstrip("s").endswith(("layer", "label")):
            _check_number(name, key, value, MOST_TOKENS)
        _check_counts(name, value)


def _check_number(name: str, key: str, value: Any, most: int) -> None:
    if isinstance(value, int | float) and not value <= most:
        raise UserError(f"{called(name)}: in config.json {key} is {value:.6g}, and at most {most} is read")


def _check_config(name: str, config: PreTrainedConfig) -> None:
    """Refuses a configuration of an unsupported model or of impossible shapes."""
    text = config.get_text_config()
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{called(name)}: transformers has no causal language model of the kind {config.model_type}. Name a model "
            "that goes on with a text, such as a Llama or a Qwen."
        )
    for each in (config, text):
        for key in ("quantization_config", "compression_config", "quantization"):  # the last is MLX's
            if (quantised := getattr(each, key, None)) is not None:
                method = quantised.get("quant_method") if isinstance(quantised, dict) else None
                raise UserError(
                    f"{called(name)}: its weights are quantised{f' ({method!r})' if method else ''}{QUANTISED}"
                )
    for key, most in MOST.items():
        _check_number(name, key, getattr(text, key, None), most)
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and (type(longest) is not int or longest < 1):
        raise UserError(f"{called(name)}: in config.json max_position_embeddings is {longest!r}, no number of tokens")
    check_context(config, 1)  # raises if a field is of the wrong type


def _check_files(name: str, config: PreTrainedConfig) -> None:
    """Refuses a folder whose weights are not there, not whole, quantised, or too few for the model."""
    folder = Path(name)
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if not (folder / files[0]).is_file() and index.is_file():
        files = sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    for file in files:
        if not (folder / file).is_file():
            raise _refusal(name, f"{NO_MODEL}: {file} is not there")
        try:
            with safe_open(folder / file, "pt") as tensors:
                kinds = {tensors.get_slice(key).get_dtype(): key for key in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise _refusal(name, f"{NO_MODEL}: {file} is damaged ({_short(error)})") from error
        if other := kinds.keys() - {*FLOATS}:
            kind = min(other)
            raise UserError(f"{called(name)}: {kinds[kind]} in {file} holds numbers of the kind {kind}{QUANTISED}")
    held = sum((folder / file).stat().st_size for file in files)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=None)
    wanted = sum(p.numel() for p in empty.parameters())
    if wanted > held:  # each number takes a byte at least; checked before any is allocated
        raise _refusal(name, f"config.json is of a model of {wanted:,} numbers, and its files have {held:,} bytes")


def named_ends(lm: PreTrainedModel) -> list[int]:
    """Ends of sequence in a model's generation config, which has one id, a list, or none."""
    named = getattr(lm.generation_config, "eos_token_id", None)
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if any(type(each) is not int for each in ids):  # true is no token
        raise UserError(
            f"{called(lm.name_or_path)}: eos_token_id is {str(named)[:60]!r}. In generation_config.json (or "
            "config.json) it must be a token's number, a list of them, or null."
        )
    return ids


def check_rows(lm: PreTrainedModel, tokens: Tokens) -> None:
    """Raises UserError if a stream may hold tokens that the model has no embedding rows for.

    Special tokens that no stream holds, such as those of images, may lie beyond the rows.
    """
    layers = lm.get_input_embeddings(), lm.get_output_embeddings()
    rows = min(layer.get_parameter("weight").shape[0] for layer in layers)
    marks, never = tokens.format.marks(), set(tokens.unspeakable)
    if any(i in marks or i not in never for i in range(rows, tokens.size)):
        raise UserError(
            f"{called(lm.name_or_path)}: its tokenizer has {tokens.size} tokens, and the model's embedding only "
            f"{rows} rows; load both, call model.resize_token_embeddings({tokens.size}) and save the model again"
        )


def _check_head(lm: PreTrainedModel, name: str) -> None:
    """Refuses a model that changes logits after the output layer (soft caps, scales), sees later tokens, or needs more
    than a stream of tokens."""
    lm.eval()
    kind = f"{called(name)}: {type(lm).__name__}"
    ids = torch.arange(min(8, lm.config.get_text_config().vocab_size))[None]
    head = lm.get_output_embeddings()

    def read(ids: Tensor) -> Tensor:
        return head(lm.base_model(input_ids=ids).last_hidden_state.to(head.weight.dtype)).float()

    try:
        # the layer's input is magnified, so that a soft cap shows in a model of small logits too
        with torch.no_grad(), head.register_forward_pre_hook(lambda _, args: (100 * args[0],)):
            whole, ours, start = lm(input_ids=ids).logits.float(), read(ids), read(ids[:, : ids.shape[1] // 2])
    except MISFITS as error:
        raise UserError(
            f"{kind} does not read tokens as causal language models do: {_short(error)}. Choose another model.name."
        ) from error
    if not whole.isfinite().all():
        raise _refusal(name, "its logits are not all finite: its weights are too large")
    if not torch.allclose(whole, ours, atol=1e-3, rtol=1e-3):
        raise UserError(
            f"{kind} changes its logits after the output layer, which is not supported. Choose another model.name."
        )
    near = 1e-3 if lm.dtype == torch.float32 else 0.05  # of the largest
    if not torch.allclose(ours[:, : start.shape[1]], start, atol=near * float(ours.abs().max())):
        raise UserError(
            f"{kind} sees tokens that come later, so it is no causal language model. Choose another model.name."
        )


@torch.no_grad()
def _forget_unread_window(lm: PreTrainedModel) -> None:
    """Sets a configuration's sliding window to 0 if the model sees everything, whatever it says."""
    config = lm.config.get_text_config()
    if not (window := getattr(config, "sliding_window", None)):
        return
    ids, found = torch.arange(12)[None] % config.vocab_size, []
    for tried in (4, 12):
        config.sliding_window = tried
        found.append(lm.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    config.sliding_window = 0 if torch.equal(*found) else window


def _short(error: BaseException) -> str:
    """Text of an error in one line that any terminal can show."""
    text = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
    if " " not in text:  # no sentence, such as the name of a key
        text = f"{type(error).__name__} {text}".strip()
    return text.rstrip(".") if len(text) <= 200 else f"{text[:200]}..."

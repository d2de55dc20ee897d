"""Folders of models and policies that are damaged, odd or hostile: one sentence, or the right weights."""

import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from marl.common.errors import UserError
from marl.model.loading import check_finite, load_config, load_lm, read_tensors
from marl.model.policy import Policy, pretrained
from marl.storage.checkpoint import load_policy, save_policy
from tests.marl.models import CHATML, hf_tokenizer, random_lm, save, tiny_policy
from tests.marl.storage.test_checkpoint import same, seal

Change = Callable[[Path], object]
FILES = (
    "config.json", "generation_config.json", "model.safetensors", "policy.json", "tokenizer.json",
    "tokenizer_config.json", "value_head.safetensors",
)  # fmt: skip
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
CONTENTS = {
    "empty": b"", "no text": b"\xff\xfe\0", "deep": b"[" * 100_000, "a list": b"[]", "null": b"null",
    "nothing": b"{}",
}  # fmt: skip
VALUES = (None, True, -1, 0, 10**9, 10**40, 1e300, float("nan"), "x", "\ud800", [], {}, [None], {"a": 1})


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy(privileged_size=3)


@pytest.fixture(scope="module")
def whole(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "policy"
    save_policy(folder, policy, {"game": "dond", "base": None, "figures": {"a": 1.0}, "made_of": {"base": {}}})
    return folder


def tried(whole: Path, policy: Policy, change: Change) -> str:
    """Loads a changed copy of a policy, with checksums that fit. Returns the error that refuses it, or "" if the policy
    is unchanged."""
    folder = whole.parent / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    change(folder)
    for path in folder.iterdir():
        if path.is_dir():  # as no checksum can be of a folder
            (folder / "checksums.json").write_text('{"config.json": ""}')
            break
    else:
        seal(folder)
    try:
        loaded = load_policy(folder)
    except UserError as error:
        text = str(error)
        assert text.startswith(str(folder)) and "\n" not in text and len(text) < len(str(folder)) * 2 + 500, text
        return text.encode().decode()  # what a terminal can show
    assert same(loaded, policy) and loaded.context > 0
    return ""


def written(name: str, data: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(data)


def with_setting(name: str, key: str, value: Any) -> Change:
    def change(folder: Path) -> None:
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, key: value}))

    return change


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_one_sentence_or_does_no_harm(name: str, whole: Path, policy: Policy) -> None:
    data = (whole / name).read_bytes()
    changes = [written(name, content) for content in CONTENTS.values()]
    changes += [written(name, data[: len(data) // 2]), written(name, data + b"9")]
    found = [tried(whole, policy, change) for change in changes]
    if name not in ("generation_config.json", "tokenizer_config.json"):  # which may say nothing
        assert all(found), found
    tried(whole, policy, lambda folder: (folder / name).unlink())
    assert tried(whole, policy, lambda folder: ((folder / name).unlink(), (folder / name).mkdir()))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("config.json", ("attn_implementation", "experts_implementation", "layer_types", "num_labels", "n_layer",
                         "quantization_config", "rope_scaling", "sliding_window", "text_config",
                         "transformers_weights")),
        ("generation_config.json", ("eos_token_id", "cache_implementation", "temperature")),
        ("policy.json", ("run", "learner")),
        ("tokenizer_config.json", ("added_tokens_decoder", "chat_template", "eos_token", "pad_token")),
        ("tokenizer.json", ()),
    ],
)  # fmt: skip
def test_a_setting_of_any_kind_is_one_sentence_or_does_no_harm(
    name: str, keys: tuple[str, ...], whole: Path, policy: Policy
) -> None:
    """Each key gets a wrong value, and the next key another one."""
    own = json.loads((whole / name).read_text())
    refused = 0
    for place, key in enumerate(sorted({*own, *keys})):
        refused += bool(tried(whole, policy, with_setting(name, key, VALUES[3 * place % len(VALUES)])))
    assert refused


@pytest.mark.parametrize(
    ("name", "key", "value", "why"),
    [
        ("config.json", "num_hidden_layers", 10**9, "num_hidden_layers is 1e.09, and at most"),
        ("config.json", "num_hidden_layers", 200, "config.json is of a model of .* numbers, and its files have"),
        ("config.json", "num_hidden_layers", 1, "no place for model.layers.1.*, which its files hold. Restore"),
        ("config.json", "num_labels", 10**9, "num_labels is 1e.09, and at most"),
        ("config.json", "vocab_size", 10**9, "vocab_size is 1e.09, and at most 1048576 is read"),
        ("config.json", "vocab_size", 300, r"model.embed_tokens.weight has the shape \(.*, 32\) in its files, and by"),
        ("config.json", "max_position_embeddings", 10**9, "max_position_embeddings is 1e.09, and at most 16777216"),
        ("config.json", "max_position_embeddings", -1, "max_position_embeddings is -1, no number of tokens"),
        ("config.json", "model_type", "clip", "transformers has no causal language model of the kind clip"),
        ("generation_config.json", "eos_token_id", True, "eos_token_id is 'True'. In generation_config.json"),
        ("generation_config.json", "eos_token_id", [5, "x"], r"eos_token_id is .*x.*. In generation_config.json"),
        ("policy.json", "privileged_size", None, "policy.json does not say what its critic reads"),
        ("policy.json", "privileged_size", -1, "policy.json does not say what its critic reads"),
        ("policy.json", "privileged_size", 7, "is not the critic of 7 extra numbers"),
        ("policy.json", "privileged_size", 10**9, "is not the critic of 1000000000 extra numbers"),
        ("policy.json", "figures", {"a": "x"}, "is damaged: figures is"),
        ("policy.json", "made_of", {"base": 3}, "is damaged: made_of is"),
        ("policy.json", "game", 3, "is damaged: game is '3'. Make it again"),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_be_is_refused_by_what_is_wrong(
    name: str, key: str, value: Any, why: str, whole: Path, policy: Policy
) -> None:
    with pytest.raises(UserError, match=why):
        raise UserError(tried(whole, policy, with_setting(name, key, value)))


def test_an_undamaged_policy_is_the_policy(whole: Path, policy: Policy) -> None:
    """The tests above would also pass if every folder were refused; this one would not."""
    assert not tried(whole, policy, lambda folder: None)
    assert not tried(whole, policy, lambda folder: (folder / "generation_config.json").unlink())
    assert not tried(whole, policy, with_setting("policy.json", "more", [1]))


@pytest.mark.parametrize(
    ("name", "number"), [("value_head.safetensors", float("nan")), ("model.safetensors", -float("inf"))]
)
def test_a_policy_whose_weights_are_not_finite_is_refused(
    name: str, number: float, whole: Path, policy: Policy
) -> None:
    tensors = load_file(whole / name)
    last = max(tensors)
    tensors[last] = tensors[last].clone()
    tensors[last].view(-1)[-1] = number
    error = tried(whole, policy, lambda folder: save_file(tensors, folder / name, {"format": "pt"}))
    assert f"the weights in {last} are not all finite" in error
    with pytest.raises(UserError, match=f"the weights in {last} are not all finite"):
        check_finite(tensors, "here")


def test_a_checkpoints_weights_are_read_as_carefully(tmp_path: Path) -> None:
    path = tmp_path / "learner.safetensors"
    for data in (b"", POINTER, b"\0" * 64):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"learner\.safetensors cannot be read \(.*\)\. Restore it"):
            read_tensors(path)
    save_file({"a": torch.zeros(2), "b": torch.full((2,), torch.nan)}, path)
    with pytest.raises(UserError, match=r"learner\.safetensors: the weights in b are not all finite"):
        read_tensors(path)
    save_file({"a": torch.zeros(0), "b": torch.ones(2, dtype=torch.int64)}, path)
    assert {name: tensor.tolist() for name, tensor in read_tensors(path).items()} == {"a": [], "b": [1, 1]}


# -- models that users name --------------------------------------------------------------------------------------------
@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = hf_tokenizer(CHATML)
    save(tmp_path / "model", random_lm("llama", len(tokenizer)), tokenizer)
    return tmp_path / "model"


def refused(model: Path) -> str:
    with pytest.raises(UserError) as error:
        pretrained(str(model), seed=0)
    text = str(error.value)
    assert text.startswith(f"model.name={model}: ") and "\n" not in text, text
    return text


def changed(model: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """The model's weights once more, changed."""
    tensors = {name: tensor.clone() for name, tensor in load_file(model / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_called_one(name: str, model: Path) -> None:
    (model / name).write_bytes(POINTER)
    assert f"{name} is a Git LFS pointer: run `git lfs pull`" in refused(model)


def test_a_broken_download_is_refused(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    for length in (len(data) - 2000, 100, 3, 0):
        (model / "model.safetensors").write_bytes(data[:length])
        assert "model.safetensors is damaged" in refused(model) and "Get the model again" in refused(model)
    (model / "model.safetensors").write_bytes(data)
    made = (model / "tokenizer.json").read_text()
    for length in (len(made) - 200, len(made) // 2, 0):
        (model / "tokenizer.json").write_text(made[:length])
        assert "no tokenizer can be loaded from it" in refused(model)


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "of next year"},
        {},
    ],
)
def test_quantised_weights_are_refused_by_name(quantised: dict[str, Any], model: Path) -> None:
    with_setting("config.json", "quantization_config", quantised)(model)
    method = quantised.get("quant_method", "")
    method_shown = f" ({method!r})" if method else ""
    assert f"its weights are quantised{method_shown}, which is not read here" in refused(model)
    with pytest.raises(UserError, match="its weights are quantised"):  # before they are loaded
        load_config(str(model))
    with_setting("config.json", "quantization_config", None)(model)
    load_config(str(model))


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16])
def test_weights_are_read_by_their_kind_of_numbers(kind: torch.dtype, model: Path) -> None:
    """Quantised weights are refused even if no setting says that they are quantised."""
    name = "model.layers.1.mlp.up_proj.weight"
    changed(model, lambda tensors: tensors.update({name: tensors[name].to(kind)}))
    if kind.itemsize == 1:
        assert f"{name} in model.safetensors holds numbers of the kind" in refused(model)
    else:
        assert pretrained(str(model), seed=0).lm.dtype == torch.float32


@pytest.mark.parametrize("implementation", ["flash_attention_2", "kernels-community/flash-attn"])
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_named_by_a_configuration_changes_nothing(implementation: str, key: str, model: Path) -> None:
    ids = torch.arange(4)[None]
    expected = load_lm(str(model))
    with_setting("config.json", key, implementation)(model)
    lm = load_lm(str(model))
    with torch.no_grad():
        assert torch.equal(lm(ids).logits, expected(ids).logits)


def test_weights_that_overflow_are_refused(model: Path) -> None:
    name = "model.norm.weight"
    changed(model, lambda tensors: tensors.update({name: torch.full((32,), 1e300, dtype=torch.float64)}))
    assert f"the weights in {name} are not all finite" in refused(model)
    changed(model, lambda tensors: tensors.update({name: torch.full((32,), 3e38)}))
    assert "its logits are not all finite" in refused(model)


def test_weights_that_are_not_there_are_named(model: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    whole = (model / "model.safetensors").read_bytes()
    changed(model, lambda tensors: tensors.pop(name))
    assert f"its files lack {name}" in refused(model)
    (model / "model.safetensors").write_bytes(whole)
    changed(model, lambda tensors: tensors.update({name: tensors[name][:16]}))
    assert f"{name} has the shape (16, 32) in its files, and by its config.json (32, 32)" in refused(model)
    (model / "model.safetensors").write_bytes(whole)
    changed(model, lambda tensors: tensors.update({"tower.weight": torch.zeros(3)}))
    with pytest.warns(UserWarning, match=r"there is no place for tower\.weight, .*; 1 such tensors are left out"):
        load_lm(str(model))


def test_a_part_that_is_not_there_is_named(model: Path) -> None:
    load_lm(str(model)).save_pretrained(model, max_shard_size="20KB")
    (model / "model.safetensors").unlink(missing_ok=True)
    parts = sorted(model.glob("model-*.safetensors"))
    assert len(parts) > 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_lm(str(model))
    data = parts[1].read_bytes()
    parts[1].write_bytes(data[:-5])
    assert f"{parts[1].name} is damaged" in refused(model)
    parts[1].unlink()
    assert f"{parts[1].name} is not there" in refused(model)
    for text in ("", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'):
        (model / "model.safetensors.index.json").write_text(text)
        assert "no causal language model can be loaded" in refused(model)


def test_code_that_comes_with_a_model_is_never_run(model: Path, tmp_path: Path) -> None:
    """Models of a known kind load without their own code; others are refused."""
    (model / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with_setting("config.json", "auto_map", {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.Own"})(model)
    with_setting("tokenizer_config.json", "auto_map", {"AutoTokenizer": ["code.Own", None]})(model)
    pretrained(str(model), seed=0)  # of a known kind
    with_setting("config.json", "model_type", "own")(model)
    assert "it comes with code of its own, which is never run here" in refused(model)
    assert not (tmp_path / "ran").exists()


def test_weights_in_other_formats_are_refused_by_theirs(model: Path, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    (model / "model.safetensors").unlink()
    assert "model.safetensors is not there" in refused(model)
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    assert "The folder has pickled weights, which may run code" in refused(model)
    assert not (tmp_path / "ran").exists()
    (model / "config.json").unlink()
    (model / "model-q4.gguf").write_bytes(b"GGUF")
    assert "the folder has GGUF weights" in refused(model)
    with pytest.raises(UserError, match="the folder has GGUF weights"):  # before a tokenizer or a size is asked for
        load_config(str(model))

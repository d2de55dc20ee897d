"""Policies come back to the last bit, damage is named, and no file is ever unpickled."""

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch

from marl.common.errors import UserError
from marl.common.files import write_json
from marl.storage.checkpoint import load_policy, read_card, save_policy, started_from, verify_folder
from tests.marl.hint import hint_policy
from tests.marl.models import hf_policy, tiny_policy
from tests.marl.storage.test_checkpoint import ROOT, flip, same


@pytest.mark.parametrize("kind", ["tiny", "gpt2", "qwen3"])
def test_a_policy_comes_back_to_the_bit(kind: str, tmp_path: Path) -> None:
    policy = tiny_policy(privileged_size=3) if kind == "tiny" else hf_policy(tmp_path / "hf", kind, privileged_size=3)
    save_policy(tmp_path / "policy", policy, {"game": "hint"})
    assert verify_folder(tmp_path / "policy") == ""
    loaded = load_policy(tmp_path / "policy")
    assert same(policy, loaded) and type(loaded.lm) is type(policy.lm) and not loaded.training
    assert loaded.privileged_size == 3 and loaded.context == policy.context
    assert read_card(tmp_path / "policy") == {"game": "hint", "privileged_size": 3}
    text = "[message] 2 books? é [END]"
    ids = loaded.tokens.encode(text)
    assert ids == policy.tokens.encode(text) and loaded.tokens.format == policy.tokens.format
    with torch.no_grad():
        assert loaded.hidden(torch.tensor([ids])).equal(policy.hidden(torch.tensor([ids])))


def test_another_critic_starts_afresh_and_is_the_same_every_time(tmp_path: Path) -> None:
    policy = tiny_policy(privileged_size=3)
    save_policy(tmp_path / "policy", policy, {})
    before = torch.get_rng_state()
    first, second = (load_policy(tmp_path / "policy", privileged_size=5) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert same(first, second) and first.privileged_size == 5
    for mine, loaded in zip(policy.lm.parameters(), first.lm.parameters(), strict=True):
        assert mine.equal(loaded)
    assert not first.value(torch.randn(4, 32, generator=torch.Generator().manual_seed(0)), torch.ones(4, 5)).any()
    assert not same(policy, load_policy(tmp_path / "policy", privileged_size=0))


def test_a_damaged_policy_names_the_file(tmp_path: Path) -> None:
    save_policy(tmp_path / "policy", hint_policy(0), {})
    for name in ("model.safetensors", "value_head.safetensors", "tokenizer.json", "policy.json"):
        folder = shutil.copytree(tmp_path / "policy", tmp_path / name)
        flip(folder / name)
        with pytest.raises(UserError, match=rf"damaged file {name}\. Remove the folder"):
            load_policy(folder)
        (folder / name).unlink()
        with pytest.raises(UserError, match=rf"damaged file {name}"):
            load_policy(folder)
    sums = json.loads((tmp_path / "policy" / "checksums.json").read_text())
    write_json(tmp_path / "policy" / "checksums.json", {k: v for k, v in sums.items() if k != "model.safetensors"})
    with pytest.raises(UserError, match=r"does not list model\.safetensors"):
        load_policy(tmp_path / "policy")


PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}
UNPICKLE = {"joblib.load", "joblib.dump", "joblib.Memory", "torch.load", "torch.save", "torch.hub.load",
            "torch.jit.load", "pandas.read_pickle", "pd.read_pickle"}  # fmt: skip
LAST = {name.rpartition(".")[2] for name in UNPICKLE}  # writing every attribute out as text would take seconds


def pickles_in(source: str) -> list[str]:
    """What in a file reads or writes pickles."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.partition(".")[0] in PICKLES]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imported = {f"{node.module}.{a.name}" for a in node.names}
            found += [n for n in imported if n.partition(".")[0] in PICKLES or n in UNPICKLE]
        elif isinstance(node, ast.Attribute) and node.attr in LAST and ast.unparse(node) in UNPICKLE:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "use_safetensors"):
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            if value is not (node.arg == "use_safetensors"):
                found.append(ast.unparse(node))
    return found


def test_nothing_is_ever_unpickled() -> None:
    assert pickles_in("import pickle") and pickles_in("from torch import load") and pickles_in("x = torch.load(p)")
    assert pickles_in("np.load(p, allow_pickle=True)") and pickles_in("f(use_safetensors=False)")
    assert not pickles_in("np.load(p, allow_pickle=False); f(use_safetensors=True); json.load(f)")
    files = [path for package in ("envs", "marl", "experiments") for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    assert {str(f): found for f in files if (found := pickles_in(f.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize("card", ["{}", '{"base": 3}'])
def test_a_policy_that_does_not_say_where_it_started(tmp_path: Path, card: str) -> None:
    (tmp_path / "policy.json").write_text(card)
    with pytest.raises(UserError, match=r"policy.json does not say from which base"):
        started_from(tmp_path)

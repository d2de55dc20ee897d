"""An adapter changes nothing at its start, learns alone, shares its base's tensors, and is read by peft itself."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
)

from marl.common.errors import UserError
from marl.learning.config import UpdateConfig
from marl.learning.update import make_optimizer, update
from marl.model.loading import load_config, load_lm, load_tokenizer
from marl.model.lora import AdapterConfig, adapted, adapter_bytes, chosen_layers, copied, dropping, is_own, merged
from marl.model.optim import trained
from marl.model.policy import Policy, bf16_copy, pretrained, take_weights
from marl.model.tokens import Tokens
from marl.storage.checkpoint import (
    load_policy,
    load_weights,
    model_digest,
    own_tensors,
    policy_digest,
    save_policy,
    started_from,
)
from tests.marl.models import hf_policy, hf_tokenizer, save, small_tokens, tiny_policy, with_critic
from tests.marl.storage.test_checkpoint import seal
from tests.marl.updates import TERMS, noisy, played

peft = pytest.importorskip("peft")

SMALL = AdapterConfig(rank=4, alpha=8)
CARD = {"game": "hint", "base": None, "run": "run", "learner": "learner"}
KINDS = ("tiny", "gpt2", "llama", "gemma3")  # tied, tied with Conv1D, untied, tied with windows


def gemma3(folder: Path) -> Policy:
    """Half of its layers see a window of 16 tokens."""
    tokenizer = hf_tokenizer()
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=8, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=1024, initializer_range=0.2, bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        name = save(folder, Gemma3ForCausalLM(config), tokenizer)
    return with_critic(Policy(load_lm(name), Tokens(load_tokenizer(name))))


def policy_of(kind: str, folder: Path) -> Policy:
    if kind == "tiny":
        return tiny_policy(context=1024)
    return gemma3(folder) if kind == "gemma3" else hf_policy(folder, kind)


def moved(policy: Policy, seed: int = 0) -> Policy:
    """The policy with an adapter far from its start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if is_own(name):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return policy


def rows(policy: Policy) -> Tensor:
    return torch.randint(policy.tokens.size, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(policy: Policy) -> Tensor:
    return policy.logits(policy.hidden(rows(policy)))


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_off_at_its_start_and_shares_every_tensor_of_its_base(kind: str, tmp_path: Path) -> None:
    base = policy_of(kind, tmp_path)
    before, state = logits(base), torch.get_rng_state()
    one, two = moved(adapted(base, SMALL, 0)), adapted(base, SMALL, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits(two), before)  # to the last bit: B = 0
    hidden = base.hidden(rows(base))
    assert torch.equal(two.value(hidden, torch.zeros(2, 40, 0)), base.value(hidden, torch.zeros(2, 40, 0)))
    assert (logits(one) - before).abs().max() > 0.1
    assert torch.equal(logits(base), before)  # the reference: the adapter off

    held = {p.data_ptr() for p in base.lm.parameters()}
    for policy in (one, two):
        shared = {p.data_ptr() for name, p in policy.lm.named_parameters() if not is_own(name)}
        assert shared == held
        assert {name for name, p in policy.named_parameters() if p.requires_grad} == {
            *filter(is_own, own_tensors(policy))
        }
    assert sum(p.numel() * 4 for n, p in one.lm.named_parameters() if ".lora_" in n) == adapter_bytes(
        base.lm.config, SMALL
    )
    assert policy_digest(adapted(base, SMALL, 1)) == policy_digest(two)  # a seed fixes A
    assert policy_digest(adapted(base, SMALL, 2)) != policy_digest(two)


def test_layers_that_peft_takes_for_experts_are_refused_by_name() -> None:
    """Adapting the shared expert would make peft adapt the routed experts instead, which cannot be merged. The error
    lists targets that work."""
    config = DeepseekV3Config(
        vocab_size=small_tokens().size, hidden_size=32, intermediate_size=32, num_hidden_layers=1, n_routed_experts=4,
        num_attention_heads=2, num_key_value_heads=2, moe_intermediate_size=16, kv_lora_rank=8, q_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=0,
    )  # fmt: skip
    base = Policy(DeepseekV3ForCausalLM(config).eval(), small_tokens())
    said = r"model\.lora\.targets: peft .* of DeepseekV3ForCausalLM in the place of .*shared_expert.*Set it to \[(.*)\]"
    with pytest.raises(UserError, match=said) as error:
        adapted(base, SMALL)
    with pytest.raises(UserError, match=said):
        adapter_bytes(config, SMALL)
    found = re.search(said, str(error.value))
    assert found
    policy = moved(adapted(base, replace(SMALL, targets=found[1].split(","))))
    torch.testing.assert_close(logits(merged(policy)), logits(policy), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_moves_the_adapter_and_the_value_head_alone(optimizer: str) -> None:
    base, batch = played()
    policy, digest = adapted(base, SMALL), policy_digest(base)
    start = {name: tensor.clone() for name, tensor in own_tensors(policy).items()}
    config = UpdateConfig(minibatches=2, token_budget=128, learning_rate=1e-2, optimizer=optimizer)
    steps = make_optimizer(policy, config)
    listed = {id(p) for group in steps.param_groups for p in group["params"]}
    assert listed == {id(p) for p in trained(policy)}
    losses = {name: TERMS[name] for name in ("policy", "value", "kl", "listening", "world_model")}
    found = update(policy, base, batch, losses, steps, config, torch.Generator().manual_seed(0))
    assert policy_digest(base) == digest and found["update/grad_norm"] > 0
    still = [name for name, tensor in own_tensors(policy).items() if torch.equal(tensor, start[name])]
    assert still == []
    assert sum(tensor.nbytes for tensor in own_tensors(policy).values()) < 0.5 * sum(
        p.nbytes for p in base.parameters()
    )


def test_activation_checkpointing_gives_the_same_adapter() -> None:
    found = []
    for recompute in (False, True):
        base, batch = played()
        policy = adapted(base, SMALL)
        config = UpdateConfig(minibatches=2, token_budget=128, gradient_checkpointing=recompute)
        losses = {name: TERMS[name] for name in ("policy", "listening")}
        update(policy, base, batch, losses, make_optimizer(policy, config), config, torch.Generator().manual_seed(0))
        found.append(policy_digest(policy))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_merging_gives_a_plain_model_of_the_same_logits(kind: str, tmp_path: Path) -> None:
    base = policy_of(kind, tmp_path / "base")
    policy = moved(adapted(base, SMALL))
    digest = policy_digest(base)
    whole = merged(policy)
    assert (
        policy_digest(base) == digest
        and whole.adapter is None
        and whole.lm.state_dict().keys() == base.lm.state_dict().keys()
    )
    assert torch.allclose(logits(whole), logits(policy), atol=1e-4)
    assert all(p.requires_grad for p in whole.parameters())
    save_policy(tmp_path / "merged", whole, CARD)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert torch.equal(read(rows(base)).logits, logits(whole))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3"])
def test_a_policy_folder_is_an_adapter_of_peft(kind: str, tmp_path: Path) -> None:
    base = policy_of(kind, tmp_path / "base")
    policy = moved(adapted(base, SMALL))
    save_policy(tmp_path / "policy", policy, CARD)
    assert not (tmp_path / "policy" / "model.safetensors").exists()
    one, two = load_policy(tmp_path / "policy"), load_policy(tmp_path / "policy", over=base)
    for loaded in (one, two):
        assert {n: t.tolist() for n, t in own_tensors(loaded).items()} == {
            n: t.tolist() for n, t in own_tensors(policy).items()
        }
        assert torch.equal(logits(loaded), logits(policy))
    assert two.adapter is not None and two.adapter.base is base
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        for read in (
            peft.PeftModel.from_pretrained(plain, tmp_path / "policy"),
            peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "policy"),
        ):
            assert torch.equal(read(rows(base)).logits, logits(policy))
        whole = read.merge_and_unload()
        assert torch.equal(whole(rows(base)).logits, logits(merged(policy)))


def test_adapters_that_are_loaded_share_one_base(tmp_path: Path) -> None:
    base = hf_policy(tmp_path / "base", "llama", privileged_size=3)
    for seed in (0, 1):
        save_policy(tmp_path / f"policy{seed}", moved(adapted(base, SMALL), seed), CARD)
    one, two = (load_policy(tmp_path / f"policy{seed}", privileged_size=size) for seed, size in ((0, 0), (1, 3)))
    assert one.adapter is not None and two.adapter is not None and one.adapter.base is two.adapter.base
    assert one.privileged_size == 0 and two.privileged_size == 3  # a critic that reads other facts is a new one
    assert not torch.equal(logits(one), logits(two))


def test_adapters_over_one_base_read_questions_in_their_own_way(tmp_path: Path) -> None:
    base = tiny_policy(context=1024)
    one, other = adapted(base, SMALL), adapted(base, SMALL)
    other.tokens.beside = True
    assert not one.tokens.beside and not base.tokens.beside


def test_a_copy_of_an_adapted_policy_shares_the_frozen_weights() -> None:
    policy = moved(adapted(tiny_policy(context=1024), SMALL))
    twin = copied(policy)
    for (name, ours), theirs in zip(policy.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs) and (ours is theirs) is not is_own(name)
    assert twin.adapter is policy.adapter
    plain = tiny_policy(context=1024)
    assert not any(a is b for a, b in zip(plain.parameters(), copied(plain).parameters(), strict=True))


def test_weights_in_bfloat16_with_an_adapter_in_float32(tmp_path: Path) -> None:
    config = AdapterConfig(rank=4, alpha=8, bf16=True)
    hf_policy(tmp_path / "base", "llama")
    base = pretrained(tmp_path / "base", seed=0, dtype=torch.bfloat16)
    policy = moved(adapted(base, config))
    kinds = {name: p.dtype for name, p in policy.named_parameters()}
    assert {kind for name, kind in kinds.items() if is_own(name)} == {torch.float32}
    assert {kind for name, kind in kinds.items() if not is_own(name)} == {torch.bfloat16}
    save_policy(tmp_path / "policy", policy, CARD)
    loaded = load_policy(tmp_path / "policy")
    assert torch.equal(logits(loaded), logits(policy)) and loaded.lm.dtype == torch.bfloat16
    assert merged(policy).lm.dtype == torch.bfloat16


def test_a_copy_that_plays_in_bfloat16_takes_over_adapters(tmp_path: Path) -> None:
    policy = adapted(tiny_policy(), SMALL)
    copied = bf16_copy(policy)
    assert torch.allclose(logits(copied), logits(policy), atol=0.5)
    take_weights(copied, moved(policy))
    for name, tensor in own_tensors(copied).items():
        assert torch.equal(tensor, own_tensors(policy)[name]), name


def test_an_adapters_dropout_is_of_supervised_training_alone() -> None:
    policy = moved(adapted(tiny_policy(), AdapterConfig(rank=4, alpha=8, dropout=0.5)))
    plain = logits(policy)
    assert torch.equal(plain, logits(policy.train())) and policy.eval()
    with dropping(policy, torch.Generator().manual_seed(0)):
        dropped = logits(policy)
    with dropping(policy, torch.Generator().manual_seed(0)):
        assert torch.equal(logits(policy), dropped) and not torch.equal(dropped, plain)
    assert torch.equal(logits(policy), plain)
    without = moved(adapted(tiny_policy(), SMALL))
    with dropping(without, torch.Generator().manual_seed(0)):
        assert torch.equal(logits(without), plain)


# --- What is refused --------------------------------------------------------------------------------------------------
def test_targets_that_the_model_does_not_have(tmp_path: Path) -> None:
    tied, untied = hf_policy(tmp_path / "tied", "qwen3").lm, hf_policy(tmp_path / "untied", "llama").lm
    assert chosen_layers(untied, ["q_proj", "lm_head"]) == [
        "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "lm_head",
    ]  # fmt: skip
    assert "lm_head" not in chosen_layers(untied, "all-linear") and len(chosen_layers(untied, "all-linear")) == 14
    with pytest.raises(
        UserError, match=r"targets: qproj names no linear layer of Qwen3ForCausalLM\. It has q_proj, k_"
    ):
        adapter_bytes(tied.config, AdapterConfig(targets=["q_proj", "qproj"]))
    with pytest.raises(UserError, match=r"targets: embed_tokens names no linear layer"):
        adapter_bytes(tied.config, AdapterConfig(targets=["embed_tokens"]))
    with pytest.raises(UserError, match=r"targets: lm_head is an output layer that shares its weights"):
        adapter_bytes(tied.config, AdapterConfig(targets=["lm_head"]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": 0}, r"model\.lora\.rank=0: must be at least 1"),
        ({"alpha": 0}, r"model\.lora\.alpha=0: must be at least 1"),
        ({"dropout": 1.0}, r"model\.lora\.dropout=1\.0: must be at least 0 and below 1"),
        ({"targets": "q_proj"}, r"model\.lora\.targets=q_proj: must be all-linear, or a list"),
        ({"targets": []}, r"model\.lora\.targets=\[\]: must be all-linear, or a list"),
        ({"targets": [3]}, r"model\.lora\.targets=\[3\]: must be all-linear, or a list"),
    ],
)
def test_impossible_settings_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        AdapterConfig(**settings)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of an adapter, with its base beside it."""
    save_policy(tmp_path / "run" / "policy", moved(adapted(hf_policy(tmp_path / "base", "llama"), SMALL)), CARD)
    return tmp_path / "run" / "policy"


def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*given: object, **more: object) -> None:
        raise AssertionError("weights are loaded before the error")

    monkeypatch.setattr("marl.model.loading.AutoModelForCausalLM.from_pretrained", load)


def test_an_adapter_for_another_base_is_refused(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = model_digest(str(tmp_path / "base"))
    save(tmp_path / "base", noisy(hf_policy(tmp_path / "other", "llama"), 0).lm, None)
    assert model_digest(str(tmp_path / "base")) != digest
    no_weights(monkeypatch)
    with pytest.raises(
        UserError, match=r"run/policy is an adapter for another base than .*base, whose files have changed"
    ):
        load_policy(saved)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(UserError, match=r"run/policy is an adapter, and its base .*base is not there\. Put it back\."):
        load_policy(saved)


def test_a_base_is_found_beside_the_run_and_in_it(saved: Path, tmp_path: Path) -> None:
    there = logits(load_policy(saved))
    for place in (tmp_path / "bases" / "base", tmp_path / "run" / "reference"):
        shutil.rmtree(place.parent / "gone", ignore_errors=True)
        source = next(p for p in (tmp_path / "base", tmp_path / "bases" / "base") if p.exists())
        place.parent.mkdir(exist_ok=True)
        shutil.move(source, place)
        assert torch.equal(logits(load_policy(saved)), there)


@pytest.mark.parametrize("place", ["bases/base", "run/reference"])
def test_a_base_is_found_for_a_past_self_of_a_run(saved: Path, tmp_path: Path, place: str) -> None:
    """A run's folder may have been copied elsewhere: its base is found among the bases or in the run."""
    past, there = saved.parent / "pool" / "learner-000001", logits(load_policy(saved))
    (saved.parent / "config.yaml").touch()
    shutil.copytree(saved, past)
    (tmp_path / place).parent.mkdir(exist_ok=True)
    shutil.move(tmp_path / "base", tmp_path / place)
    assert torch.equal(logits(load_policy(past)), there)


def test_a_run_may_be_called_pool(saved: Path, tmp_path: Path) -> None:
    there, run = logits(load_policy(saved)), tmp_path / "pool"
    shutil.move(saved.parent, run)
    (tmp_path / "bases").mkdir()
    shutil.move(tmp_path / "base", tmp_path / "bases" / "base")
    assert torch.equal(logits(load_policy(run / "policy")), there)
    assert started_from(run / "policy") == CARD["base"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": 8}, r"lora_A\.weight has the shape \(4, 32\), and by adapter_config\.json and the base it is \(8, 32\)"),
        ({"target_modules": ["q_proj"]}, r"has other layers than adapter_config\.json beside it says"),
        ({"r": "four"}, r"adapter_config\.json does not describe an adapter of this project"),
        ({"peft_type": "IA3"}, r"adapter_config\.json does not describe an adapter of this project"),
        ({"target_modules": "q"}, r"adapter_config\.json is damaged \(model\.lora\.targets=q: must be"),
    ],
)
def test_settings_that_do_not_fit_the_tensors_are_refused(saved: Path, change: dict, said: str) -> None:
    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    seal(saved)
    with pytest.raises(UserError, match=said):
        load_policy(saved)


def test_a_checkpoint_of_all_weights_is_refused_for_an_adapter() -> None:
    base = tiny_policy()
    policy, whole = adapted(base, SMALL), noisy(tiny_policy(), 0)
    digest = policy_digest(base)
    with pytest.raises(ValueError, match=r"missing \['lm\.model\.layers.*unexpected"):
        load_weights(policy, whole.state_dict())
    assert policy_digest(base) == digest


def test_an_adapter_is_refused_as_a_model(saved: Path) -> None:
    assert load_config(str(saved)).model_type == "llama"
    with pytest.raises(UserError, match=r"The folder has an adapter: name its base, or merge the two \(marl\.merge\)"):
        load_lm(saved)

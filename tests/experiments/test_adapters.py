"""Runs with an adapter: what they leave, that they resume to the last bit, and who plays with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import marl
from experiments import evaluate, learning, train
from experiments.setup import devices
from experiments.studies import crossplay
from marl.common.errors import UserError
from marl.model.policy import Policy
from marl.report.runs import read_evaluation
from marl.storage.checkpoint import checkpoints_in, folder_digest, load_policy, policy_digest
from tests.composing import DOND, configure, run_folder
from tests.marl.models import CHATML, hf_tokenizer, random_lm, save
from tests.runs import stop, without_pages

pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("no_pages")

LORA = "model.lora={rank: 4, alpha: 8, targets: all-linear, dropout: 0.0, bf16: false}"
SHORT = ("algo.iterations=1", "eval.games=0", "eval.final_games=2")


def configured(folder: Path, bases: Path, *overrides: str) -> DictConfig:
    return configure("train", *DOND, LORA, "algo.iterations=3", "eval.every=3", f"runs={folder}", f"cache={bases}",
                     *overrides)  # fmt: skip


def trained(folder: Path, bases: Path, *overrides: str) -> Path:
    cfg = configured(folder, bases, *overrides)
    train.main(cfg)
    return run_folder(cfg)


@pytest.fixture(scope="module")
def run(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with without_pages():
        return trained(tmp_path_factory.mktemp("runs"), bases)


def test_a_run_keeps_adapters_alone_and_its_base_once(run: Path, bases: Path) -> None:
    card, policy = json.loads((run / "run.json").read_text()), json.loads((run / "policy" / "policy.json").read_text())
    base = next(path for path in bases.glob("dond-*") if folder_digest(path) == card["base_digest"])
    assert policy["adapts"] == {"name": str(base), "digest": card["base_digest"], "bf16": False}
    whole = (base / "model.safetensors").stat().st_size
    last = checkpoints_in(run / "checkpoints")[-1]
    kept = load_file(last / "learner.safetensors")
    assert kept and all(".lora_" in name or name.startswith("value_head.") for name in kept)
    assert not (run / "policy" / "model.safetensors").exists()
    assert (run / "policy" / "adapter_model.safetensors").stat().st_size < whole / 3
    assert card["per_game"]["playing_seconds"] > 0 < card["per_game"]["learning_seconds"]
    assert card["per_game"]["cache_bytes"] > 0 and card["peak_bytes"] > 1 << 27
    assert "peft" in card["made_with"][-1]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(row for row in rows if row["phase"] == "train")
    assert first["loss/kl"] < 1e-3  # the reference is the same model with the adapter off
    assert all(row["update/approx_kl"] < 0.1 for row in rows if row["phase"] == "train")  # nothing stale has played


def test_the_base_is_that_of_full_training(run: Path, bases: Path, tmp_path: Path) -> None:
    """A small model's base is trained from scratch, so that both can be compared from one start."""
    full = trained(tmp_path, bases, "model.lora=null", *SHORT)
    assert json.loads((full / "run.json").read_text())["base"] == json.loads((run / "run.json").read_text())["base"]
    with pytest.raises(UserError, match=r"init\.learner=.*it trained an adapter, and this run trains all weights"):
        trained(tmp_path, bases, "model.lora=null", f"init.learner={run}", *SHORT)
    with pytest.raises(UserError, match=r"init\.learner=.*it trained all weights, and this run trains an adapter"):
        trained(tmp_path, bases, f"init.learner={full}", *SHORT)


def test_a_stopped_run_ends_as_one_that_was_never_stopped(run: Path, bases: Path, tmp_path: Path) -> None:
    cfg = configured(tmp_path, bases)
    stop(cfg, 2)
    train.main(cfg)
    again = run_folder(cfg)
    for name in ("metrics.jsonl", "policy/adapter_model.safetensors", "policy/value_head.safetensors",
                 "checkpoints/iteration-000003/learner-optimizer.safetensors"):  # fmt: skip
        assert (again / name).read_bytes() == (run / name).read_bytes(), name


def test_an_adapter_plays_is_merged_and_is_compared(run: Path, bases: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    evaluate.main(
        configure(
            "evaluate",
            "device=cpu",
            "progress=false",
            f"players=[{run},base]",
            "games=4",
            f"out={out}",
            f"cache={bases}",
            f"runs={run.parent}",
        )
    )
    assert set(read_evaluation(out / "evaluation.json")["conditions"]) >= {run.name, "base"}
    crossplay.main(
        configure(
            "crossplay", "device=cpu", "progress=false", f"players=[{run},scripted]", "games=2", f"runs={run.parent}",
            f"cache={bases}", f"cells={tmp_path / 'cells'}", f"publish={tmp_path / 'published'}",
        )
    )  # fmt: skip
    players = marl.load(run)
    own, base = players["trained"].policy, players["base"].policy
    assert own.adapter is not None and own.adapter.base is base
    marl.merge(run, tmp_path / "merged")
    ids = torch.randint(own.tokens.size, (2, 30), generator=torch.Generator().manual_seed(0))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        logits = own.logits(own.hidden(ids))
        assert torch.allclose(plain(ids).logits, logits, atol=1e-4)
        assert not torch.allclose(base.logits(base.hidden(ids)), logits, atol=1e-3)
    with pytest.raises(UserError, match=r"merged holds something\. Name a new folder\."):
        marl.merge(run, tmp_path / "merged")


def test_frozen_partners_and_a_second_learner_share_the_base(
    run: Path, bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[bool] = []
    seat = learning.seat_players

    def seated(cast: Any, table: Any, env: Any, base: Policy, *rest: Any, **more: Any) -> dict[str, Any]:
        found = seat(cast, table, env, base, *rest, **more)
        policies = [agent.policy for agent in found.values()]
        shared.extend(each.adapter is not None and each.adapter.base is base for each in policies)
        return found

    monkeypatch.setattr(learning, "seat_players", seated)
    cast = f"cast.negotiator={{player: learner, partner: {run}, partners: 1}}"
    folder = trained(tmp_path, bases, cast, "eval.cast={}", f"init.learner={run}", *SHORT)
    assert shared == [True] and json.loads((folder / "run.json").read_text())["warm_starts"] == 1
    second = trained(
        tmp_path, bases, "cast.negotiator={player: learner, partner: rival, partners: 1}", "eval.cast={}", *SHORT
    )
    one, two = load_policy(second / "policy"), load_policy(second / "rival")
    assert one.adapter is not None and two.adapter is not None and one.adapter.base is two.adapter.base
    assert policy_digest(one) != policy_digest(two)


def test_a_base_is_fine_tuned_by_an_adapter_that_is_merged(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(single_digits=True)
    name = save(tmp_path / "model", random_lm("llama", len(tokenizer), context=4096), tokenizer)
    cfg = configure(
        "train", "model=hf", f"model.name={name}", "model.context=4096", "model.max_new_tokens=6", LORA,
        "model.lora.dropout=0.1", "base=scripted", "base.games=2", "base.rows=2", "base.learning_rate=1e-2",
        "base.vary={}", "env.style=compact", "env.max_errors=1", "progress=false", "threads=1",
        "algo.iterations=1", "algo.games=2", "eval.games=0", "eval.final_games=2", f"runs={tmp_path / 'runs'}",
    )  # fmt: skip
    train.main(cfg)
    folder = run_folder(cfg)
    made = json.loads((folder / "reference" / "policy.json").read_text())["made_of"]
    assert made["lora"]["rank"] == 4 and made["lora"]["dropout"] == 0.1 and "lora" not in made["model"]
    before, tuned = load_file(Path(name) / "model.safetensors"), load_file(folder / "reference" / "model.safetensors")
    assert before.keys() == tuned.keys()
    changed = {key for key in before if not torch.equal(before[key], tuned[key])}
    assert changed == {key for key in before if ".self_attn." in key or ".mlp." in key}
    assert json.loads((folder / "policy" / "policy.json").read_text())["adapts"]["digest"] == folder_digest(
        folder / "reference"
    )


# --- What is refused, before a model is made --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("model.lora.targets=[query]",), r"model\.lora\.targets: query names no linear layer of LlamaForCausalLM"),
        (("model.lora.targets=[lm_head]",), r"lm_head is an output layer that shares its weights with the embedding"),
        (("shard=true",), r"shard=true: an adapter has no weights to split. Set it to false"),
        (("model.lora.bf16=true", "algo.play_bf16=true"), r"algo\.play_bf16=true: with model\.lora\.bf16=true all wei"),
        (
            ("+model.lora.size=3",),
            r"model\.lora\.size is no setting of AdapterConfig; known: alpha, bf16, dropout, rank",
        ),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(overrides: tuple[str, ...], said: str, tmp_path: Path, bases: Path) -> None:
    with pytest.raises(UserError, match=said):
        trained(tmp_path, bases, *overrides)


def test_another_rank_or_other_targets_than_the_starting_run_are_refused(
    run: Path, bases: Path, tmp_path: Path
) -> None:
    this = {
        "rank=8": "rank 8, alpha 8, targets all-linear and bf16 false",
        "targets=[q_proj,o_proj]": r"rank 4, alpha 8, targets \[o_proj,q_proj\] and bf16 false",
        "bf16=true": "rank 4, alpha 8, targets all-linear and bf16 true",
    }
    for setting, said in this.items():
        its = "its adapter has rank 4, alpha 8, targets all-linear and bf16 false"
        with pytest.raises(UserError, match=rf"{its}, and this run's has {said}\. Give both the same model\.lora\."):
            trained(tmp_path, bases, f"init.learner={run}", f"model.lora.{setting}")


def test_adapters_as_a_model_or_for_another_base_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors come before a base is loaded or a folder is made."""
    monkeypatch.setattr(train, "base_policy", lambda *_, **__: pytest.fail("a base is loaded"))
    tokenizer = hf_tokenizer(CHATML, single_digits=True)
    name = save(tmp_path / "model", random_lm("llama", len(tokenizer), context=4096), tokenizer)
    given = ["env=dond", "model=hf", "progress=false", f"runs={tmp_path / 'runs'}", f"cache={tmp_path}"]
    for lora in (LORA, "model.lora=null"):
        with pytest.raises(UserError, match=r"model\.name=.*policy: this is an adapter, not a whole model\. Merge it"):
            train.main(configure("train", *given, f"model.name={run / 'policy'}", lora))
    with pytest.raises(UserError, match=r"init\.learner=.*: it is an adapter for another base than this run's\. Let"):
        train.main(configure("train", *given, f"model.name={name}", LORA, f"init.learner={run}"))
    assert not (tmp_path / "runs").exists()


def test_a_template_that_cues_no_reply_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "base_policy", lambda *_, **__: pytest.fail("a base is loaded"))
    tokenizer = hf_tokenizer("{% for message in messages %}{{ message['content'] }}{% endfor %}", single_digits=True)
    name = save(tmp_path / "model", random_lm("llama", len(tokenizer), context=4096), tokenizer)
    cfg = configure("train", "env=dond", "model=hf", f"model.name={name}", f"runs={tmp_path / 'runs'}")
    with pytest.raises(UserError, match=r"The chat template of .*model puts nothing .*no cue .* Mend the template, or"):
        train.main(cfg)
    assert not (tmp_path / "runs").exists()


def test_bfloat16_on_a_card_without_it_is_refused(bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "without_bf16", lambda device: "this card has no bfloat16")
    with pytest.raises(UserError, match=r"model\.lora\.bf16=true: this card has no bfloat16. Set it to false"):
        trained(tmp_path, bases, "model.lora.bf16=true")


def test_a_folder_of_gguf_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model-q4.gguf").write_bytes(b"GGUF")
    cfg = configure("train", "model=hf", f"model.name={tmp_path / 'model'}", LORA, f"runs={tmp_path}")
    with pytest.raises(UserError, match=r"the folder has GGUF weights\. Name one with safetensors"):
        train.main(cfg)

"""Runs from configuration to report, small enough for a test: what is written, repeated, refused."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from experiments import evaluate, final_games, train
from experiments.setup.spec import run_spec
from experiments.setup.stages import base_folder
from marl.common.distributed import ONE as ONE_RANK
from marl.common.errors import UserError
from marl.metrics.stats import rate
from marl.storage.checkpoint import folder_digest, newest_checkpoint, read_state, save_policy
from marl.storage.folder import REFERENCE
from marl.storage.tracking import Tracker, make_tracker
from tests.composing import DOND, config_hash, configure, identity, run_folder
from tests.marl.models import CHATML, hf_tokenizer, random_lm, save, tiny_policy
from tests.runs import identical, lines, texts
from tests.torture import LEARNED, always

ONE = ("algo.iterations=1", "eval.games=0", "eval.final_games=2")


def test_a_run_leaves_what_the_readme_says(finished: Path) -> None:
    for name in LEARNED["ppo"]:  # a run that learned nothing would be like any other
        assert always(configure("train", *DOND, f"runs={finished.parent}"), name), name
    for name in ("config.yaml", "metrics.jsonl", "timing.jsonl", "evaluation.json", "run.json", "report.html"):
        assert (finished / name).stat().st_size > 0, name
    metrics = lines(finished / "metrics.jsonl")
    assert [(m["phase"], m["iteration"]) for m in metrics] == [
        ("eval", 0), ("train", 1), ("eval", 1), ("train", 2), ("eval", 2)
    ]  # fmt: skip
    terms = ("policy", "value", "entropy", "kl", "listening", "world_model")
    assert {*(f"loss/{name}" for name in terms), "reward/game", "reward/speaking", "belief/accuracy", "game/score",
            "update/approx_kl"} <= metrics[1].keys()  # fmt: skip
    assert not any(name.startswith(("speed/", "time/")) for m in metrics for name in m)
    assert {"speed/tokens_per_second", "speed/games_per_second", "speed/update_tokens_per_second"} <= lines(
        finished / "timing.jsonl"
    )[0].keys()
    card = json.loads((finished / "run.json").read_text())
    assert card["seeds"] == [0] and card["figures"]["trained"]["game/score"]["n"] == 4 and card["speed"]
    assert (finished / "policy" / "model.safetensors").exists()
    assert len(list((finished / "episodes").glob("*.jsonl"))) == 5  # three evaluations while training, base, trained
    found = json.loads((finished / "evaluation.json").read_text())["conditions"]
    for name in ("reward/game", "reward/speaking"):
        assert name in found["base"] and name in found["trained"]
    losses = {name: value for name, value in metrics[3].items() if name.startswith("loss/")}  # of the last iteration
    assert {n: i["mean"] for n, i in found["trained"].items() if n.startswith("loss/")} == losses != {}
    assert not any(name.startswith("loss/") for name in found["base"])
    page = (finished / "report.html").read_text()
    assert "<svg" in page and not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def test_wandb_has_the_final_figures_of_a_run_that_was_killed_before_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's card exists by then, so that the run counts as done and is never resumed."""
    found = {"trained": {"game/score": rate([True, False])}}

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def tracker(*_: Any) -> Tracker:
        return make_tracker("wandb", tmp_path, name="n", run_id="abc123", config={})

    record = SimpleNamespace(
        say=lambda: None, keep_base=lambda *_: None, note=dict,
        write_card=lambda *_: (tmp_path / "run.json").touch(),
    )  # fmt: skip
    for name, instead in {
        "Record": SimpleNamespace(of=lambda *_: record), "open_tracker": tracker, "base_of": lambda *_: (None, None),
        "learn": lambda *_: {}, "final_evaluation": lambda *_: (found, {}), "build_report": killed,
    }.items():  # fmt: skip
        monkeypatch.setattr(train, name, instead)
    spec = SimpleNamespace(folder=tmp_path, progress=False, name="n")
    with pytest.raises(KeyboardInterrupt):
        train.lead(SimpleNamespace(spec=spec, chat=None, expected=None), ONE_RANK)  # type: ignore[arg-type]
    [kept] = tmp_path.glob("wandb/offline-run-*/run-abc123.wandb")
    assert (tmp_path / "run.json").exists() and b"trained/game/score/low" in kept.read_bytes()


def test_a_finished_run_is_not_run_again(
    finished: Path, bases: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (finished / "run.json").stat().st_mtime_ns
    cfg = configure("train", *DOND, f"runs={finished.parent}", f"cache={bases}")
    train.main(cfg)
    assert "is done" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")  # of torchrun's processes the first has said so
    train.main(cfg)
    assert capsys.readouterr().out == ""
    assert (finished / "run.json").stat().st_mtime_ns == before


def test_a_finished_run_needs_nothing_but_its_folder(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No GPU, for which it may have been started elsewhere, and no room for a base."""
    shutil.copytree(finished, tmp_path / "runs" / "a")
    cfg = configure("train", *DOND, f"runs={tmp_path / 'runs'}", "device=cuda", "cache=/proc/nowhere")
    shutil.move(tmp_path / "runs" / "a", run_folder(cfg))
    text = OmegaConf.to_yaml(OmegaConf.create(identity(cfg)))
    (run_folder(cfg) / "config.yaml").write_text(text)
    assert train.main(cfg) == run_folder(cfg)
    assert "is done" in capsys.readouterr().out
    (run_folder(cfg) / "config.yaml").write_text(text.replace("  games: 4\n", "  games: 999\n"))
    with pytest.raises(UserError, match=r"config\.yaml was edited \(algo\.games=999, here 4\)"):
        train.main(cfg)


@pytest.mark.usefixtures("no_pages")
def test_a_finished_run_of_other_inputs_is_not_taken_for_this_one(bases: Path, tmp_path: Path) -> None:
    contexts = tmp_path / "contexts.txt"
    contexts.write_text("1 0 1 1 3 3\n1 1 1 0 3 3\n")
    own = (f"env.contexts={contexts}", "base.games=20", "eval.env.split=all", f"runs={tmp_path}", f"cache={bases}")
    cfg = configure("train", *DOND, *ONE, *own)
    assert train.main(cfg) == train.main(cfg)
    contexts.write_text("1 0 1 1 3 3\n1 4 1 3 3 1\n")
    with pytest.raises(UserError, match=r"is done, but .*contexts.* is not what it was made with: put the old one"):
        train.main(cfg)


@pytest.mark.usefixtures("no_pages")
def test_a_reference_that_an_attempt_left_does_not_stand_for_another_base(bases: Path, tmp_path: Path) -> None:
    cfg = configure("train", *DOND, f"runs={tmp_path}", f"cache={bases}", *ONE)
    save_policy(run_folder(cfg) / REFERENCE, tiny_policy(), {"game": "dond"})
    made = train.main(cfg)
    assert folder_digest(made / REFERENCE) == read_state(newest_checkpoint(made / "checkpoints"))["base"]


@pytest.mark.usefixtures("no_pages")
def test_the_same_configuration_gives_the_same_run(finished: Path, bases: Path, tmp_path: Path) -> None:
    """The second run has W&B and deterministic=true, and still the same name and metrics: a CPU has deterministic
    algorithms alone."""
    cfg = configure("train", *DOND, "deterministic=true", "tracker=wandb", f"runs={tmp_path}", f"cache={bases}")
    train.main(cfg)
    assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"]
    train.main(configure("train", *DOND, f"runs={finished.parent}", f"cache={bases}"))  # done; the mode ends
    assert not torch.are_deterministic_algorithms_enabled()
    again = run_folder(cfg)
    assert json.loads((again / "run.json").read_text())["deterministic"] is True
    assert again.name == finished.name
    assert (again / "metrics.jsonl").read_text() == (finished / "metrics.jsonl").read_text()
    assert [path.name.rpartition("-")[2] for path in again.glob("wandb/offline-run-*")] == [config_hash(cfg)]
    (record,) = again.glob("wandb/offline-run-*/*.wandb")
    for text in (f"report-{config_hash(cfg)}", "trained/game/score/high", cfg.name, cfg.arm):
        assert text.encode() in record.read_bytes(), text


@pytest.mark.usefixtures("no_pages")
def test_what_is_only_measured_changes_nothing_that_is_learned(finished: Path, bases: Path, tmp_path: Path) -> None:
    measured = ("eval.games=2", "eval.seed=3", "eval.final_games=2", "eval.every=2", "~loss.world_model")
    cfg = configure("train", *DOND, *measured, f"runs={tmp_path}", f"cache={bases}")
    train.main(cfg)
    ours, others = (
        [line for line in lines(f / "metrics.jsonl") if line["phase"] == "train"] for f in (run_folder(cfg), finished)
    )
    for line in others:
        assert line.pop("loss/world_model")
    assert ours == others and len(ours) > 1
    in_a_file = configure("train", *DOND, *measured[:-1], "loss.world_model=null", f"runs={tmp_path}", f"cache={bases}")
    assert run_folder(in_a_file) == run_folder(cfg) and run_spec(in_a_file) == run_spec(cfg)
    assert identical(run_folder(cfg) / "policy", finished / "policy")


@pytest.mark.usefixtures("no_pages")
def test_an_arm_does_not_play_its_bases_games_again(
    finished: Path, bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is evaluated again only for another concurrency, because the batch shape changes the last digits."""
    measured: list[str] = []
    measure = final_games.measure

    def noting(work: object, folder: Path, name: str, *rest: Any) -> None:
        measured.append(name)
        measure(work, folder, name, *rest)

    monkeypatch.setattr(final_games, "measure", noting)
    arm = ("ablation=game_only", "algo.iterations=1", f"runs={tmp_path}", f"cache={bases}")
    made = train.main(configure("train", *DOND, *arm))
    assert measured == ["trained"]
    ours, other = (json.loads((run / "evaluation.json").read_text()) for run in (made, finished))
    assert ours["conditions"]["base"] == other["conditions"]["base"]
    assert ours["conditions"]["trained"] != other["conditions"]["trained"]
    train.main(configure("train", *DOND, *arm, "algo.concurrency=2"))
    assert sorted(measured) == ["base", "trained", "trained"]


def test_evaluating_a_run_against_scripts(
    finished: Path, bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [o for o in DOND if o.startswith(("model.", "base."))]
    common = [*small, "games=6", "concurrency=3", "progress=false", f"cache={bases}", f"out={tmp_path}"]
    evaluate.main(configure("evaluate", f"players=[{finished},scripted]", *common))
    out = capsys.readouterr().out
    assert "game/agreement" in out and "scripted" in out and "cache: 6 slots of 64.1 KiB, " in out
    conditions = json.loads((tmp_path / "evaluation.json").read_text())["conditions"]
    assert len(conditions) == 3
    evaluations: list[tuple[list[int], list[list[str]]]] = []
    for sampling in ("null", "1", "1"):
        evaluate.main(configure("evaluate", "players=[random]", f"sampling={sampling}", *common))
        games = tmp_path / "episodes.jsonl"
        evaluations.append(([game["seed"] for game in lines(games)], texts(games)))
    own, other, again = evaluations
    assert other[0] == own[0] and other[1] != own[1] and again == other
    assert json.loads((tmp_path / "evaluation.json").read_text())["about"]["sampling"] == 1
    with pytest.raises(UserError, match="sampling=-1: must be a whole number, at least 0"):
        evaluate.main(configure("evaluate", "players=[random]", "sampling=-1", *common))
    with pytest.raises(UserError, match="neither a run's folder nor base"):
        evaluate.main(configure("evaluate", "players=[nobody]", *common))


@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize(
    "overrides",
    [
        ["algo=filtered_bc", "algo.keep=all"],
        ["algo.credit.speech=common", "cast.negotiator={partner: base, partners: 0.5}", "loss.world_model.weight=0.1",
         "model.critic=privileged", "algo.update.optimizer=muon", "loss=plan", "loss.plan.weight=0",
         "algo.planner.iterations=5", "algo.planner.lambdas=[0.3]"],
        ["algo.credit.speech=separate_only", "cast.negotiator={partner: scripted, partners: 0.9}",
         "reward.speaking.listeners=all", "env.objective=-1", "reward.speaking.of=log_probability",
         "loss.kl.estimator=k3"],
        ["~loss.kl", "~reward.speaking", "loss.imitation.weight=1", "algo.imitate=all", "algo.update.rows=3",
         "algo.update.optimizer=sgd", "algo.temperature=0.7", "algo.update.target_kl=0.01", "algo.update.epochs=2",
         "eval.temperature=0"],
        ["algo=pikl", "algo.planner.iterations=5", "cast.negotiator={partner: base+plan, partners: 0.5}"],
        ["algo.advantage=grpo", "algo.group=2", "eval.final_games=3"],  # which are no groups
    ],
)  # fmt: skip
def test_every_setting_trains(overrides: list[str], bases: Path, tmp_path: Path) -> None:
    cfg = configure("train", *DOND, *ONE, *overrides, f"runs={tmp_path}", f"cache={bases}")
    train.main(cfg)
    (trained,) = lines(run_folder(cfg) / "metrics.jsonl")[:1]
    assert trained["phase"] == "train" and trained["update/grad_norm"] > 0
    assert ("loss/kl" in trained) == ("~loss.kl" not in overrides)
    assert ("loss/plan" in trained) == ("algo=pikl" in overrides)  # with loss=plan this base claims nothing to plan
    assert trained.get("filter/kept") == (1.0 if "algo=filtered_bc" in overrides else None)
    kept = {"algo=filtered_bc", "algo.imitate=all", "algo=pikl"}.intersection(
        overrides
    )  # elsewhere none beats the mean
    assert ("loss/imitation" in trained) == bool(kept)
    assert ("groups/flat" in trained) == ("algo.group=2" in overrides)


@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize("algo", ["ppo", *(pytest.param(a, marks=pytest.mark.slow) for a in ("filtered_bc", "pikl"))])
def test_an_iteration_without_the_learner_teaches_nothing(algo: str, bases: Path, tmp_path: Path) -> None:
    own = [
        "cast.negotiator={player: base, partner: learner, partners: 0.001}",
        "+eval.cast.negotiator.player=learner",
        "+eval.cast.negotiator.partner=base",
        *(["algo.planner.iterations=5"] if algo == "pikl" else []),
    ]
    few = ("eval.games=0", "eval.final_games=2")
    cfg = configure("train", *DOND, f"algo={algo}", *own, *few, f"runs={tmp_path}", f"cache={bases}")
    train.main(cfg)
    run = run_folder(cfg)
    rows = [row for row in lines(run / "metrics.jsonl") if row["phase"] == "train"]
    assert [row["iteration"] for row in rows] == [1, 2] and "update/grad_norm" not in rows[0]
    assert identical(base_folder(run), run / "policy")


@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize("algo", ["ppo", *(pytest.param(a, marks=pytest.mark.slow) for a in ("filtered_bc", "pikl"))])
def test_games_that_outgrow_the_context_are_given_up_and_counted(algo: str, bases: Path, tmp_path: Path) -> None:
    # A model that has learned next to nothing is refused again and again.
    own = ("base.games=24", "base.rows=16", "model.context=128", "env.max_entries=6", "env.max_errors=30")
    cfg = configure("train", *DOND, f"algo={algo}", *own, "algo.games=2", "eval.final_games=2", f"runs={tmp_path}",
                    f"cache={bases}")  # fmt: skip
    train.main(cfg)
    rows = lines(run_folder(cfg) / "metrics.jsonl")
    assert [row["iteration"] for row in rows if row["phase"] == "train"] == [1, 2]
    for row in rows:
        assert 0 < row["errors/outgrown"] <= row["errors/aborted"] <= 1, row
    played = json.loads((run_folder(cfg) / "evaluation.json").read_text())["conditions"]
    assert all(found["errors/outgrown"]["mean"] > 0 for found in played.values())


@pytest.mark.usefixtures("no_pages")
@pytest.mark.filterwarnings("ignore:.* reads whole streams again")
@pytest.mark.parametrize(
    "architecture", ["qwen3", *(pytest.param(a, marks=pytest.mark.slow) for a in ("mistral", "mamba2", "gpt_neo"))]
)
def test_any_causal_model_goes_through_the_same_loop(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A saved model with a chat template: natural prompts, its own base, the same files at the end."""
    tokenizer = hf_tokenizer(CHATML, single_digits=True)
    save(tmp_path / "model", random_lm(architecture, len(tokenizer), context=4096), tokenizer)
    cfg = configure("train", 
        "model=hf", f"model.name={tmp_path / 'model'}", "model.context=4096", "model.max_new_tokens=6",
        "env.max_errors=1", "progress=false", "threads=1",
        "algo.iterations=1", "algo.games=2", "algo.concurrency=2", "eval.games=0", "eval.final_games=2",
        f"runs={tmp_path / 'runs'}",
    )  # fmt: skip
    train.main(cfg)
    card = json.loads((run_folder(cfg) / "run.json").read_text())
    assert card["base"] is None and set(card["figures"]) == {"base", "trained"}
    assert lines(run_folder(cfg) / "metrics.jsonl")[0]["errors/per_turn"] > 0  # random weights say nothing right
    said = capsys.readouterr().out
    assert said.count("warning: next to nothing can be learned so far: the game refuses 100% of") == 1
    assert "train the model on scripted games first, by base=scripted" in said


def test_the_folder_of_a_run_follows_from_the_run_that_its_pattern_finds(finished: Path) -> None:
    cfg = configure("train", f"runs={finished.parent}", f"init.learner={finished.name[:-2]}*")
    named = configure("train", f"runs={finished.parent}", f"init.learner={finished.name}")
    assert run_folder(cfg) == run_folder(named)


def test_what_cannot_be_begun_is_named(bases: Path, tmp_path: Path) -> None:
    """A damaged run card, a policy that does not say its game, a cache that cannot be written."""
    own = (*DOND, f"runs={tmp_path}")
    run = run_folder(configure("train", *own))
    run.mkdir()
    (run / "run.json").write_text('{"run": ')
    (tmp_path / "other" / "policy").mkdir(parents=True)
    (tmp_path / "other" / "policy" / "policy.json").write_text('{"gane": "dond"}')
    (tmp_path / "file").write_text("")
    for given, said in (
        ((f"cache={bases}",), r"run\.json: expected one JSON object"),
        ((f"cache={bases}", f"init.learner={tmp_path / 'other'}"), r"policy\.json does not say of which game it is"),
        ((f"cache={tmp_path / 'file' / 'bases'}", "seed=1"), r"cache=.*cannot be written"),
    ):
        with pytest.raises(UserError, match=said):
            train.main(configure("train", *own, *given))
    assert [path.name for path in run.iterdir()] == ["run.json"]

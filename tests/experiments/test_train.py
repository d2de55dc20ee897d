"""Runs from configuration to report, small enough for a test: what is written, resumed, repeated, refused."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

from experiments import evaluate, final_games, learning, play, report, show, train
from experiments.setup import record
from experiments.setup.config import plain
from experiments.setup.spec import run_spec, zero_weights
from experiments.setup.stages import base_folder
from experiments.setup.work import Work, seeds_of, warm_starts
from marl.common.errors import UserError
from marl.common.files import read_json
from marl.decoding import memory
from marl.decoding.probes import size_of
from marl.metrics.stats import Interval
from marl.metrics.wording import WORDING
from marl.report.page import read_run
from marl.report.transcripts import read_episodes
from marl.rollout.games import env_maker
from marl.rollout.seeds import Seeds
from marl.storage.checkpoint import folder_digest, newest_checkpoint, read_state, save_policy
from marl.storage.folder import REFERENCE, claim, nearest_run
from marl.types import Episode, Payment
from tests.composing import config_hash, identity, run_folder
from tests.marl.episodes import aborted_game, deal_game, failed_game
from tests.marl.models import CHATML, hf_tokenizer, random_lm, save, tiny_policy
from tests.torture import LEARNED, TALKING, always

FEW_ENTRIES = "env.max_entries=6"  # of a negotiation
SMALL = [
    *TALKING, FEW_ENTRIES, "experiment=dond_quickstart", "progress=false", "threads=1",
    "model.hidden_size=32", "model.layers=2", "model.intermediate_size=64", "algo.iterations=2", "algo.games=6",
    "algo.concurrency=4", "algo.max_new_tokens=12", "eval.games=4", "eval.every=1", "eval.final_games=6",
    "checkpoint.every=1",
]  # fmt: skip

SLOT = 2 * 2 * 1 * 8 * (1024 + 1) * 4  # bytes: layers, keys and values, heads, width, tokens and one of padding
SLOT_MIB = "0.1 MiB"


def configure(*overrides: str, command: str = "train") -> DictConfig:
    with initialize_config_module("conf", version_base="1.3"):
        return compose(command, overrides=list(overrides))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base models are trained once for all tests of this file."""
    return tmp_path_factory.mktemp("bases")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The folder of a finished run."""
    cfg = configure(*SMALL, f"runs={tmp_path_factory.mktemp('runs')}", f"cache={cache}")
    train.main(cfg)
    for name in LEARNED["ppo"]:  # a run that learned nothing would be like any other
        assert always(cfg, name), name
    return run_folder(cfg)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_what_the_readme_says(finished: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl", "timing.jsonl", "evaluation.json", "run.json", "report.html"):
        assert (finished / name).stat().st_size > 0, name
    metrics = lines(finished / "metrics.jsonl")
    assert [(m["phase"], m["iteration"]) for m in metrics] == [
        ("eval", 0), ("train", 1), ("eval", 1), ("train", 2), ("eval", 2)
    ]  # fmt: skip
    trained = metrics[1]
    for name in ("loss/policy", "loss/value", "loss/entropy", "loss/kl", "loss/listening", "loss/world_model"):
        assert name in trained
    assert {"reward/game", "reward/speaking", "belief/accuracy", "game/score", "update/approx_kl"} <= trained.keys()
    assert not any(name.startswith(("speed/", "time/")) for m in metrics for name in m)
    assert {"speed/tokens_per_second", "speed/games_per_second", "speed/update_tokens_per_second"} <= lines(
        finished / "timing.jsonl"
    )[0].keys()
    card = json.loads((finished / "run.json").read_text())
    assert card["seeds"] == [0] and card["figures"]["trained"]["game/score"]["n"] == 6 and card["speed"]
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


def test_a_finished_run_is_not_run_again(
    finished: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (finished / "run.json").stat().st_mtime_ns
    cfg = configure(*SMALL, f"runs={finished.parent}", f"cache={cache}")
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
    cfg = configure(*SMALL, f"runs={tmp_path / 'runs'}", "device=cuda", "cache=/proc/nowhere")
    shutil.move(tmp_path / "runs" / "a", run_folder(cfg))
    text = OmegaConf.to_yaml(OmegaConf.create(identity(cfg)))
    (run_folder(cfg) / "config.yaml").write_text(text)
    assert train.main(cfg) == run_folder(cfg)
    assert "is done" in (said := capsys.readouterr().out) and "lacks" not in said
    (run_folder(cfg) / "policy" / "model.safetensors").unlink()
    train.main(cfg)
    assert "its policy lacks model.safetensors, which a new run would make" in capsys.readouterr().out


def test_a_finished_run_of_other_inputs_is_not_taken_for_this_one(cache: Path, tmp_path: Path) -> None:
    contexts = tmp_path / "contexts.txt"
    contexts.write_text("1 0 1 1 3 3\n1 1 1 0 3 3\n")
    given = [
        *SMALL,
        f"runs={tmp_path}",
        f"cache={cache}",
        f"env.contexts={contexts}",
        "base.games=20",
        "eval.env.split=all",
    ]
    made = train.main(configure(*given, "algo.iterations=1", "eval.games=0"))
    assert train.main(configure(*given, "algo.iterations=1", "eval.games=0")) == made
    contexts.write_text("1 0 1 1 3 3\n1 4 1 3 3 1\n")
    with pytest.raises(UserError, match=r"is done, but .*contexts.* is not what it was made with: put the old one"):
        train.main(configure(*given, "algo.iterations=1", "eval.games=0"))


def test_a_reference_that_an_attempt_left_does_not_stand_for_another_base(cache: Path, tmp_path: Path) -> None:
    cfg = configure(*SMALL, f"runs={tmp_path}", f"cache={cache}", "algo.iterations=1", "eval.games=0")
    other = tiny_policy()
    save_policy(run_folder(cfg) / REFERENCE, other, {"game": "dond"})
    made = train.main(cfg)
    assert folder_digest(made / REFERENCE) == read_state(newest_checkpoint(made / "checkpoints"))["base"]


def test_an_arm_may_be_a_number(cache: Path, tmp_path: Path) -> None:
    """`arm=0` is one to the command line, and a name to all that reads the run."""
    cfg = configure(*SMALL, "arm=0", "algo.iterations=1", "eval.games=0", f"runs={tmp_path}", f"cache={cache}")
    assert cfg.arm == 0 and read_run(train.main(cfg)).arm == "0"


def test_the_same_configuration_gives_the_same_run(finished: Path, cache: Path, tmp_path: Path) -> None:
    """On a CPU also where deterministic algorithms are asked for, which is no other configuration."""
    cfg = configure(*SMALL, "deterministic=true", f"runs={tmp_path}", f"cache={cache}")
    train.main(cfg)
    assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"]
    train.main(configure(*SMALL, f"runs={finished.parent}", f"cache={cache}"))  # done already; and the mode ends
    assert not torch.are_deterministic_algorithms_enabled()
    again = run_folder(cfg)
    assert json.loads((again / "run.json").read_text())["deterministic"] is True
    assert again.name == finished.name
    assert (again / "metrics.jsonl").read_text() == (finished / "metrics.jsonl").read_text()


def test_what_is_only_measured_changes_nothing_that_is_learned(finished: Path, cache: Path, tmp_path: Path) -> None:
    measured = ("eval.games=2", "eval.seed=3", "eval.final_games=2", "eval.every=2", "~loss.world_model")
    cfg = configure(*SMALL, *measured, f"runs={tmp_path}", f"cache={cache}")
    train.main(cfg)
    ours, others = (
        [line for line in lines(f / "metrics.jsonl") if line["phase"] == "train"] for f in (run_folder(cfg), finished)
    )
    for line in others:
        assert line.pop("loss/world_model")
    assert ours == others and len(ours) > 1
    in_a_file = configure(*SMALL, *measured[:-1], "loss.world_model=null", f"runs={tmp_path}", f"cache={cache}")
    assert run_folder(in_a_file) == run_folder(cfg) and run_spec(in_a_file) == run_spec(cfg)
    a, b = (load_file(f / "policy" / "model.safetensors") for f in (run_folder(cfg), finished))
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_an_arm_does_not_play_its_bases_games_again(
    finished: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    measure = final_games.measure

    def noting(work: Work, folder: Path, name: str, *rest: Any) -> None:
        measured.append(name)
        measure(work, folder, name, *rest)

    monkeypatch.setattr(final_games, "measure", noting)
    cfg = configure(*SMALL, "ablation=game_only", "algo.iterations=1", f"runs={tmp_path}", f"cache={cache}")
    train.main(cfg)
    assert measured == ["trained"]
    ours, other = (json.loads((run / "evaluation.json").read_text()) for run in (run_folder(cfg), finished))
    assert ours["conditions"]["base"] == other["conditions"]["base"]
    assert ours["conditions"]["trained"] != other["conditions"]["trained"]


def test_a_stopped_run_ends_as_if_it_never_was(
    finished: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = configure(*SMALL, f"runs={tmp_path}", f"cache={cache}")
    whole = learning.save_training

    def stopping(folder: Path, iteration: int, *rest: object) -> None:
        if iteration == 2:
            raise KeyboardInterrupt
        monkeypatch.setattr(record, "git_commit", lambda: "new code")
        whole(folder, iteration, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(learning, "save_training", stopping)
    monkeypatch.setattr(record, "git_commit", lambda: "old code")
    with pytest.raises(KeyboardInterrupt):
        train.main(cfg)
    monkeypatch.setattr(learning, "save_training", whole)
    train.main(cfg)
    again = run_folder(cfg)
    assert (again / "metrics.jsonl").read_text() == (finished / "metrics.jsonl").read_text()
    ended, uncut = (load_file(f / "policy" / "model.safetensors") for f in (again, finished))
    assert all(torch.equal(ended[name], uncut[name]) for name in uncut)
    assert json.loads((again / "run.json").read_text())["git_commit"] == "old code, new code"


def test_evaluating_a_run_against_scripts(
    finished: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [o for o in SMALL if o.startswith(("model.", "base."))]
    common = [*small, "games=6", "concurrency=3", "progress=false", f"cache={cache}", f"out={tmp_path}"]
    evaluate.main(configure(f"players=[{finished},scripted]", *common, command="evaluate"))
    out = capsys.readouterr().out
    assert "game/agreement" in out and "scripted" in out and f"cache: 6 slots of {SLOT_MIB}, " in out
    conditions = json.loads((tmp_path / "evaluation.json").read_text())["conditions"]
    assert len(conditions) == 3
    told: list[tuple[list[int], list[list[str]]]] = []
    for sampling in ("null", "1", "1"):
        evaluate.main(configure("players=[random]", f"sampling={sampling}", *common, command="evaluate"))
        games = read_episodes(tmp_path / "episodes.jsonl")
        told.append(([game["seed"] for game in games], [[turn["text"] for turn in game["turns"]] for game in games]))
    own, other, again = told
    assert other[0] == own[0] and other[1] != own[1] and again == other
    assert json.loads((tmp_path / "evaluation.json").read_text())["about"]["sampling"] == 1
    with pytest.raises(UserError, match="sampling=-1: must be a whole number, at least 0"):
        evaluate.main(configure("players=[random]", "sampling=-1", *common, command="evaluate"))
    with pytest.raises(UserError, match="neither a run's folder nor base"):
        evaluate.main(configure("players=[nobody]", *common, command="evaluate"))


def test_publishing_a_table(finished: Path, tmp_path: Path) -> None:
    report.main(
        configure(
            f"runs={finished.parent}", "select=*", f"out={tmp_path / 'r.html'}", f"publish={tmp_path}", command="report"
        )
    )
    header, *rows = (tmp_path / "table.csv").read_text().splitlines()
    assert header == "arm,metric,mean,low,high,seeds,games"
    assert rows and all(row.count(",") == 6 and ",," not in row for row in rows)
    assert {"figure.svg", "curves.csv.gz", "per_seed.csv.gz", "cards.jsonl"} <= {p.name for p in tmp_path.iterdir()}
    with pytest.raises(UserError, match="select="):
        report.main(configure(f"runs={tmp_path}", "select=none-*", command="report"))


def test_filtered_cloning_runs(cache: Path, tmp_path: Path) -> None:
    cfg = configure(
        *[o for o in SMALL if not o.startswith("algo.iterations")],
        "algo=filtered_bc", "algo.iterations=1", "algo.keep=all", f"runs={tmp_path}", f"cache={cache}",
    )  # fmt: skip
    train.main(cfg)
    found = lines(run_folder(cfg) / "metrics.jsonl")[1]
    assert found["filter/kept"] == 1.0 and "loss/imitation" in found
    parts = run_spec(cfg)
    assert parts.losses["imitation"].weight == 1.0 and parts.losses["listening"].weight == 0.0
    assert set(parts.losses) == {"imitation", "kl", "listening", "world_model"}


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.critic=privileged"],
        [
            "algo.credit.speech=common",
            "cast.negotiator.partner=base",
            "cast.negotiator.partners=0.5",
            "loss.world_model.weight=0.1",
        ],
        [
            "algo.credit.speech=separate_only",
            "cast.negotiator.partner=scripted",
            "cast.negotiator.partners=0.9",
            "reward.speaking.listeners=all",
        ],
        ["~loss.kl", "~reward.speaking", "loss.imitation.weight=1", "algo.update.rows=3", "algo.update.optimizer=sgd"],
        ["algo.update.optimizer=muon", "algo.update.learning_rate=1e-3"],
        ["algo.temperature=0.7", "algo.update.target_kl=0.01", "algo.update.epochs=2", "eval.temperature=0"],
        ["env.objective=-1", "reward.speaking.of=log_probability", "loss.kl.estimator=k3"],
        ["algo=pikl", "algo.planner.iterations=5", "cast.negotiator.partner=base+plan", "cast.negotiator.partners=0.5"],
        ["loss=plan", "loss.plan.weight=0", "algo.planner.iterations=5", "algo.planner.lambdas=[0.3]"],
    ],
)
def test_every_setting_trains(overrides: list[str], cache: Path, tmp_path: Path) -> None:
    cfg = configure(*SMALL, *overrides, "algo.iterations=1", f"runs={tmp_path}", f"cache={cache}")
    train.main(cfg)
    trained = lines(run_folder(cfg) / "metrics.jsonl")[1]
    assert trained["phase"] == "train" and trained["update/grad_norm"] > 0
    assert ("loss/kl" in trained) == ("~loss.kl" not in overrides)
    assert ("loss/plan" in trained) == any(o in overrides for o in ("algo=pikl", "loss=plan"))


@pytest.mark.parametrize("algo", ["ppo", *(pytest.param(a, marks=pytest.mark.slow) for a in ("filtered_bc", "pikl"))])
def test_an_iteration_without_the_learner_teaches_nothing(algo: str, cache: Path, tmp_path: Path) -> None:
    own = [
        "cast.negotiator={player: base, partner: learner, partners: 0.001}",
        "+eval.cast.negotiator.player=learner",
        "+eval.cast.negotiator.partner=base",
        *(["algo.planner.iterations=5"] if algo == "pikl" else []),
    ]
    cfg = configure(*SMALL, f"algo={algo}", *own, "algo.iterations=2", f"runs={tmp_path}", f"cache={cache}")
    train.main(cfg)
    run = run_folder(cfg)
    rows = [row for row in lines(run / "metrics.jsonl") if row["phase"] == "train"]
    assert [row["iteration"] for row in rows] == [1, 2] and "update/grad_norm" not in rows[0]
    base, trained = (load_file(path / "model.safetensors") for path in (base_folder(run), run / "policy"))
    assert all(torch.equal(base[name], tensor) for name, tensor in trained.items())


@pytest.mark.parametrize("algo", ["ppo", *(pytest.param(a, marks=pytest.mark.slow) for a in ("filtered_bc", "pikl"))])
def test_games_that_outgrow_the_context_are_given_up_and_counted(algo: str, cache: Path, tmp_path: Path) -> None:
    # A model that has learned next to nothing is refused again and again.
    own = [
        f"algo={algo}",
        "base.games=24",
        "base.rows=16",
        "model.context=200",
        "env.max_errors=30",
        "algo.iterations=2",
        "algo.games=4",
    ]
    cfg = configure(*SMALL, *own, f"runs={tmp_path}", f"cache={cache}")
    train.main(cfg)
    rows = lines(run_folder(cfg) / "metrics.jsonl")
    assert [row["iteration"] for row in rows if row["phase"] == "train"] == [1, 2]
    for row in rows:
        assert 0 < row["errors/outgrown"] <= row["errors/aborted"] <= 1, row
    played = json.loads((run_folder(cfg) / "evaluation.json").read_text())["conditions"]
    assert all(found["errors/outgrown"]["mean"] > 0 for found in played.values())


SPEAKING, LISTENING = {"reward.speaking.weight": 0.0}, {"loss.listening.weight": 0.0}
WITHOUT_RL = {"reward.game.weight": 0.0} | {
    f"loss.{n}.weight": 0.0 for n in ("policy", "value", "entropy", "imitation")
}
NO_GAME = {
    **{name: value for name, value in WITHOUT_RL.items() if name != "loss.policy.weight"},
    "loss.policy.choice": 0.0,
    "algo.credit.speech": "separate_only",
}
PRESETS: dict[str, dict[str, Any]] = {
    "full": {},
    "none": {},
    "no_speaking": SPEAKING,
    "no_listening": LISTENING,
    "game_only": {**SPEAKING, **LISTENING},
    "no_imitation": {"loss.imitation.weight": 0.0},
    "reward_only": {"reward.speaking.weight": 0.0, "loss.listening.weight": 0.0, "loss.imitation.weight": 0.0},
    "listening_only": {**SPEAKING, **WITHOUT_RL},
    "speaking_only": {**LISTENING, **NO_GAME},
    "listening_speaking": NO_GAME,
}


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


@pytest.mark.parametrize("sweep", ["none", "dond_ablation", "among_us_ablation"])
@pytest.mark.parametrize("preset", list(PRESETS))
def test_arms_differ_in_the_weights_of_their_terms_and_in_nothing_else(preset: str, sweep: str) -> None:
    usual, cfg = configure(f"sweep={sweep}"), configure(f"sweep={sweep}", f"ablation={preset}")
    before, after = ({k: v for k, v in flat(plain(each)).items() if not k.startswith("only.")} for each in (usual, cfg))
    assert before.keys() == after.keys()
    changed = {name: value for name, value in after.items() if value != before[name] and name != "arm"}
    assert changed == {name: value for name, value in PRESETS[preset].items() if before[name] not in (0, value)}
    assert cfg.arm == (preset if preset != "none" else "custom")
    run_spec(cfg)


@pytest.mark.parametrize("sweep", ["among_us_credit", "among_us_ablation"])
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("common_credit", {"algo.credit.speech": "common"}),
        (
            "published_credit",
            {
                "algo.credit.speech": "common",
                "algo.credit.normalize": False,
                "reward.speaking.weight": 1.0,
                "reward.speaking.listeners": "all",
            },
        ),
        ("raw_credit", {"algo.credit.speech": "separate_raw", "reward.speaking.weight": 18.0}),
        ("common_raw_credit", {"algo.credit.speech": "common", "reward.speaking.weight": 18.0}),
        ("game_beside", {"algo.credit.speech": "separate"}),
        ("speaking_alone", {"algo.credit.speech": "separate_only"}),
        ("listening_unsaid", {"reward.speaking.weight": 0.0, "loss.policy.speech": 0.0}),
        ("frozen_listeners", {"reward.speaking.players": ["base"]}),
        ("learning_listeners", {"reward.speaking.players": ["learner"]}),
    ],
)
def test_variants_of_the_credit_change_what_they_say_of_the_full_arm(
    preset: str, changes: dict[str, Any], sweep: str
) -> None:
    usual, cfg = (
        configure(f"sweep={sweep}", "ablation=full"),
        configure(f"sweep={sweep}", f"ablation={preset}"),
    )
    before, after = flat(plain(usual)), flat(plain(cfg))
    assert {name: after[name] for name in changes} == changes  # what a sweep has of its own does not win
    changed = {name: value for name, value in after.items() if value != before[name]}
    assert changed == {"arm": preset, **{name: value for name, value in changes.items() if value != before[name]}}
    run_spec(cfg)


@pytest.mark.parametrize(
    ("sweep", "about"),
    [
        ("among_us_shaping", {"env.shaping": 0.2}),
        ("among_us_reports", {"env.imposters_report": True, "algo.credit.speech": "separate"}),
        ("among_us_credit", {"algo.credit.speech": "separate"}),
        ("among_us_confirm", {"algo.credit.speech": "separate", "algo.iterations": 128}),
        (
            "among_us_vote",
            {"algo.credit.speech": "separate", "algo.iterations": 128, "loss.listening.votes": 1.0},
        ),
    ],
)
def test_further_sweeps_differ_from_the_headlines_only_in_what_they_are_about(
    sweep: str, about: dict[str, Any]
) -> None:
    headline, cfg = (flat(plain(configure(f"sweep={name}"))) for name in ("among_us_ablation", sweep))
    changed = {name: value for name, value in cfg.items() if value != headline[name]}
    assert changed.pop("name") == sweep
    if lessons := changed.pop("base.lessons", None):  # where imposters report, a report is no alibi
        assert sweep == "among_us_reports" and [each["players"] for each in lessons] == ["gullible_wary", "random_wary"]
        usual = [{**each, "players": each["players"].removesuffix("_wary")} for each in lessons]
        assert usual == headline["base.lessons"]
    assert changed == about


def test_sweeps_of_filtered_cloning_play_as_many_games_as_the_one_of_ppo() -> None:
    human = configure("sweep=dond_filtered_bc", "env.objective=-0.5")
    scripted = configure("sweep=dond_filtered_bc_scripted", "base.players=careful", "env.objective=0")
    few = configure("sweep=dond_filtered_bc_300", "base=human")  # as data.dond brings it
    ppo = configure("sweep=dond_filtered_bc_ppo", "ablation=no_imitation", "env.objective=0")
    assert (human.algo.kind, human.base.data, human.arm) == ("filtered_bc", "human", "filtered_bc")
    assert (scripted.algo, scripted.eval) == (human.algo, human.eval)
    assert (scripted.base.data, scripted.arm) == ("scripted", "from_careful")
    assert (few.algo, few.eval, few.arm) == (human.algo, human.eval, "from_300")
    differs = {name: value for name, value in plain(few)["base"].items() if value != plain(human)["base"][name]}
    assert differs == {"human_games": 300, "keep": "nonzero", "epochs": 40}
    assert (ppo.algo.kind, ppo.base, ppo.arm) == ("ppo", human.base, "no_imitation")
    assert 0 <= human.algo.iterations * human.algo.games - ppo.algo.iterations * ppo.algo.games < ppo.algo.games
    for cfg in (human, scripted, few, ppo):
        run_spec(cfg)


PROMISING = ("game_only", "reward_only", "listening_only", "speaking_only", "listening_speaking")
OWN = "loss.own={_target_: marl.losses.claim.ClaimLoss, weight: 5.0}"
PAID = "reward.own={_target_: anywhere.Paid}"  # whose weight is its class's


def measured(cfg: DictConfig) -> list[str]:
    """The terms that the arm sets to 0."""
    return zero_weights(plain(cfg))


@pytest.mark.parametrize("preset", PROMISING)
def test_presets_that_promise_what_is_on_train_nothing_else(preset: str) -> None:
    """Terms of one's own, and ours that the preset does not name; a sweep's table calls all of it by the preset."""
    given = [f"ablation={preset}", f"+{OWN}", f"+{PAID}", "loss.world_model.weight=0.2"]
    cfg = configure(*given)
    shipped = plain(configure(f"ablation={preset}"))
    settings = plain(cfg)
    assert set(zero_weights(settings)) == {"loss.own", "reward.own", "loss.world_model"}
    weights = {(g, n): term["weight"] for g in ("loss", "reward") for n, term in settings[g].items()}
    assert weights == {
        ("loss", "own"): 0.0, ("reward", "own"): 0.0,
        **{(g, n): term["weight"] for g in ("loss", "reward") for n, term in shipped[g].items()},
    }  # fmt: skip
    assert zero_weights(settings) == []
    named = configure(*given, "arm=mine")  # as it is called it may train anything
    assert measured(named) == [] and named.loss.own.weight == 5.0


@pytest.mark.parametrize("preset", ["full", "no_speaking", "no_listening", "none", "world_model", "imitation"])
def test_presets_that_take_one_thing_away_leave_ones_own(preset: str) -> None:
    cfg = configure(f"ablation={preset}", f"+{OWN}", f"+{PAID}")
    assert measured(cfg) == [] and cfg.loss.own.weight == 5.0 and "weight" not in cfg.reward.own


@pytest.mark.parametrize("env", ["dond", "among_us"])
def test_what_presets_promise_is_what_they_train(env: str) -> None:
    """No term of ours that has a weight there is missing in their lists: no published run would be another one."""
    presets = [path.stem for path in Path("conf/ablation").glob("*.yaml")]
    assert set(PROMISING) < set(presets)
    for preset in presets:
        cfg = configure(f"env={env}", f"ablation={preset}")
        assert not [name for name in measured(cfg) if name.replace(".", "/") in WORDING]
        assert bool(cfg.only) == (preset in PROMISING) and set(cfg.only) <= {cfg.arm}


def test_a_list_of_terms_is_a_list() -> None:
    with pytest.raises(UserError, match=r"^only\.game_only=reward\.game: must be a list of terms, as in "):
        measured(configure("ablation=game_only", "only.game_only=reward.game"))


def test_terms_of_ones_own_are_in_the_line_of_an_iteration_and_the_last_table() -> None:
    found = {"loss/own": 0.25, "loss/policy": 1.0, "game/score": 3.0, "reward/paid": -0.5, "game/win_rate/white": 0.5}
    assert learning.headline(found) == "score 3.00  own 0.250  paid -0.500  white 0.500"
    conditions = {"base": {"reward/paid": Interval(0, 0, 0, 1)}, "trained": {"loss/own": Interval(0, 0, 0, 1)}}
    assert show.rows_of(conditions) == ["reward/paid", "loss/own"]
    ours = {"trained": {"loss/policy": Interval(0, 0, 0, 1), "game/score": Interval(0, 0, 0, 1)}}
    assert show.rows_of(ours) == ["game/score"]


def test_a_pretrained_model_takes_smaller_steps_than_one_from_scratch() -> None:
    def rates(*overrides: str, command: str = "train") -> tuple[float, float]:
        cfg = configure(*overrides, command=command)
        return cfg.base.learning_rate, cfg.algo["update"].learning_rate

    hf = ("model=hf", "model.name=PATH")
    assert rates() == (4e-3, 1e-3) and rates("env=among_us") == (4e-3, 5e-4)
    assert rates(*hf) == rates(*hf, "base=scripted") == rates(*hf, "env=among_us", "base=scripted") == (5e-5, 1e-5)
    assert rates(*hf, "base=human", "algo=filtered_bc") == (5e-5, 1e-5)
    assert rates(*hf, "base=scripted", "base.learning_rate=1e-3", "algo.update.learning_rate=2e-3") == (1e-3, 2e-3)
    for command in ("evaluate", "play"):  # which may make the same base
        assert rates(*hf, "base=scripted", command=command)[0] == 5e-5


def hopeless(episodes: list[Episode], capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """What is said of the learner's first games."""
    cfg = configure(*overrides)
    work = Work(run_spec(cfg), torch.device("cpu"), lambda: None, lambda: None, None)
    own = [replace(e, players=dict.fromkeys(e.players, "learner")) for e in episodes]
    final_games.warn_if_hopeless(work, own)
    return capsys.readouterr().out


def test_games_that_nothing_can_be_learned_from_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    deals = [replace(deal_game(0), payments=tuple(Payment(seat, 3, 13.0) for seat in ("player_0", "player_1")))]
    failed, refused = [failed_game(i) for i in range(20)], [aborted_game(i) for i in range(4)]
    assert hopeless(deals * 2 + failed, capsys) == ""  # one in eleven agrees
    none = "warning: next to nothing can be learned so far: the game refuses "
    assert hopeless(deals + failed, capsys).startswith(none)  # one in twenty-one
    assert hopeless(deals + failed, capsys).endswith(
        "pays 95% of its seats 0. Stop this run and train a better base, by more games (base.games=10000).\n"
    )
    assert "refuses 0% of the learner's replies and pays 100% of its seats 13. Stop" in hopeless(deals * 21, capsys)
    assert hopeless(refused + deals, capsys).startswith(none)
    out_of_reach = hopeless(refused, capsys, "model=hf", "model.name=PATH")
    assert out_of_reach.endswith("Stop this run and train the model on scripted games first, by base=scripted.\n")
    assert "base.epochs=12" in hopeless(refused, capsys, "base=human", "data.dond=DIR")


def test_a_learner_that_does_not_play_for_the_games_reward_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    failed = [failed_game(i) for i in range(20)]
    assert hopeless(failed, capsys, "ablation=full") and not hopeless(failed, capsys, "ablation=listening_only")


def test_games_that_outgrow_the_context_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Not that the replies are refused, which are empty: a base of more games would not help."""
    game = aborted_game()
    long = replace(game, turns=tuple(replace(t, start=9, reply_ids=()) for t in game.turns))
    assert "100% of the learner's replies find no room in its context. Stop this run and give it more, by " in hopeless(
        [long], capsys
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["algo=filtered_bc", "reward.speaking.weight=0.5"],
            "reward.speaking.weight=0.5: algo=filtered_bc learns nothing",
        ),
        (["algo=pikl", "loss.imitation.weight=0.3"], "loss.imitation.weight=0.3: algo=pikl imitates plans"),
        (["algo=pikl", "reward.speaking.weight=2"], "reward.speaking.weight=2: algo=pikl learns nothing"),
        (["algo=filtered_bc", "algo.update.target_kl=0.1"], "algo.update.target_kl=0.1: how far"),
        (["~loss.policy", "algo.update.target_kl=0.1"], "algo.update.target_kl=0.1: how far"),
        (
            ["base=human", "data.dond=DIR", "base.players=careful"],
            "base.players=careful: base=human learns from people",
        ),
        (["base.epochs=12"], "base.epochs=12: base=scripted does not read it"),
        (["base.permute_items=true"], "base.permute_items=True: base=scripted does not read it"),
    ],
)
def test_what_would_change_nothing_is_refused(overrides: list[str], said: str) -> None:
    """Or runs of several names would be one and the same."""
    with pytest.raises(UserError, match=f"^{re.escape(said)}"):
        run_spec(configure(*overrides))


def test_what_is_read_is_kept() -> None:
    """Filtered cloning leaves out what is PPO's alone; a term of one's own, or entropy with a weight, it learns."""
    assert set(run_spec(configure("algo=filtered_bc", f"+{OWN}", "loss.entropy.weight=1")).losses) == {
        "imitation", "listening", "world_model", "kl", "entropy", "own"
    }  # fmt: skip
    assert set(run_spec(configure("algo=filtered_bc")).losses) == {"imitation", "listening", "world_model", "kl"}
    for algo in ("filtered_bc", "pikl"):
        assert run_spec(configure(f"algo={algo}")).rewards["speaking"].weight == 0
    assert run_spec(configure("algo.update.target_kl=0.1")).algo.update.target_kl == 0.1


def test_ppo_and_cloning_near_people_differ_in_their_learner_and_its_strength_alone() -> None:
    """All play as many games, as people did, from one base, and are pulled to it by one term."""
    ppo, cloning, plans = (
        configure("data.dond=DIR", *overrides)
        for overrides in (
            ["sweep=pikl_frontier", "loss.kl.weight=1"],
            ["sweep=pikl_frontier", "algo=filtered_bc", "loss.kl.weight=0.1"],
            ["sweep=pikl_frontier_plans", "loss.kl.weight=0", "algo.planner.lambdas=[0.1]"],
        )
    )
    assert (ppo.arm, cloning.arm, plans.arm) == ("ppo_1", "filtered_bc_0.1", "pikl_0.1")
    assert ppo.env.objective == 0 and ppo.base.data == "human" and ppo.algo.kind == "ppo"
    for cfg in (cloning, plans):
        for part in ("env", "cast", "model", "base", "eval"):
            assert cfg[part] == ppo[part]
        assert (cfg.algo.iterations, cfg.algo.games) == (ppo.algo.iterations, ppo.algo.games)
        assert {**cfg.loss.kl, "weight": 0} == {**ppo.loss.kl, "weight": 0}
    kept = run_spec(cloning).losses
    assert kept["kl"].weight == 0.1 and kept.keys() == {"kl", "imitation", "listening", "world_model"}


def test_names_follow_from_the_configuration() -> None:
    cfg = configure("env=dond", "ablation=full", "seed=3")
    assert run_folder(cfg).name == f"dond-full-s3-{config_hash(cfg)[:8]}"
    assert config_hash(configure("runs=elsewhere", "threads=1", "progress=false")) == config_hash(configure())
    for one in (f"name={'n' * 190}", f"name='{'木' * 62}'", f"arm={'a' * 100} name={'n' * 100}", f"seed={10**200}"):
        with pytest.raises(UserError, match=r"^name, arm and seed=.*\d+ bytes are too many for a name\. Use 200\.$"):
            run_folder(configure(*one.split()))
    assert config_hash(configure("checkpoint.every=1", "checkpoint.keep=9")) == config_hash(configure())
    for rounding in ("algo.concurrency=8", "algo.update.token_budget=512"):  # in which order numbers are added
        assert config_hash(configure(rounding)) != config_hash(configure())
    typed = [configure(f"env.objective={one}", f"loss.listening.weight={none}") for one, none in ((1, 0), (1.0, 0.0))]
    assert config_hash(typed[0]) == config_hash(typed[1]) != config_hash(configure("env.objective=0"))
    human = [configure(f"data.dond={folder}", "base=human") for folder in ("here", "there")]
    assert config_hash(human[0]) == config_hash(human[1]) != config_hash(configure())
    assert config_hash(configure("reward.speaking.weight=0.4")) != config_hash(configure())
    quick = ("algo.decode_steps=2", "algo.play_bf16=true", "algo.update.gradient_checkpointing=true")
    faster = identity(configure(*quick))
    assert (faster["algo"].pop("decode_steps"), faster["algo"].pop("play_bf16")) == (2, True)
    assert faster["algo"]["update"].pop("gradient_checkpointing")
    assert faster == identity(configure())  # where they are off, a run is what it was before they were there


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["env.objective=3"], "env.objective must be a number from -1 to 1"),
        (["env.contexts=missing.txt"], "env.contexts=missing.txt: the file cannot be read"),
        (["base=human", "data.dond=/nonexistent"], "data.dond=/nonexistent: "),
        (["cast.negotiator={partner: nobody, partners: 0.1}"], "There is no scripted negotiator 'nobody'"),
        (["cast.negotiator.partners=2"], "cast.negotiator.partners=2: leaves no seat to learner, who learns"),
        (["eval.cast.negotiator.partners=2"], "cast.negotiator.partners=2: leaves no seat to learner, who learns"),
        (["algo.alternate=5"], "algo.alternate=5: learner learns alone; must be 0"),
        (["cast.negotiator.partners=2.5"], "cast.negotiator.partners=2.5: there are only 2 seats of this role"),
        (["cast.negotiator.partners=-1"], "partners=-1.0: must not be negative"),
        (
            ["cast.negotiator.player=base"],
            "cast.negotiator.player=base: nobody learns; let one of them be learner or rival",
        ),
        (["+cast.mediator.player=base"], "it names the roles negotiator, mediator; the game's are negotiator"),
        (["algo=pikl", "algo.planner.lambdas=[-1]"], r"algo\.planner\.lambdas=\(-1\.0,\): name at least one, each 0"),
        (["algo=pikl", "algo.planner.choose=own"], "algo.planner.choose=own: with algo=pikl plans are played"),
        (["algo=pikl", "~loss.plan"], "with algo=pikl the policy learns from plans, and there is no loss.plan"),
        (
            ["algo=pikl", "cast.negotiator={player: learner, partner: rival, partners: 1}"],
            "algo=pikl trains one learner, and the cast has learner, rival; use algo=ppo",
        ),
        (
            ["loss=plan", "algo.planner.choose=best"],
            "algo.planner.choose=best: PPO learns from the policy's own samples",
        ),
        (["loss=plan", "algo=filtered_bc"], "loss=plan: algo=filtered_bc imitates games as they were played; drop it"),
        (
            ["algo=filtered_bc", "loss.kl.estimator=k2"],
            "loss.kl.estimator=k2: algo=filtered_bc does not learn from plain",
        ),
        (
            ["env=among_us", "algo=pikl", "algo.planner.mistake=0.5"],
            "algo.value=plan: with env.imposters=1 and algo.planner.mistake=0.5 a plan does not say",
        ),
        (["algo=pikl", "loss.kl.estimator=k3"], "loss.kl.estimator=k3: algo=pikl does not learn from plain samples"),
        (["loss=plan", "loss.plan.form=l2"], "loss.plan.form=l2: must be one of cross_entropy, kl"),
        (
            ["cast.negotiator.partner=scripted+plan", "cast.negotiator.partners=1"],
            "scripted has no policy to plan from",
        ),
        (["algo.alternate=-1"], "algo.alternate=-1: must not be negative"),
        (["algo.concurrency=0"], "algo.concurrency=0: must be at least 1"),
        (["algo.temperature=0"], "algo.temperature=0.0: must be above 0"),
        (["algo.update.minibatches=0"], "algo.update.minibatches=0: must be at least 1"),
        (["algo.imitate=best"], "algo.imitate=best"),
        (["eval.final_games=0"], "eval.final_games=0: must be at least 1"),
        (["checkpoint.every=0"], "checkpoint.every=0: must be at least 1"),
        (["seed=-1"], "seed=-1: must be a whole number"),
        (["model.critic=oracle"], "model.critic=oracle: must be one of private, privileged"),
        (["reward.speaking.listeners=none"], "reward.speaking.listeners=none: must be one of others, all"),
        (["loss.kl.estimator=k9"], "loss.kl.estimator=k9"),
        (["algo.credit.speech=both"], "algo.credit.speech=both"),
        (["algo.credit.gamma=1.5"], r"algo.credit.gamma=1.5: must lie in \[0, 1\]"),
        (["algo.games=1.5"], "algo.games=1.5: must be a whole number"),
        (["reward.speaking.weight=much"], "reward.speaking.weight=much: must be a number"),
        (["reward.speaking._target_=marl.Nothing"], "there is no such class"),
        (["base=human"], "data.dond=DIR"),
        (["data.dond=somewhere"], "data.dond=somewhere: base=scripted does not read it; drop one, or take"),
        (["base=none"], "base=none: a model from scratch knows no word yet"),
        (["base.data=humans"], "base.data=humans: must be one of scripted, human, none"),
        (["loss.listening.votes=1"], "loss.listening.votes=1: nobody votes in env.game=dond; must be 0"),
        (["loss.listening.renamed=true"], "loss.listening.renamed=true: env.game=dond has no names that can stand"),
        (["base.lessons=[{players:nobody,steps:5}]"], r"base.lessons\[0\]: There is no scripted negotiator 'nobody'"),
        (["base.lessons=[{players:random}]"], r"base.lessons\[0\].steps is missing"),
        (["base.lessons=[[random,5]]"], r"base.lessons\[0\]=\['random', 5\]: must be settings of Lesson: "),
        (["base.lessons=[{players:random,steps:0.5}]"], r"base.lessons\[0\].steps=0.5: must be a whole number"),
        (
            ["env=among_us", "base.lessons=[{players:random,steps:1,env:{players:9}}]"],
            r"base.lessons\[0\]: env.players",
        ),
        (["base.players=nobody"], "base.players: There is no scripted negotiator 'nobody'"),
        (["base=human", "base.lessons=[{players:random,steps:5}]"], "only scripted players answer; must be"),
        (["base.rows=0"], "base.rows=0: must be at least 1"),
        (["base.dropout=1.0"], "base.dropout=1.0: must lie in"),
        (["base.seed=-1"], "base.seed=-1: must be from 0 to 9223372036854775807"),
        (["base.seed=9223372036854775808"], "base.seed=9223372036854775808: must be at most"),
        (["base.learning_rate=-0.5"], "base.learning_rate=-0.5: must not be negative"),
        (["eval.temperature=1e-40"], "eval.temperature=1e-40: must be a number from 0.001 to 1,000.0, or 0"),
        (["algo.temperature=-1"], "algo.temperature=-1.0: must be a number from 0.001"),
        (["algo.update.learning_rate=1e39"], "algo.update.learning_rate=1e[+]39: must be a number from"),
        (["loss.policy.choice=1e39"], "loss.policy.choice=1e[+]39: must be a number from"),
        (["loss.policy.clip_coef=-1"], "loss.policy.clip_coef=-1.0: must be above 0"),
        (["algo.update.target_kl=-1"], "algo.update.target_kl=-1.0: must not be negative"),
        (["base.weight_decay=-0.5"], "base.weight_decay=-0.5: must not be negative"),
        (["base.warmup=-1"], "base.warmup=-1.*: must not be negative"),
        (["+base.vary.objective=[]"], r"base.vary.objective=\[\]: must name at least one value"),
        (["algo.update.weight_decay=-0.5"], "weight_decay=-0.5, .*: the first two must not be negative"),
        (["model.vocab_size=7"], "model.vocab_size=7: must be at least 400"),
        (["model.kind=small"], "model.kind=small: must be one of tiny, hf"),
        (["model.layers=0"], "model.layers=0: must be at least 1"),
        (["model.layers=10000000"], "model.layers=10000000: must be at most 1,000,000"),
        (["model.context=1000000000"], "model.context=1000000000: must be at most 1,000,000"),
        (["model.vocab_size=1000000000"], "model.vocab_size=1000000000: must be at most 1,000,000"),
        (["model.context=1e9"], r"model.context=1000000000.0: must be a whole number"),
        (["model.hidden_size=1000000000000000000"], "model.hidden_size=1000000000000000000: must be at most 1,000,000"),
        (["model.kv_heads=3"], "model.kv_heads=3: must divide model.heads=4"),
        (["model.hidden_size=12"], "model.hidden_size=12: must be a multiple of 8"),
        (
            ["cast.negotiator={player: scripted, partner: learner, partners: 1}"],
            "eval.cast: learner learns but does not play in evaluation",
        ),
        (["eval.cast.negotiator=5"], r"eval\.cast\.negotiator=5: must be a group of settings"),
        (["base.lessons=[{players:random,steps:1,env:5}]"], r"base.lessons\[0\].env=5: must be a group of settings"),
        (["base.vary.objective=5"], r"base.vary.objective=5: must be a list"),
        (["threads=-1"], "threads=-1: must be a whole number, at least 1"),
        (["threads=true"], "threads=True: must be a whole number"),
        (["runs=null"], "runs=None: must be the name of a folder"),
        (["name=a/b"], "name='a/b': must be a name that can be part of a folder's"),
        (["arm=null"], "arm=None: must be a name"),
        (["init.learner=true"], "init.learner=True: must be text, or null"),
        (["base=human", "data.dond=5"], "data.dond=5: must be the name of a folder"),
        (["algo.kind=[]"], r"algo.kind=\[\]: must be one of ppo, filtered_bc"),
        (["env.game=null"], "env.game=None: must be the name of a game"),
        (["cast.negotiator.partners=inf"], "cast.negotiator.partners=inf: must be a number from -1e[+]30 to 1e[+]30"),
        (["loss.kl._target_=null"], "loss.kl=.* has no _target_: give the whole term, as conf/loss/default.yaml"),
        (["model.name=/models/mine"], "model.name=/models/mine: the small model has no name. Add model=hf"),
        (["loss.kl._target_=os.system"], "is no class of a loss, which is a dataclass with weight and reads"),
        (["loss.kl._target_=marl.rewards.game.GameReward"], "is no class of a loss"),
        (["reward.game._target_=marl.losses.kl.KLLoss"], "is no class of a reward"),
        (["+loss.policy.reads=value"], r"loss\.policy\.reads='value': must be one of reply, values, "),
        (["loss.listening.weight=-0.5"], r"loss\.listening\.weight=-0\.5: would learn the opposite; must be 0 "),
        (["algo.context=4096"], "algo.context=4096 is more than the model can read"),
        ([f"algo.context={10**30}"], f"algo.context={10**30}: must be at most 1,000,000"),
        ([f"model.context={10**30}"], f"model.context={10**30}: must be at most 1,000,000"),
        (["chat.url=[]"], "chat.url must be http"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(overrides: list[str], said: str, tmp_path: Path, cache: Path) -> None:
    small = [o for o in SMALL if "env=among_us" not in overrides or o != FEW_ENTRIES]
    with pytest.raises(UserError, match=said) as error:
        train.main(configure(*small, f"runs={tmp_path}", f"cache={cache}", *overrides))
    assert "\n" not in str(error.value)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.name=/nonexistent/model: no tokenizer can be loaded from it"):
        train.main(configure("model=hf", "model.name=/nonexistent/model", f"runs={tmp_path}", "progress=false"))


@pytest.mark.filterwarnings("ignore:.* reads whole streams again")
@pytest.mark.parametrize(
    "architecture", ["qwen3", "mistral", "mamba2", pytest.param("gpt_neo", marks=pytest.mark.slow)]
)
def test_any_causal_model_goes_through_the_same_loop(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A saved model with a chat template: natural prompts, its own base, the same files at the end."""
    tokenizer = hf_tokenizer(CHATML, single_digits=True)
    save(tmp_path / "model", random_lm(architecture, len(tokenizer), context=4096), tokenizer)
    cfg = configure(
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


def test_a_run_that_starts_from_another_plays_other_games() -> None:
    first, then = configure("seed=3"), configure("seed=3", "init.learner=first")
    assert seeds_of(run_spec(first)) == Seeds(games=3, sampling=None, shuffling=3)
    assert seeds_of(run_spec(then)) == seeds_of(run_spec(configure("seed=3", "init.learner=other")))
    assert seeds_of(run_spec(then)).games not in (3, seeds_of(run_spec(then)).sampling)
    assert seeds_of(run_spec(then)).shuffling not in (3, None)
    assert seeds_of(run_spec(then)) != seeds_of(run_spec(configure("seed=4", "init.learner=first")))


def test_parts_of_training_have_seeds_of_their_own() -> None:
    assert seeds_of(run_spec(configure("seed=3", "seeds.sampling=0"))) == Seeds(games=3, sampling=0, shuffling=3)
    assert seeds_of(run_spec(configure("seed=3", "seeds.games=5", "seeds.shuffling=6"))) == Seeds(5, None, 6)
    again = seeds_of(run_spec(configure("seed=3", "seeds.sampling=0", "init.learner=first")))
    assert (
        again.sampling not in (0, None)
        and again.games == seeds_of(run_spec(configure("seed=3", "init.learner=first"))).games
    )
    # Null is as good as not there, so that runs of before keep their folders.
    assert "seeds" not in identity(configure("seed=3"))
    assert identity(configure("seeds.games=5"))["seeds"] == {"games": 5}
    for setting in ("seeds.games=-1", "seeds.sampling=x", "seeds.shuffling=1.5", "+seeds.words=1"):
        with pytest.raises(UserError, match=setting.strip("+").partition("=")[0]):
            run_spec(configure(setting))


def test_games_of_the_base_are_those_that_a_run_would_have_played(cache: Path, tmp_path: Path) -> None:
    """How many stand side by side in a pass shows in their last digits, so that no other run's games are taken."""
    cfg = configure(*SMALL, "algo.iterations=1", "eval.games=0", f"runs={tmp_path}", f"cache={cache}")
    kept = [set(cache.glob("*/evaluations/*/evaluation.json"))]
    for concurrency in (3, 3, 2):
        cfg = configure(
            *SMALL, "algo.iterations=1", "eval.games=0", f"algo.concurrency={concurrency}", f"arm=a{len(kept)}",
            f"runs={tmp_path}", f"cache={cache}",
        )  # fmt: skip
        train.main(cfg)
        kept.append(set(cache.glob("*/evaluations/*/evaluation.json")))
    assert [len(each) - len(kept[0]) for each in kept] == [0, 1, 1, 2]


def test_each_run_of_a_chain_plays_other_games(tmp_path: Path) -> None:
    """Each starts where the one before ended, by its learner or its rival. A second start from nearer the base does not
    make the chain shorter, and the runs before the last need not be there any more."""
    beginnings = {
        "a": ["init.learner=a"],
        "b": [f"init.rival={tmp_path}/b/rival"],
        "c": ["init.learner=c", "init.rival=a"],
    }
    two = "cast.negotiator={player: learner, partner: rival, partners: 1}"
    chain = [configure("seed=3", two, f"runs={tmp_path}")]
    for name, start in beginnings.items():
        folder = tmp_path / name
        (folder / "rival").mkdir(parents=True)
        (folder / "rival" / "policy.json").write_text("{}")
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(chain[-1], resolve=True))
        links = (
            {"warm_starts": warm_starts(run_spec(chain[-1]))} if name == "c" else {}
        )  # cards of earlier versions lack it
        (folder / "run.json").write_text(json.dumps({"run": name, "figures": {}, **links}))
        chain.append(configure("seed=3", two, f"runs={tmp_path}", *start))
    seeds = [seeds_of(run_spec(cfg)) for cfg in chain]
    assert seeds[:2] == [Seeds.of(3), seeds_of(run_spec(configure("seed=3", "init.learner=first")))]
    assert [warm_starts(run_spec(cfg)) for cfg in chain] == [0, 1, 2, 3] and len(set(seeds)) == 4
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    assert seeds_of(run_spec(configure("seed=3", "runs=elsewhere", f"init.learner={tmp_path}/c"))) == seeds[-1]


def test_the_folder_of_a_run_follows_from_the_run_that_its_pattern_finds(finished: Path) -> None:
    cfg = configure(f"runs={finished.parent}", f"init.learner={finished.name[:-2]}*")
    named = configure(f"runs={finished.parent}", f"init.learner={finished.name}")
    assert run_folder(cfg) == run_folder(named)


def test_a_model_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    random_lm("llama", 64, context=2048).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match="the folder has no tokenizer"):
        train.main(configure("model=hf", f"model.name={tmp_path / 'model'}", f"runs={tmp_path}", "progress=false"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_prompt_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer()
    save(tmp_path / "model", random_lm("llama", len(tokenizer), context=64), tokenizer)
    with pytest.raises(UserError, match="a prompt is too long"):
        train.main(
            configure(
                "model=hf", f"model.name={tmp_path / 'model'}", "model.context=64", f"runs={tmp_path}", "progress=false"
            )
        )


def test_malformed_contexts_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "contexts.txt"
    path.write_text("1 0 1 1 3 3\n1 0 1 x 3 3\n")
    with pytest.raises(UserError, match=r"contexts\.txt, line 2"):
        env_maker({"game": "dond", "contexts": str(path)})


def test_a_damaged_run_card_is_named(cache: Path, tmp_path: Path) -> None:
    cfg = configure(*SMALL, f"runs={tmp_path}", f"cache={cache}")
    run_folder(cfg).mkdir()
    (run_folder(cfg) / "run.json").write_text('{"run": ')
    with pytest.raises(UserError, match=r"run\.json: expected one JSON object"):
        train.main(cfg)
    assert [path.name for path in run_folder(cfg).iterdir()] == ["run.json"]


def test_a_policy_that_does_not_say_its_game_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "policy").mkdir(parents=True)
    (tmp_path / "run" / "policy" / "policy.json").write_text('{"gane": "dond"}')
    with pytest.raises(UserError, match=r"policy\.json does not say of which game it is"):
        train.main(configure(*SMALL, f"init.learner={tmp_path / 'run'}", f"runs={tmp_path}", f"cache={cache}"))


def test_two_processes_never_write_into_one_folder(tmp_path: Path) -> None:
    with (
        claim(tmp_path / "run", "a: 1\n"),
        pytest.raises(UserError, match="written by another process"),
        claim(tmp_path / "run", "a: 1\n"),
    ):
        pass
    with pytest.raises(UserError, match=r"was edited \(a=1, here 2\)"), claim(tmp_path / "run", "a: 2\n"):
        pass


def test_another_configuration_is_told_from_the_nearest_run(tmp_path: Path) -> None:
    settings = {"aa": "g: {b: 1, c: 2}\nd: 1\n", "bb": "g: {b: 5, c: 6}\nd: 7\n", "cc": "g: {b: 1, c: 3}\n"}
    for name, text in settings.items():
        with claim(tmp_path / f"x[y]-full-s0-{name}", text):
            pass
    with claim(tmp_path / "x[y]-full-s1-dd", "d: 1\n"):
        pass
    told = nearest_run(tmp_path / "x[y]-full-s0-cc")
    assert told == "another configuration than x[y]-full-s0-aa (d=1, here absent; g.c=2, here 3)"
    assert nearest_run(tmp_path / "x[y]-full-s1-dd") == ""


def without_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts caches and models alone."""
    monkeypatch.setattr(memory, "playing_bytes", lambda *_, **__: 0)
    monkeypatch.setattr("experiments.setup.memory.learning_bytes", lambda *_, **__: 0)


def test_what_does_not_fit_into_memory_is_refused_before_the_base_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = configure(*SMALL, f"runs={tmp_path / 'runs'}", f"cache={tmp_path / 'bases'}")
    there = 5 * size_of(run_spec(cfg).model.lm_config(), 1024).weights
    monkeypatch.setattr(memory, "free_memory", lambda device: there)
    with pytest.raises(
        UserError, match=r"even algo\.concurrency=1 needs .* a pass .* smaller model\.context than 1024, a smaller algo"
    ):
        train.main(cfg)
    assert list(tmp_path.iterdir()) == []


def test_a_run_plays_as_many_games_at_a_time_as_fit_and_notes_how_many(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ["algo.iterations=1", "eval.every=0", f"runs={tmp_path}", f"cache={cache}"]
    cfg = configure(*SMALL, *one)
    # a base, a learner with its gradients and moments, caches of two seats in training and in evaluation
    there = 5 * size_of(run_spec(cfg).model.lm_config(), 1024).weights + 2 * 3 * 2 * SLOT
    without_passes(monkeypatch)
    monkeypatch.setattr(memory, "free_memory", lambda device: there)
    lowered = train.main(cfg)
    assert lowered == run_folder(cfg)
    assert "cache: 12 slots of 0.1 MiB" in (said := capsys.readouterr().out)
    assert "algo.concurrency lowered from 4 to 3: " in said
    assert [made["algo.concurrency"] for made in read_json(lowered / "run.json")["made_with"]] == [3]
    monkeypatch.setattr(memory, "free_memory", lambda device: 1 << 40)
    three = train.main(configure(*SMALL, *one, "algo.concurrency=3"))
    assert three != lowered and (three / "metrics.jsonl").read_text() == (lowered / "metrics.jsonl").read_text()
    evaluations = [read_json(each / "evaluation.json")["by_game"] for each in (three, lowered)]
    assert evaluations[0] == evaluations[1]


def test_games_that_are_not_there_change_no_bit(cache: Path, tmp_path: Path) -> None:
    """Caches have room for the games that are played, whatever may be played at a time."""
    few = ["algo.iterations=1", "eval.every=0", "eval.games=0", "eval.final_games=3", f"runs={tmp_path}"]
    runs = [train.main(configure(*SMALL, *few, f"cache={cache}", f"algo.concurrency={n}")) for n in (6, 99)]
    assert runs[0] != runs[1]  # the name says what was asked for
    assert len({(run / "metrics.jsonl").read_text() for run in runs}) == 1


def test_a_context_that_no_model_holds_is_refused_before_the_base_is_trained(tmp_path: Path) -> None:
    save(tmp_path / "model", random_lm("qwen3", 300, context=512), hf_tokenizer(CHATML, single_digits=True))
    cfg = configure(
        "model=hf", f"model.name={tmp_path / 'model'}", "base=scripted", "model.context=1024", "progress=false",
        f"runs={tmp_path / 'runs'}", f"cache={tmp_path / 'bases'}",
    )  # fmt: skip
    with pytest.raises(
        UserError, match=r"model\.context=1024 is more than the model can read \(512 tokens\): lower it"
    ):
        train.main(cfg)
    assert not (tmp_path / "bases").exists()


def test_players_that_do_not_fit_are_refused_before_they_are_loaded(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * SLOT)
    for main, given, command in (
        (evaluate.main, f"players=[{finished},base]", "evaluate"), (play.main, f"opponent={finished}", "play")
    ):  # fmt: skip
        with pytest.raises(UserError, match=r"^Not enough memory: even concurrency=1 needs"):
            main(configure(given, f"out={tmp_path}", command=command))


def test_few_games_need_room_for_few(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the concurrency of evaluation's defaults, 256, whatever is asked for, and however it is asked."""
    room = [f"players=[{finished},base]", f"out={tmp_path}", "progress=false", "threads=1"]
    weights = 2 * size_of(run_spec(configure(*SMALL)).model.lm_config(), 1024).weights
    monkeypatch.setattr(memory, "free_memory", lambda device: weights + 2 * 2 * 4 * SLOT)
    without_passes(monkeypatch)
    evaluate.main(configure(*room, "games=4", command="evaluate"))
    assert "16 slots" in (said := capsys.readouterr().out) and "lowered" not in said
    evaluate.main(configure(*room, "games=5", "concurrency=9", command="evaluate"))
    found = read_json(tmp_path / "evaluation.json")["about"]
    assert (found["games"], found["concurrency"]) == (5, 4)
    assert "16 slots" in (said := capsys.readouterr().out) and "; concurrency lowered from 5 to 4: " in said


def test_an_unwritable_cache_is_refused_before_the_base_is_trained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cache=.*cannot be written"):
        train.main(configure(*SMALL, f"runs={tmp_path / 'runs'}", f"cache={tmp_path / 'file' / 'bases'}"))


def test_an_unwritable_folder_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), claim(tmp_path / "file" / "run", ""):
        pass

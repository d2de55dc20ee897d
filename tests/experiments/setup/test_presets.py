"""Presets and sweeps: what an arm changes, what it promises, and in what published runs differ."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from experiments.setup.config import plain
from experiments.setup.spec import run_spec, zero_weights
from marl.common.errors import UserError
from marl.metrics.wording import WORDING
from marl.model.lora import AdapterConfig
from tests.composing import configure

PACKAGE = pytest.mark.skipif(find_spec("diplomacy") is None, reason="needs the extra `diplomacy`")
SPEAKING, LISTENING = {"reward.speaking.weight": 0.0}, {"loss.listening.weight": 0.0}
WITHOUT_RL = {"reward.game.weight": 0.0} | {
    f"loss.{n}.weight": 0.0 for n in ("policy", "value", "entropy", "imitation")
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
}


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


@pytest.mark.parametrize(
    ("preset", "sweep"),
    [
        *((preset, "among_us_ablation") for preset in PRESETS),
        ("game_only", "none"),
        ("listening_only", "dond_ablation"),
        *(
            pytest.param(preset, "diplomacy_press", marks=PACKAGE)
            for preset in ("full", "no_speaking", "no_listening", "game_only")
        ),
    ],
)
def test_arms_differ_in_the_weights_of_their_terms_and_in_nothing_else(preset: str, sweep: str) -> None:
    usual, cfg = configure("train", f"sweep={sweep}"), configure("train", f"sweep={sweep}", f"ablation={preset}")
    before, after = ({k: v for k, v in flat(plain(each)).items() if not k.startswith("only.")} for each in (usual, cfg))
    assert before.keys() == after.keys()
    changed = {name: value for name, value in after.items() if value != before[name] and name != "arm"}
    assert changed == {name: value for name, value in PRESETS[preset].items() if before[name] not in (0, value)}
    assert cfg.arm == (preset if preset != "none" else "custom")
    run_spec(cfg)


def test_the_mute_arm_is_the_games_reward_without_talk_from_the_same_base() -> None:
    spoken, mute = (flat(plain(configure("train", "sweep=diplomacy_press", f"ablation={a}"))) for a in ("full", "mute"))
    changed = {name: value for name, value in mute.items() if not name.startswith("only.") and value != spoken[name]}
    assert changed == {"arm": "mute", "env.press": "none", **SPEAKING, **LISTENING}
    assert mute["base.vary.press"] == ["private", "none"]  # so that env.press does not make another base


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
        ("grouped", {"algo.group": 8}),
        ("rloo", {"algo.advantage": "rloo", "algo.group": 8}),
        ("grpo", {"algo.advantage": "grpo", "algo.group": 8}),
        ("rae", {"algo.advantage": "rae"}),
    ],
)
def test_variants_of_the_credit_change_what_they_say_of_the_full_arm(preset: str, changes: dict[str, Any]) -> None:
    usual, cfg = (configure("train", "sweep=among_us_credit", f"ablation={name}") for name in ("full", preset))
    before, after = flat(plain(usual)), flat(plain(cfg))
    assert {name: after[name] for name in changes} == changes  # the preset wins over the sweep
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
        ("among_us_vote", {"algo.credit.speech": "separate", "algo.iterations": 128, "loss.listening.votes": 1.0}),
    ],
)
def test_further_sweeps_differ_from_the_headlines_only_in_what_they_are_about(
    sweep: str, about: dict[str, Any]
) -> None:
    headline, cfg = (flat(plain(configure("train", f"sweep={name}"))) for name in ("among_us_ablation", sweep))
    changed = {name: value for name, value in cfg.items() if value != headline[name]}
    assert changed.pop("name") == sweep
    if lessons := changed.pop("base.lessons", None):  # where imposters report, a report is no alibi
        assert sweep == "among_us_reports" and [each["players"] for each in lessons] == ["gullible_wary", "random_wary"]
        usual = [{**each, "players": each["players"].removesuffix("_wary")} for each in lessons]
        assert usual == headline["base.lessons"]
    assert changed == about


@pytest.mark.parametrize(
    ("sweep", "like"),
    [("dond_estimators", "sweep=dond_small"), ("among_us_estimators", "experiment=among_us_quickstart")],
)
def test_sweeps_of_estimators_are_the_small_runs_with_evaluations_on_the_way(sweep: str, like: str) -> None:
    usual, cfg = (flat(plain(configure("train", each, "ablation=full"))) for each in (like, f"sweep={sweep}"))
    changed = {name: value for name, value in cfg.items() if value != usual[name]}
    changed.pop("eval.every", None)
    assert changed == {"name": sweep, "eval.games": 128}
    assert cfg["algo.iterations"] % cfg["eval.every"] == 0  # the last model is among those evaluated


def test_sweeps_of_filtered_cloning_play_as_many_games_as_the_one_of_ppo() -> None:
    human = configure("train", "sweep=dond_filtered_bc", "env.objective=-0.5")
    scripted = configure("train", "sweep=dond_filtered_bc_scripted", "base.players=careful", "env.objective=0")
    few = configure("train", "sweep=dond_filtered_bc_300", "base=human")  # data.dond implies it
    ppo = configure("train", "sweep=dond_filtered_bc_ppo", "ablation=no_imitation", "env.objective=0")
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


def test_arms_near_people_differ_in_their_learner_and_its_strength_alone() -> None:
    """PPO, filtered cloning and planning play as many games from one human base, and one KL term pulls them to it."""
    ppo, cloning, plans = (
        configure("train", "data.dond=DIR", *overrides)
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


PROMISING = ("game_only", "reward_only", "listening_only")
OWN = "loss.own={_target_: marl.losses.claim.ClaimLoss, weight: 5.0}"
PAID = "reward.own={_target_: anywhere.Paid}"  # the weight is the default of its class


def measured(cfg: DictConfig) -> list[str]:
    """The terms that the arm sets to 0."""
    return zero_weights(plain(cfg))


@pytest.mark.parametrize("preset", PROMISING)
def test_presets_that_promise_what_is_on_train_nothing_else(preset: str) -> None:
    """Terms that the preset does not name get weight 0, the user's own and ours, because a sweep's table names the arm
    after the preset. With `arm=mine` they keep their weight."""
    given = [f"ablation={preset}", f"+{OWN}", f"+{PAID}", "loss.world_model.weight=0.2"]
    cfg = configure("train", *given)
    shipped = plain(configure("train", f"ablation={preset}"))
    settings = plain(cfg)
    assert set(zero_weights(settings)) == {"loss.own", "reward.own", "loss.world_model"}
    weights = {(g, n): term["weight"] for g in ("loss", "reward") for n, term in settings[g].items()}
    assert weights == {
        ("loss", "own"): 0.0, ("reward", "own"): 0.0,
        **{(g, n): term["weight"] for g in ("loss", "reward") for n, term in shipped[g].items()},
    }  # fmt: skip
    assert zero_weights(settings) == []
    named = configure("train", *given, "arm=mine")  # an arm with its own name may train anything
    assert measured(named) == [] and named.loss.own.weight == 5.0


@pytest.mark.parametrize("preset", ["full", "no_speaking", "no_listening", "none", "world_model", "imitation"])
def test_presets_that_take_one_thing_away_leave_ones_own(preset: str) -> None:
    cfg = configure("train", f"ablation={preset}", f"+{OWN}", f"+{PAID}")
    assert measured(cfg) == [] and cfg.loss.own.weight == 5.0 and "weight" not in cfg.reward.own


def test_only_presets_that_promise_what_is_on_list_terms() -> None:
    promising = {path.stem for path in Path("conf/ablation").glob("*.yaml") if "only" in (OmegaConf.load(path) or {})}
    assert promising == set(PROMISING)


@pytest.mark.parametrize("game", [(), ("env=among_us",)])
def test_what_presets_promise_is_what_they_train(game: tuple[str, ...]) -> None:
    """Lists of the presets hold every term of ours that has a weight there, so that no published run changes."""
    for preset in PROMISING:
        cfg = configure("train", *game, f"ablation={preset}")
        assert not [name for name in measured(cfg) if name.replace(".", "/") in WORDING]
        assert set(cfg.only) == {cfg.arm}


def test_a_list_of_terms_is_a_list() -> None:
    with pytest.raises(UserError, match=r"^only\.game_only=reward\.game: must be a list of terms, as in "):
        measured(configure("train", "ablation=game_only", "only.game_only=reward.game"))


def test_a_pretrained_model_takes_smaller_steps_than_one_from_scratch() -> None:
    def rates(*overrides: str) -> tuple[float, float]:
        cfg = configure("train", *overrides)
        return cfg.base.learning_rate, cfg.algo["update"].learning_rate

    hf = ("model=hf", "model.name=PATH")
    assert rates() == (4e-3, 1e-3) and rates("env=among_us") == (4e-3, 5e-4)
    assert rates(*hf) == rates(*hf, "base=scripted") == rates(*hf, "env=among_us", "base=scripted") == (5e-5, 1e-5)
    assert rates(*hf, "base=human", "algo=filtered_bc") == (5e-5, 1e-5)
    assert rates(*hf, "base=scripted", "base.learning_rate=1e-3", "algo.update.learning_rate=2e-3") == (1e-3, 2e-3)
    for game, name, rate, command in (("dond", "smollm2", 5e-4, "evaluate"), ("among_us", "gemma3", 3e-4, "play")):
        own = (f"model={name}", f"env={game}", "base=scripted")
        assert rates(*own) == (rate, 1e-4)  # with an adapter
        spec = run_spec(configure("train", *own))
        assert spec.model.lora == AdapterConfig() and not spec.base.lessons and not spec.base.players
        assert spec.algo.update.optimizer == "adamw" and spec.env["style"] == "brief"
        assert configure(command, *own).base == configure("train", *own).base
    for command in ("evaluate", "play"):  # they may make the same base
        assert configure(command, *hf, "base=scripted").base.learning_rate == 5e-5

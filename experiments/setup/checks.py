"""Checks of several settings of a run together: what one setting asks for and another excludes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from experiments.launch.overrides import named
from experiments.setup.config import losses_of
from experiments.setup.players import check_whole_claims
from marl.agents.chat import CHAT
from marl.algorithms.rl_pikl import RLPiklConfig
from marl.common.errors import UserError
from marl.losses import any_reads, needs
from marl.planning.planner import GAMES as PLANNED
from marl.pretraining.config import BaseConfig
from marl.rewards import CREDITS, credits_messages, is_game
from marl.rollout.cast import players_of
from marl.rollout.games import exchangeable, has_truths

if TYPE_CHECKING:
    from experiments.setup.spec import RunSpec

HUMAN_ONLY = (  # settings of `base`
    "epochs", "permute_items", "deals_only", "claim", "keep", "human_games", "held_out_games",
)  # fmt: skip


def check_losses(spec: RunSpec) -> None:
    """Refuses losses that this learner or this game has no use for."""
    kind, game, losses = spec.kind, spec.env["game"], spec.losses
    plans = any_reads(losses, "planned")
    if kind == "filtered_bc" and plans:
        raise UserError("loss=plan: algo=filtered_bc imitates games as they were played. Drop it, or take algo=ppo.")
    if kind == "pikl" and not plans:
        raise UserError(
            "loss.plan is missing: with algo=pikl the policy learns from plans. Leave loss.plan in, or take algo=ppo."
        )
    if isinstance(spec.algo, RLPiklConfig) and spec.algo.value == "plan" and game == "among_us":
        imposters, mistake = spec.env["imposters"], spec.algo.planner.mistake
        if imposters != 1 or mistake:
            raise UserError(
                f"algo.value=plan: with env.imposters={imposters} and algo.planner.mistake={mistake} a plan does not "
                "say how probable a win by the vote is. Take paid, or one imposter and mistake 0."
            )
    if plans and game not in PLANNED:
        raise UserError(f"loss.plan: env.game={game} has nothing to plan. Leave it out (~loss.plan).")
    if plans:
        check_whole_claims(spec.env, "loss.plan")
    if not any(loss.weight for loss in losses.values()):
        raise UserError(f"loss: with algo={kind} every weight is 0, so there is nothing to learn. Raise one.")
    for name, loss in losses.items():
        if kind != "ppo" and needs(loss, "reference"):
            raise UserError(
                f"loss.{name}.estimator={getattr(loss, 'estimator', '')}: algo={kind} does not learn from plain "
                "samples of the policy, which it takes; must be exact"
            )
        if (votes := getattr(loss, "votes", 0.0)) and not has_truths(spec.env):
            raise UserError(f"loss.{name}.votes={votes:g}: nobody votes in env.game={game}; must be 0")
        if loss.reads == "renamed" and not exchangeable(spec.env):
            raise UserError(
                f"loss.{name}.renamed=true: env.game={game} has no names that can stand for one another; "
                "set it to false"
            )
        if kind == "pikl" and needs(loss, "filter") and loss.weight:
            raise UserError(
                f"loss.{name}.weight={loss.weight:g}: algo=pikl imitates plans, and by this it would imitate every "
                "seat; must be 0"
            )
    if (estimator := getattr(spec.algo, "advantage", "gae")) != "gae" and spec.critic != "private":
        raise UserError(f"model.critic={spec.critic}: algo.advantage={estimator} has no critic; must be private")
    # Training alone plays groups; evaluations play other numbers of games.
    if (games := spec.algo.games) % (group := getattr(spec.algo, "group", 1)):
        raise UserError(f"algo.group={group}: algo.games={games} cannot be split into such groups; must be a divisor")
    target_kl = spec.algo.update.target_kl
    if target_kl is not None and not any(needs(loss, "advantages") for loss in losses.values()):
        raise UserError(
            f"algo.update.target_kl={target_kl:g}: how far the policy has moved is known only beside a loss on "
            "advantages, as loss.policy; must be null without one"
        )


def check_intents_are_read(spec: RunSpec) -> None:
    """Refuses what learners that are told intents (`algo.intents`) would ignore, or cannot be told them with."""
    intents_folder = getattr(spec.algo, "intents", None)
    if not intents_folder:
        return
    if any_reads(spec.losses, "planned"):
        raise UserError(f"loss.plan: with algo.intents={intents_folder} no claim is planned. Drop one of them.")
    check_whole_claims(spec.env, f"algo.intents={intents_folder}")
    for role, config in spec.cast.items():
        if config.pool:
            raise UserError(f"cast.{role}.pool={config.pool}: past selves are told no intents; must be 0")


def check_rewards(spec: RunSpec) -> None:
    """Refuses a reward with a weight that this learner would not learn from."""
    for name, reward in spec.rewards.items():
        if (credited := getattr(reward, "credits", "turn")) not in CREDITS:
            raise UserError(f"reward.{name}.credits={credited!r}: must be one of {', '.join(CREDITS)}")
        listening = {r: config for r, config in spec.cast.items() if r not in getattr(reward, "adversaries", ())}
        if getattr(reward, "resamples", 0) and CHAT in players_of(listening):
            raise UserError(
                f"reward.{name}.baseline=resampled: a listener is an endpoint, whose belief cannot be read again; must "
                "be before, or leave chat out of the cast"
            )
        learned = spec.kind == "ppo" or is_game(reward) or (spec.kind == "pikl" and not credits_messages(reward))
        if reward.weight and not learned:
            raise UserError(
                f"reward.{name}.weight={reward.weight:g}: algo={spec.kind} learns nothing from it; must be 0, which "
                "measures it, or take algo=ppo"
            )


def check_base_is_read(base: BaseConfig) -> None:
    """Refuses settings that this base does not read: two run names would mean the same run."""
    if base.players and base.data == "human":
        raise UserError(
            f"base.players={base.players}: base=human learns from people. Leave it out, or take base=scripted, and no "
            "data.dond."
        )
    for name in HUMAN_ONLY if base.data == "scripted" else ():
        if getattr(base, name) != getattr(BaseConfig, name):
            raise UserError(
                f"base.{name}={getattr(base, name)}: base=scripted does not read it. Leave it out, or take base=human."
            )


def check_learners(spec: RunSpec) -> None:
    """Refuses a cast whose learners do not learn or are not measured."""
    first, *others = spec.learners
    if (turns := getattr(spec.algo, "alternate", 0)) and not others:
        raise UserError(f"algo.alternate={turns}: {first} learns alone; must be 0")
    if first not in players_of(spec.test_cast):
        raise UserError(f"eval.cast: {first} learns but does not play in evaluation. Make it the player of a role.")
    if spec.kind != "ppo" and others:
        names = ", ".join(spec.learners)
        raise UserError(f"algo={spec.kind} trains one learner, and the cast has {names}. Use algo=ppo.")
    for name in spec.init:
        if name not in spec.learners:
            raise UserError(
                f"init.{name}={spec.init[name]}: {name} does not play here; the cast has {', '.join(spec.learners)}"
            )


def check_job(config: DictConfig, files: Callable[..., DictConfig]) -> None:
    """Refuses values of a job that do not go with the files that it chooses. `config`, `files`: see `check_arm`."""
    check_arm(config, files)
    check_losses_are_taken(config, files)


def check_losses_are_taken(config: DictConfig, files: Callable[..., DictConfig]) -> None:
    """Refuses values for a loss that the learner does not take: two run names would mean the same run.

    Files may have such values, since they serve all learners.
    """
    of_files = named(files())
    values = {name: value for name, value in named(config).items() if of_files.get(name) != value}
    changed = {name: name.split(".")[1] for name in values if name.count(".") > 1 and name.startswith("loss.")}
    if not changed:
        return
    settings: Any = {part: OmegaConf.to_container(config[part], resolve=True) for part in ("loss", "algo")}
    taken = losses_of(settings)
    estimator = settings["algo"].get("advantage", "gae")
    learner, other = (
        (f"algo={settings['algo']['kind']}", "algo=ppo") if estimator == "gae"
        else (f"algo.advantage={estimator}, which has no critic,", "algo.advantage=gae")
    )  # fmt: skip
    for name, loss in changed.items():
        if settings["loss"][loss] is not None and loss not in taken:
            raise UserError(
                f"{name}={values[name]}: {learner} does not take loss.{loss}. Leave it out, or take {other}."
            )


def check_arm(config: DictConfig, files: Callable[..., DictConfig]) -> None:
    """Refuses values that undo what a preset of `ablation` sets: another arm would be trained under its name.

    `config`: of a job. `files`: composes the files that the job chooses, and others in their place, without its values.
    """
    wanted = files()
    preset, learner = (config.hydra.runtime.choices.get(group) for group in ("ablation", "algo"))
    if preset in (None, "none") or config.arm != wanted.arm:  # the command line names the arm
        return
    if learner != "ppo":
        raise UserError(
            f"ablation={preset} names an arm of algo=ppo, and algo={learner} has terms of its own. Leave it out, or "
            "name the arm, as in arm=NAME."
        )
    plain = files(ablation="ablation=none")
    if plain.arm == wanted.arm:  # the preset does not name it
        return
    before, given = named(plain), named(config)
    for name, value in named(wanted).items():
        if name in given and not isinstance(value, dict) and before.get(name) != value != given[name]:
            raise UserError(
                f"ablation={preset} sets {name}={value}, and {name}={given[name]} trains something else under its "
                "name. Leave one of them out, or name the arm, as in arm=NAME."
            )

"""Measures how much of the speaking reward's gradient is signal, with each of its baselines.

    python -m experiments.studies.gradients select='among_us_quickstart-full-*'

Each finished run plays batches of games as it did in training, once with the policy that it ended with and once with
its base; nothing is learned. Messages are drawn anew in the place of each (`rollout/resampling.py`), and the gradient
of the policy loss is computed from the same games with `reward.speaking.baseline=before` and `=resampled`: of the
speaking reward's part of the messages alone, and of the game's and the speaking reward together.

Written: `gradients.csv`, for each policy, part and baseline the signal-to-noise ratio of a batch with the jackknife's
95 % interval over batches; the ratio of both, `gain`; and what the drawn messages cost in seconds beside play and
update. What it leaves out: other losses, and whether a better gradient makes a better crew.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from experiments.launch.command import command
from experiments.launch.terminal import Bar, say
from experiments.setup.config import cast_of, make
from experiments.setup.players import seat_players
from experiments.setup.select import selected
from experiments.setup.stages import Stage, base_folder, end_of
from experiments.studies.cells import begin, compute
from marl.agents.model import model_agent
from marl.algorithms.ppo import PPOConfig
from marl.common.errors import UserError, check_counts
from marl.common.files import digest
from marl.learning.advantages import add_advantages
from marl.learning.batch import Row, collate, rows_of
from marl.learning.update import update
from marl.losses.policy import PolicyLoss
from marl.metrics.gradients import over_batches, signal_to_noise
from marl.metrics.stats import Floats, Interval, Metrics
from marl.metrics.tables import format_table, read_figures, write_csv
from marl.model.policy import Policy
from marl.rewards import Reward, add_rewards
from marl.rewards.game import GameReward
from marl.rewards.speaking import BASELINES, SpeakingReward
from marl.rollout.cast import by_role, learners_of, seats_per_player
from marl.rollout.games import env_maker
from marl.rollout.resampling import resample
from marl.rollout.rollout import rollout
from marl.rollout.seeds import GAMES, draw_games
from marl.storage.folder import finished_run, git_commit

SPEAKING = "speaking"
PARTS = (SPEAKING, "all")  # whose gradient: the speaking reward's part of the messages; the game's and speaking's
TERMS = {"game": "marl.rewards.game.GameReward", SPEAKING: "marl.rewards.speaking.SpeakingReward"}


@dataclass(frozen=True)
class Subject:
    """A policy whose gradient is measured: what its run ended with, or began from. `settings`: the run's."""

    run: Path
    settings: Mapping[str, Any]
    called: str  # `base` or `trained`
    stage: Stage

    @property
    def label(self) -> str:
        return f"{self.run.name}, {self.called}"


@command("gradients")
def main(cfg: DictConfig) -> None:
    """Measures what is not measured yet, then tabulates."""
    # Configure.
    check_counts(cfg, ("batches", "games", "samples"))
    if cfg.batches < 3:
        raise UserError(f"batches={cfg.batches}: the jackknife leaves one out, and noise needs two; must be at least 3")
    subjects = [subject for run in selected(Path(cfg.runs), cfg.select, cfg.where) for subject in subjects_of(run)]
    workspace = begin(cfg)
    settings = {"batches": cfg.batches, "games": cfg.games, "samples": cfg.samples}
    names = (digest({"run": each.settings, "policy": each.stage.digest, **settings}) for each in subjects)
    cells = {workspace.cells / f"{name}.json": subject for name, subject in zip(names, subjects, strict=True)}

    # Measure.
    def measured(subject: Subject, number: str) -> dict[str, Any]:
        workspace.bar.stage(f"{number}  {subject.label}: batches", cfg.batches)
        metrics = measure(subject, cfg.batches, cfg.games, cfg.samples, workspace.device, workspace.bar)
        about = {"run": subject.run.name, "policy": subject.called, "commit": git_commit(), **settings}
        return {"about": about, "metrics": {name: interval.to_json() for name, interval in metrics.items()}}

    if not compute(cells, measured):
        return
    workspace.bar.close()

    # Report.
    found = {subject.label: read_figures(path) for path, subject in cells.items()}
    lines = [
        (subject.run.name, subject.called, name, interval.mean, interval.low, interval.high, cfg.batches)
        for subject in subjects
        for name, interval in sorted(found[subject.label].items())
    ]
    columns = ("run", "policy", "metric", "mean", "low", "high", "batches")
    write_csv(workspace.out / "gradients.csv", columns, lines)
    say(format_table(found, list(dict.fromkeys(name for own in found.values() for name in own))))
    say(f"\ntable: {workspace.out / 'gradients.csv'}")


def subjects_of(run: Path) -> list[Subject]:
    """Returns a run's base and its end. UserError for a run that has no policy gradient, or no speaking reward."""
    settings, _ = finished_run(run)
    algo, cast = settings["algo"], cast_of(settings["cast"])
    own = {name: term for name, term in settings["reward"].items() if term}
    if algo.get("kind") != "ppo" or {name: term["_target_"] for name, term in own.items()} != TERMS:
        raise UserError(f"{run}: it did not learn by algo=ppo from reward.game and reward.speaking. Select other runs.")
    if algo.get("advantage", "gae") != "gae":
        raise UserError(f"{run}: gradients are measured with a critic (algo.advantage=gae). Select other runs.")
    if len(learners_of(cast)) > 1 or any(role.pool for role in cast.values()) or algo.get("intents"):
        raise UserError(f"{run}: gradients are measured of one learner, without past selves or intents. Select others.")
    if settings["model"].get("lora"):
        raise UserError(f"{run}: gradients of adapters (model.lora) are not measured. Select other runs.")
    start, end = Stage(0, base_folder(run)), end_of(run, learners_of(cast)[0])
    return [Subject(run, settings, "base", start), Subject(run, settings, "trained", end)]


def algo_of(settings: Mapping[str, Any]) -> PPOConfig:
    """Returns the run's settings of PPO."""
    return make(PPOConfig, {name: value for name, value in settings["algo"].items() if name != "kind"}, "algo")


def rewards_of(settings: Mapping[str, Any], baseline: str, samples: int) -> dict[str, Reward]:
    """Returns the run's rewards with this baseline: the game's and the speaking reward, which may have weight 0 in
    training and then has its usual one."""
    game, speaking = (
        {k: v for k, v in settings["reward"][name].items() if k != "_target_"} for name in ("game", SPEAKING)
    )
    speaking |= {"baseline": baseline, "samples": samples, "weight": speaking["weight"] or SpeakingReward.weight}
    return {
        "game": make(GameReward, game, "reward.game"),
        SPEAKING: make(SpeakingReward, speaking, "reward.speaking"),
    }


def measure(subject: Subject, batches: int, games: int, samples: int, device: torch.device, bar: Bar) -> Metrics:
    """Plays batches of `games` games, and measures the gradients of both baselines from the same games."""
    cast, env = cast_of(subject.settings["cast"]), subject.settings["env"]
    algo = replace(algo_of(subject.settings), games=games)
    learner, make_env = learners_of(cast)[0], env_maker(env)
    policy, base = subject.stage.load(device), Stage(0, base_folder(subject.run)).load(device)
    held = seats_per_player(cast, make_env())[learner]
    agents = {
        **seat_players(cast, make_env(), env, base, algo, algo.temperature),
        learner: model_agent(learner, policy, algo, held, algo.temperature),
    }
    rewards = {baseline: rewards_of(subject.settings, baseline, samples) for baseline in BASELINES}
    gradients: dict[tuple[str, str], list[Floats]] = {(p, b): [] for p in PARTS for b in BASELINES}
    seconds = {"play": 0.0, "resampling": 0.0, "update": 0.0}
    for batch in range(batches):
        began = time.perf_counter()
        # Games of the run's own seed that training has not seen.
        drawn = draw_games(subject.settings["seed"], GAMES, algo.iterations + batch, count=games)
        episodes = rollout(drawn, by_role(cast, agents), make_env, algo.concurrency)
        played = time.perf_counter()
        episodes = resample(episodes, make_env, agents, {learner}, samples)
        heard = time.perf_counter()
        for part, baseline in gradients:
            paid = rewards[baseline]
            rows = rows_of(add_rewards(episodes, paid), {learner})
            gradients[part, baseline].append(gradient(policy, rows, paid, algo, part))
        seconds["play"] += played - began
        seconds["resampling"] += heard - played
        seconds["update"] += (time.perf_counter() - heard) / len(gradients)
        bar.advance(1)
    found = {f"seconds/{name}": Interval(total / batches, np.nan, np.nan, batches) for name, total in seconds.items()}
    for part in PARTS:
        both = np.concatenate([np.stack(gradients[part, baseline]) for baseline in BASELINES]).astype(np.float64)
        products = both @ both.T
        for k, baseline in enumerate(BASELINES):
            own = products[k * batches : (k + 1) * batches, k * batches : (k + 1) * batches]
            found[f"{part}/{baseline}"] = over_batches(signal_to_noise, own, batches)
        found[f"{part}/gain"] = over_batches(gain, products, batches)
    return found


def gain(products: Floats) -> float:
    """Returns how many times the first baseline's ratio the second one's is, from products (2B, 2B)."""
    half = len(products) // 2
    return signal_to_noise(products[half:, half:]) / signal_to_noise(products[:half, :half])


def gradient(policy: Policy, rows: list[Row], rewards: Mapping[str, Reward], algo: PPOConfig, part: str) -> Floats:
    """Computes the policy loss's gradient over all rows in one batch, (P,), and leaves the policy as it is."""
    alone = part == SPEAKING
    paid = {SPEAKING: rewards[SPEAKING]} if alone else rewards
    credit = replace(algo.credit, speech="separate_only") if alone else algo.credit
    batch = add_advantages(collate(rows, paid), paid, credit)
    if alone:  # what is no message has the critic's advantage, which no reward of speaking moves
        batch = replace(batch, advantages=torch.where(batch.message, batch.advantages, 0.0))
    whole = replace(
        algo.update, epochs=1, minibatches=1, rows=None, max_grad_norm=float("inf"), temperature=algo.temperature
    )
    learned = [p for p in policy.parameters() if p.requires_grad]
    update(policy, None, batch, {"policy": PolicyLoss()}, torch.optim.SGD(learned, lr=0.0), whole, torch.Generator())
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in learned]
    return torch.cat([p.flatten() for p in parts]).float().cpu().numpy()


if __name__ == "__main__":
    main()

"""How runs' language drifts from people's: `python -m experiments.drift select='dond_human-*' data.dond=DIR`.

For each finished run of Deal or No Deal: its base, the checkpoints that it kept, and the policy that it ended with.
Each plays games with itself, and reads held-out human dialogues; a frozen model of people reads what it said. Also read
are the transcripts that the run kept of each of its evaluations: fewer games, at more iterations. What is measured of
one policy is written at once, so that a stopped command goes on where it was. Figures are defined in marl/drift.py.

Written: `drift.csv` (a line for each policy and metric), `kept.csv` (the same of kept transcripts), `people.csv` (of
the human dialogues themselves), `drift.svg`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig
from safetensors.torch import load_file

from experiments.cli import command
from experiments.conditions import base_folder
from experiments.evaluate import pick_device, set_threads
from experiments.players import policy_folder
from experiments.report import selected
from experiments.terminal import Bar, say
from marl.agents import PlayConfig, model_agent
from marl.cast import learners_of
from marl.checkpoint import checkpoints_in, folder_digest, load_policy, read_card, read_state, verify_folder
from marl.config import EvalConfig, cast_of, digest, make
from marl.drift import likelihood, retold, talk_drift
from marl.errors import UserError, check_writable
from marl.evaluate import Metrics, dond_metrics, talk_metrics
from marl.files import read_json, write_json, writing
from marl.games import env_maker
from marl.human_dond import read_split
from marl.negotiation import human_talk, read_talk, talk_of
from marl.policy import Policy
from marl.pretrain import recorded
from marl.report import PAPER
from marl.rollout import EVALUATION, draw_games, everyone, rollout
from marl.runs import finished_run
from marl.stats import Interval, format_table, write_csv
from marl.transcripts import read_episodes

SPEAKER = "policy"  # what the policy under test is called in its games
SPLITS = ("val", "test")
COLUMNS = ("run", "arm", "seed", "iteration", "metric", "mean", "low", "high", "games")
SHOWN = (
    "game/score", "game/agreement", "drift/human_dialogues", "drift/own_speech", "talk/distinct_2", "talk/split_kept",
    "talk/split_coverage", "talk/table_kept", "talk/value_true", "talk/value_chance", "talk/inverted",
    "talk/inverted_coverage", "talk/inverted_chance", "talk/worse_share", "talk/understood", "talk/turns",
    "talk/vocabulary",
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """One policy of a run: what it started from (iteration 0), a checkpoint, or its end."""

    run: Path
    arm: str
    seed: int
    iteration: int
    config: Mapping[str, Any] = field(hash=False)
    folder: Path  # a saved policy
    weights: Path | None = None  # of a checkpoint, which stand in for those of the folder

    @property
    def digest(self) -> str:
        """Stands for the policy's files."""
        return folder_digest(self.folder) + (folder_digest(self.weights.parent) if self.weights else "")

    def load(self, device: torch.device) -> Policy:
        policy = load_policy(self.folder, device)
        if self.weights is not None:
            policy.load_state_dict(load_file(self.weights), strict=False)  # tied weights stand there once
        return policy


@command("drift")
def main(cfg: DictConfig) -> None:
    """Measures what is not measured yet, then tabulates."""
    for name in ("games", "concurrency"):
        if isinstance(cfg[name], bool) or not isinstance(cfg[name], int) or cfg[name] < 1:
            raise UserError(f"{name}={cfg[name]}: must be a whole number, at least 1")
    if cfg.split not in SPLITS:
        raise UserError(f"split={cfg.split}: must be one of {', '.join(SPLITS)}; bases learn from the others")
    runs = selected(Path(cfg.runs), cfg.select)
    stages = [stage for run in runs for stage in stages_of(run)]
    people = {run: people_folder(run, cfg.human) for run in runs}
    human = people_metrics(cfg.data.dond, cfg.split) if cfg.data.dond else {}
    cells, out = Path(cfg.cells), Path(cfg.publish)
    check_writable(cells, "cells")
    check_writable(out, "publish")
    device = pick_device(cfg.device)
    set_threads(cfg.threads)
    if not cfg.data.dond:
        say("data.dond=null: the likelihood of human dialogues is left out")

    bar, found = Bar(enabled=cfg.progress), {}
    for number, stage in enumerate(stages, start=1):
        settings = settings_of(stage, people[stage.run], cfg)
        path = cells / f"{stage.run.name}-{stage.iteration:06d}-{digest(settings)}.json"
        if not path.exists():
            label = f"{number}/{len(stages)}  {stage.run.name}, iteration {stage.iteration}"
            bar.stage(label, cfg.games)
            measured = measure(stage, people[stage.run], cfg, device, bar)
            bar.close()
            figures = {name: interval.to_json() for name, interval in measured.items()}
            write_json(path, {"about": settings, "metrics": figures})
            say(label)
        kept = read_json(path)["metrics"]
        found[stage] = {name: Interval.from_json(figure) for name, figure in kept.items()}
    write_lines(out / "drift.csv", found.items())
    write_lines(out / "kept.csv", ((stage, metrics) for run in runs for stage, metrics in kept_transcripts(run)))
    write_csv(
        out / "people.csv", COLUMNS[4:], [(name, i.mean, i.low, i.high, i.n) for name, i in sorted(human.items())]
    )
    draw(found, out / "drift.svg")
    columns = {f"{s.arm} s{s.seed} it {s.iteration}": metrics for s, metrics in found.items()}
    for start in range(0, len(columns), 4):
        part = dict(list(columns.items())[start : start + 4])
        part = {**part, **({"people": human} if human else {})}
        say("\n" + format_table(part, [name for name in SHOWN if any(name in metrics for metrics in part.values())]))
    say(f"\ntables and figure: {out}")


# --- What there is to measure -----------------------------------------------------------------------------------------


def stages_of(run: Path) -> list[Stage]:
    """A run's policies by iteration. UserError where it is a run of another game."""
    config, card = finished_run(run)
    if config["env"]["game"] != "dond":
        raise UserError(f"select: {run.name} is a run of {config['env']['game']}; name runs of Deal or No Deal")
    name = learners_of(cast_of(config["cast"]))[0]
    arm, seed, last = card["arm"], card["seeds"][0], int(config["algo"]["iterations"])
    began = (config.get("init") or {}).get(name)  # another run, by name beside this one or by its folder
    if began:
        beside = run.parent / began
        began = policy_folder(str(beside if beside.is_dir() else began))
    stages = [Stage(run, arm, seed, 0, config, Path(began) if began else base_folder(run))]
    for checkpoint in checkpoints_in(run / "checkpoints"):
        iteration, weights = read_state(checkpoint)["iteration"], checkpoint / f"{name}.safetensors"
        if iteration < last and weights.is_file() and not verify_folder(checkpoint):
            stages.append(Stage(run, arm, seed, iteration, config, run / "policy", weights))
    return [*stages, Stage(run, arm, seed, last, config, run / "policy")]


def people_folder(run: Path, human: str | None) -> Path:
    """Where the frozen model of people is kept."""
    if human is not None:
        if not (Path(human) / "policy.json").is_file():
            raise UserError(f"human={human}: no policy is in it; name the folder of a base made with base=human")
        return Path(human)
    folder = base_folder(run)
    if read_card(folder).get("made_of", {}).get("base", {}).get("data") != "human":
        raise UserError(
            f"human=null: {run.name} did not start from a base of human dialogues; name the folder of one (runs/bases/"
            "dond-human-...)"
        )
    return folder


def game_of(stage: Stage) -> dict[str, Any]:
    """The game's settings in the run's own evaluation."""
    return {**stage.config["env"], **make(EvalConfig, stage.config["eval"], "eval").env}


def settings_of(stage: Stage, people: Path, cfg: DictConfig) -> dict[str, Any]:
    """All that the figures depend on."""
    return {
        "policy": stage.digest,
        "people": folder_digest(people),
        "env": game_of(stage),
        "temperature": stage.config["eval"]["temperature"],
        "max_new_tokens": stage.config["algo"]["max_new_tokens"],
        "context": stage.config["algo"]["context"],
        "games": cfg.games,
        "seed": cfg.seed,
        "dialogues": cfg.split if cfg.data.dond else None,
    }


# --- Measuring --------------------------------------------------------------------------------------------------------


def measure(stage: Stage, people: Path, cfg: DictConfig, device: torch.device, bar: Bar) -> Metrics:
    """What the policy plays and says with itself, and the two likelihoods."""
    env, policy, rng = game_of(stage), stage.load(device), np.random.default_rng(0)
    settings, algo = stage.config["eval"], stage.config["algo"]
    limits = PlayConfig(concurrency=cfg.concurrency, max_new_tokens=algo["max_new_tokens"], context=algo["context"])
    agent = model_agent(SPEAKER, policy, limits, 2, settings["temperature"])
    drawn = draw_games(cfg.seed, EVALUATION, count=cfg.games)
    episodes = rollout(drawn, everyone(agent), env_maker(env), cfg.concurrency, bar.advance)
    found = dond_metrics(episodes, float(env["objective"]), rng) | talk_metrics(episodes, rng)
    found |= talk_drift([read_talk(talk_of(episode)) for episode in episodes], rng)
    if cfg.data.dond:
        views = recorded(cfg.data.dond, cfg.split, [env_maker({**env, "contexts": None, "split": "all"})])
        likely = likelihood(policy, [[seat] for seat in views.seats(policy.tokens)], rng)
        if likely is not None:
            found["drift/human_dialogues"] = likely
    judge = load_policy(people, device)
    style = read_card(people).get("made_of", {}).get("env", {}).get("style", env["style"])
    again = env_maker({**env, "style": style})()
    own = likelihood(judge, [retold(episode, again, judge.tokens, (SPEAKER,)) for episode in episodes], rng)
    if own is not None:
        found["drift/own_speech"] = own
    return found


def people_metrics(folder: str, split: Any) -> Metrics:
    """The same figures of the human dialogues that ended in claims: how much the grammar reads, what people do."""
    try:
        found = read_split(folder, split)
    except (OSError, ValueError) as error:
        raise UserError(f"data.dond={folder}: {error}") from error
    left_out = ", ".join(f"{count} {reason}" for reason, count in found.skipped.items())
    say(f"{split}: {len(found.usable)} views of human dialogues; left out: {left_out or 'none'}")
    return talk_drift([read_talk(human_talk(view)) for view in found.usable], np.random.default_rng(0))


def kept_transcripts(run: Path) -> list[tuple[Stage, Metrics]]:
    """What the transcripts say that a run kept of its evaluations, by iteration."""
    first, *_ = stages_of(run)
    name = learners_of(cast_of(first.config["cast"]))[0]
    found = []
    for path in sorted((run / "episodes").glob("iteration-*.jsonl")):
        number = re.fullmatch(r"iteration-(\d+)", path.stem)
        readings = [read_talk(talk_of(game, {name})) for game in read_episodes(path)]
        if number and readings:
            stage = Stage(run, first.arm, first.seed, int(number[1]), first.config, first.folder)
            found.append((stage, talk_drift(readings, np.random.default_rng(0))))
    return found


# --- Tables and figure ------------------------------------------------------------------------------------------------


def write_lines(path: Path, found: Iterable[tuple[Stage, Metrics]]) -> None:
    lines = [
        (s.run.name, s.arm, s.seed, s.iteration, name, i.mean, i.low, i.high, i.n)
        for s, metrics in found
        for name, i in sorted(metrics.items())
    ]
    write_csv(path, COLUMNS, lines)


def draw(found: Mapping[Stage, Metrics], path: Path) -> None:
    """Both likelihoods against the score, and the share of inverted proposals by iteration; a line for each run."""
    panels: Sequence[tuple[str, str | None, str]] = (
        ("drift/human_dialogues", "game/score", "human dialogues under the policy,\nnats a word"),
        ("drift/own_speech", "game/score", "the policy's messages under the human model,\nnats a word"),
        ("talk/inverted", None, "inverted proposals,\nof those that could be"),
    )
    runs = list(dict.fromkeys(stage.run for stage in found))
    arms = list(dict.fromkeys(stage.arm for stage in found))
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    for axes, (metric, against, title) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for run in runs:
            of_run = [(stage, metrics) for stage, metrics in found.items() if stage.run == run and metric in metrics]
            x = [stage.iteration if against is None else metrics[against].mean for stage, metrics in of_run]
            y = [metrics[metric].mean for _, metrics in of_run]
            if of_run:
                arm = of_run[0][0].arm
                label = arm if run == next(r for r in runs if any(s.run == r and s.arm == arm for s in found)) else None
                axes.plot(x, y, marker="o", markersize=3, color=PAPER[arms.index(arm) % len(PAPER)], label=label)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel("iteration" if against is None else "score", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    with writing(path), matplotlib.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()

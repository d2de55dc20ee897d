"""How runs' language drifts from people's: `python -m experiments.studies.drift select='dond_human-*' data.dond=DIR`.

For each finished run of Deal or No Deal: its base, the checkpoints that it kept, and the policy that it ended with.
Each plays games with itself, and reads held-out human dialogues; a frozen model of people reads what it said. Also read
are the transcripts that the run kept of each of its evaluations: fewer games, at more iterations. What is measured of
one policy is written at once, so that a stopped command goes on where it was, and what several runs started from is
measured once. Figures are defined in marl/metrics/drift.py.

Written: `drift.csv.gz` (a line for each policy and metric), `kept.csv.gz` (the same of kept transcripts), `people.csv`
(of the human dialogues themselves); made of the first, `drift_by_arm.csv.gz` (means over seeds at the iterations that
all runs of an arm kept, the base and the end at least; intervals as in experiments.studies.iterations) and `drift.svg`.
`data.table=FOLDER/drift.csv.gz` makes these again, without the runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig

from envs.human_dond import read_split
from experiments.launch.command import command
from experiments.launch.terminal import Bar, say
from experiments.setup.config import cast_of
from experiments.setup.devices import pick_device, set_threads
from experiments.setup.players import style_of
from experiments.setup.select import selected
from experiments.setup.stages import Stage, base_folder, stages_of
from experiments.studies.cells import compute, with_room
from experiments.studies.iterations import (
    by_iteration,
    evaluated_game,
    measure_of,
    objective_of,
    refuse_doubles,
    write_by_arm,
)
from marl.agents.model import PlayConfig, model_agent
from marl.common.errors import UserError, check_count, check_writable
from marl.common.files import digest, reading
from marl.decoding.memory import Slots
from marl.metrics.drift import likelihood, retold, talk_drift
from marl.metrics.games import dond_metrics
from marl.metrics.negotiation import READING, Reading, human_talk, read_talk, talk_of
from marl.metrics.stats import Metrics
from marl.metrics.tables import format_table, interval_of, read_csv, read_figures, write_csv
from marl.metrics.talk import talk_metrics
from marl.metrics.wording import WORDING
from marl.pretraining.corpus import data_files, recorded
from marl.report.figures import PAPER, save_figure
from marl.report.transcripts import read_episodes
from marl.rollout.cast import learners_of
from marl.rollout.games import env_maker, file_digests
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import EVALUATION, draw_games
from marl.storage.checkpoint import folder_digest, load_policy, read_card
from marl.storage.folder import finished_run

SPEAKER = "policy"  # what the policy under test is called in its games
SPLITS = ("val", "test")
COLUMNS = ("objective", "run", "arm", "seed", "iteration", "metric", "mean", "low", "high", "games")
SHOWN = (
    "game/score", "game/points", "game/agreement", "drift/human_dialogues", "drift/own_speech", "talk/distinct_2",
    "talk/split_kept", "talk/split_coverage", "talk/table_kept", "talk/value_true", "talk/value_chance",
    "talk/inverted", "talk/inverted_explicit", "talk/inverted_coverage", "talk/inverted_chance", "talk/worse_share",
    "talk/understood", "talk/turns", "talk/vocabulary",
)  # fmt: skip

V = TypeVar("V")  # of a human view: what it is read as
Policies = dict[tuple[float, str, int, str], dict[int, Metrics]]  # (objective, arm, seed, run) -> iteration


@dataclass(frozen=True)
class Subject:
    """One policy of a run of Deal or No Deal."""

    run: Path
    arm: str
    seed: int
    config: Mapping[str, Any] = field(hash=False)
    stage: Stage

    @property
    def iteration(self) -> int:
        return self.stage.iteration

    @property
    def game(self) -> dict[str, Any]:
        """The game's settings in the run's own evaluation."""
        return evaluated_game(self.config)

    @property
    def objective(self) -> float:
        return objective_of(self.config)


@command("drift")
def main(cfg: DictConfig) -> None:
    """Measures what is not measured yet, then tabulates."""
    if cfg.data.table:
        table = Path(cfg.data.table)
        out = Path(cfg.publish or table.parent)
        check_writable(out, "publish")
        return tabulate(table, out)
    for name in ("games", "concurrency"):
        check_count(cfg[name], name)
    check_count(cfg.seed, "seed", 0)
    if cfg.split not in SPLITS:
        raise UserError(f"split={cfg.split}: must be one of {', '.join(SPLITS)}; bases learn from the others")
    dialogues = {"split": cfg.split, "files": data_files(Path(cfg.data.dond))} if cfg.data.dond else None
    runs = selected(Path(cfg.runs), cfg.select, cfg.where)
    subjects = [subject for run in runs for subject in subjects_of(run)]
    refuse_doubles((each.run, each.objective, each.arm, each.seed) for each in subjects)
    subjects.sort(key=lambda each: (-each.objective, each.arm, each.seed, each.iteration))
    people = {run: people_folder(run, cfg.human) for run in runs}
    human = people_metrics(cfg.data.dond, cfg.split) if cfg.data.dond else {}
    cells, out = Path(cfg.cells), Path(cfg.publish or cfg.cells)
    check_writable(cells, "cells")
    check_writable(out, "publish")
    device = pick_device(cfg.device)
    set_threads(cfg.threads)
    if not cfg.data.dond:
        say("data.dond=null: the likelihood of human dialogues is left out")

    bar = Bar(enabled=cfg.progress)
    about = {subject: settings_of(subject, people[subject.run], dialogues, cfg) for subject in subjects}
    paths = {subject: cells / f"{digest(settings)}.json" for subject, settings in about.items()}

    def measured(subject: Subject, number: str) -> dict[str, Any]:
        label = f"{number}  {subject.run.name}, iteration {subject.iteration}"
        bar.stage(label, cfg.games)
        metrics = measure(subject, people[subject.run], cfg, device, bar)
        bar.close()
        say(label)
        return {"about": about[subject], "metrics": {name: i.to_json() for name, i in metrics.items()}}

    if missing := compute({path: subject for subject, path in paths.items()}, measured):
        say(f"{len(missing)} policies are being measured by another process, which writes the table when it has them")
        return
    write_lines(out / "drift.csv.gz", [(subject, read_figures(path)) for subject, path in paths.items()])
    write_lines(out / "kept.csv.gz", (each for run in runs for each in kept_transcripts(run)))
    if human:
        lines = [(name, i.mean, i.low, i.high, i.n) for name, i in sorted(human.items())]
        write_csv(out / "people.csv", COLUMNS[5:], lines)
    tabulate(out / "drift.csv.gz", out, human)


# --- What there is to measure -----------------------------------------------------------------------------------------


def subjects_of(run: Path) -> list[Subject]:
    """A run's policies by iteration. UserError where it is a run of another game."""
    config, card = finished_run(run)
    with reading(run):
        objective_of(config), learners_of(cast_of(config["cast"]))
    if config["env"]["game"] != "dond":
        raise UserError(f"select: {run.name} is a run of {config['env']['game']}; name runs of Deal or No Deal")
    learner = learners_of(cast_of(config["cast"]))[0]
    return [Subject(run, card["arm"], card["seeds"][0], config, stage) for stage in stages_of(run, learner)]


def people_folder(run: Path, human: str | None) -> Path:
    """Returns the folder of the frozen model of people."""
    if human is not None:
        if not (Path(human) / "policy.json").is_file():
            raise UserError(f"human={human}: no policy is in it; name the folder of a base made with base=human")
        return Path(human)
    folder = base_folder(run)
    with reading(folder):
        data = read_card(folder).get("made_of", {}).get("base", {}).get("data")
    if data != "human":
        raise UserError(
            f"human=null: {run.name} did not start from a base of human dialogues; name the folder of one (runs/bases/"
            "dond-human-...)"
        )
    return folder


def settings_of(subject: Subject, people: Path, dialogues: Mapping[str, Any] | None, cfg: DictConfig) -> dict[str, Any]:
    """Settings that determine the figures, but for last digits. `dialogues`: which human ones are read, if any."""
    return {
        "policy": subject.stage.digest,
        "people": folder_digest(people),
        "env": subject.game,
        **file_digests(subject.game),
        "temperature": subject.config["eval"]["temperature"],
        "max_new_tokens": subject.config["algo"]["max_new_tokens"],
        "context": subject.config["algo"]["context"],
        "games": cfg.games,
        "seed": cfg.seed,
        "dialogues": dialogues,
        "reading": READING,
    }


# --- Measuring --------------------------------------------------------------------------------------------------------


def measure(subject: Subject, people: Path, cfg: DictConfig, device: torch.device, bar: Bar) -> Metrics:
    """Measures what the policy plays and says with itself, and the two likelihoods."""
    env, policy, rng = subject.game, subject.stage.load(device), np.random.default_rng(0)
    settings, algo = subject.config["eval"], subject.config["algo"]
    limits = PlayConfig(
        games=cfg.games, concurrency=cfg.concurrency, max_new_tokens=algo["max_new_tokens"], context=algo["context"]
    )
    limits = with_room(limits, [Slots.of(policy.lm.config, limits.context, 2)], device)
    agent = model_agent(SPEAKER, policy, limits, 2, settings["temperature"])
    drawn = draw_games(cfg.seed, EVALUATION, count=cfg.games)
    episodes = rollout(drawn, everyone(agent), env_maker(env), limits.concurrency, bar.advance)
    found = dond_metrics(episodes, float(env["objective"]), rng) | talk_metrics(episodes, rng)
    found |= talk_drift([read_talk(talk_of(episode)) for episode in episodes], rng)
    if cfg.data.dond:
        views = recorded(cfg.data.dond, cfg.split, [env_maker({**env, "contexts": None, "split": "all"})])
        likely = likelihood(policy, by_dialogue(views.dialogues, views.seats(policy.tokens)), rng)
        if likely is not None:
            found["drift/human_dialogues"] = likely
    judge = load_policy(people, device)
    again = env_maker({**env, "style": style_of(people, env) or env.get("style")})()
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
    readings = by_dialogue([view.dialogue for view in found.usable], [read_talk(human_talk(v)) for v in found.usable])
    return talk_drift([Reading.of(both) for both in readings], np.random.default_rng(0))


def by_dialogue(dialogues: Iterable[str], views: Iterable[V]) -> list[list[V]]:
    """Both players' views of a dialogue together: what is drawn again for an interval is the dialogue."""
    found: dict[str, list[V]] = {}
    for dialogue, view in zip(dialogues, views, strict=True):
        found.setdefault(dialogue, []).append(view)
    return [*found.values()]


def kept_transcripts(run: Path) -> list[tuple[Subject, Metrics]]:
    """Reads the transcripts that a run kept of its evaluations, by iteration."""
    first, *_ = subjects_of(run)
    name = learners_of(cast_of(first.config["cast"]))[0]
    found = []
    for path in sorted((run / "episodes").glob("iteration-*.jsonl")):
        number = re.fullmatch(r"iteration-(\d+)", path.stem)
        with reading(path):
            readings = [read_talk(talk_of(game, {name})) for game in read_episodes(path)]
        if number and readings:
            subject = replace(first, stage=Stage(int(number[1]), first.stage.folder))
            found.append((subject, talk_drift(readings, np.random.default_rng(0))))
    return found


# --- Tables and figure ------------------------------------------------------------------------------------------------


def write_lines(path: Path, found: Iterable[tuple[Subject, Metrics]]) -> None:
    lines = [
        (s.objective, s.run.name, s.arm, s.seed, s.iteration, name, i.mean, i.low, i.high, i.n)
        for s, metrics in found
        for name, i in sorted(metrics.items())
    ]
    write_csv(path, COLUMNS, lines)


def read_policies(path: Path) -> Policies:
    """Reads `drift.csv.gz`. UserError if it is no such file."""
    found: Policies = {}
    for key, iteration, metric, own in read_csv(
        path, "data.table", COLUMNS,
        lambda row: (
            (float(row["objective"]), row["arm"], int(row["seed"]), row["run"]),
            int(row["iteration"]), row["metric"], interval_of(row),
        ),
    ):  # fmt: skip
        found.setdefault(key, {}).setdefault(iteration, {})[metric] = own
    for (objective, *_, run), of_run in found.items():
        for iteration, metrics in of_run.items():
            if measure_of(objective) not in metrics:
                raise UserError(f"data.table={path}: has no {measure_of(objective)} of {run} at iteration {iteration}")
    return found


def tabulate(table: Path, out: Path, human: Metrics | None = None) -> None:
    """Writes `drift_by_arm.csv.gz` and `drift.svg` from `drift.csv.gz`, and prints all policies beside people."""
    policies = read_policies(table)
    refuse_doubles(((Path(run), objective, arm, seed) for objective, arm, seed, run in policies), "data.table")
    arms: dict[tuple[float, str], dict[int, dict[int, Metrics]]] = {}
    for (objective, arm, seed, _), of_run in policies.items():
        arms.setdefault((objective, arm), {})[seed] = of_run
    write_by_arm(out / "drift_by_arm.csv.gz", {key: by_iteration(seeds) for key, seeds in arms.items()}, arms)
    draw(policies, out / "drift.svg")
    columns = {
        f"λ={objective:g} {arm} s{seed} it {iteration}": metrics
        for (objective, arm, seed, _), of_run in policies.items()
        for iteration, metrics in of_run.items()
    }
    for start in range(0, len(columns), 4):
        part = dict(list(columns.items())[start : start + 4])
        part = {**part, **({"people": human} if human else {})}
        say("\n" + format_table(part, [name for name in SHOWN if any(name in metrics for metrics in part.values())]))
    say(f"\ntables and figure: {out}")


def draw(policies: Policies, path: Path) -> None:
    """A row for each objective: both likelihoods against the score (points, where both scores add up to nothing), and
    the share of inverted proposals by iteration; a line for each run, from its base (open) to its end."""
    panels = (
        ("drift/human_dialogues", True, "human dialogues under the policy,\nnats a word"),
        ("drift/own_speech", True, "the policy's messages under the human model,\nnats a word"),
        ("talk/inverted", False, "inverted proposals,\nof those that could be"),
    )
    objectives = sorted({objective for objective, *_ in policies}, reverse=True)
    arms = sorted({arm for _, arm, *_ in policies})
    figure = Figure(figsize=(11, 2.8 * len(objectives) + 0.6), layout="constrained")
    subplots = figure.subplots(len(objectives), len(panels), squeeze=False)
    handles: dict[str, Any] = {}
    for objective, row in zip(objectives, subplots, strict=True):
        measure = measure_of(objective)
        for axes, (metric, against, title) in zip(row, panels, strict=True):
            for (own, arm, *_), of_run in policies.items():
                there = {i: metrics for i, metrics in of_run.items() if metric in metrics}
                if own == objective and there:
                    x = [metrics[measure].mean if against else i for i, metrics in there.items()]
                    y = [metrics[metric].mean for metrics in there.values()]
                    colour = PAPER[arms.index(arm) % len(PAPER)]
                    (handles[arm],) = axes.plot(x, y, marker="o", markersize=3, linewidth=1, color=colour)
                    axes.plot(x[:1], y[:1], marker="o", markersize=5, color=colour, markerfacecolor="white")
            axes.set_title(f"{title}, λ = {objective:g}", fontsize=9, loc="left")
            axes.set_xlabel(WORDING[measure].label.lower() if against else "iteration", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
            if not against:
                axes.set_ylim(bottom=0)
    shown = sorted(handles)
    figure.legend([handles[arm] for arm in shown], shown, loc="outside right upper", frameon=False, fontsize=8)
    save_figure(figure, path)


if __name__ == "__main__":
    main()

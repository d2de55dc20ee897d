"""Measures how language drifts from people's.

`python -m experiments.studies.drift select='dond_human-*' data.dond=DIR`.

For each finished run of Deal or No Deal: its base, the checkpoints that it kept, and the policy that it ended with.
Each plays games with itself, and reads held-out human dialogues; a frozen model of people reads what it said. What
several runs started from is measured once. Figures are defined in marl/metrics/drift.py.

Written: `drift.csv.gz` (a line for each policy and metric), `people.csv` (of the human dialogues themselves); made of
the first, `drift_by_arm.csv.gz` (means over seeds at the iterations that all runs of an arm kept, the base and the end
at least; intervals as in experiments.studies.iterations) and `drift.svg`. `data.table=FOLDER/drift.csv.gz` makes these
again, without the runs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from matplotlib.figure import Figure
from omegaconf import DictConfig

from envs.human_dond import read_split
from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.setup.config import cast_of
from experiments.setup.devices import check_bf16
from experiments.setup.players import caches_of, intent_settings_in, intent_settings_of, style_of
from experiments.setup.select import selected
from experiments.setup.stages import Stage, base_folder, stages_of
from experiments.studies.cells import Workspace, begin, check_play, compute, lower_concurrency
from experiments.studies.iterations import (
    by_iteration,
    evaluated_game,
    measure_of,
    objective_of,
    refuse_doubles,
    write_by_arm,
)
from experiments.studies.lines import check_complete, read_intervals, write_intervals
from marl.agents.model import PlayConfig, model_agent
from marl.common.errors import UserError, check_writable
from marl.common.files import digest, reading
from marl.intents.agent import ACTION, CiceroConfig, intent_conditioned_agent
from marl.intents.measure import followed
from marl.metrics.drift import likelihood, replayed_rows, talk_drift
from marl.metrics.games import dond_metrics
from marl.metrics.negotiation import READING, Reading, human_talk, read_talk, talk_of
from marl.metrics.stats import Metrics
from marl.metrics.tables import format_table, read_figures
from marl.metrics.talk import talk_metrics
from marl.metrics.wording import WORDING
from marl.pretraining.corpus import data_files, recorded
from marl.report.figures import paper_colours, save_figure
from marl.rollout.cast import learners_of
from marl.rollout.games import env_maker, file_digests
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import EVALUATION, draw_games
from marl.storage.checkpoint import folder_digest, load_policy, read_card
from marl.storage.folder import finished_run

SPEAKER = "policy"  # what the policy under test is called in its games
SPLITS = ("val", "test")
PANELS = (  # of the figure: metric, whether against the score, title
    ("drift/human_dialogues", True, "human dialogues under the policy,\nnats a word"),
    ("drift/own_speech", True, "the policy's messages under the human model,\nnats a word"),
    ("talk/inverted", False, "inverted proposals,\nof those that could be"),
)
KEYS = {"objective": float, "run": str, "arm": str, "seed": int, "iteration": int, "metric": str}  # of drift.csv.gz
SHOWN = (
    "game/score", "game/points", "game/agreement", "drift/human_dialogues", "drift/own_speech", "talk/distinct_2",
    "talk/split_kept", "talk/split_coverage", "talk/table_kept", "talk/value_true", "talk/value_chance",
    "talk/inverted", "talk/inverted_explicit", "talk/inverted_coverage", "talk/inverted_chance", "talk/worse_share",
    "talk/understood", "talk/turns", "talk/vocabulary", "intent/items", "intent/claimed",
)  # fmt: skip

V = TypeVar("V")  # of a human view: what it is read as


@dataclass(frozen=True)
class Subject:
    """One policy of a run of Deal or No Deal, the frozen model of people that reads it, and what determines its
    figures, but for last digits."""

    run: Path
    arm: str
    seed: int
    config: Mapping[str, Any]
    stage: Stage
    people: Path
    settings: Mapping[str, Any]

    @property
    def objective(self) -> float:
        return objective_of(self.config)

    @property
    def key(self) -> tuple[object, ...]:
        return (self.objective, self.run.name, self.arm, self.seed, self.stage.iteration)


@command("drift")
def main(cfg: DictConfig) -> None:
    """Measures what is not measured yet, then tabulates."""
    # Tabulate again what was measured before, without any run.
    if cfg.data.table:
        table = Path(cfg.data.table)
        out = Path(cfg.publish or table.parent)
        check_writable(out, "publish")
        return tabulate(table, out)

    # Check.
    check_play(cfg)
    if cfg.split not in SPLITS:
        raise UserError(f"split={cfg.split}: must be one of {', '.join(SPLITS)}; bases learn from the others")
    if cfg.dialogues < 0:
        raise UserError(f"dialogues={cfg.dialogues}: must be at least 1, or 0 for all of them")

    # Configure: a cell is one policy.
    subjects = [each for run in selected(Path(cfg.runs), cfg.select, cfg.where) for each in subjects_of(run, cfg)]
    refuse_doubles((each.run, each.objective, each.arm, each.seed) for each in subjects)
    subjects.sort(key=lambda each: (-each.objective, each.arm, each.seed, each.stage.iteration))
    human = people_metrics(cfg.data.dond, cfg.split) if cfg.data.dond else {}
    workspace = begin(cfg)
    if cfg.bf16:
        check_bf16(workspace.device, "bf16")
    paths = [workspace.cells / f"{digest(subject.settings)}.json" for subject in subjects]
    if not cfg.data.dond:
        say("data.dond=null: the likelihood of human dialogues is left out")

    # Measure.
    def measured(subject: Subject, number: str) -> dict[str, Any]:
        label = f"{number}  {subject.run.name}, iteration {subject.stage.iteration}"
        workspace.bar.stage(label, cfg.games)
        metrics = measure(subject, cfg, workspace)
        workspace.bar.close()
        say(label)
        return {"about": subject.settings, "metrics": {name: i.to_json() for name, i in metrics.items()}}

    if not compute(dict(zip(paths, subjects, strict=True)), measured):
        return

    # Write.
    found = [
        ((*subject.key, name), own)
        for subject, path in zip(subjects, paths, strict=True)
        for name, own in sorted(read_figures(path).items())
    ]
    write_intervals(workspace.out / "drift.csv.gz", KEYS, found)
    if human:
        write_intervals(workspace.out / "people.csv", ("metric",), [((name,), i) for name, i in sorted(human.items())])
    tabulate(workspace.out / "drift.csv.gz", workspace.out, human)


# --- What there is to measure -----------------------------------------------------------------------------------------
def subjects_of(run: Path, cfg: DictConfig) -> list[Subject]:
    """A run's policies by iteration. UserError where it is a run of another game."""
    config, card = finished_run(run)
    with reading(run):
        env, learners = evaluated_game(config), learners_of(cast_of(config["cast"]))
    if config["env"]["game"] != "dond":
        raise UserError(f"select: {run.name} is a run of {config['env']['game']}. Name runs of Deal or No Deal.")
    people = people_folder(run, cfg.human)
    intent_settings = intent_settings_of(str(run))
    reads = (
        cfg.data.dond and not intent_settings
    )  # no intents stand in people's dialogues: who is told some would not be itself
    dialogues = {"split": cfg.split, "files": data_files(Path(cfg.data.dond))} if reads else None
    if dialogues and cfg.dialogues:
        dialogues["first"] = cfg.dialogues
    settings = {
        "people": folder_digest(people),
        "env": env,
        **file_digests(env),
        "temperature": config["eval"]["temperature"],
        "max_new_tokens": config["algo"]["max_new_tokens"],
        "context": config["algo"]["context"],
        "games": cfg.games,
        "seed": cfg.seed,
        "dialogues": dialogues,
        "reading": READING,
        **({"bf16": True} if cfg.bf16 else {}),
    }
    if intent_settings:
        action = folder_digest(Path(intent_settings["intents"]) / ACTION)
        # followed: what was measured before there were such figures is measured again
        settings["told"] = {"action": action, "settings": asdict(intent_settings["cicero"]), "followed": True}
    return [
        Subject(run, card["arm"], card["seeds"][0], config, stage, people, {"policy": stage.digest, **settings})
        for stage in stages_of(run, learners[0])
    ]


def people_folder(run: Path, human: str | None) -> Path:
    """Returns the folder of the frozen model of people."""
    if human is not None:
        if not (Path(human) / "policy.json").is_file():
            raise UserError(f"human={human}: no policy is in it. Name the folder of a base made with base=human.")
        return Path(human)
    folder = base_folder(run)
    with reading(folder):
        data = read_card(folder).get("made_of", {}).get("base", {}).get("data")
    if data != "human":
        raise UserError(
            f"human=null: {run.name} did not start from a base of human dialogues. Name the folder of one (runs/bases/"
            "dond-human-...)."
        )
    return folder


# --- Measuring --------------------------------------------------------------------------------------------------------
def measure(subject: Subject, cfg: DictConfig, workspace: Workspace) -> Metrics:
    """Measures what the policy plays and says with itself, and the two likelihoods."""
    env, policy, rng = evaluated_game(subject.config), subject.stage.load(workspace.device), np.random.default_rng(0)
    algo, temperature = subject.config["algo"], subject.config["eval"]["temperature"]
    limits = PlayConfig(
        games=cfg.games, concurrency=cfg.concurrency, max_new_tokens=algo["max_new_tokens"], context=algo["context"],
        play_bf16=cfg.bf16,
    )  # fmt: skip
    intent_settings = intent_settings_in(algo)
    how = (intent_settings.get("cicero", CiceroConfig()), Path(intent_settings["intents"]) if intent_settings else None)
    caches = caches_of(SPEAKER, policy.lm.config, limits.context, 2, *how, bf16=cfg.bf16)
    limits = lower_concurrency(limits, caches, workspace.device)
    agent = model_agent(SPEAKER, policy, limits, 2, temperature)
    if intent_settings:
        agent = intent_conditioned_agent(
            SPEAKER, policy, limits, 2, temperature, Path(intent_settings["intents"]), intent_settings["cicero"]
        )
    drawn = draw_games(cfg.seed, EVALUATION, count=cfg.games)
    episodes = rollout(drawn, everyone(agent), env_maker(env), limits.concurrency, workspace.bar.advance)
    found = dond_metrics(episodes, float(env["objective"]), rng) | talk_metrics(episodes, rng)
    found |= talk_drift([read_talk(talk_of(episode)) for episode in episodes], rng) | followed(episodes, rng)
    if subject.settings["dialogues"]:
        views = recorded(cfg.data.dond, cfg.split, [env_maker({**env, "contexts": None, "split": "all"})])
        views = views.first(cfg.dialogues)
        likely = likelihood(policy, by_dialogue(views.dialogues, views.rows(policy.tokens)), rng, cfg.bf16)
        if likely is not None:
            found["drift/human_dialogues"] = likely
    judge = load_policy(subject.people, workspace.device)
    again = env_maker({**env, "style": style_of(subject.people, env) or env.get("style")})()
    own = likelihood(
        judge, [replayed_rows(episode, again, judge.tokens, (SPEAKER,)) for episode in episodes], rng, cfg.bf16
    )
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


# --- Tables and figure ------------------------------------------------------------------------------------------------
def tabulate(table: Path, out: Path, human: Metrics | None = None) -> None:
    """Writes `drift_by_arm.csv.gz` and `drift.svg` from `drift.csv.gz`, and prints all policies beside people."""
    lines = read_intervals(table, "data.table", KEYS)
    refuse_doubles(((Path(run), objective, arm, seed) for objective, run, arm, seed, *_ in lines), "data.table")
    arms: dict[tuple[float, str], dict[int, dict[int, Metrics]]] = {}
    for objective, _, arm, seed, iteration, metric, own in lines:
        arms.setdefault((objective, arm), {}).setdefault(seed, {}).setdefault(iteration, {})[metric] = own
    columns: dict[str, Metrics] = {}
    for (objective, arm), seeds in arms.items():
        named = {f"λ={objective:g} {arm} s{seed} it {i}": own for seed, its in seeds.items() for i, own in its.items()}
        check_complete(table, "data.table", named, [measure_of(objective)])
        columns |= named
    write_by_arm(out / "drift_by_arm.csv.gz", {key: by_iteration(seeds) for key, seeds in arms.items()}, arms)
    draw(arms, out / "drift.svg")
    for start in range(0, len(columns), 4):
        part = {**dict(list(columns.items())[start : start + 4]), **({"people": human} if human else {})}
        say("\n" + format_table(part, [name for name in SHOWN if any(name in metrics for metrics in part.values())]))
    say(f"\ntables and figure: {out}")


def draw(arms: Mapping[tuple[float, str], Mapping[int, Mapping[int, Metrics]]], path: Path) -> None:
    """A row for each objective: both likelihoods against the score (points, where both scores add up to nothing), and
    the share of inverted proposals by iteration, each where it was measured; a line for each run, from its base (open)
    to its end."""
    measured = {name for seeds in arms.values() for its in seeds.values() for own in its.values() for name in own}
    panels = [panel for panel in PANELS if panel[0] in measured] or PANELS
    objectives = sorted({objective for objective, _ in arms}, reverse=True)
    colours = paper_colours(sorted({arm for _, arm in arms}))
    figure = Figure(figsize=(2 + 3 * len(panels), 2.8 * len(objectives) + 0.6), layout="constrained")
    subplots = figure.subplots(len(objectives), len(panels), squeeze=False)
    handles: dict[str, Any] = {}
    for (objective, arm), seeds in arms.items():
        measure, row = measure_of(objective), subplots[objectives.index(objective)]
        for axes, (metric, against, title) in zip(row, panels, strict=True):
            for of_run in seeds.values():
                there = {i: metrics for i, metrics in of_run.items() if metric in metrics}
                x = [metrics[measure].mean if against else i for i, metrics in there.items()]
                y = [metrics[metric].mean for metrics in there.values()]
                (handles[arm],) = axes.plot(x, y, marker="o", markersize=3, linewidth=1, color=colours[arm])
                axes.plot(x[:1], y[:1], marker="o", markersize=5, color=colours[arm], markerfacecolor="white")
            axes.set_title(f"{title}, λ = {objective:g}", fontsize=9, loc="left")
            axes.set_xlabel(WORDING[measure].label.lower() if against else "iteration", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
    for row in subplots:
        for axes, (_, against, _) in zip(row, panels, strict=True):
            if not against:
                axes.set_ylim(bottom=0)  # after all arms: the top stays where it is
    figure.legend([handles[arm] for arm in colours], colours, loc="outside right upper", frameon=False, fontsize=8)
    save_figure(figure, path)


if __name__ == "__main__":
    main()

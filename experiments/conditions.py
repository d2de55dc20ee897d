"""Plays finished runs under other conditions than their own evaluation's, and tabulates what came of it.

`python -m experiments.conditions study=among_us_generalisation`. A study (conf/study/) names runs and conditions; each
run, and the base of each seed, plays the same games under each of them. Each cell of this table is written as soon as
it is played: a stopped command goes on where it was, several share the work, and the one that ends last writes the
table. Intervals are those of experiments.report: over training seeds, of a single one over its games.

Written: `NAME_per_seed.csv`, each run's own figures; made of it, `NAME.csv` (means over seeds), `NAME_differences.csv`
(each condition minus the `reference`, and arms minus arms under each condition, paired by seed), `NAME.svg`, and where
a study has a `headline` condition, `table.csv`, which has that alone; with `publish` the runs' cards as well.
`study=NAME data=FOLDER/NAME_per_seed.csv` makes them again, without the runs.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from omegaconf import DictConfig

from experiments.cli import command
from experiments.evaluate import pick_device, set_threads
from experiments.players import (
    bare,
    check_players,
    is_run,
    planner_of,
    player_slots,
    run_policy,
    seat_players,
    style_of,
)
from experiments.players import policy_folder as run_policy_folder
from experiments.report import selected, write_cards
from experiments.stages import Stage, base_folder, end_of, stages_of
from experiments.terminal import Bar, say
from marl.agents import SILENCE, Dubbed, PlayConfig, model_agent
from marl.cast import LEARNERS, Seats, by_role, learners_of, places, players_of
from marl.chat import CHAT
from marl.checkpoint import folder_digest, started_from
from marl.config import EvalConfig, cast_of, digest, make, plain
from marl.errors import UserError, check_count, check_temperature, check_writable
from marl.evaluate import Metrics, metrics
from marl.files import csv_rows, reading, write_json, writing
from marl.games import env_maker, file_digests
from marl.memory import Slots, check_memory
from marl.planner import GAMES as PLANNED
from marl.planner import SLOTS, SUFFIX, PlannerConfig, planning_agent
from marl.policy import Policy
from marl.report import PAPER
from marl.rollout import EVALUATION, draw_games, rollout
from marl.runs import finished_run, git_commit, open_lock
from marl.stats import (
    ArmRun,
    TableRow,
    ablation_table,
    arm_differences,
    format_table,
    interval_of,
    read_csv,
    read_figures,
    write_csv,
    write_table,
)
from marl.wording import ARM_ORDER, ARMS, COMPARISONS, WORDING

FORMAT = 3  # of cells; raised when the same settings would be played, or measured, otherwise
BASE = "base"  # the arm of those who were not trained
TRAINED = "trained"  # what the policy under test is called in episodes, a base in its place too
SILENT = "silence"  # the voice of those who say nothing
PER_SEED = ("arm", "seed", "condition", "metric", "mean", "low", "high", "games")  # columns of NAME_per_seed.csv

Point = tuple[str, str]  # arm, condition


@dataclass(frozen=True)
class Condition:
    """What differs from a run's own evaluation. `voices`: by role, whose messages its `player` sends; a role's
    partners speak for themselves. `planner`: how learners plan claims or votes near what their own policy would do.
    `iteration`: the learners as they were after so many, from a checkpoint that the run kept (0: as they began)."""

    env: Mapping[str, Any] = field(default_factory=dict)
    cast: Mapping[str, Any] = field(default_factory=dict)
    voices: Mapping[str, Any] = field(default_factory=dict)
    temperature: float | None = None
    planner: PlannerConfig | None = None
    iteration: int | None = None

    def __post_init__(self) -> None:
        if self.planner and self.planner.choose == "own":
            raise UserError("planner.choose=own: only training notes plans without playing them; sample or best")
        if self.planner and self.voices:
            raise UserError(f"planner, voices={dict(self.voices)}: who plans speaks for itself; leave one of them out")
        for role, changes in self.cast.items():
            if not isinstance(changes, Mapping):
                raise UserError(f"cast.{role}={changes}: must be a group of settings, as in {{player: {changes}}}")
        if self.temperature is not None:
            check_temperature(self.temperature, "temperature")
        if self.iteration is not None and self.iteration < 0:
            raise UserError(f"iteration={self.iteration}: must be at least 0")


@dataclass(frozen=True)
class Limits(PlayConfig):
    """Of play beside players that plan."""

    planner: PlannerConfig = field(default_factory=PlannerConfig)


@dataclass(frozen=True)
class Entrant:
    """Who is tested: the policies that a run ended with, or what it started from. `run` says where all else is."""

    arm: str
    seed: int
    run: Path
    config: Mapping[str, Any]
    base: Path
    learners: Mapping[str, Stage]  # by name in the cast

    @property
    def planner(self) -> PlannerConfig:
        """How others plan beside its learners: as in its run."""
        own = self.config["algo"].get("planner")
        return planner_of(Limits(planner=make(PlannerConfig, own, "algo.planner") if own else PlannerConfig()))

    @property
    def name(self) -> str:
        # a base's own name, also where it is played from the copy that a run keeps
        return Path(str(started_from(self.run / "policy"))).name if self.arm == BASE else self.run.name


@dataclass(frozen=True)
class Cell:
    """One entrant under one condition. `settings` is all that determines its games, and names its file."""

    entrant: Entrant
    condition: str
    env: Mapping[str, Any]
    seating: Mapping[str, Seats]
    voices: Mapping[str, str]
    temperature: float
    planner: PlannerConfig | None
    settings: Mapping[str, Any]

    @property
    def file(self) -> str:
        return f"{self.entrant.name}-{digest(self.settings)}.json"


@command("conditions")
def main(cfg: DictConfig) -> None:
    """Plays what is not played yet, then tabulates."""
    for name in ("games", "concurrency"):
        check_count(cfg[name], name)
    check_count(cfg.seed, "seed", 0)
    unknown = [name for name in cfg.metrics if name not in WORDING]
    if unknown or not cfg.metrics:
        raise UserError(f"metrics={list(cfg.metrics)}: {unknown[0] if unknown else 'nothing'} is no metric")
    if cfg.data:
        out = Path(cfg.publish or Path(cfg.data).parent)
        check_writable(out, "publish")
        played = read_per_seed(Path(cfg.data))
        check_condition("reference", cfg.reference, played)
        check_condition("headline", cfg.headline, played)
        return tabulate(cfg, played, out, read_published(Path(cfg.published)) if cfg.published else {})
    conditions = read_conditions(cfg)
    check_condition("reference", cfg.reference, conditions)
    check_condition("headline", cfg.headline, conditions)
    found = entrants(Path(cfg.runs), cfg.select, list(cfg.arms), cfg.where)
    table = [cell_of(entrant, name, each, cfg) for entrant in found for name, each in conditions.items()]
    published = read_published(Path(cfg.published)) if cfg.published else {}
    device = pick_device(cfg.device)
    set_threads(cfg.threads)
    folder, out = Path(cfg.cells), Path(cfg.publish or cfg.cells)
    check_writable(folder, "cells")
    check_writable(out / "run_cards" if cfg.publish else out, "publish")
    if cfg.publish:
        write_cards(dict.fromkeys(entrant.run for entrant in found), out)

    cells = list({cell.file: cell for cell in table}.values())  # conditions that change nothing share one
    left = [cell for cell in cells if not (folder / cell.file).exists()]
    seeds = len({entrant.seed for entrant in found})
    trained = {e.arm: {o.seed for o in found if o.arm == e.arm} for e in found if e.arm != BASE}
    if any(own != max(trained.values(), key=len) for own in trained.values()):
        told = "; ".join(f"{arm} {', '.join(map(str, sorted(own)))}" for arm, own in trained.items())
        say(f"the arms' means are not over the same seeds: {told}")
    say(
        f"{len(found)} policies of {seeds} seeds under {len(conditions)} conditions, {cfg.games} games each: "
        f"{len(left)} of {len(cells)} cells are still to be played"
    )
    bar, policies = Bar(enabled=cfg.progress), Policies(device)
    for number, cell in enumerate(left, start=1):
        with claimed(folder / cell.file) as mine:
            if mine:
                label = f"{number}/{len(left)}  {cell.entrant.arm}, seed {cell.entrant.seed}, {cell.condition}"
                bar.stage(label, cfg.games)
                of_cell = play(cell, cfg.games, cfg.seed, cfg.concurrency, policies, bar)
                bar.close()
                about = {"arm": cell.entrant.arm, "seed": cell.entrant.seed, "commit": git_commit(), **cell.settings}
                figures = {name: interval.to_json() for name, interval in of_cell.items()}
                write_json(folder / cell.file, {"about": about, "metrics": figures})
                say(f"{label}: {cfg.metrics[0]} {of_cell[cfg.metrics[0]]}" if cfg.metrics[0] in of_cell else label)
    missing = [cell for cell in cells if not (folder / cell.file).exists()]
    if missing:
        say(f"{len(missing)} cells are being played by another process, which writes the table when it has them")
        return
    path = out / f"{cfg.name}_per_seed.csv"
    write_per_seed(path, results(table, folder, list(cfg.metrics)))
    tabulate(cfg, read_per_seed(path), out, published)  # as anybody else will


# --- What is to be played ---------------------------------------------------------------------------------------------


def read_conditions(cfg: DictConfig) -> dict[str, Condition]:
    """The study's conditions by name. UserError where there is none, or one has a field that is not known."""
    settings = plain(cfg)["conditions"]
    if not settings:
        raise UserError(f"conditions: the study {cfg.name} names none; a file of conf/study/ lists what to play")
    found = {}
    for name, changes in settings.items():
        if not isinstance(changes, Mapping):
            raise UserError(f"conditions.{name}={changes}: must be a group of settings, as in {{env: {{players: 6}}}}")
        try:
            found[name] = make(Condition, changes, "condition")
        except UserError as error:
            raise UserError(f"conditions.{name}: {error}") from error
    return found


def check_condition(setting: str, name: str | None, conditions: Iterable[str]) -> None:
    if name is not None and name not in conditions:
        raise UserError(f"{setting}={name}: must be one of the conditions, {', '.join(conditions)}, or null")


def entrants(runs: Path, select: Any, arms: Sequence[str], where: Any = None) -> list[Entrant]:
    """The runs of these arms (all, where none is named), and before them the bases they started from, each once."""
    folders = selected(runs, select, where)
    found_runs = {folder: finished_run(folder) for folder in folders}
    there = sorted({card["arm"] for _, card in found_runs.values()})
    for arm in arms:
        if arm not in there:
            raise UserError(
                f"arms: no finished run of {select} in {runs} is of arm {arm}; there are {', '.join(there)}"
            )
    found: dict[tuple[str, int], Entrant] = {}
    for folder, (config, card) in found_runs.items():
        if arms and card["arm"] not in arms:
            continue
        with reading(folder):
            learners = learners_of(cast_of(config["cast"]))
        trained = {name: end_of(folder, name) for name in learners}
        base = base_folder(folder)
        seed = card["seeds"][0]
        arm = ARMS.get(card["arm"], card["arm"]) if config["env"]["game"] == "among_us" else card["arm"]
        for entrant in (
            Entrant(BASE, seed, folder, config, base, dict.fromkeys(learners, Stage(0, base))),
            Entrant(arm, seed, folder, config, base, trained),
        ):
            key = (entrant.arm, seed)
            if entrant.arm == BASE and any(
                folder_digest(e.base) == folder_digest(base) for e in found.values() if e.arm == BASE
            ):
                continue  # one model counts once, also if it is the base of several seeds
            if key in found:
                what = "started from different bases" if entrant.arm == BASE else f"are both arm {card['arm']}"
                raise UserError(
                    f"select={select}: {found[key].run.name} and {folder.name} are of seed {seed} and {what}; "
                    "choose names of which there is one for each arm and seed, or settings in `where`"
                )
            found[key] = entrant
    order = {arm: i for i, arm in enumerate(ARM_ORDER)}
    return sorted(found.values(), key=lambda e: (e.seed, order.get(e.arm, len(order))))


def after(entrant: Entrant, iteration: int | None) -> Entrant:
    """The entrant with its learners as they were after so many iterations; a base is what it is."""
    if iteration is None or entrant.arm == BASE:
        return entrant
    learners = {}
    for name in entrant.learners:
        kept = {stage.iteration: stage for stage in stages_of(entrant.run, name)}
        if iteration not in kept:
            raise UserError(
                f"iteration={iteration}: {entrant.run.name} has its {name} after {', '.join(map(str, kept))}; "
                "checkpoint.every and checkpoint.keep say in training which stay"
            )
        learners[name] = kept[iteration]
    return dataclasses.replace(entrant, learners=learners)


def cell_of(entrant: Entrant, name: str, condition: Condition, cfg: DictConfig) -> Cell:
    """The entrant's own evaluation with the condition's changes. UserError, naming the condition, if it can't be."""
    config = entrant.config
    with reading(entrant.run):
        own = make(EvalConfig, config["eval"], "eval")
    env = {**config["env"], **own.env, **condition.env}
    try:
        entrant = after(entrant, condition.iteration)
        changed = dataclasses.replace(own, cast=merged(own.cast, condition.cast))
        seating = changed.seating(cast_of(config["cast"]))
        for who in players_of(seating):
            if who in LEARNERS and who not in entrant.learners:
                raise UserError(f"cast: there is no {who} in {entrant.run}; it has {', '.join(entrant.learners)}")
            if who == CHAT:
                raise UserError(f"cast: {CHAT} plays in train, evaluate and play only")
        game = env_maker(env)()
        check_players(seating, env["game"], game)
        if condition.planner and env["game"] not in PLANNED:
            raise UserError(f"planner: env.game={env['game']} has nothing to plan; leave it out")
        voices = {role: str(voice) for role, voice in condition.voices.items() if voice is not None}
        check_voices(voices, seating, entrant)
    except UserError as error:
        raise UserError(f"conditions.{name}: {error}") from error
    own_voice = {role: identity_of(held.player, entrant) for role, held in seating.items()}
    voices = {role: voice for role, voice in voices.items() if identity_of(voice, entrant) != own_voice[role]}
    temperature = own.temperature if condition.temperature is None else condition.temperature
    settings = {
        "format": FORMAT,
        "env": env,
        **file_digests(env),
        "cast": {role: dataclasses.asdict(held) for role, held in seating.items()},
        "voices": voices,
        "players": {who: identity_of(who, entrant) for who in (*players_of(seating), *voices.values())},
        "temperature": temperature,
        "max_new_tokens": config["algo"]["max_new_tokens"],
        "context": config["algo"]["context"],
        "games": cfg.games,
        "seed": cfg.seed,
    }
    if condition.planner:
        settings["planner"] = dataclasses.asdict(condition.planner)
    return Cell(entrant, name, env, seating, voices, temperature, condition.planner, settings)


def merged(cast: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes of two casts, role by role; the second wins."""
    return {role: {**cast.get(role, {}), **changes.get(role, {})} for role in {**cast, **changes}}


def check_voices(voices: Mapping[str, str], seating: Mapping[str, Seats], entrant: Entrant) -> None:
    for role, voice in voices.items():
        if role not in seating:
            raise UserError(f"voices.{role}={voice}: there is no such role; the game's are {', '.join(seating)}")
        if voice not in (*entrant.learners, BASE, SILENT) and not is_run(voice):
            known = ", ".join((*entrant.learners, BASE, SILENT))
            raise UserError(f"voices.{role}={voice}: must be {known}, null or the folder of a finished run")
        if identity_of(seating[role].player, entrant) == seating[role].player:
            raise UserError(f"voices.{role}={voice}: {seating[role].player} is no language model and keeps its voice")


def policy_folder(name: str, entrant: Entrant) -> Path | None:
    """Where the policy of a player who doesn't learn lies; None of those that have none."""
    if bare(name) == BASE:
        return entrant.base
    return run_policy_folder(name) if name != SILENT and is_run(name) else None


def identity_of(name: str, entrant: Entrant) -> str:
    """What stands for a player: the digest of its policy's files; of others the name."""
    if name in entrant.learners:
        return entrant.learners[name].digest
    folder = policy_folder(name, entrant)
    if folder is None:
        return name
    plans = f"{SUFFIX} {dataclasses.asdict(entrant.planner)}" if name.endswith(SUFFIX) else ""
    return folder_digest(folder) + plans


# --- Playing ----------------------------------------------------------------------------------------------------------


class Policies:
    """Loaded policies; those of one run at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._run = Path()
        self._loaded: dict[Stage, Policy] = {}

    def of(self, entrant: Entrant) -> tuple[Policy, dict[str, Policy]]:
        """Its base, and its learners by name. Their critics see no hidden facts: nobody asks them here."""
        if entrant.run != self._run:
            self._run, self._loaded = entrant.run, {}
        for stage in (base := Stage(0, entrant.base), *entrant.learners.values()):
            if stage not in self._loaded:
                self._loaded[stage] = stage.load(self.device, 0)
        return self._loaded[base], {name: self._loaded[stage] for name, stage in entrant.learners.items()}


def play(cell: Cell, games: int, seed: int, concurrency: int, policies: Policies, bar: Bar) -> Metrics:
    """The cell's games: metrics of the seats that the run learned to play in, for a base of the same ones."""
    game, make_env = cell.env["game"], env_maker(cell.env)
    base, learners = policies.of(cell.entrant)
    limits = Limits(
        games=games, concurrency=concurrency, max_new_tokens=cell.settings["max_new_tokens"],
        context=cell.settings["context"], planner=cell.entrant.planner,
    )  # fmt: skip
    stand_ins = {name: (name if i else TRAINED, policy) for i, (name, policy) in enumerate(learners.items())}
    seating = dict(cell.seating)
    seated = {BASE: base, **learners}
    room = places(seating, make_env())
    dubbed = {name for role, voice in cell.voices.items() for name in (seating[role].player, voice)} - {SILENT}
    dubbing = {name: seated.get(name) or run_policy(name, game, policies.device, base) for name in dubbed}
    trained_in = cell.entrant.config["env"]  # its base and its learners
    styles = {
        name: trained_in.get("style") if name in seated else style_of(run_policy_folder(name), trained_in)
        for name in dubbed
    }
    caches, _ = player_slots(seating, make_env(), limits, {name: policy.lm.config for name, policy in seated.items()})
    for role, voice in cell.voices.items():
        if voice != SILENT:
            caches.append(Slots.of(dubbing[voice].lm.config, limits.context, room[seating[role].player]))
    if cell.planner:  # plans are weighed with slots of their own
        caches += [Slots.of(policy.lm.config, limits.context, 0, SLOTS) for policy in learners.values()]
    fit = check_memory(
        caches, 0, concurrency=limits.at_once, setting="concurrency", context=limits.context, device=policies.device
    )
    if fit.concurrency < limits.at_once:
        say(fit.line)
    limits = dataclasses.replace(limits, concurrency=fit.concurrency)
    agents = seat_players(seating, make_env(), trained_in, base, limits, cell.temperature, stand_ins)
    if cell.planner:
        for name in agents.keys() & stand_ins.keys():
            called, policy = stand_ins[name]
            agents[name] = planning_agent(
                called, policy, limits, room[name], cell.temperature, cell.planner, game, style=trained_in.get("style")
            )

    for role, voice in cell.voices.items():  # with agents of their own, since others may play with the same policies
        player, called = seating[role].player, f"{role} in another's voice"
        held = (limits, room[player], cell.temperature)
        mover = model_agent(agents[player].name, dubbing[player], *held, styles[player])
        speaker = SILENCE if voice == SILENT else model_agent(voice, dubbing[voice], *held, styles[voice])
        agents[called] = Dubbed(mover, speaker, mover.name)
        seating[role] = dataclasses.replace(seating[role], player=called)
    drawn = draw_games(seed, EVALUATION, count=games)
    episodes = rollout(drawn, by_role(seating, agents), make_env, limits.concurrency, bar.advance)
    return metrics(episodes, game, float(cell.env.get("objective", 0.0)), {TRAINED})


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether this file is ours to write: nobody else has written it, or is about to. A claim ends with its process."""
    lock = path.with_name(f".{path.stem}.lock")
    while True:
        with writing(lock):
            opened = open_lock(lock)
        with opened as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError as error:
                raise UserError(
                    f"{path.parent}: its file system has no locks ({error.strerror}), by which several processes share "
                    "the work; name a folder on another one"
                ) from error
            try:
                is_there = os.path.samestat(os.fstat(held.fileno()), lock.stat())
            except FileNotFoundError:
                is_there = False
            if not is_there:
                continue  # removed in between by whoever had it: it keeps nobody out
            try:
                yield not path.exists()
            finally:
                lock.unlink(missing_ok=True)
            return


# --- Tables and figure ------------------------------------------------------------------------------------------------


def results(table: Sequence[Cell], folder: Path, wanted: Sequence[str]) -> dict[str, list[ArmRun]]:
    """What was played under each condition, arms in the order of tables."""
    played: dict[str, list[ArmRun]] = {}
    for cell in table:
        found = read_figures(folder / cell.file)
        kept = {name: found[name] for name in wanted if name in found}
        played.setdefault(cell.condition, []).append(ArmRun(cell.entrant.arm, cell.entrant.seed, kept))
    order = {arm: i for i, arm in enumerate(dict.fromkeys([*ARM_ORDER, *(cell.entrant.arm for cell in table)]))}
    for runs in played.values():
        runs.sort(key=lambda run: (order[run.arm], run.seed))
    return played


def tabulate(
    cfg: DictConfig, played: Mapping[str, Sequence[ArmRun]], out: Path, published: Mapping[Point, float]
) -> None:
    """Writes NAME.csv, NAME_differences.csv and NAME.svg, and prints the figures."""
    wanted = list(cfg.metrics)
    rows = {condition: ablation_table(runs) for condition, runs in played.items()}
    write_rows(out / f"{cfg.name}.csv", rows)
    if cfg.headline:
        write_table(out / "table.csv", rows[cfg.headline])
    write_rows(out / f"{cfg.name}_differences.csv", differences(played, wanted, cfg.reference))
    draw(rows, played, wanted[0], out / f"{cfg.name}.svg", published)
    for metric in reversed(wanted):  # the first one last, where the eye is
        columns: dict[str, Metrics] = {}
        for condition, of_condition in rows.items():
            for row in of_condition:
                if row.metric == metric:
                    columns.setdefault(row.arm, {})[condition] = row.interval
        if columns:
            say(f"\n{metric}: {WORDING[metric].label}")
            say(format_table(columns, list(rows)))
    say(f"\ntables and figure: {out}")


def differences(
    played: Mapping[str, Sequence[ArmRun]], wanted: Sequence[str], reference: str | None = None
) -> dict[str, list[TableRow]]:
    """Each condition minus the `reference`, the first where none is named, of the same arm; and arm minus arm under
    each condition. All paired by seed; none where an arm has one seed."""
    first = reference or next(iter(played))
    found: dict[str, list[TableRow]] = {}
    for condition in (name for name in played if name != first):
        for arm in dict.fromkeys(run.arm for run in played[first]):
            runs = [(name, run) for name in (condition, first) for run in played[name] if run.arm == arm]
            both = [dataclasses.replace(run, arm=name) for name, run in runs]
            for row in arm_differences(both, [(condition, first)], wanted):
                found.setdefault(row.arm, []).append(dataclasses.replace(row, arm=arm))
    return found | {name: rows for name, runs in played.items() if (rows := arm_differences(runs, COMPARISONS, wanted))}


def write_rows(path: Path, rows: Mapping[str, Sequence[TableRow]]) -> None:
    """`arm,condition,metric,mean,low,high,seeds,games`, six significant digits as in `table.csv`."""
    lines = [
        (row.arm, condition, row.metric, row.mean, row.low, row.high, row.seeds, row.games)
        for condition, of_condition in rows.items()
        for row in of_condition
    ]
    write_csv(path, ("arm", "condition", "metric", "mean", "low", "high", "seeds", "games"), lines)


def write_per_seed(path: Path, played: Mapping[str, Sequence[ArmRun]]) -> None:
    """Each run's own figures, intervals over its games."""
    lines = [
        (run.arm, run.seed, condition, metric, own.mean, own.low, own.high, own.n)
        for condition, runs in played.items()
        for run in runs
        for metric, own in run.metrics.items()
    ]
    write_csv(path, PER_SEED, lines)


def read_per_seed(path: Path) -> dict[str, list[ArmRun]]:
    """The inverse of `write_per_seed`. UserError where the file is not one."""
    found: dict[str, dict[tuple[str, int], ArmRun]] = {}
    for arm, seed, condition, metric, own in read_csv(
        path,
        "data",
        PER_SEED,
        lambda row: (row["arm"], int(row["seed"]), row["condition"], row["metric"], interval_of(row)),
    ):
        run = found.setdefault(condition, {}).setdefault((arm, seed), ArmRun(arm, seed, {}))
        run.metrics[metric] = own
    return {condition: list(runs.values()) for condition, runs in found.items()}


def read_published(path: Path) -> dict[Point, float]:
    """Others' figures by arm and condition. UserError where the file or a line of it is not as it should be."""
    found = {}
    with reading(f"published={path}"):
        for row in csv_rows(path):
            try:
                found[row["arm"], f"{row['setting']}_{row['value']}"] = float(row["mean"])
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(f"{path}: expected the columns arm,setting,value,mean, got {row}") from error
    return found


def panels(conditions: Sequence[str]) -> dict[str, list[str]]:
    """Conditions that are points of one setting, `players_4` and `players_6`, under its name; all others under none."""
    found: dict[str, list[str]] = {}
    for condition in conditions:
        point = re.fullmatch(r"(.+)_\d\S*", condition)
        found.setdefault(point[1] if point else "", []).append(condition)
    return found


def draw(
    rows: Mapping[str, Sequence[TableRow]],
    played: Mapping[str, Sequence[ArmRun]],
    metric: str,
    path: Path,
    published: Mapping[Point, float],
) -> None:
    """One metric of each arm under each condition, with intervals, and a tick for each of several seeds, whose interval
    says little where they are few; open markers are the published figures."""
    arms = list(dict.fromkeys(row.arm for of_condition in rows.values() for row in of_condition))
    groups = panels(list(rows))
    height = 0.9 + 0.13 * (len(arms) + 1) * max(map(len, groups.values()))
    figure = Figure(figsize=(3.2 * len(groups) + 2.2, max(2.4, height)), layout="constrained")
    subplots = figure.subplots(1, len(groups), squeeze=False, sharex=True)[0]
    for axes, (name, group) in zip(subplots, groups.items(), strict=True):
        for place, condition in enumerate(group):
            for i, arm in enumerate(arms):
                y, colour = place + 0.8 * ((i + 0.5) / len(arms) - 0.5), PAPER[i % len(PAPER)]
                for row in rows[condition]:
                    if (row.arm, row.metric) == (arm, metric):
                        axes.plot([row.low, row.high], [y, y], color=colour, linewidth=2, alpha=0.5)  # nan: no line
                        axes.plot([row.mean], [y], color=colour, marker="o", markersize=4.5)
                each = [
                    run.metrics[metric].mean for run in played[condition] if run.arm == arm and metric in run.metrics
                ]
                if len(each) > 1:
                    axes.plot(each, [y] * len(each), color=colour, marker="|", markersize=7, linewidth=0)
                if (arm, condition) in published:
                    axes.plot(
                        [published[arm, condition]], [y], color=colour, marker="o", markersize=6, fillstyle="none"
                    )
        axes.set_ylim(len(group) - 0.5, -0.5)
        axes.set_yticks(range(len(group)), [c.removeprefix(f"{name}_").replace("_", " ") for c in group])
        axes.set_yticks([i + 0.5 for i in range(len(group) - 1)], minor=True)
        axes.grid(axis="y", which="minor", color="#dddddd", linewidth=0.7)
        axes.grid(axis="x", color="#eeeeee", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", length=0, labelsize=9)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_title(name, fontsize=10, loc="left")
    open_too = " (open: published)" if any((arm, condition) in published for arm in arms for condition in rows) else ""
    several = any(row.seeds > 1 for of_condition in rows.values() for row in of_condition)
    figure.supxlabel(WORDING[metric].label + open_too + ("; ticks: each seed" if several else ""), fontsize=9)
    marks = [Line2D([], [], color=PAPER[i % len(PAPER)], marker="o", linewidth=0) for i in range(len(arms))]
    figure.legend(marks, arms, loc="outside right upper", frameon=False, fontsize=9)
    with writing(path), matplotlib.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()

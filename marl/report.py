"""Run folders -> one self-contained `report.html`: what was run, table, curves, beliefs, transcripts, run cards.

Figures are drawn by matplotlib as inline SVG in colours that the page sets, so that they follow light, dark and print.
Whatever a model wrote is escaped by the template engine; only SVG made here is passed through.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from marl.compute import GAMES, PASSES, at_equal_compute, learned_tokens, token_passes
from marl.errors import UserError
from marl.evaluate import Metrics, conditions_from_json
from marl.files import FAULTS, read_json, reading, write_text, writing
from marl.runs import flat, read_run_card, read_settings, unlike
from marl.secrets import hidden
from marl.stats import (
    ArmRun,
    Interval,
    TableRow,
    ablation_table,
    arm_differences,
    iqm_table,
    profile_table,
    seed_mean,
)
from marl.tracking import METRICS_FILE, read_metrics
from marl.transcripts import (
    CUT,
    Form,
    Meeting,
    Moves,
    Transcript,
    crew_shifts,
    fates,
    forms,
    is_among_us,
    is_dond,
    mentions,
    opening,
    outcome_text,
    plan_text,
    printable,
    read_episodes,
    said,
    shifts,
    story,
    verdict,
)
from marl.wording import (
    ARM_ORDER,
    ENDS,
    PANELS,
    WORDING,
    Panel,
    Wording,
    arm_name,
    bounds,
    headline,
    number,
    of_ones_own,
    pairs_of,
    wording,
)

TEMPLATES = Path(__file__).parent / "templates"

# Colours that matplotlib draws with, and the page's variables that take their place.
INK, MUTED, GRID = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0400{i:02x}" for i in range(8))
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--line", **{c: f"--c{i}" for i, c in enumerate(SERIES)}}
# The same on paper, for figures in files of their own: Okabe and Ito's palette, told apart without red and green.
PAPER = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#6a51a3", "#555555")

TRAINED = "trained"  # the condition of `evaluation.json` that a run's arm stands for
MEASURED = {"base": "untrained", TRAINED: TRAINED}  # whom a condition measures, by name in its transcripts


@dataclass
class Run:
    """A run's folder, read."""

    folder: Path
    arm: str
    seed: int
    config: dict[str, Any]
    card: dict[str, Any]
    curves: list[dict[str, Any]]
    evaluation: dict[str, Any]
    transcripts: dict[str, list[Transcript]] = field(default_factory=dict)

    @property
    def game(self) -> str:
        return str((self.config.get("env") or {}).get("game", ""))

    @property
    def games(self) -> int:
        """Training games of an iteration; 0 where the configuration does not say."""
        return int((self.config.get("algo") or {}).get("games") or 0)

    @property
    def conditions(self) -> dict[str, Metrics]:
        return conditions_from_json(self.evaluation) if self.evaluation else {}


def read_run(folder: str | Path) -> Run:
    """Reads what a run's folder holds so far; the arm by the name that its game's tables use.

    UserError if it is no run's folder, or a file in it is malformed.
    """
    folder = Path(folder)
    with reading(folder):
        run = _read(folder)
        _try(run)
    return run


def _try(run: Run) -> None:
    """Puts into words what a page will say of this run by itself: what is damaged shows before any figure is drawn."""
    runs = [run]
    float((run.config.get("env") or {}).get("objective") or 0)
    arms = arm_runs(runs)
    columns = columns_of(arms)
    table_rows(columns, _others(columns, ()), dict.fromkeys(columns, 0))
    what_was_run(runs), mixed(runs), findings(columns), mean_entries(runs), speakers(runs), run_card(run)
    for games in run.transcripts.values():
        for transcript in games:
            game_view(transcript, "")


def _read(folder: Path) -> Run:
    config, card = hidden(read_settings(folder)), read_run_card(folder) or {}
    evaluated = folder / "evaluation.json"
    evaluation = read_evaluation(evaluated) if os.path.lexists(evaluated) else {}
    seed = card.get("seed", config.get("seed", 0))
    if not isinstance(seed, int):
        raise UserError(f"{folder}: expected a whole number for its seed, got {seed!r}")
    curves = read_metrics(folder / METRICS_FILE)
    try:
        passes = token_passes(config, curves, learned_tokens(folder))
    except UserError:
        raise
    except FAULTS as error:
        raise UserError(f"{folder}: its settings and metrics don't say what training cost ({error!r})") from error
    for row in curves:
        if row["phase"] == "eval" and row["iteration"] in passes:
            row[PASSES] = passes[row["iteration"]]
    arm = str(card.get("arm") or config.get("arm") or folder.name)
    return Run(
        folder=folder,
        arm=arm_name(arm, (config.get("env") or {}).get("game", "")),
        seed=seed,
        config=config,
        card=card,
        curves=curves,
        evaluation=evaluation,
        transcripts={path.stem: read_episodes(path) for path in sorted((folder / "episodes").glob("*.jsonl"))},
    )


def read_evaluation(path: str | Path) -> dict[str, Any]:
    """An `evaluation.json`. UserError where it cannot be read, or its figures are not where they should be."""
    evaluation = read_json(path)
    try:
        conditions_from_json(evaluation)
        for by_message in evaluation.get("belief_by_message", {}).values():
            for entry in by_message:
                for value in entry.values():
                    Interval.from_json(value)
        for found in evaluation.get("by_game", {}).values():
            for values in found.values():
                if np.asarray(values, dtype=np.float64).ndim != 1:
                    raise ValueError(f"by_game holds {values!r}")
    except FAULTS as error:
        raise UserError(f"{path}: expected figures with mean, low, high and n by condition ({error!r})") from error
    return evaluation


# --- The page ---------------------------------------------------------------------------------------------------------


def build_report(run_folders: Sequence[str | Path], out_path: str | Path, title: str, games_shown: int = 4) -> None:
    """Writes the report of these runs to `out_path`, whole or not at all.

    Runs with the same arm (`run.json`, else `config.yaml`, else the folder's name) are seeds of one arm. `games_shown`:
    transcripts of each condition in all. UserError if there is no run, or a folder is not one.
    """
    if not run_folders:
        raise UserError("no runs to report on: name at least one run's folder")
    write_report([read_run(folder) for folder in run_folders], out_path, title, games_shown)


@cache
def _template() -> Template:
    """The page's frame, compiled once however many pages a process writes."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html")


def write_report(runs: Sequence[Run], out_path: str | Path, title: str, games_shown: int = 4) -> None:
    """The same of runs that have been read; there is at least one."""
    with reading(told(runs)):
        page = page_of(runs, title, games_shown)
    out_path = Path(out_path)
    with writing(out_path):
        out_path.parent.mkdir(parents=True, exist_ok=True)
    write_text(out_path, page)


def told(runs: Sequence[Run]) -> str:
    """The folders of runs, in a few words."""
    names = [str(run.folder) for run in runs]
    return ", ".join(names[:3]) + (f" or one of {len(names) - 3} more runs" if len(names) > 3 else "")


def page_of(runs: Sequence[Run], title: str, games_shown: int) -> str:
    """The page's text."""
    arms = arm_runs(runs)
    columns = columns_of(arms)
    # Colours stand for arms, everywhere in the page alike.
    heard = [speaker for speaker in speakers(runs) if speaker.messages]
    names = list(dict.fromkeys([*columns, *(arm_label(run, runs) for run in runs), *(each.arm for each in heard)]))
    colours = {name: i % len(SERIES) for i, name in enumerate(names)}
    games = list(dict.fromkeys(run.game for run in runs))
    measured = [name for found in columns.values() for name in found]
    first_rows = list(dict.fromkeys(name for game in games for name in headline(game, measured)))
    ends = ENDS if games == ["among_us"] else own_ends(columns)
    return _template().render(
        title=title,
        facts=[*what_was_run(runs), *mixed(runs)],
        findings=[*findings(columns), *comparisons(arms, runs), *costs(runs)],
        columns=list(columns),
        colours=colours,
        headline=table_rows(columns, first_rows, colours),
        rest=table_rows(columns, _others(columns, first_rows), colours),
        endings=endings(columns, ends) if games != ["dond"] else [],
        ends=list(enumerate(ends.values())),
        by_games=by_games(runs),
        over_seeds=over_seeds(arms, list(columns), first_rows, colours),
        profile=profile_panel(arms, first_rows, colours),
        seeds=max((interval.n for interval in _seed_counts(arms).values()), default=1),
        panels=training_panels(runs, columns, colours),
        beliefs=belief_panels(runs, colours),
        prior=any("prior_log_loss" in entry for run in runs for entries in _by_message(run) for entry in entries),
        speakers=heard,
        naming="among_us" in games,
        games=shown_games(runs, games_shown),
        cards=[run_card(run) for run in runs],
    )


def arm_runs(runs: Sequence[Run]) -> list[ArmRun]:
    """The conditions of all evaluations as arms: `trained` under the run's arm, others (`base`) under their own name.

    Runs often start from one and the same base. Counting it once for each of them would be taking one model for many
    seeds, and its interval would shrink to nothing: `base_names`.
    """
    arms: dict[tuple[str, int], ArmRun] = {}
    same_games = len({measured_in(run) for run in runs}) == 1
    bases = base_names(runs)
    for run in runs:
        for condition, found in run.conditions.items():
            if condition == TRAINED:
                name = arm_label(run, runs)
                if (name, run.seed) in arms:
                    raise UserError(
                        f"{run.folder} repeats arm {name!r}, seed {run.seed}: give each run its own seed or arm"
                    )
            else:
                name = bases[run.folder, condition]
                if not name:
                    continue
            games = run.evaluation.get("by_game", {}).get(condition, {}) if same_games else {}
            arms[(name, run.seed)] = ArmRun(name, run.seed, found, games)
    order = {name: i for i, name in enumerate(ARM_ORDER)}
    return sorted(
        arms.values(),
        key=lambda arm: (not arm.arm.startswith("base"), order.get(arm.arm, len(order))),  # otherwise as they come
    )


def base_names(runs: Sequence[Run]) -> dict[tuple[Path, str], str]:
    """What the base of each run, by its folder and condition, is called in tables; empty where an earlier run has the
    same base in the same games. The same base in other games, or another one of the same seed, is that of an arm."""
    names: dict[tuple[Path, str], str] = {}
    known: dict[tuple[str, str], set[str]] = {}  # a model's games
    taken: set[tuple[str, int]] = set()
    for run in runs:
        figures = run.evaluation.get("conditions", {})
        heard = run.evaluation.get("belief_by_message", {})
        for condition in dict.fromkeys([*figures, *heard, *(each for each in MEASURED if each in run.transcripts)]):
            if condition == TRAINED:
                continue
            name, games = condition + _suffix(run, runs), measured_in(run)
            before = known.setdefault((name, model_of(run, figures.get(condition))), set())
            if games in before:
                name = ""
            elif before or (name, run.seed) in taken:
                name = f"{name} of {arm_label(run, runs)}"
            before.add(games)
            taken.add((name, run.seed))
            names[run.folder, condition] = name
    return names


def measured_in(run: Run) -> str:
    """What stands for the games that a run was measured in, and the seats that played them: others are no pairs, and a
    base has other figures there. Runs that differ in their seed alone are the same."""
    evaluation = _settings(run.config.get("eval"))
    seats = {role: dict(_settings(own)) for role, own in _settings(run.config.get("cast")).items()}
    for role, changes in _settings(evaluation.get("cast")).items():
        seats[role] = {**seats.get(role, {}), **_settings(changes)}
    for own in seats.values():
        if not own.get("partners"):
            own.pop("partner", None)
    about = [run.evaluation.get("about"), run.config.get("env"), evaluation.get("env"), evaluation.get("temperature")]
    return re.sub(r"-s\d+-[0-9a-f]{8}", "", json.dumps([*about, seats], sort_keys=True, default=str))


def _settings(group: Any) -> Mapping[str, Any]:
    """A group of a run's settings; none where it is of another version, or damaged."""
    return group if isinstance(group, Mapping) else {}


def model_of(run: Run, figures: Any) -> str:
    """What stands for the run's base: its digest, for one made again under the same name is another model; where the
    card has none its name, or these figures of it."""
    return str(run.card.get("base_digest") or run.card.get("base") or json.dumps(figures, sort_keys=True))


def arm_label(run: Run, runs: Sequence[Run]) -> str:
    """The arm's name on the page: `trained` where there is only one arm."""
    several = len({(other.arm, _suffix(other, runs)) for other in runs}) > 1
    return (run.arm if several else TRAINED) + _suffix(run, runs)


def _suffix(run: Run, runs: Sequence[Run]) -> str:
    """Tells runs of different games apart where a report shows several."""
    variant = variant_of(run, runs)
    if not variant:
        return ""
    settings = {key: value for key, value in variant.items() if key != "game"}
    parts = [f"λ={value:g}" if key == "objective" else f"{key}={value}" for key, value in settings.items()]
    return f" ({', '.join([run.game, *parts])})"


def variant_of(run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """The run's settings of the game in which any two of these runs differ; of different games, the objective alone."""
    games: list[dict[str, Any]] = [each.config.get("env") or {} for each in runs]
    keys = list(dict.fromkeys(key for game in games for key in game))
    differing = [key for key in keys if any(game.get(key) != games[0].get(key) for game in games)]
    own = run.config.get("env") or {}
    return {key: own[key] for key in (("game", "objective") if "game" in differing else differing) if key in own}


def columns_of(arms: Sequence[ArmRun]) -> dict[str, Metrics]:
    """One column for each arm: means over seeds where there are several, else the run's own intervals over games."""
    columns: dict[str, Metrics] = {}
    for row in ablation_table(arms):
        columns.setdefault(row.arm, {})[row.metric] = Interval(row.mean, row.low, row.high, row.games)
    return columns


def over_seeds(
    arms: Sequence[ArmRun], names: Sequence[str], metrics: Sequence[str], colours: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Rows for the template with interquartile means, a cell for each of `names`; none where no arm has seeds."""
    found: dict[str, Metrics] = {name: {} for name in names}
    for row in iqm_table(arms, metrics):
        found[row.arm][row.metric] = row.interval
    return table_rows(found, [name for name in metrics if any(name in own for own in found.values())], colours)


def profile_panel(arms: Sequence[ArmRun], metrics: Sequence[str], colours: Mapping[str, int]) -> dict[str, Any] | None:
    """The performance profiles of the first of these metrics that arms with several seeds have; None without seeds."""
    rows = profile_table(arms, metrics)
    if not rows:
        return None
    metric = rows[0].metric
    drawn = [row for row in rows if row.metric == metric]
    ends = [row.threshold for row in drawn]
    margin = 0.05 * (max(ends) - min(ends)) or 1.0
    figure, axes = new_panel()
    for arm in dict.fromkeys(row.arm for row in drawn):
        mine = [row for row in drawn if row.arm == arm]
        # The share holds up to its threshold and falls behind it; all seeds reach what is below every one of them.
        x = [min(ends) - margin, *(row.threshold for row in mine), max(ends) + margin]
        y = [1.0, *(row.share.mean for row in mine), 0.0]
        axes.step(x, y, where="pre", color=SERIES[colours[arm]], linewidth=1.8)
    axes.set_xlabel(metric, fontsize=9)
    _limits(axes, 0.0, 1.0)
    title = f"{wording(metric).label}, by seed"
    unit = "share of seeds that reach at least this"
    return {"title": title, "unit": unit, "metric": metric, "svg": to_svg(figure, "profile", title)}


def _seed_counts(arms: Sequence[ArmRun]) -> dict[str, Interval]:
    return {row.arm: Interval(row.seeds, math.nan, math.nan, row.seeds) for row in ablation_table(arms)}


def _others(columns: Mapping[str, Metrics], shown: Sequence[str]) -> list[str]:
    found = {name for metrics in columns.values() for name in metrics} - set(shown)
    return [name for name in WORDING if name in found] + sorted(found - WORDING.keys())


def table_rows(
    columns: Mapping[str, Metrics], metrics: Sequence[str], colours: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Rows for the template: metric, wording, a cell for each column, and a small plot of the intervals."""
    rows = []
    for metric in metrics:
        words = wording(metric)
        found = {name: metrics[metric] for name, metrics in columns.items() if metric in metrics}
        rows.append(
            {
                "metric": metric,
                "wording": words,
                "cells": [_cell(found.get(name), words) for name in columns],
                "strip": strip_svg(found, colours),
            }
        )
    return rows


def _cell(interval: Interval | None, wording: Wording) -> dict[str, str] | None:
    if interval is None:
        return None
    bare = not math.isfinite(interval.low)
    low, high = (0.0, 0.0) if bare else (interval.low, interval.high)
    return {
        "mean": wording.show(interval.mean),
        "range": "" if bare else f"{wording.show(low)} – {wording.show(high)}",
    }


def strip_svg(found: Mapping[str, Interval], colours: Mapping[str, int]) -> Markup:
    """The intervals of one metric above one another on a common scale, without axis: the numbers stand beside it."""
    ends = [v for i in found.values() for v in (i.mean, i.low, i.high) if math.isfinite(v)]
    if not ends:
        return Markup("")
    low, high = min(ends), max(ends)
    span = (high - low) or 1.0
    width, step = 120.0, 9.0

    def x(value: float) -> float:
        return round(6 + (width - 12) * ((value - low) / span if high > low else 0.5), 1)

    parts = []
    for i, (name, interval) in enumerate(found.items()):
        y, colour = step * (i + 0.5), f"var(--c{colours[name]})"
        if math.isfinite(interval.low):
            parts.append(
                f'<line x1="{x(interval.low)}" x2="{x(interval.high)}" y1="{y}" y2="{y}" '
                f'style="stroke:{colour};stroke-width:2.5;stroke-linecap:round;opacity:.5"/>'
            )
        if math.isfinite(interval.mean):
            parts.append(f'<circle cx="{x(interval.mean)}" cy="{y}" r="3.2" style="fill:{colour}"/>')
    height = step * len(found)
    drawn = "".join(parts)
    return Markup(
        f'<svg class="strip" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">{drawn}</svg>'
    )


# --- In plain words ---------------------------------------------------------------------------------------------------


def mixed(runs: Sequence[Run]) -> list[str]:
    """Where runs differ in what no arm is about, a sentence each: seeds of one arm with other settings, runs of one
    seed from other bases, and runs of other commits. What pairs them by seed then compares that, too."""
    told = []
    of_arm: dict[str, list[Run]] = {}
    for run in runs:
        of_arm.setdefault(arm_label(run, runs), []).append(run)
    for first, *others in of_arm.values():
        for key in dict.fromkeys(key for other in others for key in unlike(first.config, other.config)):
            values = dict.fromkeys(str(flat(run.config).get(key)) for run in (first, *others))
            told.append(f"Seeds of {first.arm} differ in {key} as well ({', '.join(values)}).")
    bases: dict[int, dict[str, list[str]]] = {}
    commits: dict[str, None] = {}
    for run in runs:
        if base := run.card.get("base_digest"):
            bases.setdefault(run.seed, {}).setdefault(str(base), []).append(run.arm)
        if commit := run.card.get("git_commit"):
            commits |= dict.fromkeys(str(commit).split(", "))
    for seed, found in sorted(bases.items()):
        if len(found) > 1:
            arms = "; ".join(f"{', '.join(dict.fromkeys(names))} from {base}" for base, names in found.items())
            told.append(
                f"Runs of seed {seed} start from different bases ({arms}), so that they differ in these as well."
            )
    if len(commits) > 1:
        told.append(f"The runs are of {len(commits)} commits: {', '.join(commits)}.")
    return told


def what_was_run(runs: Sequence[Run]) -> list[str]:
    """A few sentences on the game, the learner and the evaluation, from what the configurations say."""
    first = runs[0].config
    env, algo, model = (first.get(part) or {} for part in ("env", "algo", "model"))
    sentences = []
    if env.get("game") == "dond":
        objectives = sorted({float((run.config.get("env") or {}).get("objective", 0)) for run in runs}, reverse=True)
        kinds = {1.0: "cooperative", 0.0: "semi-competitive", -1.0: "strictly competitive"}
        which = " and ".join(f"{kinds.get(value, 'mixed')} (λ = {value:g})" for value in objectives)
        sentences.append(
            f"Deal or No Deal, {which}: two players share books, hats and balls, each knows only its own values, "
            "they talk, and each then claims items. Claims that fit pay a player its points plus λ times its "
            "partner's; claims that do not pay nothing."
        )
    elif env.get("game") == "among_us":
        sentences += among_us_sentences(first)
    elif env.get("game"):
        sentences.append(f"The game is {env['game']}.")
    arms = list(dict.fromkeys(run.arm for run in runs))
    seeds = sorted({run.seed for run in runs})
    count = "One run" if len(runs) == 1 else f"{len(runs)} runs"
    of = f" of {len(arms)} arms ({', '.join(arms)})" if len(arms) > 1 else ""
    sentences.append(f"{count}{of}, {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}.")
    if algo.get("kind"):
        learner = {"ppo": "PPO", "filtered_bc": "filtered behaviour cloning"}.get(algo["kind"], algo["kind"])
        what = f"Learned by {learner}"
        if algo.get("iterations") and algo.get("games"):
            what += f": {algo['iterations']} iterations of {algo['games']} games"
        name = model.get("name") or ""
        kind = (
            "a model trained here from scratch" if model.get("kind") == "tiny" else f"the language model {name}".strip()
        )
        sentences.append(f"{what}, with {kind}.")
    sentences += weight_sentences(runs)
    about = runs[0].evaluation.get("about", {})
    if about.get("games"):
        sentences.append(f"Evaluated on {about['games']} games a condition, the same games for each.")
    return sentences


def weights_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The weight of each term of a run, wherever it is from: `listening loss` -> `0.3`."""
    return {
        f"{name} {group}": f"{weight:g}" if isinstance(weight := term.get("weight"), int | float) else "its default"
        for group in ("loss", "reward")
        for name, term in _settings(config.get(group)).items()
        if isinstance(term, Mapping)
    }


def weight_sentences(runs: Sequence[Run]) -> list[str]:
    """What each arm trains: all weights of a single one, of several those in which they differ."""
    by_arm = {run.arm: weights_of(run.config) for run in runs}
    names = list(dict.fromkeys(name for weights in by_arm.values() for name in weights))
    several = len(by_arm) > 1
    if several:
        names = [name for name in names if len({weights.get(name) for weights in by_arm.values()}) > 1]
    told = []
    for arm, weights in by_arm.items():
        each = ", ".join(f"{name} {weights.get(name, 'absent')}" for name in names)
        told.append(f"{arm}: {each}" if several else each)
    return [f"Weights{' in which arms differ' if several else ''}: {'; '.join(told)}."] if names else []


def among_us_sentences(config: Mapping[str, Any]) -> list[str]:
    """The game as it is evaluated, and who holds the seats."""
    env = {**config["env"], **((config.get("eval") or {}).get("env") or {})}
    changes = (config.get("eval") or {}).get("cast") or {}
    cast = {role: {**seats, **changes.get(role, {})} for role, seats in (config.get("cast") or {}).items()}
    imposters = "one is an imposter" if env["imposters"] == 1 else f"{env['imposters']} are imposters"
    shaping = f" Deeds earn {env['shaping']:g} beside the win." if env.get("shaping") else ""
    sentences = [
        f"Grid Among Us, {env['width']} by {env['height']} rooms, {env['players']} players of whom {imposters}. "
        f"Crewmates win when nobody left is an imposter or all of their {env['tasks']} tasks each are done; imposters "
        f"win when they are as many. A body that is found is talked over, and all vote.{shaping}"
    ]
    who = []
    for role, seats in cast.items():
        partner = f", {seats['partners']:g} of them {seats['partner']}" if seats.get("partners") else ""
        who.append(f"{role}s are {seats['player']}{partner}")
    if who:
        sentences.append(f"Who plays: {'; '.join(who)}.")
    return sentences


def findings(columns: Mapping[str, Metrics]) -> list[str]:
    """What the table says, in sentences that claim no more than the intervals do."""
    said_so: list[str] = []
    for metric in ("game/win_rate/crewmates", "vote/imposter", "game/score", "game/agreement"):
        words = wording(metric)
        found = {name: metrics[metric] for name, metrics in columns.items() if metric in metrics}
        if not found:
            continue
        parts = []
        for name, interval in found.items():
            cell = _cell(interval, words)
            assert cell is not None
            parts.append(f"{name} {cell['mean']}" + (f" ({cell['range']})" if cell["range"] else ""))
        sentence = f"{words.label}: {', '.join(parts)}"
        ceilings = {number(m["game/score_ceiling"].mean) for m in columns.values() if "game/score_ceiling" in m}
        if metric == "game/score" and len(ceilings) == 1:
            sentence += f"; {ceilings.pop()} is the best that these games allow"
        if len(found) == 2:
            before, after = found.values()
            if after.low > before.high:
                sentence += ". The intervals are apart: it rose"
            elif after.high < before.low:
                sentence += ". The intervals are apart: it fell"
            else:
                sentence += ". The intervals overlap"
        said_so.append(sentence + ".")
    for name, metrics in columns.items():
        gain = metrics.get("belief/gain_over_prior")
        if gain is None or not math.isfinite(gain.low):
            continue
        verdict = (
            "beats what the rules alone tell"
            if gain.low > 0
            else "is worse than the exact prior"
            if gain.high < 0
            else "cannot be told from the exact prior"
        )
        amount = f"gain {number(gain.mean)} nats a question, {number(gain.low)} to {number(gain.high)}"
        said_so.append(f"Listening, {name}: after the last message the belief {verdict} ({amount}).")
    return said_so


COMPARED = {  # of a game: the metric, what it is called, and in how many points a unit is told
    "among_us": ("game/win_rate/crewmates", "Crewmates' wins", 100),
    "dond": ("game/score", "Score", 1),
}


def comparisons(arms: Sequence[ArmRun], runs: Sequence[Run]) -> list[str]:
    """How far arms of one game are apart in what is played for, paired by seed, or by game where there is one seed."""
    trained = [arm_label(run, runs) for run in runs]
    if len({run.game for run in runs}) > 1 or trained != [run.arm for run in runs] or runs[0].game not in COMPARED:
        return []
    metric, what, unit = COMPARED[runs[0].game]
    rows = arm_differences([a for a in arms if metric in a.metrics], pairs_of(trained, runs[0].game), [metric])
    shown = [row for row in rows if not row.arm.endswith(" - base")]
    if not shown:
        return []
    each = [f"{row.arm}: {unit * row.mean:+.1f} ({unit * row.low:+.1f} to {unit * row.high:+.1f})" for row in shown]
    by = "seed" if max(row.seeds for row in shown) > 1 else "game; of one training seed"
    return [f"{what}, differences in points, paired by {by}: {'; '.join(each)}."]


def equal_compute(runs: Sequence[Run]) -> list[ArmRun]:
    """What `at_equal_compute` finds of runs of several arms."""
    keys = [(arm_label(run, runs), run.seed) for run in runs]
    if len({arm for arm, _ in keys}) < 2:
        return []
    played = [int((run.config.get("eval") or {}).get("games") or 0) for run in runs]
    return at_equal_compute(
        {key: run.curves for key, run in zip(keys, runs, strict=True)},
        {key: (run.games, games) for key, run, games in zip(keys, runs, played, strict=True)},
    )


def costs(runs: Sequence[Run]) -> list[str]:
    """How arms compare where they have cost the same, in a sentence; none where that is not known."""
    arms = equal_compute(runs)
    shared = set.intersection(*(set(arm.metrics) for arm in arms)) if arms else set()
    metric = next((m for game in dict.fromkeys(run.game for run in runs) for m in headline(game, shared)), None)
    if metric is None:
        return []
    parts = []
    for arm, found in columns_of(arms).items():
        cell = _cell(found[metric], wording(metric))
        assert cell is not None
        spread = f"{cell['range']}; " if cell["range"] else ""
        parts.append(f"{arm} {cell['mean']} ({spread}{found[GAMES].mean:,.0f} training games)")
    passes = np.mean([arm.metrics[PASSES].mean for arm in arms]) / 1e6
    label = wording(metric).label
    return [f"{label} at equal compute, {passes:.3g} million token passes of training: {', '.join(parts)}."]


def own_ends(columns: Mapping[str, Metrics]) -> dict[str, str]:
    """The endings of a game that the library does not know, in its own words."""
    found = of_ones_own(name for metrics in columns.values() for name in metrics if name.startswith("game/how/"))
    return {how: how for how in (name.removeprefix("game/how/") for name in found)}


def endings(columns: Mapping[str, Metrics], ends: Mapping[str, str] = ENDS) -> list[dict[str, Any]]:
    """How games ended, a bar for each column: shares in the order of `ends`, those that never happened left out."""
    bars = []
    for name, metrics in columns.items():
        shares = [(i, metrics[f"game/how/{how}"].mean) for i, how in enumerate(ends) if f"game/how/{how}" in metrics]
        if shares:
            bars.append({"name": name, "shares": [{"end": i, "share": share} for i, share in shares if share > 0]})
    return bars


# --- Figures ----------------------------------------------------------------------------------------------------------


def new_panel() -> tuple[Figure, Axes]:
    """A small plot in the page's colours."""
    figure = Figure(figsize=(4.0, 2.5))
    axes = figure.add_axes((0.13, 0.19, 0.85, 0.77))  # a place that fits all panels, so that each is laid out only once
    style_axes(axes)
    return figure, axes


def style_axes(axes: Axes, ink: str = INK, muted: str = MUTED, grid: str = GRID) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(grid)
    axes.tick_params(colors=muted, labelsize=9, length=0)
    axes.grid(axis="y", color=grid, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.label.set_color(muted)
    axes.yaxis.label.set_color(muted)
    axes.title.set_color(ink)


def to_svg(figure: Figure, name: str, label: str) -> Markup:
    """The figure as inline SVG: scales with the page, its colours are the page's variables, its ids its own."""
    buffer = io.StringIO()
    # The salt makes ids of clip paths unique within the page and the same from one build to the next.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    head, body = svg.split(">", 1)
    viewbox = head[head.index("viewBox") :].split('"')[1]
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    body = body.replace("'DejaVu Sans', ", "").replace("'DejaVu Sans'", "sans-serif")
    return (
        Markup(f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{viewbox}" role="img">')
        + Markup("<title>{}</title>").format(label)
        + Markup(body)
    )


def by_games(runs: Sequence[Run]) -> bool:
    """Whether curves can be drawn over games played; else over iterations."""
    return all(run.games for run in runs)


def training_panels(
    runs: Sequence[Run], columns: Mapping[str, Metrics], colours: Mapping[str, int]
) -> list[dict[str, Any]]:
    """One panel for each quantity that any run logged over training."""
    panels = []
    scale = by_games(runs)
    own = of_ones_own(name for run in runs for row in run.curves for name in row)
    for panel in (*PANELS, *(Panel(name, wording(name).label, own_unit(name)) for name in own)):
        if panel.metric == "game/score" and any(run.game == "among_us" for run in runs):
            continue  # what the learners were paid: the wins once more
        curves = (_curve(run, panel, phase, scale) for run in runs for phase in ("train", "eval"))
        if not any(any(curve.values()) for curve in curves):
            continue  # nobody logged it, or it never happened
        figure, axes = new_panel()
        for arm in dict.fromkeys(arm_label(run, runs) for run in runs):
            mine = [run for run in runs if arm_label(run, runs) == arm]
            _draw_arm(axes, mine, panel, SERIES[colours[arm]], scale)
        _keep_lines_in_sight(axes)
        for ceiling in {round(m[panel.ceiling].mean, 3) for m in columns.values() if panel.ceiling in m}:
            _level(axes, ceiling, f"best possible {number(ceiling)}")
        chances = [m[panel.chance].mean for m in columns.values() if panel.chance in m]
        if chances:  # differs a little from arm to arm, with who is alive when
            _level(axes, float(np.mean(chances)), "by chance")
        if panel.unit.startswith("share"):
            _limits(axes, 0.0, 1.0)
        axes.set_xlabel("training games" if scale else "iteration", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.margins(x=0.02)
        axes.set_xlim(left=-0.02 * axes.get_xlim()[1])
        svg = to_svg(figure, panel.metric, f"{panel.title} over training")
        panels.append({"title": panel.title, "unit": panel.unit, "metric": panel.metric, "svg": svg})
    return panels


def own_unit(metric: str) -> str:
    """What a term or a game of one's own is measured in, as far as that is known."""
    return "share of games" if wording(metric).percent else "unweighted"


def _keep_lines_in_sight(axes: Axes) -> None:
    """Bands of two or three seeds can be many times wider than all there is to see: they are cut beyond the span of the
    lines above and below them."""
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    low, high = float(drawn.min()), float(drawn.max())
    bottom, top = axes.get_ylim()
    if high > low:
        axes.set_ylim(max(bottom, 2 * low - high), min(top, 2 * high - low))


def _level(axes: Axes, height: float, label: str) -> None:
    axes.axhline(height, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.annotate(
        label, (1, height), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right",
        fontsize=8, color=MUTED,
    )  # fmt: skip


def _limits(axes: Axes, low: float, high: float) -> None:
    """Never beyond what a share can be, with a little room for lines at the edges."""
    bottom, top = axes.get_ylim()
    margin = 0.03 * (high - low)
    axes.set_ylim(max(bottom, low - margin), min(top, high + margin))


def _draw_arm(axes: Axes, runs: Sequence[Run], panel: Panel, colour: str, scale: bool) -> None:
    """An arm's seeds as thin lines and their mean as a bold one; evaluation games as dots, with a band where there are
    several seeds."""
    training = [curve for run in runs if (curve := _curve(run, panel, "train", scale))]
    for curve in training:
        axes.plot(list(curve), list(curve.values()), color=colour, linewidth=0.8, alpha=0.35)
    if training:
        x, intervals = mean_curve(training)
        axes.plot(x, _smooth(np.array([i.mean for i in intervals])), color=colour, linewidth=1.8)
    watched = [curve for run in runs if (curve := _curve(run, panel, "eval", scale))]
    if watched:
        _draw_mean(axes, watched, colour, panel.metric, line=not training)


def _draw_mean(
    axes: Axes, curves: Sequence[dict[int, float]], colour: str, metric: str, line: bool, label: str = ""
) -> None:
    """The mean of a metric over seeds as dots, with its 95 % interval as a band where there are several."""
    x, intervals = mean_curve(curves)
    axes.plot(
        x, [i.mean for i in intervals], color=colour, linewidth=1.6 if line else 0, marker="o", markersize=4.2,
        label=label,
    )  # fmt: skip
    if len(curves) > 1:
        low, high = np.clip([(i.low, i.high) for i in intervals], *bounds(metric)).T
        axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0)


def _curve(run: Run, panel: Panel, phase: str, scale: bool) -> dict[int, float]:
    """Training games (or iterations, where `scale` is off) -> value."""
    return {
        int(row["iteration"]) * (run.games if scale else 1): panel.sign * float(row[panel.metric])
        for row in run.curves
        if row.get("phase") == phase and panel.metric in row
    }


def over_compute(runs: Sequence[Run], metric: str, points: int = 17) -> list[dict[int, float]]:
    """Token passes of training -> value in evaluation games, of each run at the same points, linear between two
    evaluations, as far as all of them go. Empty where a run does not say what it cost."""
    curves = []
    for run in runs:
        watched = [row for row in run.curves if row["phase"] == "eval" and metric in row and PASSES in row]
        curves.append({int(row[PASSES]): float(row[metric]) for row in watched})
    end = min((max(curve, default=0) for curve in curves), default=0)
    if not end:
        return []
    grid = np.linspace(0, end, points).astype(int)
    values = [np.interp(grid, [*curve], [*curve.values()]) for curve in curves]
    return [dict(zip(grid.tolist(), found.tolist(), strict=True)) for found in values]


def mean_curve(curves: Sequence[dict[int, float]]) -> tuple[list[int], list[Interval]]:
    """Mean over seeds with its interval, at the points that all of them reached."""
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    return shared, [seed_mean([curve[x] for curve in curves]) for x in shared]


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over a twentieth of the curve; windows shrink at the ends, so no end is pulled."""
    half = len(values) // 40
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def belief_panels(runs: Sequence[Run], colours: Mapping[str, int]) -> list[dict[str, Any]]:
    """Belief by number of messages heard, with the exact prior on the same questions, or equal odds for all candidates.

    Where there is no exact prior, also by how much an answer beats the same listener's answer before it.
    """
    panels = []
    found = mean_entries(runs)
    floor = "prior" if any("prior_log_loss" in entry for entries in found.values() for entry in entries) else "chance"
    for metric, title, unit in (
        ("log_loss", "Log-loss by message", "nats a question, lower is better"),
        ("accuracy", "Accuracy by message", "share of answers"),
        ("gain", "Gain by message", "nats, against the listener's answer before"),
    ):
        if metric == "gain" and floor == "prior":
            continue
        figure, axes = new_panel()
        drawn = False
        for name, entries in found.items():
            points = [(k, e[metric]) for k, e in enumerate(entries) if metric in e]
            if not points:
                continue
            drawn = True
            x = [k for k, _ in points]
            colour = SERIES[colours.get(name, 0)]
            axes.plot(x, [i.mean for _, i in points], color=colour, linewidth=1.8, marker="o", markersize=4)
            band = np.array([(i.low, i.high) for _, i in points]).T
            low, high = band.clip(0, 1) if unit.startswith("share") else band
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
            below = [entries[k][f"{floor}_{metric}"].mean for k in x if f"{floor}_{metric}" in entries[k]]
            if len(below) == len(x):
                axes.plot(x, below, color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
        if drawn:
            if metric == "gain":
                axes.axhline(0, color=MUTED, linewidth=1)
            axes.set_xlabel("messages so far", fontsize=9)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            if unit.startswith("share"):
                _limits(axes, 0.0, 1.0)
            panels.append(
                {"title": title, "unit": unit, "metric": f"belief/{metric}", "svg": to_svg(figure, title, title)}
            )
    return panels


def _by_message(run: Run) -> list[list[dict[str, Any]]]:
    return list(run.evaluation.get("belief_by_message", {}).values())


def mean_entries(runs: Sequence[Run]) -> dict[str, list[dict[str, TableRow]]]:
    """Belief by message of each arm: over its seeds, where it has several, each counting the same (`ablation_table`).

    What a seed lacks, or has of fewer than ten games, which say nothing, is left out. One base counts once.
    """
    found: dict[str, list[list[dict[str, Any]]]] = {}  # name -> entries of each model
    bases = base_names(runs)
    for run in runs:
        for condition, entries in run.evaluation.get("belief_by_message", {}).items():
            name = arm_label(run, runs) if condition == TRAINED else bases.get((run.folder, condition))
            if name:
                found.setdefault(name, []).append(entries)
    means: dict[str, list[dict[str, TableRow]]] = {}
    for name, models in found.items():
        means[name] = []
        for number_heard in range(max(map(len, models))):
            here = [entries[number_heard] if number_heard < len(entries) else {} for entries in models]
            each = [
                ArmRun(name, number, {f"belief/{metric}": Interval.from_json(own) for metric, own in entry.items()})
                for number, entry in enumerate(here)
            ]
            told = [metric for metric in each[0].metrics if all(_tells(one.metrics.get(metric)) for one in each)]
            means[name].append({row.metric.removeprefix("belief/"): row for row in ablation_table(each, told)})
    return means


def _tells(value: Interval | None) -> bool:
    return value is not None and value.n >= 10


@dataclass(frozen=True)
class Published:
    """A figure of the paper that a table stands beside."""

    mean: float
    low: float
    high: float


def ablation_figure(
    rows: Sequence[TableRow],
    metrics: Sequence[str],
    path: Path,
    title: str = "",
    published: Mapping[str, Published] | None = None,
    runs: Sequence[Run] = (),
    curve: str = "",
) -> None:
    """Means and intervals of each arm, a panel for each metric, as a file of its own (`.svg`, `.png` or `.pdf`).

    `published` stands in the first panel as open markers, by arm. With `curve`, the learning curves of that metric in
    evaluation games follow, means over the seeds of `runs` with 95 % bands: over training games, and where runs say
    what they have cost, over that.
    """
    arms = list(dict.fromkeys(row.arm for row in rows))
    costed = bool(curve) and len({run.arm for run in runs}) > 1 and bool(over_compute(runs, curve))
    curves = bool(curve) + costed
    count = len(metrics) + curves
    height = max(0.42 * len(arms) + 1.1, 3.1 if curve else 0)
    figure = Figure(figsize=(3.1 * count + 0.8 + curves, height), layout="constrained")
    ratios = [1.0] * len(metrics) + [1.4] * curves
    panels = figure.subplots(1, count, squeeze=False, gridspec_kw={"width_ratios": ratios})[0]
    for i, (axes, metric) in enumerate(zip(panels, metrics, strict=False)):
        style_axes(axes, ink="#222222", muted="#555555", grid="#dddddd")
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color="#dddddd", linewidth=0.7)
        for y, arm in enumerate(arms):
            colour = PAPER[y % len(PAPER)]
            for row in rows:
                if (row.arm, row.metric) == (arm, metric):
                    if math.isfinite(row.low):
                        axes.plot(
                            [row.low, row.high], [y, y], color=colour, linewidth=2.5, alpha=0.5, solid_capstyle="round"
                        )
                    axes.plot([row.mean], [y], color=colour, marker="o", markersize=6)
            if i == 0 and published and arm in published:
                theirs, beside = published[arm], y + 0.26
                axes.plot([theirs.low, theirs.high], [beside, beside], color="#777777", linewidth=1)
                axes.plot([theirs.mean], [beside], color="#777777", marker="o", markersize=5, markerfacecolor="white")
        if wording(metric).percent:  # intervals may be wider than what there is
            left, right = axes.get_xlim()
            axes.set_xlim(max(left, -0.02), min(right, 1.02))
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.set_yticks(range(len(arms)), arms if i == 0 else [""] * len(arms))
        axes.set_title(wording(metric).label, fontsize=10, loc="left")
        axes.set_xlabel(f"{metric} (open: published)" if i == 0 and published else metric, fontsize=8)
    for axes, compute in zip(panels[len(metrics) :], (False, True), strict=False):
        style_axes(axes, ink="#222222", muted="#555555", grid="#dddddd")
        axes.sharey(panels[len(metrics)])
        scale = by_games(runs)
        for y, arm in enumerate(arms):
            mine = [run for run in runs if run.arm == arm]
            if compute:
                drawn = over_compute(mine, curve)
            else:
                drawn = [found for run in mine if (found := _curve(run, Panel(curve, "", ""), "eval", scale))]
            if drawn:
                _draw_mean(axes, drawn, PAPER[y % len(PAPER)], wording(curve).percent, line=True, label=arm)
        label = wording(curve).label
        axes.set_title(f"{label}, over {'compute' if compute else 'training'}", fontsize=10, loc="left")
        unit = "million token passes" if compute else "training games" if scale else "iteration"
        axes.set_xlabel(unit, fontsize=8)
        if compute:
            axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}")
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    with writing(path), matplotlib.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


# --- What is said most ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speaker:
    """How the players whom a condition measures put their messages in its recorded games, the commonest form first."""

    arm: str
    seed: int
    games: int
    forms: list[Form]

    @property
    def messages(self) -> int:
        return sum(form.uses for form in self.forms)


def speakers(runs: Sequence[Run]) -> list[Speaker]:
    """Of each run and, once for each base, of what it began from. Runs without recorded games are left out."""
    found: list[Speaker] = []
    bases = base_names(runs)
    for run in runs:
        for condition, player in MEASURED.items():
            name = arm_label(run, runs) if condition == TRAINED else bases.get((run.folder, condition))
            if name and (games := run.transcripts.get(condition)):
                found.append(Speaker(name, run.seed, len(games), forms(games, player)))
    return sorted(found, key=lambda speaker: not speaker.arm.startswith("base"))


# --- Transcripts and run cards ----------------------------------------------------------------------------------------


def shown_games(runs: Sequence[Run], count: int) -> list[dict[str, Any]]:
    """The first games of each arm's first run, trained beside untrained where both played the same game."""
    firsts: dict[str, Run] = {}
    for run in runs:
        firsts.setdefault(arm_label(run, runs), run)
    each = max(1, count // len(firsts))
    shown = []
    for arm, run in firsts.items():
        evaluated = [games for name, games in run.transcripts.items() if name.startswith("iteration-")]
        trained = run.transcripts.get(TRAINED) or (evaluated[-1] if evaluated else [])
        # Many games of Among Us end without a word; those where somebody spoke are what there is to read.
        if any(map(is_among_us, trained)):
            trained = [t for t in trained if any(turn["message"] for turn in t["turns"])] or trained
        others = {name: {t["seed"]: t for t in games} for name, games in run.transcripts.items() if name == "base"}
        for transcript in trained[:each]:
            shown.append(game_view(transcript, arm))
            shown.extend(
                game_view(of[transcript["seed"]], name) for name, of in others.items() if transcript["seed"] in of
            )
        planned = [games for name, games in run.transcripts.items() if name.startswith("planned-")]
        shown.extend(game_view(games[0], f"{arm}, in training, planned") for games in planned[-1:])
    return shown


def game_view(transcript: Transcript, condition: str) -> dict[str, Any]:
    """What the template shows of one game. All text is plain: the template escapes it."""
    if is_among_us(transcript):
        return among_us_view(transcript, condition)
    agents = list(transcript["players"])
    rows = []
    for turn in transcript["turns"]:
        moved: dict[str, list[dict[str, Any]]] = {}
        for shift in shifts(transcript, turn):
            moved.setdefault(shift.listener, []).append(
                {
                    "topic": shift.question,
                    "answer": shift.answer,
                    "before": shift.before,
                    "after": shift.after,
                    "rose": shift.after >= shift.before,
                }
            )
        rows.append(
            {
                "agent": turn["agent"],
                "seat": agents.index(turn["agent"]),
                "role": turn["role"],
                "text": printable(said(turn)),
                "kind": "refused" if turn["error"] else "message" if turn["message"] else "act",
                "error": printable(turn["error"]),
                "cut": CUT if turn.get("cut") else "",
                "moved": [
                    {"listener": listener, "bars": bars, "total": sum(b["after"] - b["before"] for b in bars)}
                    for listener, bars in moved.items()
                ],
                "plan": plan_text(turn),
                "rewards": {name: value for name, value in turn["rewards"].items() if value},
            }
        )
    facts = transcript["facts"]
    table = None
    if is_dond(transcript):
        table = {"counts": facts["counts"], "values": dict(zip(agents, facts["values"], strict=True))}
    return {
        "condition": condition,
        "seed": transcript["seed"],
        "chapters": None,
        "players": transcript["players"],
        "roles": transcript["roles"],
        "table": table,
        "turns": rows,
        "outcome": outcome_text(transcript),
    }


def among_us_view(transcript: Transcript, condition: str) -> dict[str, Any]:
    """The same of Among Us: who is who, then moves (to fold) and discussions in turn."""
    facts, names, ends = transcript["facts"], transcript["facts"]["names"], fates(transcript)
    imposters = {names[agent] for agent in facts["imposters"]}
    seats = [
        {
            "name": names[agent],
            "role": transcript["roles"][agent],
            "player": held_by,
            "tasks": len(facts["tasks"][agent]) or "",
            "end": ends[names[agent]],
        }
        for agent, held_by in sorted(transcript["players"].items())
    ]
    chapters = [
        _moves_view(chapter, [seat["name"] for seat in seats])
        if isinstance(chapter, Moves)
        else _meeting_view(chapter, transcript, imposters)
        for chapter in story(transcript)
    ]
    return {
        "condition": condition,
        "seed": transcript["seed"],
        "chapters": chapters,
        "seats": seats,
        "imposters": imposters,
        "truth": " or ".join(sorted(imposters)),
        "outcome": outcome_text(transcript),
    }


def _moves_view(moves: Moves, names: Sequence[str]) -> dict[str, Any]:
    """A row for each step at which anybody chose, a cell for each player."""
    steps = list(moves.by_step)
    marked = {(deed.step, deed.who) for deed in moves.deeds}
    return {
        "kind": "moves",
        "first": steps[0],
        "last": steps[-1],
        "count": sum(map(len, moves.by_step.values())),
        "deeds": [{"step": deed.step, "act": deed.act.value, "text": str(deed)} for deed in moves.deeds],
        "names": names,
        "rows": [
            {
                "step": step,
                "cells": [
                    {
                        "text": " ".join(filter(None, chosen[name])) if name in chosen else "",
                        "deed": (step, name) in marked,
                    }
                    for name in names
                ],
            }
            for step, chosen in moves.by_step.items()
        ],
    }


def _meeting_view(meeting: Meeting, transcript: Transcript, imposters: set[str]) -> dict[str, Any]:
    """Each message with the belief of those who heard it, before and after; then who voted for whom."""
    names = transcript["facts"]["names"]
    messages = []
    for turn in meeting.messages:
        bars = [
            {"name": names[s.listener], "before": s.before, "after": s.after, "rose": s.after >= s.before}
            for s in crew_shifts(transcript, turn)
        ]
        pieces = mentions(printable(said(turn)))
        messages.append(
            {
                "name": names[turn["agent"]],
                "role": turn["role"],
                "player": transcript["players"][turn["agent"]],
                "pieces": [{"text": text, "marked": name in imposters} for text, name in pieces],
                "error": printable(turn["error"]),
                "cut": CUT if turn.get("cut") else "",
                "bars": bars,
                "total": sum(bar["after"] - bar["before"] for bar in bars),
                "rewards": {name: value for name, value in turn["rewards"].items() if value},
            }
        )
    return {
        "kind": "meeting",
        "step": meeting.step,
        "title": opening(meeting),
        "living": meeting.living,
        "before": meeting.before,
        "messages": messages,
        "votes": [
            {
                "voter": voter,
                "choice": choice,
                "right": choice in imposters,
                "belief": meeting.after.get(voter),
                "plan": meeting.plans.get(voter, ""),
            }
            for voter, choice in meeting.votes.items()
        ],
        "verdict": verdict(meeting),
        "caught": meeting.ejected in imposters,
    }


def run_card(run: Run) -> dict[str, Any]:
    """The run card without its figures, which the table shows, and the configuration as text."""
    shown = {name: value for name, value in run.card.items() if name not in ("figures", "run")}
    return {
        "name": run.folder.name,
        "arm": run.arm,
        "seed": run.seed,
        "entries": {name.replace("_", " "): _flat(value) for name, value in shown.items()},
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
    }


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return " · ".join(f"{name} {_flat(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_flat, value))
    return "none" if value is None else str(value)

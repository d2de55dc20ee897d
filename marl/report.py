"""Run folders -> one self-contained `report.html`: what was run, table, curves, beliefs, transcripts, run cards.

Figures are drawn by matplotlib as inline SVG in colours that the page sets, so that they follow light, dark and print.
Whatever a model wrote is escaped by the template engine; only SVG made here is passed through.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from marl.errors import UserError
from marl.evaluate import Metrics, conditions_from_json
from marl.stats import ArmRun, Interval, TableRow, ablation_table, number
from marl.transcripts import Transcript, is_dond, outcome_text, printable, read_episodes, said, shifts

TEMPLATES = Path(__file__).parent / "templates"

# Colours that matplotlib draws with, and the page's variables that take their place.
INK, MUTED, GRID = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0400{i:02x}" for i in range(8))
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--line", **{c: f"--c{i}" for i, c in enumerate(SERIES)}}
# The same on paper, for figures in files of their own: Okabe and Ito's palette, told apart without red and green.
PAPER = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#6a51a3", "#555555")

TRAINED = "trained"  # the condition of `evaluation.json` that a run's arm stands for


@dataclass(frozen=True)
class Wording:
    """How a metric is shown."""

    label: str
    note: str
    percent: bool = False
    decimals: int | None = None  # None: as many as `number` gives

    def show(self, value: float) -> str:
        if self.percent:
            return f"{100 * value:.1f} %"
        return number(value) if self.decimals is None else f"{value:.{self.decimals}f}"


WORDING = {
    "game/win_rate/crewmates": Wording("Crewmates win", "share of all games", percent=True),
    "game/win_rate/imposters": Wording("Imposters win", "share of all games", percent=True),
    "game/score": Wording("Score", "R_i + λ R_j, mean over players and all games"),
    "game/score_ceiling": Wording("Best possible score", "what the best deal of each of these games would give"),
    "game/score_agreed": Wording("Score, agreed games", "the same over games with a deal"),
    "game/points": Wording("Points", "R_i alone, mean over players and all games"),
    "game/points_agreed": Wording("Points, agreed games", "the same over games with a deal"),
    "game/joint": Wording("Joint points", "both players together"),
    "game/agreement": Wording("Agreement", "games that end in a valid deal", percent=True),
    "game/pareto": Wording(
        "Pareto, all games", "no allocation is better for one and as good for the other", percent=True
    ),
    "game/pareto_agreed": Wording("Pareto, agreed games", "the same over games with a deal", percent=True),
    "belief/gain_over_prior": Wording(
        "Learned from talk", "nats a question by which the last answer beats the exact prior"
    ),
    "belief/gain_over_start": Wording(
        "Gain over the start", "nats a question, last answer against the one before any message"
    ),
    "belief/log_loss": Wording("Belief, log-loss", "nats a question, all answers"),
    "belief/first_log_loss": Wording("Belief, first log-loss", "nats a question, before any message"),
    "belief/last_log_loss": Wording("Belief, last log-loss", "nats a question, after the last message"),
    "belief/prior_log_loss": Wording("Exact prior's log-loss", "what the rules alone tell, on the same questions"),
    "belief/accuracy": Wording("Belief, accuracy", "the truth is the most probable answer, all answers", percent=True),
    "belief/first_accuracy": Wording("Belief, first accuracy", "before any message", percent=True),
    "belief/last_accuracy": Wording("Belief, last accuracy", "the truth is the most probable answer", percent=True),
    "belief/prior_accuracy": Wording("Exact prior's accuracy", "on the same questions", percent=True),
    "belief/brier": Wording("Belief, Brier score", "0 is perfect, 2 is certain and wrong; all answers"),
    "belief/first_brier": Wording("Belief, first Brier score", "before any message"),
    "belief/last_brier": Wording("Belief, last Brier score", "after the last message"),
    "belief/prior_brier": Wording("Exact prior's Brier score", "on the same questions"),
    "speech/belief_change": Wording("What a message does", "probability of the truth it adds, summed over questions"),
    "speech/log_belief_change": Wording("The same in nats", "log-probability of the truth that a message adds"),
    "talk/turns": Wording("Turns a game", "messages and proposals"),
    "talk/messages": Wording("Messages a game", ""),
    "talk/tokens_per_turn": Wording("Tokens a turn", "sampled by the model, end marker included"),
    "talk/words_per_message": Wording("Words a message", "white-space words"),
    "talk/vocabulary": Wording("Vocabulary", "different white-space words in up to 500 games", decimals=0),
    "errors/per_turn": Wording("Refused replies", "per turn"),
    "errors/aborted": Wording("Aborted games", "too many refused replies in a row", percent=True),
}
# The first table's rows, in this order; the others follow in the full one.
HEADLINE = (
    "game/win_rate/crewmates", "game/score", "game/score_ceiling", "game/agreement", "game/pareto",
    "game/pareto_agreed", "belief/gain_over_prior", "belief/last_log_loss", "belief/prior_log_loss",
    "belief/last_accuracy", "speech/belief_change", "talk/turns", "talk/vocabulary", "errors/per_turn",
)  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """One small plot over training. `sign` turns a loss that is minus a quantity back into it."""

    metric: str
    title: str
    unit: str
    sign: float = 1.0
    ceiling: str = ""  # metric of the evaluation that is the most there is


PANELS = (
    Panel("game/win_rate/crewmates", "Crewmates' wins", "share of games"),
    Panel("game/score", "Score", "points per player", ceiling="game/score_ceiling"),
    Panel("game/agreement", "Agreement", "share of games"),
    Panel("game/pareto", "Pareto-optimal", "share of all games"),
    Panel("loss/listening", "Listening loss", "nats a question"),
    Panel("belief/accuracy", "Belief accuracy", "share of answers"),
    Panel("reward/speaking", "Speaking reward", "change of belief a message"),
    Panel("loss/entropy", "Entropy", "nats a token", sign=-1.0),
    Panel("loss/kl", "KL to the base", "nats a token"),
    Panel("talk/turns", "Turns", "a game"),
    Panel("errors/per_turn", "Refused replies", "per turn"),
)


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
    def conditions(self) -> dict[str, Metrics]:
        return conditions_from_json(self.evaluation) if self.evaluation else {}


def read_run(folder: Path) -> Run:
    """Reads what a run's folder holds so far. UserError if it is no run's folder, or a file in it is malformed."""
    folder = Path(folder)
    config_path = folder / "config.yaml"
    if not config_path.exists():
        raise UserError(
            f"{folder} is not a run's folder: it has no config.yaml; name folders that experiments.train wrote"
        )
    try:
        config = yaml.safe_load(config_path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{config_path}: expected YAML ({str(error).splitlines()[0]})") from error
    card = _read_json(folder / "run.json")
    return Run(
        folder=folder,
        arm=str(card.get("arm") or config.get("arm") or folder.name),
        seed=int(card.get("seed", config.get("seed", 0))),
        config=config,
        card=card,
        curves=_read_lines(folder / "metrics.jsonl"),
        evaluation=_read_json(folder / "evaluation.json"),
        transcripts={path.stem: read_episodes(path) for path in sorted((folder / "episodes").glob("*.jsonl"))},
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UserError(f"{path}: expected one JSON object ({error})") from error


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; a last line that a stopped run left half written is passed over."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            rows.append(dict(json.loads(line)))
        except ValueError as error:
            if i < len(lines) - 1:
                raise UserError(f"{path}, line {i + 1}: expected one JSON object, got {line[:60]!r}") from error
    return rows


# --- The page ---------------------------------------------------------------------------------------------------------


def build_report(run_folders: Sequence[Path], out_path: Path, title: str, games_shown: int = 4) -> None:
    """Writes the report of these runs to `out_path`, whole or not at all.

    Runs with the same arm (`run.json`, else `config.yaml`, else the folder's name) are seeds of one arm. `games_shown`:
    transcripts of each condition in all. UserError if there is no run, or a folder is not one.
    """
    if not run_folders:
        raise UserError("no runs to report on: name at least one run's folder")
    runs = [read_run(folder) for folder in run_folders]
    arms = arm_runs(runs)
    columns = columns_of(arms)
    # Colours stand for arms, everywhere in the page alike.
    names = list(dict.fromkeys([*columns, *(arm_label(run, runs) for run in runs)]))
    colours = {name: i % len(SERIES) for i, name in enumerate(names)}
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html").render(
        title=title,
        facts=what_was_run(runs),
        findings=findings(columns),
        columns=list(columns),
        colours=colours,
        headline=table_rows(
            columns, [name for name in HEADLINE if any(name in found for found in columns.values())], colours
        ),
        rest=table_rows(columns, _not_headline(columns), colours),
        seeds=max((interval.n for interval in _seed_counts(arms).values()), default=1),
        panels=training_panels(runs, columns, colours),
        beliefs=belief_panels(runs, colours),
        games=shown_games(runs, games_shown),
        cards=[run_card(run) for run in runs],
    )
    out_path = Path(out_path)
    out_path.parent.mkdir(parents=True, exist_ok=True)
    temporary = out_path.with_name(out_path.name + ".tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, out_path)


def arm_runs(runs: Sequence[Run]) -> list[ArmRun]:
    """The conditions of all evaluations as arms: `trained` under the run's arm, others (`base`) under their own name.

    Runs often start from one and the same base. Counting it once for each of them would be taking one model for many
    seeds, and its interval would shrink to nothing; so a base of one folder, or of the very same figures, counts once.
    """
    arms: dict[tuple[str, int], ArmRun] = {}
    counted: set[tuple[str, str]] = set()
    for run in runs:
        for condition, found in run.conditions.items():
            if condition == TRAINED:
                name = arm_label(run, runs)
                if (name, run.seed) in arms:
                    raise UserError(
                        f"{run.folder} repeats arm {name!r}, seed {run.seed}: give each run its own seed or arm"
                    )
            else:
                name = condition + _suffix(run, runs)
                figures = json.dumps(run.evaluation["conditions"][condition], sort_keys=True)
                model = (name, str(run.card.get("base") or figures))
                if model in counted:
                    continue
                counted.add(model)
                if (name, run.seed) in arms:
                    name = f"{name} of {arm_label(run, runs)}"
            arms[(name, run.seed)] = ArmRun(name, run.seed, found)
    untrained = [arm for arm in arms.values() if arm.arm.startswith("base")]  # what training started from comes first
    return untrained + [arm for arm in arms.values() if arm not in untrained]


def arm_label(run: Run, runs: Sequence[Run]) -> str:
    """The arm's name on the page: `trained` where there is only one arm."""
    several = len({(other.arm, _suffix(other, runs)) for other in runs}) > 1
    return (run.arm if several else TRAINED) + _suffix(run, runs)


def _suffix(run: Run, runs: Sequence[Run]) -> str:
    """Tells runs of different games apart where a report shows several."""

    def game(of: Run) -> tuple[Any, Any]:
        env = of.config.get("env") or {}
        return env.get("game"), env.get("objective")

    if len({game(other) for other in runs}) == 1:
        return ""
    name, objective = game(run)
    return f" ({name}, λ={objective:g})" if isinstance(objective, int | float) else f" ({name})"


def columns_of(arms: Sequence[ArmRun]) -> dict[str, Metrics]:
    """One column for each arm: means over seeds where there are several, else the run's own intervals over games."""
    columns: dict[str, Metrics] = {}
    for row in ablation_table(arms):
        columns.setdefault(row.arm, {})[row.metric] = Interval(row.mean, row.low, row.high, row.games)
    return columns


def _seed_counts(arms: Sequence[ArmRun]) -> dict[str, Interval]:
    return {row.arm: Interval(row.seeds, math.nan, math.nan, row.seeds) for row in ablation_table(arms)}


def _not_headline(columns: Mapping[str, Metrics]) -> list[str]:
    found = {name for metrics in columns.values() for name in metrics} - set(HEADLINE)
    return [name for name in WORDING if name in found] + sorted(found - WORDING.keys())


def table_rows(
    columns: Mapping[str, Metrics], metrics: Sequence[str], colours: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Rows for the template: metric, wording, a cell for each column, and a small plot of the intervals."""
    rows = []
    for metric in metrics:
        wording = WORDING.get(metric, Wording(metric, "", percent=metric.startswith("game/how/")))
        found = {name: metrics[metric] for name, metrics in columns.items() if metric in metrics}
        rows.append(
            {
                "metric": metric,
                "wording": wording,
                "cells": [_cell(found.get(name), wording) for name in columns],
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
    if len(arms) == 1:
        weights = [
            f"{word} {float(weight):g}"
            for word, group, term in (
                ("listening loss", "loss", "listening"),
                ("speaking reward", "reward", "speaking"),
            )
            if (weight := ((first.get(group) or {}).get(term) or {}).get("weight")) is not None
        ]
        if weights:
            sentences.append(f"Weights: {', '.join(weights)}.")
    about = runs[0].evaluation.get("about", {})
    if about.get("games"):
        sentences.append(f"Evaluated on {about['games']} games a condition, the same games for each.")
    return sentences


def findings(columns: Mapping[str, Metrics]) -> list[str]:
    """What the table says, in sentences that claim no more than the intervals do."""
    said_so: list[str] = []
    for metric in ("game/win_rate/crewmates", "game/score", "game/agreement"):
        wording = WORDING[metric]
        found = {name: metrics[metric] for name, metrics in columns.items() if metric in metrics}
        if not found:
            continue
        parts = []
        for name, interval in found.items():
            cell = _cell(interval, wording)
            assert cell is not None
            parts.append(f"{name} {cell['mean']}" + (f" ({cell['range']})" if cell["range"] else ""))
        sentence = f"{wording.label}: {', '.join(parts)}"
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


# --- Figures ----------------------------------------------------------------------------------------------------------


def new_panel() -> tuple[Figure, Axes]:
    """A small plot in the page's colours."""
    figure = Figure(figsize=(4.0, 2.5))
    axes = figure.add_subplot()
    _style(axes)
    return figure, axes


def _style(axes: Axes, ink: str = INK, muted: str = MUTED, grid: str = GRID) -> None:
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
        figure.savefig(
            buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None, "Creator": None}
        )
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


def training_panels(
    runs: Sequence[Run], columns: Mapping[str, Metrics], colours: Mapping[str, int]
) -> list[dict[str, Any]]:
    """One panel for each quantity that any run logged over training."""
    panels = []
    for panel in PANELS:
        figure, axes = new_panel()
        drawn = False
        for arm in dict.fromkeys(arm_label(run, runs) for run in runs):
            mine = [run for run in runs if arm_label(run, runs) == arm]
            drawn |= _draw_arm(axes, mine, panel, SERIES[colours[arm]])
        if not drawn:
            continue
        ceilings = {round(m[panel.ceiling].mean, 3) for m in columns.values() if panel.ceiling in m}
        for ceiling in ceilings:
            axes.axhline(ceiling, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
            axes.annotate(
                f"best possible {number(ceiling)}", (1, ceiling), (0, 3), xycoords=("axes fraction", "data"),
                textcoords="offset points", ha="right", fontsize=8, color=MUTED,
            )  # fmt: skip
        if panel.unit.startswith("share"):
            _limits(axes, 0.0, 1.0)
        axes.set_xlabel("iteration", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.margins(x=0.02)
        svg = to_svg(figure, panel.metric, f"{panel.title} over training")
        panels.append({"title": panel.title, "unit": panel.unit, "metric": panel.metric, "svg": svg})
    return panels


def _limits(axes: Axes, low: float, high: float) -> None:
    """Never beyond what a share can be, with a little room for lines at the edges."""
    bottom, top = axes.get_ylim()
    margin = 0.03 * (high - low)
    axes.set_ylim(max(bottom, low - margin), min(top, high + margin))


def _draw_arm(axes: Axes, runs: Sequence[Run], panel: Panel, colour: str) -> bool:
    """An arm's seeds as thin lines, their mean as a bold one, evaluation games as dots. Says whether there was any."""
    training = [_curve(run, panel, "train") for run in runs]
    training = [curve for curve in training if curve]
    watched = [_curve(run, panel, "eval") for run in runs]
    watched = [curve for curve in watched if curve]
    for curve in training:
        axes.plot(list(curve), list(curve.values()), color=colour, linewidth=0.8, alpha=0.35)
    if training:
        x, y = _mean_curve(training)
        axes.plot(x, _smooth(y), color=colour, linewidth=1.8)
    if watched:
        x, y = _mean_curve(watched)
        axes.plot(x, y, color=colour, linewidth=0, marker="o", markersize=4.5)
    return bool(training or watched)


def _curve(run: Run, panel: Panel, phase: str) -> dict[int, float]:
    return {
        int(row["iteration"]): panel.sign * float(row[panel.metric])
        for row in run.curves
        if row.get("phase") == phase and panel.metric in row
    }


def _mean_curve(curves: Sequence[dict[int, float]]) -> tuple[list[int], np.ndarray]:
    """Mean over seeds at the iterations that all of them reached."""
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    return shared, np.array([[curve[i] for i in shared] for curve in curves]).mean(0)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over a twentieth of the curve; windows shrink at the ends, so no end is pulled."""
    half = len(values) // 40
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def belief_panels(runs: Sequence[Run], colours: Mapping[str, int]) -> list[dict[str, Any]]:
    """Log-loss and accuracy by number of messages heard, with the exact prior on the same questions."""
    panels = []
    for metric, title, unit in (
        ("log_loss", "Log-loss by message", "nats a question, lower is better"),
        ("accuracy", "Accuracy by message", "share of answers"),
    ):
        figure, axes = new_panel()
        drawn = False
        for name, entries in _entries(runs).items():
            found = [(k, Interval.from_json(e[metric])) for k, e in enumerate(entries) if metric in e]
            found = [(k, i) for k, i in found if i.n >= 10]  # the few longest games say nothing
            if not found:
                continue
            drawn = True
            x = [k for k, _ in found]
            colour = SERIES[colours.get(name, 0)]
            axes.plot(x, [i.mean for _, i in found], color=colour, linewidth=1.8, marker="o", markersize=4)
            axes.fill_between(
                x, [i.low for _, i in found], [i.high for _, i in found], color=colour, alpha=0.18, linewidth=0
            )
            floor = [
                Interval.from_json(entries[k][f"prior_{metric}"]).mean for k in x if f"prior_{metric}" in entries[k]
            ]
            if len(floor) == len(x):
                axes.plot(x, floor, color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
        if drawn:
            axes.set_xlabel("messages so far", fontsize=9)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            if unit.startswith("share"):
                _limits(axes, 0.0, 1.0)
            panels.append(
                {"title": title, "unit": unit, "metric": f"belief/{metric}", "svg": to_svg(figure, title, title)}
            )
    return panels


def _entries(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Belief by message of each arm's first run, under the arm's name; the untrained conditions once."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for condition, entries in run.evaluation.get("belief_by_message", {}).items():
            name = arm_label(run, runs) if condition == TRAINED else condition + _suffix(run, runs)
            found.setdefault(name, entries)
    return found


def ablation_figure(rows: Sequence[TableRow], metrics: Sequence[str], path: Path, title: str = "") -> None:
    """Means and intervals of each arm, a panel for each metric, as a file of its own (`.svg`, `.png` or `.pdf`)."""
    arms = list(dict.fromkeys(row.arm for row in rows))
    figure = Figure(figsize=(3.1 * len(metrics) + 0.8, 0.42 * len(arms) + 1.1), layout="constrained")
    for i, (axes, metric) in enumerate(zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True)):
        _style(axes, ink="#222222", muted="#555555", grid="#dddddd")
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color="#dddddd", linewidth=0.7)
        for y, arm in enumerate(arms):
            for row in rows:
                if (row.arm, row.metric) == (arm, metric):
                    colour = PAPER[y % len(PAPER)]
                    if math.isfinite(row.low):
                        axes.plot(
                            [row.low, row.high], [y, y], color=colour, linewidth=2.5, alpha=0.5, solid_capstyle="round"
                        )
                    axes.plot([row.mean], [y], color=colour, marker="o", markersize=6)
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.set_yticks(range(len(arms)), arms if i == 0 else [""] * len(arms))
        axes.set_title(WORDING[metric].label if metric in WORDING else metric, fontsize=10, loc="left")
        axes.set_xlabel(metric, fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


# --- Transcripts and run cards ----------------------------------------------------------------------------------------


def shown_games(runs: Sequence[Run], count: int) -> list[dict[str, Any]]:
    """The first games of each arm's first run, trained beside untrained where both played the same game."""
    firsts: dict[str, Run] = {}
    for run in runs:
        firsts.setdefault(arm_label(run, runs), run)
    each = max(1, count // len(firsts))
    shown = []
    for arm, run in firsts.items():
        trained = run.transcripts.get(TRAINED) or next(reversed(run.transcripts.values()), [])
        others = {name: {t["seed"]: t for t in games} for name, games in run.transcripts.items() if name == "base"}
        for transcript in trained[:each]:
            shown.append(game_view(transcript, arm))
            shown.extend(
                game_view(of[transcript["seed"]], name) for name, of in others.items() if transcript["seed"] in of
            )
    return shown


def game_view(transcript: Transcript, condition: str) -> dict[str, Any]:
    """What the template shows of one game. All text is plain: the template escapes it."""
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
                "moved": [
                    {"listener": listener, "bars": bars, "total": sum(b["after"] - b["before"] for b in bars)}
                    for listener, bars in moved.items()
                ],
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
        "players": transcript["players"],
        "roles": transcript["roles"],
        "table": table,
        "turns": rows,
        "outcome": outcome_text(transcript),
        "won": bool(transcript["outcome"].get("deal") or transcript["outcome"].get("winner")),
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

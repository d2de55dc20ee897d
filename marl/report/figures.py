"""Figures of a report (inline SVG in the page's colours) and of a published table (a file)."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from marl.common.files import write_text, writing
from marl.metrics.stats import Floats, Interval, Metrics
from marl.metrics.tables import ArmRun, TableRow, ablation_table, profiles
from marl.metrics.wording import PANELS, Panel, bounds, number, of_ones_own, wording
from marl.report.runs import TRAINED, Run, arm_label, base_names, by_games, curve_of, mean_curve, smooth

# Placeholder colours for matplotlib; `to_svg` replaces them with the page's variables.
INK, MUTED, GRID = "#010101", "#020202", "#030303"
Entries = dict[str, list[dict[str, TableRow]]]  # beliefs after each number of messages, by arm
SERIES = tuple(f"#0400{i:02x}" for i in range(8))
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--line", **{c: f"--c{i}" for i, c in enumerate(SERIES)}}

# Okabe and Ito's palette for figures in files: readable without red and green. The page's --c0 to --c7 are alike.
PAPER = ("#7a8088", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#6a51a3", "#56b4e9")
HALF = 6.0  # inches: at half the width of a page its text can still be read
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.0f} %")
# An arm has the same colour in all figures, of both games.
COLOURS = {"base": 0, "supervised": 0, "full": 1, "RL+L+S": 1, "trained": 1, "game_only": 2, "RL": 2, "ppo": 2,
           "no_speaking": 3, "RL+L": 3, "no_listening": 4, "RL+S": 4, "listening_only": 5, "L": 5,
           "filtered_bc": 6}  # fmt: skip


def arm_colours(arms: Sequence[str]) -> dict[str, int]:
    """Gives each arm its colour, as an index of SERIES and PAPER.

    `full_colder` has that of `full`, unless both are there. Arms of other names take what is left, in order.
    """
    stems = {arm: arm if arm in COLOURS or (stem := arm.rpartition("_")[0]) in arms else stem for arm in arms}
    named = {arm: COLOURS[stem] for arm, stem in stems.items() if stem in COLOURS}
    left = [i for i in (1, 2, 3, 4, 5, 6, 7, 0) if i not in named.values()] or list(range(len(PAPER)))
    others = [arm for arm in dict.fromkeys(arms) if arm not in named]
    return named | {arm: left[i % len(left)] for i, arm in enumerate(others)}


def paper_colours(arms: Sequence[str]) -> dict[str, str]:
    """Gives each arm its colour on paper."""
    return {arm: PAPER[i] for arm, i in arm_colours(arms).items()}


def profile_panel(arms: Sequence[ArmRun], metrics: Sequence[str], colours: Mapping[str, int]) -> dict[str, Any] | None:
    """Performance profiles of the first of these metrics that arms with several seeds have; None if none does."""
    metric, drawn = next(((name, found) for name in metrics if (found := profiles(arms, name))), ("", {}))
    if not drawn:
        return None
    ends = [threshold for threshold, _ in next(iter(drawn.values()))]
    margin = 0.05 * (max(ends) - min(ends)) or 1.0
    figure, axes = new_panel()
    x = [min(ends) - margin, *ends, max(ends) + margin]
    for arm, steps in drawn.items():
        y = [1.0, *(share for _, share in steps), 0.0]
        axes.step(x, y, where="pre", color=SERIES[colours[arm]], linewidth=1.8)
    axes.set_xlabel(metric, fontsize=9)
    _limit_share(axes)
    return _panel(f"{wording(metric).label}, by seed", "share of seeds that reach at least this", metric, figure)


def _panel(title: str, unit: str, metric: str, figure: Figure, label: str = "") -> dict[str, Any]:
    """A panel for the template."""
    return {"title": title, "unit": unit, "metric": metric, "svg": to_svg(figure, title, label or title)}


def strip_svg(found: Mapping[str, Interval], colours: Mapping[str, int]) -> Markup:
    """The intervals of one metric below one another on a common scale, without axis."""
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


def new_panel() -> tuple[Figure, Axes]:
    """A small plot in the page's colours."""
    figure = Figure(figsize=(4.0, 2.5))
    axes = figure.add_axes((0.13, 0.19, 0.85, 0.77))  # fits all panels, so none is laid out twice
    style_axes(axes, INK, MUTED, GRID)
    return figure, axes


def style_axes(axes: Axes, ink: str = "#222222", muted: str = "#555555", grid: str = "#dddddd") -> None:
    """Draws quiet axes, in colours for paper."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(grid)
    axes.tick_params(colors=muted, labelsize=9, length=0)
    axes.grid(axis="y", color=grid, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.label.set_color(muted)
    axes.yaxis.label.set_color(muted)
    axes.title.set_color(ink)


def heat_map(
    axes: Axes,
    values: Floats,
    lines: Sequence[str],
    columns: Sequence[str],
    low: float,
    high: float,
    text: Callable[[float], str],
    diagonal: bool = False,
) -> None:
    """Draws values (lines, columns) as a map in shades from `low` to `high`, the first line on top, with the `text` of
    each in its cell. `diagonal`: in bold there."""
    axes.pcolormesh(values, cmap="Blues", vmin=low, vmax=high, edgecolor="white")
    axes.invert_yaxis()
    for (line, column), value in np.ndenumerate(values):
        axes.text(
            column + 0.5, line + 0.5, text(value), ha="center", va="center", fontsize=8,
            color="white" if value > (low + high) / 2 else "#222222",
            fontweight="bold" if diagonal and line == column else "normal",
        )  # fmt: skip
    axes.set_yticks(np.arange(len(lines)) + 0.5, lines)
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
    axes.tick_params(labelsize=8, length=0, colors="#555555")
    axes.spines[:].set_visible(False)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure to a file (`.svg`, `.png` or `.pdf`): the same bytes each time, SVG with text as text."""
    if path.suffix != ".svg":
        with writing(path):
            figure.savefig(path, dpi=160)
        return
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = re.sub(r"font-family: '.*?(sans-serif)", r"font-family: \1", buffer.getvalue())
    write_text(path, _with_classes(_shorter(svg)))


def _shorter(svg: str) -> str:
    """Rounds coordinates to a tenth of a point, and drops what nobody sees: indentation, metadata, turns by nothing,
    lines of one point, names of groups, and groups that have nothing but a name."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    svg = re.sub(
        r' (d|x|y)="[^"]*"',
        lambda found: re.sub(r"\d+\.\d+", lambda n: f"{float(n[0]):.1f}".removesuffix(".0"), found[0]),
        svg,
    )
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    svg = re.sub(r'<path d="M [^ ]+ [^ ]+\n"[^>]*/>\n', "", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg).replace("<g/>\n", "")
    inner, found = re.compile(r"<g>\n((?:(?!<g|</g).)*)</g>\n", re.DOTALL), 1
    while found:
        svg, found = inner.subn(r"\1", svg)
    return svg


def _with_classes(svg: str) -> str:
    """Writes each style once, in the style sheet of the file."""
    styles = dict.fromkeys(re.findall(r' style="([^"]*)"', svg))
    names = {style: f"s{i}" for i, style in enumerate(styles)}
    svg = re.sub(r' style="([^"]*)"', lambda found: f' class="{names[found[1]]}"', svg)
    sheet = "".join(f"\n.{name}{{{style}}}" for style, name in names.items())
    return svg.replace("</style>", f"{sheet}\n</style>", 1)


def to_svg(figure: Figure, name: str, label: str) -> Markup:
    """Inline SVG that scales with the page and uses its colours."""
    buffer = io.StringIO()
    # The salt makes ids of clip paths unique in the page and the same in every build.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = _shorter(buffer.getvalue())
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
    """A panel for each quantity that any run logged over training."""
    panels = []
    scale = by_games(runs)
    own = of_ones_own(name for run in runs for row in run.curves for name in row)
    units = {name: "share of games" if wording(name).percent else "unweighted" for name in own}
    for panel in (*PANELS, *(Panel(name, wording(name).label, unit) for name, unit in units.items())):
        if panel.metric == "game/score" and any(run.game == "among_us" for run in runs):
            continue  # repeats the wins
        curves = (curve_of(run, panel, phase, scale) for run in runs for phase in ("train", "eval"))
        if not any(any(curve.values()) for curve in curves):
            continue
        figure, axes = new_panel()
        for arm in dict.fromkeys(arm_label(run, runs) for run in runs):
            mine = [run for run in runs if arm_label(run, runs) == arm]
            _draw_arm(axes, mine, panel, SERIES[colours[arm]], scale)
        _keep_lines_in_sight(axes)
        for ceiling in {round(m[panel.ceiling].mean, 3) for m in columns.values() if panel.ceiling in m}:
            _level(axes, ceiling, f"best possible {number(ceiling)}")
        chances = [m[panel.chance].mean for m in columns.values() if panel.chance in m]
        if chances:  # differs a little between arms
            _level(axes, float(np.mean(chances)), "by chance")
        if panel.unit.startswith("share"):
            _limit_share(axes)
        axes.set_xlabel("training games" if scale else "iteration", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.margins(x=0.02)
        axes.set_xlim(left=-0.02 * axes.get_xlim()[1])
        panels.append(_panel(panel.title, panel.unit, panel.metric, figure, f"{panel.title} over training"))
    return panels


def _keep_lines_in_sight(axes: Axes) -> None:
    """Cuts bands beyond the span of the lines above and below: bands of few seeds can be many times wider."""
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


def _limit_share(axes: Axes) -> None:
    """Limits the axis to what a share can be, with a little room for lines at the edges."""
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom, -0.03), min(top, 1.03))


def _draw_arm(axes: Axes, runs: Sequence[Run], panel: Panel, colour: str, scale: bool) -> None:
    """Draws seeds as thin lines, their smoothed mean as a bold one, evaluation games as dots with a band."""
    training = [curve for run in runs if (curve := curve_of(run, panel, "train", scale))]
    for curve in training:
        axes.plot(list(curve), list(curve.values()), color=colour, linewidth=0.8, alpha=0.35)
    if training:
        x, intervals = mean_curve(training)
        axes.plot(x, smooth(np.array([i.mean for i in intervals])), color=colour, linewidth=1.8)
    watched = [curve for run in runs if (curve := curve_of(run, panel, "eval", scale))]
    if watched:
        _draw_mean(axes, watched, colour, panel.metric, line=not training)


def _draw_mean(axes: Axes, curves: Sequence[dict[int, float]], colour: str, metric: str, line: bool) -> None:
    """Draws the mean over seeds as dots, and the 95 % interval of several seeds as a band."""
    x, intervals = mean_curve(curves)
    axes.plot(x, [i.mean for i in intervals], color=colour, linewidth=1.6 if line else 0, marker="o", markersize=4.2)
    if len(curves) > 1:
        low, high = np.clip([(i.low, i.high) for i in intervals], *bounds(metric)).T
        axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0)


def floor_of(found: Entries) -> str:
    """Returns the floor that beliefs are compared with: the exact `prior`, or `chance` if the game has none."""
    return "prior" if any("prior_log_loss" in entry for entries in found.values() for entry in entries) else "chance"


def belief_panels(found: Entries, colours: Mapping[str, int]) -> list[dict[str, Any]]:
    """Belief by number of messages heard, beside the exact prior, or beside equal odds for all candidates.

    Without an exact prior also the gain: how much an answer beats the same listener's answer before it.
    """
    panels = []
    floor = floor_of(found)
    for metric, title, unit in (
        ("log_loss", "Log-loss by message", "nats a question, lower is better"),
        ("accuracy", "Accuracy by message", "share of answers"),
        ("gain", "Gain by message", "nats, against the listener's answer before"),
    ):
        if metric == "gain" and floor == "prior":
            continue
        drawn = {name: [k for k, e in enumerate(entries) if metric in e] for name, entries in found.items()}
        if not any(drawn.values()):
            continue
        figure, axes = new_panel()
        for name, x in drawn.items():
            if not x:
                continue
            entries, colour = [found[name][k] for k in x], SERIES[colours.get(name, 0)]
            axes.plot(x, [e[metric].mean for e in entries], color=colour, linewidth=1.8, marker="o", markersize=4)
            band = np.array([(e[metric].low, e[metric].high) for e in entries]).T
            low, high = band.clip(0, 1) if unit.startswith("share") else band
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
            below = [e[f"{floor}_{metric}"].mean for e in entries if f"{floor}_{metric}" in e]
            if len(below) == len(x):
                axes.plot(x, below, color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
        if metric == "gain":
            axes.axhline(0, color=MUTED, linewidth=1)
        axes.set_xlabel("messages so far", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if unit.startswith("share"):
            _limit_share(axes)
        panels.append(_panel(title, unit, f"belief/{metric}", figure))
    return panels


def mean_entries(runs: Sequence[Run]) -> Entries:
    """Belief by message of each arm, as means over its seeds (`ablation_table`). One base counts once.

    Leaves out what any seed lacks, or has of fewer than ten games.
    """
    found: dict[str, list[list[dict[str, Any]]]] = {}  # name -> entries of each model
    bases = base_names(runs)
    for run in runs:
        for condition, entries in run.evaluation.get("belief_by_message", {}).items():
            name = arm_label(run, runs) if condition == TRAINED else bases.get((run.folder, condition))
            if name:
                found.setdefault(name, []).append(entries)
    means: Entries = {}
    for name, models in found.items():
        means[name] = []
        for number_heard in range(max(map(len, models))):
            here = [entries[number_heard] if number_heard < len(entries) else {} for entries in models]
            each = [
                ArmRun(name, number, {f"belief/{metric}": Interval.from_json(own) for metric, own in entry.items()})
                for number, entry in enumerate(here)
            ]
            shown = [m for m in each[0].metrics if all(m in one.metrics and one.metrics[m].n >= 10 for one in each)]
            means[name].append({row.metric.removeprefix("belief/"): row for row in ablation_table(each, shown)})
    return means


def ablation_figure(
    rows: Sequence[TableRow],
    metrics: Sequence[str],
    path: Path,
    published: Mapping[str, Interval] | None = None,
    runs: Sequence[Run] = (),
    curve: str = "",
) -> None:
    """Writes means and intervals of each arm, a panel for each metric, as `.svg`, `.png` or `.pdf`.

    `published` figures are open markers in the first panel, by arm. With `curve`, a panel has the learning curves of
    that metric in evaluation games, or in those of training where none were played in between.
    """
    arms = list(dict.fromkeys(row.arm for row in rows))
    colours = paper_colours(arms)
    figure = Figure(figsize=(HALF, max(0.36 * len(arms) + 1.0, 2.5 if curve else 0)), layout="constrained")
    panels = figure.subplots(1, len(metrics) + bool(curve), squeeze=False)[0]
    letters = min(40, 72 // len(panels))  # of a line under a panel
    for i, (axes, metric) in enumerate(zip(panels, metrics, strict=False)):
        style_axes(axes)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color="#dddddd", linewidth=0.7)
        for row in rows:
            if row.metric == metric:
                y, colour = arms.index(row.arm), colours[row.arm]
                axes.plot([row.low, row.high], [y, y], color=colour, linewidth=3, alpha=0.5)  # nan: no line
                axes.plot([row.mean], [y], color=colour, marker="o", markersize=7)
        others = {arm: theirs for arm, theirs in (published or {}).items() if arm in arms and i == 0}
        for arm, theirs in others.items():
            beside = arms.index(arm) + 0.3
            axes.plot([theirs.low, theirs.high], [beside, beside], color="#777777", linewidth=1)
            axes.plot([theirs.mean], [beside], color="#777777", marker="o", markersize=5, markerfacecolor="white")
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.set_yticks(range(len(arms)), arms if i == 0 else [""] * len(arms))
        for label, arm in zip(axes.get_yticklabels(), arms, strict=True):
            label.set_color(colours[arm])
        axes.set_title(wording(metric).label, fontsize=11, loc="left")
        note = "open: published" if others else fill(wording(metric).note.partition(",")[0], letters)
        axes.set_xlabel(note, fontsize=9)
        if wording(metric).percent:
            axes.xaxis.set_major_formatter(PERCENT)
            left, right = axes.get_xlim()
            axes.set_xlim(max(left, -0.02), min(right, 1.02))
    if curve:
        axes, scale, ends = panels[-1], by_games(runs), dict[str, float]()
        style_axes(axes)
        phase = (
            "eval" if any(row["phase"] == "eval" and curve in row for run in runs for row in run.curves) else "train"
        )
        for arm, colour in colours.items():
            mine = [run for run in runs if run.arm == arm]
            if drawn := [found for run in mine if (found := curve_of(run, Panel(curve, "", ""), phase, scale))]:
                _draw_mean(axes, drawn, colour, curve, line=True)
                ends[arm] = float(axes.lines[-1].get_ydata()[-1])
        label_lines(axes, ends, colours)
        axes.set_title(f"{wording(curve).label}, over training", fontsize=11, loc="left")
        axes.set_xlabel("training games" if scale else "iteration", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        if wording(curve).percent:
            axes.yaxis.set_major_formatter(PERCENT)
    save_figure(figure, path)


def label_lines(axes: Axes, ends: Mapping[str, float], colours: Mapping[str, str]) -> None:
    """Writes the name of each line beside the height at which it ends, moved apart where names would overlap."""
    low, high = axes.get_ylim()
    gap = (high - low) * 11 / 72 * axes.figure.dpi / axes.bbox.height  # 11 points
    placed: dict[str, float] = {}
    for name in sorted(ends, key=ends.__getitem__):
        placed[name] = max(ends[name], max(placed.values(), default=-math.inf) + gap)
    lift = float(np.mean([placed[name] - ends[name] for name in ends])) if ends else 0.0
    for name, height in placed.items():
        axes.annotate(
            name, (1, height - lift), (5, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            va="center", fontsize=9, color=colours[name], annotation_clip=False,
        )  # fmt: skip

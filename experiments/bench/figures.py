"""Summaries of the benchmark's measurements: medians and spread, ratios, a table and the chart of cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from experiments.bench.measure import PHASES
from marl.metrics.wording import number
from marl.report.figures import PAPER, save_figure, style_axes

BUSY = 0.9  # processor seconds in a second; a process that has the machine gets at least 1, one for each thread at work
LEARNING = ("collation", "update")  # the phases that are no rollout
ALL = "rollout and update"
UNASKED = ", nothing read for answers"
AXES = {
    "games": "games at once",
    "context": "context, tokens",
    "players": "players (same number of slots)",
    "width": "million parameters",
}
SPEEDS = {
    "games_per_second": "games/s, rollout",
    "games_per_second_with_update": "games/s, with update",
    "tokens_per_second": "tokens/s, rollout",
    "prefill_tokens_per_second": "tokens/s, prefill",
    "decode_tokens_per_second": "tokens/s, decode",
    "mixed_tokens_per_second": "tokens/s, passes that do both",
    "answers_per_second": "belief answers/s, without reads that are prefill's",
    "update_tokens_per_second": "tokens/s, update",
    "seconds_per_game": "s a game, rollout",
    "seconds_per_1000_tokens": "s a 1,000 tokens, rollout",
    "cache_bytes_per_slot": "cache, MB a slot",
    "peak_bytes": "memory's rise, MB",
    "predicted_bytes": "as predicted, MB",
    "times_limit": "times its limit",
    "prefill_of_limit": "prefill: share of its limit",
    "decode_of_limit": "decode: share of its limit",
    "decode_rows": "decode: rows a pass, mean",
    "mixed_of_limit": "passes that do both: share of their limit",
    "update_of_limit": "update: share of its limit",
    "on_processor": "processor s in a s",
}
AROUND = (  # columns of the points around the centre
    "games_per_second", "tokens_per_second", "seconds_per_game", "seconds_per_1000_tokens", "update_tokens_per_second",
    "times_limit", "decode_rows", "peak_bytes", "predicted_bytes",
)  # fmt: skip

Data = Mapping[str, Any]  # a row of benchmark.json


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": median(values), "low": min(values), "high": max(values)}


def summary(repeats: Sequence[Data]) -> dict[str, Any]:
    """Summarises repeats: median, lowest and highest of each figure that all have; shares of time by phase. Empty
    of none."""
    if not repeats:
        return {}
    totals = {phase: sum(r["seconds"][phase] for r in repeats) for phase in PHASES}
    whole = sum(totals.values())
    return {
        "figures": {
            name: spread([r["figures"][name] for r in repeats])
            for name in repeats[0]["figures"]
            if all(name in r["figures"] for r in repeats)
        },
        "shares": {phase: seconds / whole for phase, seconds in totals.items()},
    }


def parts(repeat: Data) -> dict[str, float]:
    """Seconds of the rollout, of the update (with collation), and of both; the last two where there was an update. And
    `UNASKED`, where histories were read again for belief answers alone: the same without."""
    update = sum(repeat["seconds"][phase] for phase in LEARNING)
    rollout = sum(repeat["seconds"].values()) - update
    both = {"update": update, ALL: rollout + update} if update else {}
    asked = repeat["seconds"].get("questions", 0.0)
    unasked = {f"{part}{UNASKED}": both.get(part, rollout) - asked for part in ("rollout", *both) if part != "update"}
    return {"rollout": rollout} | both | (unasked if asked else {})


def ratios(around: Sequence[Data], baselines: Sequence[Data]) -> dict[str, dict[str, dict[str, float]]]:
    """How many times as long as this engine each baseline takes, repeat by repeat; and bfloat16 as float32, at the
    centre. Models of other widths than the first have theirs in the name."""
    pairs = []
    for row in baselines:
        if row["engine"] != "ours":
            own = next(each for each in baselines if each["engine"] == "ours" and each["point"] == row["point"])
            width = row["point"]["width"]
            first = width == baselines[0]["point"]["width"]
            pairs.append((row["engine"] if first else f"{row['engine']}, width {width}", row, own))
    half = in_half(around)
    if half is not None:
        pairs.append((half["point"]["dtype"], half, around[0]))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, row, ours in pairs:
        both = [(parts(a), parts(b)) for a, b in zip(row["repeats"], ours["repeats"], strict=False)]
        if both:
            found[name] = {
                part: spread([a[part] / b[part.removesuffix(UNASKED)] for a, b in both]) for part in both[0][0]
            }
    return found


def in_half(around: Sequence[Data]) -> Data | None:
    """The centre in bfloat16."""
    wanted = {**around[0]["point"], "dtype": "bfloat16"} if around else None
    return next((row for row in around[1:] if row["point"] == wanted), None)


def _figure(row: Data, name: str) -> float | None:
    found = row["summary"].get("figures", {}).get(name)
    return found["median"] if found else None


# --- For the terminal -------------------------------------------------------------------------------------------------


def line(repeat: Data) -> str:
    """One repeat in a line."""
    f = repeat["figures"]
    text = f"{f['seconds']:.1f} s, {f['games_per_second']:.1f} games/s and {f['tokens_per_second']:.0f} tokens/s"
    if "update_tokens_per_second" in f:
        text += f", update {f['update_tokens_per_second']:.0f} tokens/s"
    calls = repeat.get("calls", {"all": 0, "computed": 0})
    if calls["computed"] < calls["all"]:
        text += f", by {calls['computed']} of {calls['all']} calls"
    if f["on_processor"] < BUSY:
        text += f" (on a processor only {f['on_processor']:.0%} of the time: the machine is busy)"
    return text


def table(around: Sequence[Data], baselines: Sequence[Data], alone: Data) -> str:
    """Formats all measurements: a block for the centre, its other precision and each baseline, a line for the rest;
    ratios; and what needs no model."""
    lines: list[str] = []
    half = in_half(around)
    blocks = [row for row in (*around[:1], half, *baselines) if row is not None]
    for row in blocks:
        lines += ["", f"{row['engine']}: {place(row)}", *block(row)]
    rest = [row for row in around if not any(row is told for told in blocks)]
    if rest:
        lines += ["", "ours, around the centre: " + ", ".join(SPEEDS[name] for name in AROUND)]
    for row in rest:
        said = "  ".join(f"{shown(name, _figure(row, name)):>8}" for name in AROUND)
        lines.append(f"  {place(row):72} {said if row['repeats'] else missing(row)}")
    compared = ratios(around, baselines)
    if compared:
        lines += ["", "times as long as ours (bfloat16: as float32), medians and spread over repeats"]
    for name, each in compared.items():
        for part, r in each.items():
            text = f"{number(r['median']):>8}  ({number(r['low'])} to {number(r['high'])})"
            lines.append(f"  {name:22} {part:46} {text}")
    lines += ["", "alone, a decode step: ms, and share of its limit; torch's attention and the products alone: ms"]
    for step in (step for repeat in alone["steps"] for step in repeat):
        share = step["limit"] / step["seconds"]
        said = f"{step['rows']} rows of {step['context']} tokens"
        apart = "  ".join(f"{number(1e3 * step[name]):>8}" for name in ("attention", "products"))
        lines.append(f"  {said:32} {number(1e3 * step['seconds']):>8}  {number(share):>8}  {apart}")
    lines += ["", "alone, on one core"]
    for name, label in (("agent_steps_per_second", "agent-steps/s"), ("games_per_second", "games/s")):
        r = spread([repeat[name] for repeat in alone["game"]])
        text = f"{number(r['median']):>8}  ({number(r['low'])} to {number(r['high'])})"
        lines.append(f"  {'the game, random players':32} {label:20} {text}")
    for each in alone["solver"]:
        said = f"piKL, {each['games']} games {' x '.join([str(each['actions'])] * each['players'])}"
        lines.append(f"  {said:32} {'ms an iteration':20} {number(1e3 * each['seconds_per_iteration']):>8}")
    return "\n".join(lines)


def block(row: Data) -> list[str]:
    """One row's figures, a line each, and its shares of time."""
    if not row["repeats"]:
        return [f"  {missing(row)}"]
    lines, found = [], row["summary"]
    for name, label in SPEEDS.items():
        if name in found["figures"]:
            low, middle, high = (shown(name, found["figures"][name][k]) for k in ("low", "median", "high"))
            lines.append(f"  {label:28} {middle:>10}  ({low} to {high})")
    played = row["played"]
    lines.append(f"  {'tokens of a stream':28} {played['mean_stream']} on average, {played['longest_stream']} at most")
    if "calls" in row["repeats"][0]:
        calls = row["repeats"][0]["calls"]
        lines.append(f"  {'calls of the model':28} {calls['computed']} of {calls['all']} computed in the first repeat")
    if row["tried"]:
        tried = ", ".join(f"{rows}: {number(seconds)} s" for rows, seconds in row["tried"].items())
        lines.append(f"  {'rows of a call, tried':28} {tried}")
    shares = [f"{phase} {share:.1%}" for phase, share in found["shares"].items() if share]
    return [*lines, f"  {'shares of time':28} {', '.join(shares)}"]


def shown(name: str, value: float | None) -> str:
    """A figure as its label has it; a dash where there is none."""
    return "–" if value is None else number(value * (1e-6 if "MB" in SPEEDS[name] else 1.0))


def missing(row: Data) -> str:
    return f"not measured: {row['skipped'] or 'not yet'}"


def place(row: Data) -> str:
    """A row's point in words."""
    p = row["point"]
    size = f"{row['parameters']:,} parameters, {p['dtype']}"
    return f"{p['games']} games of {p['players']}, context {p['context']}, {size}"


# --- The chart --------------------------------------------------------------------------------------------------------


def along(axis: str, around: Sequence[Data]) -> list[tuple[float, Data]]:
    """The measured rows that differ from the first, the centre, in this axis only: (place on the axis, row), in order.

    Other numbers of players fill the same slots, so that they are other numbers of games.
    """
    free = {axis, "games"} if axis == "players" else {axis}
    centre = {k: v for k, v in around[0]["point"].items() if k not in free}
    rows = [r for r in around if r["repeats"] and {k: v for k, v in r["point"].items() if k not in free} == centre]
    if axis == "players":  # games alone were changed in rows of another axis
        rows = [r for r in rows if r is around[0] or r["point"]["players"] != around[0]["point"]["players"]]
    places = [(r["parameters"] / 1e6 if axis == "width" else r["point"][axis], r) for r in rows]
    return sorted(places, key=lambda found: found[0])


def labels(places: Sequence[float]) -> list[str]:
    """Labels places along a logarithmic axis, in order; empty if one would cover the one before it."""
    found, room, last = [], (places[-1] / places[0]) ** 0.1, 0.0
    for place in places:
        near = place < room * last
        found.append("" if near else f"{place:,}" if place == int(place) else f"{place:.3g}")
        last = last if near else place
    return found


def draw(around: Sequence[Data], path: Path) -> None:
    """Seconds of 1,000 tokens of games over each axis that was measured (games differ in length), as a figure in a
    file: medians, with lowest and highest."""
    panels = {axis: along(axis, around) for axis in AXES}
    panels = {axis: rows for axis, rows in panels.items() if len(rows) > 1}
    if not panels:
        return
    figure = Figure(figsize=(3.1 * len(panels) + 0.4, 3.1), layout="constrained")
    side_by_side = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (axis, rows) in zip(side_by_side, panels.items(), strict=True):
        style_axes(axes, ink="#222222", muted="#555555", grid="#dddddd")
        places = [place for place, _ in rows]
        for part, colour in (("rollout", PAPER[0]), ("update", PAPER[1])):
            costs = [
                spread([1000 * parts(r)[part] / row["played"]["tokens"] for r in row["repeats"]]) for _, row in rows
            ]
            axes.plot(places, [c["median"] for c in costs], color=colour, marker="o", markersize=4, label=part)
            axes.vlines(places, [c["low"] for c in costs], [c["high"] for c in costs], color=colour, linewidth=2.5)
        limit = [
            1000 * row["summary"]["figures"]["limit_seconds"]["median"] / row["played"]["tokens"] for _, row in rows
        ]
        axes.plot(places, limit, color="#777777", linestyle="--", linewidth=1, label="limit of both")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(places, labels(places))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda cost, _: f"{cost:g}"))
        axes.minorticks_off()
        axes.set_xlabel(AXES[axis], fontsize=9)
    first = figure.axes[0]
    first.set_ylabel("seconds of 1,000 tokens", fontsize=9)
    first.legend(fontsize=8, frameon=False)
    save_figure(figure, path)

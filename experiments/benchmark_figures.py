"""What the benchmark's measurements say: medians and spread, ratios, tables for the terminal, and the chart of cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.measure import PHASES
from marl.files import writing
from marl.report import PAPER, style_axes
from marl.wording import number

BUSY = 0.9  # processor seconds in a second; whoever has the machine gets at least 1, one for each thread at work
LEARNING = ("collation", "update")  # the phases that are no rollout
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
    "answers_per_second": "belief answers/s",
    "update_tokens_per_second": "tokens/s, update",
    "cache_bytes_per_slot": "cache, MB a slot",
    "peak_bytes": "memory's rise, MB",
    "predicted_bytes": "as predicted, MB",
    "times_limit": "times its limit",
    "prefill_of_limit": "prefill: share of its limit",
    "decode_of_limit": "decode: share of its limit",
    "update_of_limit": "update: share of its limit",
    "on_processor": "processor s in a s",
}

Data = Mapping[str, Any]  # a row of benchmark.json


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": median(values), "low": min(values), "high": max(values)}


def summary(repeats: Sequence[Data]) -> dict[str, Any]:
    """Of each figure median, lowest and highest; shares of time by phase, of all repeats together. Empty of none."""
    if not repeats:
        return {}
    totals = {phase: sum(r["seconds"][phase] for r in repeats) for phase in PHASES}
    whole = sum(totals.values())
    return {
        "figures": {name: spread([r["figures"][name] for r in repeats]) for name in repeats[0]["figures"]},
        "shares": {phase: seconds / whole for phase, seconds in totals.items()},
    }


def parts(repeat: Data) -> dict[str, float]:
    """Seconds of the rollout, of the update (with collation), and of both; the last two where there was an update."""
    update = sum(repeat["seconds"][phase] for phase in LEARNING)
    rollout = sum(repeat["seconds"].values()) - update
    both = {"update": update, "rollout and update": rollout + update} if update else {}
    return {"rollout": rollout} | both


def ratios(around: Sequence[Data], baselines: Sequence[Data]) -> dict[str, dict[str, dict[str, float]]]:
    """How many times as long as this engine each baseline takes, repeat by repeat; and bfloat16 as float32."""
    pairs = [(row["engine"], row, baselines[0]) for row in baselines[1:]]
    if len(around) > 1:
        pairs.append((around[1]["point"]["dtype"], around[1], around[0]))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, row, ours in pairs:
        both = [(parts(a), parts(b)) for a, b in zip(row["repeats"], ours["repeats"], strict=False)]
        if both:
            found[name] = {part: spread([a[part] / b[part] for a, b in both]) for part in both[0][0]}
    return found


def targets(around: Sequence[Data], baselines: Sequence[Data], alone: Data) -> list[dict[str, Any]]:
    """What this engine is meant to reach on two cores at the full size, and what was found: `name`, `value` (None where
    nothing was measured), the bounds `least` and `most` (None: no bound), and whether it is `met`."""
    if not around:
        return []
    compared = ratios(around, baselines)

    def figure(row: Data | None, name: str) -> float | None:
        found = row["summary"].get("figures", {}).get(name) if row else None
        return found["median"] if found else None

    def slower(engine: str, part: str) -> float | None:
        found = compared.get(engine, {}).get(part)
        return found["median"] if found else None

    centre, half = around[0], next((row for row in around[1:] if row["point"]["dtype"] == "bfloat16"), None)
    written = None
    if centre["repeats"]:
        shares = centre["summary"]["shares"]
        written = sum(shares[phase] for phase in ("game", "text", "tokenising"))
        written /= sum(share for phase, share in shares.items() if phase not in LEARNING)
    many = [row for place, row in along("games", around) if place >= 64]
    costs = [median(parts(r)["rollout"] for r in row["repeats"]) / row["point"]["games"] for row in many]
    steepest = max((cost / costs[0] for cost in costs[1:]), key=lambda ratio: abs(math.log(ratio)), default=None)
    long = along("context", around)
    growth = None
    if len(long) > 1:
        (_, short), (_, longest) = long[0], long[-1]
        growth = _cost_of_a_token(longest) / _cost_of_a_token(short)
        growth /= _work_of_a_token(longest) / _work_of_a_token(short)
    rows: list[tuple[str, float | None, float | None, float | None]] = [
        ("generate: times as long, rollout", slower("generate", "rollout"), 10.0, None),
        ("TRL: times as long, rollout and update", slower("TRL", "rollout and update"), 5.0, None),
        ("decode: share of its limit", figure(centre, "decode_of_limit"), 0.5, None),
        ("update, float32: share of its limit", figure(centre, "update_of_limit"), 0.6, None),
        ("update, bfloat16: share of its limit", figure(half, "update_of_limit"), 0.4, None),
        ("game, text and tokenising: share of a rollout", written, None, 0.1),
        ("rollout of a game among more at once, beside one among 64", steepest, 0.9, 1.1),
        ("a token at the longest context: growth of time by that of work", growth, None, 1.0),
        (
            "the game with random players, one core: agent-steps/s",
            median(repeat["agent_steps_per_second"] for repeat in alone["game"]) if alone else None,
            20_000.0,
            None,
        ),
        *(
            (f"memory as predicted, {row['point']['dtype']}: of what it took", _predicted(row), 0.9, 1.1)
            for row in (centre, half)
            if row
        ),
    ]
    return [
        {
            "name": name,
            "value": value,
            "least": least,
            "most": most,
            "met": None if value is None else (least or 0.0) <= value <= (most or math.inf),
        }
        for name, value, least, most in rows
    ]


def _predicted(row: Data) -> float | None:
    found = row["summary"].get("figures", {})
    if "peak_bytes" not in found or "predicted_bytes" not in found:
        return None
    return float(found["predicted_bytes"]["median"] / found["peak_bytes"]["median"])


def _cost_of_a_token(row: Data) -> float:
    """Seconds of a rollout by the tokens of its streams."""
    return median(parts(r)["rollout"] for r in row["repeats"]) / row["played"]["tokens"]


def _work_of_a_token(row: Data) -> float:
    """Seconds that the products of a rollout take by themselves, by the tokens of its streams."""
    phases = ("prefill", "decode", "sampling", "beliefs")
    return median(sum(r["limit"][p]["arithmetic"] for p in phases) for r in row["repeats"]) / row["played"]["tokens"]


# --- For the terminal -------------------------------------------------------------------------------------------------


def line(repeat: Data) -> str:
    """One repeat in a line."""
    f = repeat["figures"]
    text = f"{f['seconds']:.1f} s, {f['games_per_second']:.1f} games/s and {f['tokens_per_second']:.0f} tokens/s"
    if "update_tokens_per_second" in f:
        text += f", update {f['update_tokens_per_second']:.0f} tokens/s"
    if f["on_processor"] < BUSY:
        text += f" (on a processor only {f['on_processor']:.0%} of the time: the machine is busy)"
    return text


def table(around: Sequence[Data], baselines: Sequence[Data], alone: Data) -> str:
    """What was measured: a block for the centre, its other precision and each baseline, a line for the rest; ratios;
    and what needs no model."""
    lines: list[str] = []
    for row in [*around[:2], *baselines]:
        lines += ["", f"{row['engine']}: {place(row)}", *block(row)]
    if len(around) > 2:
        columns = ("games_per_second", "tokens_per_second", "update_tokens_per_second", "times_limit")
        lines += ["", "ours, around the centre: " + ", ".join(SPEEDS[name] for name in columns)]
        for row in around[2:]:
            medians = [row["summary"]["figures"][name]["median"] for name in columns if row["repeats"]]
            said = "  ".join(f"{number(m):>8}" for m in medians) or f"not measured: {row['skipped']}"
            lines.append(f"  {place(row):72} {said}")
    compared = ratios(around, baselines)
    if compared:
        lines += ["", "times as long as ours (bfloat16: as float32), medians and spread over repeats"]
    for name, each in compared.items():
        for part, r in each.items():
            text = f"{number(r['median']):>8}  ({number(r['low'])} to {number(r['high'])})"
            lines.append(f"  {name:22} {part:20} {text}")
    lines += ["", "meant to be reached (256 slots, context 1,024, 4 million parameters, two cores)"]
    for t in targets(around, baselines, alone):
        both = " to ".join(number(t[k]) for k in ("least", "most") if t[k] is not None)
        bounds = f"at least {both}" if t["most"] is None else f"at most {both}" if t["least"] is None else both
        found = "not measured" if t["met"] is None else f"{number(t['value'])}, {'met' if t['met'] else 'missed'}"
        lines.append(f"  {t['name']:64} {bounds:>16}: {found}")
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
        return [f"  not measured: {row['skipped']}"]
    lines, found = [], row["summary"]
    for name, label in SPEEDS.items():
        if name in found["figures"]:
            scale = 1e-6 if "MB" in label else 1.0
            low, middle, high = (number(scale * found["figures"][name][k]) for k in ("low", "median", "high"))
            lines.append(f"  {label:28} {middle:>10}  ({low} to {high})")
    shares = [f"{phase} {share:.1%}" for phase, share in found["shares"].items() if share]
    return [*lines, f"  {'shares of time':28} {', '.join(shares)}"]


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


def draw(around: Sequence[Data], path: Path) -> None:
    """Seconds a game over each axis that was measured, as a figure in a file: medians, with lowest and highest."""
    panels = {axis: along(axis, around) for axis in AXES}
    panels = {axis: rows for axis, rows in panels.items() if len(rows) > 1}
    if not panels:
        return
    figure = Figure(figsize=(3.1 * len(panels) + 0.4, 3.1), layout="constrained")
    for axes, (axis, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        style_axes(axes, ink="#222222", muted="#555555", grid="#dddddd")
        places = [place for place, _ in rows]
        for part, colour in (("rollout", PAPER[0]), ("update", PAPER[1])):
            costs = [spread([parts(r)[part] / row["point"]["games"] for r in row["repeats"]]) for _, row in rows]
            axes.plot(places, [c["median"] for c in costs], color=colour, marker="o", markersize=4, label=part)
            axes.vlines(places, [c["low"] for c in costs], [c["high"] for c in costs], color=colour, linewidth=2.5)
        limit = [row["summary"]["figures"]["limit_seconds"]["median"] / row["point"]["games"] for _, row in rows]
        axes.plot(places, limit, color="#777777", linestyle="--", linewidth=1, label="limit of both")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(places, [f"{place:.3g}" for place in places])
        axes.minorticks_off()
        axes.set_xlabel(AXES[axis], fontsize=9)
    first = figure.axes[0]
    first.set_ylabel("seconds a game", fontsize=9)
    first.legend(fontsize=8, frameon=False)
    with writing(path), matplotlib.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)

"""What the benchmark's measurements say: medians and spread, ratios, tables for the terminal, and the chart of cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from experiments.bench.measure import PHASES
from marl.metrics.wording import number
from marl.report.figures import PAPER, save_figure, style_axes

BUSY = 0.9  # processor seconds in a second; whoever has the machine gets at least 1, one for each thread at work
OTHERS = 0.1  # of all processors' time: more than that, and somebody else is at work
# What the targets name: how many games, how long a context, and the ends of what is to be flat or to grow slowly.
GAMES, CONTEXT, FLAT, LONG = 256, 1024, (64, 1024), (256, 2048)
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
    "decode_of_full": "  of passes with every game",
    "decode_rows": "decode: rows a pass, mean",
    "mixed_of_limit": "passes that do both: share of their limit",
    "update_of_limit": "update: share of its limit",
    "on_processor": "processor s in a s",
    "others": "others' share of processors",
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
    """Of each figure that all repeats have median, lowest and highest; shares of time by phase, of all together. Empty
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


def targets(around: Sequence[Data], baselines: Sequence[Data], alone: Data) -> list[dict[str, Any]]:
    """What this engine is meant to reach on two cores at the full size, and what was found: `name`, `value` (None where
    nothing was measured, or not at the size that is named), the bounds `least` and `most` (None: no bound), and whether
    it is `met` (None without a bound, too: said beside the one above it)."""
    if not around:
        return []
    compared = ratios(around, baselines)
    at_size = bool(baselines) and (baselines[0]["point"]["games"], baselines[0]["point"]["context"]) == (GAMES, CONTEXT)

    def slower(engine: str, part: str) -> float | None:
        found = compared.get(engine, {}).get(part) if at_size else None
        return found["median"] if found else None

    centre, half = around[0], in_half(around)
    many = dict(along("games", around)).get(GAMES) if centre["point"]["context"] == CONTEXT else None
    written = kept = None
    if centre["repeats"]:
        shares = centre["summary"]["shares"]
        rollout = sum(share for phase, share in shares.items() if phase not in LEARNING)
        written = sum(shares[phase] for phase in ("game", "text", "tokenising")) / rollout
        kept = shares["bookkeeping"] / rollout
    predicted = [share for row in around if (share := _predicted(row)) is not None]
    size = f"{GAMES} games, context {CONTEXT:,}"
    flat, long = (f"from {low:,} to {high:,}" for low, high in (FLAT, LONG))
    steps = _steps(alone)
    share = steps[CONTEXT]["of_limit"] if CONTEXT in steps else None
    rows: list[tuple[str, float | None, float | None, float | None]] = [
        (f"generate at {size}: times as long, rollout", slower("generate", "rollout"), 10.0, None),
        ("  generate, had it read nothing again for answers", slower("generate", f"rollout{UNASKED}"), None, None),
        (f"TRL at {size}: times as long, rollout", slower("TRL", "rollout"), 5.0, None),
        ("  TRL, had it read nothing again for answers", slower("TRL", f"rollout{UNASKED}"), None, None),
        (f"TRL at {size}: times as long, with update", slower("TRL", ALL), 5.0, None),
        ("  TRL with update, had it read nothing again for answers", slower("TRL", f"{ALL}{UNASKED}"), None, None),
        (f"a step of {GAMES} rows, {CONTEXT:,} tokens each: share of its limit", share, 0.5, None),
        (f"decode at {size}: share of its limit", _figure(many, "decode_of_limit"), 0.5, None),
        (f"  the same, had every pass {GAMES} rows", _figure(many, "decode_of_full"), 0.5, None),
        ("  rows that a pass had, on average", _figure(many, "decode_rows"), None, None),
        ("update, float32: share of its limit", _figure(centre, "update_of_limit"), 0.6, None),
        ("update, bfloat16: share of its limit", _figure(half, "update_of_limit"), 0.4, None),
        ("game, text and tokenising: share of a rollout", written, None, 0.1),
        ("  bookkeeping, which is not in that sum", kept, None, None),
        (f"rollout of a game {flat} games: most unlike the first's", _steepest(around, "games"), 0.9, 1.1),
        ("  rollout of a token", _steepest(around, "tokens"), None, None),
        ("  a game with its update", _steepest(around, "games", ALL), 0.9, 1.1),
        (f"a step of {GAMES} rows, {long} tokens each: growth without attention", _grown(steps, "rest"), None, 1.1),
        (f"  what it takes more {long} tokens, by what torch's attention does", _own_growth(steps), None, 1.0),
        ("  its growth by that of its multiply-adds", _grown(steps, "per_mac"), None, None),
        (f"a pass that reads, {long} tokens: growth without attention", _grown(steps, "reading_rest"), None, 1.1),
        ("  prefill in games: growth by that of its multiply-adds", _growth(around, "prefill"), None, None),
        ("  decode in games: growth by that of its multiply-adds", _growth(around, "decode"), None, None),
        ("  growth of its passes' rows, which share what a pass costs", _widened(around), None, None),
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
        ("memory as predicted, of all points the worst", _furthest(predicted), 0.9, 1.1),
    ]
    return [
        {
            "name": name,
            "value": value,
            "least": least,
            "most": most,
            "met": None if value is None or least is most is None else (least or 0.0) <= value <= (most or math.inf),
        }
        for name, value, least, most in rows
    ]


def _steps(alone: Data) -> dict[int, dict[str, float]]:
    """Of decode steps of GAMES rows by context: medians of the share of the limit, of seconds a multiply-add, of the
    seconds of a step and of torch's attention alone, and of what a step, and a pass that reads, take beside attention,
    where that was timed."""
    found: dict[int, list[Data]] = {}
    for step in (step for repeat in alone.get("steps", ()) for step in repeat):
        if step["rows"] == GAMES:
            found.setdefault(step["context"], []).append(step)
    made = {
        context: {
            "of_limit": median(step["limit"] / step["seconds"] for step in each),
            "per_mac": median(step["seconds"] / step["macs"] for step in each),
            "seconds": median(step["seconds"] for step in each),
            "attention": median(step["attention"] for step in each),
        }
        for context, each in found.items()
    }
    for context, each in found.items():
        for name, whole, part in (
            ("rest", "seconds", "own_attention"), ("reading_rest", "reading", "reading_attention")
        ):  # fmt: skip
            if all(step.get(part) is not None for step in each):
                made[context][name] = median(step[whole] - step[part] for step in each)
    return made


def _figure(row: Data | None, name: str) -> float | None:
    found = row["summary"].get("figures", {}).get(name) if row else None
    return found["median"] if found else None


def _furthest(ratios: Sequence[float]) -> float | None:
    """The one that is furthest from 1."""
    return max(ratios, key=lambda ratio: abs(math.log(ratio)), default=None)


def _predicted(row: Data) -> float | None:
    predicted, peak = _figure(row, "predicted_bytes"), _figure(row, "peak_bytes")
    return predicted / peak if predicted is not None and peak else None


def _steepest(around: Sequence[Data], what: str, part: str = "rollout") -> float | None:
    """Seconds of a rollout (or ALL) by what was played (`games`, `tokens`), among more games, beside those among the
    fewest of FLAT: the most unlike. None where either end, or an update, was not measured."""
    rows = {place: row for place, row in along("games", around) if FLAT[0] <= place <= FLAT[1]}
    if not set(FLAT) <= set(rows) or any(part not in parts(r) for row in rows.values() for r in row["repeats"]):
        return None
    first, *others = (median(parts(r)[part] for r in row["repeats"]) / row["played"][what] for row in rows.values())
    return _furthest([cost / first for cost in others])


def _grown(steps: Mapping[int, Data], name: str) -> float | None:
    """How many times as large a step's figure is at the long context as at the short one; None where one is unknown."""
    short, long = (steps.get(context, {}).get(name) for context in LONG)
    return long / short if short and long else None


def _own_growth(steps: Mapping[int, Data]) -> float | None:
    """How much longer a step takes at the long context than at the short one (0 where it takes less), as a multiple of
    how much longer torch's attention alone does; None where one of them was not measured."""
    if not set(LONG) <= set(steps):
        return None
    short, long = (steps[context] for context in LONG)
    return max(long["seconds"] - short["seconds"], 0.0) / (long["attention"] - short["attention"])


def _growth(around: Sequence[Data], phase: str) -> float | None:
    """How a phase's time for a multiply-add, of products and attention, grows from one end of LONG to the other. None
    where either end was not measured, or had nothing of the phase."""
    rows = dict(along("context", around))
    if not set(LONG) <= set(rows) or not all(r["read"].get(phase) for n in LONG for r in rows[n]["repeats"]):
        return None
    short, long = (median(r["seconds"][phase] / r["limit"][phase]["macs"] for r in rows[n]["repeats"]) for n in LONG)
    return long / short


def _widened(around: Sequence[Data]) -> float | None:
    """How many times as many rows passes that decode have at the longer end of LONG. None as `_growth` is."""
    rows = dict(along("context", around))
    short, long = (_figure(rows.get(n), "decode_rows") for n in LONG)
    return long / short if short and long else None


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
    elif f.get("others", 0.0) > OTHERS:
        text += f" (others had {f['others']:.0%} of all processors: the machine is busy)"
    return text


def busy(repeat: Data) -> bool:
    """Whether others took part of the machine from this repeat."""
    return repeat["figures"]["on_processor"] < BUSY or repeat["figures"].get("others", 0.0) > OTHERS


def table(around: Sequence[Data], baselines: Sequence[Data], alone: Data) -> str:
    """What was measured: a block for the centre, its other precision and each baseline, a line for the rest; ratios;
    and what needs no model."""
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
    repeats = [r for row in (*around, *baselines) for r in row["repeats"]]
    taken = sum(map(busy, repeats))
    if taken:
        lines += ["", f"others were at work during {taken} of {len(repeats)} measurements: these times are too long"]
    compared = ratios(around, baselines)
    if compared:
        lines += ["", "times as long as ours (bfloat16: as float32), medians and spread over repeats"]
    for name, each in compared.items():
        for part, r in each.items():
            text = f"{number(r['median']):>8}  ({number(r['low'])} to {number(r['high'])})"
            lines.append(f"  {name:22} {part:46} {text}")
    lines += ["", "meant to be reached on two cores by 4 million parameters; where no size is named, at the centre"]
    for t in targets(around, baselines, alone):
        both = " to ".join(number(t[k]) for k in ("least", "most") if t[k] is not None)
        kind = "" if not both else "at least " if t["most"] is None else "at most " if t["least"] is None else ""
        bounds = kind + both
        verdict = "" if t["met"] is None else ", met" if t["met"] else ", missed"
        found = "not measured" if t["value"] is None else f"{number(t['value'])}{verdict}"
        lines.append(f"  {t['name']:72} {bounds:>16}: {found}")
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
    """Of these places along a logarithmic axis, in order; empty where one would stand on the one before it."""
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

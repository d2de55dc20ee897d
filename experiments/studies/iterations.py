"""Score, agreement, length and vocabulary of runs, iteration by iteration.

    python -m experiments.studies.iterations select='dond_filtered_bc*' publish=experiments/results/dond_selfplay
    python -m experiments.studies.iterations data=experiments/results/dond_selfplay/iterations.csv.gz

The first form reads the evaluations that finished runs of Deal or No Deal made while they trained, the second what the
first has written: the same tables and figure, without the runs.

Written: `NAME.csv.gz`, a line for each run, iteration and metric, and with `publish` the runs' cards;
`NAME_by_arm.csv.gz`, means over seeds with 95 % intervals (Student's t over seeds; of a single seed, and where all
seeds are one policy, over its games, where their spread is known); `NAME.svg`; with `headline` `table.csv`, the ends of
the largest objective; and `NAME_summary.csv`:

- `correlation/games`: Pearson's r between the iteration and a player's score, over all players of all evaluation games
  of a run, iteration 0 (before training) included; `correlation/agreed_games`: over games with a deal (Liao, Tomlin &
  Klein 2024 report .44, without the units). `correlation/means` and `correlation/agreed_means`: between iterations and
  their mean scores.
- `plateau/seeds`: the first iteration that no later one beats by more than 1.96 standard errors of their difference
  (evaluations are taken as independent, although they are of the same games); `plateau/mean`: of the seeds' mean curve.
- `score/at_equal_games`, `agreement/at_equal_games`: at the most training games that all runs of the objective have
  had, linear between two evaluations; `.../at_equal_compute`: at the most token passes (metrics/compute.py).
  `trained/...` and `passes/...` say where that is, in games and in thousand passes. The arm `ARM - filtered_bc` is the
  difference to the arm that `reference` names, paired by seed.

Under objective -1 both scores add up to nothing, so all of this is of points. How far these spread among games is not
recorded: correlations are of means alone, and standard errors are the largest that points with this mean can have.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike
from omegaconf import DictConfig

from envs.dond.rules import MAX_POINTS
from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.setup.select import selected, write_cards
from experiments.studies.lines import check_complete, write_intervals
from marl.common.errors import UserError, check_writable
from marl.common.files import reading, stem
from marl.metrics.compute import PASSES
from marl.metrics.stats import Interval, Metrics, Z, seed_mean, wilson
from marl.metrics.tables import TableRow, format_table, mean_over_seeds, read_csv, write_records, write_table
from marl.metrics.wording import WORDING
from marl.report.figures import HALF, label_lines, paper_colours, save_figure, style_axes
from marl.report.page import read_run
from marl.report.runs import TRAINED, Run

T = TypeVar("T")
METRICS = (
    "game/score", "game/score_sd", "game/score_agreed", "game/score_agreed_sd", "game/score_ceiling", "game/points",
    "game/agreement", "game/pareto", "game/pareto_agreed", "talk/turns", "talk/tokens_per_turn", "talk/vocabulary",
    "talk/inverted", "talk/inverted_explicit", "talk/inverted_chance", "errors/per_turn", "errors/aborted",
)  # fmt: skip
SPREAD = {"game/score": "game/score_sd", "game/score_agreed": "game/score_agreed_sd"}
RATES = ("game/agreement", "game/pareto", "game/pareto_agreed", "errors/aborted")  # of games
OF_AGREED = ("game/score_agreed", "game/pareto_agreed")
PANELS = ("game/score", "game/agreement")
EQUAL = {"trained": "at_equal_games", "passes": "at_equal_compute"}  # at the same of what runs are compared
AXES = {"iteration": "iteration", "trained": "training games", "passes": "thousand token passes"}
COMPETITIVE = -1  # both scores add up to 0, so that self-play is measured in points
CEILING = "game/score_ceiling"  # the best possible score


@dataclass(frozen=True)
class Line:
    """One line of NAME.csv.gz. `trained`: games that the run had learned from; `passes`: thousands of tokens that
    training had put through the model (marl/metrics/compute.py); `games`: of the evaluation."""

    objective: float
    arm: str
    seed: int
    iteration: int
    trained: int
    passes: int
    games: int
    metric: str
    value: float


@dataclass(frozen=True)
class Published:
    """Others' figure before and after training."""

    arm: str
    objective: float
    metric: str
    before: float
    after: float


Curve = dict[int, dict[str, float]]  # iteration -> metric -> value; `games`, `trained` and `passes` among them
Curves = dict[tuple[float, str], dict[int, Curve]]  # (objective, arm) -> seed


@command("iterations")
def main(cfg: DictConfig) -> None:
    """Collects, if runs are given; tabulates and draws."""
    # Check.
    if cfg.over not in (None, *AXES):
        raise UserError(f"over={cfg.over}: must be {', '.join(AXES)}, or null")
    if (cfg.select is None) == (cfg.data is None):
        raise UserError("select and data: give one of them, the names of finished runs or a file written from such")
    published = read_as(Published, Path(cfg.published), "published") if cfg.published else []
    data = Path(cfg.data) if cfg.data else None
    called = cfg.name or (stem(data) if data else "iterations")
    out = Path(cfg.publish or (data.parent if data else Path(cfg.runs) / "iterations"))
    check_writable(out, "publish")

    # Collect.
    if data is None:
        runs = [read_run(folder) for folder in selected(Path(cfg.runs), cfg.select, cfg.where)]
        data, lines = out / f"{called}.csv.gz", collected(runs)
        write_records(data, Line, lines)
        if cfg.publish:
            write_cards((run.folder for run in runs), out)
    curves = read_curves(data)  # as anybody else will

    # Tabulate.
    means = {
        key: by_iteration({seed: of_games(curve) for seed, curve in seeds.items()}) for key, seeds in curves.items()
    }
    write_by_arm(out / f"{called}_by_arm.csv.gz", means, curves)
    if cfg.headline:
        write_table(out / "table.csv", ends_of(means, curves))
    if cfg.reference not in {arm for _, arm in curves}:
        say(f"reference={cfg.reference}: there is no such arm, so nothing is subtracted")
    figures: list[tuple[tuple[object, ...], Interval]] = []
    for objective in dict.fromkeys(objective for objective, _ in curves):
        arms = {arm: seeds for (own, arm), seeds in curves.items() if own == objective}
        equal, minus = at_equal(arms, measure_of(objective), cfg.reference)
        whole = {arm: {**summary(seeds, measure_of(objective)), **equal[arm]} for arm, seeds in arms.items()}
        say(f"\nobjective {objective:g}")
        for columns in (whole, minus) if minus else (whole,):
            say(format_table(columns))
        figures += [
            ((objective, arm, name), own) for arm, found in {**whole, **minus}.items() for name, own in found.items()
        ]
    write_intervals(out / f"{called}_summary.csv", ("objective", "arm", "figure"), figures, "seeds")

    # Draw.
    draw(curves, means, published, out / f"{called}.svg", cfg.over)
    say(f"\ntables and figure: {out}")


# --- Data -------------------------------------------------------------------------------------------------------------
def collected(runs: Sequence[Run]) -> list[Line]:
    """The evaluations of these runs while they trained. UserError for a run of another game, or one without any, and
    for two runs of one objective, arm and seed."""
    lines: list[Line] = []
    for run in runs:
        if run.game != "dond":
            raise UserError(f"select: {run.folder.name} is a run of {run.game}. Name runs of Deal or No Deal.")
    refuse_doubles((run.folder, objective_of(run.config), run.arm, run.seed) for run in runs)
    for run in runs:
        evaluations = [row for row in run.curves if row["phase"] == "eval"]
        if not evaluations:
            raise UserError(f"select: {run.folder.name} was not evaluated while it trained (eval.every, eval.games)")
        for row in evaluations:
            with reading(run.folder):
                trained, games = row["iteration"] * run.games, int(row["rollout/games"])
                objective, iteration = objective_of(run.config), row["iteration"]
            passes = round(row.get(PASSES, 0) / 1000)
            at = (objective, run.arm, run.seed, iteration, trained, passes, games)
            kept = [metric for metric in METRICS if metric in row and not nothing(metric, objective)]
            lines += [Line(*at, metric, row[metric]) for metric in kept]
        ceiling = run.conditions.get(TRAINED, {}).get(CEILING)  # of the final evaluation, whose games begin with these
        if ceiling is not None and not nothing(CEILING, objective):
            lines.append(Line(*at[:-1], ceiling.n, CEILING, ceiling.mean))
    return sorted(lines, key=lambda line: (-line.objective, line.arm, line.seed, line.iteration))


def evaluated_game(config: Mapping[str, Any]) -> dict[str, Any]:
    """The game's settings in a run's own evaluation."""
    return {**config["env"], **((config.get("eval") or {}).get("env") or {})}


def objective_of(config: Mapping[str, Any]) -> float:
    """Returns the objective of the game that a run is evaluated in."""
    return float(evaluated_game(config)["objective"])


def nothing(metric: str, objective: float) -> bool:
    """Returns True if the metric is 0 whatever is played, as scores are under objective -1."""
    return objective == COMPETITIVE and metric.startswith("game/score")


def refuse_doubles(runs: Iterable[tuple[Path, float, str, int]], setting: str = "select") -> None:
    """UserError, naming the setting, where two runs (folder, objective, arm, seed) differ in nothing but the folder."""
    known: dict[tuple[float, str, int], Path] = {}
    for folder, objective, arm, seed in runs:
        other = known.setdefault((objective, arm, seed), folder)
        if other != folder:
            raise UserError(
                f"{setting}: {other} and {folder} are both of objective {objective:g}, arm {arm} and seed {seed}. "
                "Keep one of them (by `select` or `where`), or rename an arm."
            )


def read_as(kind: type[T], path: Path, setting: str) -> list[T]:
    """Reads lines with a column for each field of a dataclass. UserError, naming the setting, for another file."""
    of: dict[str, Any] = get_type_hints(kind)
    return read_csv(path, setting, of, lambda row: kind(**{name: read(row[name]) for name, read in of.items()}))


def read_curves(path: Path) -> Curves:
    """Reads `NAME.csv.gz`. UserError if it is no such file."""
    lines, curves = read_as(Line, path, "data"), Curves()
    places: dict[str, dict[str, dict[str, float]]] = {}
    if not all(line.games > 0 and math.isfinite(line.value) for line in lines):
        raise UserError(f"data={path}: expected lines of at least one game each, with finite values")
    for line in lines:
        curve = curves.setdefault((line.objective, line.arm), {}).setdefault(line.seed, {})
        at = curve.setdefault(line.iteration, {"games": line.games, "trained": line.trained, "passes": line.passes})
        at[line.metric] = line.value
        where = f"λ={line.objective:g}, arm {line.arm}, seed {line.seed}, iteration {line.iteration}"
        places.setdefault(measure_of(line.objective), {})[where] = at
    for measure, of_measure in places.items():
        check_complete(path, "data", of_measure, [measure, "game/agreement"])
    return curves


# --- Statistics -------------------------------------------------------------------------------------------------------
def weight(metric: str, at: Mapping[str, float]) -> float:
    """Counts the evaluation games of a figure."""
    return round(at["games"] * at["game/agreement"]) if metric in OF_AGREED else at["games"]


def over_games(metric: str, at: Mapping[str, float]) -> Interval:
    """A run's own figure, with an interval over its games where the spread of these is known."""
    mean, games = at[metric], int(weight(metric, at))
    if metric in RATES:
        return wilson(round(mean * games), games)
    error = standard_error(metric, at)
    return Interval(mean, mean - Z * error, mean + Z * error, games)


def standard_error(metric: str, at: Mapping[str, float]) -> float:
    """Standard error. Of a mean score, an upper bound unless both players of a game get the same; of mean points, the
    largest that numbers from 0 to 10 with this mean can have; nan of other figures."""
    if metric == "game/points":
        spread = math.sqrt(at[metric] * (MAX_POINTS - at[metric]))
    else:
        spread = at.get(SPREAD.get(metric, ""), math.nan)
    return spread / math.sqrt(weight(metric, at))


def measure_of(objective: float) -> str:
    """Names the metric that tells how well a player of this objective does."""
    return "game/points" if objective == COMPETITIVE else "game/score"


def of_games(curve: Curve) -> dict[int, Metrics]:
    """A run's figures by iteration, with their intervals over games."""
    names = [name for name in METRICS if name not in SPREAD.values()]
    return {i: {name: over_games(name, at) for name in names if name in at} for i, at in curve.items()}


def by_iteration(seeds: Mapping[int, Mapping[int, Metrics]]) -> dict[int, Metrics]:
    """Averages over seeds, at each iteration that all have, the metrics that all have. Seeds with the very same figures
    are one policy, as before training: its intervals are over its games. Others' are those of `mean_over_seeds`."""
    shared = sorted(set.intersection(*(set(of_seed) for of_seed in seeds.values())))
    found: dict[int, Metrics] = {}
    for iteration in shared:
        first, *others = (of_seed[iteration] for of_seed in seeds.values())
        names = [name for name in first if all(name in own for own in others)]
        one = all(own[name].mean == first[name].mean for own in others for name in names)
        found[iteration] = {
            name: first[name] if one else mean_over_seeds(name, [first[name], *(own[name] for own in others)])
            for name in names
        }
    return found


def write_by_arm(
    path: Path, means: Mapping[tuple[float, str], Mapping[int, Metrics]], seeds: Mapping[tuple[float, str], Sized]
) -> None:
    """A line for each objective, arm, iteration and metric; `seeds` has those of each objective and arm."""
    found = [
        ((*key, iteration, name), replace(i, n=len(seeds[key])))
        for key, of_arm in means.items()
        for iteration, metrics in of_arm.items()
        for name, i in metrics.items()
    ]
    write_intervals(path, ("objective", "arm", "iteration", "metric"), found, "seeds")


def ends_of(means: Mapping[tuple[float, str], Mapping[int, Metrics]], curves: Curves) -> list[TableRow]:
    """The arms of the largest objective at their last iteration, without figures whose spread is not known."""
    largest, rows = max(objective for objective, _ in means), []
    for (objective, arm), of_arm in means.items():
        last = max(of_arm)
        at = [curve[last] for curve in curves[objective, arm].values() if last in curve]
        for name, i in of_arm[last].items() if objective == largest else ():
            if math.isfinite(i.low) and math.isfinite(i.high):
                games = sum(int(weight(name, each)) for each in at)
                rows.append(TableRow.of(arm, name, i, len(at), games))
    return rows


def correlation(
    iterations: ArrayLike, means: ArrayLike, spreads: ArrayLike | None = None, counts: ArrayLike | None = None
) -> float:
    """Pearson's r between the iteration and a score, from each iteration's mean, standard deviation (of the population)
    and number of observations; without these two, between iterations and means. nan where either never varies."""
    x, y = np.asarray(iterations, float), np.asarray(means, float)
    sd = np.zeros_like(y) if spreads is None else np.asarray(spreads, float)
    n = np.ones_like(y) if counts is None else np.asarray(counts, float)
    dx, dy = x - np.average(x, weights=n), y - np.average(y, weights=n)
    variances = np.average(dx**2, weights=n) * np.average(dy**2 + sd**2, weights=n)
    return float(np.average(dx * dy, weights=n) / math.sqrt(variances)) if variances > 0 else math.nan


def plateau(iterations: Sequence[int], means: Sequence[float], errors: Sequence[float]) -> int:
    """The first iteration that no later one beats by more than 1.96 standard errors of the difference."""
    for k, iteration in enumerate(iterations[:-1]):
        best = max(range(k + 1, len(means)), key=lambda later: means[later])
        if means[best] - means[k] <= Z * math.hypot(errors[k], errors[best]):
            return iteration
    return iterations[-1]


def summary(seeds: Mapping[int, Curve], measure: str) -> Metrics:
    """Correlations and plateaus of one arm (see the module's docstring), means over seeds; `measure`: score or points.
    A figure is left out where a run lacks what it is made of: it never varies, or evaluations do not say by how much
    games differ."""
    found: dict[str, list[float]] = {}
    for curve in seeds.values():
        for metric, games in ((measure, "games"), (f"{measure}_agreed", "agreed_games")):
            kept = {i: at for i, at in curve.items() if metric in at and weight(metric, at)}
            means = [at[metric] for at in kept.values()]
            known = [at.get(SPREAD.get(metric, ""), math.nan) for at in kept.values()]
            if len(set(means)) > 1:
                counts = [weight(metric, at) for at in kept.values()]
                found.setdefault(f"correlation/{games}", []).append(correlation([*kept], means, known, counts))
                own = correlation([*kept], means)
                found.setdefault(f"correlation/{games.replace('games', 'means')}", []).append(own)
        scores = [at[measure] for at in curve.values()]
        errors = [standard_error(measure, at) for at in curve.values()]
        if len(set(scores)) > 1 and not any(map(math.isnan, errors)):
            found.setdefault("plateau/seeds", []).append(plateau([*curve], scores, errors))
    whole = {name: values for name, values in found.items() if len(values) == len(seeds) and np.isfinite(values).all()}
    figures = {
        name: seed_mean(values).within(-1, 1) for name, values in whole.items() if name.startswith("correlation/")
    }
    if "plateau/seeds" in whole:
        last = max(max(curve) for curve in seeds.values())
        figures["plateau/seeds"] = seed_mean(whole["plateau/seeds"]).within(0, last)
        shared = sorted(set.intersection(*(set(curve) for curve in seeds.values())))
        at = [[curve[i] for curve in seeds.values()] for i in shared]
        means = [float(np.mean([own[measure] for own in each])) for each in at]
        errors = [error_of_mean(measure, each) for each in at]
        figures["plateau/mean"] = Interval(plateau(shared, means, errors), math.nan, math.nan, len(seeds))
    return figures


def error_of_mean(measure: str, seeds: Sequence[Mapping[str, float]]) -> float:
    """Standard error of the seeds' mean. Seeds with the very same figures are one policy, as before training."""
    first, *others = seeds
    if all(own == first for own in others):
        return standard_error(measure, first)
    return math.hypot(*(standard_error(measure, own) for own in seeds)) / len(seeds)


def at_equal(
    arms: Mapping[str, Mapping[int, Curve]], measure: str, reference: str
) -> tuple[dict[str, Metrics], dict[str, Metrics]]:
    """Compares arms after equal games and after equal token passes: the most that all runs have had.

    Returns means over seeds of `measure`, agreement, games and passes by arm (`mean_over_seeds`); and by `ARM -
    REFERENCE` the differences of the first two, over the seeds that both have. Passes are left out where they are not
    known.
    """
    found: dict[str, Metrics] = {arm: {} for arm in arms}
    minus: dict[str, Metrics] = {}
    curves = [curve for seeds in arms.values() for curve in seeds.values()]
    for axis, where in EQUAL.items():
        most = min(max(at[axis] for at in curve.values()) for curve in curves)
        for metric in (measure, "game/agreement", *EQUAL) if most else ():
            name = f"{metric.removeprefix('game/')}/{where}"
            values = {
                arm: {seed: along(curve, axis, metric, most) for seed, curve in s.items()} for arm, s in arms.items()
            }
            for arm, own in values.items():
                each = [Interval(value, math.nan, math.nan, games_of(arms[arm][seed])) for seed, value in own.items()]
                found[arm][name] = replace(mean_over_seeds(metric, each), n=len(own))
                pairs = [(own[seed], other) for seed, other in values.get(reference, {}).items() if seed in own]
                if arm != reference and pairs and metric not in EQUAL:
                    minus.setdefault(f"{arm} - {reference}", {})[name] = seed_mean([a - b for a, b in pairs])
    return found, minus


def games_of(curve: Curve) -> int:
    """The games of a run's evaluation while it trained."""
    return int(min(at["games"] for at in curve.values()))


def along(curve: Curve, axis: str, metric: str, x: float) -> float:
    """The metric where `axis` is at `x`, linear between evaluations."""
    return float(np.interp(x, [at[axis] for at in curve.values()], [at[metric] for at in curve.values()]))


# --- Figure -----------------------------------------------------------------------------------------------------------
def draw(
    curves: Curves, means: Mapping[tuple[float, str], Mapping[int, Metrics]],
    published: Sequence[Published], path: Path, over: str | None = None,
) -> None:  # fmt: skip
    """A row for each objective: score and agreement; a line for each arm, thin ones for its seeds.

    `over`: one of AXES; without it iterations, and training games where runs' iterations differ in length. On compute,
    the means of an arm stand at the means of its seeds' passes."""
    objectives = list(dict.fromkeys(objective for objective, _ in curves))
    arms, others = sorted({arm for _, arm in curves}), list(dict.fromkeys(p.arm for p in published))
    lengths = {at["trained"] / i for seeds in curves.values() for c in seeds.values() for i, at in c.items() if i}
    axis = over or ("iteration" if len(lengths) < 2 else "trained")
    colours = paper_colours(arms)
    figure = Figure(figsize=(HALF, 2.3 * len(objectives) + 0.4), layout="constrained")
    subplots = figure.subplots(len(objectives), len(PANELS), squeeze=False)
    legend: dict[str, Any] = {}
    for objective, row in zip(objectives, subplots, strict=True):
        own = {arm: curves[objective, arm] for arm in arms if (objective, arm) in curves}
        for axes, panel in zip(row, PANELS, strict=True):
            style_axes(axes)
            metric = measure_of(objective) if panel == "game/score" else panel
            end, ends = 0.0, dict[str, float]()
            for arm, seeds in own.items():
                colour = colours[arm]
                for curve in seeds.values() if len(seeds) > 1 else ():
                    there = [({"iteration": i, **at}[axis], at[metric]) for i, at in curve.items() if metric in at]
                    axes.plot(*zip(*there, strict=True), color=colour, linewidth=0.6, alpha=0.5)
                of_arm = {i: found[metric] for i, found in means[objective, arm].items() if metric in found}
                xs = [float(np.mean([{"iteration": i, **c[i]}[axis] for c in seeds.values()])) for i in of_arm]
                axes.plot(xs, [i.mean for i in of_arm.values()], color=colour, linewidth=1.8)
                end, ends[arm] = max([end, *xs]), [*of_arm.values()][-1].mean
                if len(seeds) == 1:
                    low, high = ([getattr(i, side) for i in of_arm.values()] for side in ("low", "high"))
                    axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
            for p in published:
                if (p.objective, p.metric) == (objective, metric):
                    (legend[p.arm],) = axes.plot(
                        [0, end], [p.before, p.after], color="#333333", marker="os^D"[others.index(p.arm) % 4],
                        fillstyle="none", linewidth=0, clip_on=False,
                    )  # fmt: skip
            ceilings = [at[CEILING] for s in own.values() for c in s.values() for at in c.values() if CEILING in at]
            if metric == "game/score" and ceilings:
                line = axes.axhline(float(np.mean(ceilings)), color="#777777", linewidth=1, linestyle="--")
                legend["the best possible score"] = line
            axes.set_title(WORDING[metric].label + f", λ = {objective:g}", fontsize=10, loc="left")
            axes.set_xlabel(AXES[axis], fontsize=8)
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.set_ylim(bottom=0, top=1 if metric in RATES else None)
            if axes is row[-1]:
                label_lines(axes, ends, colours)
    if legend:
        figure.legend([*legend.values()], [*legend], loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    save_figure(figure, path)


if __name__ == "__main__":
    main()

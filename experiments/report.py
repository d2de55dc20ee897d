"""Turns finished runs into a report, and into the folder of a published table.

`python -m experiments.report select='NAME-*'` writes `runs/report.html`; `publish=FOLDER` also the table, its data, the
figure and the run cards, for each variant of the game (docs/howto/commands.md names the files). `data=FOLDER` draws the
figure of such a folder again, without any run.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.setup.published import CURVES, as_published, earlier_runs, game_of, order, read_curves
from experiments.setup.select import add_cards, in_a_name, selected, write_cards
from marl.common.errors import UserError, check_writable
from marl.common.files import csv_rows, joined_name, reading
from marl.metrics.compute import GAMES
from marl.metrics.ratings import RATED, RATED_TWO
from marl.metrics.stats import Interval
from marl.metrics.tables import (
    CURVE,
    ArmRun,
    TableRow,
    ablation_table,
    arm_differences,
    arm_ratios,
    bootstrap_table,
    figures_by_arm,
    format_table,
    interval_of,
    read_table,
    write_csv,
    write_table,
)
from marl.metrics.wording import headline, pairs_of, shown_in
from marl.report.figures import ablation_figure, mean_entries
from marl.report.games import speakers
from marl.report.page import folders_of, read_run, write_report
from marl.report.plane import PLANE, plane_figure
from marl.report.prose import costs, mixed, what_was_seen
from marl.report.runs import (
    SMALL,
    TRAINED,
    Run,
    arm_label,
    arm_runs,
    base_names,
    by_model,
    equal_compute,
    model_of,
    variant_of,
)
from marl.report.tables import columns_of
from marl.storage.folder import flat, unlike

PUBLISHED = "published.csv"  # optional, the paper's figures: arm,mean,low,high,source

# The metric of published figures, learning curves and ratios.
MAIN = {"dond": "game/score", "among_us": "game/win_rate/crewmates", "diplomacy": "game/score"}
TALK = ("talk/said", "talk/heard", "talk/vote_credit/silence")  # of comparison=among_us_talk: said, heard, acted on
DRAWN = {
    "dond": ("game/score", "belief/gain_over_prior"),
    "among_us": ("game/win_rate/crewmates",),
    "diplomacy": ("game/score", "press/said", "press/heard"),
}
RATIOS = ("game/win_rate/crewmates",)  # metrics whose ratios between arms are also shown


@command("report")
def main(cfg: DictConfig) -> None:
    """Reports on all finished runs whose folder's name matches `select`, or draws a published figure again."""
    if cfg.data:
        return redraw(Path(cfg.data), Path(cfg.publish or cfg.data))
    if cfg.earlier and not cfg.publish:
        raise UserError(f"earlier={cfg.earlier}: its runs are published together with new ones. Give publish=FOLDER.")
    runs = [read_run(folder) for folder in selected(Path(cfg.runs), cfg.select, cfg.where)]
    named = with_models(runs)
    if not cfg.publish or len({run.arm for run in named}) == 1:  # published arms keep the names that they have
        runs = named = told_apart(named)
    say(counted(runs))
    out = Path(cfg.out)
    first = cfg.select if isinstance(cfg.select, str) else cfg.select[0]
    write_report(named, out, title=cfg.title or first.rstrip("-*"))
    if cfg.publish:
        with reading(folders_of(runs)):
            publish(
                runs, Path(cfg.publish), f"_{cfg.part}" if cfg.part else "", Path(cfg.earlier) if cfg.earlier else None
            )
        say(f"table, data and figures: {cfg.publish}")
    else:
        show(runs)
    say(f"report: {out}")


def report_sweep(folders: Sequence[Path]) -> None:
    """Ends a sweep of `experiments.train`: one table over these finished runs, and `NAME.html` beside them."""
    runs = told_apart(with_models([read_run(folder) for folder in dict.fromkeys(folders)]))
    say(counted(runs))
    name = joined_name(dict.fromkeys(str(run.config.get("name", run.folder.name)) for run in runs), "+")
    out = folders[0].parent / f"{name}.html"
    write_report(runs, out, title=name)
    show(runs)
    say(f"report: {out}")


def counted(runs: Sequence[Run]) -> str:
    """The number of runs, and their differences beside the arms."""
    sentences = mixed(runs)
    return " ".join([f"{len(runs)} runs.", *sentences]) if sentences else f"{len(runs)} runs"


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """Adds settings to all arms' names if runs of one arm and game differ in them.

    Runs of one seed may differ in any setting, runs of several seeds in those that a seed does not explain.
    """
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(json.dumps([run.arm, variant_of(run, runs)]), []).append(run)
    differ: set[str] = set()
    for first, *others in alike.values():
        for other in others:
            differ |= set(unlike(first.config, other.config))
        for one, other in combinations((first, *others), 2):
            if one.seed == other.seed:
                a, b = flat(one.config), flat(other.config)
                differ |= {key for key in (*a, *b) if a.get(key) != b.get(key)}
    own = [[f"{key}={in_a_name(value)}" for key, value in flat(run.config).items() if key in differ] for run in runs]
    return [replace(run, arm=" ".join([run.arm, *settings])) for run, settings in zip(runs, own, strict=True)]


def show(runs: Sequence[Run]) -> None:
    """The headline table of each variant of the game, arms side by side, and what was seen in a sentence."""
    for suffix, group in variants(runs).items():
        columns = columns_of(arm_runs(group))
        names = headline(group[0].game, (name for found in columns.values() for name in found))
        say("\n" + (f"{in_words(suffix)}\n" if suffix else "") + format_table(columns, names) + "\n")
        for sentence in (*costs(group), *what_was_seen(arm_runs(group), group)):
            say(sentence + "\n")


def publish(runs: Sequence[Run], folder: Path, part: str = "", earlier: Path | None = None) -> None:
    """Writes the files of a published table.

    The headline variant of the game has plain names (`table.csv`); others' names end in the settings that differ.
    `part` ends all names, for further tables in one folder. `earlier`: a published folder, whose runs are added.
    """
    games = sorted({run.game for run in runs})
    if len(games) > 1 or games[0] not in MAIN:
        raise UserError(
            f"publish={folder}: the runs play {' and '.join(games)}. Select runs of one game, {' or '.join(MAIN)}."
        )
    check_writable(folder, "publish")
    kept = sorted(map(as_published, runs), key=order)
    tables = {part + suffix: by_model(group) for suffix, group in variants(kept).items()}
    cards = add_earlier(tables, earlier, part) if earlier else []
    for suffix, models in tables.items():
        if [*models] == [SMALL]:
            publish_variant(games[0], models[SMALL], folder, suffix)
            continue
        found = [
            (model, row)
            for model, own in models.items()
            for row in publish_variant(games[0], own, folder, ending(suffix, model, models), model)
        ]
        table = folder / f"table{suffix}.csv"
        write_csv(table, ("model", *TableRow.__dataclass_fields__), ((model, *astuple(row)) for model, row in found))
        draw_models(table, folder)
    add_cards(cards, folder)
    write_cards((run.folder for run in runs), folder)


def ending(suffix: str, model: str, models: Iterable[str]) -> str:
    """The ending of the names of a model's files; the small model alone has none of its own."""
    return suffix if [*models] == [SMALL] else suffix + in_a_file(f"_{in_a_name(model)}")


def add_earlier(tables: dict[str, dict[str, list[Run]]], earlier: Path, part: str) -> list[dict[str, Any]]:
    """Adds the runs of a published folder to the tables. Returns their cards."""
    endings = {ending(suffix, model, models) for suffix, models in tables.items() for model in models}
    several = any([*models] != [SMALL] for models in tables.values())
    runs = [run for models in tables.values() for own in models.values() for run in own]
    variant = tuple(f"{part}_{key}_" for key in runs[0].config.get("env") or {})
    there = [path.name.removesuffix(".csv.gz").removeprefix("per_seed") for path in earlier.glob("per_seed*.csv.gz")]
    if left := [own for own in sorted(there) if own not in endings and (several or own.startswith(variant))]:
        raise UserError(f"earlier={earlier}: it also has {in_words(left[0])}. Select new runs of each of its tables.")
    old = []
    for suffix, models in tables.items():
        for model, own in models.items():
            found = earlier_runs(earlier, ending(suffix, model, models), own)
            alone = [replace(run, evaluation={**run.evaluation, "by_game": {}}) for run in own]
            models[model] = sorted([*found, *alone], key=order)
            old += found
            for sentence in mixed(models[model]):
                say(sentence)
    presets = {preset_of(run) for run in [*runs, *old]}
    if len(presets) > 1:
        say(f"Runs of {' and of '.join(sorted(presets))}: whether these set the same was not checked.")
    say("bootstrap.csv and comparisons of a single seed are left out: earlier runs' single games are not published.")
    return [run.card for run in old]


def preset_of(run: Run) -> str:
    """The sweep and experiment of a run's command."""
    words = str(run.card.get("command", "")).split()
    return " ".join(word for word in words if word.startswith(("sweep=", "experiment="))) or "no sweep"


def with_models(runs: Sequence[Run]) -> list[Run]:
    """Adds the model to all arms' names if several models play, as on a page of all of them."""
    several = len(by_model(runs)) > 1
    return [replace(run, arm=f"{run.arm}, {model_of(run)}") if several else run for run in runs]


def draw_models(table: Path, out: Path) -> None:
    """Draws all models' arms of a table that has the column `model` side by side."""
    with reading(table):
        of = [row["model"] for row in csv_rows(table)]
        rows = [replace(row, arm=f"{row.arm}, {model}") for model, row in zip(of, read_table(table), strict=True)]
        _, drawn = drawn_of(rows)
        ablation_figure(rows, drawn, out / table.name.replace("table", "figure", 1).replace(".csv", ".svg"))


def variants(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Groups runs by the game's settings in which they differ, as endings of file names.

    The headline variant has an empty ending: the largest objective, and the smallest value of every other setting.
    """

    def order(run: Run) -> list[tuple[float, str]]:
        return [
            (value if isinstance(value, int | float) else 0.0, json.dumps(value))
            if key != "objective"
            else (-float(value), "")
            for key, value in variant_of(run, runs).items()
        ]

    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=order):
        differs = "".join(f"_{key}_{in_a_name(value)}" for key, value in variant_of(run, runs).items())
        groups.setdefault(in_a_file(differs), []).append(run)
    (_, headline), *others = groups.items()
    return {"": headline, **dict(others)}


def in_a_file(ending: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", ending)


def in_words(suffix: str) -> str:
    return suffix.strip("_").replace("_", " ")


def publish_variant(game: str, runs: Sequence[Run], folder: Path, suffix: str, model: str = "") -> list[TableRow]:
    """Writes the files of one variant of the game, and prints its table. Returns it.

    Of one model among several: the files beside the table and figure, which all models share.
    """
    arms = arm_runs(runs)
    if game == "among_us" or model:  # the table names the arm even if there is only one
        arms = [replace(arm, arm=named(arm.arm, runs)) for arm in arms]
    wanted = shown_in(game)
    asked = {arm.arm for arm in arms if "belief/accuracy" in arm.metrics}
    mute = [arm for arm in arms if asked and arm.arm not in asked]  # nobody was asked what they believe
    spoke = [arm for arm in arms if arm not in mute]
    names = [name for name in wanted if all(name in arm.metrics for arm in spoke)]
    for name in wanted:
        without = [f"{arm.arm} seed {arm.seed}" for arm in spoke if name not in arm.metrics]
        if name not in names and len(without) < len(spoke):
            say(f"{name} is not in the table: {', '.join(without)} never had a case of it; see per_seed.csv.gz")
    pairs = pairs_of((arm_label(run, runs) for run in runs), game)
    both = [name for name in names if all(name in arm.metrics for arm in mute)]
    rows, differences = ablation_table(spoke, names) + ablation_table(mute, both), arm_differences(arms, pairs, names)
    ratios = arm_ratios(arms, pairs, [name for name in RATIOS if name in names])
    equal = equal_compute(runs)
    kept = [m for m in dict.fromkeys((GAMES, *wanted, *CURVES)) if all(m in arm.metrics for arm in equal)]
    tables = {
        "table.csv": [] if model else rows,
        "differences.csv.gz": differences,
        "ratios.csv": ratios,
        "equal_compute.csv.gz": [*ablation_table(equal, kept), *arm_differences(equal, pairs, kept)],
        "bootstrap.csv": bootstrap_table(arms, pairs),
    }

    def path(name: str) -> Path:
        return folder / name.replace(".", f"{suffix}.", 1)

    for name, found in tables.items():
        if found:
            write_table(path(name), found)
        else:
            path(name).unlink(missing_ok=True)  # of other runs
    for name, (header, lines) in data_files(game, runs, arms, pairs, names).items():
        write_csv(path(name), header, lines)
    if not model:
        draw(folder, suffix, folder)
    if suffix:
        say("\n" + in_words(suffix))
    say("\n" + format_table(figures_by_arm(rows), names))
    for found in ([row for row in differences if row.metric == MAIN[game]], ratios):
        if found:
            say("\n" + format_table(figures_by_arm(found)))
    for sentence in costs(runs):
        say("\n" + sentence)
    return rows


def redraw(folder: Path, out: Path) -> None:
    """Draws the figures of a published table's folder again. UserError if it is none."""
    suffixes = [path.name[len("curves") : -len(".csv.gz")] for path in sorted(folder.glob("curves*.csv.gz"))]
    own = None if suffixes else drawn_by_a_study(folder)
    if own is not None:
        check_writable(out, "publish")
        own(out / "figure.svg")
        if (folder / PLANE).exists():
            with reading(folder / PLANE):
                plane_figure(read_table(folder / PLANE), out / "plane.svg")
    elif not suffixes:
        raise UserError(f"data={folder}: no published table is there (it has no curves.csv.gz). Name another folder.")
    check_writable(out, "publish")
    for suffix in suffixes:
        if (folder / f"table{suffix}.csv").exists():  # else a model's part of one
            draw(folder, suffix, out)
    for table in sorted(folder.glob("table*.csv")):
        if table.read_text().startswith("model,"):
            draw_models(table, out)
    say(f"figures: {out}")


def drawn_by_a_study(folder: Path) -> Callable[[Path], None] | None:
    """Returns how a table of ratings, of intents or of talk is drawn; None for any other folder."""
    if not (folder / "table.csv").exists():
        return None
    rows = read_table(folder / "table.csv")
    there = {row.metric for row in rows}
    if "intent/correspondence" in there:
        from experiments.studies import among_us_intents, intents, press_intents  # heavy, and needed here alone

        own = {"intent/truthful": among_us_intents, "score/1v6": press_intents}  # a metric that this study alone has
        study = next((study for metric, study in own.items() if metric in there), intents)
        return partial(study.draw, rows)
    metrics = next((each for each in (RATED, RATED_TWO, TALK) if there.issuperset(each)), None)
    return partial(ablation_figure, rows, metrics) if metrics else None


def draw(folder: Path, suffix: str, out: Path) -> None:
    """Draws a published table's figure from the files of its folder. UserError if one is malformed."""
    with reading(folder):
        rows, runs = read_table(folder / f"table{suffix}.csv"), read_curves(folder / f"curves{suffix}.csv.gz")
        game, drawn = drawn_of(rows)
        ablation_figure(
            rows,
            drawn,
            out / f"figure{suffix}.svg",
            published=read_published(folder / PUBLISHED) if game == "among_us" else None,
            runs=runs,
            curve=MAIN[game] if game == "among_us" else "",
        )


def drawn_of(rows: Sequence[TableRow]) -> tuple[str, list[str]]:
    """The game of a published table, and the metrics of its figure."""
    there = {row.metric for row in rows}
    game = game_of(there)
    return game, [name for name in DRAWN[game] if name in there]


def read_published(path: Path) -> dict[str, Interval]:
    """Reads the paper's figures by arm; empty if there is no such file. UserError if a line is malformed."""
    with reading(path):
        return {row["arm"]: interval_of({**row, "n": "0"}, "n") for row in csv_rows(path)} if path.exists() else {}


def data_files(
    game: str, runs: Sequence[Run], arms: Sequence[ArmRun], pairs: Sequence[tuple[str, str]], names: Sequence[str]
) -> dict[str, tuple[tuple[str, ...], Iterable[Sequence[Any]]]]:
    """Header and lines of the csv files beside the tables, by name. `names`: the table's metrics."""
    bases, interval = base_names(runs), ("mean", "low", "high")
    drawn = [m for m in CURVES if any(m in row for run in runs for row in run.curves)]
    files: dict[str, tuple[tuple[str, ...], Iterable[Sequence[Any]]]] = {
        # each run's own figures, with intervals over its games
        "per_seed.csv.gz": (
            ("arm", "seed", "metric", *interval, "games"),
            [(a.arm, a.seed, m, *astuple(a.metrics[m])) for a in arms for m in shown_in(game) if m in a.metrics],
        ),
        # figures along training, after so many training games
        "curves.csv.gz": (
            (*CURVE, *drawn),
            [
                [run.arm, run.seed, row["phase"], row["iteration"], row["iteration"] * run.games]
                + [f"{row[m]:.5g}" if m in row else "" for m in drawn]
                for run in runs
                for row in run.curves
                if not row.keys().isdisjoint(drawn)
            ],
        ),
        # belief after each message of a discussion (0: before the first), of each run, and as means over seeds
        "belief_by_message.csv.gz": (
            ("arm", "seed", "message", "metric", *interval, "games"),
            [
                (arm, run.seed, message, name, *map(own.get, (*interval, "n")))
                for run in runs
                for condition, by_message in run.evaluation.get("belief_by_message", {}).items()
                if (arm := run.arm if condition == TRAINED else bases.get((run.folder, condition)))
                for message, found in enumerate(by_message)
                for name, own in found.items()
            ],
        ),
        "belief_by_message_mean.csv.gz": (
            ("arm", "message", "metric", *interval, "seeds", "games"),
            [
                (named(arm, runs), message, name, *astuple(row)[2:])
                for arm, entries in mean_entries(runs).items()
                for message, found in enumerate(entries)
                for name, row in found.items()
            ],
        ),
        # the ten commonest forms of messages of each run's players and of their base, in the recorded games
        "forms.csv.gz": (
            ("arm", "seed", "games", "messages", "form", "uses", "naming", "naming_imposter"),
            [
                (named(each.arm, runs), each.seed, each.games, each.messages, *astuple(form))
                for each in speakers(runs)
                for form in each.forms[:10]
            ],
        ),
    }
    if pairs and (apart := curve_differences(runs, pairs)):
        files["curve_differences.csv.gz"] = (
            ("arm", "training_games", "metric", *interval, "seeds", "games"),
            [(row.arm, games, *astuple(row)[1:]) for games, row in apart],
        )
    return files


def named(arm: str, runs: Sequence[Run]) -> str:
    """The arm's own name, also if there is only one."""
    return runs[0].arm if arm == TRAINED else arm


def curve_differences(runs: Sequence[Run], pairs: Sequence[tuple[str, str]]) -> list[tuple[int, TableRow]]:
    """Arm minus arm in the evaluations during training, paired by seed, after equally many training games."""
    after: dict[int, list[ArmRun]] = {}
    for run in runs:
        played = int((run.config.get("eval") or {}).get("games") or 0)
        for line in run.curves:
            if line["phase"] == "eval":
                kept = {m: Interval(line[m], math.nan, math.nan, played) for m in CURVES if m in line}
                after.setdefault(line["iteration"] * run.games, []).append(ArmRun(run.arm, run.seed, kept))
    return [(games, row) for games in sorted(after) for row in arm_differences(after[games], pairs, CURVES)]


if __name__ == "__main__":
    main()

"""Writes and draws the folder of a published table.

docs/howto/commands.md names its files.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from experiments.launch.terminal import say
from experiments.setup.published import CURVES, as_published, earlier_runs, game_of, order, read_curves
from experiments.setup.select import add_cards, in_a_name, write_cards
from marl.common.errors import UserError, check_writable
from marl.common.files import csv_rows, reading
from marl.metrics.compute import GAMES, PASSES, SHARES
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
from marl.report.prose import costs, mixed
from marl.report.runs import (
    SMALL,
    TRAINED,
    Run,
    arm_label,
    arm_runs,
    base_names,
    by_model,
    equal_compute,
    variant_of,
)

EQUAL = "equal_compute.csv.gz"
PUBLISHED = "published.csv"  # optional, the paper's figures: arm,mean,low,high,source

# The metric of published figures, learning curves and ratios.
MAIN = {"dond": "game/score", "among_us": "game/win_rate/crewmates", "diplomacy": "game/score"}
DRAWN = {
    "dond": ("game/score", "belief/gain_over_prior"),
    "among_us": ("game/win_rate/crewmates",),
    "diplomacy": ("game/score", "press/said", "press/heard"),
}
OF_MODELS = ("vote/imposter",)  # drawn as well where models are side by side: of few games there are many votes
RATIOS = ("game/win_rate/crewmates",)  # metrics whose ratios between arms are also shown


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


# --- One variant ------------------------------------------------------------------------------------------------------
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
    tables = {
        "table.csv": [] if model else rows,
        "differences.csv.gz": differences,
        "ratios.csv": ratios,
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
    write_equal_compute(game, runs, path(EQUAL))
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


def data_files(
    game: str, runs: Sequence[Run], arms: Sequence[ArmRun], pairs: Sequence[tuple[str, str]], names: Sequence[str]
) -> dict[str, tuple[tuple[str, ...], Iterable[Sequence[Any]]]]:
    """Header and lines of the csv files beside the tables, by name. `names`: the table's metrics."""
    bases, interval = base_names(runs), ("mean", "low", "high")
    drawn = [m for m in CURVES if any(m in row for run in runs for row in run.curves)]
    return {
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


def write_equal_compute(game: str, runs: Sequence[Run], path: Path) -> None:
    """Writes arms and their differences at shares of the cheapest run's cost; without known costs, removes the file.

    Below the whole cost only the metrics of the game's first table, which keeps the file small.
    """
    pairs, rows = pairs_of((arm_label(run, runs) for run in runs), game), list[tuple[float, TableRow]]()
    for share in SHARES:
        arms = equal_compute(runs, share)
        kept = [m for m in dict.fromkeys((GAMES, *shown_in(game), *CURVES)) if all(m in arm.metrics for arm in arms)]
        if share < 1:
            kept = [GAMES, *headline(game, kept), PASSES]
        rows += [(share, row) for row in (*ablation_table(arms, kept), *arm_differences(arms, pairs, kept))]
    if rows:
        header = ("arm", "share", "metric", "mean", "low", "high", "seeds", "games")
        write_csv(path, header, [(row.arm, share, *astuple(row)[1:]) for share, row in rows])
    else:
        path.unlink(missing_ok=True)  # of other runs


def compare_again(folder: Path, suffix: str, out: Path) -> None:
    """Computes a published table's comparison at equal compute again, from its curves, if it has one."""
    name = EQUAL.replace(".", f"{suffix}.", 1)
    if not (folder / name).exists():
        return
    with reading(folder):
        played = {row.arm: row.games // row.seeds for row in read_table(folder / name)}
        runs = [
            replace(run, config={**run.config, "eval": {"games": played.get(run.arm, 0)}})
            for run in read_curves(folder / f"curves{suffix}.csv.gz")
        ]
        game = game_of({row["metric"] for row in csv_rows(folder / f"per_seed{suffix}.csv.gz")})
    if equal_compute(runs):  # else the curves lack costs, and the published file stays
        write_equal_compute(game, runs, out / name)


# --- Names ------------------------------------------------------------------------------------------------------------
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
    (_, first), *others = groups.items()
    return {"": first, **dict(others)}


def in_a_file(ending: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", ending)


def in_words(suffix: str) -> str:
    return suffix.strip("_").replace("_", " ")


def ending(suffix: str, model: str, models: Iterable[str]) -> str:
    """The ending of the names of a model's files; the small model alone has none of its own."""
    return suffix if [*models] == [SMALL] else suffix + in_a_file(f"_{in_a_name(model)}")


def named(arm: str, runs: Sequence[Run]) -> str:
    """The arm's own name, also if there is only one."""
    return runs[0].arm if arm == TRAINED else arm


# --- Figures ----------------------------------------------------------------------------------------------------------
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


def draw_models(table: Path, out: Path) -> None:
    """Draws all models' arms of a table that has the column `model` side by side."""
    with reading(table):
        of = [row["model"] for row in csv_rows(table)]
        rows = [replace(row, arm=f"{row.arm}, {model}") for model, row in zip(of, read_table(table), strict=True)]
        _, drawn = drawn_of(rows)
        drawn += [name for name in OF_MODELS if name in {row.metric for row in rows}]
        ablation_figure(rows, drawn, out / table.name.replace("table", "figure", 1).replace(".csv", ".svg"))

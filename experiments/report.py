"""Turns finished runs into a report, and into the folder of a published table.

`python -m experiments.report select='NAME-*'` writes `runs/report.html`; `publish=FOLDER` also the table, its data, the
figure and the run cards, for each variant of the game (docs/howto/commands.md names the files). `data=FOLDER` draws the
figure of such a folder again, and compares arms at equal compute again, without any run.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

from omegaconf import DictConfig

from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.setup.publish import compare_again, draw, draw_models, in_words, publish, variants
from experiments.setup.select import in_a_name, selected
from marl.common.errors import UserError, check_writable
from marl.common.files import joined_name, reading
from marl.metrics.ratings import RATED, RATED_TWO
from marl.metrics.tables import format_table, read_table
from marl.metrics.wording import headline
from marl.report.figures import ablation_figure
from marl.report.page import folders_of, read_run, write_report
from marl.report.plane import PLANE, plane_figure
from marl.report.prose import costs, mixed, what_was_seen
from marl.report.runs import Run, arm_runs, by_model, model_of, variant_of
from marl.report.tables import columns_of
from marl.storage.folder import flat, unlike

TALK = ("talk/said", "talk/heard", "talk/vote_credit/silence")  # of comparison=among_us_talk: said, heard, acted on


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
        runs = named = with_differing_settings(named)
    say(counted(runs))
    out = Path(cfg.out)
    first = cfg.select if isinstance(cfg.select, str) else cfg.select[0]
    write_report(named, out, title=cfg.title or first.rstrip("-*"))
    if cfg.publish:
        part, earlier = f"_{cfg.part}" if cfg.part else "", Path(cfg.earlier) if cfg.earlier else None
        with reading(folders_of(runs)):
            publish(runs, Path(cfg.publish), part, earlier)
        say(f"table, data and figures: {cfg.publish}")
    else:
        show(runs)
    say(f"report: {out}")


def report_sweep(folders: Sequence[Path]) -> None:
    """Ends a sweep of `experiments.train`: one table over these finished runs, and `NAME.html` beside them."""
    runs = with_differing_settings(with_models([read_run(folder) for folder in dict.fromkeys(folders)]))
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


def with_differing_settings(runs: Sequence[Run]) -> list[Run]:
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


def with_models(runs: Sequence[Run]) -> list[Run]:
    """Adds the model to all arms' names if several models play, as on a page of all of them."""
    several = len(by_model(runs)) > 1
    return [replace(run, arm=f"{run.arm}, {model_of(run)}") if several else run for run in runs]


def redraw(folder: Path, out: Path) -> None:
    """Draws the figures of a published table's folder again, and compares its arms at equal compute. UserError if it is
    none."""
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
        compare_again(folder, suffix, out)
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


if __name__ == "__main__":
    main()

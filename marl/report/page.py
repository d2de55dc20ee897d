"""Writes `report.html` from run folders: setting, findings, tables, curves, beliefs, games, run cards.

The page is templates/report.html. It is self-contained, the template engine escapes whatever a model wrote, and the
browser is told to run no script but templates/report.js, which filters games. All is readable without scripts.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from marl.common.errors import UserError
from marl.common.files import reading, write_text, writing
from marl.metrics.tables import ablation_table
from marl.metrics.wording import ENDS, headline
from marl.report.figures import arm_colours, belief_panels, floor_of, mean_entries, profile_panel, training_panels
from marl.report.games import shown_games, speakers
from marl.report.html import report_script, templates
from marl.report.prose import comparisons, costs, endings, findings, mixed, own_ends, what_was_run
from marl.report.runs import Run, arm_label, arm_runs, read
from marl.report.tables import columns_of, other_metrics, over_seeds, table_rows


def read_run(folder: str | Path) -> Run:
    """Reads a run's folder. UserError if it is no run's folder, or a file in it is malformed."""
    folder = Path(folder)
    with reading(folder):
        run = read(folder)
        _try(run)
    return run


def _try(run: Run) -> None:
    """Builds the page's texts of this run alone, so that damage shows before any figure is drawn."""
    runs = [run]
    float((run.config.get("env") or {}).get("objective") or 0)
    columns = columns_of(arm_runs(runs))
    table_rows(columns, other_metrics(columns, ()), dict.fromkeys(columns, 0))
    what_was_run(runs), mixed(runs), findings(columns), mean_entries(runs), speakers(runs), run_card(run)


def build_report(run_folders: Sequence[str | Path], out_path: str | Path, title: str) -> None:
    """Reads these runs and writes their report to `out_path`, in one step. UserError if a folder is no run's."""
    if not run_folders:
        raise UserError("no runs to report on: name at least one run's folder")
    write_report([read_run(folder) for folder in run_folders], out_path, title)


def write_report(runs: Sequence[Run], out_path: str | Path, title: str) -> None:
    """Writes the report of one or more runs. Runs of the same arm are its seeds."""
    with reading(folders_of(runs)):
        page = page_of(runs, title)
    out_path = Path(out_path)
    with writing(out_path):
        out_path.parent.mkdir(parents=True, exist_ok=True)
    write_text(out_path, page)


def folders_of(runs: Sequence[Run]) -> str:
    """The folders of the runs, for an error."""
    names = [str(run.folder) for run in runs]
    return ", ".join(names[:3]) + (f" or one of {len(names) - 3} more runs" if len(names) > 3 else "")


def page_of(runs: Sequence[Run], title: str) -> str:
    """The page's text."""
    arms = arm_runs(runs)
    columns = columns_of(arms)
    heard = [speaker for speaker in speakers(runs) if speaker.messages]
    names = list(dict.fromkeys([*columns, *(arm_label(run, runs) for run in runs), *(each.arm for each in heard)]))
    colours = arm_colours(names)
    entries = mean_entries(runs)
    games = list(dict.fromkeys(run.game for run in runs))
    measured = [name for found in columns.values() for name in found]
    first_rows = list(dict.fromkeys(name for game in games for name in headline(game, measured)))
    shown = shown_games(runs)
    script, script_digest = report_script()
    ends = ENDS if games == ["among_us"] else own_ends(columns)
    return (
        templates()
        .get_template("report.html")
        .render(
            title=title,
            facts=[*what_was_run(runs), *mixed(runs)],
            findings=[*findings(columns), *comparisons(arms, runs), *costs(runs)],
            columns=list(columns),
            colours=colours,
            headline=table_rows(columns, first_rows, colours),
            rest=table_rows(columns, other_metrics(columns, first_rows), colours),
            endings=endings(columns, ends) if games != ["dond"] else [],
            ends=list(enumerate(ends.values())),
            over_seeds=over_seeds(arms, list(columns), first_rows, colours),
            profile=profile_panel(arms, first_rows, colours),
            seeds=max((row.seeds for row in ablation_table(arms)), default=1),
            panels=training_panels(runs, columns, colours),
            beliefs=belief_panels(entries, colours),
            prior=floor_of(entries) == "prior",
            speakers=heard,
            naming="among_us" in games,
            games=shown,
            players=[(name, name) for name in dict.fromkeys(play["condition"] for game in shown for play in game)],
            endings_shown=[(end, end) for end in sorted({play["ending"] for game in shown for play in game})],
            script=Markup(script),
            script_digest=script_digest,
            cards=[run_card(run) for run in runs],
        )
    )


def run_card(run: Run) -> dict[str, Any]:
    """The run card without its figures (the table shows them), and the configuration as text."""
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

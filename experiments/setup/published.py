"""Runs as a published table's folder keeps them: figures rounded as in its files, and runs read back from there."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from experiments.setup.select import CARDS, card_line
from marl.common.errors import UserError
from marl.common.files import csv_rows, parsed_json, read_text, reading
from marl.metrics.compute import PASSES
from marl.metrics.tables import curve_lines, interval_of
from marl.metrics.wording import MUTE, arm_name, shown_in
from marl.report.games import Form, Speaker
from marl.report.runs import TRAINED, Run
from marl.storage.folder import ELSEWHERE

CURVES = (
    "game/score", "game/score_agreed", "game/points", "game/agreement", "game/pareto", "game/pareto_agreed",
    "game/win_rate/crewmates", "vote/imposter", "vote/witness", "talk/names_imposter", "belief/accuracy",
    "belief/log_loss", "belief/brier", "reward/game", "reward/speaking", "loss/listening", "loss/plan", "loss/entropy",
    "loss/kl", "filter/kept", "talk/turns", "talk/tokens_per_turn", "talk/vocabulary", "talk/inverted",
    "talk/inverted_explicit", "errors/per_turn", "errors/aborted", PASSES,
)  # fmt: skip
OWN = {
    "among_us": "game/win_rate/crewmates",
    "diplomacy": "game/centres",
}  # a metric that tables of this game alone have
# Settings that differ between runs of one table, or that name them
NAMING = ("seed", "ablation", "arm", "sweep", "experiment", "name", "device", *ELSEWHERE)


def game_of(metrics: Sequence[str] | set[str]) -> str:
    """The game whose table has these metrics."""
    return next((game for game, metric in OWN.items() if metric in metrics), "dond")


def order(run: Run) -> tuple[str, str, int]:
    """The place of a run in published files: by arm, then by seed."""
    return str(run.card.get("arm") or run.config.get("arm")), run.arm, run.seed


def as_published(run: Run) -> Run:
    """Keeps the figures that published files have, rounded as there, so that tables can be made from the files."""

    def six(found: Mapping[str, Any]) -> dict[str, Any]:
        return {end: float(f"{value:.6g}") if isinstance(value, float) else value for end, value in found.items()}

    shown, evaluation = shown_in(run.game), run.evaluation
    kept = {
        "conditions": {
            condition: {metric: six(own) for metric, own in found.items() if metric in shown}
            for condition, found in evaluation.get("conditions", {}).items()
        },
        "belief_by_message": {
            condition: [{metric: six(own) for metric, own in entry.items()} for entry in entries]
            for condition, entries in evaluation.get("belief_by_message", {}).items()
        },
    }
    curves = [
        {"phase": row["phase"], "iteration": row["iteration"]}
        | {name: float(f"{row[name]:.5g}") for name in CURVES if name in row}
        for row in run.curves
    ]
    return replace(run, evaluation={**evaluation, **kept}, curves=curves)


def read_curves(path: Path) -> list[Run]:
    """Reads the runs of a `curves.csv.gz`: arm, seed and curves alone."""
    found: dict[tuple[str, int], Run] = {}
    lines: dict[tuple[str, int, str, int], dict[str, Any]] = {}
    for arm, seed, phase, iteration, games, figures in curve_lines(path):
        run = found.setdefault((arm, seed), Run(path.parent, arm, seed, {"algo": {}}, {}, [], {}))
        if iteration:
            run.config["algo"]["games"] = games // iteration
        line = lines.setdefault((arm, seed, phase, iteration), {"iteration": iteration, "phase": phase})
        if len(line) == 2:
            run.curves.append(line)
        line |= figures
    return list(found.values())


def earlier_runs(folder: Path, ending: str, new: Sequence[Run]) -> list[Run]:
    """Reads the runs of a published table, whose files end in `ending`, to publish them with new ones of the same game.

    Settings are those of a new run, of the same arm where there is one, else of one that may speak as well. Transcripts
    and single games are not kept. UserError if it is no such folder, or its runs cannot stand beside the new ones.
    """
    files = {name: folder / f"{name}{ending}.csv.gz" for name in ("per_seed", "curves", "belief_by_message", "forms")}
    for path in (*files.values(), folder / CARDS):
        if not path.is_file():
            raise UserError(
                f"earlier={folder}: there is no {path.name}. Name a folder with all files that publish=FOLDER writes."
            )
    with reading(folder):
        cards = [parsed_json(line) for line in read_text(folder / CARDS).splitlines()]
        rows = {name: csv_rows(path) for name, path in files.items() if name != "curves"}
        if (there := game_of({row["metric"] for row in rows["per_seed"]})) != new[0].game:
            raise UserError(
                f"earlier={folder}: its game is {there}, that of the new runs {new[0].game}. Select others."
            )
        means = {(row["arm"], int(row["seed"]), row["metric"]): float(row["mean"]) for row in rows["per_seed"]}
        runs = sorted((_filled(run, new, cards, means) for run in read_curves(files["curves"])), key=order)
        own, arms = {(run.arm, run.seed): run for run in runs}, [*dict.fromkeys(run.arm for run in runs)]

        def owner(row: Mapping[str, str]) -> tuple[Run, str]:
            """The run whose figures these are, and their condition. A base is the first run's that has it."""
            arm, seed = arms[0] if [row["arm"], *arms[1:]] == [TRAINED] else row["arm"], int(row["seed"])
            if (arm, seed) in own:
                return own[arm, seed], TRAINED
            condition, _, of = arm.partition(" of ")
            first, *_ = [run for run in runs if run.seed == seed and of in ("", run.arm)]
            if of and all(of != other.arm for other in new):  # a base that was measured in games of its own
                first.evaluation["about"] = {**first.evaluation["about"], "arm": of}
            return first, condition

        for row in rows["per_seed"]:
            run, condition = owner(row)
            run.evaluation["conditions"].setdefault(condition, {})[row["metric"]] = interval_of(row).to_json()
        for row in rows["belief_by_message"]:
            run, condition = owner(row)
            entries = run.evaluation["belief_by_message"].setdefault(condition, [])
            entries += [{} for _ in range(int(row["message"]) + 1 - len(entries))]
            ends = {end: float(row[end]) if row[end] else None for end in ("mean", "low", "high")}
            entries[int(row["message"])][row["metric"]] = {**ends, "n": int(row["games"])}
        for row in rows["forms"]:
            run, condition = owner(row)
            speaker = Speaker(run.arm, run.seed, int(row["games"]), int(row["messages"]), [])
            form = Form(row["form"], *(int(row[name]) for name in ("uses", "naming", "naming_imposter")))
            run.forms.setdefault(condition, speaker).forms.append(form)
    for run in runs:
        for other in new:
            _check_alike(folder, run, other)
    return runs


def _filled(
    run: Run, new: Sequence[Run], cards: Sequence[dict[str, Any]], means: Mapping[tuple[str, int, str], float]
) -> Run:
    """Adds the settings of a new run, and the run's card: the one that has its arm, its seed and its figures."""

    def own(card: Mapping[str, Any]) -> bool:
        figures = {name: figure[0] for name, figure in card.get("figures", {}).items()}
        alike = all(  # cards have four decimals, tables six digits
            math.isclose(means.get((run.arm, run.seed, name), mean), mean, rel_tol=1e-5, abs_tol=1e-4)
            for name, mean in figures.items()
        )
        return arm_name(card["arm"], new[0].game) == run.arm and card["seeds"] == [run.seed] and alike

    found = [card for card in cards if own(card)]
    if len(found) != 1:
        raise UserError(
            f"earlier={run.folder}: {CARDS} has {len(found)} lines with the arm, seed and figures of {run.arm} seed "
            f"{run.seed}, instead of one. Name another folder."
        )
    as_mute = [each for each in new if (each.arm == MUTE) == (run.arm == MUTE)]
    like = next((each for each in as_mute if each.arm == run.arm), (as_mute or new)[0])
    config = {**like.config, "algo": {**(like.config.get("algo") or {}), **run.config["algo"]}}
    about = like.evaluation.get("about", {})
    if not as_mute:  # its games, in which all or none may speak, are none of the new runs'
        about = {**about, "arm": MUTE if run.arm == MUTE else ""}
    evaluation = {"about": about, "conditions": {}, "belief_by_message": {}}
    return replace(run, folder=run.folder / found[0]["run"], config=config, card=found[0], evaluation=evaluation)


def _check_alike(folder: Path, run: Run, new: Run) -> None:
    """Compares an earlier run with a new one as far as its files tell. Hashes of cards do not: seeds change them."""
    if (run.arm, run.seed) == (new.arm, new.seed):
        raise UserError(
            f"earlier={folder}: {run.arm} seed {run.seed} is there, and {new.folder.name} has the same arm and seed. "
            "Select other runs."
        )
    facts = [
        {
            "evaluation games": max((own["n"] for own in each.evaluation["conditions"][TRAINED].values()), default=0),
            "training games an iteration": each.games,
            "iterations": each.curves[-1]["iteration"],
            "settings": given(card_line(each.card)["command"]),
            "settings of the game": given(card_line(each.card)["command"], "env"),
        }
        for each in (run, new)
    ]
    for what in [*facts[0]] if run.arm == new.arm else ["evaluation games", "settings of the game"]:
        first, other = (each[what] for each in facts)
        if first != other:
            raise UserError(
                f"earlier={folder}: {what} of {run.arm} seed {run.seed}: {_in_words(first)}, of {new.folder.name}: "
                f"{_in_words(other)}. Select runs that differ in seed and ablation alone."
            )


def given(command: str, group: str = "") -> dict[str, Any]:
    """The settings of a run's command, or those of a group, by name, without those that seeds and arms differ in."""
    found = {}
    for word in command.split()[1:]:
        name, equals, text = word.lstrip("+").partition("=")
        first = re.split("[./]", name.lstrip("~"))[0]
        if (equals or name.startswith("~")) and first not in (*NAMING, "hydra") and group in ("", first):
            found[name] = _value(text)
    return found


def _value(text: str) -> Any:
    """Returns what Hydra reads of a setting: 1e-3 and 0.001 are one value. A sweep's list of values stays text."""
    try:
        override = OverridesParser.create().parse_override(f"setting={text}")
    except HydraException:
        return text
    return text if override.is_sweep_override() else override.value()


def _in_words(fact: Any) -> str:
    if not isinstance(fact, dict):
        return str(fact)
    return " ".join(sorted(f"{name}={value}".removesuffix("=") for name, value in fact.items())) or "as shipped"

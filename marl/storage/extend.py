"""A run that takes up what a shorter one of the same settings has made.

Where nothing in a run depends on how many iterations are still to come, those of a short run are the first ones of a
longer one, to the last bit. So they are taken where that is sure: of a run whose learning rate is steady, made by the
same code with the same libraries on the same hardware, from the same base and files. What it leaves out: models that
start as they were found (`base=none`).
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marl.common.errors import UserError
from marl.common.files import digest, read_text, reading, write_text
from marl.storage.checkpoint import (
    FORMAT,
    CheckpointConfig,
    checkpoints_in,
    copy_folder,
    folder_digest,
    read_state,
    verify_folder,
)
from marl.storage.folder import CARD, REFERENCE, UNKNOWN, finished_run, flat, read_settings
from marl.storage.tracking import METRICS_FILE, TABLES_FILE, TIMING_FILE, read_metrics

LENGTH, NAME = "algo.iterations", "name"  # in which the two may differ
BEGUN_AS = "begun_as"  # in a checkpoint's notes and on the card, the shorter run
OTHER = {"commits": "code", "made_with": "libraries, hardware or settings of speed", "inputs": "files"}


class Unfit(Exception):
    """Why nothing of a shorter run is taken."""


@dataclass(frozen=True)
class Longer:
    """A run that is to begin: its folder, which holds its configuration; what its checkpoints would note of how it is
    made (`commits`, `made_with`, `inputs`); where its base is in the cache, or will be; which checkpoints stay; whether
    its tracker has tables."""

    folder: Path
    notes: Mapping[str, Any]
    base: Path
    checkpoint: CheckpointConfig
    tables: bool


def shorter_run(folder: Path) -> Path | None:
    """The longest finished run beside this folder, which holds a configuration, that has fewer iterations and otherwise
    the same settings, whatever its name. None where there is none."""
    own = flat(read_settings(folder))
    found: dict[int, Path] = {}
    same = glob.escape(f"-{own['arm']}-s{own['seed']}-")
    for card in sorted(folder.parent.glob(f"*{same}*/{CARD}")):
        with suppress(UserError):  # of a run that is not whole nothing is taken
            there = flat(finished_run(card.parent)[0])
            alike = {name: own.get(name) for name in (LENGTH, NAME)}
            if there | alike == own and there[LENGTH] < own[LENGTH]:
                found[there[LENGTH]] = card.parent
    return found[max(found)] if found else None


def take_up(short: Path, run: Longer) -> Path:
    """Puts what a shorter run has made up to one of its checkpoints into the folder of a longer one, the newest
    checkpoint last; returns that one, from which the longer run goes on. Raises Unfit, and nothing is written, where it
    has no checkpoint that the longer run would have come to."""
    states: dict[Path, dict[str, Any]] = {}  # of whole checkpoints, the oldest first
    problem = "has no whole checkpoint"
    try:
        with reading(short):
            settings, card = finished_run(short)
            if card.get("config_hash") != digest(settings):
                raise Unfit("was edited")
            for checkpoint in checkpoints_in(short / "checkpoints"):
                with suppress(UserError):
                    if not verify_folder(checkpoint):
                        states[checkpoint] = read_state(checkpoint)
            there = {state["iteration"] for state in states.values()}
            for newest in reversed(states):
                if not (problem := _problem(short, settings, card.get("base"), states[newest], there, run)):
                    break
            if problem:
                raise Unfit(problem)
            record = _record(short, states[newest]["iteration"], run.tables)
    except UserError as error:
        raise Unfit(f"has a file that cannot be read ({error})") from error
    if not run.base.exists():
        copy_folder(short / REFERENCE, run.folder / REFERENCE)
    for name, text in record.items():
        (run.folder / name).parent.mkdir(exist_ok=True)
        write_text(run.folder / name, text)
    for checkpoint, state in states.items():
        if checkpoint <= newest:
            state |= {"run": run.folder.name, BEGUN_AS: short.name, "format": FORMAT}
            texts = {"state.json": json.dumps(state, sort_keys=True)}
            copy_folder(checkpoint, run.folder / "checkpoints" / checkpoint.name, texts)
    return run.folder / "checkpoints" / newest.name


def _problem(
    short: Path, settings: Mapping[str, Any], base: Any, state: Mapping[str, Any], there: set[int], run: Longer
) -> str:
    """Why the longer run would not have come to the checkpoint of this state; empty where it would."""
    iteration, every = state["iteration"], settings["eval"]["every"]
    if other := [OTHER[name] for name, noted in run.notes.items() if state.get(name) != noted]:
        return f"was made with other {', other '.join(other)}"
    if UNKNOWN in state.get("commits", []):
        return "was made by code in no checkout, of which nobody can tell whether it is today's"
    kept = run.base if run.base.exists() else short / REFERENCE
    if base != run.base.name or verify_folder(kept) or folder_digest(kept) != state.get("base"):
        return "had another base"
    if iteration == settings["algo"]["iterations"] and not (every and iteration % every == 0):
        return "was evaluated where the longer run is not"  # because that was its end
    checkpoints = range(run.checkpoint.every, iteration + 1, run.checkpoint.every)[-run.checkpoint.keep :]
    best = [state["best"]["iteration"]] if state.get("best") else []
    if state.get("run") != short.name or not {*checkpoints, *best} <= there:
        return "has not all the checkpoints that the longer run has"
    try:
        rows = read_metrics(short / METRICS_FILE)
    except UserError:
        rows = []
    if sum(row["iteration"] <= iteration for row in rows) != state.get("metrics_lines"):
        return "has lost some of its metrics"
    return ""


def _record(short: Path, iteration: int, tables: bool) -> dict[str, str]:
    """Metrics, which a tracker cuts off behind the checkpoint, and the games that were kept until then, by file."""
    names = [METRICS_FILE, TIMING_FILE]
    if tables and (short / "wandb" / TABLES_FILE).exists():
        names.append(f"wandb/{TABLES_FILE}")
    for path in sorted((short / "episodes").glob("*.jsonl")):
        numbered = re.fullmatch(r"(?:iteration|planned)-(\d+)", path.stem)
        if numbered and int(numbered[1]) <= iteration:
            names.append(f"episodes/{path.name}")
    return {name: read_text(short / name) for name in names}

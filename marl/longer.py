"""A run that takes up what a shorter one of the same settings has made.

Where nothing in a run depends on how many iterations are still to come, those of a short run are the first ones of a
longer one, to the last bit. What this leaves out: learning rates that fall over all iterations (`algo.anneal_lr`).
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from marl.checkpoint import FORMAT, checkpoints_in, copy_folder, folder_digest, read_state, verify_folder
from marl.errors import UserError
from marl.files import write_text
from marl.runs import CARD, REFERENCE, finished_run, flat, read_settings
from marl.tracking import METRICS_FILE, TABLES_FILE, TIMING_FILE

LENGTH, NAME = "algo.iterations", "name"  # in which the two may differ
BEGUN_AS = "begun_as"  # in a checkpoint's notes and on the card, the shorter run


def shorter_run(folder: Path) -> Path | None:
    """The longest finished run beside this folder, which holds a configuration, that has fewer iterations and otherwise
    the same settings, whatever its name. None where there is none, or its iterations would be others."""
    own = flat(read_settings(folder))
    if own.get("algo.anneal_lr"):
        return None
    found: dict[int, Path] = {}
    same = glob.escape(f"-{own['arm']}-s{own['seed']}-")
    for card in sorted(folder.parent.glob(f"*{same}*/{CARD}")):
        with suppress(UserError):  # of a run that is not whole nothing is taken
            there = flat(finished_run(card.parent)[0])
            if there[LENGTH] < own[LENGTH] and there | {name: own[name] for name in (LENGTH, NAME)} == own:
                found[there[LENGTH]] = card.parent
    return found[max(found)] if found else None


def take_up(short: Path, folder: Path, inputs: Mapping[str, str], cache: Path) -> Path | None:
    """Puts what a shorter run has made up to one of its checkpoints into a folder, that checkpoint last; returns the
    new one, from which the run of this folder goes on.

    None, and nothing is written, where it has no such checkpoint: it must be whole, made with the same files (`inputs`,
    their digests) and the same base (in `cache`, or none there and the shorter run's to be put there), and have been
    evaluated before only where the longer run is as well.
    """
    settings, card = finished_run(short)
    last, evaluated = settings["algo"]["iterations"], settings["eval"]
    extra = evaluated["games"] and not (evaluated["every"] and last % evaluated["every"] == 0)
    states: dict[Path, dict[str, Any]] = {}  # of whole checkpoints, the oldest first
    for checkpoint in checkpoints_in(short / "checkpoints"):
        with suppress(UserError):
            if not verify_folder(checkpoint):
                states[checkpoint] = read_state(checkpoint)
    there = {state["iteration"] for state in states.values()}
    fit = [
        checkpoint
        for checkpoint, state in states.items()
        if state.get("inputs") == inputs
        and _same_base(short, card["base"], state.get("base"), cache)
        and (not state.get("best") or state["best"]["iteration"] in there)
        and not (extra and state["iteration"] == last)
    ]
    if not fit:
        return None
    if card["base"] and not (cache / card["base"]).exists():
        copy_folder(short / REFERENCE, folder / REFERENCE)
    _copy_record(short, folder, states[fit[-1]]["iteration"])
    for checkpoint, notes in states.items():
        if checkpoint <= fit[-1]:
            notes |= {"run": folder.name, BEGUN_AS: short.name, "format": FORMAT}
            texts = {"state.json": json.dumps(notes, sort_keys=True)}
            copy_folder(checkpoint, folder / "checkpoints" / checkpoint.name, texts)
    return folder / "checkpoints" / fit[-1].name


def _same_base(short: Path, base: str | None, digest: str | None, cache: Path) -> bool:
    """Whether a run that needs this base will get the one that the shorter run had."""
    if base is None:  # a model as it was found: the run looks at it before it goes on
        return True
    kept = cache / base if (cache / base).exists() else short / REFERENCE
    return kept.exists() and folder_digest(kept) == digest


def _copy_record(short: Path, folder: Path, iteration: int) -> None:
    """Metrics, which a tracker cuts off behind the checkpoint, and the games that were kept until then."""
    for name in (METRICS_FILE, TIMING_FILE, f"wandb/{TABLES_FILE}"):
        if (short / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            write_text(folder / name, (short / name).read_text(encoding="utf-8"))
    (folder / "episodes").mkdir(exist_ok=True)
    for path in sorted((short / "episodes").glob("*.jsonl")):
        numbered = re.fullmatch(r"(?:iteration|planned)-(\d+)", path.stem)
        if numbered and int(numbered[1]) <= iteration:
            write_text(folder / "episodes" / path.name, path.read_text(encoding="utf-8"))

"""Trackers: write a run's figures to `metrics.jsonl` and `timing.jsonl`, and to Weights & Biases if asked.

Metrics under `speed/` and `time/` go to `timing.jsonl`, so `metrics.jsonl` does not depend on the clock: two runs of
one configuration write the same bytes. One JSON object a line: `iteration`, `phase`, then sorted metrics.
"""

import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TextIO

from marl.common.errors import MOST, UserError
from marl.common.files import fits, parsed_json, read_bytes, write_text, writing
from marl.common.secrets import hidden

CLOCK_PREFIXES = ("speed/", "time/")
METRICS_FILE = "metrics.jsonl"
TIMING_FILE = "timing.jsonl"
TABLES_FILE = "transcripts.jsonl"  # in W&B's folder: its tables, to log them again
MOST_OF_A_TAG = 64  # letters; W&B refuses longer ones
EARLIER = "earlier"
AGENTS = ("WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH", "WANDB_LAUNCH")  # with these W&B replaces our run id and project
WAYS_OUT = "use tracker.mode=offline (and `wandb sync` later) or tracker=jsonl"


class Tracker:
    """Records a run's figures, as a context manager. This one, of all ranks but the first, records nothing."""

    def log(self, iteration: int, metrics: Mapping[str, Any], phase: str = "train") -> None:
        """Records `metrics` (name: number). Raises ValueError for a metric that is not a finite number."""

    def transcripts(self, iteration: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Records a table of transcripts, one row an episode or a turn."""

    def final(self, figures: Mapping[str, float]) -> None:
        """Records the final figures."""

    def report(self, page: Path) -> None:
        """Records the report."""

    def sync(self) -> None:
        """Flushes files to the disk, before a checkpoint that counts on them."""

    def close(self, failed: bool = False) -> None:
        """Finishes the record. `failed`: the run broke off."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


class JsonlTracker(Tracker):
    """Writes `folder/metrics.jsonl` and `folder/timing.jsonl`. Transcripts are in the run's `episodes/`.

    `resume_from_iteration` is the checkpoint's iteration: later lines are dropped; None drops all.
    """

    def __init__(self, folder: str | Path, resume_from_iteration: int | None = None) -> None:
        self.folder = Path(folder)
        if resume_from_iteration is not None:
            read_metrics(self.folder / TIMING_FILE)  # read both before writing either
        self._metrics = _reopen(self.folder / METRICS_FILE, resume_from_iteration)
        self._timing = _reopen(self.folder / TIMING_FILE, resume_from_iteration)

    def log(self, iteration: int, metrics: Mapping[str, Any], phase: str = "train") -> None:
        numbers = {name: as_number(name, value) for name, value in metrics.items()}
        _write(self._metrics, iteration, phase, {n: v for n, v in numbers.items() if not n.startswith(CLOCK_PREFIXES)})
        _write(self._timing, iteration, phase, {n: v for n, v in numbers.items() if n.startswith(CLOCK_PREFIXES)})

    def sync(self) -> None:
        for file in (self._metrics, self._timing):
            with writing(Path(file.name)):
                os.fsync(file.fileno())

    def close(self, failed: bool = False) -> None:
        for file in (self._metrics, self._timing):
            with suppress(OSError):  # every line was flushed, or its failure raised
                file.close()


class WandbTracker(Tracker):
    """Weights & Biases beside the two files, in `folder/wandb`. W&B gets one row an iteration.

    Metrics of phases other than `train` are prefixed with the phase. At every start the kept lines are logged again.
    `offline`: the newest `offline-run-*` folder is the whole curve; folders of earlier attempts go to `wandb/earlier`
    and are removed when the run ends well. `online`: the same `run_id` continues the same W&B run, and iterations that
    it has are not sent twice. If the run breaks off, its last row waits for the next start.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        name: str,
        run_id: str,
        config: Mapping[str, Any],
        project: str = "marl-language-games",
        mode: str = "offline",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = (),
        resume_from_iteration: int | None = None,
    ) -> None:
        if mode not in ("offline", "online"):
            raise UserError(f"tracker.mode={mode} is unknown. Use offline or online.")
        self.folder, self.mode = Path(folder), mode
        # W&B first: if it cannot start, the files of an earlier attempt stay as they are.
        if isinstance(tags, str):
            raise UserError(f"tracker.tags={tags} is no list. Use brackets: tracker.tags=[{tags}].")
        kept = list(dict.fromkeys(str(tag)[:MOST_OF_A_TAG] for tag in tags or () if str(tag)))
        about = {"project": project, "entity": entity, "name": name, "id": run_id, "group": group, "tags": kept}
        self._run = _start_wandb(self.folder, config, mode, about)
        self._iteration, self._row = 0, dict[str, Any]()
        try:
            self._files = JsonlTracker(folder, resume_from_iteration)
            tables = self.folder / "wandb" / TABLES_FILE
            self._tables = _reopen(tables, resume_from_iteration)
            self._log_again([self.folder / METRICS_FILE, self.folder / TIMING_FILE, tables])
            if mode == "offline":
                self._set_aside(run_id)
        except BaseException:
            self._run.finish(exit_code=1)
            raise

    def log(self, iteration: int, metrics: Mapping[str, Any], phase: str = "train") -> None:
        self._files.log(iteration, metrics, phase)
        self._add(iteration, _prefixed(metrics, phase))

    def transcripts(self, iteration: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Logs the table as `transcripts`; W&B's step slider walks through training."""
        _write(self._tables, iteration, "train", {"columns": list(columns), "rows": [list(row) for row in rows]})
        self._add(iteration, _table(columns, rows))

    def final(self, figures: Mapping[str, float]) -> None:
        """Adds those figures that are finite to the summary."""
        self._send()
        self._run.summary.update({name: value for name, value in figures.items() if math.isfinite(value)})

    def report(self, page: Path) -> None:
        """Adds the report as an artifact."""
        import wandb

        artifact = wandb.Artifact(f"report-{self._run.id}", type="report")
        artifact.add_file(str(page), policy="immutable")  # no second copy in the home folder
        self._run.log_artifact(artifact)

    def sync(self) -> None:
        self._files.sync()

    def close(self, failed: bool = False) -> None:
        import wandb

        self._files.close()
        with suppress(OSError):
            self._tables.close()
        if self.mode == "offline" or not failed:
            self._send()
        self._run.finish(exit_code=int(failed))
        wandb.teardown()  # `finish` may return before W&B's process has written the last records
        if self.mode == "offline" and not failed:
            shutil.rmtree(self.folder / "wandb" / EARLIER, ignore_errors=True)

    def _add(self, iteration: int, values: Mapping[str, Any]) -> None:
        if iteration != self._iteration:
            self._send()
        self._iteration = iteration
        self._row |= values

    def _send(self) -> None:
        """Logs the iteration's row, unless the continued run has it."""
        if self._row and self._iteration >= self._run.starting_step:
            self._run.log({"iteration": self._iteration} | self._row, step=self._iteration)
        self._row = {}

    def _log_again(self, paths: Sequence[Path]) -> None:
        lines = [line for path in paths for line in read_metrics(path)]
        for line in sorted(lines, key=lambda each: each["iteration"]):
            iteration, phase = line.pop("iteration"), line.pop("phase")
            self._add(iteration, _table(**line) if "rows" in line else _prefixed(line, phase))

    def _set_aside(self, run_id: str) -> None:
        """Moves folders of earlier attempts away from `wandb sync offline-run-*`."""
        newest = Path(self._run.dir).parent.name
        earlier = self.folder / "wandb" / EARLIER
        with writing(earlier):
            for old in sorted(earlier.parent.glob(f"offline-run-*-{run_id}")):
                if old.name != newest:
                    earlier.mkdir(exist_ok=True)
                    old.rename(earlier / old.name)


def make_tracker(
    kind: str, folder: str | Path, *, resume_from_iteration: int | None = None, **settings: Any
) -> Tracker:
    """The tracker of `tracker=jsonl` or `tracker=wandb`; the latter takes the arguments of WandbTracker."""
    if kind == "jsonl":
        return JsonlTracker(folder, resume_from_iteration)
    if kind == "wandb":
        return WandbTracker(folder, resume_from_iteration=resume_from_iteration, **settings)
    raise UserError(f"tracker={kind} is unknown. Use jsonl or wandb.")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Reads a `metrics.jsonl` or `timing.jsonl`; no lines if there is no file.

    Skips a last line that is half written. UserError for another line that is not one of metrics.
    """
    if not os.path.lexists(path):
        return []
    *lines, last = read_bytes(path).decode(errors="replace").split("\n")
    rows = [_row(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    with suppress(UserError):
        rows += [_row(path, len(lines) + 1, last)]
    return rows


def _row(path: str | Path, number: int, line: str) -> dict[str, Any]:
    """A line of metrics, or of tables."""
    with suppress(ValueError):
        row = parsed_json(line)
        known = isinstance(row, dict) and fits(row, {"iteration": int, "phase": str}) and 0 <= row["iteration"] <= MOST
        if known and ("rows" in row or all(isinstance(row[name], int | float) for name in row if name != "phase")):
            return dict(row)
    raise UserError(
        f"{path}, line {number} is not a line of metrics: {line.strip()[:80]!r}. Remove that line to go on without its "
        "figures."
    )


def as_number(name: str, value: Any) -> int | float:
    """Converts a metric, such as a NumPy or torch scalar, to a plain number. ValueError unless it is finite."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, int | float):
        raise ValueError(f"metric {name} is {value!r}, not a number")
    if not math.isfinite(number):
        raise UserError(
            f"metric {name} is {number}: training has diverged. Lower the learning rate, or the weights of rewards "
            "and losses."
        )
    return number


def _prefixed(metrics: Mapping[str, Any], phase: str) -> dict[str, Any]:
    return {name if phase == "train" else f"{phase}/{name}": as_number(name, value) for name, value in metrics.items()}


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    import wandb

    return {"transcripts": wandb.Table(columns=list(columns), data=[list(row) for row in rows])}


def _write(file: TextIO, iteration: int, phase: str, metrics: Mapping[str, Any]) -> None:
    if metrics:
        line = {"iteration": iteration, "phase": phase} | dict(sorted(metrics.items()))
        with writing(Path(file.name)):
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()


def _reopen(path: Path, last_iteration: int | None) -> TextIO:
    """Drops the lines after `last_iteration` (None: all), in one step, and opens the file for appending."""
    rows = [] if last_iteration is None else read_metrics(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows if row["iteration"] <= (last_iteration or 0)))
        return path.open("a", encoding="utf-8")


def _start_wandb(folder: Path, config: Mapping[str, Any], mode: str, about: Mapping[str, Any]) -> Any:
    """Starts a W&B run in `folder`. UserError if W&B refuses, or has a run of this id from another folder.

    `about`: the run's project, entity, name, id, group and tags.
    """
    import wandb  # takes a second, and only this tracker needs it

    with writing(folder):  # W&B would silently take another folder
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        begun_here = any((folder / "wandb").glob(f"*run-*-{about['id']}"))
    agent = {name: os.environ.pop(name) for name in AGENTS if name in os.environ}
    if agent:
        warnings.warn(f"{', '.join(agent)}: ignored, so W&B's agent gets no figures. Sweep with -m.", stacklevel=1)
    settings = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=30,
        disable_git=True,
        save_code=False,
        x_disable_stats=True,
        x_disable_meta=True,  # the command line, which may hold a secret
        sagemaker_disable=True,  # it would replace the run's id
    )
    try:
        wandb.setup(wandb.Settings(silent=True))  # silences what it says before a run begins
        run = wandb.init(
            dir=folder,
            **about,
            config=hidden(config),
            mode="online" if mode == "online" else "offline",
            resume="allow" if mode == "online" else None,  # each offline folder is the whole run
            settings=settings,
        )
    except wandb.Error as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"W&B cannot be used with tracker.mode={mode} ({reason}). Or {WAYS_OUT}.") from error
    finally:
        os.environ.update(agent)
    if run.starting_step and not begun_here:
        run.finish()
        shutil.rmtree(Path(run.dir).parent, ignore_errors=True)  # else the next attempt would seem to resume this one
        raise UserError(
            f"W&B has a run {about['id']} of this configuration in the project {about['project']} already, made from "
            f"another folder. Delete it there, name another tracker.project, or {WAYS_OUT}."
        )
    run.define_metric("iteration", hidden=True)
    run.define_metric("*", step_metric="iteration")
    return run

"""Where a run's figures go: `metrics.jsonl` and `timing.jsonl` always, Weights & Biases where asked for.

`metrics.jsonl` holds nothing that depends on the clock, so that two runs of one configuration write the same bytes;
metrics under `speed/` and `time/` go to `timing.jsonl`. One JSON object a line, its keys sorted, beginning with
`iteration` and `phase`. All phases of a run count on one iteration axis.
Transcripts are kept in the run's `episodes/` by others; here they only go to W&B, which keeps
a copy to log them again.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TextIO

from marl.common.errors import MOST, UserError
from marl.common.files import parsed_json, read_bytes, write_text, writing
from marl.common.secrets import hidden

CLOCK_PREFIXES = ("speed/", "time/")
METRICS_FILE = "metrics.jsonl"
TIMING_FILE = "timing.jsonl"
TABLES_FILE = "transcripts.jsonl"  # in W&B's folder: what its tables are made again from
EARLIER = "earlier"
AGENTS = ("WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH", "WANDB_LAUNCH")  # with these W&B replaces our run id and project
WAYS_OUT = "use tracker.mode=offline (and `wandb sync` later) or tracker=jsonl"


class Tracker(ABC):
    """Takes a run's figures. Use as a context manager, or call `close` in a `finally`."""

    @abstractmethod
    def log(self, iteration: int, metrics: Mapping[str, Any], phase: str = "train") -> None:
        """Writes `metrics` (name: number). Raises ValueError naming the metric that is not a finite number."""

    @abstractmethod
    def transcripts(self, iteration: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Logs a table of transcripts, one row an episode or a turn."""

    @abstractmethod
    def sync(self) -> None:
        """Sees that what was written stays, should power be lost: a checkpoint counts on it."""

    @abstractmethod
    def close(self, failed: bool = False) -> None:
        """Finishes the record; `failed` says that the run broke off."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


class Unlogged(Tracker):
    """Of the processes of one run all but the first."""

    def log(self, iteration: int, metrics: Mapping[str, Any], phase: str = "train") -> None: ...

    def transcripts(self, iteration: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...

    def sync(self) -> None: ...

    def close(self, failed: bool = False) -> None: ...


class JsonlTracker(Tracker):
    """Writes `folder/metrics.jsonl` and `folder/timing.jsonl`, each line flushed when it is logged.

    `resume_from_iteration` is the checkpoint's iteration: later lines, written by an attempt that was cut off, are
    dropped. None starts anew. Raises UserError where `folder` cannot be written or a file in it is not ours.
    """

    def __init__(self, folder: str | Path, resume_from_iteration: int | None = None) -> None:
        self.folder = Path(folder)
        with _writable(self.folder):
            paths = [self.folder / METRICS_FILE, self.folder / TIMING_FILE]
            kept = [_kept(path, resume_from_iteration) for path in paths]  # both are read before either is written
            self._metrics, self._timing = (_reopen(path, text) for path, text in zip(paths, kept, strict=True))

    def log(self, iteration: int, metrics: Mapping[str, Any], phase: str = "train") -> None:
        numbers = {name: as_number(name, value) for name, value in metrics.items()}
        _write(self._metrics, iteration, phase, {n: v for n, v in numbers.items() if not n.startswith(CLOCK_PREFIXES)})
        _write(self._timing, iteration, phase, {n: v for n, v in numbers.items() if n.startswith(CLOCK_PREFIXES)})

    def transcripts(self, iteration: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Nothing: transcripts are in the run's `episodes/`."""

    def sync(self) -> None:
        for file in (self._metrics, self._timing):
            with writing(Path(file.name)):
                os.fsync(file.fileno())

    def close(self, failed: bool = False) -> None:
        for file in (self._metrics, self._timing):
            with suppress(OSError):  # every line has been flushed, or its failure been told: this is the rest of that
                file.close()


class WandbTracker(Tracker):
    """Weights & Biases beside the two files, in `folder/wandb`.

    W&B gets one row an iteration, whose step is the iteration, once the next one begins or the run ends. Metrics of
    phases other than `train` are prefixed with the phase. At every start the kept lines are logged again, so that:

    - `offline` (no account, no network) the newest `offline-run-*` folder is the whole curve, and `wandb sync` uploads
      it in the place of what an earlier sync brought. W&B's own file of a killed attempt cannot be trusted to be whole;
      folders of earlier attempts go to `wandb/earlier`, and are removed when the run has ended well.
    - `online` the same `run_id` continues the same W&B run. It keeps the iterations that it has: those made again are
      not sent twice (where they differ in last digits, `metrics.jsonl` has the newer), those lost with a kill are sent
      now. If the run breaks off, its last iteration is sent when it goes on, for that row may lack its evaluation.

    A run keeps its own id and project under a sweep agent of W&B too, so that it goes on after a kill. The sweep gets
    none of its figures; a warning says so.

    Raises UserError at once where online logging cannot work, and where the run at W&B was not made from this folder:
    two runs of one configuration have one id. Offline, the folder synced last stands.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        project: str,
        name: str,
        run_id: str,
        config: Mapping[str, Any],
        mode: str = "offline",
        entity: str | None = None,
        resume_from_iteration: int | None = None,
    ) -> None:
        if mode not in ("offline", "online"):
            raise UserError(f"tracker.mode={mode} is unknown; it is offline or online.")
        self.folder, self.mode = Path(folder), mode
        # W&B first: where it cannot start, the files of an earlier attempt stay as they are.
        self._run = _start_wandb(self.folder, project, name, run_id, config, mode, entity)
        self._iteration, self._row = 0, dict[str, Any]()
        try:
            self._files = JsonlTracker(folder, resume_from_iteration)
            tables = self.folder / "wandb" / TABLES_FILE
            with _writable(tables.parent):
                self._tables = _reopen(tables, _kept(tables, resume_from_iteration))
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
        """Logs the table under the one key `transcripts`, so that W&B's step slider walks through training."""
        _write(self._tables, iteration, "train", {"columns": list(columns), "rows": [list(row) for row in rows]})
        self._add(iteration, _table(columns, rows))

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
        wandb.teardown()  # `finish` may return before W&B's own process has written the run's last records
        if self.mode == "offline" and not failed:
            shutil.rmtree(self.folder / "wandb" / EARLIER, ignore_errors=True)

    def _add(self, iteration: int, values: Mapping[str, Any]) -> None:
        if iteration != self._iteration:
            self._send()
        self._iteration = iteration
        self._row |= values

    def _send(self) -> None:
        """Logs the iteration's row, unless the run that is continued has it."""
        if self._row and self._iteration >= self._run.starting_step:
            self._run.log({"iteration": self._iteration} | self._row, step=self._iteration)
        self._row = {}

    def _log_again(self, paths: Sequence[Path]) -> None:
        lines = [line for path in paths for line in read_metrics(path)]
        for line in sorted(lines, key=lambda each: each["iteration"]):
            iteration, phase = line.pop("iteration"), line.pop("phase")
            self._add(iteration, _table(**line) if "rows" in line else _prefixed(line, phase))

    def _set_aside(self, run_id: str) -> None:
        """Takes the folders of earlier attempts out of the way of `wandb sync offline-run-*`."""
        newest = Path(self._run.dir).parent.name
        earlier = self.folder / "wandb" / EARLIER
        with writing(earlier):
            for old in sorted(earlier.parent.glob(f"offline-run-*-{run_id}")):
                if old.name != newest:
                    earlier.mkdir(exist_ok=True)
                    old.rename(earlier / old.name)


def make_tracker(
    kind: str,
    folder: str | Path,
    *,
    name: str,
    run_id: str,
    config: Mapping[str, Any],
    project: str = "marl-language-games",
    mode: str = "offline",
    entity: str | None = None,
    resume_from_iteration: int | None = None,
) -> Tracker:
    """The tracker that `tracker=jsonl` or `tracker=wandb` asks for. `config` is the run's resolved configuration."""
    if kind == "jsonl":
        return JsonlTracker(folder, resume_from_iteration)
    if kind == "wandb":
        return WandbTracker(
            folder,
            project=project,
            name=name,
            run_id=run_id,
            config=config,
            mode=mode,
            entity=entity,
            resume_from_iteration=resume_from_iteration,
        )
    raise UserError(f"tracker={kind} is unknown; it is jsonl or wandb.")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` or `timing.jsonl`; none where there is no file.

    A last line that a stopped run left half written is passed over. UserError for one that is not ours.
    """
    if not os.path.lexists(path):
        return []
    lines = read_bytes(path).decode(errors="replace").split("\n")
    rows = []
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = parsed_json(line)
        except ValueError:
            row = None
        if _is_line(row):
            rows.append(row)
        elif i < len(lines) - 1:
            raise UserError(
                f"{path}, line {i + 1}: expected one JSON object with iteration and phase and else numbers, got "
                f"{line[:60]!r}"
            )
    return rows


def _is_line(row: Any) -> bool:
    """Whether this is a line of metrics, or of tables."""
    if not isinstance(row, dict) or not isinstance(row.get("iteration"), int) or not isinstance(row.get("phase"), str):
        return False
    if not 0 <= row["iteration"] <= MOST:
        return False
    return "rows" in row or all(isinstance(value, int | float) for name, value in row.items() if name != "phase")


def as_number(name: str, value: Any) -> int | float:
    """A metric as a plain number; NumPy and torch scalars count. Raises ValueError for any but one finite number."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, int | float):
        raise ValueError(f"metric {name} is {value!r}, not a number")
    if not math.isfinite(number):
        raise UserError(
            f"metric {name} is {number}: training has diverged, or what is measured is too large; lower the "
            "learning rate, or the weights of rewards and losses"
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


def _kept(path: Path, last_iteration: int | None) -> str:
    """The lines up to `last_iteration`, None: none. UserError where a line is not one of metrics."""
    if last_iteration is None or not os.path.lexists(path):
        return ""
    kept = ""
    lines = read_bytes(path).decode(errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            iteration = int(parsed_json(line)["iteration"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # the attempt before was cut off while writing it
            raise UserError(
                f"{path}, line {number} is not a line of metrics: {line.strip()[:80]!r}; remove that line to go on "
                "(what it told is lost)"
            ) from error
        if iteration <= last_iteration:
            kept += line.rstrip("\n") + "\n"  # the last line's end may have been lost
    return kept


def _reopen(path: Path, kept: str) -> TextIO:
    """Opens `path` for appending to what is kept of it. The change is all or nothing."""
    write_text(path, kept)
    return path.open("a", encoding="utf-8")


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Makes `folder`; an OSError in the block means that it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"The output folder {folder} cannot be written ({reason}); name another one.") from error


@contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    """Hides environment variables in the block, with a warning that names those that are set."""
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    if hidden:
        warnings.warn(
            f"{', '.join(hidden)}: ignored. The run keeps its own W&B id and project, so W&B's agent gets none of its "
            "figures; sweep with -m.",
            stacklevel=1,
        )
    try:
        yield
    finally:
        os.environ.update(hidden)


def _start_wandb(
    folder: Path, project: str, name: str, run_id: str, config: Mapping[str, Any], mode: str, entity: str | None
) -> Any:
    import wandb  # takes a second, and only this tracker needs it

    with _writable(folder), tempfile.TemporaryFile(dir=folder):  # W&B would take another folder without a word
        begun_here = any((folder / "wandb").glob(f"*run-*-{run_id}"))  # metrics may come from a shorter run
    settings = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=30,
        disable_git=True,
        save_code=False,
        x_disable_stats=True,
        x_disable_meta=True,  # the command line as it was typed, which may hold a secret; run.json has it without
        sagemaker_disable=True,  # it would replace the run's id
    )
    try:
        with _without(AGENTS):
            wandb.setup(wandb.Settings(silent=True))  # what it says before a run begins
            run = wandb.init(
                dir=folder,
                project=project,
                entity=entity,
                name=name,
                id=run_id,
                config=hidden(config),
                mode="online" if mode == "online" else "offline",
                resume="allow" if mode == "online" else None,  # each offline folder is the whole run
                settings=settings,
            )
    except wandb.Error as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"W&B cannot be used with tracker.mode={mode} ({reason}); {WAYS_OUT}.") from error
    if run.starting_step and not begun_here:
        run.finish()
        shutil.rmtree(Path(run.dir).parent, ignore_errors=True)  # or the next attempt would seem to go on from this one
        raise UserError(
            f"W&B has a run {run_id} of this configuration in the project {project} already, made from another folder: "
            f"delete it there, name another tracker.project, or {WAYS_OUT}."
        )
    if run.id != run_id:
        run.finish()
        raise UserError(
            f"W&B calls this run {run.id} instead of {run_id}. Unset what sets its id, or use tracker=jsonl."
        )
    run.define_metric("iteration", hidden=True)
    run.define_metric("*", step_metric="iteration")
    return run

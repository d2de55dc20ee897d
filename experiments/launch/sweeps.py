"""The jobs of a sweep: which processes run them, how failures end."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.errors import HydraException

from experiments.launch.overrides import one_line
from experiments.launch.terminal import say_error
from marl.common.secrets import told


class JobFailed(HydraException):
    """One job of a sweep failed elsewhere, and has said why there."""


# What numerical libraries read at their start; the cores are shared out among jobs side by side.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
PLACE = "MARL_PLACE"  # of a job among those that run side by side, from 0: set for its process, read by `pick_device`
IDLE = 300  # seconds until a worker without a job ends, should the command itself have been killed


def own_settings(overrides: Iterable[str], swept: Iterable[str]) -> str:
    """The settings that tell a job from its sweep's others; all that were given, where there is but one job."""
    given = list(overrides)
    return told([override for override in given if override.partition("=")[0] in swept] or given)


def taken_by(taken: Path, folder: str, settings: str) -> str:
    """Which earlier job of the sweep has this run's folder; empty where none does, and from now on this one has it."""
    if not folder:
        return ""
    note = taken / hashlib.sha256(folder.encode()).hexdigest()
    try:
        with note.open("x") as file:
            file.write(settings)
    except FileExistsError:
        return note.read_text()
    return ""


def settings_and_folder(note: Path) -> str:
    """A job as its note tells it: its own settings, and its folder if it came to make one."""
    settings, _, folder = note.read_text().partition("\n")
    return f"{settings} in {folder}" if folder and Path(folder).is_dir() else settings


@contextmanager
def in_own_processes(unfinished: Path, unstarted: dict[int, str], swept: Iterable[str]) -> Iterator[None]:
    """Within, the death of a process of joblib's launcher, as where memory runs out, is the failure of its job alone.

    By itself the launcher would kill all other jobs with it. Here each of its workers is a pool of its own, so that
    none breaks another. A job that dies is noted in the folder; those that have not started are in `unstarted`.
    """
    from hydra_plugins.hydra_joblib_launcher import _core

    def parallel(n_jobs: int, **_: Any) -> Callable[[Iterable[Any]], list[JobReturn]]:
        return lambda calls: run_apart(n_jobs, calls, unfinished, unstarted, swept)

    original = _core.Parallel
    _core.Parallel = parallel
    try:
        yield
    finally:
        _core.Parallel = original


def run_apart(
    n_jobs: int, calls: Iterable[Any], unfinished: Path, unstarted: dict[int, str], swept: Iterable[str]
) -> list[JobReturn]:
    """The launcher's calls, `n_jobs` at a time. Workers are kept for the next job, since imports take seconds."""
    import joblib
    from joblib.externals.loky import ProcessPoolExecutor, wait

    jobs = {number: (function, number, overrides, *rest) for function, (number, overrides, *rest), _ in calls}
    count = min(joblib.effective_n_jobs(n_jobs), len(jobs))  # few jobs have more cores each
    share = str(max(joblib.cpu_count() // count, 1))
    threads = {name: os.environ.get(name, share) for name in THREADS}
    kept = {"timeout": IDLE, "initializer": end_with, "initargs": (os.getpid(),)}
    unstarted.update({number: own_settings(filter_overrides(job[2]), swept) for number, job in jobs.items()})
    results: list[JobReturn] = []
    running: dict[Any, tuple[int, str, Any]] = {}
    idle: list[Any] = []
    places: dict[Any, int] = {}  # of the pools: which of `count`, and so which GPU
    try:
        while unstarted or running:
            while unstarted and len(running) < count:
                number = next(iter(unstarted))
                if idle:
                    pool = idle.pop()
                else:
                    place = min({*range(count)} - {*places.values()})
                    pool = ProcessPoolExecutor(1, env={**threads, PLACE: str(place)}, **kept)
                    places[pool] = place
                running[pool.submit(*jobs[number])] = number, unstarted.pop(number), pool
            for future in wait(running, return_when="FIRST_COMPLETED").done:
                number, settings, pool = running.pop(future)
                error = future.exception()
                if error is None:
                    results.append(future.result())
                else:
                    say_error(f"The job {settings} did not end: {cause(error)}.")
                    note = unfinished / f"{number:06d}"
                    if not note.exists():  # it ended before its task began
                        note.write_text(settings)
                    results.append(JobReturn(status=JobStatus.COMPLETED))  # what is to be said of it has been
                if error is None and unstarted:
                    idle.append(pool)
                else:  # what its process holds, memory above all, is free for the others
                    pool.shutdown(wait=False)
                    del places[pool]
        return results
    finally:
        for _, _, pool in running.values():
            pool.shutdown(kill_workers=True)
        for pool in idle:
            pool.shutdown()


def end_with(parent: int) -> None:
    """In a worker: dies with the process that started it, or what it holds would be kept from whoever starts again."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def cause(error: BaseException) -> str:
    """Why a job did not end: how its process died, if it did."""
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    if not isinstance(error, TerminatedWorkerError):
        return f"{type(error).__name__}: {one_line(error)}".rstrip(".: ")
    died = re.search(r"\{(.+)\}", str(error))  # loky's own text: SIGKILL(-9)
    how = f" ({died.group(1)})" if died else ""
    return f"its process died{how}" + (", as where memory runs out" if "SIGKILL" in how else "")


@contextmanager
def waiting_for_all(unfinished: Path, finished: Path, swept: Iterable[str]) -> Iterator[None]:
    """Within, a job of submitit that fails, dies or is cancelled is noted in the first folder, and the others are
    waited for; what their tasks return is noted in the second.

    By itself the launcher would end at the first of them, without a word about the rest.
    """
    import submitit

    results = submitit.Job.results

    def wait(job: Any) -> list[JobReturn]:
        all_overrides, _, number, *_ = job.submission().args
        overrides = told(filter_overrides(all_overrides))
        try:
            (found,) = results(job)
            failed = found.status is not JobStatus.COMPLETED
            why = one_line(found._return_value) if failed else ""
            if not failed and found.return_value is not None:
                (finished / f"{number:06d}").write_text(str(found.return_value))
        except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError) as error:
            failed, why = True, f"The job {overrides} did not end: {str(error).splitlines()[0]}"
        if failed:
            say_error(f"{why} Its log: {job.paths.stderr}")
            (unfinished / job.job_id).write_text(own_settings(filter_overrides(all_overrides), swept))
        return [JobReturn(status=JobStatus.COMPLETED)]  # what is to be said of it has been

    submitit.Job.results = wait  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        submitit.Job.results = results  # type: ignore[method-assign]


def use_cores(count: int | None) -> None:
    """As many threads as a job was given cores; where a setting `threads` says another number, that comes later."""
    if count:
        import torch  # in jobs alone: to read a command line it would take seconds

        os.environ["OMP_NUM_THREADS"] = str(count)
        torch.set_num_threads(count)


def label(swept: Iterable[str]) -> str:
    """What tells this job from the sweep's others, in short: `full seed=1`."""
    here = HydraConfig.get()
    own = (override.partition("=") for override in here.overrides.task)
    return " ".join(
        value if key in here.runtime.choices else told([f"{key}={value}"]) for key, _, value in own if key in swept
    )

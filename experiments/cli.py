"""What every command does before its work starts: read the command line, and refuse mistakes in one clear sentence.

    @command("train")  # conf/train.yaml
    def main(cfg: DictConfig) -> None: ...

    if __name__ == "__main__":
        main()

Hydra composes and runs; here every choice is composed once beforehand, so that a typo in the third choice of a sweep
is found before the first job starts. The jobs of a sweep run one after another in this process, or several at a time in
processes of their own (`hydra/launcher=joblib`), or as jobs of a cluster (`hydra/launcher=submitit_slurm`). Exit
status: 0 all well, 1 a job failed, 2 a mistake on the command line. `HYDRA_FULL_ERROR=1` shows full tracebacks.
"""

from __future__ import annotations

import copy
import difflib
import functools
import hashlib
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra import initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.errors import CompactHydraException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from experiments.help import short_help
from experiments.terminal import STDERR, STDOUT, labelled, unheard
from marl.errors import UserError, check_places
from marl.runs import told

VERSION_BASE = "1.3"

Task = Callable[[DictConfig], Any]
After = Callable[[list[Path]], None]
FolderOf = Callable[[DictConfig], Path]


class UsageError(UserError):
    """A mistake on the command line: its text is one sentence that names the setting and the nearest valid one."""


class JobFailed(HydraException):
    """One job of a sweep failed elsewhere, and has said why there."""


class Where(Enum):
    """Where the jobs of a sweep run."""

    HERE = "one after another in this process"
    SIDE_BY_SIDE = "several at a time in other processes of this machine"
    SUBMITTED = "as jobs of submitit, which keep their own logs"
    ELSEWHERE = "wherever a launcher that is not ours takes them"


LAUNCHERS = {
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher": Where.HERE,
    "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher": Where.SIDE_BY_SIDE,
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher": Where.SUBMITTED,
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher": Where.SUBMITTED,
}


# What numerical libraries read at their start; the cores are shared out among jobs side by side.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# For each shape of a product in bfloat16 torch compiles a kernel on a CPU; it and its library keep the last 1,024 each:
# more memory than the products take. A pass of an update makes about 15. With 16, 32 and 1,024 in the library an update
# of 128 rows of 1,024 tokens (4 million parameters, a processor with AMX, one core) took 33 to 38, 25 and 25 processor
# seconds and 415 to 436, 464 and 815 MB; how many torch itself keeps made no difference from 16 on.
FEW_KERNELS = {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
PLACE = "MARL_PLACE"  # of a job among those that run side by side, from 0: set for its process, read by `pick_device`
IDLE = 300  # seconds until a worker without a job ends, should the command itself have been killed


# Of settings whose default is something those of which null is a choice too.
MAY_BE_NULL = ("compare", "minutes")
# What ~KEY may leave out: terms, players, and choices that only bring other settings. The rest always has a value.
REMOVABLE = (
    "loss.", "reward.", "cast.", "variants.", "conditions.", "tuned", "experiment", "ablation", "sweep", "hydra"
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What the command line asks for: one run or a sweep, over what, and where its jobs run."""

    sweep: bool = False
    swept: tuple[str, ...] = ()  # settings of which there are several values
    where: Where = Where.HERE


def command(
    config_name: str,
    package: str = "conf",
    implies: Mapping[str, str] | None = None,
    after: After | None = None,
    folder_of: FolderOf | None = None,
) -> Callable[[Task], Callable[..., Any]]:
    """Makes `task(cfg)` a command, configured by `config_name`.yaml of `package` and by the overrides in `sys.argv`.

    `implies`: {"data.dond": "base=human"} adds the choice base=human wherever data.dond is given and base is not.
    `after`: called at a sweep's end with the folders that the tasks of its jobs returned, without those that failed.
    `folder_of`: tells the folder that a job writes into, which is named where the job fails.
    Called with a configuration, the command runs just the task. Mistakes by the user end the process (SystemExit).
    """

    def decorate(task: Task) -> Callable[..., Any]:
        @functools.wraps(task)
        def checked(cfg: DictConfig) -> Any:
            for name, count in FEW_KERNELS.items():
                os.environ.setdefault(name, count)
            check_places(cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True)))
            with plain_warnings():
                return task(cfg)

        @functools.wraps(task)
        def main(cfg: DictConfig | None = None) -> Any:
            if cfg is not None:
                return checked(cfg)
            try:
                flags, overrides = split_arguments(sys.argv[1:])
                if {"--help", "-h"} & set(flags):
                    about = (sys.modules[task.__module__].__doc__ or "").partition("\n")[0]
                    configs = Path(str(importlib.import_module(package).__file__)).parent
                    print(short_help(config_name, about, configs / f"{config_name}.yaml"))
                    return None
                overrides += implied(overrides, implies or {})
                plan = check_command_line(config_name, package, flags, overrides)
            except UsageError as error:
                leave(error, status=2)
            run(checked, config_name, package, [*flags, *overrides], plan, after, folder_of)

        return main

    return decorate


def run(
    task: Task,
    config_name: str,
    package: str,
    arguments: list[str],
    plan: Plan,
    after: After | None = None,
    folder_of: FolderOf | None = None,
) -> None:
    """Hands over to Hydra. Jobs that fail say so at once; a sweep goes on with its other jobs and then exits with 1."""

    @functools.wraps(task)
    def job(cfg: DictConfig) -> Any:
        overrides = told(HydraConfig.get().overrides.task)
        where = f"{overrides}: " if plan.sweep else ""
        number = f"{HydraConfig.get().job.num:06d}" if plan.sweep else "job"
        noted = unfinished / number
        here = plan.where in (Where.HERE, Where.SIDE_BY_SIDE)
        if plan.where is Where.SUBMITTED:
            use_cores(HydraConfig.get().launcher.get("cpus_per_task"))
        if plan.sweep and here:
            folder = ""
            if folder_of:
                with suppress(Exception):  # settings that make no run have no folder; the task says what is wrong
                    folder = str(folder_of(cfg))
            # A file, because the job may run in another process, and may be killed there.
            settings = own_settings(HydraConfig.get().overrides.task, plan.swept)
            noted.write_text(f"{settings}\n{folder}")
            if other := taken_by(taken, folder, settings):
                say(
                    f"{where}this job and {other} of the same sweep are one run, {folder}: between them only settings "
                    "differ that make no other run (where things are, and what is for speed or memory); drop one"
                )
                return None
        with labelled(label(plan.swept) if plan.where is Where.SIDE_BY_SIDE else ""):
            try:
                result = task(cfg)
            except Exception as error:  # whatever it was is told, fails this job alone, and makes the exit status 1
                if wants_traceback() and not plan.sweep:
                    raise
                if isinstance(error, UserError | OmegaConfBaseException) and not wants_traceback():
                    say(where + one_line(error))
                else:
                    say(where + "".join(traceback.format_exception(error)))
                if not plan.sweep:
                    raise SystemExit(1) from None
                if not here:
                    raise JobFailed(f"The job {overrides} failed: {one_line(error)}") from None
                return None
        if here:
            if plan.sweep and result is not None:
                (finished / number).write_text(str(result))
            noted.unlink(missing_ok=True)
        return result

    status: Any = 0
    unstarted: dict[int, str] = {}
    at_interrupt = signal.getsignal(signal.SIGINT)
    with tempfile.TemporaryDirectory() as scratch:
        unfinished, finished = Path(scratch) / "unfinished", Path(scratch) / "finished"
        taken = Path(scratch) / "taken"
        for folder in (unfinished, finished, taken):
            folder.mkdir()
        placed = plan.where in (Where.ELSEWHERE, Where.SUBMITTED) or any(
            a.startswith("hydra.sweep.dir=") for a in arguments
        )
        if plan.sweep and not placed:
            # Hydra's own record of a sweep, multirun.yaml, is of no use here; our runs keep their configuration.
            arguments = [*arguments, f"hydra.sweep.dir='{scratch}'"]
        if plan.where is Where.SIDE_BY_SIDE:  # by default a process that is told to stop leaves its workers running
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        given, sys.argv = sys.argv, [sys.argv[0], *arguments]
        launching: AbstractContextManager[None] = nullcontext()
        if plan.where is Where.SUBMITTED:
            launching = waiting_for_all(unfinished, finished, plan.swept)
        elif plan.where is Where.SIDE_BY_SIDE:
            launching = in_own_processes(unfinished, unstarted, plan.swept)
        try:
            with launching:
                hydra.main(version_base=VERSION_BASE, config_path=f"pkg://{package}", config_name=config_name)(job)()
        except SystemExit as leaving:  # what is to be said has been said
            status = leaving.code
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would only break off the cleaning up
            status = 128 + signal.SIGINT
        finally:
            sys.argv = given
        failed = [settings_and_folder(path) for path in sorted(unfinished.iterdir())]
        made = [Path(path.read_text()) for path in sorted(finished.iterdir())]
    if status == 128 + signal.SIGINT:
        signal.signal(signal.SIGINT, at_interrupt)
        of_sweep = f" with {len(made)} of its jobs done" if plan.sweep else ""
        say(f"Interrupted{of_sweep}; the same command goes on from what is there.")
        raise SystemExit(status)
    try:
        if after and made and status in (0, 1):  # with another one it was stopped
            after(made)
    except UserError as error:
        say(one_line(error))
        status = 1
    finally:  # the last word, whatever becomes of the report
        if failed:
            say(f"Failed jobs: {len(failed)} ({'; '.join(failed)}).")
        if unstarted:
            say(f"Jobs that did not start: {len(unstarted)} ({'; '.join(unstarted.values())}).")
        with unheard(STDOUT):
            sys.stdout.flush()
    if failed:
        status = status or 1
    if status:
        raise SystemExit(status)


def own_settings(overrides: Iterable[str], swept: Iterable[str]) -> str:
    """The settings that tell a job from its sweep's others; all that were given, where there is but one job."""
    given = list(overrides)
    return told([override for override in given if override.partition("=")[0] in swept] or given)


def set_beside() -> list[str]:
    """The overrides of the job that runs, as they may be shown, but for the choices of its sweep's own file; none where
    Hydra runs no job."""
    if not HydraConfig.initialized():
        return []
    hydra = HydraConfig.get()
    params = {name: str(choices) for name, choices in (hydra.sweeper.get("params") or {}).items()}
    given = [(each, *each.lstrip("+").partition("=")[::2]) for each in hydra.overrides.task]
    return [
        told([each])
        for each, name, value in given
        if name not in params or value not in (params[name], *params[name].split(","))
    ]


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
                    say(f"The job {settings} did not end: {cause(error)}.")
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
            say(f"{why} Its log: {job.paths.stderr}")
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
    return " ".join(value if key in here.runtime.choices else f"{key}={value}" for key, _, value in own if key in swept)


# ---- before the run: is every setting a setting? -------------------------------------------------------------------


def split_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags (`-m`, `--cfg job`, ...) and the overrides, which may stand in any order."""
    parser = get_args_parser()

    def refuse(message: str) -> None:
        raise UsageError(
            f"{message[0].upper()}{message[1:]}; settings are written KEY=VALUE, flags are listed by --help."
        )

    parser.error = refuse  # type: ignore[method-assign, assignment]
    overrides = parser.parse_intermixed_args(argv).overrides
    left = list(overrides)
    flags = [a for a in argv if not (a in left and not left.remove(a))]  # type: ignore[func-returns-value]
    return flags, overrides


def implied(overrides: list[str], implies: Mapping[str, str]) -> list[str]:
    """The choices that the overrides bring with them, less those that they make themselves."""
    given = dict(override.partition("=")[::2] for override in overrides)
    return [
        choice
        for setting, choice in implies.items()
        if given.get(setting, "null") not in ("null", "") and choice.partition("=")[0] not in given
    ]


def check_command_line(config_name: str, package: str, flags: list[str], overrides: list[str]) -> Plan:
    """Composes the configuration of every choice on the command line. Raises UsageError for the first that is wrong."""
    args = get_args_parser().parse_args(flags)
    elsewhere = args.config_path or args.shell_completion or args.info or args.experimental_rerun
    if elsewhere or args.hydra_help:  # nothing to run, or Hydra's own business
        return Plan(sweep=args.multirun)
    search = [f"hydra.searchpath=[file://{os.path.abspath(args.config_dir)}]"] if args.config_dir else []
    with initialize_config_module(package, version_base=VERSION_BASE, job_name=config_name):
        check = Checker(args.config_name or config_name, search)
        given = check.parse(overrides)
        first = [choices(o)[0] for o in given]
        cfg = check.compose(first)
        for o in given if not args.config_dir else ():
            if o.is_add() and check.is_group(o) and not o.key_or_group.startswith("hydra"):  # else it is chosen twice
                key = o.key_or_group
                raise UsageError(f"{o.input_line}: {key} is for other commands, and {config_name} reads none.")
        listed = [o for o in given if o.is_sweep_override()]
        if args.cfg:  # only shown, so it may be incomplete
            if args.multirun or listed:
                several = f"{listed[0].input_line} lists several values" if listed else "-m asks for a sweep"
                raise UsageError(f"--cfg shows one configuration, and {several}: leave out -m and choose one.")
            return Plan()
        sweep = args.multirun or cfg.hydra.mode == RunMode.MULTIRUN
        if sweep and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "This is a sweep (-m, or hydra.mode=MULTIRUN of a preset), and the processes of torchrun make one run "
                "together: give each run a torchrun command of its own (with hydra.mode=RUN where a preset sweeps), or "
                "sweep without torchrun, with hydra/launcher=joblib or submitit_slurm."
            )
        if listed and not sweep:
            raise UsageError(f"{listed[0].input_line} lists several values; add -m to run them all.")
        presets = check.parse([f"{key}={value}" for key, value in (cfg.hydra.sweeper.get("params") or {}).items()])
        lists = {o.get_key_element(): choices(o) for o in [*presets, *given]}  # what is given wins over presets
        for job in jobs(lists) if sweep else [first]:
            check.job(job)
        own = lists if sweep else {o.get_key_element(): choices(o) for o in given}
        check.keep_arms(own, cfg.hydra.runtime.choices)
        if not sweep:
            return Plan()
        swept = tuple(key for key, options in lists.items() if len(options) > 1)
        where = LAUNCHERS.get(cfg.hydra.launcher.get("_target_"), Where.ELSEWHERE)
        if where is Where.SIDE_BY_SIDE and cfg.hydra.launcher.timeout is not None:
            limit = cfg.hydra.launcher.timeout
            raise UsageError(f"hydra.launcher.timeout={limit}: jobs side by side have no time limit; leave it null.")
        if where is Where.SIDE_BY_SIDE and cfg.hydra.launcher.n_jobs == 0:
            raise UsageError("hydra.launcher.n_jobs=0: must be how many jobs run at a time, or -1 for one a core.")
        for name in ("nodes", "tasks_per_node") if where is Where.SUBMITTED else ():
            if cfg.hydra.launcher[name] != 1:
                raise UsageError(
                    f"hydra.launcher.{name}={cfg.hydra.launcher[name]}: a job of a sweep is one process, so it must "
                    "be 1; several processes make one run with torchrun (experiments/CLUSTER.md)."
                )
        if str(cfg.hydra.launcher.get("_target_")).endswith(".SlurmLauncher") and shutil.which("srun") is None:
            raise UsageError(
                "hydra/launcher=submitit_slurm: this machine has no Slurm (srun is not found); start the sweep on a "
                "cluster's node, or take hydra/launcher=joblib."
            )
        return Plan(True, swept, where)


def choices(override: Override) -> list[str]:
    """The override, once for each value of a sweep: `seed=0,1` gives `seed=0` and `seed=1`."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep():
        raise UsageError(f"{override.input_line} names no values: sweep over a list, as in KEY=1,2,3.")
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def jobs(lists: Mapping[str, list[str]]) -> Iterable[list[str]]:
    """Overrides of jobs in which every choice occurs once, others at their first. `lists`: a setting's choices."""
    base = {key: options[0] for key, options in lists.items()}
    yield list(base.values())
    for key, options in lists.items():
        for option in options[1:]:
            yield list((base | {key: option}).values())


class Checker:
    """Composes configurations and says in one sentence what is wrong with the overrides."""

    def __init__(self, config_name: str, search: list[str]) -> None:
        self.config_name = config_name
        self.search = search
        self.loader: ConfigLoader = GlobalHydra.instance().config_loader()
        self.composed: dict[tuple[str, ...], DictConfig] = {}
        self.parser = OverridesParser.create(config_loader=self.loader)

    def parse(self, overrides: list[str]) -> list[Override]:
        parsed = []
        for text in overrides:
            try:
                parsed.append(self.parser.parse_override(text))
            except HydraException:
                raise UsageError(
                    f"{text} is not a setting: write KEY=VALUE, and quote a value that has spaces, commas or brackets, "
                    f"as in 'name=\"a, b\"'."
                ) from None
        return parsed

    def compose(self, overrides: list[str]) -> DictConfig:
        for o in self.parse(overrides):
            if not o.is_delete() and o.value() is None and (options := self._options(o.key_or_group)):
                raise UsageError(f"{o.input_line} does not fit: choose one of {', '.join(sorted(options))}.")
        try:
            return self._load(tuple(overrides))
        except (CompactHydraException, OmegaConfBaseException) as error:
            raise UsageError(self._explain(error, overrides)) from error

    def job(self, overrides: list[str]) -> None:
        """One job: its settings exist, have their kind of value, name files that can be there, and none is missing."""
        cfg = self.compose(overrides)
        parsed = self.parse(overrides)
        # A preset's own values set the kind; only what the command line says is compared with it.
        for override in parsed:
            key = override.key_or_group
            if override.is_delete() and not key.startswith(REMOVABLE):
                raise UsageError(f"{override.input_line} cannot be left out: give it a value, as in {key}=VALUE.")
        values = [o for o in parsed if not self.is_group(o) and not o.is_delete() and not o.is_add()]
        before = self.compose([str(o.input_line) for o in parsed if o not in values])
        for override in values:
            key = override.key_or_group
            default = OmegaConf.select(before, key, throw_on_missing=False, throw_on_resolution_failure=False)
            wanted = wrong_kind(default, override.value())
            if override.value() is None and "." not in key and key not in MAY_BE_NULL:
                wanted = wanted or ("never null" if default is not None or OmegaConf.is_missing(before, key) else "")
            if wanted:
                raise UsageError(f"{override.input_line} does not fit: {key} is {wanted}.")
        own = copy.deepcopy(cfg)
        with open_dict(own):
            del own["hydra"]
        HydraConfig.instance().set_config(cfg)  # for `${hydra:...}`
        try:
            missing = sorted(OmegaConf.missing_keys(own))
            settings = cast(dict[str, Any], OmegaConf.to_container(own, resolve=True))
        except OmegaConfBaseException as error:
            raise UsageError(one_line(error)) from error
        finally:
            HydraConfig.instance().cfg = None
        if missing:
            raise UsageError(f"{missing[0]} has to be set: add {missing[0]}=VALUE.")
        try:
            check_places(settings)
        except UserError as error:
            raise UsageError(str(error)) from error

    def keep_arms(self, lists: Mapping[str, list[str]], chosen: Mapping[str, str | None]) -> None:
        """Refuses values that undo what a preset of `ablation` sets, and presets with a learner that does not read what
        they set: another arm would be trained under its name. `lists`: a setting's choices; `chosen`: of groups, where
        the command line names none."""
        presets, learners = (lists.get(group) or [f"{group}={chosen.get(group)}"] for group in ("ablation", "algo"))
        if "arm" in lists or presets in (["ablation=none"], ["ablation=None"]):
            return
        for preset, learner in ((p, a) for p in presets for a in learners):
            if preset != "ablation=none" and learner not in ("algo=ppo", "algo=None"):
                raise UsageError(
                    f"{preset} names an arm of algo=ppo, and {learner} has terms of its own: leave it out, set them "
                    "(loss.NAME.weight), and give it a name, as in arm=NAME."
                )
        options = {key: self.parse(each) for key, each in lists.items() if key != "ablation"}
        every = [o for several in options.values() for o in several if not (o.is_delete() or o.is_add())]
        given = [o for o in every if isinstance(o.value(), dict) or not self.is_group(o)]
        firsts = {o.get_key_element(): str(o.input_line) for o in reversed(every) if o not in given}
        groups = list(firsts.values())
        values = [(o, key, value) for o in given for key, value in leaves(o.key_or_group, o.value())]
        if not values:
            return
        plain = self.compose([*groups, "ablation=none"])
        for preset in presets:
            cfg = self.compose([*groups, preset])
            if "arm" in cfg and cfg.arm == plain.arm:  # it is not what names the arm
                continue
            for override, key, value in values:
                without, own = (OmegaConf.select(c, key, throw_on_resolution_failure=False) for c in (plain, cfg))
                if without != own and value != own:
                    raise UsageError(
                        f"{preset} sets {key}={own}, and {override.key_or_group}={override.value()} would train "
                        f"something else under its name: leave one of them out, or give it a name, as in arm=NAME."
                    )

    def _load(self, overrides: tuple[str, ...]) -> DictConfig:
        if overrides not in self.composed:
            self.composed[overrides] = self.loader.load_configuration(
                self.config_name, [*self.search, *overrides], run_mode=RunMode.RUN, from_shell=False
            )
        return self.composed[overrides]

    def _options(self, group: str) -> list[str]:
        return self.loader.get_group_options(group, results_filter=ObjectType.CONFIG)

    def _choices_with(self, key: str) -> list[str]:
        """The choices of its group that set this."""
        group, _, inner = key.partition(".")
        repository = cast(Any, self.loader).repository
        files = {name: repository.load_config(f"{group}/{name}") for name in self._options(group)}
        return [
            f"{group}={name}"
            for name, file in files.items()
            if file and OmegaConf.select(file.config, inner if file.header.get("package") is None else key) is not None
        ]

    def is_group(self, override: Override) -> bool:
        return override.package is not None or bool(self._options(override.key_or_group))

    def _groups(self, parent: str = "") -> list[str]:
        found = self.loader.get_group_options(parent, results_filter=ObjectType.GROUP)
        names = [f"{parent}/{name}" if parent else name for name in found]
        return [g for name in names if name != "hydra" for g in (name, *self._groups(name))]

    def _needed(self, overrides: list[str]) -> list[str]:
        """Choices of which each by itself, left out, would make these overrides compose; none where one alone does not
        (as where a choice is added once more)."""

        def composes(left: list[str]) -> bool:
            try:
                return bool(self._load(tuple(left)))
            except CompactHydraException:
                return False

        found = [o for o in overrides if composes([other for other in overrides if other is not o])]
        return found if len(found) > 1 else []

    def _names(self, overrides: list[str], key: str) -> list[str]:
        """Every valid name: groups, and the dotted names of settings under the groups that were chosen."""
        groups = [str(o.input_line) for o in self.parse(overrides) if self.is_group(o) and o.key_or_group != key]
        try:
            cfg = copy.deepcopy(self._load(tuple(groups)))
        except CompactHydraException:
            cfg = copy.deepcopy(self._load(()))
        if not key.startswith("hydra"):
            with open_dict(cfg):
                del cfg["hydra"]
        return [*self._groups(), *dotted_names(cfg)]

    def _explain(self, error: Exception, overrides: list[str]) -> str:
        if isinstance(error, MissingConfigException):
            group, _, name = (error.missing_cfg_file or "").rpartition("/")
            if not group:
                return f"There is no command configuration {name!r} (flag --config-name)."
            if group == "hydra/launcher" and name.startswith("submitit"):
                return f"{group}={name} needs the extra `slurm`: pip install -e '.[slurm]' -c constraints.txt."
            options = sorted(error.options or self._options(group))
            return f"{group}={name} is not an option of {group}; {nearest(name, options, all_if_few=True)}."
        text = str(error)
        quoted = re.search(r"'([^']+)'", text)
        unknown = text.startswith(("Could not override", "Could not delete")) or "config group" in text
        if unknown and quoted and "The value of" not in text:
            key, names = quoted.group(1), self._names(overrides, quoted.group(1))
            whole = key.rpartition(".")[0]
            deleted = text.startswith("Could not delete")
            if key in names and deleted:  # Hydra takes null for nothing
                return f"{key} is null, so it is left out already: drop ~{key}."
            if key in names:  # the value is a group of settings, and one of them is new
                given = next(str(o.input_line) for o in self.parse(overrides) if o.key_or_group == key)
                inner = str(getattr(error.__cause__, "full_key", None) or key)
                if inner == key and self._options(key):
                    return f"{given}: {key} is for other commands, and {self.config_name} reads none."
                others = [name for name in names if name != key]
                return f"{inner} is not a setting; {nearest(inner, others)}; a plus sign adds it: +{given}."
            if whole in names and not any(name.startswith(f"{whole}.") for name in names):
                return f"{key} is not a setting: {whole} is null or a single value; give it whole, as in {whole}=VALUE."
            if key.startswith(("hydra.launcher.", "tracker.")) and whole in names:
                brings = "hydra/launcher=joblib or submitit_slurm" if key.startswith("hydra.") else "tracker=wandb"
                return f"{key} is not a setting; {nearest(key, names)}; others come with {brings}."
            term = key.startswith(("loss.", "reward.")) and key.count(".") == 1 and not deleted
            adds = f"; a plus sign adds a term: +{key}={{_target_: MODULE.CLASS, weight: 1.0}}" if term else ""
            if with_it := self._choices_with(key):
                return f"{key} is not a setting here; {' or '.join(with_it)} has it."
            return f"{key} is not a setting; {nearest(key, names)}{adds}."
        if "Could not append" in text and quoted:
            return f"{quoted.group(1)} is a setting already: write {quoted.group(1)}=VALUE, without a plus sign."
        if text.startswith("Multiple values for"):
            key = text.split()[3].rstrip(".")
            if sources := self._needed(overrides):
                return f"{' and '.join(sources)} don't go together, since each chooses {key}: leave one of them out."
            return f"{key} is chosen twice: give it once, without a plus sign."
        if isinstance(error.__cause__, OmegaConfBaseException):
            return one_line(error.__cause__)
        return one_line(error)


def wrong_kind(default: Any, value: Any) -> str:
    """What a setting is, in words, where `value` is something else; empty where it fits. `default` tells the kind."""
    if isinstance(value, str) and "${" in value:
        return ""
    if isinstance(default, DictConfig):
        return "" if isinstance(value, dict) else f"a group of settings ({', '.join(map(str, default)) or 'now empty'})"
    if value is None:
        return ""  # whether a setting may be empty is its dataclass's business
    if isinstance(default, ListConfig):
        return "" if isinstance(value, list) else "a list, as in [1,2]"
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        return "" if isinstance(value, int | float) and not isinstance(value, bool) and value == value else "a number"
    return ""


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The settings that a value gives, by their dotted names."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def dotted_names(cfg: DictConfig, parent: str = "") -> list[str]:
    names = []
    for key in cfg:
        name = parent + "." + str(key) if parent else str(key)
        names.append(name)
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not (node._is_none() or node._is_missing() or node._is_interpolation()):
            names += dotted_names(node, name)
    return names


def nearest(word: str, names: Iterable[str], all_if_few: bool = False) -> str:
    """A clause with the most similar names. A word without dots is compared with last parts: `lr` finds `algo.lr`."""

    def similarity(name: str) -> float:
        compared = name if "." in word else name.rpartition(".")[2]
        return difflib.SequenceMatcher(None, word, compared).ratio()

    names = sorted(dict.fromkeys(names), key=similarity, reverse=True)
    found = [n for n in names[:3] if similarity(n) >= max(0.6, similarity(names[0]) - 0.1)]
    if found:
        return f"the nearest {'is' if len(found) == 1 else 'are'} {', '.join(found)}"
    if all_if_few:
        return "there are " + ", ".join(sorted(names))
    return "--cfg job lists them all"


def one_line(error: BaseException) -> str:
    """An exception as one sentence; OmegaConf's come with the setting's full name."""
    if not isinstance(error, OmegaConfBaseException):
        return " ".join(str(error).split())
    text = str(error).splitlines()[0].rstrip(".") + "."
    return f"{error.full_key}: {text}" if error.full_key and str(error.full_key) not in text else text


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Within, warnings of our own are shown as the sentences that they are; others with where they come from."""
    before, own = warnings.formatwarning, str(Path(__file__).resolve().parents[1] / "marl")

    def shown(message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        if category is UserWarning and str(Path(filename).resolve()).startswith(own):
            return f"{message}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = shown
    try:
        yield
    finally:
        warnings.formatwarning = before


def wants_traceback() -> bool:
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def say(sentence: str) -> None:
    with unheard(STDERR):
        print(sentence, file=sys.stderr, flush=True)


def leave(error: UserError, status: int) -> NoReturn:
    if wants_traceback():
        raise error
    say(one_line(error))
    raise SystemExit(status)

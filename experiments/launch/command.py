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

import functools
import importlib
import logging
import os
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.launch.help import short_help
from experiments.launch.overrides import (
    LAUNCHERS,
    VERSION_BASE,
    Plan,
    UsageError,
    Where,
    check_command_line,
    implied,
    one_line,
    split_arguments,
)
from experiments.launch.sweeps import (
    JobFailed,
    in_own_processes,
    label,
    own_settings,
    settings_and_folder,
    taken_by,
    use_cores,
    waiting_for_all,
)
from experiments.launch.terminal import STDOUT, labelled, say_error, unheard
from marl.common.errors import UserError, check_places, check_sizes
from marl.common.secrets import told

Task = Callable[[DictConfig], Any]
After = Callable[[list[Path]], None]
FolderOf = Callable[[DictConfig], Path]

# For each shape of a product in bfloat16 torch compiles a kernel on a CPU; it and its library keep the last 1,024 each:
# more memory than the products take. A pass of an update makes about 15. With 16, 32 and 1,024 in the library an update
# of 128 rows of 1,024 tokens (4 million parameters, a processor with AMX, one core) took 33 to 38, 25 and 25 processor
# seconds and 415 to 436, 464 and 815 MB; how many torch itself keeps made no difference from 16 on.
FEW_KERNELS = {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}


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
            settings = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
            check_sizes(settings, "")
            check_places(settings)
            with plain_warnings():
                return task(cfg)

        @functools.wraps(task)
        def main(cfg: DictConfig | None = None) -> Any:
            if cfg is not None:
                return checked(cfg)
            try:
                flags, overrides = split_arguments(sys.argv[1:])
                if {"--help", "-h"} & set(flags):
                    spec = sys.modules[task.__module__].__spec__
                    module = spec.name if spec else f"experiments.{config_name}"
                    about = (sys.modules[task.__module__].__doc__ or "").partition("\n")[0]
                    configs = Path(str(importlib.import_module(package).__file__)).parent
                    print(short_help(module, about, configs / f"{config_name}.yaml"))
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
                say_error(
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
                    say_error(where + one_line(error))
                else:
                    say_error(where + "".join(traceback.format_exception(error)))
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
        for launcher in LAUNCHERS:  # they log each job's overrides as they were given
            logging.getLogger(launcher.rpartition(".")[0]).addFilter(tell)
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
        say_error(f"Interrupted{of_sweep}; the same command goes on from what is there.")
        raise SystemExit(status)
    try:
        if after and made and status in (0, 1):  # with another one it was stopped
            after(made)
    except UserError as error:
        say_error(one_line(error))
        status = 1
    finally:  # the last word, whatever becomes of the report
        if failed:
            say_error(f"Failed jobs: {len(failed)} ({'; '.join(failed)}).")
        if unstarted:
            say_error(f"Jobs that did not start: {len(unstarted)} ({'; '.join(unstarted.values())}).")
        with unheard(STDOUT):
            sys.stdout.flush()
    if failed:
        status = status or 1
    if status:
        raise SystemExit(status)


def tell(record: logging.LogRecord) -> bool:
    """Takes out of a line of overrides what might be a secret; every line is logged."""
    record.msg, record.args = told(re.split(r" (?=[+~]{0,2}[\w./@]+=)", record.getMessage())), None
    return True


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


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Within, warnings of our own are shown as the sentences that they are; others with where they come from."""
    before, own = warnings.formatwarning, str(Path(__file__).resolve().parents[2] / "marl")

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


def leave(error: UserError, status: int) -> NoReturn:
    if wants_traceback():
        raise error
    say_error(one_line(error))
    raise SystemExit(status)

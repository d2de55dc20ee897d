"""Turns a function of a configuration into a command: one run, or a sweep of several.

    @command("train")  # conf/train.yaml
    def main(cfg: DictConfig) -> Path: ...

A sweep's jobs run one after another in this process, several at a time in others (`hydra/launcher=joblib`), or as jobs
of a cluster (`hydra/launcher=submitit_slurm`). Exit status: 0 all well, 1 a job failed, 2 a mistake on the command
line, 130 interrupted. `HYDRA_FULL_ERROR=1` shows all tracebacks.
"""

import argparse
import functools
import importlib
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.launch.overrides import Check, Checker, Plan, one_line, without_hydra
from experiments.launch.terminal import labelled, say, say_error
from marl.common.errors import UserError, check_settings
from marl.common.secrets import redacted

Task = Callable[[DictConfig], Any]
GOES_ON = "The same command goes on from what is there."


def command(
    name: str,
    package: str = "conf",
    implies: Mapping[str, str] | None = None,
    after: Callable[[list[Path]], None] | None = None,
    check: Check | None = None,
) -> Callable[[Task], Callable[..., Any]]:
    """Makes `task(cfg)` a command, configured by `name`.yaml of `package` and the overrides in `sys.argv`.

    `implies`: {"data.dond": "base=human"} adds the choice base=human wherever data.dond is given and base is not.
    `after`: called at a sweep's end with what its jobs returned, without those that failed.
    `check`: called with every job's configuration before the first job starts.
    Called with a configuration, the command runs just the task. Mistakes by the user end the process (SystemExit).
    """

    def decorate(task: Task) -> Callable[..., Any]:
        @functools.wraps(task)
        def main(cfg: DictConfig | None = None) -> Any:
            if cfg is not None:
                check_settings(OmegaConf.to_container(cfg, resolve=True))
                return task(cfg)
            if os.getcwd() not in sys.path:  # as with python -m: the terms of one's own folder
                sys.path.insert(0, os.getcwd())
            try:
                flags = read_arguments(implies or {})
                if flags.help:
                    return say(short_help(task, package, name))
                with initialize_config_module(package, version_base="1.3", job_name=name):
                    plan = Checker(name, check).plan(flags.overrides, flags.multirun, show=flags.cfg is not None)
                    if flags.cfg:
                        return say(OmegaConf.to_yaml(OmegaConf.select(without_hydra(plan.config), flags.package)))
                    results = launch(task, plan)
            except (UserError, HydraException, OmegaConfBaseException) as error:
                leave(error, 2, one_line(error))
            except KeyboardInterrupt as error:
                leave(error, 130, f"Interrupted. {GOES_ON}")
            failed = [result.job for result in results if isinstance(result, Failed)]
            try:
                made = [result for result in results if not (result is None or isinstance(result, Failed))]
                if after and made and plan.jobs:
                    after(made)
            except UserError as error:
                leave(error, 1, one_line(error))
            finally:  # the last word, whatever becomes of the report
                if failed and plan.jobs:
                    say_error(f"Failed jobs: {len(failed)} ({'; '.join(failed)}).")
            if failed:
                raise SystemExit(1)

        return main

    return decorate


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}; settings are written KEY=VALUE, flags stand in --help.")


def read_arguments(implies: Mapping[str, str]) -> argparse.Namespace:
    """Reads flags and overrides, in any order, and adds the choices that the overrides bring with them."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--package", "-p", default="")
    flags = parser.parse_intermixed_args()
    given = dict(override.partition("=")[::2] for override in flags.overrides)
    for setting, choice in implies.items():
        if given.get(setting, "null") not in ("null", "") and choice.partition("=")[0] not in given:
            flags.overrides.append(choice)
    return flags


def short_help(task: Task, package: str, name: str) -> str:
    """A command's purpose, and the first lines of its configuration, in which choices list their names."""
    module = sys.modules[task.__module__]
    folder = Path(str(importlib.import_module(package).__file__)).parent
    lines = [(module.__doc__ or "").partition("\n")[0]]
    for line in (folder / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if choice := re.fullmatch(r"  - (?:optional )?([\w/]+): (\S+)(?:  # (.*))?", line):
            names = ", ".join(sorted(path.stem for path in (folder / choice[1]).glob("*.yaml")))
            line = f"{choice[1]}={choice[2]}  # {f'{choice[3]}: ' if choice[3] else ''}{names}"
        if line and not line.startswith(("defaults:", "  - ")):
            lines.append(f"  {line}" if len(line) < 118 else f"  {line[:114]}...")
    path = module.__spec__.name if module.__spec__ else f"experiments.{name}"
    more = f"All settings: python -m {path} --cfg job (of one choice: -p env); docs/howto/commands.md"
    return "\n".join([*lines[:37], more, "Give NAME=VALUE, as in seed=1 or eval.games=64; -m sweeps over NAME=A,B,C"])


def leave(error: BaseException, status: int, sentence: str) -> NoReturn:
    """Ends the process with one sentence; with the whole error where HYDRA_FULL_ERROR=1."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    say_error(sentence)
    raise SystemExit(status) from None


@dataclass(frozen=True)
class Failed:
    """The result of a job whose task raised an error."""

    job: str


@dataclass(frozen=True)
class Job:
    """A task as a launcher calls it. An error is said and does not stop the other jobs."""

    task: Task
    swept: Sequence[str] | None  # settings that differ between a sweep's jobs; None for one run
    command: int  # process of the command
    at_once: int  # jobs that run side by side on this machine
    said: list[str] = field(default_factory=list)  # errors of this process's jobs

    def __call__(self, cfg: DictConfig) -> Any:
        hydra, sweep = HydraConfig.get(), self.swept is not None
        given = list(hydra.overrides.task)
        name = redacted([each for each in given if each.partition("=")[0] in (self.swept or ())] or given)
        side_by_side = os.getpid() != self.command and "submitit_folder" not in hydra.launcher
        if side_by_side:
            end_with(self.command)
            os.environ["JOBS_AT_ONCE"] = str(self.at_once)  # so that they share out memory
        elif sweep:
            say(f"#{hydra.job.num}: {name}")
        with labelled(name if side_by_side else ""), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: say_error(str(message))
            try:
                return self.task(cfg)
            except Exception as error:  # whatever it is, it fails this job alone
                known = isinstance(error, UserError | OmegaConfBaseException)
                whole = not known or os.environ.get("HYDRA_FULL_ERROR") == "1"
                text = "".join(traceback.format_exception(error)) if whole else one_line(error)
                again = self.said[-1:] == [text]  # `the same` is as the error above it
                self.said.append(text)
                say_error(f"{name}: {'the same.' if again else text}" if sweep else text)
                return Failed(name)


def end_with(parent: int) -> None:
    """Ends this process once its parent is gone; else it would keep its run's folder from whoever starts again."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def at_once(plan: Plan) -> int:
    """Returns how many jobs joblib runs side by side; 1 with other launchers."""
    workers = plan.config.hydra.launcher.get("n_jobs")
    if not (workers and plan.jobs):
        return 1
    from joblib import effective_n_jobs  # takes as long as all else here; few commands are sweeps

    return min(effective_n_jobs(workers), len(plan.jobs))


def launch(task: Task, plan: Plan) -> list[Any]:
    """Runs all jobs. Returns what each task returned, or `Failed`. Ends the process where not all jobs ended."""
    context = HydraContext(GlobalHydra.instance().config_loader(), callbacks=cast(Any, Callback()))
    job = Job(task, plan.swept if plan.jobs else None, os.getpid(), at_once(plan))
    if not plan.jobs:
        return [run_job(job, plan.config, "hydra.run.dir", None, context).return_value]
    launcher = Plugins.instance().instantiate_launcher(context, job, plan.config)
    try:
        return [result.return_value for result in launcher.launch(plan.jobs, initial_job_idx=0)]
    except Exception as error:  # whatever it is; errors of jobs are told by the jobs
        leave(error, 1, f"The launcher stopped ({type(error).__name__}): {one_line(error)} {GOES_ON}")

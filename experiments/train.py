"""Trains one run: base, learning, evaluation of both on the same games, report.

The same command resumes a run that was stopped, and says so of one that is done. A sweep ends with one table and one
report of its finished runs.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from experiments.final_games import final_evaluation
from experiments.launch.command import command
from experiments.launch.show import show
from experiments.launch.terminal import Bar, quiet, say
from experiments.learning import learn
from experiments.report import report_sweep
from experiments.setup.bands import expected_of
from experiments.setup.checks import check_job
from experiments.setup.devices import set_deterministic, set_threads
from experiments.setup.memory import memory_of_run
from experiments.setup.record import Record
from experiments.setup.spec import RunSpec, run_spec
from experiments.setup.work import Work, inputs_of
from marl.common.distributed import Ranks, torchrun_ranks
from marl.common.errors import UserError
from marl.metrics.stats import Metrics
from marl.model.policy import Policy
from marl.pretraining.base import base_policy
from marl.report.page import build_report
from marl.storage.checkpoint import newest_checkpoint, read_state, save_policy
from marl.storage.folder import REFERENCE, check_unedited, claim, read_run_card
from marl.storage.tracking import METRICS_FILE, Tracker, make_tracker, read_metrics


@command("train", implies={"data.dond": "base=human"}, after=report_sweep, check=check_job)
def main(cfg: DictConfig) -> Path:
    """Makes one run, from its configuration to its report. Returns its folder."""
    # Configure.
    spec = run_spec(cfg)
    leads = int(os.environ.get("RANK", "0")) == 0  # of torchrun's processes the first one writes
    if spec.measured and leads:
        say(f"arm={spec.arm} measures {', '.join(spec.measured)} without training. To train them too, add arm=NAME.")
    set_deterministic(spec.deterministic)
    set_threads(spec.threads)
    if is_done(spec):
        if leads:
            say_done(spec)
        return spec.folder

    # Check, before anything is written.
    work = Work.of(spec)
    fit = memory_of_run(work)

    # Run, and write.
    with torchrun_ranks(work.device) as ranks, leaving_the_device(work.device):
        work = work.at_once(min(ranks.objects(fit.concurrency)), fit.game)
        if not ranks.first:
            follow(work, ranks)
            return spec.folder
        say(fit.line)
        if work.device.type == "cuda" and spec.algo.decode_steps == 1:
            say("for speed on a GPU: algo.decode_steps=8, algo.update.bf16=true")
        with claim(spec.folder, spec.config_yaml) as lock:
            if ranks.size == 1 and is_done(spec):  # by another process, while this one began
                say_done(spec)
                return spec.folder
            ranks.wait()  # the others begin once the folder is ours
            lead(replace(work, lock=lock, expected=expected_of(spec.name, spec.arm, spec.env)), ranks)
    return spec.folder


def is_done(spec: RunSpec) -> bool:
    """Returns whether the run is done; nothing else is needed for one that is. UserError where it was edited, or made
    with other contents of files that are still there."""
    card = read_run_card(spec.folder)
    if card is None:
        return False
    check_unedited(spec.folder, spec.config_yaml)
    began_with, now = card.get("inputs", {}), {}
    with suppress(UserError, OSError):  # files that are gone say nothing
        now = inputs_of(spec)
    for name in now.keys() & began_with.keys():
        if now[name] != began_with[name]:
            raise UserError(
                f"{spec.folder} is done, but {name} is not what it was made with: put the old one back, remove the "
                "folder to make the run anew, or give it another `name`"
            )
    return True


def say_done(spec: RunSpec) -> None:
    """Says that the run is done, and makes its report if that is gone."""
    folder, report = spec.folder, spec.folder / "report.html"
    if not report.exists():
        build_report([folder], report, title=spec.name)
    say(f"{folder} is done: its report is {report}")


@contextmanager
def leaving_the_device(device: torch.device) -> Iterator[None]:
    """Gives back at the end what torch keeps of a GPU's memory: a sweep's idle worker would hold it against others."""
    try:
        yield
    finally:
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def follow(work: Work, ranks: Ranks) -> None:
    """Learns beside the process that leads, and writes nothing."""
    with quiet():
        ranks.wait()
        bar = Bar(enabled=False)
        learn(work, base_of(work, bar, ranks)[0], None, Tracker(), dict, bar, ranks)


def lead(work: Work, ranks: Ranks) -> None:
    """Makes the run, and writes everything that is kept of it."""
    spec, folder = work.spec, work.spec.folder
    newest = newest_checkpoint(folder / "checkpoints", say)
    record = Record.of(work, newest, ranks)
    bar = Bar(enabled=spec.progress)
    record.say()
    with open_tracker(spec, newest) as tracker:
        base, base_folder = base_of(work, bar, ranks)
        record.keep_base(base, base_folder)
        policies = learn(work, base, newest, tracker, record.note, bar, ranks)
        for name, policy in policies.items():
            kept_base = str(base_folder) if base_folder else None
            card = {"game": spec.env["game"], "base": kept_base, "run": folder.name, "learner": name}
            save_policy(folder / ("policy" if name == spec.learners[0] else name), policy, card)
        conditions, examples = final_evaluation(work, base_folder, base, policies, bar)
        bar.close()
        tracker.final(with_ends(conditions))  # before the card: a run that has one is done, and never begun again
        record.write_card(base_folder, conditions)
        build_report([folder], folder / "report.html", title=spec.name)
        tracker.report(folder / "report.html")
    show(conditions, examples, folder / "report.html")
    if work.chat:
        say(work.chat.summary())
    if work.expected and (verdict := work.expected.verdict(read_metrics(folder / METRICS_FILE))):
        say(verdict)


def with_ends(conditions: Mapping[str, Metrics]) -> dict[str, float]:
    """The figures as `CONDITION/METRIC`, with the ends of their intervals as `.../low` and `.../high`."""
    return {
        f"{condition}/{metric}{end}": value
        for condition, found in conditions.items()
        for metric, interval in found.items()
        for end, value in (("", interval.mean), ("/low", interval.low), ("/high", interval.high))
    }


def base_of(work: Work, bar: Bar, ranks: Ranks) -> tuple[Policy, Path | None]:
    """Loads the base model, or trains it; returns it with its folder. The first rank goes first."""
    spec = work.spec
    if not ranks.first:
        ranks.wait()
    found = base_policy(
        spec.model,
        spec.base,
        spec.env,
        cache=spec.cache,
        human_data=spec.human_data,
        privileged_size=privileged_size(work.make_env) if spec.critic == "privileged" else 0,
        device=work.device,
        kept=spec.folder / REFERENCE,
        progress=bar.count,
        report=say,
    )
    if ranks.first:
        ranks.wait()
    return found


def privileged_size(make_env: Callable[[], Any]) -> int:
    """Counts the numbers that a privileged critic reads beside the hidden state."""
    env = make_env()
    env.reset(seed=0)
    return len(env.privileged(env.possible_agents[0]))


def open_tracker(spec: RunSpec, newest: Path | None) -> Tracker:
    """Opens the run's tracker, and cuts off what was logged after the newest checkpoint."""
    return make_tracker(
        spec.tracker["kind"],
        spec.folder,
        name=spec.folder.name,
        run_id=spec.hash,
        config=spec.identity,
        resume_from_iteration=read_state(newest)["iteration"] if newest else None,
        **{k: v for k, v in spec.tracker.items() if k != "kind"},
    )


if __name__ == "__main__":
    main()

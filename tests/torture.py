"""Kills small runs at random moments, starts them again, and compares their ends with runs that nobody killed.

`make torture` (`python -m tests.torture --kills 50`): for each algorithm one run to its end, then as many runs of the
same command, each killed with SIGKILL once or more and started again until it ends. Everything that does not tell the
time must be the same to the last bit. A short form is among the tests.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from envs.dond.texts import COMPACT_TOKENS
from experiments import train
from marl.common.files import write_json
from marl.intents.agent import ACTION, PARTS
from marl.intents.streams import FORM
from marl.model.tokens import train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rollout.games import env_maker
from marl.storage.checkpoint import save_policy
from marl.storage.tracking import METRICS_FILE, read_metrics
from tests.composing import configure as composed
from tests.composing import run_folder
from tests.marl.models import random_lm, save
from tests.marl.planners import negotiator

SMALL = (
    "progress=false", "threads=1", "device=cpu", "model.hidden_size=64", "model.layers=2",
    "model.intermediate_size=64", "algo.iterations=4", "algo.games=8", "algo.concurrency=8", "algo.max_new_tokens=12",
    "eval.games=4", "eval.every=1", "eval.final_games=8", "checkpoint.every=1",
)  # fmt: skip
# With fewer steps the game accepts no word of the model: every game is aborted, and teaches nothing.
TALKING = ("env=dond", "base.games=200", "base.rows=2", "base.learning_rate=1e-2")
AMONG_US = (
    "env=among_us", "env.max_steps=60", "env.tasks=2", "env.cooldown=3", "base.games=20", "base.rows=16",
    "base.lessons=[{players:random,steps:2}]", "algo.update.rows=8",
)  # fmt: skip
KINDS = {
    "ppo": (*TALKING, "algo=ppo", "loss.imitation.weight=0.1"),
    "filtered_bc": (*TALKING, "algo=filtered_bc", "algo.keep=all"),  # keep=all: so small a base hardly ever agrees
    # Muon, renamed rows, separate credit; the iteration after a checkpoint is done again
    "ppo_among_us": (*AMONG_US, "algo=ppo", "checkpoint.every=2", "checkpoint.keep=1", "eval.every=3"),
    "ppo_two_learners": (*AMONG_US, "algo=ppo", "cast.imposter.player=rival", "algo.alternate=2"),
    "filtered_bc_among_us": (*AMONG_US, "algo=filtered_bc", "algo.keep=all"),  # keep=all, because all eight may be lost
    "pikl": (*TALKING, "algo=pikl", "algo.planner.iterations=5"),
    "pikl_among_us": (*AMONG_US, "algo=pikl", "algo.planner.iterations=5"),  # votes are planned, not claims
    # Several tokens a step, in bfloat16, whose sums depend on their order
    "ppo_bf16": (*TALKING, "algo=ppo", "algo.play_bf16=true", "algo.decode_steps=4", "algo.update.bf16=true"),
    "ppo_recurrent": (*TALKING, "algo=ppo", "model=hf", "base=scripted", "env.style=compact", "model.context=400"),
    "ppo_adapter": (
        *TALKING,
        "algo=ppo",
        "model.lora={rank: 4, alpha: 8, targets: all-linear, dropout: 0, bf16: false}",
    ),
    "ppo_told": (*TALKING, "algo=ppo", "+cicero@algo.cicero=default", "algo.cicero.plan.iterations=2"),  # intents
}
# Metrics that are nonzero in every iteration of each learner, or it has learned nothing.
LEARNED = {
    "ppo": ("loss/policy", "reward/speaking", "grad_norm"),
    "filtered_bc": ("loss/imitation", "grad_norm"),
    "pikl": ("loss/plan", "loss/listening", "grad_norm"),
}
TIMES = ("timing.jsonl", "report.html", ".lock", "train.log")  # files that tell the time, and whose it is
OF_THE_CLOCK = ("wall_time", "speed", "tokens_per_second", "per_game", "peak_bytes")  # of cards and notes


def configure(kind: str, folder: Path, *overrides: str) -> DictConfig:
    """A run of this kind in `folder`; a model that it brings is saved beside it, and is the same for all runs there."""
    own, small = [*KINDS[kind]], SMALL
    if "model=hf" in own:
        own.append(f"model.name={recurrent_model(folder.parent / 'model')}")
        small = tuple(setting for setting in SMALL if not setting.startswith("model."))
    if kind == "ppo_told":
        own.append(f"algo.intents={intents(folder.parent / 'intents')}")
    return composed("train", *small, *own, f"runs={folder / 'runs'}", f"cache={folder / 'bases'}", *overrides)


def recurrent_model(folder: Path) -> Path:
    """An untrained Mamba 2 with a tokenizer of the game's words."""
    if not folder.exists():
        texts = scripted_texts("dond", [env_maker({"game": "dond", "style": "compact"})], 0, games=50)
        tokenizer = train_tokenizer(texts, COMPACT_TOKENS, 512)
        save(folder, random_lm("mamba2", len(tokenizer)), tokenizer)
    return folder


def intents(folder: Path) -> Path:
    """A folder whose action model plans what learners intend."""
    if not folder.exists():
        save_policy(folder / ACTION, negotiator(), {"game": "dond"})
        write_json(folder / PARTS, {"arm": "both", "told": FORM})
    return folder


def start(cfg: DictConfig, log: Path) -> int:
    """A process of its own that trains, without the seconds that imports take. Returns its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:  # the child never returns to the caller's code
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        train.main(cfg)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def wait(child: int, seconds: float) -> int | None:
    """The exit status of a process, None if it still runs after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.002)


def contents(folder: Path) -> dict[str, str]:
    """Digests of all files of a run and its base, without those that tell the time."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in TIMES and p.suffix != ".lock"):
        name = str(path.relative_to(folder))
        data = path.read_bytes()
        if path.name == "run.json":
            card = json.loads(data)
            data = json.dumps({k: v for k, v in card.items() if k not in OF_THE_CLOCK}, sort_keys=True).encode()
        if path.name in ("policy.json", "adapter_config.json"):
            data = data.replace(str(folder).encode(), b"")  # they say where the base of an adapter is
        if path.name == "policy.json":
            card = json.loads(data)
            data = json.dumps({**card, "base": Path(card["base"]).name if card.get("base") else None}).encode()
        if path.name == "state.json":
            state = json.loads(data)
            data = json.dumps({k: v for k, v in state.items() if k not in OF_THE_CLOCK}, sort_keys=True).encode()
        if path.name == "checksums.json":
            continue  # checksums cover files that hold times or the base's place
        found[name] = hashlib.sha256(data).hexdigest()
    return found


def stage(cfg: DictConfig) -> str:
    """Returns the stage at which a run was killed: base, iteration N, writing a folder, or last evaluation."""
    folder = run_folder(cfg)
    if not folder.exists() or not (folder / "metrics.jsonl").exists():
        return "base"
    if any(part.name.startswith(".") and part.is_dir() for part in folder.rglob(".*")):
        return "writing a folder"
    if (folder / "policy").exists():
        return "last evaluation"
    return f"iteration {len((folder / 'metrics.jsonl').read_text().splitlines()) // 2}"


@dataclass(frozen=True)
class Outcome:
    """One tortured run: where it was killed, and what of it differs from the run that was left alone."""

    killed: tuple[str, ...]
    differs: tuple[str, ...]


def torture(kind: str, folder: Path, kills: int, seed: int, *overrides: str) -> Iterator[Outcome]:
    """Runs the algorithm once in peace, then `kills` times with one kill or two, and yields what became of each.

    Every second of these runs makes its own base, so that kills fall there too. RuntimeError where a run fails, with
    the last lines of its log.
    """
    rng = random.Random(f"{seed} {kind}")
    whole = configure(kind, folder / "whole", *overrides)
    (folder / "whole").mkdir(parents=True)
    begun = time.time()
    finish(whole, folder / "whole" / "train.log")
    ended = time.time()
    if idle := [name for name in LEARNED[learner_of(kind)] if not always(whole, name)]:
        raise RuntimeError(f"{kind}: the run that was left alone had no {' and no '.join(idle)}")
    based = max(path.stat().st_mtime for path in (folder / "whole" / "bases").glob("*/model.safetensors"))
    seconds = {False: ended - begun, True: ended - based}  # by whether the run finds its base
    expected = contents(folder / "whole")
    for number in range(kills):
        here, with_base = folder / f"killed-{number}", bool(number % 2)
        cfg, killed = configure(kind, here, *overrides), list[str]()
        moments = [rng.uniform(0, seconds[with_base]) for _ in range(rng.choice((1, 1, 2)))]
        while not killed:
            shutil.rmtree(here, ignore_errors=True)
            here.mkdir()
            if with_base:
                shutil.copytree(folder / "whole" / "bases", here / "bases")
            for moment in moments:
                child = start(cfg, here / "train.log")
                if (status := wait(child, moment)) is None:
                    os.killpg(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    killed.append(stage(cfg))
                elif status:
                    raise RuntimeError(failure(status, here / "train.log"))
            moments = [moment / 2 for moment in moments]  # this run may be faster than the undisturbed one
        finish(cfg, here / "train.log")
        found = contents(here)
        different = tuple(n for n in sorted({*expected, *found}) if expected.get(n) != found.get(n))
        yield Outcome(tuple(killed), different)
        if not different:
            shutil.rmtree(here)


def learner_of(kind: str) -> str:
    return next(learner for learner in LEARNED if kind.startswith(learner))


def always(cfg: DictConfig, metric: str) -> bool:
    """Returns whether a training metric was nonzero for some learner in every iteration."""
    rows = [row for row in read_metrics(run_folder(cfg) / METRICS_FILE) if row["phase"] == "train"]
    return all(any(row[name] for name in row if name.endswith(metric)) for row in rows)


def finish(cfg: DictConfig, log: Path) -> None:
    """Lets a run go to its end. Raises RuntimeError if it fails, or takes more than an hour."""
    child = start(cfg, log)
    if (status := wait(child, 3600)) is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if status != 0:
        raise RuntimeError(failure(status, log))


def failure(status: int | None, log: Path) -> str:
    tail = "\n".join(log.read_text().splitlines()[-15:])
    return f"a run ended with status {status}; {log} ends with:\n{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="runs that are killed, of each kind (default 50)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what is run (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    given = parser.parse_args()
    folder, failed = Path(tempfile.mkdtemp(prefix="torture-")), 0
    for kind in given.kinds:
        places: Counter[str] = Counter()
        for number, outcome in enumerate(torture(kind, folder / kind, given.kills, given.seed), start=1):
            places.update(outcome.killed)
            failed += bool(outcome.differs)
            said = f"differs: {', '.join(outcome.differs)}" if outcome.differs else "same"
            print(f"{kind} {number}/{given.kills}, killed at {' and '.join(outcome.killed)}: {said}", flush=True)
        print(f"{kind}: {', '.join(f'{count} x {place}' for place, count in sorted(places.items()))}", flush=True)
    print(f"{failed} of {given.kills * len(given.kinds)} runs did not end as they should", flush=True)
    if failed:
        print(f"what they left: {folder}")
    else:
        shutil.rmtree(folder)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Gives every entry point generated bad input, and counts what became of it.

`make hostile` (`python -m tests.hostile --inputs 10000`): replies to both games, command lines, settings, the files of
human dialogues and of contexts, checkpoints, policies, the files of a run's folder, files of another game and of older
versions, disks that are full, folders that may not be written, and clocks that were set back. Each input must be taken,
put right as the rules say, or refused with one clear line (UserError, or a command's exit), and what it found on disk
must be as before. Anything else is shown with the input that hypothesis shrank it to. A short form is among the tests.
"""

from __future__ import annotations

import argparse
import builtins
import errno
import hashlib
import io
import itertools
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hydra import compose, initialize_config_module
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from envs import among_us_v0, dond_v0
from envs.core import END, TurnKind
from experiments import benchmark, evaluate, play, report, train
from experiments.launch.overrides import one_line, wrong_kind
from experiments.setup import entrants
from experiments.setup.bands import expected_of
from experiments.setup.players import run_policy
from experiments.setup.spec import run_spec
from experiments.setup.stages import stages_of
from experiments.studies import cells, conditions, crossplay, drift, expected, frontier, iterations, plan
from marl.common.errors import UserError
from marl.common.files import write_json, write_text
from marl.model.policy import Policy
from marl.pretraining.base import base_settings
from marl.pretraining.corpus import data_files, recorded
from marl.report.page import read_run
from marl.report.transcripts import episode_to_json, write_episodes
from marl.rollout.games import env_maker
from marl.storage.checkpoint import load_training, newest_checkpoint, optimizer_tensors, save_policy, save_training
from marl.storage.folder import read_run_card
from marl.storage.tracking import JsonlTracker
from tests.composing import identity, run_folder
from tests.human_dialogues import ROWS, TEST, VAL
from tests.marl.episodes import beliefs, deal_game, episode, message, propose
from tests.marl.hint import hint_policy

TEXT = st.text(st.characters(), max_size=60)  # any string that Python can hold, halves of surrogate pairs too


@dataclass(frozen=True)
class Kind:
    """One kind of bad input: how it is made, and what trying it comes to, in a word."""

    share: float  # of all inputs
    inputs: st.SearchStrategy[Any]
    tried: Callable[[Any], str]


class Accepted(BaseException):
    """A training run would begin here. Not an Exception, so that no command takes it for a failure."""


# --- Replies ----------------------------------------------------------------------------------------------------------

SPEECH = st.lists(
    st.sampled_from(["[message]", "[propose]", END, "(1 books, 0 hats, 2 balls)", "(9 books)", "hats", " ", "\n", "\0"])
    | TEXT,
    max_size=5,
).map("".join)


def negotiate(game: tuple[str, int, list[tuple[str, str]]]) -> str:
    """Plays both players' replies, whoever's turn it is. A refused reply is told to its player alone."""
    style, seed, replies = game
    env, refused = dond_v0.parallel_env(style=style, max_entries=12, max_message_chars=50), False
    seen, infos = env.reset(seed=seed)
    for both in replies:
        if not env.agents:
            break
        due = [agent for agent, own in seen.items() if own["turn"]]
        seen, _, _, _, infos = env.step({**dict(zip(env.possible_agents, both, strict=True)), "stranger": both[0]})
        errors = [agent for agent, info in infos.items() if info["error"]]
        assert len(due) == 1 and set(errors) <= set(due), (due, errors)
        check_observations(env, seen)
        refused |= bool(errors)
    assert env.agents or all("outcome" in info for info in infos.values())
    return "corrected" if refused else "taken"


def deceive(game: tuple[str, int, list[list[str | int]]]) -> str:
    """Plays the replies, one for each seat and step; a number is one of the options, and a missing one no reply."""
    style, seed, steps = game
    env, refused = among_us_v0.parallel_env(style=style, max_steps=40, tasks=2, cooldown=1), False
    seen, infos = env.reset(seed=seed)
    for step in steps:
        if not env.agents:
            break
        replies = {"stranger": "wait"}
        for agent, reply in zip(env.possible_agents, step, strict=False):
            options = seen[agent]["options"] or ("",)
            replies[agent] = reply if isinstance(reply, str) else options[reply % len(options)]
        wrong = {
            agent
            for agent, own in seen.items()
            if own["turn"] == TurnKind.CHOOSE and replies.get(agent, "").strip() not in own["options"]
        }
        seen, _, _, _, infos = env.step(replies)
        assert {agent for agent, info in infos.items() if info["error"]} == wrong
        check_observations(env, seen)
        refused |= bool(wrong)
    assert env.agents or all("outcome" in info for info in infos.values())
    return "corrected" if refused else "taken"


def check_observations(env: Any, seen: Mapping[str, Any]) -> None:
    """What is heard is in its space, and can be written to a file."""
    for agent, own in seen.items():
        assert env.observation_space(agent).contains(own), own
        own["text"].encode()


STYLES, SEEDS = st.sampled_from(["compact", "natural"]), st.integers(0, 99)
NEGOTIATIONS = st.tuples(STYLES, SEEDS, st.lists(st.tuples(SPEECH, SPEECH), max_size=15))
CHOICE = st.integers(0, 20) | st.sampled_from(["", "wait", "kill Red", "vote Red", "skip", "report", END]) | TEXT
DECEPTIONS = st.tuples(STYLES, SEEDS, st.lists(st.lists(CHOICE, min_size=3, max_size=5), max_size=30))


# --- Configurations ---------------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 1.5, -0.5, 1e-9, 1e9, 10**7, 10**30, float("inf"), "", " ", "abc", "none", "/",
    "../..", "a\nb", "os.system", "marl.rewards.game.GameReward",
    "\ud800", "é", [], [1], [-1], ["a"], [[2, 2]], [{}], [None], {}, {"a": 1}, {"game": "chess"},
)  # fmt: skip
WORDS = (  # as they are typed
    "", "abc", "-1", "0", "5", "1e999", "nan", "null", "true", "[]", "[1,", "{}", "{a:1}", "'", "${x}", "${seed}",
    "1,2", "range(3)", "choice()", "interval(0,1)", "é", "\0", "a b", "=", "../..", "/*", "???", "0x1g", "--",
    "\ud800",
)  # fmt: skip
# What a plus sign adds, where a configuration takes names that it does not know; and the settings of a lesson, which
# stands in a list.
ADDED = ("+eval.cast.negotiator", "+eval.cast.crewmate", "+eval.env.players", "+eval.env.own", "+base.vary.players",
         "+base.vary.own", "+cast.mediator", "+reward.own", "+loss.own", "+env.own")  # fmt: skip
LESSON = "base.lessons[0]."
OF_LESSON = tuple(
    LESSON + each for each in ("players", "steps", "until", "env", "optimizer", "learning_rate", "anchor", "own")
)
GAMES = {"dond": ("experiment=dond_quickstart",), "among_us": ("experiment=among_us_quickstart",)}


BEGINNINGS = (
    (train, "torchrun_ranks"), (entrants, "base_policy"), (evaluate, "rollout"), (play, "rollout"),
    (cells, "check_writable"), (conditions, "check_writable"), (drift, "check_writable"),
    (crossplay, "check_writable"), (benchmark, "check_writable"), (iterations, "check_writable"),
    (expected, "check_writable"), (report, "write_report"),
)  # fmt: skip


@contextmanager
def no_work() -> Iterator[None]:
    """Commands raise Accepted at the place where their work would begin."""

    def begin(*_: Any, **__: Any) -> None:
        raise Accepted

    kept = [getattr(module, name) for module, name in BEGINNINGS]
    for module, name in BEGINNINGS:
        setattr(module, name, begin)
    try:
        yield
    finally:
        for (module, name), found in zip(BEGINNINGS, kept, strict=True):
            setattr(module, name, found)
        torch.set_num_threads(1)


def configure(folder: Path, *overrides: str) -> DictConfig:
    return composed("train", *overrides, f"runs={folder / 'runs'}", "progress=false")


def composed(command: str, *overrides: str) -> DictConfig:
    with initialize_config_module("conf", version_base="1.3"):
        return compose(command, overrides=list(overrides))


def paths(node: Any, parent: str = "") -> Iterator[str]:
    """The dotted names of all settings and groups of settings."""
    for key in node:
        name = f"{parent}{key}"
        yield name
        if isinstance(node[key], dict):
            yield from paths(node[key], name + ".")


def set_up(bases: Mapping[str, DictConfig], change: tuple[str, dict[str, Any]]) -> str:
    """A configuration with some settings changed, from where the command line has been read to where a run begins."""
    game, changes = change
    cfg = bases[game].copy()
    for name, value in changes.items():
        added = name.startswith("+")
        default = None if added or name.startswith(LESSON) else OmegaConf.select(cfg, name)
        try:
            if wrong_kind(default, value):
                return "refused"  # as the command line does
            if name.startswith(LESSON):
                lesson = {"players": "random", "steps": 1, name.removeprefix(LESSON): value}
                name, value = "base.lessons", [lesson]
            OmegaConf.update(cfg, name.lstrip("+"), value, merge=True, force_add=added)
        except OmegaConfBaseException as error:
            assert one_line(error)
            return "refused"
    with no_work(), redirect_stdout(io.StringIO()):
        try:
            try:
                train.main(cfg)
            except Accepted:
                if any(name.lstrip("+").startswith("base.") for name in changes):  # what the base is made of comes next
                    parts = run_spec(cfg)
                    base_settings(parts.model, parts.base, parts.env, cfg.data.dond)
                return "taken"
        except (UserError, OmegaConfBaseException) as error:
            assert one_line(error)
            return "refused"
    return "already done"


COMMANDS: dict[str, Callable[[], Any]] = {
    "train": train.main, "plan": plan.main, "report": report.main, "evaluate": evaluate.main, "play": play.main,
    "conditions": conditions.main, "drift": drift.main, "frontier": frontier.main, "expected": expected.main,
    "crossplay": crossplay.main, "iterations": iterations.main, "benchmark": benchmark.main,
}  # fmt: skip
NEEDED = {  # what a command asks for; of what is given twice the later counts
    "conditions": ("study=dond_pikl",), "frontier": ("data.dond=nowhere",), "expected": ("name=a", "select=run"),
    "crossplay": ("players=[random,scripted]",), "iterations": ("select=run",), "report": ("select=run",),
}  # fmt: skip
OF_RUNS = ("expected", "iterations", "report", "conditions", "drift")  # commands that read finished runs


def type_in(folder: Path, needed: Mapping[str, list[str]], typed: tuple[str, list[str]]) -> str:
    """A command line, behind what its command needs. What is refused is one line, with status 2 where the mistake is on
    the line itself; what fails is one line too, with status 1; nothing is written."""
    command, words = typed
    out, err, status = io.StringIO(), io.StringIO(), 0
    argv, here = sys.argv, Path.cwd()
    sys.argv = [f"{command}.py", *needed[command], *words]
    os.chdir(folder)
    try:
        with no_work(), redirect_stdout(out), redirect_stderr(err):
            COMMANDS[command]()
    except Accepted:
        return "taken"
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    finally:
        sys.argv = argv
        os.chdir(here)
    assert list(folder.iterdir()) == [], sorted(folder.iterdir())
    if status == 0:
        return "taken"
    said = err.getvalue()
    assert status in (1, 2) and "Traceback" not in said, said
    assert status == 1 or (said.count("\n") == 1 and not out.getvalue()), (said, out.getvalue())
    assert said.strip(), (status, said)
    return "refused"


def typo(name: str, seed: int) -> str:
    """The name with one letter lost, doubled or changed."""
    rng = random.Random(seed)
    place = rng.randrange(len(name))
    return name[:place] + rng.choice(["", name[place] * 2, "x"]) + name[place + 1 :]


def command_lines(command: str, needed: list[str]) -> st.SearchStrategy[tuple[str, list[str]]]:
    """Words of a command's own settings and groups."""
    known = OmegaConf.to_container(composed(command, *(word for word in needed if word.startswith("study="))))
    names = [
        *paths(known),
        *(["env", "model", "algo", "ablation", "sweep", "base", "tracker"] if "env" in known else []),
    ]
    own = st.sampled_from([*known]) | st.sampled_from(names)  # commands beside train have few, and are known by these
    name = own | st.builds(typo, own, st.integers(0, 999))
    word = st.one_of(
        st.builds("{}={}".format, name, st.sampled_from(WORDS) | TEXT),
        st.builds("{}{}".format, st.sampled_from(["~", "+", "++", "-", "--", "@"]), name),
        st.sampled_from(["env=chess", "ablation=ful", "-m", "--cfg=job", "-x", "sweep=dond_ablatoin", "=", "a=b=c"]),
        TEXT,
    )
    # A flag that is only begun is another one to argparse, and those that show things are no hostile input.
    harmless = word.filter(lambda text: not text.startswith(("-h", "--h", "-p", "--p", "-s", "--s", "-e", "--e", "-i")))
    return st.tuples(st.just(command), st.lists(harmless, min_size=1, max_size=3))


# --- Files ------------------------------------------------------------------------------------------------------------

Damage = list[tuple[str, str, float, bytes]]  # file, what is done to it, where (0 to 1), with what
HOW = ("cut", "flip", "insert", "overwrite", "delete", "empty", "replace", "double a line", "drop a line")
OTHERS = (b"", b"null", b"[]", b"{}", b"[1]", b'{"a": 1}', b"\xff\xfe", b"0", b"a: [", b"\0" * 9)


def damages(files: list[str]) -> st.SearchStrategy[Damage]:
    one = st.tuples(
        st.sampled_from(files), st.sampled_from(HOW), st.floats(0, 1), st.binary(max_size=6) | st.sampled_from(OTHERS)
    )
    return st.lists(one, min_size=1, max_size=3)


def damage(folder: Path, done: Damage) -> None:
    for name, how, where, what in done:
        path = folder / name
        if not path.exists():
            continue
        data = path.read_bytes()
        place = int(where * max(len(data) - 1, 0))
        lines = data.splitlines(keepends=True) or [b""]
        line = int(where * (len(lines) - 1))
        if how == "delete":
            path.unlink()
            continue
        flipped = bytes([data[place] ^ (1 << len(what) % 8)]) if data else b""
        path.write_bytes(
            {
                "cut": data[:place],
                "flip": data[:place] + flipped + data[place + 1 :],
                "insert": data[:place] + what + data[place:],
                "overwrite": data[:place] + what + data[place + len(what) :],
                "empty": b"",
                "replace": what,
                "double a line": b"".join([*lines[: line + 1], *lines[line:]]),
                "drop a line": b"".join([*lines[:line], *lines[line + 1 :]]),
            }[how]
        )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def try_files(good: Path, scratch: Path, read: Callable[[Path], str], done: Any) -> str:
    """Reads a damaged copy of a good folder, which says what came of it or refuses; the copy stays as it is."""
    here = scratch / "here"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(good, here)
    damage(here, done)
    before = contents(here)
    try:
        result = read(here)
    except UserError as error:
        assert one_line(error)
        result = "refused"
    assert contents(here) == before, "the files were changed"
    return result


def read_dialogues(folder: Path) -> str:
    """As a base of human dialogues does: all files first, then a split through the game."""
    data_files(folder)
    for split in ("train", "val", "test"):
        recorded(str(folder), split, [lambda: dond_v0.parallel_env(style="compact")])  # type: ignore[arg-type]
    return "taken"


def read_context_file(folder: Path) -> str:
    env = env_maker({"game": "dond", "contexts": str(folder / "contexts.txt")})()
    env.reset(seed=0)
    return "taken"


def tensors_of(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of all that a checkpoint holds of a learner."""
    moments = {f"optimizer.{name}": tensor.clone() for name, tensor in optimizer_tensors(optimizer).items()}
    return {**{name: tensor.clone() for name, tensor in policy.state_dict().items()}, **moments}


class Checkpoints:
    """Two checkpoints of a small policy. Damage with checksums that fit is what another version or game would leave."""

    def __init__(self, folder: Path) -> None:
        self.good = folder / "checkpoints"
        self.saved: dict[int, dict[str, torch.Tensor]] = {}  # by iteration: what must be loaded, bit for bit
        for iteration in (1, 2):
            policy = hint_policy(iteration)
            optimizer = torch.optim.AdamW(policy.parameters())
            sum(p.pow(2).sum() for p in policy.parameters()).backward()  # type: ignore[union-attr]
            optimizer.step()
            state = {"run": "a-run", "wall_time": 1.0, "commits": ["abc"]}
            save_training(self.good, iteration, {"learner": (policy, optimizer)}, state, keep=5)
            self.saved[iteration] = tensors_of(policy, optimizer)
        self.files = sorted(contents(self.good))
        self.policy = hint_policy(0)

    def read(self, folder: Path, sealed: bool) -> str:
        """As a run that goes on: nothing, or a checkpoint that is whole."""
        if sealed:
            for checkpoint in folder.iterdir():
                seal(checkpoint)
        told: list[str] = []
        optimizer = torch.optim.AdamW(self.policy.parameters())
        state = load_training(newest_checkpoint(folder, told.append), {"learner": (self.policy, optimizer)})
        if state is None:
            assert len(told) == len(list(folder.iterdir()))
            return "from the start"
        assert isinstance(state["iteration"], int) and len(told) <= 1
        if not sealed:
            expected, found = self.saved[state["iteration"]], tensors_of(self.policy, optimizer)
            assert expected.keys() == found.keys() and all(
                torch.equal(expected[name], found[name]) for name in expected
            )
        return "the one before" if told else "taken"


def try_checkpoints(of: Checkpoints, scratch: Path, change: tuple[bool, Damage]) -> str:
    sealed, done = change
    here = scratch / "sealed"
    if not sealed:
        return try_files(of.good, scratch, partial(of.read, sealed=False), done)
    # Sealed before the look at what is there, because sealing itself writes.
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(of.good, here)
    damage(here, done)
    try:
        return of.read(here, sealed=True) + " (sealed)"
    except UserError as error:
        assert one_line(error)
        return "refused (sealed)"


def read_player(folder: Path, game: str = "dond") -> str:
    """A finished run as a player, and as one of those that are measured. Each reader by itself may refuse it."""
    refused = False
    for read in (
        lambda: run_policy(str(folder), game, torch.device("cpu")),
        lambda: entrants.as_in_runs(OmegaConf.create(), [str(folder)]),
        lambda: conditions.entrants(folder.parent, folder.name, []),
        lambda: [stage.digest for stage in stages_of(folder, "learner")],
    ):
        try:
            read()
        except UserError as error:
            assert one_line(error)
            refused = True
    return "refused" if refused else "taken"


METRICS = "".join(
    json.dumps({"iteration": i, "phase": phase, "game/score": float(i), "rollout/games": 4, "rollout/tokens": 9}) + "\n"
    for i in range(1, 4)
    for phase in ("train", "eval")
)
RUN = {
    "config.yaml": "name: a\narm: full\nseed: 0\nenv: {game: dond, objective: 1.0}\nalgo: {kind: ppo, games: 8}\n",
    "metrics.jsonl": METRICS,
    "timing.jsonl": '{"iteration": 1, "phase": "train", "speed/tokens_per_second": 5.0}\n',
    "run.json": json.dumps({"run": "a", "arm": "full", "seed": 0, "hardware": {"cores": 2}}),
    "evaluation.json": json.dumps(
        {
            "conditions": {"trained": {"game/score": {"mean": 1.0, "low": 0.5, "high": 1.5, "n": 9}}},
            "belief_by_message": {"trained": [{"log_loss": {"mean": 1.0, "low": 0.5, "high": 1.5, "n": 9}}]},
        }
    ),
    "episodes/trained.jsonl": json.dumps(episode_to_json(deal_game())) + "\n",
    "expected.csv": "arm,metric,iteration,low,high\nfull,game/score,1,0.5,1.5\nfull,game/score,2,0.5,1.5\n",
    "curves.csv": "arm,seed,phase,iteration,games,metric,value\nfull,0,train,1,8,game/score,1\n",
}


def read_folder(folder: Path) -> str:
    """All readers of a run's folder and of the files beside a table. Each by itself may refuse what it reads."""
    refused = False
    for read in (read_run_card, of_the_page, curves_on, expectation):
        try:
            with redirect_stdout(io.StringIO()):
                read(folder)
        except UserError as error:
            assert one_line(error)
            refused = True
    return "refused" if refused else "taken"


def of_the_page(folder: Path) -> None:
    run = read_run(folder)
    report.show([run])


def curves_on(folder: Path) -> None:
    """A run goes on with its metrics: on a copy, because it cuts what comes after the checkpoint."""
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    before = contents(copy)
    try:
        JsonlTracker(copy, resume_from_iteration=2).close()
    except UserError:
        assert contents(copy) == before, "metrics were refused, and yet changed"
        raise


def expectation(folder: Path) -> None:
    found = expected_of("expected", "full", {"game": "dond"}, folder)
    if found is not None:
        found.verdict(read_run(folder).curves)


# --- Files of another game, and of older versions ---------------------------------------------------------------------


def seal(folder: Path) -> None:
    """Makes the checksums fit the files as they are, as another version or game would leave them."""
    sums = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.name != "checksums.json"}
    (folder / "checksums.json").write_text(json.dumps(sums))


def seal_all(folder: Path) -> None:
    for sums in folder.rglob("checksums.json"):
        seal(sums.parent)


class Runs:
    """A finished run of each game, with all that a run's folder has; and each game's unfinished one, which goes on."""

    def __init__(self, folder: Path, bases: Mapping[str, DictConfig]) -> None:
        self.folder, self.bases = folder, bases
        self.files: list[str] = []
        for number, (game, cfg) in enumerate(bases.items()):
            run = folder / game
            policy = hint_policy(2 * number)
            save_policy(folder / f"base-{game}", hint_policy(2 * number + 1), {"game": game})
            save_policy(run / "policy", policy, {"game": game, "base": str(folder / f"base-{game}")})
            name = run_folder(cfg).name
            for iteration in (1, 2):
                state = {"run": name, "base": "abc", "wall_time": 1.0, "commits": ["abc"], "inputs": {}}
                state |= {"metrics_lines": 6, "made_with": [{"device": "cpu"}], "best": {"iteration": 1, "score": 0.5}}
                trained = {"learner": (policy, torch.optim.AdamW(policy.parameters()))}
                save_training(run / "checkpoints", iteration, trained, state, keep=5)
            for file, text in {**RUN, "config.yaml": OmegaConf.to_yaml(OmegaConf.create(identity(cfg)))}.items():
                (run / file).parent.mkdir(exist_ok=True)
                (run / file).write_text(text.replace('"game/score"', '"game/win_rate/crewmates"') if number else text)
            write_json(run / "run.json", {"run": name, "arm": "full", "seeds": [0], "hardware": {"cores": 2}})
            self.files = sorted(contents(run))

    def read(self, folder: Path, game: str, there: str | None) -> str:
        """All who read a run's folder, and the run itself that goes on from it. `there`: of which game its policy is,
        as far as that can be known."""
        refused = "refused" in (read_player(folder, game), read_folder(folder), self.go_on(folder, game))
        try:
            run_policy(str(folder), game, torch.device("cpu"))
            assert there in (None, game), "a policy of another game was taken"
        except UserError as error:
            assert one_line(error)
            refused = True
        return "refused" if refused else "taken"

    def go_on(self, folder: Path, game: str) -> str:
        """The game's own command, whose run was not finished, up to where its metrics are cut."""
        cfg = self.bases[game].copy()
        cfg.runs = str(folder.with_name("going on"))
        shutil.rmtree(cfg.runs, ignore_errors=True)
        copy = run_folder(cfg)
        shutil.copytree(folder, copy)
        (copy / "run.json").unlink(missing_ok=True)
        before = contents(copy)

        def begin(*_: Any) -> None:
            raise Accepted

        kept, train.open_tracker = train.open_tracker, begin  # type: ignore[assignment]
        try:
            with redirect_stdout(io.StringIO()):
                train.main(cfg)
        except Accepted:
            return "taken"
        except UserError as error:
            assert one_line(error)
        finally:
            train.open_tracker = kept
        left = contents(copy)
        left.pop(".lock", None)
        assert left == before, "the run was refused, and yet changed"
        return "refused"


def exchange(of: Runs, scratch: Path, tried: tuple[str, list[str], bool]) -> str:
    """A run's folder in which some parts, or all, are those of a run of the other game."""
    game, parts, sealed = tried
    here, other = scratch / "mixed" / game, next(name for name in GAMES if name != game)
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(of.folder / game, here)
    for part in parts:
        if (of.folder / other / part).is_dir():
            shutil.rmtree(here / part, ignore_errors=True)
            shutil.copytree(of.folder / other / part, here / part)
        else:
            shutil.copy(of.folder / other / part, here / part)
    if sealed:
        seal_all(here)
    before = contents(here)
    result = of.read(here, game, other if {"policy", "policy/policy.json"} & set(parts) else game)
    assert contents(here) == before, "the files were changed"
    assert result == "refused" or not TELLING & set(parts), "nobody noticed that they are of another game"
    return result


TELLING = {"config.yaml", "policy", "policy/policy.json", "checkpoints", "checkpoints/iteration-000002"}


def seat_another(bases: Mapping[str, DictConfig], of: Runs, tried: tuple[str, list[str]]) -> str:
    """A finished run of the other game is to play, or to be learned from."""
    game, places = tried
    other = next(name for name in GAMES if name != game)
    result = set_up(bases, (game, dict.fromkeys(places, str(of.folder / other))))
    assert result == "refused", places
    return result


SEATS = {
    "dond": ["cast.negotiator.player", "eval.cast.negotiator.player"],
    "among_us": ["cast.crewmate.player", "cast.crewmate.partner", "cast.imposter.player", "eval.cast.imposter.player"],
}


Older = list[tuple[str, int, str]]  # file, which of its keys, what is done to it
AGES = ("drop", "null", "list", "text", "number", "rename")


def keys_of(node: Any) -> Iterator[tuple[str, ...]]:
    """The ways to all values and groups of them."""
    for key, value in node.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in keys_of(value))


def make_older(folder: Path, done: Older) -> None:
    """Takes names out of JSON and YAML files, or gives them values of other kinds, and seals what is sealed."""
    for name, which, how in done:
        path, lined, yaml = folder / name, name.endswith("jsonl"), name.endswith("yaml")
        lines = path.read_text().splitlines() if lined else [path.read_text()]
        line = which % len(lines)
        data: Any = OmegaConf.to_container(OmegaConf.create(lines[line])) if yaml else json.loads(lines[line])
        named = list(keys_of(data)) or [("format",)]
        *parents, key = named[which % len(named)]
        node = data
        for parent in parents:
            node = node[parent]
        value = node.pop(key, None)
        if how != "drop":
            new = {"null": None, "list": [value], "text": f"{value}", "number": 7, "rename": value}[how]
            node[f"old_{key}" if how == "rename" else key] = new
        lines[line] = OmegaConf.to_yaml(OmegaConf.create(data)) if yaml else json.dumps(data)
        path.write_text("\n".join(lines) + "\n" * lined)
    seal_all(folder)


def read_older(of: Runs, scratch: Path, tried: tuple[str, Older]) -> str:
    game, done = tried
    here = scratch / "older" / game
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(of.folder / game, here)
    make_older(here, done)
    before = contents(here)
    result = of.read(here, game, None)
    assert contents(here) == before, "the files were changed"
    return result


# --- Full disks -------------------------------------------------------------------------------------------------------


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Within, the system refuses what would make a file longer than so many bytes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


GAME = episode(
    [message("player_0", 0, "hi"), propose("player_1", 1, (1, 0, 2))], beliefs("player_1", 0, (0.5, 0.2, 0.9))
)


class Writers:
    """What a run writes, each as of iteration 1 or 2, after which a run that goes on begins."""

    def __init__(self, folder: Path) -> None:
        self.policies = {iteration: hint_policy(iteration) for iteration in (1, 2)}
        self.made: dict[str, tuple[Path, dict[str, bytes]]] = {}  # by writer: what iteration 1 leaves; all of it
        for name in self.NAMES:
            before, after = folder / name / "before", folder / name / "after"
            for here, numbers in ((before, (1,)), (after, (1, 2))):
                here.mkdir(parents=True)
                for iteration in numbers:
                    self.write(name, here, iteration)
            self.made[name] = before, contents(after)

    NAMES = ("checkpoint", "policy", "metrics", "episodes", "page", "card")

    def write(self, name: str, folder: Path, iteration: int) -> None:
        policy = self.policies[iteration]
        if name == "checkpoint":
            optimizer = torch.optim.AdamW(policy.parameters())
            save_training(folder, iteration, {"learner": (policy, optimizer)}, {"run": "a"}, keep=5)
        elif name == "policy":
            save_policy(folder / "policy", policy, {"game": "hint", "run": iteration})
        elif name == "metrics":
            tracker = JsonlTracker(folder, iteration - 1 if iteration > 1 else None)
            try:
                for phase in ("train", "eval"):
                    tracker.log(iteration, {"game/score": 0.5, "rollout/tokens": 123456, "time/update": 1.0}, phase)
            finally:
                tracker.close()
        elif name == "episodes":
            write_episodes(folder / "episodes" / "trained.jsonl", [GAME] * 3 * iteration)
        elif name == "page":
            write_text(folder / "report.html", "<p>a page</p>" * 9999 * iteration)
        else:
            write_json(folder / "run.json", {"run": iteration, "seeds": [0]})


def fill_up(of: Writers, scratch: Path, tried: tuple[str, int]) -> str:
    """Writes with little room. What was there stays, nothing lies about, and with room the same call makes it whole."""
    name, room = tried
    here = scratch / "full"
    shutil.rmtree(here, ignore_errors=True)
    before, whole = of.made[name]
    shutil.copytree(before, here)
    try:
        with room_for(room):
            of.write(name, here, 2)
        result = "taken"
    except UserError as error:
        said, kept, left = one_line(error), contents(before), contents(here)
        assert str(here) in said and "make room" in said, said
        assert left.keys() == kept.keys(), left.keys()
        assert all(left[n].startswith(kept[n]) for n in kept), "something was lost"  # a line may have been begun
        of.write(name, here, 2)
        result = "refused"
    assert contents(here) == whole
    return result


# --- Folders that may not be written ----------------------------------------------------------------------------------

REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT)
CHANGING = ("mkdir", "rmdir", "unlink", "replace", "rename", "truncate", "utime", "chmod")
TARGETS = {  # of each writer, what it makes
    "checkpoint": "iteration-000002", "policy": "policy", "metrics": "metrics.jsonl",
    "episodes": "episodes/trained.jsonl", "page": "report.html", "card": "run.json",
}  # fmt: skip


@contextmanager
def read_only(folder: Path, number: int) -> Iterator[None]:
    """Within, every change in the folder is refused with this error. Modes of folders would not stop an administrator,
    who may run this, and mounting is not everybody's."""

    def inside(path: Any) -> bool:
        return isinstance(path, str | Path) and Path(path).is_relative_to(folder)

    def refuse(path: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    def unless_inside(real: Callable[..., Any], changes: Callable[..., bool]) -> Callable[..., Any]:
        def operation(path: Any, *rest: Any, **named: Any) -> Any:
            if inside(path) and changes(*rest, **named):
                refuse(path)
            return real(path, *rest, **named)

        return operation

    def writes(mode: str = "r", *_: Any, **__: Any) -> bool:
        return bool(set(mode) & set("wax+"))

    places = [(os, name, lambda *_, **__: True) for name in CHANGING]
    places += [(os, "open", lambda flags, *_, **__: bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)))]
    places += [(io, "open", writes), (builtins, "open", writes)]
    kept = [getattr(module, name) for module, name, _ in places]
    for (module, name, changes), real in zip(places, kept, strict=True):
        setattr(module, name, unless_inside(real, changes))
    try:
        yield
    finally:
        for (module, name, _), real in zip(places, kept, strict=True):
            setattr(module, name, real)


IN_THE_WAY = ("a file for the folder", "a link for the folder", "a file for a folder in it, or a folder for a file")


def put_in_the_way(here: Path, name: str, what: str) -> None:
    """Something else is where a writer has its folder, or makes its file or folder."""
    target = here / TARGETS[name]
    if what == "a link for the folder":  # to itself
        shutil.rmtree(here)
        here.symlink_to(here)
    elif what == "a file for the folder":
        shutil.rmtree(here)
        here.write_text("somebody's")
    elif name in ("checkpoint", "policy"):
        shutil.rmtree(target, ignore_errors=True)
        target.write_text("somebody's")
    else:
        target.unlink()
        (target / "somebody's").mkdir(parents=True)


def shut_out(of: Writers, scratch: Path, tried: tuple[str, int | str]) -> str:
    """Writes where it may not, or where something is in the way. All that was there stays; once the folder may be
    written the same call makes it whole."""
    name, what = tried
    here = scratch / "shut"
    if here.is_dir():
        shutil.rmtree(here)
    else:
        here.unlink(missing_ok=True)
    before, whole = of.made[name]
    shutil.copytree(before, here)
    if isinstance(what, str):
        put_in_the_way(here, name, what)
    there = look(here)
    try:
        with read_only(here, what) if isinstance(what, int) else nullcontext():
            of.write(name, here, 2)
        raise AssertionError("it was written all the same")
    except UserError as error:
        said = one_line(error)
        assert str(here) in said and "cannot be written" in said, said
    assert look(here) == there, "what was there was changed"
    if isinstance(what, int):
        of.write(name, here, 2)
        assert contents(here) == whole
    return "refused"


def look(folder: Path) -> dict[str, Any]:
    """Everything there: bytes of files, where links lead, and folders."""
    return {
        str(p): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None
        for p in (folder, *(sorted(folder.rglob("*")) if not folder.is_symlink() else ()))
    }


# --- Clocks -----------------------------------------------------------------------------------------------------------

MOMENTS = st.sampled_from([0.0, 1.0, 2.0**31, 4e9, 1e10]) | st.floats(0, 4e9)


@contextmanager
def clock_at(moment: float) -> Iterator[None]:
    """Within, it is so many seconds after 1970."""
    kept = time.time, time.time_ns
    time.time, time.time_ns = lambda: moment, lambda: int(moment * 1e9)
    try:
        yield
    finally:
        time.time, time.time_ns = kept


def set_back(
    of: Writers, read: Mapping[str, tuple[Path, Callable[[Path], str]]], scratch: Path,
    tried: tuple[str, float, list[float]],
) -> str:  # fmt: skip
    """Writes, or reads, as if all files had been made at these moments and it were now another one: no difference."""
    name, now, made = tried
    here = scratch / "clock"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(of.made[name][0] if name in of.made else read[name][0], here)
    for path, moment in zip((here, *sorted(here.rglob("*"))), itertools.cycle(made)):
        os.utime(path, (moment, moment))
    with clock_at(now):
        if name in of.made:
            of.write(name, here, 2)
            assert contents(here) == of.made[name][1]
            return "taken"
        return read[name][1](here)


# --- All of it --------------------------------------------------------------------------------------------------------


def kinds(folder: Path) -> dict[str, Kind]:
    """Every kind of input, with what it needs in this folder. Shares go by cost: a command line takes a second."""
    scratch, empty = folder / "scratch", folder / "empty"
    empty.mkdir()
    human, context_file, player, run = (folder / name for name in ("human", "contexts", "player", "run"))
    for path, texts in (
        (human, {"data.txt": "\n".join(ROWS) + "\n", "val.txt": VAL + "\n", "test.txt": TEST + "\n"}),
        (context_file, {"contexts.txt": "1 4 4 1 1 2\n1 0 4 2 1 2\n3 1 1 4 2 1\n3 2 1 2 2 1\n"}),
        (run, RUN),
    ):
        for name, text in texts.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
    bases = {game: configure(folder, *overrides) for game, overrides in GAMES.items()}
    save_policy(player / "policy", hint_policy(0), {"game": "dond", "base": str(folder / "base")})
    save_policy(folder / "base", hint_policy(1), {"game": "dond"})
    write_text(player / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(identity(bases["dond"]))))
    write_json(player / "run.json", {"arm": "full", "seeds": [0]})
    checkpoints = Checkpoints(folder)
    names = {game: list(paths(OmegaConf.to_container(cfg))) for game, cfg in bases.items()}
    changes = st.sampled_from(list(GAMES)).flatmap(
        lambda game: st.tuples(
            st.just(game),
            st.dictionaries(
                st.sampled_from(names[game]) | st.sampled_from((*ADDED, *OF_LESSON)),
                st.sampled_from(VALUES),
                min_size=1,
                max_size=3,
            ),
        )
    )
    needed = {c: [*NEEDED.get(c, ()), *([f"runs={folder}"] if c in OF_RUNS else [])] for c in COMMANDS}
    typed = {command: command_lines(command, needed[command]) for command in COMMANDS}

    def files(of: Path, read: Callable[[Path], str]) -> Callable[[Any], str]:
        return partial(try_files, of, scratch, read)

    writers, both = Writers(folder / "written"), Runs(folder / "both", bases)
    parts = [*both.files, "policy", "checkpoints", "checkpoints/iteration-000002"]
    written = [name for name in both.files if name.endswith((".json", ".yaml", ".jsonl")) and "checksums" not in name]
    own = [name for name in written if "tokenizer" not in name and "config.json" not in name]
    timed = {
        "checkpoints": (checkpoints.good, partial(checkpoints.read, sealed=False)),
        "player": (player, read_player),
        "run": (run, read_folder),
    }
    scratch.mkdir()
    return {
        "replies to Deal or No Deal": Kind(0.18, NEGOTIATIONS, negotiate),
        "replies to Among Us": Kind(0.15, DECEPTIONS, deceive),
        "settings": Kind(0.15, changes, partial(set_up, bases)),
        "command lines": Kind(
            0.05,
            st.sampled_from(["train"] * 6 + list(COMMANDS)).flatmap(typed.__getitem__),
            partial(type_in, empty, needed),
        ),
        "human dialogues": Kind(0.12, damages(["data.txt", "val.txt", "test.txt"]), files(human, read_dialogues)),
        "contexts": Kind(0.06, damages(["contexts.txt"]), files(context_file, read_context_file)),
        "checkpoints": Kind(
            0.12,
            st.tuples(st.booleans(), damages(checkpoints.files)),
            partial(try_checkpoints, checkpoints, scratch),
        ),
        "runs that play": Kind(0.02, damages(sorted(contents(player))), files(player, read_player)),
        "full disks": Kind(
            0.02,
            st.tuples(st.sampled_from(Writers.NAMES), st.integers(0, 400) | st.integers(0, 200_000)),
            partial(fill_up, writers, scratch),
        ),
        "folders that may not be written": Kind(
            0.004,  # there are 42 ways
            st.tuples(st.sampled_from(Writers.NAMES), st.sampled_from([*REFUSED, *IN_THE_WAY])),
            partial(shut_out, writers, scratch),
        ),
        "clocks": Kind(
            0.01,
            st.tuples(st.sampled_from([*Writers.NAMES, *timed]), MOMENTS, st.lists(MOMENTS, min_size=1, max_size=4)),
            partial(set_back, writers, timed, scratch),
        ),
        "runs of another game": Kind(
            0.01,
            st.tuples(st.sampled_from(list(GAMES)), st.lists(st.sampled_from(parts), max_size=4), st.booleans()),
            partial(exchange, both, scratch),
        ),
        "players of another game": Kind(
            0.01,
            st.sampled_from(list(GAMES)).flatmap(
                lambda game: st.tuples(
                    st.just(game), st.lists(st.sampled_from([*SEATS[game], "init.learner"]), min_size=1, max_size=3)
                )
            ),
            partial(seat_another, bases, both),
        ),
        "older versions": Kind(
            0.02,
            st.tuples(
                st.sampled_from(list(GAMES)),
                st.lists(
                    st.tuples(st.sampled_from(own), st.integers(0, 999), st.sampled_from(AGES)), min_size=1, max_size=2
                ),
            ),
            partial(read_older, both, scratch),
        ),
        "a run's folder": Kind(0.076, damages(list(RUN)), files(run, read_folder)),
    }


@dataclass(frozen=True)
class Result:
    """What a kind's inputs came to, by outcome; and the inputs that broke something, with how."""

    outcomes: Counter[str]
    broken: str = ""


def try_kind(kind: Kind, count: int, seed: int) -> Result:
    """Tries so many inputs; of those that break something, one way or another, the smallest that are found are kept."""
    outcomes: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @hypothesis.given(kind.inputs)
    def one(made: Any) -> None:
        outcomes[kind.tried(made)] += 1

    try:
        one()
    except (
        Exception
    ) as error:  # whatever an input raises is what is looked for: it is kept, told, and fails the command
        each = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
        return Result(outcomes, "\n".join(map(explained, each)))
    return Result(outcomes)


def explained(error: BaseException) -> str:
    """The input, which hypothesis notes, and the last places before the error."""
    return "".join([*getattr(error, "__notes__", ()), "\n", *traceback.format_exception(error, limit=-3, chain=False)])


def hostile(inputs: int, seed: int, folder: Path, names: list[str] | None = None) -> Iterator[tuple[str, Result]]:
    """Tries so many inputs of all kinds, each kind's share of them, and yields what became of each kind. At least two
    of each: the first one is always the simplest, which may do no harm."""
    for name, kind in kinds(folder).items():
        if not names or name in names:
            yield name, try_kind(kind, max(2, round(inputs * kind.share)), seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000, help="how many, of all kinds together (default 10000)")
    parser.add_argument("--kinds", nargs="+", help="what is tried (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default 0)")
    given = parser.parse_args()
    tried, broken = 0, 0
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        for name, result in hostile(given.inputs, given.seed, Path(folder), given.kinds):
            came_to = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.outcomes.items()))
            print(f"{name}: {result.outcomes.total()} tried: {came_to}", flush=True)
            tried += result.outcomes.total()
            if result.broken:
                broken += 1
                print(f"{name} BROKE\n{result.broken}", flush=True)
    print(f"{tried} inputs tried, {broken} kinds broke")
    few = not given.kinds and tried < given.inputs  # a kind had no more of them
    if few:
        print(f"that is fewer than {given.inputs}")
    return int(broken > 0 or few)


if __name__ == "__main__":
    sys.exit(main())

"""Bad replies, settings and command lines, and what trying one comes to."""

import io
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from envs import among_us_v0, diplomacy_v0, dond_v0
from envs.core import END, TurnKind
from envs.diplomacy.board import MAPS
from envs.diplomacy.texts import NOBODY
from experiments import benchmark, evaluate, play, report, train
from experiments.launch.overrides import one_line, wrong_kind
from experiments.setup import entrants
from experiments.setup.spec import run_spec
from experiments.studies import cells, conditions, crossplay, drift, expected, frontier, iterations, plan
from marl.common.errors import UserError
from marl.pretraining.base import base_settings
from tests.composing import configure

TEXT = st.text(st.characters(), max_size=60)  # any string that Python can hold, halves of surrogate pairs too


class Accepted(BaseException):
    """A training run would begin here. Not an Exception, so that no command takes it for a failure."""


SPEECH = st.lists(
    st.sampled_from(["[message]", "[propose]", END, "(1 books, 0 hats, 2 balls)", "(9 books)", "hats", " ", "\n", "\0"])
    | TEXT,
    max_size=5,
).map("".join)


def negotiate(game: tuple[str, int, list[tuple[str, str]]]) -> str:
    """Plays the replies of both players, in turn. Refusals are told to the player who replied alone."""
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
    """Plays Among Us with these replies."""
    style, seed, steps = game
    return replied(among_us_v0.parallel_env(style=style, max_steps=40, tasks=2, cooldown=1), seed, steps)


def scheme(game: tuple[str, str, int, list[list[str | int]]]) -> str:
    """Plays a year of Diplomacy with these replies, which are repeated: talk alone takes 21 steps of seven powers."""
    if find_spec("diplomacy") is None:
        return LACKING
    map_name, style, seed, steps = game
    env = diplomacy_v0.parallel_env(map_name=map_name, style=style, press="private", years=1, message_chars=50)
    return replied(env, seed, islice(cycle(steps), 40))


def replied(env: Any, seed: int, steps: Iterable[list[str | int]]) -> str:
    """Plays the replies, one for each seat and step. A number stands for one of the options, and a missing reply for
    none."""
    refused = False
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
    """Checks that each observation is in its space and can be written to a file."""
    for agent, own in seen.items():
        assert env.observation_space(agent).contains(own), own
        own["text"].encode()


STYLES, SEEDS = st.sampled_from(["compact", "natural"]), st.integers(0, 99)
NEGOTIATIONS = st.tuples(STYLES, SEEDS, st.lists(st.tuples(SPEECH, SPEECH), max_size=15))
CHOICE = st.integers(0, 20) | st.sampled_from(["", "wait", "kill Red", "vote Red", "skip", "report", END]) | TEXT
DECEPTIONS = st.tuples(STYLES, SEEDS, st.lists(st.lists(CHOICE, min_size=3, max_size=5), max_size=30))
LACKING = "skipped, since the package diplomacy is not installed"
ORDERS = ("", "H", "-MUN", "A PAR - BUR", "A PAR S A", "a par h", "FRANCE", NOBODY, "WAIVE", "BUILD", " ", "\0", END)
ORDER = st.integers(0, 20) | st.sampled_from(ORDERS) | TEXT
SCHEMES = st.tuples(
    st.sampled_from(MAPS),
    STYLES,
    SEEDS,
    st.lists(st.lists(ORDER, min_size=5, max_size=7), min_size=1, max_size=9),
)
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
                return "refused"  # as the command line refuses it
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
                if any(name.lstrip("+").startswith("base.") for name in changes):  # settings of the base are read next
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
NEEDED = {  # required settings; a later one replaces an earlier one
    "conditions": ("comparison=dond_pikl",), "frontier": ("data.dond=nowhere",), "expected": ("name=a", "select=run"),
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
    known = OmegaConf.to_container(configure(command, *(word for word in needed if word.startswith("comparison="))))
    names = [
        *paths(known),
        *(["env", "model", "algo", "ablation", "sweep", "base", "tracker"] if "env" in known else []),
    ]
    own = st.sampled_from([*known]) | st.sampled_from(names)  # top-level names come up often
    name = own | st.builds(typo, own, st.integers(0, 999))
    word = st.one_of(
        st.builds("{}={}".format, name, st.sampled_from(WORDS) | TEXT),
        st.builds("{}{}".format, st.sampled_from(["~", "+", "++", "-", "--", "@"]), name),
        st.sampled_from(["env=chess", "ablation=ful", "-m", "--cfg=job", "-x", "sweep=dond_ablatoin", "=", "a=b=c"]),
        TEXT,
    )
    # argparse completes abbreviated flags; those that only print something are left out.
    harmless = word.filter(lambda text: not text.startswith(("-h", "--h", "-p", "--p", "-s", "--s", "-e", "--e", "-i")))
    return st.tuples(st.just(command), st.lists(harmless, min_size=1, max_size=3))

"""Gives every entry point generated bad input, and counts what became of it.

`make hostile` (`python -m tests.hostile --inputs 10000`): replies to three games, command lines, settings, the files of
human dialogues and of contexts, checkpoints, policies, the files of a run's folder, and disks that are full. Each input
must be taken, put right as the rules say, or refused with one clear line (UserError, or a command's exit), and what it
found on disk must be as before. Anything else is shown with the input that hypothesis shrank it to. A short form is
among the tests.
"""

import argparse
import json
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from marl.common.files import write_json, write_text
from marl.storage.checkpoint import save_policy
from tests.composing import configure, identity
from tests.hostile_files import (
    INTENTS,
    KEPT,
    RUN,
    Checkpoints,
    contents,
    damages,
    read_adapter_of,
    read_context_file,
    read_dialogues,
    read_folder,
    read_kept,
    read_player,
    read_talker,
    try_checkpoints,
    try_files,
    write_adapter,
    write_talker,
)
from tests.hostile_inputs import (
    ADDED,
    COMMANDS,
    DECEPTIONS,
    GAMES,
    NEEDED,
    NEGOTIATIONS,
    OF_LESSON,
    OF_RUNS,
    SCHEMES,
    VALUES,
    command_lines,
    deceive,
    negotiate,
    paths,
    scheme,
    set_up,
    type_in,
)
from tests.human_dialogues import ROWS, TEST, VAL
from tests.marl.hint import hint_policy


@dataclass(frozen=True)
class Kind:
    """One kind of bad input: how it is made, and what trying it comes to, in a word."""

    share: float  # of all inputs
    inputs: st.SearchStrategy[Any]
    tried: Callable[[Any], str]


def kinds(folder: Path) -> dict[str, Kind]:
    """Every kind of input, with what it needs in this folder. Shares go by cost: a command line takes a second."""
    scratch, empty = folder / "scratch", folder / "empty"
    empty.mkdir()
    human, context_file, player, run, talker, adapter, kept = (
        folder / name for name in ("human", "contexts", "player", "run", "talker", "adapter", "kept")
    )
    for path, texts in (
        (human, {"data.txt": "\n".join(ROWS) + "\n", "val.txt": VAL + "\n", "test.txt": TEST + "\n"}),
        (context_file, {"contexts.txt": "1 4 4 1 1 2\n1 0 4 2 1 2\n3 1 1 4 2 1\n3 2 1 2 2 1\n"}),
        (run, RUN),
        (kept, {name: json.dumps(data) for name, data in KEPT.items()}),
    ):
        for name, text in texts.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
    bases = {
        game: configure("train", *overrides, f"runs={folder / 'runs'}", "progress=false")
        for game, overrides in GAMES.items()
    }
    save_policy(player / "policy", hint_policy(0), {"game": "dond", "base": str(folder / "base")})
    save_policy(folder / "base", hint_policy(1), {"game": "dond"})
    write_text(player / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(identity(bases["dond"]))))
    write_json(player / "run.json", {"arm": "full", "seeds": [0]})
    write_talker(talker)
    write_adapter(adapter)
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

    def files(of: Path, read: Callable[[Path], str], sealed: Sequence[str] = ()) -> Callable[[Any], str]:
        return partial(try_files, of, scratch, read, sealed=sealed)

    scratch.mkdir()
    return {
        "replies to Deal or No Deal": Kind(0.15, NEGOTIATIONS, negotiate),
        "replies to Among Us": Kind(0.15, DECEPTIONS, deceive),
        "replies to Diplomacy": Kind(0.03, SCHEMES, scheme),
        "settings": Kind(0.15, changes, partial(set_up, bases)),
        "command lines": Kind(
            0.05,
            st.sampled_from(["train"] * 6 + list(COMMANDS)).flatmap(typed.__getitem__),
            partial(type_in, empty, needed),
        ),
        "human dialogues": Kind(0.14, damages(["data.txt", "val.txt", "test.txt"]), files(human, read_dialogues)),
        "contexts": Kind(0.06, damages(["contexts.txt"]), files(context_file, read_context_file)),
        "checkpoints": Kind(
            0.12, st.tuples(st.booleans(), damages(checkpoints.files)), partial(try_checkpoints, checkpoints, scratch)
        ),
        "runs that play": Kind(0.02, damages(sorted(contents(player))), files(player, read_player)),
        "a run's folder": Kind(0.08, damages(list(RUN)), files(run, read_folder)),
        "models of intents": Kind(0.02, damages(sorted(contents(talker))), files(talker, read_talker, sealed=INTENTS)),
        "adapters": Kind(0.02, damages(sorted(contents(adapter))), files(adapter, read_adapter_of, sealed=["policy"])),
        "kept answers of studies": Kind(0.01, damages(list(KEPT)), files(kept, read_kept)),
    }


@dataclass(frozen=True)
class Result:
    """Outcomes of one kind's inputs, counted, and the inputs that broke something, with the error."""

    outcomes: Counter[str]
    broken: str = ""


def try_kind(kind: Kind, count: int, seed: int) -> Result:
    """Tries this many inputs. Of those that break something, the smallest that are found are kept, one for each way."""
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
    """Returns the input, which hypothesis notes, and the last lines of the traceback."""
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

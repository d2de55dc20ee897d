"""Damaged files, and what reading them comes to."""

import io
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from omegaconf import OmegaConf

from envs import dond_v0
from experiments import report
from experiments.launch.overrides import one_line
from experiments.setup import entrants
from experiments.setup.bands import expected_of
from experiments.setup.players import (
    bytes_of_players,
    check_intents,
    check_plans,
    played_as,
    player_config,
    player_digest,
    player_dtype,
    reads_intents,
    run_policy,
)
from experiments.setup.stages import stages_of
from experiments.studies import conditions, crossplay, frontier, plane, talkers
from marl.algorithms.ppo import PPOConfig
from marl.common.errors import UserError
from marl.common.files import write_json
from marl.intents.agent import ACTION, CICERO, DIALOGUE, NONSENSE, PARTS, Parts
from marl.intents.streams import FORM
from marl.model.lora import AdapterConfig, adapted
from marl.model.policy import Policy
from marl.pretraining.corpus import data_files, recorded
from marl.report.page import read_run
from marl.report.transcripts import episode_to_json
from marl.rollout.cast import RoleConfig
from marl.rollout.games import env_maker
from marl.storage.checkpoint import (
    load_policy,
    load_training,
    newest_checkpoint,
    optimizer_tensors,
    save_policy,
    save_training,
)
from marl.storage.folder import read_run_card
from marl.storage.tracking import JsonlTracker
from tests.marl.episodes import deal_game
from tests.marl.hint import hint_policy
from tests.marl.intents.test_filters import ensemble
from tests.marl.models import hf_policy
from tests.marl.storage.test_checkpoint import seal

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


def try_files(good: Path, scratch: Path, read: Callable[[Path], str], done: Any, sealed: Sequence[str] = ()) -> str:
    """Reads a damaged copy of a good folder. Returns what the reader said, and checks that the copy stays as it is.

    `sealed`: folders in it whose checksums fit whatever is damaged.
    """
    here = scratch / "here"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(good, here)
    damage(here, done)
    for name in sealed:
        seal(here / name)
    before = contents(here)
    try:
        result = read(here)
    except UserError as error:
        assert one_line(error)
        result = "refused"
    assert contents(here) == before, "the files were changed"
    return result


def read_dialogues(folder: Path) -> str:
    """Reads the folder as a base of human dialogues does: all files first, then each split through the game."""
    data_files(folder)
    for split in ("train", "val", "test"):
        recorded(str(folder), split, [lambda: dond_v0.parallel_env(style="compact")])  # type: ignore[arg-type]
    return "taken"


def read_context_file(folder: Path) -> str:
    env = env_maker({"game": "dond", "contexts": str(folder / "contexts.txt")})()
    env.reset(seed=0)
    return "taken"


def tensors_of(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies all tensors that a checkpoint holds of a learner."""
    moments = {f"optimizer.{name}": tensor.clone() for name, tensor in optimizer_tensors(optimizer).items()}
    return {**{name: tensor.clone() for name, tensor in policy.state_dict().items()}, **moments}


class Checkpoints:
    """Two checkpoints of a small policy, to be damaged. Damage with fitting checksums is what another version or
    another game would leave."""

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
        """Reads the folder as a resumed run does: it finds a whole checkpoint, or starts anew. `sealed` makes checksums
        fit first."""
        if sealed:
            for checkpoint in folder.iterdir():
                seal(checkpoint)
        reports: list[str] = []
        optimizer = torch.optim.AdamW(self.policy.parameters())
        state = load_training(newest_checkpoint(folder, reports.append), {"learner": (self.policy, optimizer)})
        if state is None:
            assert len(reports) == len(list(folder.iterdir()))
            return "from the start"
        assert isinstance(state["iteration"], int) and len(reports) <= 1
        if not sealed:
            expected, found = self.saved[state["iteration"]], tensors_of(self.policy, optimizer)
            assert expected.keys() == found.keys() and all(
                torch.equal(expected[name], found[name]) for name in expected
            )
        return "the one before" if reports else "taken"


def try_checkpoints(of: Checkpoints, scratch: Path, change: tuple[bool, Damage]) -> str:
    sealed, done = change
    here = scratch / "sealed"
    if not sealed:
        return try_files(of.good, scratch, partial(of.read, sealed=False), done)
    # Sealed first, because sealing writes files and `try_files` compares them.
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(of.good, here)
    damage(here, done)
    try:
        return of.read(here, sealed=True) + " (sealed)"
    except UserError as error:
        assert one_line(error)
        return "refused (sealed)"


def read_player(folder: Path, game: str = "dond") -> str:
    """Reads a finished run as a player, and as one of those that are measured. Each reader may refuse it."""
    return read_by(
        lambda: run_policy(str(folder), game, torch.device("cpu")),
        lambda: entrants.as_in_runs(OmegaConf.create(), [str(folder)]),
        lambda: conditions.entrants(folder.parent, folder.name, []),
        lambda: [stage.digest for stage in stages_of(folder, "learner")],
        lambda: player_digest(str(folder)),
    )


def read_by(*readers: Callable[[], Any]) -> str:
    """Calls all readers, of which each may refuse. Returns whether one did."""
    refused = False
    for read in readers:
        try:
            read()
        except UserError as error:
            assert one_line(error)
            refused = True
    return "refused" if refused else "taken"


INTENTS = (ACTION, DIALOGUE)  # folders whose checksums fit


def write_talker(folder: Path) -> None:
    """A player as a study of intents writes it."""
    for name in INTENTS:
        save_policy(folder / name, hint_policy(0), {"game": "dond", "made_of": {"env": {"style": "compact"}}})
    ensemble()[0].save(folder / NONSENSE)
    write_json(folder / PARTS, {"arm": "both", "told": FORM})


def read_talker(folder: Path) -> str:
    """Reads the folder as a player that talks with a plan, and as the one whose models plan what learners intend."""
    env, limits = {"game": "dond", "style": "compact"}, PPOConfig(intents=str(folder))
    return read_by(
        lambda: Parts.load(folder, "cpu"),
        lambda: check_plans(f"{folder}{CICERO}", env),
        lambda: reads_intents(f"{folder}{CICERO}"),
        lambda: check_intents(limits, env),
        lambda: played_as({"negotiator": RoleConfig("learner", f"{folder}{CICERO}", 0.5)}, limits),
    )


def write_adapter(folder: Path) -> None:
    """The policy of a run that trained an adapter, beside its base, which stays as it is."""
    base = hf_policy(folder.with_name("adapted"), "llama")
    save_policy(folder / "policy", adapted(base, AdapterConfig(rank=4, alpha=8)), {"game": "dond", "base": None})


def read_adapter_of(folder: Path) -> str:
    return read_by(
        lambda: load_policy(folder / "policy"),
        lambda: bytes_of_players([str(folder)], 64),
        lambda: player_dtype(str(folder)),
        lambda: player_config(str(folder)),
    )


KEPT = {
    "figures.json": {"figures": [["both", "intent/items", {"mean": 1.0, "low": 0.5, "high": 1.5, "n": 9}]]},
    "arms.json": {"arms": {"anchor": {"game/score": [1.0, 2.0]}}},
    "point.json": {"scores": {"SL": [1.0, 0.0], "scripted": [0.5]}, "likelihood": [-1.0, -2.0]},
    "pair.json": {
        "games": [
            {"seed": 1, "turned": 0, "points": [1.0, 2.0], "deal": True, "pareto": False, "how": "deal", "turns": 3}
        ]
    },
}


def read_kept(folder: Path) -> str:
    """Answers that studies keep."""
    return read_by(
        lambda: (folder / "figures.json").exists() and talkers.cached_figures(folder / "figures.json", dict),
        lambda: frontier.read_arms(folder / "arms.json"),
        lambda: plane.figures(folder / "point.json", 0),
        lambda: crossplay.games_of(folder / "pair.json"),
    )


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
    "curves.csv": "arm,seed,phase,iteration,games,game/score\nfull,0,train,1,8,1\n",
}


def read_folder(folder: Path) -> str:
    """Reads a run's folder with all readers, and the files beside a table. Each may refuse what it reads."""
    with redirect_stdout(io.StringIO()):
        return read_by(*(partial(read, folder) for read in (read_run_card, of_the_page, curves_on, expectation)))


def of_the_page(folder: Path) -> None:
    run = read_run(folder)
    report.show([run])


def curves_on(folder: Path) -> None:
    """Resumes the metrics of a run, on a copy, because resuming cuts off the lines behind the checkpoint."""
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

"""What a run starts from: base, finished runs, seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from omegaconf import DictConfig

from experiments.setup.bands import Expected
from experiments.setup.config import EvalConfig, Parts, SeedsConfig, make, plain
from experiments.setup.players import (
    bare,
    called_in_games,
    check_game,
    is_run,
    one_run,
    played_as,
    policy_folder,
    run_of,
)
from marl.common.errors import UserError, check_text
from marl.common.files import digest, reading
from marl.pretraining.corpus import data_files
from marl.rollout.cast import LEARNERS, players_of
from marl.rollout.games import file_digests
from marl.rollout.seeds import WARM_START, Seeds
from marl.storage.checkpoint import folder_digest
from marl.storage.folder import CARD, hardware, read_run_card, run_settings


@dataclass(frozen=True)
class Work:
    """A run's parts, built and checked."""

    cfg: DictConfig
    parts: Parts
    folder: Path
    make_env: Callable[[], Any]
    make_test_env: Callable[[], Any]
    device: torch.device
    expected: Expected | None = None  # what healthy runs of this experiment look like, where that is recorded
    lock: TextIO | None = None  # of the folder; the first process holds it


def computed_with(cfg: DictConfig, parts: Parts, device: torch.device) -> dict[str, Any]:
    """What the last digits of a rollout depend on, beside the code. `algo.concurrency`: as it fits into memory."""
    on = hardware()
    return {
        "torch": torch.__version__, "transformers": version("transformers"), "device": device.type,
        "deterministic": bool(cfg.deterministic), "algo.concurrency": parts.algo.concurrency,
        **{name: on[name] for name in ("instructions", "threads", "gpu")},
    }  # fmt: skip


def inputs_of(cfg: DictConfig, parts: Parts) -> dict[str, str]:
    """What a run reads beside its base, by name, as digests of the contents: the game's files, and other runs' policies
    that play or that learning starts from."""
    evaluation = make(EvalConfig, plain(cfg.eval), "eval")
    seatings = (parts.cast, evaluation.seating(parts.cast))
    return {
        **file_digests(parts.env, {**parts.env, **evaluation.env}).get("files", {}),
        **{name: found for each in seatings for name, found in played_as(each, parts.algo).get("policies", {}).items()},
        **({"data.dond": digest(data_files(Path(cfg.data.dond)))} if cfg.data.dond else {}),
        **{
            f"init.{name}={run}": folder_digest(policy_folder(start_of(cfg, name)))
            for name, run in cfg.init.items()
            if run is not None
        },
    }


def check_listeners(parts: Parts) -> None:
    """Refuses a speaking reward that counts the beliefs of somebody who never listens: it might be 0 throughout."""
    for term, reward in parts.rewards.items():
        deaf = getattr(reward, "adversaries", ())
        seated = players_of({role: seats for role, seats in parts.cast.items() if role not in deaf})
        hearing = [name for name in seated if believes(name)]
        for name in getattr(reward, "players", ()):
            if name not in (*hearing, *(called_in_games(each) for each in hearing if "/" in each)):
                raise UserError(
                    f"reward.{term}.players: {name} is none of those who listen, {', '.join(hearing)}; name one of "
                    "them, or seat it (cast.ROLE.partner and partners)"
                )


def believes(player: str) -> bool:
    """Whether a player of the cast answers belief questions: a language model does, a script or an endpoint doesn't."""
    return player in LEARNERS or bare(player) == "base" or is_run(bare(player))


def find_starts(cfg: DictConfig) -> None:
    """Puts the finished run's name in the place of a pattern that only it matches."""
    for name, pattern in cfg.init.items():
        check_text(pattern, f"init.{name}")
        if pattern is not None and "*" in pattern:
            cfg.init[name] = one_run(cfg.runs, pattern, f"init.{name}").name


def start_of(cfg: DictConfig, name: str) -> str:
    """The folder of the run that a learner starts from; empty: from the base. Names are looked up in `runs` first."""
    run = cfg.init[name]
    beside = Path(cfg.runs) / run if run else Path()
    return str(beside) if run and "/" not in run and beside.is_dir() else run or ""


def check_starts(cfg: DictConfig, learners: Sequence[str]) -> None:
    """Refuses a warm start from what is no finished run of this game, or for somebody who doesn't learn here."""
    for name, run in cfg.init.items():
        if run is not None:
            if name not in learners:
                raise UserError(f"init.{name}={run}: {name} does not play here; the cast has {', '.join(learners)}")
            if not is_run(start_of(cfg, name)):
                raise UserError(f"init.{name}={run}: must be the folder of a finished run, or null to start from base")
            check_game(start_of(cfg, name), cfg.env.game)


def seeds_of(cfg: DictConfig) -> Seeds:
    """Of training's games, of what is drawn in them and of the order of rows: a run that starts where another one ended
    has others than that had, and than whatever that had started from."""
    own, links = make(SeedsConfig, plain(cfg).get("seeds", {}), "seeds"), warm_starts(cfg)

    def chained(seed: int) -> int:
        if not links:
            return seed
        chain = [] if links == 1 else [links]
        return int(np.random.SeedSequence([seed, WARM_START, *chain]).generate_state(1)[0])

    common = chained(int(cfg.seed))
    return Seeds(
        games=common if own.games is None else chained(own.games),
        sampling=None if own.sampling is None else chained(own.sampling),
        shuffling=common if own.shuffling is None else chained(own.shuffling),
    )


def warm_starts(cfg: DictConfig) -> int:
    """How many runs, one starting from the other, lie between this one and the base: one more than there are before
    the run that it starts from, whose card says it (cards of earlier versions, whether there is any)."""
    links = 0
    for name, run in cfg.init.items():
        if run is not None:
            folder = run_of(start_of(cfg, name))
            before = 0
            if (folder / CARD).exists():
                with reading(folder):
                    started = any((run_settings(folder).get("init") or {}).values())
                    before = int((read_run_card(folder) or {}).get("warm_starts", started))
            links = max(links, 1 + before)
    return links

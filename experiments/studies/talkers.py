"""Parts that studies of talkers share: names of kept games, players, cards and tables of a seed."""

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.launch.terminal import say
from marl.agents.model import PlayConfig
from marl.common.files import digest, write_json
from marl.intents.agent import PARTS
from marl.metrics.stats import Interval
from marl.metrics.tables import TableRow, figures_by_arm, format_table
from marl.storage.checkpoint import copy_folder, folder_digest
from marl.storage.folder import git_commit

Figures = dict[tuple[str, str], Interval]  # by arm and metric


def save_player(player: Path, folders: Mapping[str, Path], seed: int, arm: str = "intent", **more: str) -> None:
    """Writes models as a folder to be played as `PLAYER+cicero`. `arm`: what its dialogue model is told. `more`: what
    else stands in its card."""
    player.mkdir(parents=True, exist_ok=True)
    for part, source in folders.items():
        if not (player / part).exists() or folder_digest(player / part) != folder_digest(source):
            copy_folder(source, player / part)
    write_json(player / PARTS, {"arm": arm, "seed": seed, **more})


def card(
    run: str, seed: int, models: Mapping[str, str], figures: Figures, *, arm: str, command: str, games: int
) -> dict[str, Any]:
    """Returns a seed's line of `cards.jsonl`: the commit and models that made it, and its figures."""
    ends = {
        f"{name}: {metric}": [round(end, 4) if math.isfinite(end) else None for end in (i.mean, i.low, i.high)]
        for (name, metric), i in figures.items()
    }
    return {
        "run": run, "arm": arm, "seeds": [seed], "git_commit": git_commit(), "config_hash": digest(models),
        "command": command, "games": games, "figures": ends,
    }  # fmt: skip


def limits_of(limits: PlayConfig) -> dict[str, Any]:
    """Returns the limits that decide games, for what kept ones are named after."""
    bf16 = {"play_bf16": True} if limits.play_bf16 else {}
    return {"max_new_tokens": limits.max_new_tokens, "context": limits.context, **bf16}


def publish(kept: Path, path: Path) -> None:
    """Copies a file that is kept beside a cell; none is beside those of earlier versions."""
    if kept.exists():
        shutil.copyfile(kept, path)


def say_arms(rows: Sequence[TableRow], out: Path) -> None:
    """Shows a table of each arm, and where all are written."""
    for arm, figures in figures_by_arm(rows).items():
        say(f"\n{arm}\n" + format_table({arm: figures}))
    say(f"\ntables and figure: {out}")

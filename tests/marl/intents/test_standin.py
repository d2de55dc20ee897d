"""Scripted dialogues stand in for people's: the reader of the published files reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs.human_dond import read_split, replay_all
from marl.common.errors import UserError
from marl.intents.standin import write_scripted
from marl.intents.truthful import unfaithful
from tests.marl.planners import COMPACT

ENV = {"game": "dond", "style": "compact", "objective": 0.0}


def test_scripted_dialogues_are_read_as_peoples(tmp_path: Path) -> None:
    write_scripted(tmp_path, ENV, 60)
    splits = {name: read_split(tmp_path, name) for name in ("train", "val", "test")}  # type: ignore[arg-type]
    assert not any(split.skipped for split in splits.values())
    views = {name: split.usable for name, split in splits.items()}
    assert len(views["train"]) > 2 * len(views["val"]) > 0 and len(views["val"]) % 2 == 0
    _, refused = replay_all(views["val"], COMPACT())
    assert not refused
    kept = [not unfaithful(view) for view in views["train"]]
    assert 0.3 < sum(kept) / len(kept) <= 1  # scripts say what they claim, mostly


def test_too_few_to_stand_in(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"scripted_games=3: gives \d dialogues that can stand in\. Give more"):
        write_scripted(tmp_path, ENV, 3)

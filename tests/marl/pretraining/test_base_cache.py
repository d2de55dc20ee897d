"""Processes that need the same base at the same time: one makes it, the others wait; a dead one is in nobody's way."""

from __future__ import annotations

import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from marl.common.errors import UserError
from marl.pretraining import corpus
from marl.pretraining.base import base_policy
from marl.pretraining.config import BaseConfig, ModelConfig
from marl.rollout.seeds import Game, draw_games
from marl.storage.checkpoint import make_once, verify_folder

MODEL = ModelConfig(vocab_size=700, hidden_size=16, layers=1, heads=2, intermediate_size=16, context=1024)
BASE = BaseConfig(games=2, rows=4)
ENV = {"game": "among_us", "style": "compact", "tasks": 2, "max_steps": 60}


def few(*path: int, count: int) -> list[Game]:
    return draw_games(*path, count=min(count, 8))


def begin(cache: Path, told: Connection) -> None:
    """Begins to make the base, says so, and never goes on."""

    def report(line: str) -> None:
        told.send(line)
        time.sleep(600)

    base_policy(MODEL, BASE, ENV, cache=cache, report=report)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_where_the_process_that_trains_the_base_dies_another_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "CHUNK", 20)
    monkeypatch.setattr(corpus, "draw_games", few)
    cache, (here, there) = tmp_path / "cache", multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=begin, args=(cache, there), daemon=True)
    other.start()
    told = here.recv()
    said: list[str] = []
    seen: list[list[Path]] = []  # of the cache, while the other process is at work

    def report(line: str) -> None:
        said.append(line)
        if line.startswith("waiting"):
            seen.append([path for path in cache.iterdir() if not path.name.startswith(".")])
            other.kill()

    policy, folder = base_policy(MODEL, BASE, ENV, cache=cache, report=report)
    assert folder is not None and told == f"training the base model on scripted games (once; kept in {folder})"
    assert said[0] == f"waiting for another process, which is making {folder}" and seen == [[]]
    assert [line.startswith("training the base") for line in said[1:-1]] == [True]
    other.join(120)
    assert verify_folder(folder) == "" and [p for p in cache.iterdir() if not p.name.startswith(".")] == [folder]
    again, _ = base_policy(MODEL, BASE, ENV, cache=cache, report=said.append)
    assert said[-1].startswith("base model: ") and said[-2] == said[-1]
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), policy.parameters(), strict=True))


def test_of_many_one_makes_it(tmp_path: Path) -> None:
    path, made, said = tmp_path / "new" / "thing", [], []
    begun, waiting = threading.Event(), threading.Event()

    def make(name: str) -> None:
        made.append(name)
        begun.set()
        assert waiting.wait(60)
        path.touch()

    def report(line: str) -> None:
        said.append(line)
        waiting.set()

    def take(name: str) -> threading.Thread:
        thread = threading.Thread(target=make_once, args=(path, lambda: make(name), report))
        thread.start()
        return thread

    first = take("first")
    assert begun.wait(60)
    others = [take("second"), take("third")]
    for thread in (first, *others):
        thread.join(60)
    assert made == ["first"] and set(said) == {f"waiting for another process, which is making {path}"}


def test_who_comes_after_a_failure_makes_it_and_where_it_cannot_be_made_one_line_says_so(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_once(tmp_path / "made", fail)
    make_once(tmp_path / "made", (tmp_path / "made").touch, report=pytest.fail)
    make_once(tmp_path / "made", fail)  # it is there
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/new/thing cannot be written \(Not a directory\)"):
        make_once(tmp_path / "file" / "new" / "thing", pytest.fail)
    (tmp_path / ".thing.lock").mkdir()
    with pytest.raises(UserError, match=r"thing cannot be written \(Is a directory\)"):
        make_once(tmp_path / "thing", pytest.fail)

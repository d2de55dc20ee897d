"""The power planner from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from experiments.studies import plan
from experiments.studies.cells import claimed, compute
from marl.common.errors import UserError
from marl.common.files import read_json
from tests.composing import composed_once

settings = composed_once("plan")


def test_the_published_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(settings("a=0.55", "b=0.59", "seeds=[1,3]", "between=0.05"))
    lines = capsys.readouterr().out.splitlines()
    (one,) = [line for line in lines if line.split()[:1] == ["1"]]
    (three,) = [line for line in lines if line.split()[:1] == ["3"]]
    assert one.split()[1:3] == ["2,401", "2,401"] and "says nothing of other seeds" in one
    assert "too few seeds" in three


def test_what_cannot_be_planned() -> None:
    for override, said in (
        ("a=1.2", "a=1.2: must be a number between 0 and 1"),
        ("b=0.55", "equal rates cannot be told apart"),
        ("between=-1", "between=-1: must be a number between 0 and 1"),
        ("seeds=[0]", "seeds=0: must be a whole number, at least 1"),
        ("power=true", "power=True: must be a number between 0 and 1"),
    ):
        with pytest.raises(UserError, match=said):
            plan.main(settings(override))


def test_a_stopped_study_goes_on_where_it_was(tmp_path: Path) -> None:
    cells, made = {tmp_path / f"{n}.json": n for n in range(4)}, []

    def find(n: int, number: str) -> Mapping[str, int]:
        if made == ["1/4", "2/4"]:
            made.append("stopped")
            raise KeyboardInterrupt
        made.append(number)
        return {"n": n}

    with pytest.raises(KeyboardInterrupt):
        compute(cells, find)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json"]
    assert compute(cells, find) and made == ["1/4", "2/4", "stopped", "1/2", "2/2"]
    assert [read_json(path)["n"] for path in cells] == [0, 1, 2, 3]
    assert compute(cells, lambda n, number: pytest.fail("a cell was computed again"))
    assert len(list(tmp_path.iterdir())) == 4  # no lock is left


def test_what_is_not_to_be_kept_is_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = {tmp_path / "a.json": "a", tmp_path / "b.json": "b"}
    assert not compute(cells, lambda name, number: None if name == "a" else {})
    assert [path.exists() for path in cells] == [False, True] and capsys.readouterr().out == ""
    assert compute(cells, lambda name, number: {})


def test_what_another_process_computes_is_left_to_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = {tmp_path / "a.json": "a", tmp_path / "b.json": "b"}
    with claimed(tmp_path / "a.json") as mine:  # locks are of open files: a second one of this process waits, too
        assert mine and not compute(cells, lambda name, number: {})
    assert "1 cells are being computed by another process" in capsys.readouterr().out
    assert [path.exists() for path in cells] == [False, True]
    assert compute(cells, lambda name, number: {})

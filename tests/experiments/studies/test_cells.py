"""Cells of a study: each is computed once, by the process that comes first, and resumed after a stop."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from experiments.studies.cells import claimed, compute
from marl.common.files import read_json


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


def test_results_that_are_not_to_be_kept_are_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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

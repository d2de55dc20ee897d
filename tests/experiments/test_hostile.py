"""Bad input is taken, put right or refused in one line, and damages nothing. `make hostile` does more of it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from marl.common.errors import UserError
from tests.hostile import Kind, hostile, try_kind
from tests.hostile_files import try_files


def test_no_input_breaks_anything(tmp_path: Path) -> None:
    results = dict(hostile(inputs=128, seed=0, folder=tmp_path))
    assert {name: result.broken for name, result in results.items() if result.broken} == {}
    tried = sum(result.outcomes.total() for result in results.values())
    assert len(results) == 12 and tried == 129
    refusing = [name for name, result in results.items() if not name.startswith("replies")]
    assert all(any("refused" in outcome for outcome in results[name].outcomes) for name in refusing)
    assert all(results[name].outcomes["corrected"] for name in results.keys() - set(refusing))


def test_an_input_that_breaks_something_is_shown(tmp_path: Path) -> None:
    def break_at_seven(number: int) -> str:
        assert number < 7, "too much"
        return "taken"

    result = try_kind(Kind(1.0, st.integers(0, 1000), break_at_seven), count=200, seed=0)
    assert "made=7" in result.broken and "too much" in result.broken  # the smallest one


@pytest.mark.parametrize("refuses", [True, False])
def test_files_that_a_reader_changes_are_noticed(tmp_path: Path, refuses: bool) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "a").write_text("whole")

    def read(folder: Path) -> str:
        (folder / "a").write_text("changed")
        if refuses:
            raise UserError("no")
        return "taken"

    with pytest.raises(AssertionError, match="the files were changed"):
        try_files(tmp_path / "good", tmp_path, read, [("a", "cut", 0.5, b"")])


@pytest.mark.parametrize("made", [("a", "flip", 0.5, b""), ("a", "delete", 0.0, b""), ("a", "replace", 0.0, b"x")])
def test_damage_is_done(tmp_path: Path, made: Any) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "a").write_text("whole")

    def read(folder: Path) -> str:
        return (folder / "a").read_text() if (folder / "a").exists() else "gone"

    found = try_files(tmp_path / "good", tmp_path, read, [made])
    assert found == {"flip": "wh" + chr(ord("o") ^ 1) + "le", "delete": "gone", "replace": "x"}[made[1]]
    assert (tmp_path / "good" / "a").read_text() == "whole"

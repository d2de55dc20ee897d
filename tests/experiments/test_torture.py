"""Runs that are killed at random moments end as those that nobody killed. `make torture` does more of it."""

from pathlib import Path

import pytest

from tests.composing import BRIEF
from tests.torture import KINDS, torture

SHORT = ("algo.iterations=3", "algo.games=6", "eval.games=2", "eval.final_games=4")


@pytest.mark.slow  # a kill at a file operation is among the fast tests, in test_faults.py
@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize("kind", KINDS)
def test_killed_runs_end_as_if_they_had_not_been(kind: str, tmp_path: Path) -> None:
    brief = BRIEF if "env=among_us" in KINDS[kind] else ()
    outcomes = list(torture(kind, tmp_path / kind, 2, 1, *SHORT, *brief))
    assert len(outcomes) == 2
    assert [outcome.differs for outcome in outcomes] == [(), ()]
    assert all(outcome.killed for outcome in outcomes)

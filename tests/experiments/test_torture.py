"""Runs that are killed at random moments end as those that nobody killed. `make torture` does more of it."""

from pathlib import Path

import pytest

from tests.torture import KINDS, torture

SLOW = ("ppo_two_learners", "pikl_among_us")  # a minute and more


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k in SLOW else k for k in KINDS])
def test_killed_runs_end_as_if_they_had_not_been(kind: str, tmp_path: Path) -> None:
    outcomes = list(torture(kind, tmp_path / kind, kills=2, seed=1))
    assert len(outcomes) == 2
    assert [outcome.differs for outcome in outcomes] == [(), ()]
    assert all(outcome.killed for outcome in outcomes)

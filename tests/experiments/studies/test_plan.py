"""The power planner from the command line."""

import pytest

from experiments.studies import plan
from marl.common.errors import UserError
from tests.composing import composed_once

settings = composed_once("plan")


def test_the_published_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(settings("a=0.55", "b=0.59", "seeds=[1,3]", "between=0.05"))
    lines = capsys.readouterr().out.splitlines()
    (one,) = [line for line in lines if line.split()[:1] == ["1"]]
    (three,) = [line for line in lines if line.split()[:1] == ["3"]]
    assert one.split()[1:3] == ["2,401", "2,401"] and "says nothing of other seeds" in one
    assert "too few seeds" in three


def test_impossible_settings_are_refused() -> None:
    for override, said in (
        ("a=1.2", "a=1.2: must be a number between 0 and 1"),
        ("b=0.55", "equal rates cannot be told apart"),
        ("between=-1", "between=-1: must be a number between 0 and 1"),
        ("seeds=[0]", "seeds=0: must be a whole number, at least 1"),
        ("power=true", "power=True: must be a number between 0 and 1"),
    ):
        with pytest.raises(UserError, match=said):
            plan.main(settings(override))

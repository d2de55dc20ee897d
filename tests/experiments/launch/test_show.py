"""The last screen of a command."""

import pytest

from experiments.launch.show import show
from marl.metrics.stats import rate


def test_games_that_outgrow_the_context_are_named_on_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    aborted = rate([True, False, False, False])
    show(
        {
            "base": {"errors/aborted": aborted, "errors/outgrown": aborted},
            "trained": {"errors/outgrown": rate([False])},
            "rival": {"errors/outgrown": rate([True, *[False] * 499])},
        },
        {},
    )
    said = capsys.readouterr().out
    assert "base: in 25.0% of the games a model's context was full" in said and "Raise model.context" in said
    assert "rival: in 0.2% of the games" in said and "trained: in" not in said

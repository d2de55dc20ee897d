"""The command that measures talk, on small runs of both games."""

import csv
from pathlib import Path

import pytest

import marl
from experiments import talk
from marl.common.errors import UserError
from marl.metrics.stats import Interval
from marl.report.talk import talk_page, talk_sentences
from tests.composing import AMONG_US, DOND, configure

RUNS = {"dond": ("env=dond", *DOND[1:]), "among_us": AMONG_US}


# Measures of meetings are tested in tests/marl/metrics, too, on small models' games.
@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize("game", ["dond", pytest.param("among_us", marks=pytest.mark.slow)])
def test_a_run_and_its_base_are_measured_side_by_side(
    game: str, tmp_path: Path, bases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = marl.train(*RUNS[game], "algo.iterations=1", "eval.games=0", f"runs={tmp_path}", f"cache={bases}")
    talk.main(configure("talk", f"players=[{run}]", "games=6", "draws=2", f"runs={tmp_path}", "progress=false"))
    rows = list(csv.DictReader((tmp_path / "talk" / "table.csv").read_text().splitlines()))
    assert {row["arm"] for row in rows} == {"base", "trained"}
    assert {row["games"] for row in rows} <= {str(n) for n in range(1, 201)}
    page = (tmp_path / "talk" / "talk.html").read_text()
    assert "<svg" in page and "<script" not in page
    assert (tmp_path / "talk" / "talk.svg").stat().st_size > 1000
    assert str(tmp_path / "talk" / "talk.html") in capsys.readouterr().out


def test_figures_are_said_in_words_and_names_are_escaped() -> None:
    found = {"<b>x</b>": {f"talk/{name}": Interval(value, value, value, 9) for name, value in
                          {"prior": 2.0, "said": 1.5, "heard": 0.75, "true_claims": 0.5}.items()}}  # fmt: skip
    (sentence,) = talk_sentences(found)
    assert sentence == (
        "<b>x</b>: Of 2.00 nats to be said, messages gave away 1.50, and listeners took 0.75. "
        "50% of the claims that can be checked were true."
    )
    page = talk_page(found, "dond")
    assert "<b>x" not in page and "&lt;b&gt;x" in page


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"prior": 2.0, "said": 1.5, "heard": -1.06}, "Of 2.00 nats to be said, messages gave away 1.50, and "
         "listeners took nothing: their beliefs were 1.06 worse than a guess."),
        ({"prior": 2.0, "said": -0.3, "heard": -0.001, "meant_right": 0.1}, "Of 2.00 nats about whom it saw kill, a "
         "witness's message gave away nothing (-0.30), and listeners took 0.00."),
        ({"vote_credit/silence": 0.012}, "It won 1.2 points of a listener's vote for the imposter, beside silence."),
        ({"vote_credit/silence": -0.0001}, "It won 0.0 points of a listener's vote for the imposter, beside silence."),
        ({"vote_credit/silence": -0.02}, "It lost 2.0 points of a listener's vote for the imposter, beside silence."),
    ],
)  # fmt: skip
def test_what_is_negative_is_said_as_such(figures: dict[str, float], said: str) -> None:
    found = {f"talk/{name}": Interval(value, value, value, 9) for name, value in figures.items()}
    assert talk_sentences({"x": found}) == [f"x: {said}"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "name finished runs, whose models"),
        (("players=[scripted]",), "name finished runs, whose models"),
        (("players=[chat]",), "name finished runs, whose models"),
        (("players=[{run}]", "temperature=0"), "temperature=0 leaves no likelihood"),
        (("players=[{run}]", "games=0"), "games=0: must be a whole number, at least 1"),
        (("players=[{run}]", "draws=0"), "draws=0: must be a whole number, at least 1"),
    ],
)
def test_mistakes_are_one_sentence(overrides: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    with pytest.raises(UserError, match=said):
        talk.main(configure("talk", *(override.format(run=tmp_path) for override in overrides)))

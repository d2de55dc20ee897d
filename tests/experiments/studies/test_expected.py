"""Bands of healthy runs: what they are made from stays inside, what goes wrong does not, and training says so."""

import functools
import gzip
import re
from pathlib import Path
from typing import Any

import pytest

from experiments import train
from experiments.setup import bands
from experiments.setup.bands import FOLDER, Band, expected_of, read_bands
from experiments.studies import expected
from experiments.studies.expected import leave_one_out, make_bands, read_curves
from marl.common.errors import UserError
from marl.common.files import stem
from marl.metrics.tables import curve_lines, write_csv
from tests.composing import DOND as SMALL
from tests.composing import cases, composed_once, configure, run_folder

DOND = {  # files of curves under experiments/results -> name of the experiment, objective of the game
    "dond_ablation/curves.csv.gz": ("dond_ablation", 1.0),
    "dond_ablation/curves_objective_0.csv.gz": ("dond_ablation", 0.0),
    "dond_long/curves.csv.gz": ("dond_long", 1.0),
    "dond_human/curves.csv.gz": ("dond_human", 1.0),
    "dond_pikl/curves.csv.gz": ("dond_pikl", 1.0),
}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    **{file: (name, {"game": "dond", "objective": objective}) for file, (name, objective) in DOND.items()},
    **{
        f"among_us_ablation/curves{part}.csv.gz": (f"among_us{part or '_ablation'}", {"game": "among_us"})
        for part in ("", "_long", "_shaping", "_confirm", "_reports")
    },
}
Row = dict[str, Any]
settings = composed_once("expected", "name=mine")


@functools.cache
def published_runs(path: Path) -> list[tuple[str, list[Row]]]:
    """The arm of each run behind a file of curves, and its training lines as they were in `metrics.jsonl`."""
    runs: dict[tuple[str, int], dict[int, Row]] = {}
    for line in curve_lines(path):
        if line.phase == "train":
            row = {"phase": "train", "iteration": line.iteration, **line.figures}
            runs.setdefault((line.arm, line.seed), {})[line.iteration] = row
    return [(arm, list(rows.values())) for (arm, _), rows in runs.items()]


# ---- what a band is ------------------------------------------------------------------------------------------------
def test_a_band_by_hand() -> None:
    # Variances between the two seeds: 2 at iteration 1, 0 at iteration 2; pooled 1. Half: 2 * 1 * sqrt(1 + 1/2).
    curves = {("full", "game/score"): {0: {1: 5.0, 2: 8.0}, 1: {1: 7.0, 2: 8.0, 3: 9.0}}}
    half = 2 * 1.5**0.5
    assert make_bands(curves, margin=2) == [
        Band("full", "game/score", 1, pytest.approx(6 - half), pytest.approx(6 + half)),
        Band("full", "game/score", 2, pytest.approx(8 - half), pytest.approx(8 + half)),
    ]
    # Seeds that made a band are inside at any margin, and metrics that cannot be negative have no negative bounds.
    [first, _] = make_bands(curves, margin=0.01)
    assert (first.low, first.high) == (5.0, 7.0)
    [low] = make_bands({("full", "errors/per_turn"): {0: {1: 0.0}, 1: {1: 0.01}}}, margin=5)
    assert low.low == 0.0 < low.high


def test_each_seed_is_compared_with_bands_of_the_others() -> None:
    # Without seed 2 the band is 6 +- 2.45. Without 0 or 1 the other two are 13 or more apart, and all is inside.
    rows = {("full", "game/score"): {0: {1: 5.0}, 1: {1: 7.0}, 2: {1: 20.0}}}
    pair = {("game_only", "game/score"): {0: {1: 0.0}, 1: {1: 9.0}}}
    found = leave_one_out({**rows, **pair}, margin=2**0.5)
    assert found == {("full", 0): [], ("full", 1): [], ("full", 2): [("game/score", 1)]}
    rare = {("full", "belief/log_loss"): {0: {1: 0.1}, 1: {1: 0.9}}}  # of two seeds only
    assert leave_one_out({**rows, **rare}, margin=2**0.5) == found
    assert leave_one_out(pair, margin=5) == {}


def test_bands_of_win_rates_replace_those_of_the_score() -> None:
    seeds = {0: {1: 0.5}, 1: {1: 0.6}}
    bands = make_bands({("RL", "game/score"): seeds, ("RL", "game/win_rate/crewmates"): seeds}, margin=5)
    assert [band.metric for band in bands] == ["game/win_rate/crewmates"]


def test_one_seed_makes_no_band() -> None:
    with pytest.raises(UserError, match="arm full has one seed, 3"):
        make_bands({("full", "game/score"): {3: {1: 1.0}}}, margin=5)
    with pytest.raises(UserError, match="no iteration with game/score in common"):
        make_bands({("full", "game/score"): {0: {1: 1.0}, 1: {2: 1.0}}}, margin=5)
    with pytest.raises(UserError, match=r"no training curve of .* to record"):
        make_bands({}, margin=5)


# ---- the shipped bands ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("file", PUBLISHED)
def test_shipped_bands_are_those_of_the_command_and_hold_their_own_runs(file: str) -> None:
    name, env = PUBLISHED[file]
    runs = published_runs(FOLDER.parent / file)
    assert len(runs) in (3, 4, 6, 12, 16, 21)
    for arm, rows in runs:
        found = expected_of(name, arm, env)
        assert found is not None
        assert found.verdict(rows).startswith("as expected: inside"), found.verdict(rows)
        assert f"at all of {len(rows)} iterations" in found.verdict(rows)
        assert not any(found.warning(row["iteration"], row) for row in rows)
    several = {"objective": env["objective"]} if name == "dond_ablation" else {}
    made = make_bands(read_curves(FOLDER.parent / file, several), margin=5.0)
    shipped = [band for band in read_bands(FOLDER / f"{name}.csv.gz") if band.arm in {each.arm for each in made}]
    assert [(b.arm, b.metric, b.iteration) for b in shipped] == [(b.arm, b.metric, b.iteration) for b in made]
    assert [b.low for b in shipped] == pytest.approx([b.low for b in made], rel=1e-5)


def test_longer_runs_of_the_same_settings_are_inside_too() -> None:
    """Runs of dond_long did not make the ablation's band, but train alike for its twenty iterations."""
    found = expected_of("dond_ablation", "full", {"game": "dond", "objective": 1.0})
    assert found is not None
    for _, rows in published_runs(FOLDER.parent / "dond_long/curves.csv.gz"):
        assert len(rows) == 40 and "inside" in found.verdict(rows) and "all of 20 iterations" in found.verdict(rows)


@pytest.mark.parametrize(
    ("metric", "spoil"),
    [
        ("game/score", lambda first, value: first),  # nothing is learned
        ("loss/entropy", lambda first, value: 0.0),  # one reply, always
        ("belief/log_loss", lambda first, value: 3.0),  # worse than knowing nothing
        ("errors/per_turn", lambda first, value: 0.5),
    ],
)
@pytest.mark.parametrize("file", [file for file in DOND if not file.startswith("dond_human")])
def test_runs_that_go_wrong_leave_the_shipped_bands(file: str, metric: str, spoil: Any) -> None:
    name, env = PUBLISHED[file]
    for arm, rows in published_runs(FOLDER.parent / file):
        found = expected_of(name, arm, env)
        assert found is not None
        wrong = [{**row, metric: spoil(rows[0][metric], row[metric])} for row in rows]
        last = found.warning(wrong[-1]["iteration"], wrong[-1])
        if metric == "game/score" and (env["objective"] == 0.0 or arm == "pikl"):
            continue  # this base is close to what is learned; those training games are planned from the first on
        assert metric in last and last.count(" is not as expected: ") == 1, (arm, last)
        assert found.verdict(wrong).startswith("not as expected: outside") and metric in found.verdict(wrong)


# ---- comparing -----------------------------------------------------------------------------------------------------
def test_every_shipped_experiment_has_its_bands_or_is_listed_as_missing() -> None:
    root = FOLDER.parents[2]
    files = [*root.glob("conf/sweep/*.yaml"), *root.glob("conf/experiment/*.yaml")]
    shipped = {path.stem for path in files if path.stem != "none"}
    for path in files:  # a file of bands is found by the run's name
        assert path.stem == "none" or f"\nname: {path.stem}\n" in path.read_text()
    listed = (FOLDER / "notes.md").read_text().partition("| missing |")[2].partition("\n\n")[0]
    missing = {name for line in listed.splitlines() for name in re.findall(r"`([\w/.]+)`", line.partition(" | ")[0])}
    recorded = {stem(path) for path in FOLDER.glob("*.csv.gz")}
    assert recorded | (missing & shipped) == shipped and not recorded & missing


def test_arms_are_told_apart_by_the_games_settings(tmp_path: Path) -> None:
    lines = [("full objective=1", "game/score", 1, 10, 12), ("full objective=0", "game/score", 1, 5, 6)]
    lines.append(("RL+L+S", "game/win_rate/crewmates", 1, 0.4, 0.6))
    write_csv(tmp_path / "NAME.csv.gz", Band.__dataclass_fields__, lines)

    def warning(arm: str, env: Row, **found: float) -> str | None:
        own = expected_of("NAME", arm, env, tmp_path)
        return own and own.warning(1, {"game/score": 5.5, "game/win_rate/crewmates": 0.5})

    assert warning("full", {"game": "dond", "objective": 0.0}) == ""
    outside = "iteration 1 is not as expected: game/score 5.500 (healthy: 10.00 to 12.00)"
    assert warning("full", {"game": "dond", "objective": 1}) == outside
    assert warning("full", {"game": "dond", "objective": 0.5}) is None
    assert warning("none", {"game": "dond", "objective": 0.0}) is None
    assert warning("full", {"game": "among_us"}) == ""  # by the name that its tables use
    assert expected_of("OTHER", "full", {"game": "dond"}, tmp_path) is None


def test_a_verdict_names_metrics_and_iterations(tmp_path: Path) -> None:
    lines = [("full", metric, at, 0, 1) for metric in ("game/score", "loss/entropy") for at in (1, 2, 3)]
    write_csv(tmp_path / "NAME.csv.gz", Band.__dataclass_fields__, lines)
    found = expected_of("NAME", "full", {"game": "dond"}, tmp_path)
    assert found is not None
    rows = [{"phase": "train", "iteration": at, "game/score": at - 1, "loss/entropy": -0.1} for at in (1, 2, 3, 4)]
    rows.append({"phase": "eval", "iteration": 3, "game/score": 99})
    assert found.verdict(rows) == (
        "not as expected: outside what NAME.csv.gz has for healthy runs of full at 3 of 3 iterations "
        "(loss/entropy at 1, 2, 3; game/score at 3)"
    )
    assert found.verdict([rows[-1]]) == ""  # nothing to compare
    assert found.warning(4, rows[3]) == "" and found.warning(1, {"game/score": 0.5}) == ""


def test_a_damaged_file_is_told_of_and_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "NAME.csv.gz").write_bytes(gzip.compress(b"arm,metric,iteration,low,high\nfull,game/score,one,2,3\n"))
    assert expected_of("NAME", "full", {"game": "dond"}, tmp_path) is None
    reports = capsys.readouterr().out
    assert reports.count("\n") == 1 and "NAME.csv.gz is damaged" in reports


@pytest.mark.slow
def test_training_says_where_it_leaves_the_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bands, "FOLDER", tmp_path)
    lines = [("custom", "game/score", 1, 100, 101), ("custom", "game/score", 2, -100, 100)]
    write_csv(tmp_path / "dond_quickstart.csv.gz", Band.__dataclass_fields__, lines)
    cfg = configure("train", *SMALL, f"runs={tmp_path / 'runs'}")
    train.main(cfg)
    reports = [line for line in capsys.readouterr().out.splitlines() if "as expected" in line]
    assert len(reports) == 2 and (run_folder(cfg) / "run.json").exists()
    assert (
        reports[0].startswith("iteration 1 is not as expected: game/score ")
        and "(healthy: 100.0 to 101.0)" in reports[0]
    )
    assert "at 1 of 2 iterations (game/score at 1)" in reports[1]


# ---- the command ---------------------------------------------------------------------------------------------------
def test_recording_replaces_the_arms_that_it_records(tmp_path: Path) -> None:
    def record(name: str, game: str) -> None:
        curves = FOLDER.parent / "dond_ablation" / name
        expected.main(settings(f"curves={curves}", f"settings={game}", f"out={tmp_path}"))

    record("curves.csv.gz", "{objective: 1}")
    record("curves_objective_0.csv.gz", "{objective: 0}")
    both = read_bands(tmp_path / "mine.csv.gz")
    record("curves.csv.gz", "{objective: 1}")
    again = read_bands(tmp_path / "mine.csv.gz")
    assert len(both) == 2 * 4 * 4 * 20 and sorted(map(str, both)) == sorted(map(str, again))
    assert {band.arm for band in both} >= {"full objective=1", "full objective=0"}


def test_recording_from_finished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, score in ((0, 5.0), (1, 7.0)):
        folder = tmp_path / f"mine-full-s{seed}"
        folder.mkdir()
        env = "{game: among_us, width: 2, height: 2, players: 5, imposters: 1, tasks: 4}"
        (folder / "config.yaml").write_text(f"arm: full\nseed: {seed}\nenv: {env}\n")
        (folder / "run.json").write_text("{}")
        rows = f'{{"iteration": 1, "phase": "train", "game/score": {score}}}\n'
        (folder / "metrics.jsonl").write_text(rows + '{"iteration": 1, "phase": "eval", "game/score": 50}\n')
    expected.main(settings("select=mine-*", f"runs={tmp_path}", f"out={tmp_path}", "margin=2"))
    [band] = read_bands(tmp_path / "mine.csv.gz")
    half = 2 * 2**0.5 * 1.5**0.5
    assert (band.arm, band.metric, band.iteration) == ("RL+L+S", "game/score", 1)
    assert (band.low, band.high) == (pytest.approx(6 - half, abs=1e-4), pytest.approx(6 + half, abs=1e-4))
    assert "RL+L+S, from 2 seeds each" in capsys.readouterr().out


@cases(r"""
curves=missing.csv | curves=missing\.csv: the file cannot be read
curves=README.md | curves=README\.md is damaged
 | curves and select: give one of them
curves=a.csv select=a-* | curves and select: give one of them
select=none-* | no finished run
select=a-* settings={objective:1} | settings: only curves need them
curves=a.csv margin=0 | margin=0: must be a number above 0
curves=a.csv name=../a | name='\.\./a': must be a name
""")
def test_what_cannot_be_recorded(overrides: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        expected.main(settings(f"out={tmp_path}", f"runs={tmp_path}", *overrides))
    assert list(tmp_path.iterdir()) == []

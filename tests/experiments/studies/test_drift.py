"""The drift of a small real run's language: every policy is measured, once, and what is left out is said."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from experiments import train
from experiments.setup.stages import stages_of
from experiments.studies import drift
from experiments.studies.iterations import refuse_doubles
from experiments.studies.lines import write_intervals
from marl.common.errors import UserError
from marl.common.files import csv_rows, digest, read_json, write_json
from marl.metrics.stats import Interval, seed_mean
from marl.storage.checkpoint import folder_digest
from tests.composing import configure
from tests.experiments.studies.test_frontier import TEST
from tests.human_dialogues import VAL, write

QUIET = ["progress=false", "threads=1"]
SMALL = [
    *QUIET, "env=dond", "base=human", "base.epochs=1", "model.hidden_size=32", "model.layers=1",
    "model.intermediate_size=64", "model.max_new_tokens=8", "name=tiny", "arm=full", "algo.iterations=2",
    "algo.games=4", "algo.concurrency=4",
    "algo.update.minibatches=1", "eval.games=3", "eval.every=1", "eval.final_games=3", "checkpoint.every=1",
]  # fmt: skip


def rows(path: Path) -> list[dict[str, str]]:
    return csv_rows(path)


@pytest.mark.usefixtures("no_pages")
def test_a_runs_drift_from_its_base_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    data = write(tmp_path / "data", test=TEST)
    train.main(configure("train", *SMALL, f"data.dond={data}", f"runs={tmp_path}"))
    capsys.readouterr()
    cfg = configure("drift", *QUIET, f"runs={tmp_path}", "select=tiny-*", f"data.dond={data}", "games=4")
    drift.main(cfg)
    assert "test: 2 views of human dialogues; left out: none" in capsys.readouterr().out
    out = tmp_path / "drift"
    found = {(row["iteration"], row["metric"]): row for row in rows(out / "drift.csv.gz")}
    assert {iteration for iteration, _ in found} == {"0", "1", "2"}  # base, checkpoint, end
    likely = [float(found[iteration, "drift/human_dialogues"]["mean"]) for iteration in "012"]
    assert all(nats < 0 for nats in likely) and len(set(likely)) == 3
    assert float(next(row for row in rows(out / "people.csv") if row["metric"] == "talk/understood")["mean"]) > 0
    assert (out / "drift.svg").read_text().count("<svg") == 1

    again = tmp_path / "again"
    drift.main(configure("drift", f"data.table={out / 'drift.csv.gz'}", f"publish={again}"))  # without the run
    assert {path.name for path in again.iterdir()} == {"drift_by_arm.csv.gz", "drift.svg"}
    assert all(path.read_bytes() == (out / path.name).read_bytes() for path in again.iterdir())

    cells = {path: path.stat().st_mtime_ns for path in out.glob("*.json")}
    assert len(cells) == 3
    drift.main(cfg)  # nothing is measured again
    assert {path: path.stat().st_mtime_ns for path in cells} == cells

    (run,) = tmp_path.glob("tiny-*")
    known = {digest(each.settings) for each in drift.subjects_of(run, cfg)}
    assert known == {path.stem for path in cells}
    (data / "val.txt").write_text((data / "test.txt").read_text())  # other dialogues are other figures
    assert not known & {digest(each.settings) for each in drift.subjects_of(run, cfg)}

    # fewer dialogues, the first ones, and in bfloat16
    (data / "val.txt").write_text((data / "test.txt").read_text() + VAL + "\n")
    first = {name: tmp_path / name for name in ("full", "half")}
    fewer = (*QUIET, f"runs={tmp_path}", "select=tiny-*", f"data.dond={data}", "games=4", "split=val", "dialogues=1")
    drift.main(configure("drift", *fewer, f"cells={first['full']}"))
    drift.main(configure("drift", *fewer, f"cells={first['half']}", "bf16=true"))
    full, half = (
        [float(row["mean"]) for row in rows(out / "drift.csv.gz") if row["metric"] == "drift/human_dialogues"]
        for out in first.values()
    )
    assert full == pytest.approx(likely) and half == pytest.approx(full, rel=0.02) and half != full
    assert not {path.name for path in first["full"].glob("*.json")} & {p.name for p in first["half"].glob("*.json")}
    with pytest.raises(UserError, match="dialogues=-1: must be at least 1, or 0 for all of them"):
        drift.main(configure("drift", *fewer, "dialogues=-1"))

    assert stages_of(run, "learner")[0].folder.parent == tmp_path / "bases"
    config = OmegaConf.load(run / "config.yaml")
    config.init.learner = run.name  # as if it had started from where it ended
    OmegaConf.save(config, run / "config.yaml")
    assert stages_of(run, "learner")[0].folder == run / "policy"
    card = read_json(run / "run.json")
    write_json(run / "run.json", {**card, "inputs": {f"init.learner={run.name}": folder_digest(run / "policy")}})
    assert stages_of(run, "learner")[0].folder == run / "policy"
    write_json(run / "run.json", {**card, "inputs": {f"init.learner={run.name}": "0123"}})
    with pytest.raises(UserError, match=r"policy is not the policy that .* began with: it was made again"):
        stages_of(run, "learner")


def figures_of(run: str, objective: float, seed: int, iteration: int, **figures: float) -> Iterator[tuple[Any, ...]]:
    """One policy's lines of `drift.csv.gz`: `game_score=1` is the metric game/score."""
    for name, value in figures.items():
        key = (objective, run, "cloned", seed, iteration, name.replace("_", "/", 1))
        yield key, Interval(value, value - 0.1, value + 0.1, 100)


def test_figures_show_the_shares_of_all_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second arm's shares are above all of the first."""
    found = []
    for seed, (arm, end) in enumerate([("first", 0.05), ("second", 0.4)]):
        for i, inverted in ((0, 0.02), (9, end)):
            lines = figures_of(f"run-{seed}", 0.0, seed, i, game_score=4.0, talk_inverted=inverted)
            found += [((key[0], key[1], arm, *key[3:]), own) for key, own in lines]
    write_intervals(tmp_path / "drift.csv.gz", drift.KEYS, found)
    figures: list[Figure] = []
    monkeypatch.setattr(drift, "save_figure", lambda figure, path: figures.append(figure))
    drift.tabulate(tmp_path / "drift.csv.gz", tmp_path)
    (axes,) = figures[0].axes
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 0.4


def test_objectives_have_rows_of_their_own_and_arms_means_over_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {"game_score": 0.0, "game_points": 4.0, "talk_inverted": 0.02, "drift_own_speech": -2.0}
    found = [line for i in (0, 5) for line in figures_of("alike-1", 1.0, 0, i, **{**base, "game_score": 8.0 + i})]
    for seed, (kept, end) in enumerate([(1, 0.3), (7, 0.0), (9, 0.0)]):  # no checkpoint is kept of all
        for i, inverted in ((0, 0.02), (kept, 0.1), (12, end)):
            found += figures_of(f"alike-{seed + 2}", -1.0, seed, i, **{**base, "talk_inverted": inverted})
    write_intervals(tmp_path / "drift.csv.gz", drift.KEYS, found)
    drift.tabulate(tmp_path / "drift.csv.gz", tmp_path)
    means = {(r["objective"], r["iteration"], r["metric"]): r for r in rows(tmp_path / "drift_by_arm.csv.gz")}
    assert {key[:2] for key in means} == {("1", "0"), ("1", "5"), ("-1", "0"), ("-1", "12")}
    end, base_row = means["-1", "12", "talk/inverted"], means["-1", "0", "talk/inverted"]
    assert (float(end["mean"]), end["low"], end["seeds"]) == (pytest.approx(0.1), "0", "3")
    assert float(end["high"]) == pytest.approx(seed_mean([0.3, 0, 0]).high, rel=1e-4)
    assert (base_row["mean"], base_row["low"], base_row["high"]) == ("0.02", "-0.08", "0.12")  # one policy: its games'
    said = capsys.readouterr().out
    assert all(f"λ={where}" in said for where in ("1 cloned s0 it 5", "-1 cloned s0 it 1", "-1 cloned s2 it 12"))
    drawn = (tmp_path / "drift.svg").read_text()
    assert drawn.count("of those that could be, λ") == 2 and ">points<" in drawn and ">score<" in drawn
    assert "human dialogues under" not in drawn  # nothing of it was measured


def test_runs_that_no_column_tells_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a and b are both of objective 0, arm full and seed 1\. Keep .*`where`"):
        refuse_doubles((Path(name), where, "full", 1) for name, where in (("a", 0), ("c", 1), ("a", 0), ("b", 0)))
    (tmp_path / "drift.csv").write_text("run,arm\nx,full\n")
    for name, said in (("drift.csv", "expected the columns objective, run, arm"), ("none.csv", "cannot be read")):
        with pytest.raises(UserError, match=rf"data.table={tmp_path / name}: .*{said}"):
            drift.main(configure("drift", f"data.table={tmp_path / name}"))
    line = "0,x,full,1,3,game/agreement,.5,.4,.6,9\n"
    (tmp_path / "drift.csv").write_text("objective,run,arm,seed,iteration,metric,mean,low,high,games\n" + line)
    with pytest.raises(UserError, match="has no game/score of λ=0 full s1 it 3"):
        drift.main(configure("drift", f"data.table={tmp_path / 'drift.csv'}"))
    twice = "".join(f"0,{run},full,1,3,game/score,5,4,6,9\n" for run in "xy")
    (tmp_path / "drift.csv").write_text("objective,run,arm,seed,iteration,metric,mean,low,high,games\n" + twice)
    with pytest.raises(UserError, match=r"data\.table: x and y are both of objective 0, arm full and seed 1"):
        drift.main(configure("drift", f"data.table={tmp_path / 'drift.csv'}"))
    with pytest.raises(UserError, match="select=: must be names of runs' folders"):
        drift.main(configure("drift", "select=''", f"runs={tmp_path}"))


def test_people_who_did_not_end_in_claims_are_counted_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = drift.people_metrics(str(write(tmp_path)), "train")
    assert "4 views of human dialogues; left out: 1 no agreement" in capsys.readouterr().out
    assert found["talk/understood"].n == 3 and found["talk/worse_share"].n == 3  # dialogues

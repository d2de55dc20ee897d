"""The command that trains and rates players of pure Diplomacy: what it writes, how it goes on, what it refuses."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from experiments import lookahead
from experiments.lookahead import study_of, tables_of
from marl.common.errors import UserError
from marl.common.files import csv_rows
from marl.metrics.tables import read_table
from tests.composing import composed_once

SMALL = (
    "progress=false", "width=8", "years=1", "anchor.games=10", "anchor.updates=4", "anchor.batch=16",
    "train.iterations=4", "train.games=4", "train.batch=16", "train.updates=1", "every=2", "search.iterations=2",
    "search.candidates=3", "search.samples=4", "games.one=3", "games.population=12",
)  # fmt: skip
settings = composed_once("lookahead", *SMALL)


def test_a_study_from_its_anchor_to_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped in the middle of an arm and again between tables, it ends with the same files."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    lookahead.main(settings(f"out={whole}"))
    (folder,) = whole.iterdir()
    rows = read_table(folder / "table.csv")
    names = ["scripted", "SL", "SearchBot", "HedgeBot", "BRBot", "DORA", "DNVI_NPU", "piKL"]
    of = {(row.arm, row.metric): row for row in rows}
    assert {arm for arm, _ in of} == set(names) and len(of) == len(rows) == 8 * 2 + 7 * 2 + 4 * 2
    assert sum(of[name, "rating"].mean for name in names) == pytest.approx(0, abs=1e-2)
    assert all(0 <= row.mean <= 1 and row.games > 0 for row in rows if row.metric != "rating")
    games = csv_rows(folder / "games.csv.gz")
    assert len(games) == 12 + 3 * len(tables_of(study_of(settings()))[1:])
    for game in games:
        assert sum(float(game[f"score_{i}"]) for i in range(7)) == pytest.approx(1, abs=1e-4)
        seats = [game[f"seat_{i}"] for i in range(7)]
        if game["kind"] != "population":
            one, six = game["kind"].split("_among_")
            assert sorted(seats) == sorted([one, *[six] * 6])
    assert len(csv_rows(folder / "training.csv.gz")) == 3 * 4
    assert "piKL" in capsys.readouterr().out and (folder / "figure.svg").stat().st_size > 1000

    shutil.copytree(whole, again)
    (other,) = again.iterdir()
    for path in [*other.glob("piKL-s0.json"), *other.glob("*among*"), *other.glob("*.csv*")]:
        path.unlink()
    kept, stopped = lookahead.save, []

    def save(*args: object, **notes: object) -> None:
        kept(*args, **notes)  # type: ignore[arg-type]
        stopped.append(args)
        raise KeyboardInterrupt

    shutil.rmtree(other / "piKL-s0")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lookahead, "save", save)
        lookahead.main(settings(f"out={again}"))
    assert len(stopped) == 1 and not (other / "piKL-s0.json").exists()
    lookahead.main(settings(f"out={again}"))
    for path in folder.iterdir():
        if path.is_file() and path.suffix in (".csv", ".gz", ".json"):
            assert (other / path.name).read_bytes() == path.read_bytes(), path.name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookahead, "train_lookahead", lambda *args: pytest.fail("an arm was trained again"))
        patch.setattr(lookahead, "play", lambda *args: pytest.fail("a game was played again"))
        lookahead.main(settings(f"out={again}", f"publish={tmp_path / 'out'}"))
    assert (tmp_path / "out" / "table.csv").read_bytes() == (folder / "table.csv").read_bytes()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("seeds=[]", "seeds=[]: name at least one"),
        ("seeds=[a]", "seeds=a: must be a whole number"),
        ("seeds=[1,1]", "seeds=[1, 1]: name at least one, each once"),
        ("years=0", "years=0: must be a whole number"),
        ("years=200", "years=200: a game has at most 100"),
        ("games.one=1", "games.one=1: must be a whole number, at least 2"),
        ("arms.piKL.start=middle", "arms.piKL.start=middle: must be one of nothing, anchor"),
        ("arms.piKL.search={solver: nash}", "search.solver=nash: must be one of pikl, regret"),
        ("arms.piKL.play={agents: 1}", "piKL.search.agents is no setting of Search"),
        ("arms={SL: {start: anchor, anchored: true, search: {}}}", "arms.SL: that is another player's name"),
        ("search.candidates=0", "search.candidates=0"),
        ("train.batch=0", "batch=0: must be a whole number"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_computed(given: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        lookahead.main(settings(given, f"out={tmp_path / 'out'}"))
    assert said in str(error.value) and not (tmp_path / "out").exists()


def test_another_configuration_has_a_folder_of_its_own() -> None:
    one, other, same = (study_of(settings(given)).folder for given in ("seeds=[0]", "years=2", "seeds=[0,1]"))
    assert one != other and one == same  # seeds share a folder, in which each has its files
    assert np.unique([table.name for table in tables_of(study_of(settings("seeds=[0,1]")))]).size == 2 * (1 + 20)

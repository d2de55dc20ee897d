"""The command that trains and rates players of pure Diplomacy: what it writes, how it goes on, what it refuses."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import evaluate, lookahead, play, report
from experiments.lookahead import study_of, tables_of
from experiments.setup.entrants import text_player
from experiments.setup.lookahead import Plane, Study, is_planner, planner_agent
from experiments.setup.players import check_players, in_runs, is_run, played_as
from experiments.setup.spec import run_spec
from experiments.setup.work import inputs_of
from experiments.studies.plane import cells
from marl.agents.model import PlayConfig
from marl.algorithms.lookahead import Learner
from marl.common.errors import UserError
from marl.common.files import csv_rows, write_json
from marl.metrics.tables import read_table
from marl.report.plane import METRICS
from marl.report.transcripts import read_episodes
from marl.rollout.cast import RoleConfig
from marl.rollout.games import env_maker
from tests.composing import composed_once, configure

SMALL = (
    "progress=false", "width=8", "years=1", "anchor.games=10", "anchor.updates=4", "anchor.batch=16",
    "train.iterations=4", "train.games=4", "train.batch=16", "train.updates=1", "every=2", "search.iterations=2",
    "search.candidates=3", "search.samples=4", "games.one=3", "games.population=12", "plane.games=2",
    "plane.positions=5", "plane.lambdas=[0,1e6]",
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
    out = capsys.readouterr().out
    assert "piKL" in out and (folder / "figure.svg").stat().st_size > 1000

    points = {(row.arm, row.metric): row for row in read_table(folder / "plane.csv")}
    assert {arm for arm, _ in points} == {
        f"{p} {a} {b}" for p in ("SL", "piKL") for a in ("0", "1e+06") for b in ("0", "1e+06")
    }
    assert len(points) == 8 * 3 and {metric for _, metric in points} == set(METRICS)
    assert all(row.mean < 0 if metric == METRICS[2] else 0 <= row.mean <= 1 for (_, metric), row in points.items())
    assert points["SL 1e+06 1e+06", METRICS[2]].mean > points["SL 1e+06 0", METRICS[2]].mean  # the anchor imitates them
    assert "piKL, likelihood/scripted: lambda believed" in out
    report.redraw(folder, tmp_path / "drawn")
    assert (tmp_path / "drawn" / "figure.svg").exists()
    assert (tmp_path / "drawn" / "plane.svg").read_bytes() == (folder / "plane.svg").read_bytes()

    shutil.copytree(whole, again)
    (other,) = again.iterdir()
    for path in [
        *other.glob("piKL-s0.json"),
        *other.glob("*among*"),
        *other.glob("*.csv*"),
        *other.glob("plane-piKL*"),
    ]:
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


def test_timing_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    cfg = settings(f"out={tmp_path}", "games.population=2")
    (study_of(cfg).folder / "timing.jsonl").mkdir(parents=True)
    with pytest.raises(UserError, match=r"timing\.jsonl cannot be written \(Is a directory\): see that it can be"):
        lookahead.main(cfg)


def test_two_players_meet_each_by_each(tmp_path: Path) -> None:
    pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`")
    small = [each for each in SMALL if not each.startswith("plane")]
    lookahead.main(configure("lookahead", "board=france_austria", *small, "search.candidates=4", f"out={tmp_path}"))
    (folder,) = tmp_path.iterdir()
    of = {(row.arm, row.metric): row for row in read_table(folder / "table.csv")}
    names = ["scripted", "SL", "SearchBot", "HedgeBot", "BRBot", "DORA", "DNVI_NPU", "piKL", "DNVI"]
    assert {metric for _, metric in of} == {"rating", "score/population", "score/1v1", "score/1v1/scripted"}
    against = {(row.arm, row.metric.rpartition("/")[2]): row.mean for row in read_table(folder / "pairs.csv")}
    assert against.keys() == {(one, other) for one in names for other in names if one != other}
    for (one, other), score in against.items():
        assert score + against[other, one] == pytest.approx(1, abs=1e-4)  # a game has two seats
        if other == "SL":
            assert of[one, "score/1v1"].mean == pytest.approx(score, abs=1e-4)
    games = csv_rows(folder / "games.csv.gz")
    assert len(games) == 12 + 3 * 9 * 8 // 2 and set(games[0]) == {
        "seed", "kind", "seat_0", "seat_1", "score_0", "score_1"
    }  # fmt: skip
    with pytest.raises(UserError, match=r"plays standard_france_austria, not pure\. Take a player of pure"):
        planner_agent(f"{folder}/piKL-s0", {"game": "diplomacy"})


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
        ("search.candidates=2", "search.random=2: must be from 0 to below search.candidates=2"),
        ("search.iterations=0", "search.iterations=0: must be a whole number, at least 1"),
        ("search.agent=-1.0", "search.agent=-1.0: must be a lambda"),
        ("search.lambdas=[]", "name at least one"),
        ("search.kappa=small", "search.kappa=small: must be one of published, sqrt, zero"),
        ("train.games=0", "games=0"),
        ("train.explore=2", "explore=2"),
        ("train.learning_rate=0", "learning_rate=0"),
        ("train.value_weight=-1", "value_weight=-1"),
        ("train.batch=0", "batch=0: must be a whole number"),
        ("map_name=standard", "map_name=standard: players who plan need a map as arrays. Take one of pure, standard_f"),
        ("plane.players=[DORA]", "plane.players: DORA plans near no anchor, so that lambdas mean nothing to it. Take"),
        ("plane.players=[]", "plane.players=[]: name at least one, each once"),
        ("plane.lambdas=[0,-1]", "plane.lambdas=[0, -1]: must be numbers, each at least 0"),
        ("plane.games=-1", "plane.games=-1: must be a whole number, at least 0"),
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


def test_the_plane_has_files_of_its_own() -> None:
    """Adding a plane, or changing it, changes the name of no other cell."""
    without, other = study_of(settings("plane.games=0")), study_of(settings("plane.positions=9"))
    assert without.folder == study_of(settings()).folder == other.folder
    sizes = [Plane(games, positions, ["SL"], [0, 0.03]) for games, positions in ((0, 5), (2, 5), (2, 9))]
    none, one, more = ([path.name for path in cells(other, size)] for size in sizes)
    assert none == [] and one[1] == "plane-SL-0-0.03-2x5-s0.json" and not {*one} & {*more}


def test_players_of_a_study_play_in_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained and untrained players are named by their folder, in evaluation and beside a learner; others are
    refused."""
    pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`")
    study = study_of(settings(f"out={tmp_path}"))
    study.folder.mkdir()
    write_json(study.folder / "settings.json", study.settings)
    env = {"game": "diplomacy", "map_name": "pure", "win_centres": None}
    for name in ("SL", "piKL"):
        with pytest.raises(UserError, match=f"{name}-s3 is not trained. Finish it with"):
            planner_agent(f"{study.folder}/piKL-s3", env)
        lookahead.save(Learner(study.game, study.net(0), study.train), study.folder / f"{name}-s3")
        write_json(study.folder / f"{name}-s3.json", {})
    for name in ("SearchBot", "piKL", "SL"):
        path = f"{study.folder}/{name}-s3"
        assert is_planner(path) and not is_run(path)
    cast = {"power": RoleConfig("learner", path, 2.0)}
    before = torch.random.get_rng_state()
    with monkeypatch.context() as unloaded:
        unloaded.setattr(Study, "trained", None)  # a check loads no networks
        check_players(cast, env, env_maker(env)())
    planner_agent(path, env)
    assert torch.equal(torch.random.get_rng_state(), before)  # what a run draws does not depend on who is seated
    standard = {**env, "map_name": "standard"}
    with pytest.raises(UserError, match=r"cast\.power: .*plays pure Diplomacy alone, and env\.map_name=standard"):
        check_players(cast, standard, env_maker(standard)())
    twin = tmp_path / "twin" / Path(path).name
    shutil.copytree(study.folder, twin.parent)
    with pytest.raises(UserError, match="would be called the same in transcripts"):
        check_players({"power": RoleConfig(path, str(twin), 2.0)}, env, env_maker(env)())
    assert list(played_as(cast, PlayConfig())["policies"]) == [path]
    for changed, said in (
        ({"game": "dond"}, "plays pure Diplomacy alone, and env.game=dond. Seat another player"),
        ({"map_name": "standard"}, "plays pure Diplomacy alone, and env.map_name=standard"),
        ({"win_centres": 6}, "plays pure Diplomacy alone, and env.win_centres=6"),
    ):
        with pytest.raises(UserError, match=said):
            planner_agent(path, {**env, **changed})
    with pytest.raises(UserError, match=r"that study has no such player\. Take one of SL, BRBot, HedgeBot, S"):
        text_player(f"{study.folder}/BRBOT-s3", env)
    evaluate.main(configure("evaluate", "env=diplomacy", "env.years=1", "games=1", f"players=[{path},random]"))
    assert "SL-s3" in capsys.readouterr().out
    name = f"{study.folder.name}/piKL-s3"
    assert in_runs(name, str(tmp_path)) == f"{tmp_path}/{name}" and in_runs("piKL-s3", str(tmp_path)) == "piKL-s3"


def test_another_network_is_another_player(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card of a run keeps a digest of the players beside its learner: their networks, and how they plan."""
    pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`")
    study = study_of(settings(f"out={tmp_path}"))
    study.folder.mkdir()
    write_json(study.folder / "settings.json", study.settings)
    path = f"{study.folder}/piKL-s0"

    def trained(seed: int, *names: str) -> str:
        for name in names:
            shutil.rmtree(study.folder / f"{name}-s0", ignore_errors=True)
            lookahead.save(Learner(study.game, study.net(seed), study.train), study.folder / f"{name}-s0")
            write_json(study.folder / f"{name}-s0.json", {})
        spec = run_spec(configure("train", "env=diplomacy", f"cast.power.partner={path}", f"runs={tmp_path / 'runs'}"))
        return inputs_of(spec)[path]

    found = [trained(0, "SL", "piKL", "DORA"), trained(1, "piKL"), trained(1, "SL"), trained(2, "piKL")]
    assert len(set(found)) == 4
    assert trained(0, "DORA") == found[3]  # which is nobody's network here
    write_json(study.folder / "settings.json", {**study.settings, "search": {**study.settings["search"], "samples": 5}})
    assert trained(2) not in found

    monkeypatch.setattr("builtins.input", lambda prompt: "1")
    name = f"{study.folder.name}/piKL-s0"
    play.main(configure("play", "env=diplomacy", "env.years=1", f"opponent={name}", f"runs={tmp_path}",
                        f"out={tmp_path / 'played'}"))  # fmt: skip
    (game,) = read_episodes(tmp_path / "played/episodes-001.jsonl")
    assert sorted(game["players"].values()) == ["human"] + 6 * ["piKL-s0"]

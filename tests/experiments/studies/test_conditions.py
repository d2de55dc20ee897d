"""Finished runs under other conditions: what is played, shared, resumed and tabulated, in small real runs."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file

from experiments import evaluate, train
from experiments.setup import entrants
from experiments.setup.players import planner_of
from experiments.setup.stages import Stage, base_folder, stages_of
from experiments.studies import conditions, conditions_tables
from experiments.studies.conditions_tables import read_played
from marl.common.errors import UserError
from marl.common.files import csv_rows, read_json, unpacked, write_json
from marl.decoding import memory
from marl.metrics.stats import Interval, seed_mean
from marl.metrics.tables import ArmRun, ablation_table
from marl.planning.planner import PlannerConfig
from marl.storage.checkpoint import folder_digest, load_policy, read_card, save_policy
from marl.storage.folder import CARD, REFERENCE
from tests.composing import BRIEF, cases, composed_once, configure
from tests.runs import without_pages

SMALL = [
    "env=among_us", *BRIEF, "env.height=1", "env.walk_steps=1", "progress=false", "threads=1", "base.games=12",
    "base.lessons=[{players:random,steps:1}]", "model.hidden_size=32", "model.layers=1", "model.intermediate_size=64",
    "model.max_new_tokens=8",
]  # fmt: skip
TRAIN = [
    *SMALL, "name=tiny", "algo.iterations=1", "algo.games=4", "algo.concurrency=6",
    "algo.update.minibatches=1", "eval.games=0", "eval.every=0", "eval.final_games=4",
]  # fmt: skip
STUDY = [
    "comparison=among_us_speech", "name=small", "select=tiny-*", "arms=[]", "games=4", "seed=7", "concurrency=4",
    "threads=1", "progress=false",
]  # fmt: skip
CONDITIONS = {
    "as_trained": {},
    "crew_as_base": {"voices": {"crewmate": "base"}},
    "silent": {"voices": {"crewmate": "silence"}},
    "players_4": {"env": {"players": 4}},
    "players_5": {"env": {"players": 5}},
    "careful": {"cast": {"imposter": {"player": "careful"}, "crewmate": {"partners": 0}}, "temperature": 0.0},
    "planned": {"planner": {"iterations": 3, "lambdas": [0.01]}},
}


small_study = composed_once("conditions", *STUDY)


def study(runs: Path, *overrides: str, named: dict | None = None) -> DictConfig:
    cfg = small_study(f"runs={runs}", *overrides)
    cfg.conditions = CONDITIONS if named is None else named
    return cfg


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two seeds of one arm from one base, and a copy that stands for another arm."""
    folder = tmp_path_factory.mktemp("runs")
    with without_pages():
        for seed in (0, 1):
            train.main(configure("train", *TRAIN, "ablation=full", f"seed={seed}", f"runs={folder}"))
    other = shutil.copytree(run_of(folder, "full", 0), folder / "tiny-game_only-s0-0")
    write_json(other / CARD, {**read_json(other / CARD), "arm": "game_only", "run": other.name})
    return folder


@pytest.fixture(scope="module")
def played(runs: Path) -> Path:
    """The folder of a finished study."""
    cfg = study(runs)
    conditions.main(cfg)
    return Path(cfg.cells)


def cells_of(folder: Path) -> dict[str, dict]:
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def run_of(runs: Path, arm: str, seed: int) -> Path:
    (found,) = runs.glob(f"tiny-{arm}-s{seed}-*")
    return found


def of_run(cells: dict[str, dict], run: Path, **wanted: object) -> dict[str, dict]:
    """Returns the metrics of the run's only cell with these settings."""
    (found,) = (
        cell["metrics"]
        for name, cell in cells.items()
        if name.startswith(run.name) and all(cell["about"].get(key) == value for key, value in wanted.items())
    )
    return found


def assert_same(ours: dict[str, dict], theirs: dict[str, dict]) -> None:
    """Asserts equal metrics, up to the rounding of probabilities in float32. Values of losses and rewards are left out,
    since only training has them."""
    theirs = {name: figures for name, figures in theirs.items() if not name.startswith(("loss/", "reward/"))}
    assert ours.keys() == theirs.keys() and "game/win_rate/crewmates" in ours
    for name, figures in ours.items():
        a, b = (vars(Interval.from_json(each)) for each in (figures, theirs[name]))
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6, nan_ok=True), name


def usual(run: Path) -> dict[str, object]:
    """Settings of the run's own evaluation."""
    config = OmegaConf.load(run / "config.yaml")
    return {"env": OmegaConf.to_container(config.env), "voices": {}, "temperature": 1.0, "planner": None,
            "cast": OmegaConf.to_container(config.cast)}  # fmt: skip


def test_as_trained_is_the_runs_own_evaluation(runs: Path, played: Path) -> None:
    for run in runs.glob("tiny-*"):
        own = json.loads((run / "run.json").read_text())["figures"]["trained"]
        assert_same(of_run(cells_of(played), run, **usual(run)), own)


def test_the_figures_are_those_of_evaluate(runs: Path, played: Path, tmp_path: Path) -> None:
    """Conditions give the metrics of `experiments.evaluate`: with another voice, in another game, and with planned
    votes."""
    run = run_of(runs, "full", 0)
    common = [*SMALL, "games=4", "concurrency=4", f"out={tmp_path}", f"cache={runs / 'bases'}"]
    how = {"planner": asdict(PlannerConfig(iterations=3, lambdas=(0.01,)))}
    planned = json.loads(json.dumps(how))  # as it is written
    for player, extra, changed in (
        (f"{run}", ["voices=[base]"], {"voices": {"crewmate": "base"}}),
        (f"{run}", ["env.players=4"], {"env": {**usual(run)["env"], "players": 4}}),
        (f"{run}+plan", ["planner=pikl", "planner.iterations=3", "planner.lambdas=[0.01]"], planned),
    ):
        with pytest.MonkeyPatch.context() as patch:  # what the command line would say wins over the run
            if extra[0].startswith("env."):
                patch.setattr(evaluate, "as_in_runs", lambda cfg, names: cfg)
            evaluate.main(configure("evaluate", *common, f"players=[{player},base]", *extra))
        (theirs,) = json.loads((tmp_path / "evaluation.json").read_text())["conditions"].values()
        assert_same(of_run(cells_of(played), run, **{**usual(run), **changed}), theirs)


def test_conditions_differ_in_what_they_change(runs: Path, played: Path) -> None:
    cells, run = cells_of(played), run_of(runs, "full", 0)
    silent = of_run(cells, run, voices={"crewmate": "silence"})
    assert "vote/imposter" in silent and "talk/names" not in silent
    assert "talk/names" in of_run(cells, run, **usual(run))
    # as trained = five players; a base in its own voice = as trained
    of_base = [name for name in cells if name.startswith("among_us-scripted")]
    assert len(cells) == 3 * 6 + len(of_base) and len(of_base) == 5


def test_the_table(runs: Path, played: Path) -> None:
    rows, per_seed = (csv_rows(played / f"small{part}") for part in (".csv.gz", "_per_seed.csv.gz"))
    assert list(rows[0]) == ["arm", "condition", "metric", "mean", "low", "high", "seeds", "games"]
    assert all(all(row.values()) for row in rows)
    assert list(dict.fromkeys(row["arm"] for row in rows)) == ["base", "RL", "RL+L+S"]
    assert {row["condition"] for row in rows} == set(CONDITIONS)
    for condition in CONDITIONS:
        wins = {r["arm"]: r for r in rows if (r["condition"], r["metric"]) == (condition, "game/win_rate/crewmates")}
        own = [
            float(r["mean"])
            for r in per_seed
            if (r["arm"], r["condition"], r["metric"]) == ("RL+L+S", condition, "game/win_rate/crewmates")
        ]
        expected = seed_mean(own)
        assert len(own) == 2 and float(wins["RL+L+S"]["mean"]) == pytest.approx(expected.mean, rel=1e-4)
        assert float(wins["RL+L+S"]["low"]) == pytest.approx(max(expected.low, 0), rel=1e-4, abs=1e-4)
        assert (wins["base"]["seeds"], wins["RL+L+S"]["seeds"], wins["RL"]["seeds"]) == ("1", "2", "1")
        assert (wins["RL+L+S"]["games"], wins["RL"]["games"]) == ("8", "4")
    differences = csv_rows(played / "small_differences.csv.gz")
    assert {row["condition"] for row in differences} == {f"{name} - as_trained" for name in [*CONDITIONS][1:]}
    same = [float(row["mean"]) for row in differences if row["condition"] == "players_5 - as_trained"]
    assert same and not any(same)
    assert "<svg" in (played / "small.svg").read_text()


def test_differences_are_to_the_reference_and_between_arms() -> None:
    def runs(*wins: float) -> list[ArmRun]:
        arms = [(arm, seed) for arm in ("RL", "RL+L+S") for seed in (0, 1)]
        return [
            ArmRun(arm, seed, {"vote/imposter": Interval(mean, 0, 1, 10)})
            for (arm, seed), mean in zip(arms, wins, strict=True)
        ]

    played = {"small": runs(0.1, 0.2, 0.3, 0.4), "usual": runs(0.5, 0.6, 0.9, 0.8), "large": runs(0.2, 0.2, 0.2, 0.2)}
    found = {
        (name, row.arm): round(row.mean, 6)
        for name, rows in conditions_tables.differences(played, ["vote/imposter"], "usual").items()
        for row in rows
    }
    assert found == {
        ("small - usual", "RL"): -0.4, ("small - usual", "RL+L+S"): -0.5, ("large - usual", "RL"): -0.35,
        ("large - usual", "RL+L+S"): -0.65, ("small", "RL+L+S - RL"): 0.2, ("usual", "RL+L+S - RL"): 0.3,
        ("large", "RL+L+S - RL"): 0.0,
    }  # fmt: skip
    assert "usual - small" in conditions_tables.differences(played, ["vote/imposter"])  # first by default


def test_arms_of_deal_or_no_deal_are_compared_with_the_games_reward() -> None:
    scores = {"base": 3.0, "game_only": 12.0, "full": 11.5}
    runs = [
        ArmRun(arm, seed, {"game/score": Interval(score, 0, 1, 10)}) for arm, score in scores.items() for seed in (0, 1)
    ]
    rows = conditions_tables.differences({"as_trained": runs}, ["game/score"])["as_trained"]
    assert [(row.arm, row.mean) for row in rows] == [("full - game_only", -0.5)]


def test_a_finished_study_only_tabulates(runs: Path, played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in played.glob("*.json")}
    table = (played / "small.csv.gz").read_bytes()
    (played / "small.csv.gz").unlink()
    conditions.main(study(runs))
    said = capsys.readouterr().out
    assert "0 of 23 cells are still to be played" in said
    assert "the arms' means are not over the same seeds: RL 0; RL+L+S 0, 1" in said
    assert {path: path.stat().st_mtime_ns for path in played.glob("*.json")} == before
    assert (played / "small.csv.gz").read_bytes() == table


def test_tables_and_figure_are_made_again_from_the_figures_of_each_run(
    played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "entrants", lambda *args: pytest.fail("a run was looked for"))
    conditions.main(study(Path("none"), f"data={played / 'small_per_seed.csv.gz'}", f"publish={tmp_path}"))
    names = {"small.csv.gz", "small_differences.csv.gz", "small.svg"}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        name: (played / name).read_bytes() for name in names
    }
    again = [f"data={played / 'small_per_seed.csv.gz'}", f"publish={tmp_path}"]
    conditions.main(study(Path("none"), *again, "headline=as_trained"))
    header, *lines = unpacked(tmp_path / "small.csv.gz").splitlines()
    assert header.replace("condition,", "") == (tmp_path / "table.csv").read_text().splitlines()[0]
    own = [line.replace(",as_trained,", ",") for line in lines if ",as_trained," in line]
    assert own == (tmp_path / "table.csv").read_text().splitlines()[1:] and own
    with pytest.raises(UserError, match="headline=usual: must be one of the conditions, as_trained, "):
        conditions.main(study(Path("none"), *again, "headline=usual"))
    with pytest.raises(UserError, match="reference=usual: must be one of the conditions, as_trained, "):
        conditions.main(study(Path("none"), f"data={played / 'small_per_seed.csv.gz'}", "reference=usual"))
    for data, said in (("none.csv", "cannot be read"), (played / "small.csv.gz", "expected the columns arm, seed")):
        with pytest.raises(UserError, match=rf"data={data}: .*{said}"):
            conditions.main(study(Path("none"), f"data={data}", f"publish={tmp_path}"))


RESULTS = Path(conditions.__file__).parents[1] / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*_per_seed.csv.gz")), ids=lambda path: path.name)
def test_published_tables_are_those_of_the_published_figures_of_each_run(path: Path) -> None:
    made = {(r.arm, c, r.metric): r for c, runs in read_played(path).items() for r in ablation_table(runs)}
    rows = csv_rows(path.with_name(path.name.replace("_per_seed.csv.gz", ".csv.gz")))
    assert len(rows) == len(made)
    for row in rows:
        own = made[row["arm"], row["condition"], row["metric"]]
        found = [float(row[name]) for name in ("mean", "low", "high")]
        assert found == pytest.approx([own.mean, own.low, own.high], rel=1e-3, abs=1e-4), row


@pytest.mark.slow
def test_learners_are_played_as_they_were_after_an_iteration(tmp_path: Path) -> None:
    rounds = ["algo.iterations=2", "algo.alternate=1", "checkpoint.every=1", "cast.imposter.player=rival"]
    train.main(configure("train", *TRAIN, *rounds, "ablation=full", "arm=turns", "seed=0", f"runs={tmp_path}"))
    run = run_of(tmp_path, "turns", 0)
    begun, turned, ended = stages_of(run, "learner")
    of_rival = stages_of(run, "rival")
    assert [stage.iteration for stage in of_rival] == [0, 1, 2] and ended.folder == run / "policy"

    def weights(stage: Stage) -> bytes:
        return b"".join(each.numpy().tobytes() for each in stage.load(torch.device("cpu"), 0).lm.state_dict().values())

    moved = {name: [weights(stage) for stage in stages_of(run, name)] for name in ("learner", "rival")}
    assert moved["learner"][0] != moved["learner"][1] == moved["learner"][2]  # the learner's turn, then the rival's
    assert moved["rival"][0] == moved["rival"][1] != moved["rival"][2]

    named = {"at_first": {"iteration": 0}, "between": {"iteration": 1}, "at_last": {"iteration": 2}, "as_is": {}}
    conditions.main(study(tmp_path, named=named))
    cells = cells_of(Path(study(tmp_path).cells))
    of_run = [cell for name, cell in cells.items() if name.startswith(run.name)]
    assert len(of_run) == 3 and len(cells) == 4  # iteration 2 and `as_is` share a cell, and the base has one
    (of_base,) = (cell for cell in cells.values() if cell["about"]["arm"] == "base")
    by_player = {cell["about"]["players"]["learner"]: cell["metrics"] for cell in of_run}
    assert by_player[begun.digest] == of_base["metrics"]
    assert set(by_player) == {begun.digest, turned.digest, ended.digest}

    halfway = run / "checkpoints" / "iteration-000001" / "learner.safetensors"
    weights_then = load_file(halfway)
    name = next(name for name in weights_then if "mlp" in name)
    save_file({key: value for key, value in weights_then.items() if key != name}, halfway)
    with pytest.raises(UserError, match=f"learner.safetensors does not fit the policy in .*missing .*{name}"):
        turned.load(torch.device("cpu"))
    save_file(weights_then, halfway)

    foreign = run.with_name("another-s0-00000000")  # a copy, with this run's settings and checkpoints
    shutil.copytree(run, foreign)
    write_json(foreign / CARD, {**read_json(run / CARD), "run": foreign.name})
    assert [stage.iteration for stage in stages_of(foreign, "learner")] == [0, 2]


def test_what_does_not_fit_is_refused_before_it_is_played(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 100_000)
    with pytest.raises(UserError, match=r"^Not enough memory: even concurrency=1 needs"):
        conditions.main(study(runs, "name=too_large", f"cells={runs / 'too_large'}"))


def test_a_crew_plays_with_the_next_seed(runs: Path, tmp_path: Path) -> None:
    """The crews of two seeds play beside each other. Their common base plays beside itself."""
    base, lone, *pair = found = conditions.entrants(runs, "tiny-*", [])
    assert [conditions.stranger(entrant, found) for entrant in pair] == [str(each.run) for each in pair[::-1]]
    assert conditions.stranger(base, found) == "base"
    other = replace(base, seed=1, base=tmp_path)
    assert conditions.stranger(base, [*found, other]) == str(tmp_path)
    with pytest.raises(UserError, match=r"there is no other seed of its arm\. Select more runs"):
        conditions.stranger(lone, found)
    named = {"alone": {"cast": {"crewmate": {"partners": 0}}},
             "crossed": {"cast": {"crewmate": {"partner": "next_seed", "partners": 2}}}}  # fmt: skip
    cfg = study(runs, "select=tiny-full-*", "name=crossed", f"cells={tmp_path}", "reference=alone", named=named)
    cfg = OmegaConf.merge(cfg, {"talk": 1, "metrics": ["talk/influence", "game/meetings"]})
    conditions.main(cfg)
    there = {row["metric"] for row in csv_rows(tmp_path / "crossed.csv.gz")}
    assert there == {"talk/influence", "game/meetings"}  # talk is measured as well
    partners = {
        cell["about"]["cast"]["crewmate"]["partner"]
        for cell in cells_of(tmp_path).values()
        if cell["about"]["arm"] == "RL+L+S" and cell["about"]["cast"]["crewmate"]["partners"]
    }
    assert partners == {str(entrant.run) for entrant in pair}
    assert (tmp_path / "crossed_differences.csv.gz").is_file()


def test_each_seeds_own_base_is_an_entrant(runs: Path, tmp_path: Path) -> None:
    """A base counts once, however many runs started from it."""
    found = conditions.entrants(runs, "tiny-*", [])
    assert [(e.arm, e.seed) for e in found] == [("base", 0), ("RL", 0), ("RL+L+S", 0), ("RL+L+S", 1)]
    assert len({e.base for e in found}) == 1
    for run in (run_of(runs, "full", 0), run_of(runs, "full", 1)):
        shutil.copytree(run, tmp_path / run.name)
    base = base_folder(run_of(runs, "full", 0))
    shutil.copytree(base, tmp_path / "bases" / base.name)
    other = load_policy(base, torch.device("cpu"))
    with torch.no_grad():
        next(other.parameters()).mul_(0.5)
    save_policy(tmp_path / "bases" / "another", other, {"game": "among_us"})
    run = run_of(tmp_path, "full", 1)
    card = run / "policy" / "policy.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "base": "moved/another"}))
    digest = folder_digest(tmp_path / "bases" / "another")
    (run / CARD).write_text(json.dumps({**read_json(run / CARD), "base_digest": digest}))
    found = [e for e in conditions.entrants(tmp_path, "tiny-*", []) if e.arm == "base"]
    assert [(e.seed, e.name) for e in found] == [(0, base.name), (1, "another")]


def test_a_base_made_again_under_its_name_is_not_the_runs(runs: Path, tmp_path: Path) -> None:
    """The run's own copy of its base is played. Without that copy the condition is refused."""
    run = tmp_path / run_of(runs, "full", 0).name
    shutil.copytree(run_of(runs, "full", 0), run)
    trained = load_policy(run / "policy", torch.device("cpu"))
    card = {**read_card(run / "policy"), "base": f"moved/{base_folder(run).name}"}
    save_policy(run / "policy", trained, {key: card[key] for key in ("game", "base", "run", "learner")})
    there = tmp_path / "bases" / base_folder(runs / run.name).name
    other = load_policy(base_folder(runs / run.name), torch.device("cpu"))
    with torch.no_grad():
        next(other.parameters()).mul_(0.5)
    save_policy(there, other, {"game": "among_us"})

    assert base_folder(run) == run / REFERENCE
    named = {"as_trained": {}}
    conditions.main(study(tmp_path, named=named))
    own = read_json(run / CARD)["figures"]["trained"]
    assert_same(of_run(cells_of(Path(study(tmp_path).cells)), run, **usual(run)), own)

    shutil.rmtree(run / REFERENCE)
    with pytest.raises(
        UserError, match=f"{there.name} is not the base that .*{run.name} began with: it was made again"
    ):
        base_folder(run)
    with pytest.raises(UserError, match="is not the base that"):
        entrants.base_beside(str(run), "among_us")


def test_published_figures_stand_beside_ours(runs: Path, played: Path, tmp_path: Path) -> None:
    path = tmp_path / "published.csv"
    path.write_text("arm,setting,value,mean\nRL,players,4,0.25\n")
    assert conditions_tables.published_points(path) == {("RL", "players_4"): 0.25}
    conditions.main(study(runs, f"published={path}", f"publish={tmp_path}"))
    cards = [json.loads(line)["run"] for line in (tmp_path / "cards.jsonl").read_text().splitlines()]
    assert {card.partition("@")[0] for card in cards} == {run.name for run in runs.glob("tiny-*")}
    assert "(open: published)" in (tmp_path / "small.svg").read_text()
    path.write_text("arm,mean\nRL,0.25\n")
    with pytest.raises(UserError, match=r"published\.csv: expected the columns arm, setting, value, mean"):
        conditions_tables.published_points(path)


def test_shipped_studies_can_be_played_by_these_runs(runs: Path) -> None:
    names = (
        "among_us_generalisation", "among_us_speech", "among_us_iterated", "among_us_crossplay", "among_us_talk",
        "dond_talk",
    )  # fmt: skip
    shipped = {name: configure("conditions", f"comparison={name}") for name in names}
    found = conditions.entrants(runs, "tiny-*", [])
    entrant = found[-1]
    for name, cfg in shipped.items():
        assert cfg.name == name
        for condition, changes in conditions.read_conditions(cfg).items():
            here = replace(changes, iteration=changes.iteration and 1)  # these runs have one iteration
            assert conditions.cell_of(entrant, condition, here, cfg, found).condition == condition
    sweep = configure("train", "sweep=among_us_iterated")
    asked = {each.iteration for each in conditions.read_conditions(shipped["among_us_iterated"]).values()} - {None, 0}
    kept = range(sweep.checkpoint.every, sweep.algo.iterations, sweep.checkpoint.every)
    assert asked == set(kept) and len(kept) < sweep.checkpoint.keep
    settings = {
        (key, str(value))
        for name in shipped["among_us_generalisation"].conditions
        for key, value in [name.rsplit("_", 1)]
    }
    published = csv_rows(Path(__file__).parents[3] / shipped["among_us_generalisation"].published)
    assert {(row["setting"], row["value"]) for row in published} == settings


def test_others_plan_as_in_the_run(runs: Path) -> None:
    """Partners plan by the settings of the entrant's run. Other settings of the planner give the partner another name
    in cells."""
    entrant = conditions.entrants(runs, "tiny-*", ["game_only"])[-1]
    planner = asdict(PlannerConfig(lambdas=(3.0,), choose="own"))
    other = replace(entrant, config={**entrant.config, "algo": {**entrant.config["algo"], "planner": planner}})
    plans = [planner_of(each.limits) for each in (entrant, other)]
    assert plans == [PlannerConfig(), PlannerConfig(lambdas=(3.0,))]
    names = [conditions.identity_of("base+plan", each) for each in (entrant, other)]
    assert names[0] != names[1] and conditions.identity_of("base", entrant) == conditions.identity_of("base", other)


def test_points_of_a_setting_share_a_panel() -> None:
    found = conditions_tables.panels(["as_trained", "players_4", "players_6", "shape_2x1", "no_frozen_crewmate"])
    assert found == {
        "": ["as_trained", "no_frozen_crewmate"], "players": ["players_4", "players_6"], "shape": ["shape_2x1"]
    }  # fmt: skip


@cases(r"""
conditions={} | the comparison small names none
select=none-* | select=none-\*: no finished run in .* has such a name
where={env.shape: 0} | where.env.shape=0: no selected run has such a setting; the nearest
where={seed: 5} | where.seed=5: none of the selected runs has it; theirs: 0, 1
arms=[fulll] | is of arm fulll; there are full, game_only
reference=usual | reference=usual: must be one of the conditions, as_trained,
games=0 | games=0: must be a whole number, at least 1
metrics=[game/wins] | game/wins is no metric
published=missing.csv | published=missing.csv: the file cannot be read
conditions={a: 3} | conditions.a=3: must be a group of settings
conditions={a: {envv: {}}} | conditions.a: .*envv is no setting.*known: cast, env, iteration, planner, temperature
conditions={a: {env: 3}} | conditions.a: condition.env=3: must be a group of settings
conditions={a: {env: {player: 4}}} | conditions.a: env.*player
conditions={a: {env: {players: 9}}} | conditions.a: env.players must be a whole number from 4 to 7
conditions={a: {planner: {lambdas: [-1]}}} | conditions.a: planner.lambdas=.*name at least one, each 0
conditions={a: {planner: {choose: own}}} | conditions.a: planner.choose=own is for training
conditions={a: {planner: {}, voices: {crewmate: base}}} | conditions.a: planner, voices=.*sends its own messages
conditions={a: {iteration: -1}} | conditions.a: iteration=-1: must be at least 0
conditions={a: {iteration: 7}} | iteration=7: tiny-.* has its learner after 0, 1; checkpoint.every
conditions={a: {temperature: -1}} | conditions.a: temperature=-1.0
conditions={a: {cast: {imposter: careful}}} | conditions.a: cast.imposter=careful: must be a group
conditions={a: {cast: {imposter: {player: nobody}}}} | conditions.a: cast.imposter: nobody is none of learner
conditions={a: {cast: {imposter: {player: rival}}}} | conditions.a: cast: there is no rival in
conditions={a: {cast: {crewmate: {partners: 7}}}} | conditions.a: cast.crewmate.partners=7
conditions={a: {voices: {pilot: base}}} | conditions.a: voices.pilot=base: there is no such role
conditions={a: {voices: {crewmate: loud}}} | conditions.a: voices.crewmate=loud: must be learner, base
conditions={a: {voices: {imposter: base}, cast: {imposter: {player: careful}}}} | careful is no language model
""")
def test_mistakes_are_refused_before_any_game(overrides: list[str], said: str, runs: Path, tmp_path: Path) -> None:
    setting = " ".join(overrides)
    own = yaml.safe_load(setting.partition("=")[2]) if setting.startswith("conditions=") else None
    with pytest.raises(UserError, match=said) as error:
        conditions.main(study(runs, f"cells={tmp_path}", *([] if own is not None else [setting]), named=own))
    assert "\n" not in str(error.value) and not cells_of(tmp_path)


def test_talk_that_cannot_be_measured_is_refused_before_any_game(runs: Path, tmp_path: Path) -> None:
    for changes, said in (
        ({"temperature": 0.0}, r"conditions\.a: talk=1, temperature=0: no likelihood"),
        ({"voices": {"crewmate": "silence"}}, r"conditions\.a: talk=1, voices=.*crewmate.*silence.*not measured"),
    ):
        cfg = study(runs, "talk=1", f"cells={tmp_path}", named={"a": changes})
        with pytest.raises(UserError, match=said):
            conditions.main(cfg)
    with pytest.raises(UserError, match=r"talk=1: talk is not measured in env\.game=diplomacy"):
        conditions.check_talk(1, "diplomacy", {}, 1.0)
    assert not cells_of(tmp_path)


def test_two_runs_of_one_arm_and_seed_are_refused(runs: Path, tmp_path: Path) -> None:
    for run in runs.glob("tiny-*"):
        (tmp_path / run.name).symlink_to(run)
    again = shutil.copytree(run_of(runs, "full", 1), tmp_path / "tiny-again")
    config = OmegaConf.load(again / "config.yaml")
    config.env.shaping = 0.2
    OmegaConf.save(config, again / "config.yaml")
    with pytest.raises(UserError, match=r"are of seed 1 and are both arm full; .*, or settings in `where`"):
        conditions.entrants(tmp_path, "tiny-*", [])
    found = conditions.entrants(tmp_path, "tiny-*", [], OmegaConf.create({"env.shaping": 0}))
    assert [(e.arm, e.seed) for e in found] == [("base", 0), ("RL", 0), ("RL+L+S", 0), ("RL+L+S", 1)]

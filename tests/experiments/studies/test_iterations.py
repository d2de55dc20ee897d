"""Statistics of iterations against every single game, against hand-made curves, and in small real runs."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from omegaconf import OmegaConf

from experiments import train
from experiments.studies import crossplay, iterations
from experiments.studies.iterations import correlation, plateau
from marl.common.errors import UserError
from marl.common.files import csv_rows
from marl.metrics.stats import Interval, seed_mean, wilson
from tests.composing import cases, composed_once, configure
from tests.experiments.studies.test_frontier import TEST
from tests.human_dialogues import ROWS, games_of, write
from tests.runs import logged


def test_the_correlation_is_that_of_all_single_scores() -> None:
    rng = np.random.default_rng(0)
    scores = [rng.integers(0, 11, size=size) + 0.5 * k for k, size in enumerate((40, 7, 90, 15))]
    iteration = np.repeat(np.arange(4), [len(each) for each in scores])
    expected = np.corrcoef(iteration, np.concatenate(scores))[0, 1]
    moments = [each.mean() for each in scores], [each.std() for each in scores], [len(each) for each in scores]
    assert correlation(range(4), *moments) == pytest.approx(expected)
    assert correlation(range(4), moments[0]) == pytest.approx(np.corrcoef(range(4), moments[0])[0, 1])
    assert math.isnan(correlation(range(3), [2, 2, 2], [0, 0, 0], [5, 5, 5]))


@pytest.mark.parametrize(
    ("means", "error", "expected"),
    [
        ([1, 3, 5, 7], 0.1, 30),  # rises to the end
        ([1, 3, 5, 5.1, 5.2], 0.1, 20),
        ([1, 3, 5, 5.1, 5.3], 0.1, 30),  # .3 is more than 1.96 * .1414, .2 is not
        ([5, 3, 1], 0.1, 0),  # never above its start
        ([1, 5, 3, 4], 0.1, 10),  # the best, though worse ones follow
        ([1, 3, 5], 9.0, 0),  # no rise beyond the noise
    ],
)
def test_a_plateau_is_what_no_later_iteration_beats(means: list[float], error: float, expected: int) -> None:
    assert plateau([10 * k for k in range(len(means))], means, [error] * len(means)) == expected


def run(
    runs: Path, name: str, arm: str, seed: int, scores: list[float], objective: float = 1.0,
    points: list[float] | None = None, tokens: int = 0, games: int = 500, **more: float,
) -> None:  # fmt: skip
    """Writes the files of a finished run that the command reads: evaluations of 100 games, half of which end in a
    deal."""
    folder = runs / name
    folder.mkdir()
    config = {"env": {"game": "dond", "objective": objective}, "algo": {"games": games}, "arm": arm, "seed": seed}
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    (folder / "run.json").write_text(json.dumps({"arm": arm, "seeds": [seed], "command": f"train.py runs={runs}"}))
    lines = [
        {"iteration": i, "phase": phase, "game/score": score, "game/score_sd": 2.0, "game/agreement": 0.5,
         "game/score_agreed": 2 * score, "game/score_agreed_sd": 1.0, "rollout/games": 100, "talk/turns": 6 - i,
         "game/points": points[i] if points else 4, "rollout/tokens": tokens, **more}
        for i, score in enumerate(scores)
        for phase in ("train", "eval")[i == 0 :]
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    clock = {
        "speed/update_tokens_per_second": 1.5 * tokens,
        "time/update": 2 / 3,
    }  # all that was played is learned from
    rows = [{"iteration": i, "phase": "train", **clock} for i in range(1, len(scores)) if tokens]
    (folder / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ceiling = {"game/score_ceiling": Interval(15.2, 15.0, 15.4, 1000).to_json()}
    (folder / "evaluation.json").write_text(json.dumps({"conditions": {"trained": ceiling}}))


settings = composed_once("iterations")


def collect(runs: Path, *overrides: str, drawn: bool = False) -> Path:
    cfg = settings(f"runs={runs}", "select=x-*", *overrides)
    with nullcontext() if drawn else patch.object(iterations, "draw"):
        iterations.main(cfg)
    return Path(cfg.publish or runs / "iterations")


def test_tables_of_hand_made_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "x-0", "cloned", 0, [1, 3, 5, 5.1])
    run(tmp_path, "x-1", "cloned", 1, [2, 4, 6, 8])
    run(tmp_path, "x-2", "alone", 0, [3, 3, 3, 4], objective=0.0)
    for seed, points in enumerate(([4, 5, 9, 9], [4, 6, 8.5, 9])):  # scores never vary
        run(tmp_path, f"x-3-{seed}", "cloned", seed, [0] * 4, -1.0, points)
    out = collect(tmp_path, "published=experiments/results/dond_selfplay/published.csv", "headline=true", drawn=True)
    found = {
        (r["objective"], r["arm"], r["figure"]): Interval(float(r["mean"]), float(r["low"]), float(r["high"]), 0)
        for r in csv_rows(out / "iterations_summary.csv")
    }
    metrics = {row["metric"] for row in csv_rows(out / "iterations.csv.gz") if row["objective"] == "-1"}
    assert "game/points" in metrics and not any(name.startswith("game/score") for name in metrics)
    each = [
        correlation(range(4), scores, [2] * 4, [100] * 4) for scores in ([1, 3, 5, 5.1], [2, 4, 6, 8])
    ]  # fmt: skip
    expected = seed_mean(each)
    ours = found["1", "cloned", "correlation/games"]
    assert (ours.mean, ours.low, ours.high) == pytest.approx((expected.mean, expected.low, 1), rel=1e-4)
    agreed = [correlation(range(4), np.array(s) * 2, [1] * 4, [50] * 4) for s in ([1, 3, 5, 5.1], [2, 4, 6, 8])]
    assert found["1", "cloned", "correlation/agreed_games"].mean == pytest.approx(np.mean(agreed), rel=1e-4)
    assert found["1", "cloned", "correlation/means"].mean > ours.mean
    assert found["1", "cloned", "plateau/seeds"].mean == 2.5  # iterations 2 and 3; standard errors are .2
    assert found["1", "cloned", "plateau/mean"].mean == 3
    assert found["0", "alone", "plateau/seeds"].mean == 3
    of_points = {figure: own for (objective, _, figure), own in found.items() if objective == "-1"}
    assert {"correlation/means", "plateau/seeds", "plateau/mean"} <= of_points.keys()
    assert of_points["plateau/seeds"].mean == 2 and "correlation/games" not in of_points  # the spread is not known
    rs = [np.corrcoef(range(4), points)[0, 1] for points in ([4, 5, 9, 9], [4, 6, 8.5, 9])]
    assert of_points["correlation/means"].mean == pytest.approx(np.mean(rs), rel=1e-4)
    assert of_points["points/at_equal_games"].mean == 9
    by_arm = {
        (r["objective"], r["arm"], r["iteration"], r["metric"]): r for r in csv_rows(out / "iterations_by_arm.csv.gz")
    }
    row, mean = by_arm["1", "cloned", "1", "game/score"], seed_mean([3, 4])
    assert (float(row["mean"]), float(row["low"]), row["seeds"]) == (3.5, pytest.approx(mean.low, rel=1e-4), "2")
    agree, both = by_arm["1", "cloned", "1", "game/agreement"], wilson(100, 200)  # half of either seed's 100 games
    assert (float(agree["low"]), float(agree["high"])) == pytest.approx((both.low, both.high), rel=1e-4)
    equal = found["1", "cloned", "agreement/at_equal_games"]
    assert (equal.mean, equal.low, equal.high) == pytest.approx((0.5, both.low, both.high), rel=1e-4)
    trained = found["1", "cloned", "trained/at_equal_games"]
    assert trained.low == trained.mean == trained.high  # by construction
    alone = by_arm["0", "alone", "0", "game/score"]
    assert float(alone["high"]) - 3 == pytest.approx(1.96 * 0.2, rel=1e-3)  # over 100 games of deviation 2
    assert by_arm["0", "alone", "0", "game/agreement"]["low"] == f"{0.403832:.6g}"  # Wilson, 50 of 100
    [end] = [r for r in csv_rows(out / "table.csv") if r["metric"] == "game/score"]  # of the largest objective alone
    assert (end["arm"], end["mean"], end["seeds"], end["games"]) == ("cloned", f"{(5.1 + 8) / 2:.6g}", "2", "200")
    first, drawn = {}, (out / "iterations.svg").read_text()
    for path in out.iterdir():
        first[path.name] = path.read_bytes()
    assert "GPT-3.5, published" in drawn and "from 300 human games, published" in drawn
    again = tmp_path / "again"  # from the data alone
    iterations.main(settings(f"data={out / 'iterations.csv.gz'}", f"publish={again}", "headline=true",
                              "published=experiments/results/dond_selfplay/published.csv"))  # fmt: skip
    assert {path.name: path.read_bytes() for path in again.iterdir()} == {
        name: found for name, found in first.items() if name != "iterations.csv.gz"
    }
    iterations.main(settings(f"data={out / 'iterations.csv.gz'}", f"publish={again}", "over=passes"))
    assert "thousand token passes" in (again / "iterations.svg").read_text()
    assert "plateau/mean" in capsys.readouterr().out


def by_name(path: Path, *names: str) -> dict[tuple[str, ...], dict[str, str]]:
    return {tuple(row[name] for name in names): row for row in csv_rows(path)}


def test_intervals_of_one_policy_are_over_its_games_and_of_shares_within_0_and_1(tmp_path: Path) -> None:
    """All seeds start from one base, which plays the same games, so its interval cannot be over seeds."""
    for seed, (end, inverted) in enumerate([(0.99, 0.0), (1.0, 0.3), (0.9, 0.0)]):
        run(tmp_path, f"x-{seed}", "cloned", seed, [8.08, 9 + seed])
        path = tmp_path / f"x-{seed}" / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["talk/inverted"] = inverted if line["iteration"] else 0.05
            line["game/agreement"] = end if line["iteration"] else 0.58
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = by_name(collect(tmp_path) / "iterations_by_arm.csv.gz", "iteration", "metric")
    base = found["0", "game/score"]
    assert float(base["high"]) - 8.08 == pytest.approx(1.96 * 0.2, rel=1e-3) and base["seeds"] == "3"
    assert found["0", "game/agreement"]["low"] == f"{wilson(58, 100).low:.6g}"
    mean = seed_mean([9, 10, 11])
    assert float(found["1", "game/score"]["low"]) == pytest.approx(mean.low, rel=1e-4)
    assert (found["1", "game/agreement"]["high"], found["1", "talk/inverted"]["low"]) == ("1", "0")
    figures = by_name(tmp_path / "iterations" / "iterations_summary.csv", "figure")
    plateaus = figures["plateau/seeds",]
    assert 0 <= float(plateaus["low"]) <= float(plateaus["high"]) <= 1


def test_arms_are_compared_at_equal_games_and_at_equal_compute(tmp_path: Path) -> None:
    """filtered_bc plays 4 rounds of 500 games and a million tokens, each played once and learned from in 3 passes (4
    million token passes a round). full plays 10 rounds of 100 games and half a million tokens."""
    cloned = ([1, 3, 5, 6, 8], [2, 4, 6, 8, 9])
    for seed, scores in enumerate(cloned):
        run(tmp_path, f"x-{seed}", "filtered_bc", seed, scores, tokens=1_000_000)
    for seed, end in enumerate((8, 5, 6)):
        rising = [1 + i * (end - 1) / 10 for i in range(11)]
        run(tmp_path, f"x-full-{seed}", "full", seed, rising, games=100, tokens=500_000)
    run(tmp_path, "x-other", "alone", 0, [1, 2], objective=0.0)  # runs of another objective do not count
    found = by_name(collect(tmp_path) / "iterations_summary.csv", "objective", "arm", "figure")

    def mean(arm: str, figure: str) -> float:
        return float(found["1", arm, figure]["mean"])

    assert mean("full", "trained/at_equal_games") == mean("filtered_bc", "trained/at_equal_games") == 1000
    assert mean("filtered_bc", "score/at_equal_games") == 5.5  # after two rounds
    assert mean("full", "score/at_equal_games") == pytest.approx((8 + 5 + 6) / 3, rel=1e-5)
    assert mean("filtered_bc", "passes/at_equal_games") == 8000 and mean("full", "passes/at_equal_games") == 20_000
    assert mean("full", "passes/at_equal_compute") == 16_000  # all of filtered_bc, eight rounds of full
    of_full = [1 + 8 * (end - 1) / 10 for end in (8, 5, 6)]
    expected = seed_mean(of_full)
    row = found["1", "full", "score/at_equal_compute"]
    assert [float(row[end]) for end in ("mean", "low", "high")] == pytest.approx(
        [expected.mean, expected.low, expected.high], rel=1e-4
    )
    assert mean("filtered_bc", "score/at_equal_compute") == 8.5 and row["seeds"] == "3"
    difference = found["1", "full - filtered_bc", "score/at_equal_compute"]
    paired = seed_mean([of_full[0] - 8, of_full[1] - 9])
    assert [float(difference[end]) for end in ("mean", "low")] == pytest.approx([paired.mean, paired.low], rel=1e-4)
    assert difference["seeds"] == "2" and ("1", "full - filtered_bc", "agreement/at_equal_games") in found
    assert ("0", "alone", "score/at_equal_games") in found and ("0", "alone", "score/at_equal_compute") not in found
    again = by_name(collect(tmp_path, "reference=full") / "iterations_summary.csv", "objective", "arm", "figure")
    assert float(again["1", "filtered_bc - full", "score/at_equal_compute"]["mean"]) == -float(difference["mean"])
    assert iterations.along({0: {"trained": 0, "m": 1}, 1: {"trained": 200, "m": 2}}, "trained", "m", 50) == 1.25


def test_settings_tell_runs_of_one_arm_apart(tmp_path: Path) -> None:
    run(tmp_path, "x-0", "a", 0, [1, 2])
    run(tmp_path, "x-1", "a", 0, [1, 2], games=250)
    found = csv_rows(collect(tmp_path, "where={algo.games: 250}") / "iterations.csv.gz")
    assert {row["trained"] for row in found} == {"0", "250"}
    for seed, objective in ((1, -0.5), (2, 0.0)):
        run(tmp_path, f"x-further-{seed}", "a", seed, [1, 2], objective, games=250)
    found = csv_rows(collect(tmp_path, "where={algo.games: 250, env.objective: [0, 1]}") / "iterations.csv.gz")
    assert {(row["objective"], row["seed"]) for row in found} == {("0", "2"), ("1", "0")}


@cases(r"""
over=hours | over=hours: must be iteration, trained, passes, or null
data=x.csv | select and data: give one of them
published=missing.csv | published=missing.csv: the file cannot be read
select=y-* | select=y-\*: no finished run
select=[] | select=\[\]: must be names of runs' folders
 | x-0 and .*x-1 are both of objective 1, arm a and seed 0
select=[x-0,'*/x-0'] | two/x-0 and .*x-0 are both of objective 1, arm a and seed 0
""")
def test_what_cannot_be_told_is_refused(overrides: list[str], said: str, tmp_path: Path) -> None:
    run(tmp_path, "x-0", "a", 0, [1, 2])
    run(tmp_path, "x-1", "a", 0, [1, 2])
    (tmp_path / "two").mkdir()
    run(tmp_path / "two", "x-0", "a", 0, [1, 2])
    with pytest.raises(UserError, match=said):
        collect(tmp_path, *overrides)
    assert not (tmp_path / "iterations").exists() or not list((tmp_path / "iterations").iterdir())


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "expected lines of objective"),
        ("1,a,0,0,0,0,0,game/score,1\n", "expected lines of at least one game each"),
        ("1,a,0,0,0,0,9,game/score,nan\n", "expected lines of at least one game each"),
        ("1,a,0,0,0,0,9,game/score,5\n", "has no game/agreement of λ=1, arm a, seed 0, iteration 0"),
        ("1,a,0,0,0,0,9,game/agreement,.5\n", "has no game/score of λ=1, arm a, seed 0, iteration 0"),
        ("-1,a,0,2,0,0,9,game/agreement,.5\n-1,a,0,2,0,0,9,game/score,5\n", "has no game/points of λ=-1, arm a"),
    ],
)
def test_a_file_that_no_run_could_have_left_is_refused(lines: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(",".join(iterations.Line.__annotations__) + "\n" + lines)
    with pytest.raises(UserError, match=rf"data=.*x\.csv: {said}"):
        iterations.main(settings(f"data={tmp_path / 'x.csv'}"))


def test_what_is_published_says_what_made_it_and_keeps_its_name(tmp_path: Path) -> None:
    run(tmp_path, "x-0", "a", 0, [1, 2])
    out = collect(tmp_path, "name=starts", f"publish={tmp_path / 'page'}", drawn=True)
    assert json.loads((out / "cards.jsonl").read_text())["command"] == "train.py"  # no paths of this machine
    made = {path.name for path in out.glob("starts*")}
    assert made == {"starts.csv.gz", "starts_by_arm.csv.gz", "starts_summary.csv", "starts.svg"}
    for path in (*out.glob("starts_*"), out / "starts.svg"):
        path.unlink()
    iterations.main(settings(f"data={out / 'starts.csv.gz'}"))  # drawn again, under the same names
    assert {path.name for path in out.iterdir()} == made | {"cards.jsonl"}


def test_a_runs_objective_is_that_of_its_evaluation(tmp_path: Path) -> None:
    run(tmp_path, "x-0", "a", 0, [1, 2], objective=-1.0)
    config = OmegaConf.load(tmp_path / "x-0/config.yaml")
    OmegaConf.save(OmegaConf.merge(config, {"eval": {"env": {"objective": 0.5}}}), tmp_path / "x-0/config.yaml")
    found = csv_rows(collect(tmp_path) / "iterations.csv.gz")
    assert {row["objective"] for row in found} == {"0.5"} and "game/score" in {row["metric"] for row in found}


def test_one_base_of_several_seeds_counts_once(tmp_path: Path) -> None:
    """Each standard error is .2. A rise by .4 from one base to the mean of three seeds has the standard error sqrt(.04
    + .04 / 3) = .23, and is no certain rise."""
    at = {"games": 100, "game/score": 3.0, "game/score_sd": 2.0}
    assert iterations.error_of_mean("game/score", [at] * 3) == pytest.approx(0.2)
    others = [{**at, "game/score": score} for score in (3.0, 3.1, 3.2)]
    assert iterations.error_of_mean("game/score", others) == pytest.approx(0.2 / math.sqrt(3))
    for seed in range(3):
        run(tmp_path, f"x-{seed}", "a", seed, [3, 3.4 + seed / 1000])
    found = by_name(collect(tmp_path) / "iterations_summary.csv", "figure")
    assert float(found["plateau/mean",]["mean"]) == 0  # .4 is 1.73 of them; with .2 / sqrt(3) twice it were 2.45


SMALL = [
    "progress=false", "threads=1", "base.epochs=1", "model.hidden_size=32", "model.layers=1", "model.max_new_tokens=8",
    "model.intermediate_size=64", "algo.games=4", "algo.concurrency=4", "algo.update.minibatches=1", "eval.every=1",
    "eval.games=4", "eval.final_games=4", "env.objective=1",
]  # fmt: skip


@pytest.mark.slow
def test_filtered_cloning_from_a_stronger_player_and_from_few_human_games(tmp_path: Path) -> None:
    """The shipped sweeps in miniature, and their players at one table: all bases of people share a tokenizer."""
    (tmp_path / "data").mkdir()
    data = write(tmp_path / "data", (*ROWS, *games_of(12)), test=TEST)
    common = [*SMALL, f"data.dond={data}", f"runs={tmp_path}"]
    strong = train.main(configure("train", "sweep=dond_filtered_bc_ppo", "ablation=full", *common, "algo.iterations=1"))
    began = "init.learner='dond_filtered_bc_ppo-full-s${seed}-*'"
    cloned = train.main(
        configure("train", "sweep=dond_filtered_bc", began, "arm=from_ppo", *common, "algo.iterations=2")
    )
    weak = train.main(
        configure("train", "sweep=dond_filtered_bc_300", "base.human_games=3", *common, "algo.iterations=2")
    )
    end, start = logged(strong, "eval")[1], logged(cloned, "eval")[0]
    assert end["game/score"] == start["game/score"] and end["talk/turns"] == start["talk/turns"]
    iterations.main(settings(f"runs={tmp_path}", "select=['*_bc-*','*_300-*']"))
    found = csv_rows(tmp_path / "iterations" / "iterations.csv.gz")
    assert {(r["arm"], r["iteration"]) for r in found} == {(a, i) for a in ("from_ppo", "from_300") for i in "012"}
    quiet = ["games=4", "concurrency=4", "progress=false", "threads=1", f"runs={tmp_path}"]
    crossplay.main(configure("crossplay", f"players=[{strong},{cloned},{weak},careful]", *quiet))
    labels = {row["row"] for row in csv_rows(tmp_path / "crossplay" / "crossplay.csv.gz")}
    assert labels == {*(run.name.rpartition("-")[0] for run in (strong, cloned, weak)), "careful"}

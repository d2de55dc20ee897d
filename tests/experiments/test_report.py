"""Reports of small real runs of Among Us: the page, and the folder of a published table."""

import gzip
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments import report, train
from experiments.report import with_differing_settings
from experiments.setup import select
from experiments.setup.publish import publish, variants
from experiments.setup.published import given
from marl.common.errors import UserError
from marl.common.files import csv_rows, joined_name
from marl.metrics.tables import TableRow, curve_lines, read_table
from marl.report import prose
from marl.report.page import read_run
from marl.report.runs import Run, arm_label, arm_runs
from tests.composing import AMONG_US_BASE, cases, configure
from tests.marl.report.test_page import change, make_run
from tests.runs import without_pages

SMALL = [
    *AMONG_US_BASE, "name=tiny", "progress=false", "threads=1", "algo.iterations=2", "algo.games=4",
    "algo.concurrency=8", "algo.max_new_tokens=6", "eval.games=4", "eval.every=2", "eval.final_games=8",
]  # fmt: skip


WINS = {("full", 0): 0.25, ("full", 1): 0.5, ("game_only", 0): 0.125, ("game_only", 1): 0.25}
OFF = {"loss": {"listening": {"weight": 0.0}}, "reward": {"speaking": {"weight": 0.0}}}


@pytest.fixture(scope="module")
def root(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of finished runs: one that was trained, and copies of it as two arms of two seeds that won these shares
    of their eight games; one of them once more as if it had had shaping."""
    root = tmp_path_factory.mktemp("runs")
    with without_pages():
        train.main(configure("train", *SMALL, "ablation=full", "seed=0", f"runs={root}", f"cache={bases}"))
    (whole,) = root.glob("tiny-full-s0-????????")
    for (arm, seed), won in WINS.items():
        run = root / whole.name.replace("-full-s0-", f"-{arm}-s{seed}-")
        if run != whole:
            shutil.copytree(whole, run)
        settings = OmegaConf.merge(OmegaConf.load(run / "config.yaml"), {"arm": arm, "seed": seed})
        OmegaConf.save(OmegaConf.merge(settings, OFF) if arm == "game_only" else settings, run / "config.yaml")
        card = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**card, "arm": arm, "seed": seed, "seeds": [seed]}))
        found = json.loads((run / "evaluation.json").read_text())
        found["conditions"]["trained"]["game/win_rate/crewmates"]["mean"] = won
        found["by_game"]["trained"]["game/win_rate/crewmates"] = [1.0] * int(8 * won) + [0.0] * int(8 - 8 * won)
        (run / "evaluation.json").write_text(json.dumps(found))
    shaped = shutil.copytree(root / whole.name.replace("-full-", "-game_only-"), root / "tiny-game_only-s0-shaped")
    settings = OmegaConf.merge(OmegaConf.load(shaped / "config.yaml"), {"env": {"shaping": 0.2}})
    OmegaConf.save(settings, shaped / "config.yaml")
    return root


@pytest.fixture(scope="module")
def published(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the runs were published in, beside the paper's figures."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "published.csv").write_text("arm,mean,low,high,source\nRL,0.32,0.29,0.33,somewhere\n")
    page = folder / "page.html"
    report.main(configure("report", f"runs={root}", "select=tiny-*", f"out={page}", f"publish={folder}"))
    return folder


def by_name(rows: list[TableRow]) -> dict[tuple[str, str], TableRow]:
    return {(row.arm, row.metric): row for row in rows}


def test_tables_are_those_of_the_evaluations(published: Path) -> None:
    rows = csv_rows(published / "table.csv")
    assert list(rows[0]) == ["arm", "metric", "mean", "low", "high", "seeds", "games"]
    assert all(all(cell for cell in row.values()) for row in rows)
    found, wins = by_name(read_table(published / "table.csv")), "game/win_rate/crewmates"
    assert list(dict.fromkeys(arm for arm, _ in found)) == ["base", "RL", "RL+L+S"]
    of = {arm: [metric for a, metric in found if a == arm] for arm, _ in found}
    assert of["base"] == of["RL"] == of["RL+L+S"] and of["base"][0] == wins  # the same metrics in one order
    assert [found[arm, wins].mean for arm in ("RL", "RL+L+S")] == [0.1875, 0.375]
    assert (found["RL", wins].seeds, found["RL", wins].games) == (2, 16)
    per_seed = {
        (row["arm"], row["seed"]): row for row in csv_rows(published / "per_seed.csv.gz") if row["metric"] == wins
    }
    assert float(per_seed["RL+L+S", "1"]["mean"]) == 0.5
    both = {row.arm: row for row in read_table(published / "differences.csv.gz") if row.metric == wins}
    assert (both["RL+L+S - RL"].mean, both["RL+L+S - RL"].seeds) == (0.1875, 2) and "RL+L - RL" not in both
    (ratio,) = read_table(published / "ratios.csv")  # their base is one model, so its seeds cannot be paired
    assert (ratio.arm, ratio.mean, ratio.low, ratio.high, ratio.games) == ("RL+L+S / RL", 2, 2, 2, 32)


def test_the_published_folder_is_whole(root: Path, published: Path) -> None:
    """Another variant of the game has files of its own; run cards say nothing of the machine."""
    names = {path.name for path in published.iterdir()}
    assert {"table.csv", "figure.svg", "curves.csv.gz", "table_shaping_0.2.csv", "figure_shaping_0.2.svg"} <= names
    resampled = by_name(read_table(published / "bootstrap.csv"))
    won = {arm: resampled[arm, "game/win_rate/crewmates"] for arm in ("RL", "RL+L+S", "RL+L+S - RL")}
    assert len(resampled) == 3 and (won["RL+L+S - RL"].seeds, won["RL+L+S - RL"].games) == (2, 32)
    assert [row.mean for row in won.values()] == [0.1875, 0.375, 0.1875]
    assert all(row.low <= row.mean <= row.high for row in won.values())
    header, *lines = (published / "table.csv").read_text().splitlines()
    assert header == "arm,metric,mean,low,high,seeds,games"
    assert all(line.count(",") == 6 and ",," not in line for line in lines)  # no blank cell
    assert not {"equal_compute_shaping_0.2.csv.gz", "bootstrap_shaping_0.2.csv"} & names  # one arm, one seed
    (row,) = read_table(published / "differences_shaping_0.2.csv.gz")  # one seed: paired by game, of one metric
    assert (row.arm, row.metric, row.seeds, row.games) == ("RL - base", "game/win_rate/crewmates", 1, 16)
    cards = (published / "cards.jsonl").read_text()
    assert len(cards.splitlines()) == 5 and str(root) not in cards and "threads" not in cards
    assert all(json.loads(line).keys() >= {"run", "git_commit", "seeds", "figures"} for line in cards.splitlines())
    page = (published / "page.html").read_text()
    assert "Grid Among Us, 2 by 2 rooms, 5 players" in page and "How games ended" in page
    own = [line for line in curve_lines(published / "curves.csv.gz") if line[:3] == ("RL", 0, "eval")]
    assert [(line.iteration, line.games) for line in own] == [(0, 0), (2, 8)]
    assert all("game/win_rate/crewmates" in line.figures for line in own)
    assert "fill: #ffffff; stroke: #777777" in (published / "figure.svg").read_text()  # what the paper found


def test_arms_are_compared_at_equal_compute(root: Path, published: Path) -> None:
    """The dearer arm is measured at the point where it has cost as much as the cheaper arm in all."""
    rows = by_name(read_table(published / "equal_compute.csv.gz"))
    games = {arm: rows[arm, "compute/training_games"].mean for arm in ("RL", "RL+L+S")}
    assert games["RL"] == 8 and 0 < games["RL+L+S"] < 8  # listening on renamed rows has passes of its own
    cost = {arm: rows[arm, "compute/token_passes"].mean for arm in games}
    assert cost["RL"] == pytest.approx(cost["RL+L+S"]) and cost["RL"] > 1000
    apart = rows["RL+L+S - RL", "game/win_rate/crewmates"]
    wins = {arm: rows[arm, "game/win_rate/crewmates"].mean for arm in games}
    assert apart.seeds == 2 and apart.mean == pytest.approx(wins["RL+L+S"] - wins["RL"], abs=1e-4)
    shares: dict[str, list[float]] = {}  # the evaluations in between: after a quarter, half, three quarters and all
    for row in csv_rows(published / "equal_compute.csv.gz"):
        if (row["arm"], row["metric"]) == ("RL", "compute/training_games"):
            shares.setdefault("share", []).append(float(row["share"]))
            shares.setdefault("games", []).append(float(row["mean"]))
    assert shares == {"share": [0.25, 0.5, 0.75, 1], "games": [2, 4, 6, 8]}


def test_figures_are_drawn_again_from_what_is_published(published: Path, tmp_path: Path) -> None:
    report.main(configure("report", f"data={published}", f"publish={tmp_path}"))
    names = {"figure.svg", "figure_shaping_0.2.svg", "equal_compute.csv.gz"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all((tmp_path / name).read_bytes() == (published / name).read_bytes() for name in names)
    (tmp_path / "curves.csv.gz").write_bytes(gzip.compress(b"arm,seed\nRL,0\n"))
    (tmp_path / "table.csv").write_text("arm,metric,mean,low,high,seeds,games\n")
    for folder, said in ((tmp_path, "is damaged, or of another version"), (tmp_path / "no", "no published table")):
        with pytest.raises(UserError, match=said):
            report.main(configure("report", f"data={folder}"))


# Name, adapter and style of each pretrained model, and the share of its eight games that it won.
PRETRAINED = {
    "smollm2": ("models/SmolLM2-135M", {"rank": 16}, "brief", 0.75),
    "whole": ("models/SmolLM2-135M", None, "natural", 0.625),
}


@pytest.fixture(scope="module")
def models(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one seed: two arms of the small model, and both again as if pretrained models had learned."""
    models = tmp_path_factory.mktemp("models")
    for arm in ("full", "game_only"):
        small = next(root.glob(f"tiny-{arm}-s0-????????"))
        shutil.copytree(small, models / small.name)
        for short, (name, lora, style, won) in PRETRAINED.items():
            run = shutil.copytree(small, models / f"{short}-{small.name}")
            given = {"model": {"kind": "hf", "name": name, "lora": lora}, "env": {"style": style}}
            OmegaConf.save(OmegaConf.merge(OmegaConf.load(run / "config.yaml"), given), run / "config.yaml")
            found = json.loads((run / "evaluation.json").read_text())
            found["conditions"]["trained"]["game/win_rate/crewmates"]["mean"] = won
            (run / "evaluation.json").write_text(json.dumps(found))
    return models


def test_a_table_says_which_model_played(models: Path, tmp_path: Path) -> None:
    folder, wins = tmp_path / "published", "game/win_rate/crewmates"
    page = tmp_path / "page.html"
    report.main(configure("report", f"runs={models}", "select=*", f"out={page}", f"publish={folder}"))
    assert (folder / "table.csv").read_text().startswith("model,arm,metric,mean,low,high,seeds,games\n")
    names = {
        "small": "_small", "SmolLM2-135M": "_smollm2-135m", "SmolLM2-135M, all weights": "_smollm2-135m-all-weights",
    }  # fmt: skip
    rows = csv_rows(folder / "table.csv")
    assert list(dict.fromkeys(row["model"] for row in rows)) == list(names)
    for ending in names.values():  # files beside the table hold one model each, whatever style it reads
        assert (folder / f"curves{ending}.csv.gz").exists() and (folder / f"differences{ending}.csv.gz").exists()
    found = {(row["model"], row["arm"]): float(row["mean"]) for row in rows if row["metric"] == wins}
    assert found["SmolLM2-135M", "RL"] == found["SmolLM2-135M", "RL+L+S"] == PRETRAINED["smollm2"][-1]
    assert found["SmolLM2-135M, all weights", "RL"] == PRETRAINED["whole"][-1]
    assert (found["small", "RL"], found["small", "RL+L+S"]) == (WINS["game_only", 0], WINS["full", 0])
    assert {arm for _, arm in found} == {"base", "RL", "RL+L+S"}
    figures = {"figure.svg"}
    assert {path.name for path in folder.glob("*.svg")} == figures and len([*folder.glob("table*.csv")]) == 1
    drawn = (folder / "figure.svg").read_text()
    assert all(f">{arm}, {model}</text>" in drawn for model, arm in found)
    assert "RL+L+S, SmolLM2-135M, all weights" in page.read_text()
    # drawn again
    report.main(configure("report", f"data={folder}", f"publish={tmp_path / 'again'}"))
    written = figures | {path.name for path in folder.glob("equal_compute*.csv.gz")}
    assert {path.name for path in (tmp_path / "again").iterdir()} == written
    assert all((tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes() for name in written)


def test_models_are_told_apart_without_a_table(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of arms and bases show the model, even if each model has one arm. Settings that follow from the model are
    left out."""
    chosen = [next(models.glob(pattern)) for pattern in ("tiny-full-*", "smollm2-tiny-full-*")]
    report.report_sweep(chosen)
    header = next(line for line in capsys.readouterr().out.splitlines() if "RL" in line)
    arms = re.split(r"\s{2,}", header.strip())
    names = {f"{arm}, {model}" for arm in ("base", "RL+L+S") for model in ("small", "SmolLM2-135M")}
    assert names == {arm for arm in arms if arm.startswith(("base", "RL"))}


def test_sentences_compare_the_arms_of_one_model(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token pass of a large model costs more than one of a small model, and other models are no ablation."""
    report.main(configure("report", f"runs={models}", "select=*", f"out={tmp_path / 'page.html'}"))
    lines = capsys.readouterr().out.splitlines()
    sentences = [line for line in lines if "at equal compute" in line]
    names = ("small", "SmolLM2-135M", "SmolLM2-135M, all weights")
    assert [re.findall(r"RL[+LS]*, ([^%]+?) [\d.]+ %", each) for each in sentences] == [[name] * 2 for name in names]
    runs = report.with_models([read_run(config.parent) for config in sorted(models.glob("*/config.yaml"))])
    runs += [replace(run, seed=1) for run in runs]  # as if there were two seeds, by which arms are paired
    pairs = [row.arm for row in prose.differences(arm_runs(runs), runs)]
    assert pairs == [f"RL+L+S, {name} - RL, {name}" for name in names]


def test_styles_of_one_model_make_variants_and_those_that_follow_from_the_model_none() -> None:
    def run(style: str, name: str = "") -> Run:
        model = {"kind": "hf", "name": name} if name else {"kind": "tiny"}
        return Run(Path("x"), "full", 0, {"env": {"game": "dond", "style": style}, "model": model}, {}, [], {})

    small, one, other = run("compact"), run("brief", "hub/one"), run("natural", "hub/other")
    assert list(variants([small, one, other])) == [""]
    assert list(variants([small, one, run("natural", "hub/one")])) == ["", "_style_compact", "_style_natural"]


@pytest.fixture(scope="module")
def seeds(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two arms and three seeds, each with figures, curves and messages of its own; a base for each seed."""
    seeds = tmp_path_factory.mktemp("seeds")
    for number, (arm, seed) in enumerate((arm, seed) for arm in ("full", "game_only") for seed in (2, 9, 10)):
        whole = next(root.glob(f"tiny-{arm}-s0-????????"))
        run = shutil.copytree(whole, seeds / whole.name.replace("-s0-", f"-s{seed}-"))
        OmegaConf.save(OmegaConf.merge(OmegaConf.load(run / "config.yaml"), {"seed": seed}), run / "config.yaml")
        card = json.loads((run / "run.json").read_text())
        own = {"run": run.name, "seed": seed, "seeds": [seed], "base_digest": f"base {seed}"}
        own["command"] = f"train.py -m ablation={arm} seed={seed} algo.games=4 runs={root}"
        found = json.loads((run / "evaluation.json").read_text())
        for group in ("conditions", "belief_by_message"):
            for condition, there in found[group].items():
                by = 1 - (seed if condition == "base" else 10 + number) / 97
                for metrics in there if isinstance(there, list) else [there]:
                    for metric, each in metrics.items():
                        scale = 321.7 * by if metric == "talk/forms" else by  # six digits, fewer than four decimals
                        each |= {end: each[end] and each[end] * scale for end in ("mean", "low", "high")}
        (run / "evaluation.json").write_text(json.dumps(found))
        (run / "run.json").write_text(json.dumps({**card, **own, "figures": found["conditions"]}))
        for name, by in (("metrics.jsonl", 1 - number / 97), ("timing.jsonl", 1 + number / 97)):
            lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
            changed = [{k: v * by if "/" in k and type(v) is float else v for k, v in line.items()} for line in lines]
            (run / name).write_text("".join(json.dumps(line) + "\n" for line in changed))
        for name in ("base", "trained"):
            games = (run / "episodes" / f"{name}.jsonl").read_text().splitlines(keepends=True)
            (run / "episodes" / f"{name}.jsonl").write_text(
                "".join(games[: (seed if name == "base" else number) % 4 + 1])
            )
    return seeds


def publish_seeds(seeds: Path, folder: Path, select: str, *more: str) -> dict[str, bytes]:
    """The published files of these runs, without a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_report", lambda *_, **__: None)
        report.main(configure("report", f"runs={seeds}", f"select={select}", f"publish={folder}", *more))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def at_once(seeds: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return publish_seeds(seeds, tmp_path_factory.mktemp("at_once") / "table", "*")


@pytest.mark.parametrize("parts", ["*-s2-* *-s10-* *-s9-*", "*-full-s9-* *-full-s10-* *-full-s2-* *game_only*"])
def test_runs_published_one_after_another_make_the_files_of_one_report(
    seeds: Path, at_once: dict[str, bytes], tmp_path: Path, parts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bootstrap.csv` is left out, because it needs the result of each game."""
    folder, (first, *others) = tmp_path / "table", parts.split()
    publish_seeds(seeds, folder, first)
    for part in others:
        found = publish_seeds(seeds, folder, part, f"earlier={folder}")
    assert "bootstrap.csv and comparisons of a single seed are left out" in capsys.readouterr().out
    assert found.keys() == at_once.keys() - {"bootstrap.csv"}
    assert {"equal_compute.csv.gz", "differences.csv.gz", "ratios.csv", "forms.csv.gz", "cards.jsonl"} < found.keys()
    for name in found:
        assert found[name] == at_once[name], name


def test_seeds_of_a_single_arm_are_published_one_after_another(tmp_path: Path) -> None:
    """The table calls the arm of Deal or No Deal `trained` until there is another one."""
    folders = [
        make_run(tmp_path / name, arm, seed, run=name, seeds=[seed], base_digest=f"{seed}")
        for seed, arm in enumerate(("full", "full", "game_only"))
        if (name := f"small-{arm}-s{seed}-{seed:08}")
    ]
    runs = [read_run(folder) for folder in folders]
    publish(runs, tmp_path / "at_once")
    publish(runs[:1], tmp_path / "table")
    publish(runs[1:2], tmp_path / "table", earlier=tmp_path / "table")
    assert {row.arm for row in read_table(tmp_path / "table" / "table.csv")} == {"base", "trained"}
    publish(runs[2:], tmp_path / "other", earlier=tmp_path / "table")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "at_once").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()} == whole


def test_an_arm_with_fewer_seeds_costs_the_others_none_at_equal_compute(tmp_path: Path) -> None:
    """Published at once or one after another, and computed again from the published curves."""
    seeds_of, cost = (
        {"full": (0, 1, 2), "game_only": (0, 1, 2), "listening_only": (0, 1)},
        {"full": 20, "game_only": 10},
    )
    runs = []
    for arm, seeds in seeds_of.items():
        for seed in seeds:
            name = f"{arm}-s{seed}-00000000"
            run = read_run(make_run(tmp_path / name, arm, seed, run=name, seeds=[seed], base_digest=f"{seed}"))
            run.curves.insert(0, {"iteration": 0, "phase": "eval", "game/score": 4.0 - seed})
            for row in run.curves:
                if row["phase"] == "eval":
                    row["compute/token_passes"] = row["iteration"] * cost.get(arm, 30)
            runs.append(run)
    publish(runs, tmp_path / "at_once")
    publish([run for run in runs if run.seed < 2], tmp_path / "table")
    publish([run for run in runs if run.seed == 2], tmp_path / "table", earlier=tmp_path / "table")
    report.redraw(tmp_path / "at_once", tmp_path / "again")
    name = "equal_compute.csv.gz"
    whole, table, again = ((tmp_path / folder / name).read_bytes() for folder in ("at_once", "table", "again"))
    assert whole == table == again
    seeds = {(row["arm"], row["share"]): int(row["seeds"]) for row in csv_rows(tmp_path / "table" / name)}
    assert {share for _, share in seeds} == {"0.25", "0.5", "0.75", "1"}
    assert [seeds[arm, "0.5"] for arm in ("full", "game_only", "listening_only")] == [3, 3, 2]
    assert (seeds["full - game_only", "0.5"], seeds["listening_only - game_only", "0.5"]) == (3, 2)


@pytest.mark.parametrize("last", ["mute", "full"])
def test_the_base_of_muted_players_keeps_its_games_among_earlier_runs(last: str, tmp_path: Path) -> None:
    """The base of both arms plays other games if nobody may speak, and the files do not tell of which arm they are."""
    for seed in (0, 1):
        for arm in ("full", "mute"):
            run = make_run(
                tmp_path / f"{arm}-s{seed}", arm, seed, run=f"{arm}-s{seed}", seeds=[seed], base_digest="one"
            )
            change(run, env={"game": "dond", "objective": 1.0, "press": "none" if arm == "mute" else "private"})
    runs = [read_run(folder) for folder in sorted(tmp_path.iterdir())]
    publish(runs, tmp_path / "at_once")
    publish([run for run in runs if run.arm != last], tmp_path / "table")
    publish([run for run in runs if run.arm == last], tmp_path / "table", earlier=tmp_path / "table")
    whole, found = (tmp_path / name / "table.csv" for name in ("at_once", "table"))
    assert {row.arm for row in read_table(whole)} == {"base", "base of mute", "full", "mute"}
    assert found.read_bytes() == whole.read_bytes()


def test_settings_of_runs_are_compared_by_value() -> None:
    """The way a value is written makes no difference. Leaving a term out (`~loss.listening`) does."""
    first = given("train.py env.objective=1 algo.update.learning_rate=1e-3 model.lora={rank:4} seed=3")
    assert first == given("train.py seed=4 ++algo.update.learning_rate=0.001 model.lora={rank:4} env.objective=1.0")
    assert first != given("train.py env.objective=1 algo.update.learning_rate=1e-2 model.lora={rank:4}")
    assert given("train.py ~loss.listening") != given("train.py") == given("train.py ablation=full,mute device=cpu")
    assert given("train.py env.players=4 algo.games=8", "env") == {"env.players": 4}
    assert given("train.py env.objective=0,1") == {"env.objective": "0,1"}


def test_earlier_runs_that_are_not_alike_are_refused(
    seeds: Path, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "table"
    made = publish_seeds(seeds, folder, "*-s2-*")
    run, other_arm = (read_run(next(seeds.glob(f"*-{arm}-s9-*"))) for arm in ("full", "game_only"))
    whole, algo = run.evaluation, run.config["algo"]
    fewer = {name: {**own, "n": 4} for name, own in whole["conditions"]["trained"].items()}
    other = {
        "full seed 2 is there, and tiny": replace(run, seed=2),
        "evaluation games of full seed 2: 8, .*: 4": replace(
            run, evaluation={**whole, "conditions": {"trained": fewer}}
        ),
        "training games an iteration of full seed 2: 4, .*: 8": replace(
            run, config={**run.config, "algo": {**algo, "games": 8}}
        ),
        "iterations of full seed 2: 2, .*: 1": replace(run, curves=[row for row in run.curves if row["iteration"] < 2]),
        "settings of full seed 2: algo.games=4, .*: as shipped": replace(
            run, card={**run.card, "command": "train.py seed=9"}
        ),
        "settings of the game of full seed 2: as shipped, .*: env.players=7": replace(
            other_arm, card={**other_arm.card, "command": "train.py algo.games=4 env.players=7"}
        ),
        "its game is among_us, that of the new runs dond": replace(run, config={**run.config, "env": {"game": "dond"}}),
    }
    for said, changed in other.items():
        with pytest.raises(UserError, match=f"earlier=.*{said.replace('full seed', 'RL.L.S seed')}"):
            publish([changed], folder, earlier=folder)
    for earlier, said in ((tmp_path, r"there is no per_seed\.csv\.gz"), (published, "also has shaping 0.2")):
        with pytest.raises(UserError, match=f"earlier=.*{said}"):
            publish([run], folder, earlier=earlier)
    capsys.readouterr()
    swept = replace(run, card={**run.card, "command": "train.py sweep=a algo.games=4"})
    publish([swept], tmp_path / "other", earlier=folder)
    assert "Runs of no sweep and of sweep=a: whether these set the same was not checked." in capsys.readouterr().out
    with pytest.raises(UserError, match=r"earlier=.*Give publish=FOLDER"):
        report.main(configure("report", f"runs={seeds}", f"earlier={folder}"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == made  # where it was refused, too


RESULTS = Path(report.__file__).parent / "results"
SLOW = ("among_us_ablation", "dond_human", "dond_long", "dond_pikl")  # like dond_ablation, and larger


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(path.parent.name, marks=[pytest.mark.slow] if path.parent.name in SLOW else [])
        for path in sorted(RESULTS.glob("*/curves.csv.gz"))
    ]
    + [
        "diplomacy_france_austria",
        "diplomacy_pure",
        "dond_intents",
        "among_us_intents",
        "diplomacy_intents",
        "pretrained",
    ]  # these have no curves of arms, or a file for each model
    + ["talk"] * (RESULTS / "talk" / "figure.svg").exists(),
)
def test_published_figures_are_those_of_the_published_data(table: str, tmp_path: Path) -> None:
    report.main(configure("report", f"data={RESULTS / table}", f"publish={tmp_path}"))

    def content(path: Path) -> str:
        """Clipped areas are named after digests of their corners, whose last bits depend on numpy's version."""
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        return re.sub(r"(?<=url\(#)p\w{10}(?=\))|(?<=clipPath id=\")p\w{10}(?=\")", "area", text)

    for path in tmp_path.iterdir():
        assert content(path) == content(RESULTS / table / path.name)


@cases("""
select=5 | select=5: must be names of runs' folders
select='' | select=: must be names
select=[] | select=\\[\\]: must be names
select=[tiny-*,''] | select=\\['tiny-\\*', ''\\]: must be names
select=/* | select=/\\*: must be names
select='a**' | select=a\\*\\*:
where=full | where=full: must be settings of runs by name, as in \\{env.objective: 0\\}
where={env.objectiv:0} | where.env.objectiv=0: no selected run has such a setting
where={arm:[ful]} | where.arm=\\['ful'\\]: none of the selected runs has it; theirs: full, game_only
""")
def test_what_selects_no_run_is_refused_in_one_line(overrides: list[str], said: str, root: Path) -> None:
    with pytest.raises(UserError, match=said) as error:
        report.main(configure("report", f"runs={root}", *overrides))
    assert "\n" not in str(error.value)


def test_folders_that_are_not_runs_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cross-play's folders have no configuration. Older runs that lack a setting are left out if it is asked for."""
    for name, config in (("new", "env: {split: train}"), ("old", "env: {}"), ("crossplay", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
        if config:
            (tmp_path / name / "config.yaml").write_text(config)
    assert [path.name for path in select.selected(tmp_path, "*")] == ["new", "old"]
    where = OmegaConf.create({"where": {"env.split": "train"}}).where
    assert [path.name for path in select.selected(tmp_path, "*", where)] == ["new"]
    assert len(select.selected(tmp_path, "*", OmegaConf.create({"where": {}}).where)) == 2
    assert "where.env.split: 1 runs without such a setting are left out" in capsys.readouterr().out


def test_a_sweep_ends_with_one_table_of_its_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [next(root.glob(f"tiny-{arm}-s{seed}-????????")) for arm in ("full", "game_only") for seed in (0, 1)]
    report.report_sweep([*folders, folders[0]])  # two jobs of a sweep may be the same run
    first, *table, last = (line for line in capsys.readouterr().out.splitlines() if line)
    assert (first, last) == ("4 runs", f"report: {root / 'tiny.html'}")
    assert "Grid Among Us" in (root / "tiny.html").read_text()
    assert table[0].split() == ["base", "RL", "RL+L+S"] and table[2].startswith("game/win_rate/crewmates ")


def test_arms_without_a_name_are_told_apart_by_their_settings(root: Path) -> None:
    def run(seed: int, **changed: object) -> Run:
        config = {"env": {"game": "dond"}, "algo": {"games": 8, "update": {"epochs": 1}}, "seed": seed, **changed}
        return Run(root, "custom", seed, config, {}, [], {})

    runs = [run(seed, algo={"games": games, "update": {"epochs": 1}}) for games in (8, 16) for seed in (0, 1)]
    assert [each.arm for each in with_differing_settings(runs)] == ["custom algo.games=8"] * 2 + [
        "custom algo.games=16"
    ] * 2
    assert with_differing_settings(runs[:2]) == runs[:2]  # seeds of one arm
    assert [each.arm for each in with_differing_settings(runs[1:3])] == [
        "custom algo.games=8",
        "custom algo.games=16",
    ]  # are not
    rival = [run(seed, cast={"imposter": {"player": f"a-full-s{seed}-0123456{seed}"}}, threads=seed) for seed in (0, 1)]
    assert with_differing_settings(rival) == rival
    games = [run(0, env={"game": "dond", "objective": objective}) for objective in (0.0, 1.0)]
    assert with_differing_settings(games) == games  # tables of their own


def test_runs_of_different_games_make_no_table(root: Path, tmp_path: Path) -> None:
    runs = [read_run(next(root.glob("tiny-full-*"))), Run(tmp_path, "full", 0, {"env": {"game": "dond"}}, {}, [], {})]
    with pytest.raises(UserError, match=r"publish=.*the runs play among_us and dond"):
        publish(runs, tmp_path / "table")
    assert not (tmp_path / "table").exists()


def test_variants_put_the_headline_first() -> None:
    def run(**env: object) -> Run:
        return Run(Path("x"), "full", 0, {"env": {"game": "dond", **env}}, {}, [], {})

    cooperative, semi = run(objective=1.0), run(objective=0.0)
    assert variants([semi, cooperative, semi]) == {"": [cooperative], "_objective_0": [semi, semi]}
    plain, report_too = run(imposters_report=False), run(imposters_report=True)
    assert variants([report_too, plain]) == {"": [plain], "_imposters_report_true": [report_too]}
    assert variants([plain, plain]) == {"": [plain, plain]}
    square, line = run(layouts=[[2, 2]]), run(layouts=[[1, 3]])
    assert variants([square, line]) == {"": [line], "_layouts_2-2": [square]}


def test_press_makes_variants_unless_it_follows_from_the_arm() -> None:
    def run(arm: str, press: str) -> Run:
        return Run(Path("x"), arm, 0, {"env": {"game": "diplomacy", "press": press}}, {}, [], {})

    full, mute, quiet = run("full", "private"), run("mute", "none"), run("full", "none")
    assert variants([full, mute]) == {"": [full, mute]}
    assert variants([full, mute, quiet]) == {"": [mute, quiet], "_press_private": [full]}
    assert {arm_label(each, [full, quiet]) for each in (full, quiet)} == {
        "full (diplomacy, press=private)", "full (diplomacy, press=none)"
    }  # fmt: skip


def test_joined_names_are_cut_and_told_apart() -> None:
    assert joined_name(["a" * 100, "b" * 99], "+") == "a" * 100 + "+" + "b" * 99
    for one, other in (("a" * 150, "b" * 150), ("木" * 60, "火" * 60), ("é" * 99 + "a", "c")):
        found = joined_name([one, other], "-v-")
        assert len(found.encode()) <= 200 and found.startswith(one[:50])
        assert found != joined_name([one, other + "x"], "-v-")

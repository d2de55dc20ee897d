"""Jobs side by side (`hydra/launcher=joblib`): what they print, how they fail; and the quickstart, which is two."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import joblib
import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from experiments.cli import Where, check_command_line
from experiments.terminal import Bar, Labelled, labelled
from marl.config import build, run_folder

ROOT = Path(__file__).resolve().parents[2]
APP = """
import os, signal, sys, time
from pathlib import Path
from experiments.cli import command
from experiments.terminal import Bar, say
from marl.errors import UserError


@command("toy", package="toy_conf")
def main(cfg):
    if cfg.seed == 1:  # two jobs: each waits for the other, so they end only if both run at the same time
        meeting = Path(cfg.meeting)
        (meeting / cfg.arm).touch()
        while len(list(meeting.iterdir())) < 2:
            time.sleep(0.05)
    elif cfg.seed == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    elif cfg.arm == "full":
        raise RuntimeError("boom")
    else:
        raise UserError("seed 2 is unlucky:\\n   choose another one.")
    print("process", os.getpid(), "threads", os.environ["OMP_NUM_THREADS"])
    bar = Bar()
    bar.stage("a stage", 2)
    bar.advance()
    say("two\\nlines")
    print("to the other stream", file=sys.stderr)


if __name__ == "__main__":
    main()
"""
CONF = {
    "__init__.py": "",
    "hydra_settings.yaml": (ROOT / "conf/hydra_settings.yaml").read_text(),
    "toy.yaml": "defaults: [_self_, hydra_settings, ablation: none]\nseed: 0\narm: custom\nmeeting: ???\n",
    "ablation/none.yaml": "# @package _global_\n",
    "ablation/full.yaml": "# @package _global_\narm: full\n",
}
SMALL = [
    "base.games=30", "base.lessons=[{players:random,steps:1}]", "algo.iterations=1", "algo.games=4", "eval.games=4",
    "eval.final_games=6", "model.layers=1", "model.hidden_size=32", "model.intermediate_size=64", "env.max_steps=60",
]  # fmt: skip


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A folder with a command `app.py`, its configuration, a place to meet in and an empty folder to work in."""
    for name, text in {"app.py": APP, **{f"toy_conf/{name}": text for name, text in CONF.items()}}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("meeting", "work"):
        (tmp_path / name).mkdir()
    return tmp_path


def run(
    toy: Path, *arguments: str, launcher: tuple[str, str] = ("joblib", "hydra.launcher.n_jobs=2")
) -> subprocess.CompletedProcess[str]:
    """The toy command with two jobs at a time; nothing may be left in the folder it works in."""
    name, setting = launcher
    places = [f"hydra.sweep.dir={toy / 'logs'}"] if name.startswith("submitit") else []
    command_line = [
        sys.executable, str(toy / "app.py"), "-m", f"hydra/launcher={name}", setting, *places,
        f"meeting={toy / 'meeting'}", *arguments,
    ]  # fmt: skip
    environment = {"PYTHONPATH": f"{ROOT}:{toy}", "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        command_line, cwd=toy / "work", env=environment, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert list((toy / "work").iterdir()) == [], done.stderr
    return done


def test_two_jobs_run_at_the_same_time_and_failed_ones_are_named(toy: Path) -> None:
    done = run(toy, "ablation=none,full", "seed=1,2")
    out, err = done.stdout.splitlines(), done.stderr.splitlines()
    assert done.returncode == 1
    for job in ("none seed=1", "full seed=1"):
        own = [line.removeprefix(f"{job} | ") for line in out if line.startswith(f"{job} | ")]
        assert own[1:] == ["two", "lines"], own
        _, process, _, threads = own[0].split()
        assert process != str(os.getpid()) and int(threads) == max(joblib.cpu_count() // 2, 1)
        assert f"{job} | to the other stream" in err
    assert all(" seed=1 | " in line for line in out) and "a stage" not in done.stdout + done.stderr
    first, second = (f"meeting={toy / 'meeting'} ablation={arm} seed=2" for arm in ("none", "full"))
    assert f"none seed=2 | {first}: seed 2 is unlucky: choose another one." in err
    assert f"full seed=2 | {second}: Traceback (most recent call last):" in err
    assert "full seed=2 | RuntimeError: boom" in err
    assert err[-1] == f"Failed jobs: 2 ({first}; {second})."


def test_a_job_whose_process_is_killed_is_named(toy: Path) -> None:
    done = run(toy, "ablation=full", "seed=3,4")
    assert done.returncode == 1 and "Failed jobs: " in done.stderr
    assert f"meeting={toy / 'meeting'} ablation=full seed=3" in done.stderr.splitlines()[-1]


def test_jobs_of_submitit_run_apart_and_those_that_fail_or_die_are_named(toy: Path) -> None:
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    (toy / "meeting" / "somebody").touch()
    done = run(toy, "ablation=full", "seed=3,4,1", launcher=("submitit_local", "hydra.launcher.cpus_per_task=3"))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    job = f"meeting={toy / 'meeting'} ablation=full seed="
    *told, last = done.stderr.splitlines()
    assert last == f"Failed jobs: 2 ({job}3; {job}4)."
    killed, boom = (next(line for line in told if f"{job}{seed} " in line) for seed in (3, 4))
    assert killed.startswith(f"The job {job}3 did not end: ") and boom.startswith(f"The job {job}4 failed: boom")
    assert "RuntimeError: boom" in Path(boom.partition("Its log: ")[2]).read_text()
    assert (toy / "meeting" / "full").exists()  # the one after them was waited for
    (log,) = (path for path in (toy / "logs").rglob("*.out") if "threads" in path.read_text())
    assert " threads 3\ntwo\nlines\n" in log.read_text()


@pytest.mark.slow
def test_a_sweep_through_submitit_goes_on_where_it_ended(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    small = [o for o in SMALL if not o.startswith(("base.lessons", "env."))]
    command_line = [
        sys.executable, "-m", "experiments.train", "-m", "hydra/launcher=submitit_local", "seed=0,1", *small,
        "hydra.launcher.cpus_per_task=1", f"runs={tmp_path / 'runs'}",
    ]  # fmt: skip
    written: list[dict[str, int]] = []
    for said in ("report", "is done"):
        done = subprocess.run(
            command_line, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        cards = {path.parent.name: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/run.json")}
        logs = sorted(tmp_path.glob("runs/submitit/.submitit/*/*.out"), key=lambda path: path.stat().st_mtime)[-2:]
        assert len(logs) == 2 and all(said in log.read_text() for log in logs)
        written.append(cards)
    assert len(written[0]) == 2 and written[0] == written[1]
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_a_label_stands_before_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    out = Labelled("full", stream)
    out.write("a\nb")
    assert stream.getvalue() == "full | a\n"
    out.write("c\n\n")
    out.write("d")
    out.finish()
    assert stream.getvalue() == "full | a\nfull | bc\nfull |\nfull | d\n" and not out.isatty()
    with pytest.raises(ZeroDivisionError), labelled("L"):
        print("half", end="")
        raise ZeroDivisionError
    with labelled(""):
        print("bare")
    assert capsys.readouterr().out == "L | half\nbare\n"


def test_without_a_terminal_long_stages_tell_how_far_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(enabled: bool) -> str:
        bar = Bar(enabled)
        bar.stage("games", 30)
        bar.advance(10)
        bar.advance(15)
        for done in (1, 2, 4):
            bar.count("base", done, 4)
        bar.close()
        return capsys.readouterr().out

    assert go(True) == ""  # no stage was long
    monkeypatch.setattr(Bar, "EVERY", 0.0)
    assert go(True).splitlines() == [
        "games: 10 of 30", "games: 25 of 30", "base: 1 of 4", "base: 2 of 4", "base: 4 of 4"
    ]  # fmt: skip
    assert go(False) == ""


def configure(*overrides: str) -> DictConfig:
    with initialize_config_module("conf", version_base="1.3"):
        return compose("train", overrides=["experiment=among_us_quickstart", *overrides])


def test_the_quickstart_is_two_arms_side_by_side_from_one_base() -> None:
    plan = check_command_line("train", "conf", [], ["experiment=among_us_quickstart"])
    assert (plan.sweep, plan.swept, plan.where) == (True, ("ablation",), Where.SIDE_BY_SIDE)
    one = check_command_line("train", "conf", [], ["experiment=among_us_quickstart", "ablation=full"])
    assert one.sweep and one.swept == ()
    game_only, full = (configure(f"ablation={arm}") for arm in ("game_only", "full"))
    assert game_only.env.game == "among_us" and game_only.base == full.base and game_only.model == full.model
    assert run_folder(game_only) != run_folder(full) and run_folder(full).name.startswith("among_us_quickstart-full-s0")
    tuned = configure()
    assert full.algo == tuned.algo and full.algo.credit.gamma == 0.99  # what is tuned for the game holds
    parts, bare = build(full), build(game_only)
    assert parts.losses["listening"].weight > 0 and parts.rewards["speaking"].weight > 0
    assert bare.losses["listening"].weight == 0 and bare.rewards["speaking"].weight == 0


@pytest.mark.slow
def test_the_quickstart_ends_with_a_table_of_its_arms(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    def call(command: str, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", f"experiments.{command}", f"runs={runs}", *arguments],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    trained = call("train", "experiment=among_us_quickstart", *SMALL)
    assert trained.count("training the base model") == 1
    folders = {json.loads(card.read_text())["arm"]: card.parent for card in runs.glob("*/run.json")}
    assert set(folders) == {"game_only", "full"}
    assert len(list(runs.glob("bases/*/evaluations/*/evaluation.json"))) == 1  # its games are the same for both
    table = call("report", "select=among_us_quickstart-*", f"out={runs / 'quick.html'}").splitlines()
    assert ["base", "RL", "RL+L+S"] in [line.split() for line in table]
    assert any(line.startswith("game/win_rate/crewmates") for line in table)
    assert table[-1] == f"report: {runs / 'quick.html'}" and (runs / "quick.html").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}

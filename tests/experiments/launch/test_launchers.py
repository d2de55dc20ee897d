"""Jobs side by side (`hydra/launcher=joblib`): what they print, how they fail, what they end with, and on which device;
and the quickstart, which is two jobs."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import joblib
import pytest
from omegaconf import OmegaConf

from experiments.launch.command import at_once
from experiments.launch.overrides import Plan
from experiments.launch.terminal import Bar, Labelled, labelled
from experiments.setup.spec import run_spec
from tests.composing import configure, run_folder

ROOT = Path(__file__).resolve().parents[3]
APP = """
import os, signal, sys, time
from pathlib import Path
from experiments.launch.command import command
from experiments.launch.terminal import Bar, say
from marl.common.errors import UserError


@command("toy", package="toy_conf", after=lambda folders: say("made " + " ".join(map(str, folders))))
def main(cfg):
    if cfg.seed == 1:  # two jobs: each waits for the other, so they end only if both run at the same time
        meeting = Path(cfg.meeting)
        (meeting / cfg.arm).write_text(str(os.getpid()))
        while len(list(meeting.iterdir())) < 2:
            time.sleep(0.05)
    elif cfg.seed == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    elif cfg.arm == "full":
        raise RuntimeError("boom")
    else:
        raise UserError("seed 2 is unlucky:\\n   choose another one.")
    print("process", os.getpid(), "threads", os.environ.get("OMP_NUM_THREADS", ""), os.environ.get("JOBS_AT_ONCE", ""))
    bar = Bar()
    bar.stage("a stage", 2)
    bar.advance()
    say("two\\nlines")
    print("to the other stream", file=sys.stderr)
    return Path(f"{cfg.arm}-{cfg.seed}")


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
    """Folder with a command `app.py`, its configuration, a folder for notes between jobs, and an empty one to work
    in."""
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
        command_line, cwd=toy / "work", env=environment, capture_output=True, text=True, timeout=900
    )  # fmt: skip
    assert list((toy / "work").iterdir()) == [], done.stderr
    return done


def test_two_jobs_run_at_the_same_time_and_failed_ones_are_named(toy: Path) -> None:
    done = run(toy, "ablation=none,full", "seed=1,2")
    *out, last = done.stdout.splitlines()
    err = done.stderr.splitlines()
    assert done.returncode == 1 and last == "made custom-1 full-1", done.stderr
    for job in ("ablation=none seed=1", "ablation=full seed=1"):
        own = [line.removeprefix(f"{job} | ") for line in out if line.startswith(f"{job} | ")]
        assert own[1:] == ["two", "lines"], own
        _, process, _, threads, at_once = own[0].split()
        assert process != str(os.getpid()) and int(threads) == max(joblib.cpu_count() // 2, 1) and at_once == "2"
        assert f"{job} | to the other stream" in err
    assert all(" seed=1 | " in line for line in out) and "a stage" not in done.stdout + done.stderr
    none, full = (f"ablation={arm} seed=2 | " for arm in ("none", "full"))
    assert f"{none}ablation=none seed=2: seed 2 is unlucky: choose another one." in err
    assert f"{full}ablation=full seed=2: Traceback (most recent call last):" in err
    assert f"{full}RuntimeError: boom" in err
    assert err[-1] == "Failed jobs: 2 (ablation=none seed=2; ablation=full seed=2)."


@pytest.mark.parametrize(("workers", "jobs", "expected"), [(-1, 1, 1), (4, 2, 2), (1, 3, 1), (None, 3, 1), (2, 0, 1)])
def test_no_more_jobs_run_at_once_than_there_are(workers: int | None, jobs: int, expected: int) -> None:
    config = OmegaConf.create({"hydra": {"launcher": {} if workers is None else {"n_jobs": workers}}})
    assert at_once(Plan(config, [["seed=0"]] * jobs, [])) == expected


def test_a_job_whose_process_is_killed_ends_the_sweep_in_one_sentence(toy: Path) -> None:
    (toy / "meeting" / "somebody").touch()
    done = run(toy, "ablation=full", "seed=3")
    assert done.returncode == 1 and done.stdout == "", done.stdout
    said = done.stderr.splitlines()[-1]
    assert said.startswith("The launcher stopped (TerminatedWorkerError): A worker process") and "SIGKILL" in said
    assert said.endswith("The same command goes on from what is there.") and "Traceback" not in done.stderr


def test_jobs_die_with_a_sweep_that_is_killed(toy: Path) -> None:
    """Orphaned jobs would keep the run folders locked, and the restarted sweep would be refused."""
    process = started(toy, "seed=1")
    note, deadline = toy / "meeting" / "custom", time.monotonic() + 120
    while not (note.exists() and note.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=60)  # its stream ends when the job, which writes to it too, is gone
    job = Path("/proc") / note.read_text() / "stat"
    while job.exists() and job.read_text().rpartition(") ")[2][0] != "Z":
        assert time.monotonic() < deadline, "the job goes on"
        time.sleep(0.1)


def started(toy: Path, *arguments: str) -> subprocess.Popen[str]:
    """The toy command with one job at a time, left running."""
    command_line = [
        sys.executable, str(toy / "app.py"), "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1",
        f"meeting={toy / 'meeting'}", *arguments,
    ]  # fmt: skip
    environment = {"PYTHONPATH": f"{ROOT}:{toy}", "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    return subprocess.Popen(command_line, cwd=toy / "work", env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_jobs_of_submitit_run_apart_and_those_that_fail_are_named(toy: Path) -> None:
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    (toy / "meeting" / "somebody").touch()
    done = run(toy, "ablation=full", "seed=4,1", launcher=("submitit_local", "hydra.launcher.cpus_per_task=3"))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1] == "Failed jobs: 1 (seed=4)."
    assert (toy / "meeting" / "full").exists()
    assert done.stdout.splitlines()[-1] == "made full-1"
    assert any("RuntimeError: boom" in log.read_text() for log in (toy / "logs").rglob("*.err"))
    killed = run(toy, "ablation=full", "seed=3,1", launcher=("submitit_local", "hydra.launcher.cpus_per_task=3"))
    assert killed.returncode == 1 and killed.stderr.startswith("The launcher stopped ("), killed.stderr


def test_a_machine_without_slurm_is_told(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    monkeypatch.setenv("PATH", str(toy))
    done = run(toy, "seed=0,1", launcher=("submitit_slurm", "hydra.launcher.nodes=1"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith('The launcher stopped (RuntimeError): Could not detect "srun"')


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
        table = done.stdout[done.stdout.index("2 runs\n") :].splitlines()
        assert ["base", "trained"] in [line.split() for line in table]
        assert table[-1] == f"report: {tmp_path / 'runs' / 'dond.html'}" and (tmp_path / "runs/dond.html").exists()
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
    out.close()
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


def test_without_a_terminal_a_stage_in_which_nothing_ends_gives_a_sign_of_life(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(0, 1000, 10))
    monkeypatch.setattr("experiments.launch.terminal.time.monotonic", lambda: next(seconds))
    bar = Bar()
    bar.stage("games", 2)
    for _ in range(14):  # of ten seconds each
        bar.advance(0)
    assert capsys.readouterr().out.splitlines() == ["games: 0 of 2"] * 2  # a minute apart


def test_the_quickstart_is_two_arms_side_by_side_from_one_base() -> None:
    quick = "experiment=among_us_quickstart"
    game_only, full = (configure("train", quick, f"ablation={arm}") for arm in ("game_only", "full"))
    assert game_only.env.game == "among_us" and game_only.base == full.base and game_only.model == full.model
    assert run_folder(game_only) != run_folder(full)
    assert run_folder(full).name.startswith("among_us_quickstart-full-s12-") and full.base.seed == 12
    tuned = configure("train", quick)
    assert full.algo == tuned.algo and full.algo.credit.gamma == 0.99  # what is tuned for the game holds
    parts, bare = run_spec(full), run_spec(game_only)
    assert parts.losses["listening"].weight > 0 and parts.rewards["speaking"].weight > 0
    assert bare.losses["listening"].weight == 0 and bare.rewards["speaking"].weight == 0


@pytest.mark.slow
def test_the_quickstart_ends_with_a_table_of_its_arms(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", f"runs={runs}", "experiment=among_us_quickstart", *SMALL],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("training the base model") == 1
    folders = {json.loads(card.read_text())["arm"]: card.parent for card in runs.glob("*/run.json")}
    assert set(folders) == {"game_only", "full"}
    assert len(list(runs.glob("bases/*/evaluations/*/evaluation.json"))) == 1  # its games are the same for both
    table = [line for line in done.stdout.splitlines() if " | " not in line]  # after what the arms said
    assert ["base", "RL", "RL+L+S"] in [line.split() for line in table]
    assert any(line.startswith("game/win_rate/crewmates") for line in table)
    page = runs / "among_us_quickstart.html"
    assert table[-1] == f"report: {page}" and page.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}

"""Jobs side by side (`hydra/launcher=joblib`): what they print, how they fail, what they end with, on which device; and
the quickstart, which is two."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import joblib
import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.launch.overrides import UsageError, Where, check_command_line
from experiments.launch.sweeps import PLACE, THREADS, run_apart
from experiments.launch.terminal import Bar, Labelled, labelled
from experiments.setup.devices import check_bf16, device_of, pick_device
from experiments.setup.spec import run_spec
from marl.common.errors import UserError
from tests.composing import run_folder

ROOT = Path(__file__).resolve().parents[2]
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
    print("process", os.getpid(), "threads", os.environ["OMP_NUM_THREADS"], "place", os.environ.get("MARL_PLACE"))
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
        command_line, cwd=toy / "work", env=environment, capture_output=True, text=True, timeout=900
    )  # fmt: skip
    assert list((toy / "work").iterdir()) == [], done.stderr
    return done


def test_two_jobs_run_at_the_same_time_and_failed_ones_are_named(toy: Path) -> None:
    done = run(toy, "ablation=none,full", "seed=1,2")
    *out, last = done.stdout.splitlines()
    err = done.stderr.splitlines()
    assert done.returncode == 1 and last == "made custom-1 full-1"
    taken = []
    for job in ("none seed=1", "full seed=1"):
        own = [line.removeprefix(f"{job} | ") for line in out if line.startswith(f"{job} | ")]
        assert own[1:] == ["two", "lines"], own
        _, process, _, threads, _, place = own[0].split()
        taken.append(place)
        assert process != str(os.getpid()) and int(threads) == max(joblib.cpu_count() // 2, 1)
        assert f"{job} | to the other stream" in err
    assert sorted(taken) == ["0", "1"], "each of two side by side has a place, and so a GPU, of its own"
    assert all(" seed=1 | " in line for line in out) and "a stage" not in done.stdout + done.stderr
    first, second = (f"meeting={toy / 'meeting'} ablation={arm} seed=2" for arm in ("none", "full"))
    assert f"none seed=2 | {first}: seed 2 is unlucky: choose another one." in err
    assert f"full seed=2 | {second}: Traceback (most recent call last):" in err
    assert "full seed=2 | RuntimeError: boom" in err
    assert err[-1] == "Failed jobs: 2 (ablation=none seed=2; ablation=full seed=2)."


def test_a_job_whose_process_is_killed_is_named_and_the_others_go_on(toy: Path) -> None:
    (toy / "meeting" / "somebody").touch()
    done = run(toy, "ablation=full", "seed=3,4,1")
    *told, last = done.stderr.splitlines()
    assert done.returncode == 1 and last == "Failed jobs: 2 (seed=3; seed=4).", done.stderr
    assert "The job seed=3 did not end: its process died (SIGKILL(-9)), as where memory runs out." in told
    assert "seed=4 | RuntimeError: boom" in told
    assert done.stdout.splitlines()[-1] == "made full-1"


def test_jobs_die_with_a_sweep_that_is_killed(toy: Path) -> None:
    """Or they would hold their runs' folders against the same sweep, started again."""
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
def test_jobs_that_did_not_start_are_named_where_the_sweep_is_stopped(toy: Path) -> None:
    process = started(toy, "seed=1,2")
    deadline = time.monotonic() + 120
    while not (toy / "meeting" / "custom").exists():  # the first waits there for somebody
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.splitlines() == ["Failed jobs: 1 (seed=1).", "Jobs that did not start: 1 (seed=2)."]


@pytest.mark.slow
def test_jobs_of_submitit_run_apart_and_those_that_fail_or_die_are_named(toy: Path) -> None:
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    (toy / "meeting" / "somebody").touch()
    done = run(toy, "ablation=full", "seed=3,4,1", launcher=("submitit_local", "hydra.launcher.cpus_per_task=3"))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    job = f"meeting={toy / 'meeting'} ablation=full seed="
    *told, last = done.stderr.splitlines()
    assert last == "Failed jobs: 2 (seed=3; seed=4)."
    killed, boom = (next(line for line in told if f"{job}{seed} " in line) for seed in (3, 4))
    assert killed.startswith(f"The job {job}3 did not end: ") and boom.startswith(f"The job {job}4 failed: boom")
    assert "RuntimeError: boom" in Path(boom.partition("Its log: ")[2]).read_text()
    assert (toy / "meeting" / "full").exists()  # the one after them was waited for
    assert done.stdout.splitlines()[-1] == "made full-1"
    (log,) = (path for path in (toy / "logs").rglob("*.out") if "threads" in path.read_text())
    assert " threads 3 place None\ntwo\nlines\n" in log.read_text()


@pytest.mark.parametrize("setting", ["nodes", "tasks_per_node"])
def test_a_job_of_submitit_is_one_process(setting: str) -> None:
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    with pytest.raises(UsageError, match=rf"hydra\.launcher\.{setting}=2: .* so it must be 1; .* torchrun"):
        check_command_line("train", "conf", ["-m"], ["hydra/launcher=submitit_slurm", f"hydra.launcher.{setting}=2"])


def test_a_machine_without_slurm_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    monkeypatch.setenv("PATH", str(tmp_path))
    given = ["hydra/launcher=submitit_slurm", "seed=0,1"]
    with pytest.raises(UsageError, match=r"submitit_slurm: this machine has no Slurm \(srun is not found\)"):
        check_command_line("train", "conf", ["-m"], given)
    (tmp_path / "srun").touch(0o755)
    assert check_command_line("train", "conf", ["-m"], given).where is Where.SUBMITTED


def test_a_sweep_of_no_jobs_at_a_time_is_refused() -> None:
    with pytest.raises(UsageError, match=r"hydra\.launcher\.n_jobs=0: must be how many jobs run at a time"):
        check_command_line("train", "conf", ["-m"], ["hydra/launcher=joblib", "hydra.launcher.n_jobs=0"])


@pytest.mark.parametrize(("jobs", "n_jobs", "each"), [(3, -1, 5), (3, 2, 8), (40, -1, 1), (1, -1, 16)])
def test_cores_are_shared_out_among_the_jobs_that_there_are(
    jobs: int, n_jobs: int, each: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(joblib, "cpu_count", lambda: 16)
    monkeypatch.setattr(joblib, "effective_n_jobs", lambda n: 16 if n == -1 else n)
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    made: list[dict[str, str]] = []

    class Pool:
        def __init__(self, workers: int, env: dict[str, str], **_: object) -> None:
            made.append(env)
            raise KeyboardInterrupt  # one has been seen

    monkeypatch.setattr("joblib.externals.loky.ProcessPoolExecutor", Pool)
    calls = [(lambda *_: None, (number, [], None), {}) for number in range(jobs)]
    with pytest.raises(KeyboardInterrupt):
        run_apart(n_jobs, calls, tmp_path, {}, ())
    assert {made[0][name] for name in THREADS} == {str(each)}


def test_a_time_limit_that_nobody_keeps_is_refused() -> None:
    with pytest.raises(UsageError, match=r"hydra\.launcher\.timeout=5\.0: .* leave it null"):
        check_command_line("train", "conf", ["-m"], ["hydra/launcher=joblib", "hydra.launcher.timeout=5"])


@pytest.mark.parametrize(
    ("name", "gpus", "where", "device"),
    [
        ("auto", 0, {"job": 3}, "cpu"),
        ("auto", 1, {"job": 3}, "cuda:0"),
        ("auto", 4, {}, "cuda:0"),
        ("auto", 4, {"job": 3}, "cuda:3"),
        ("cuda", 4, {"job": 6}, "cuda:2"),
        ("cuda:1", 4, {"job": 6}, "cuda:1"),
        ("cpu", 4, {"job": 6, "rank": 1}, "cpu"),
        ("cuda", 4, {"job": 6, "rank": 1}, "cuda:1"),  # a process of torchrun; its number alone counts
        ("auto", 0, {"rank": 1}, "cpu"),
    ],
)
def test_jobs_share_the_gpus(name: str, gpus: int, where: dict[str, int], device: str) -> None:
    assert device_of(name, gpus, **where) == torch.device(device)


@pytest.mark.parametrize(
    ("name", "gpus", "where", "said"),
    [
        ("gpu", 1, {}, "device=gpu: must be auto, cpu, cuda or a GPU's number, as in cuda:1"),
        ("cuda:-1", 1, {}, "device=cuda:-1: must be auto"),
        ("cuda", 0, {}, "device=cuda: no CUDA device is there; use device=cpu or device=auto"),
        ("cuda:1", 0, {}, "device=cuda:1: no CUDA device is there"),
        ("cuda:1", 1, {}, "device=cuda:1: this machine has 1 GPU, cuda:0"),
        ("cuda:4", 4, {"job": 1}, "device=cuda:4: this machine has 4 GPUs, cuda:0 to cuda:3"),
        ("auto", 2, {"rank": 2}, "process 2 finds none left, this machine has 2 GPUs, .*; use --nproc-per-node 2"),
        ("cuda:1", 2, {"rank": 0}, "each process of torchrun takes a GPU of its own; use device=cuda"),
    ],
)
def test_gpus_that_are_not_there_are_refused(name: str, gpus: int, where: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        device_of(name, gpus, **where)


def test_a_jobs_number_says_which_gpu_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert pick_device("auto") == torch.device("cuda:0")
    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose("train", overrides=["+hydra.job.num=6"], return_hydra_config=True)
        one = compose("train", return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda:2") and pick_device("cpu").type == "cpu"
    monkeypatch.setenv(PLACE, "1")  # beside others: the seventh job may begin where the second one ended
    assert pick_device("auto") == torch.device("cuda:1")
    monkeypatch.delenv(PLACE)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", one)  # no sweep: there is no number
    assert pick_device("auto") == torch.device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert pick_device("auto") == torch.device("cuda:3")
    assert [device.index for device in current] == [0, 2, 2, 1, 0, 3]


@pytest.mark.parametrize("able", [False, True])
def test_bfloat16_is_refused_where_a_gpu_has_none(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: able or including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    said = r"^algo\.update\.bf16=true: Tesla T4 has no bfloat16, which would only be imitated; set it to false$"
    with nullcontext() if able else pytest.raises(UserError, match=said):
        check_bf16(torch.device("cuda:0"), "algo.update.bf16")


@pytest.mark.parametrize("instructions", ["avx512_bf16", "avx512_f"])
def test_a_processor_without_bfloat16_is_told(
    instructions: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {instructions: True}, raising=False)
    check_bf16(torch.device("cpu"), "base.bf16")
    told = "base.bf16=true: this processor has no instructions for bfloat16, so false would be faster\n"
    assert capsys.readouterr().out == ("" if instructions == "avx512_bf16" else told)


def test_which_gpu_is_no_part_of_a_runs_name() -> None:
    first, other, cpu = (run_folder(configure(f"device={name}")) for name in ("cuda", "cuda:1", "cpu"))
    assert first == other != cpu


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
    assert run_folder(game_only) != run_folder(full)
    assert run_folder(full).name.startswith("among_us_quickstart-full-s12-") and full.base.seed == 12
    tuned = configure()
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

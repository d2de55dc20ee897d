"""`make gpu`, on the processor: its checks, what it leaves unrun, and how it goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import gpu
from experiments.bench import checks
from experiments.bench.settings import Point
from marl.common.errors import UserError
from tests.composing import configure, parsed

CPU = torch.device("cpu")
POINT = "{games: 2, context: 256, width: 32, layers: 1, heads: 2, kv_heads: 1}"
TINY = [
    "env=dond",
    "model.layers=1",
    "model.hidden_size=32",
    "model.heads=2",
    "base.games=20",
    "base.lessons=[]",
    "algo.games=2",
]


def stages(out: Path, *overrides: str) -> dict[str, dict[str, Any]]:
    gpu.main(configure("gpu", "device=cpu", f"out={out}", *overrides))
    found: dict[str, dict[str, Any]] = json.loads((out / "gpu.json").read_text())
    return found


TWICE = ("deterministic twice", "adapters")  # also covered by test_train.py and test_adapters.py


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in TWICE)) for n in checks.CHECKS])
def test_a_processor_passes_every_check(name: str) -> None:
    if name == "adapters":
        pytest.importorskip("peft")
    said, holds = checks.CHECKS[name](CPU)
    assert holds, said


def test_a_sampler_that_is_off_by_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner moved after it had played, so that it looks as if stale weights had played."""
    right = checks.play

    def stale(policy: Any, *args: Any, **settings: Any) -> Any:
        episodes = right(policy, *args, **settings)
        with torch.no_grad():
            policy.lm.model.layers[0].mlp.up_proj.weight.mul_(1.001)
        return episodes

    monkeypatch.setattr(checks, "play", stale)
    for name in ("sampler and trainer", "captured decode steps"):
        said, holds = checks.CHECKS[name](CPU)
        assert not holds, said


def test_a_check_that_fails_without_a_word_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> tuple[str, bool]:
        raise AssertionError

    monkeypatch.setitem(checks.CHECKS, "bfloat16", broken)
    found = gpu.checked("bfloat16", CPU)
    assert (found["state"], found["said"]) == (gpu.FAILED, "AssertionError: ")


def test_a_failed_check_leaves_the_rest_unrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(device: torch.device) -> tuple[str, bool]:
        raise RuntimeError("no kernel image is available\nfor execution")

    def cannot(device: torch.device) -> tuple[str, bool]:
        raise checks.Unrun("it has no bfloat16")

    monkeypatch.setitem(checks.CHECKS, "sampler and trainer", broken)
    monkeypatch.setitem(checks.CHECKS, "bfloat16", cannot)
    found = stages(tmp_path, "checks=[sampler and trainer,bfloat16]", f"points=[{POINT}]")
    assert {name: (stage["state"], stage["said"]) for name, stage in found.items()} == {
        "check: sampler and trainer": ("failed", "RuntimeError: no kernel image is available"),
        "check: bfloat16": ("unrun", "it has no bfloat16"),
        "speed: 2 games, context 256, layers 1, width 32, float32": ("unrun", ""),
        "speed: baselines": ("unrun", ""),
        "learning": ("unrun", ""),
    }
    assert "speeds and learning would mean nothing" in capsys.readouterr().out


def test_checks_count_only_on_the_machine_they_ran_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fine(device: torch.device) -> tuple[str, bool]:
        calls.append(device)
        return "fine", True

    monkeypatch.setitem(checks.CHECKS, "adapters", fine)
    settings = ("checks=[adapters]", "minutes=0", f"points=[{POINT}]")
    for _ in range(2):
        assert stages(tmp_path, *settings)["check: adapters"]["state"] == "ok"
    assert len(calls) == 1
    monkeypatch.setattr(gpu, "machine", lambda: {"hardware": "another card"})
    assert stages(tmp_path, *settings)["check: adapters"]["state"] == "ok" and len(calls) == 2


class Machine:
    """Stands for `timed`: notes the widths that a benchmark is asked for, and writes rows up to one that `ends` it."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.ends: dict[int, str] = {}  # by width
        self.rows: list[dict[str, Any]] = []

    def __call__(self, command: list[str], seconds: float) -> dict[str, Any]:
        if command[0] != "experiments.benchmark":
            return {"state": "ok", "said": ""}
        given = {each.key_or_group: each.value() for each in map(parsed, command[1:])}
        points = [vars(Point(**{str(k): v for k, v in point.items()})) for point in given["points"]]
        self.asked.append([point["width"] for point in points])
        for point in points:
            if end := self.ends.get(point["width"]):
                return {"state": end, "said": "here"}
            for engine in ["ours"] if not given["baseline_games"] else ["ours", "generate", "TRL"]:
                skipped = "not installed" if engine == "TRL" else ""
                repeats = [] if skipped else [{"rollout_tokens_per_second": 7.0}]
                self.rows.append({"engine": engine, "point": point, "repeats": repeats, "skipped": skipped})
            path = Path(given["out"]) / "benchmark.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"rows": self.rows}))
        return {"state": "ok", "said": ""}


def test_a_point_that_fails_or_is_cut_off_starves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(gpu, "timed", machine)
    widths = ("32", "64", "96", "128")
    asked = ("checks=[]", f"points=[{', '.join(POINT.replace('32', width) for width in widths)}]", "baseline_games=1")
    speeds = (f"speed: 2 games, context 256, layers 1, width {width}, float32" for width in widths)
    names = [*speeds, gpu.BASELINES, "learning"]

    def states() -> list[tuple[str, str]]:
        found = stages(tmp_path, *asked)
        return [(found[name]["state"], found[name]["said"]) for name in names]

    fine, unrun = ("ok", "ours: rollout 7 tokens/s"), ("unrun", "")
    machine.ends = {32: "cut off"}  # as if all time had gone there
    assert states()[:4] == [("cut off", "here"), unrun, unrun, unrun]
    machine.ends = {96: "failed", 32: "cut off"}
    assert states()[:4] == [("cut off", "here"), fine, ("failed", "here"), fine]
    machine.ends = {}
    beside = ("unrun", "ours: rollout 7 tokens/s; generate: rollout 7 tokens/s; TRL: not installed")
    assert states() == [fine, fine, fine, fine, beside, ("ok", "")]
    assert [each for each in machine.asked if len(each) > 1 or each != [32]] == [
        [32, 64, 96, 128], [64, 96, 128, 32], [128, 32], [32, 96]
    ]  # fmt: skip
    assert states()[4] == beside and machine.asked[-2:] == [[32], [32]]  # nothing but the baselines is asked for again


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("minutes=-1", "minutes=-1: must be"),
        ("checks=[speed]", "must be among sampler and trainer"),
        (f"points=[{POINT.replace('games: 2', 'games: 0')}]", "games=0: must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        stages(tmp_path, override)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_speeds_and_a_run_are_made_once_and_what_was_cut_off_goes_on(tmp_path: Path) -> None:
    settings = [
        "checks=[]",
        f"points=[{POINT}]",
        "baseline_games=1",
        "update_rows=4",
        "random_games=2",
        "decode_steps=1",
    ]
    learning = [*TINY, "algo.iterations=2000", "eval.final_games=2", "eval.games=0"]
    asked = [*settings, f"learning={json.dumps(learning)}"]
    first = stages(tmp_path, *asked, "minutes=4", "learning_minutes=1")
    speed = next(stage for name, stage in first.items() if name.startswith("speed"))
    assert speed["state"] == "ok" and "ours: rollout " in speed["said"] and "generate: " in speed["said"]
    assert first["learning"]["state"] == "cut off"
    (run,) = (tmp_path / "runs").glob("dond-*")
    before = len((run / "metrics.jsonl").read_text().splitlines())
    assert before > 2
    again = stages(tmp_path, *asked, "minutes=1", "learning_minutes=1")
    assert again[next(n for n in again if n.startswith("speed"))] == speed  # not measured again
    assert len((run / "metrics.jsonl").read_text().splitlines()) > before

"""The benchmark, at its quick size: what must hold whatever the clock says."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module

from envs.among_us.environment import AmongUs
from envs.among_us.texts import COMPACT_TOKENS
from experiments import benchmark
from experiments.bench import bench as bench_module
from experiments.bench import measure
from experiments.bench.baselines import ALL_CALLS, trl_version
from experiments.bench.bench import Bench
from experiments.bench.figures import UNASKED, along, line, parts, ratios, table
from experiments.bench.measure import PHASES
from experiments.bench.pieces import STAGE_GAMES, game_alone
from experiments.bench.settings import DTYPES, INNER, Axes, Point, Settings, baseline_points, points_of
from experiments.bench.workload import Script
from experiments.setup.config import make, plain
from marl.common.errors import UserError
from marl.decoding.probes import size_of
from marl.model.policy import tiny_config
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rollout.games import env_maker

CPU = torch.device("cpu")


def run(*overrides: str) -> dict[str, Any]:
    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose("benchmark", overrides=["bench=quick", "device=cpu", *overrides])
    with (
        patch.object(bench_module, "git_commit", lambda: "0123456789ab"),  # whoever commits meanwhile
        patch.multiple(measure, TIMINGS=2, MOMENT=0.0005),  # rates are not what is tested
    ):
        benchmark.main(cfg)
    found: dict[str, Any] = json.loads((Path(cfg.out) / "benchmark.json").read_text())
    return found


def children_of(process: int) -> list[str]:
    return [child for known in Path(f"/proc/{process}/task").glob("*/children") for child in known.read_text().split()]


def command_of(process: str) -> str:
    """Empty where it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def settings_of(*overrides: str) -> tuple[Settings, dict[str, Any]]:
    """The benchmark's settings, and all that was composed."""
    with initialize_config_module("conf", version_base="1.3"):
        given = plain(compose("benchmark", overrides=list(overrides)))
    known = Settings.__dataclass_fields__
    return make(Settings, {k: v for k, v in given.items() if k in known}, "benchmark"), given


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("benchmark")
    return run(f"out={out}") | {"out": out}


@pytest.mark.slow
def test_it_goes_on_from_what_was_measured(found: dict[str, Any], tmp_path: Path) -> None:
    """Nothing is measured twice, and nothing is lost to other settings."""
    path, before = tmp_path / "benchmark.json", json.loads((found["out"] / "benchmark.json").read_text())
    lost = before["around"].pop()
    before["around"][0]["repeats"].pop()
    path.write_text(json.dumps(before))
    after = run(f"out={tmp_path}", "minutes=60")
    assert after["around"][-1]["point"] == lost["point"] and len(after["around"][-1]["repeats"]) == 2
    assert after["around"][0]["repeats"][:1] == before["around"][0]["repeats"]
    assert len(after["around"][0]["repeats"]) == 2
    assert after["around"][1:-1] == before["around"][1:] and after["baselines"] == before["baselines"]
    assert after["alone"] == before["alone"]
    with pytest.raises(UserError, match=r"out=.*: its benchmark\.json has other settings. Name another folder"):
        run(f"out={tmp_path}", "seed=1", "minutes=0")
    assert json.loads(path.read_text()) == after


def test_a_centre_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "free_memory", lambda device: 1_000)
    with pytest.raises(UserError, match=r"centre.slots=10, centre.context=256: needs at least .* KiB are free"):
        run(f"out={tmp_path}")


def measured(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in found["around"] + found["baselines"] if row["repeats"]]


def test_everything_is_measured(found: dict[str, Any]) -> None:
    assert [row["engine"] for row in found["baselines"]] == ["ours", "generate", "generate, cache kept", "TRL"]
    for row in found["around"] + found["baselines"][:3]:
        assert not row["skipped"] and len(row["repeats"]) == found["settings"]["repeats"]
    trl = found["baselines"][3]
    assert bool(trl["repeats"]) == (trl_version() is not None) != bool(trl["skipped"])
    assert trl["repeats"] or "pip install -e '.[bench]' -c constraints.txt" in trl["skipped"]
    assert (found["out"] / "cost.svg").read_text().count("<svg") == 1


def test_what_needs_no_model_is_measured_alone(found: dict[str, Any]) -> None:
    first, *others = found["alone"]["game"]
    assert first["games"] == 3 and len(others) + 1 == found["settings"]["repeats"]
    assert all(other["agent_steps"] == first["agent_steps"] for other in others)  # the same games
    assert first["agent_steps_per_second"] / first["games_per_second"] == pytest.approx(first["agent_steps"] / 3)
    sizes = [(each["games"], each["players"], each["actions"]) for each in found["alone"]["solver"]]
    assert sizes == list(STAGE_GAMES) and all(each["seconds_per_iteration"] > 0 for each in found["alone"]["solver"])


def test_agent_steps_are_living_players_times_calls_of_step() -> None:
    """Nobody can be killed or voted out, so that all five live through all twelve steps."""
    env = {"game": "among_us", "max_steps": 12, "cooldown": 100, "tasks": 9}
    assert game_alone(env_maker(env), games=2, seed=0)["agent_steps"] == 2 * 12 * 5


def test_the_dead_make_no_agent_steps() -> None:
    """Each death takes one living player from all later steps: what is counted is what the living lived through."""
    settings: dict[str, Any] = {"game": "among_us", "cooldown": 3, "max_steps": 60}
    lived, alive = 0, []

    class Watched(AmongUs):
        def step(self, actions: dict[str, str]) -> Any:
            nonlocal lived
            alive.append(int(self.state()[:, 2].sum()))
            lived += alive[-1]
            return super().step(actions)

    rules = {name: value for name, value in settings.items() if name != "game"}
    assert game_alone(lambda: Watched(**rules), games=5, seed=0)["agent_steps"] == lived
    assert min(alive) < 5


def test_all_engines_play_the_same_games(found: dict[str, Any]) -> None:
    """The command itself compares every stream token for token; here the numbers that it tells."""
    played = [row["played"] for row in found["baselines"] if row["repeats"]]
    assert all(facts == played[0] for facts in played)
    assert 0 < played[0]["sampled"] < played[0]["tokens"] and played[0]["answers"] > 0
    for row in found["around"]:
        if (row["point"]["games"], row["point"]["context"]) == (2, 256) and row["point"]["players"] == 5:
            assert row["played"] == found["around"][0]["played"]  # whatever the model's size and precision
        for repeat in row["repeats"]:
            # every token is read once; a seat's last reply may end unread, as nothing follows it
            unread = row["played"]["tokens"] - sum(repeat["read"].values())
            assert 0 <= unread <= row["played"]["slots"] * found["settings"]["reply_tokens"]


def test_shares_add_up(found: dict[str, Any]) -> None:
    for row in measured(found):
        assert set(row["summary"]["shares"]) == set(PHASES)
        assert sum(row["summary"]["shares"].values()) == pytest.approx(1)
        assert min(row["summary"]["shares"].values()) >= 0
        for repeat in row["repeats"]:
            assert repeat["seconds"]["text"] > 0 and repeat["seconds"]["tokenising"] > 0, row["point"]
            asked = repeat["seconds"]["beliefs"] + repeat["seconds"]["questions"]
            assert repeat["figures"]["answers_per_second"] == pytest.approx(row["played"]["answers"] / asked)
            assert sum(repeat["seconds"].values()) == pytest.approx(repeat["figures"]["seconds"])


def test_ratios_are_those_of_the_repeats(found: dict[str, Any]) -> None:
    ours = found["baselines"][0]
    for row in [row for row in found["baselines"][1:] if row["repeats"]]:
        for part, ratio in found["ratios"][row["engine"]].items():
            same = part.removesuffix(UNASKED)  # this engine reads nothing again
            each = [parts(a)[part] / parts(b)[same] for a, b in zip(row["repeats"], ours["repeats"], strict=True)]
            assert ratio["median"] == pytest.approx(np.median(each))
            assert ratio["low"] == pytest.approx(min(each)) and ratio["high"] == pytest.approx(max(each))
    assert set(found["ratios"]["generate"]) == {"rollout", f"rollout{UNASKED}"}  # it learns nothing
    assert set(found["ratios"]["generate, cache kept"]) == {"rollout"}
    assert set(found["ratios"]["bfloat16"]) == {"rollout", "update", "rollout and update"}


def test_nothing_is_faster_than_its_limit(found: dict[str, Any]) -> None:
    """So small a model is dozens of times slower than products and copies alone would be: no clock decides this."""
    for row in found["around"]:
        for repeat in row["repeats"]:
            for phase in repeat["limit"].values():
                assert phase["limit"] == max(phase["arithmetic"], phase["memory"])
            limit = sum(phase["limit"] for phase in repeat["limit"].values())
            assert repeat["figures"]["limit_seconds"] == pytest.approx(limit)
            assert limit < repeat["figures"]["seconds"]


def test_a_starved_measurement_says_so(found: dict[str, Any]) -> None:
    repeat = found["around"][0]["repeats"][0]
    assert repeat["figures"]["on_processor"] == repeat["on_processor"] > 0
    for share, told in ((0.2, True), (1.6, False)):
        assert ("the machine is busy" in line({"figures": {**repeat["figures"], "on_processor": share}})) == told


def test_one_thing_changes_along_an_axis(found: dict[str, Any]) -> None:
    assert [place for place, _ in along("games", found["around"])] == [1, 2]
    assert [place for place, _ in along("context", found["around"])] == [192, 256]
    assert [place for place, _ in along("players", found["around"])] == [4, 5]
    assert len(along("width", found["around"])) == 2


def test_memory_is_told_of_every_point(found: dict[str, Any]) -> None:
    printed = table(found["around"], found["baselines"], found["alone"]).splitlines()
    columns = next(text for text in printed if text.startswith("ours, around"))
    assert columns.endswith("decode: rows a pass, mean, memory's rise, MB, as predicted, MB")
    listed = [text for text in printed if text.startswith("  ") and " games of " in text]
    assert len(listed) == len(found["around"]) - 2
    for row in found["around"]:
        assert all({"peak_bytes", "predicted_bytes"} <= set(repeat["figures"]) for repeat in row["repeats"])


def made_up(engine: str, games: int, seconds: float, context: int = 1024, **more: Any) -> dict[str, Any]:
    """A row of one repeat that took so long, half of it in the rules and half in decode. `tokens`: of all streams;
    `macs`: of decode; anything else is a figure."""
    took = dict.fromkeys(PHASES, 0.0) | {"game": seconds / 2, "decode": seconds / 2}
    shares = {phase: each / seconds for phase, each in took.items()}
    tokens, macs = more.pop("tokens", 100 * games), more.pop("macs", 1.0)
    point = {"games": games, "players": 5, "context": context, "width": 256, "dtype": more.pop("dtype", "float32")}
    repeat = {"seconds": took, "read": {"decode": tokens, "prefill": 0}, "limit": {"decode": {"macs": macs}}}
    return {
        "engine": engine, "point": point, "parameters": 4, "repeats": [repeat], "skipped": "", "tried": {},
        "played": {"games": games, "tokens": tokens},
        "summary": {"figures": {name: {"median": value} for name, value in more.items()}, "shares": shares},
    }  # fmt: skip


def test_bfloat16_is_known_by_its_numbers() -> None:
    """Wherever it stands: a centre that was not measured is still the centre, and its neighbour is no bfloat16."""
    centre, half = made_up("ours", 51, 8.0), made_up("ours", 51, 4.0, dtype="bfloat16")
    other = made_up("ours", 64, 9.0)
    for around in ([centre, half, other], [centre, other, half]):
        assert ratios(around, [])["bfloat16"]["rollout"]["median"] == pytest.approx(0.5)
    assert "float32" not in ratios([centre, other], []) and "bfloat16" not in ratios([centre, other], [])


def test_ratios_are_of_one_model() -> None:
    """Baselines of a second width stand beside this engine at that width."""
    rows = []
    for width, ours, theirs in ((256, 1.0, 10.0), (512, 2.0, 6.0)):
        for engine, seconds in (("ours", ours), ("generate", theirs)):
            row = made_up(engine, 256, seconds)
            rows.append({**row, "point": {**row["point"], "width": width}})
    found = {name: each["rollout"]["median"] for name, each in ratios([], rows).items()}
    assert found == {"generate": pytest.approx(10.0), "generate, width 512": pytest.approx(3.0)}


# -- In which order, and on which games --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> tuple[Settings, dict[str, Any], Tokens]:
    settings, given = settings_of("bench=quick")
    env = {**given["env"], **given["games"]["among_us"]}
    tokens = Tokens(train_tokenizer(scripted_texts("among_us", [env_maker(env)], 0, games=20), COMPACT_TOKENS, 1024))
    return settings, env, tokens


class Told(Bench):
    """Measures nothing: says what would be measured, and how long `generate` takes with so many rows."""

    takes: dict[int, float] = {4: 3.0, 8: 2.0, 1: 1.0}  # noqa: RUF012

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[tuple[Any, ...]] = []

    def made(self, script: Script, seconds: float) -> dict[str, Any]:
        took = dict.fromkeys(PHASES, 0.0) | {"prefill": seconds / 2, "beliefs": seconds / 2}
        return {"seconds": took, "read": {}, "peak_bytes": None}

    def ours(self, script: Script, point: Point) -> dict[str, Any]:
        self.asked.append(("ours", point))
        return self.made(script, 1.0)

    def generate(self, script: Script, point: Point, keep_cache: bool, rows: int, calls: range) -> dict[str, Any]:
        self.asked.append(("generate, cache kept" if keep_cache else "generate", point, rows, calls))
        return self.made(script, self.takes[rows] + (rows == 8) * keep_cache * 5)

    def trl(self, script: Script, point: Point, rows: int, calls: range) -> dict[str, Any]:
        self.asked.append(("TRL", point, rows, calls))
        return self.made(script, 1.0)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Nothing is drawn, everything has room, TRL is there; what is said is kept."""
    said: list[str] = []
    for name, instead in (
        ("draw", lambda rows, path: None), ("free_memory", lambda device: 1 << 60), ("trl_version", lambda: "1"),
        ("say", said.append), ("playing_bytes", lambda *_, **__: 1000), ("learning_bytes", lambda *_, **__: 5000),
    ):  # fmt: skip
        monkeypatch.setattr(bench_module, name, instead)
    yield said


def test_a_slow_quarter_of_an_hour_is_no_points_own(
    small: tuple[Settings, dict[str, Any], Tokens], tmp_path: Path, quiet: list[str]
) -> None:
    """Everything once, then everything again; the fewest rows of a call were not the fastest, and that is found once.
    One call in six is computed where histories are read again, other ones in the second repeat, and a quarter of them
    to try rows. What is measured is kept: a second start asks for what is missing alone."""
    settings, env, tokens = small
    settings = replace(settings, axes=Axes(games=(1,)), baseline_every=6)
    points, beside = points_of(settings, None), baseline_points(settings, None)
    begin = Told(env, settings, CPU, tokens, tmp_path, points, beside)
    begin.alone = {"game": [{"agent_steps_per_second": 1.0}], "solver": [], "steps": []}
    begin.measure()
    assert [p.games for p in points] == [2, 2, 1] and beside == [points[0]]
    end, every = sys.maxsize, ALL_CALLS
    once, tried = [("ours", points[0]), ("ours", points[1])], range(begin.script(beside[0]).steps // 4)
    calls = [range(0, end, 6), range(3, end, 6)]
    rest = [
        [("generate, cache kept", beside[0], 4, every), ("TRL", beside[0], 8, own), ("ours", points[2])]
        for own in calls
    ]
    assert begin.asked == [
        *once, ("ours", beside[0]), *(("generate", beside[0], rows, range(3, end, 24)) for rows in (4, 8)),
        ("generate", beside[0], 8, calls[0]), *(("generate, cache kept", beside[0], rows, tried) for rows in (4, 8)),
        *rest[0],
        *once, ("ours", beside[0]), ("generate", beside[0], 8, calls[1]), *rest[1],
    ]  # fmt: skip
    kept = json.loads((tmp_path / "benchmark.json").read_text())
    assert [[(step["rows"], step["context"]) for step in repeat] for repeat in kept["alone"]["steps"]] == [
        [(4, 256)]
    ] * 2
    assert kept["baselines"][1]["tried"] == {"4": 3.0, "8": 2.0}

    kept["around"][0].update(repeats=[], skipped="there was no room")  # the centre itself
    kept["baselines"][1]["repeats"].pop()
    (tmp_path / "benchmark.json").write_text(json.dumps(kept))
    again = Told(env, settings, CPU, tokens, tmp_path, points, beside)
    again.go_on()
    assert [row.point for row in again.around] == points
    again.measure()
    assert again.asked == [("ours", points[0]), ("ours", points[0]), ("generate", beside[0], 8, calls[1])]
    assert not again.around[0].skipped


def test_a_batch_is_memory_of_the_processor(
    small: tuple[Settings, dict[str, Any], Tokens], tmp_path: Path, quiet: list[str]
) -> None:
    """100 bytes a token of 10 slots and of the 8 rows that are learned from, each 256 long; on a GPU none of them, nor
    the copies of two slots that speak, where a step is one token."""
    settings, env, tokens = small
    point = points_of(settings, None)[0]
    predicted = []
    for name in ("cpu", "cuda"):
        bench = Told(env, settings, torch.device(name), tokens, tmp_path, [point])
        bench.cell = 100.0
        predicted.append(bench.predicted_bytes(point))
    size = size_of(tiny_config(tokens.size, **bench.shape(point)), 256)
    assert predicted[0] - predicted[1] == 100 * 256 * (10 + 8)
    assert predicted[1] == 10 * size.slot + 5000 + 3 * size.weights


def test_a_gpu_without_bfloat16_and_memory_that_runs_out_leave_a_word(
    small: tuple[Settings, dict[str, Any], Tokens], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, env, tokens = small
    full, half_, *_ = points_of(settings, None)
    bench = Told(env, settings, CPU, tokens, tmp_path, [full, half_])
    monkeypatch.setattr(
        bench_module, "without_bf16", lambda device: "GPU X has no bfloat16, which would only be imitated"
    )

    def exhausted(script: Script, point: Point) -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    bench.ours = exhausted  # type: ignore[method-assign]
    bench.measure_around(bench.around, 0)
    assert [row.skipped for row in bench.around] == [
        "ran out of memory (CUDA out of memory. Tried to allocate 9 GiB)",
        "GPU X has no bfloat16, which would only be imitated",
    ]


def test_fewer_games_are_the_first_of_more(small: tuple[Settings, dict[str, Any], Tokens], tmp_path: Path) -> None:
    """So that what a game costs can be compared along the axis of games."""
    chosen, env, tokens = small
    few, many = (Point(games, 5, 384, 32) for games in (4, 24))
    engine = Bench(env, chosen, CPU, tokens, tmp_path, [few, many])
    first, script = engine.script(few), engine.script(many)
    assert first.games == script.games[:4] and first.streams == script.streams[:4]


@pytest.mark.slow
@pytest.mark.parametrize("contexts", [[256, 512], [1024]], ids=str)
def test_memory_is_predicted_within_a_tenth(contexts: list[int], tmp_path: Path) -> None:
    """Each point in a process that has done nothing else; one that has keeps some more, between what lives."""
    if measure.PeakMemory(CPU).before is None:
        pytest.skip("this system does not say how much memory a process took")
    centre = ["centre.slots=255", f"centre.context={contexts[0]}", "centre.width=256"]
    size = [*centre, "layers=5", "update_rows=128", "repeats=1"]
    axes = ["axes.games=[51]", f"axes.context={contexts}", "axes.players=[5]", "axes.width=[256]"]
    command = [sys.executable, "-m", "experiments.benchmark", "bench=quick", "apart=true", "threads=1", *size, *axes]
    subprocess.run([*command, f"out={tmp_path}"], check=True, capture_output=True)
    rows = json.loads((tmp_path / "benchmark.json").read_text())["around"]
    assert {row["point"]["context"] for row in rows} == set(contexts)
    assert {row["point"]["dtype"] for row in rows} == {"float32", "bfloat16"}
    for row in rows:
        assert 0.9 < row["repeats"][0]["predicted_bytes"] / row["repeats"][0]["peak_bytes"] < 1.1, row["point"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_a_points_process_dies_with_the_benchmark(tmp_path: Path) -> None:
    size = ["bench=quick", "apart=true", "centre.context=512", "axes.games=[16]", "axes.context=[512]"]
    command = [sys.executable, "-m", "experiments.benchmark", *size, f"out={tmp_path}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120

        def at_work() -> list[str]:
            return [child for child in children_of(process.pid) if "spawn_main" in command_of(child)]

        while not at_work():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        (worker,) = at_work()
        process.kill()
    deadline = time.monotonic() + 20
    while command_of(worker):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.1)


@pytest.mark.slow
def test_no_time_is_left(tmp_path: Path) -> None:
    found = run("minutes=0", f"out={tmp_path}")
    assert not measured(found)
    assert all("minutes" in row["skipped"] or "not installed" in row["skipped"] for row in found["baselines"])


def test_the_full_size_spans_what_it_says() -> None:
    settings, _ = settings_of()
    points = points_of(settings, None)
    centre = points[0]
    assert (centre.games * centre.players, centre.context, centre.players) == (255, 1024, 5)
    assert points[1] == replace(centre, dtype="bfloat16") and {p.dtype for p in points[2:]} == {"float32"}
    assert {p.games for p in points} >= {16, 1024} and {p.context for p in points} == {256, 512, 1024, 2048}
    assert {p.players for p in points} == {4, 5, 6, 7} and len(set(points)) == len(points)
    assert baseline_points(settings, None) == [replace(centre, games=256)]
    assert [round(parameters(settings, width) / 1e6) for width in settings.axes.width] == [1, 4, 9, 16]
    assert settings.centre.width == settings.axes.width[1]


def parameters(settings: Settings, width: int) -> int:
    shape = settings.shape(width)
    config = tiny_config(
        settings.vocab_size, hidden_size=width, intermediate_size=INNER * width, layers=shape.layers,
        heads=shape.heads, kv_heads=shape.kv_heads,
    )  # fmt: skip
    return size_of(config, 8).weights // 4


def test_the_size_for_a_gpu_spans_what_it_says() -> None:
    settings, given = settings_of("bench=gpu")
    assert given["device"] == "cuda" and settings.decode_steps > 1
    points, beside = points_of(settings, None), baseline_points(settings, None)
    sizes = {width: parameters(settings, width) for width in settings.axes.width}
    for found, wanted in zip(sizes.values(), (1e6, 15e6, 150e6, 500e6), strict=True):
        assert found == pytest.approx(wanted, rel=0.08)
    for dtype in DTYPES:
        assert {p.width for p in points if p.dtype == dtype and p.games == 256} == set(sizes)
    assert {(p.games, p.width) for p in beside} == {(256, width) for width in sizes} and beside[0] == points[0]
    for width in sizes:
        assert width // settings.shape(width).heads <= 128


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("centre.slots=0", "centre.slots=0: must be at least 1"),
        ("axes.games=[0]", "axes.games=0: must be at least 1"),
        ("repeats=often", "benchmark.repeats=often: must be a whole number"),
        ("centre.context=8", "centre.players=5, centre.context=8: not even the shortest game fits a context of 8"),
        ("axes.context=[8,256]", "^axes.context=8: not even the shortest game fits a context of 8 tokens; raise it"),
        ("axes.players=[5,99]", "^axes.players=99: env.players must be a whole number from 4 to 7, got 99"),
        ("baseline_rows=[]", r"baseline_rows=\[\]: must name at least one"),
        ("baseline_rows=[4,0]", "baseline_rows=0: must be at least 1"),
        ("baseline_every=0", "baseline_every=0: must be at least 1"),
        ("heads=3", "heads=3, kv_heads=1: a head's share of the width must be an even number"),
        ("kv_heads=3", "kv_heads=3: kv_heads must divide heads"),
        ("precisions=[float16]", "precisions=.*: must be of float32, bfloat16"),
        ("shapes=[{width: 32, layers: 0, heads: 1, kv_heads: 1}]", "layers=0.*: each must be at least 1"),
    ],
)
def test_what_cannot_be_measured(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        run(override, f"out={tmp_path}")


def test_computed_calls_are_told(found: dict[str, Any]) -> None:
    """In the file and in the table; in a line where some were passed over."""
    row = found["baselines"][1]
    calls = row["repeats"][0]["calls"]
    assert calls["computed"] == calls["all"] > 0 and "calls" not in found["baselines"][0]["repeats"][0]
    printed = table(found["around"], found["baselines"], found["alone"])
    assert f"{calls['all']} of {calls['all']} computed" in printed
    assert f"{row['played']['mean_stream']} on average, {row['played']['longest_stream']} at most" in printed
    some = {**row["repeats"][0], "calls": {"all": 110, "computed": 9}}
    assert "by 9 of 110 calls" in line(some) and " calls" not in line(row["repeats"][0])

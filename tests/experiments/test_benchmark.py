"""The benchmark, at its quick size: what must hold whatever the clock says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from envs.among_us.environment import AmongUs
from envs.among_us.texts import COMPACT_TOKENS
from experiments import benchmark
from experiments.bench import bench as bench_module
from experiments.bench import measure
from experiments.bench.baselines import ALL_CALLS, GenerateAgent, trl_iteration, trl_version
from experiments.bench.bench import Bench, made_by
from experiments.bench.figures import UNASKED, along, labels, line, parts, ratios, table, targets
from experiments.bench.measure import PHASES, Counts, Load, Rates, Shape, Stopwatch, UpdateCounts, limits, step_alone
from experiments.bench.pieces import STAGE_GAMES, game_alone
from experiments.bench.settings import DTYPES, INNER, Axes, Point, Settings, baseline_points, points_of
from experiments.bench.workload import FULL, ReplayAgent, Script, play_recorded, record
from experiments.setup.config import make, plain
from marl.agents.base import Agent, Key
from marl.common.errors import UserError
from marl.decoding.probes import size_of
from marl.kernels import ragged
from marl.kernels.cpu import takes
from marl.model.policy import Policy, tiny_config, tiny_lm
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rollout.games import env_maker, game_module
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode, Stream

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
    fresh = run(f"out={tmp_path}", "seed=1", "minutes=0")
    assert json.loads((tmp_path / "benchmark-1.json").read_text()) == after
    assert not any(row["repeats"] for row in fresh["around"] + fresh["baselines"])
    assert fresh["around"][0]["skipped"] == "the time set as `minutes` was spent"


def test_a_centre_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "free_memory", lambda device: 1_000)
    with pytest.raises(
        UserError, match=r"centre.slots=10, centre.context=256: needs at least .* KiB are free: not even"
    ):
        run(f"out={tmp_path}")
    with pytest.raises(UserError, match=r"centre.slots=1000000, .* games \([0-9]* slots\) would fit"):
        monkeypatch.setattr(bench_module, "free_memory", lambda device: 10**8)
        run(f"out={tmp_path}", "centre.slots=1000000")


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
    for share, others, told in ((0.2, 0.0, True), (1.6, 0.05, False), (1.0, 0.5, True)):
        figures = {**repeat["figures"], "on_processor": share, "others": others}
        assert ("the machine is busy" in line({"figures": figures})) == told
    starved = {**repeat, "figures": {**repeat["figures"], "on_processor": 1.0, "others": 0.5}}
    calm = {**repeat, "figures": {**repeat["figures"], "on_processor": 1.9, "others": 0.0}}
    row = {**found["around"][0], "repeats": [starved, calm]}
    assert "others were at work during 1 of 2 measurements" in table([row], [], found["alone"])


def test_what_others_take_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors for ten seconds: eight of the twenty are this process's, nine belong to others, three to nobody;
    what is counted twice, for guests, or waited for is no work."""
    stat, ticks = tmp_path / "stat", os.sysconf("SC_CLK_TCK")

    def write(user: int, idle: int, waiting: int, stolen: int) -> None:
        fields = [user, 100, 100, idle, waiting, 100, 100, stolen, user, 0]
        rows = [f"{name} {' '.join(str(n * ticks) for n in fields)}" for name in ("cpu ", "cpu0", "cpu1")]
        stat.write_text("\n".join([*rows, "intr 5 0", ""]))

    clock = SimpleNamespace(perf_counter=lambda: 50.0, process_time=lambda: 7.0)
    monkeypatch.setattr(measure, "time", clock)
    write(1000, 500, 60, 40)
    load = Load(stat)
    clock.perf_counter, clock.process_time = lambda: 60.0, lambda: 15.0
    write(1015, 502, 61, 42)
    assert load.own() == pytest.approx(0.8) and load.others() == pytest.approx(9 / 20)
    assert Load(tmp_path / "nowhere").others() is None


def test_one_thing_changes_along_an_axis(found: dict[str, Any]) -> None:
    assert [place for place, _ in along("games", found["around"])] == [1, 2]
    assert [place for place, _ in along("context", found["around"])] == [192, 256]
    assert [place for place, _ in along("players", found["around"])] == [4, 5]
    assert len(along("width", found["around"])) == 2


def test_what_is_meant_to_be_reached_is_told(found: dict[str, Any]) -> None:
    """What is asked of 256 games, or of the ends of an axis, was not measured by a few games."""
    told = {t["name"]: t for t in found["targets"]}
    unmeasured = [name for name, t in told.items() if t["value"] is None]
    assert len(told) == 28 and [name.split()[0] for name in unmeasured] == [
        "generate", "generate,", "TRL", "TRL,", "TRL", "TRL",
        "a", "decode", "the", "rows", "rollout", "rollout", "a", "a",
        "what", "its", "a", "prefill", "decode", "growth",
    ]  # fmt: skip
    for t in told.values():
        bounded = t["least"] is not None or t["most"] is not None
        assert (t["met"] is None) == (t["value"] is None or not bounded)
    update = told["update, float32: share of its limit"]
    assert update["value"] == found["around"][0]["summary"]["figures"]["update_of_limit"]["median"]
    printed = table(found["around"], found["baselines"], found["alone"])
    assert "bookkeeping, which is not in that sum" in printed


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


def told(
    around: Sequence[dict[str, Any]], baselines: Sequence[dict[str, Any]] = (), steps: Sequence[Any] = ()
) -> dict[str, Any]:
    """By its name, a target's value and whether it is met."""
    found = targets(around, baselines, {"game": [{"agent_steps_per_second": 19e3}], "steps": [steps]})
    return {t["name"].strip(): (t["value"], t["met"]) for t in found}


def test_targets_of_made_up_figures() -> None:
    """1 s a game at 64 games and 1.2 at 256 and at 1,024, where games are longer by as much; half of it in the rules;
    `generate` takes twelve times as long, TRL seven times, without its updates."""
    memory: dict[str, Any] = {"peak_bytes": 100.0, "predicted_bytes": 85.0}
    around = [
        made_up("ours", 64, 64.0, tokens=6400, update_of_limit=0.59, **memory),
        made_up("ours", 256, 307.2, tokens=25600, decode_of_limit=0.5, decode_of_full=0.4, decode_rows=140.0),
        made_up("ours", 1024, 1228.8, tokens=122880, peak_bytes=100.0, predicted_bytes=125.0),
    ]
    baselines = [made_up("ours", 256, 1.0), made_up("generate", 256, 12.0), made_up("TRL", 256, 4.0)]
    baselines[2]["repeats"][0]["seconds"] |= {"questions": 3.0}
    baselines[1]["repeats"][0]["seconds"] |= {"prefill": 2.0, "questions": 4.0}
    assert told(around, baselines) == {
        "generate at 256 games, context 1,024: times as long, rollout": (18.0, True),
        "generate, had it read nothing again for answers": (14.0, None),
        "TRL at 256 games, context 1,024: times as long, rollout": (7.0, True),
        "TRL, had it read nothing again for answers": (4.0, None),
        "TRL at 256 games, context 1,024: times as long, with update": (None, None),
        "TRL with update, had it read nothing again for answers": (None, None),
        "a step of 256 rows, 1,024 tokens each: share of its limit": (None, None),
        "decode at 256 games, context 1,024: share of its limit": (0.5, True),
        "the same, had every pass 256 rows": (0.4, False),
        "rows that a pass had, on average": (140.0, None),
        "update, float32: share of its limit": (0.59, False),
        "update, bfloat16: share of its limit": (None, None),
        "game, text and tokenising: share of a rollout": (0.5, False),
        "bookkeeping, which is not in that sum": (0.0, None),
        "rollout of a game from 64 to 1,024 games: most unlike the first's": (pytest.approx(1.2), False),
        "rollout of a token": (pytest.approx(1.2), None),
        "a game with its update": (None, None),
        "a step of 256 rows, from 256 to 2,048 tokens each: growth without attention": (None, None),
        "what it takes more from 256 to 2,048 tokens, by what torch's attention does": (None, None),
        "its growth by that of its multiply-adds": (None, None),
        "a pass that reads, from 256 to 2,048 tokens: growth without attention": (None, None),
        "prefill in games: growth by that of its multiply-adds": (None, None),
        "decode in games: growth by that of its multiply-adds": (None, None),
        "growth of its passes' rows, which share what a pass costs": (None, None),
        "the game with random players, one core: agent-steps/s": (19e3, False),
        "memory as predicted, float32: of what it took": (0.85, False),
        "memory as predicted, of all points the worst": (1.25, False),
    }


def test_games_are_judged_by_their_cost() -> None:
    """Each fills its context, so that they are alike; what a token costs stands beside it."""
    flat = "rollout of a game from 64 to 1,024 games: most unlike the first's"
    around = [made_up("ours", 64, 64.0, tokens=6400), made_up("ours", 1024, 1536.0, tokens=153600)]
    assert told(around)[flat] == (pytest.approx(1.5), False)
    assert told(around)["rollout of a token"] == (pytest.approx(1.0), None)
    around[0]["repeats"][0]["seconds"]["update"] = 64.0  # 2 s a game, and 1.5 + 1.25 s
    around[1]["repeats"][0]["seconds"]["update"] = 1280.0
    assert told(around)["a game with its update"] == (pytest.approx(1.375), False)


@pytest.mark.parametrize("missing", [0, 1])
def test_an_axis_without_its_ends_was_not_measured(missing: int) -> None:
    """Skipped for want of room or time, the end stands in the list without repeats."""
    games = [made_up("ours", 64, 64.0), made_up("ours", 256, 256.0), made_up("ours", 1024, 1024.0)]
    long = [made_up("ours", 51, 1.0), made_up("ours", 51, 1.0, 256), made_up("ours", 51, 1.0, 2048)]
    flat = "rollout of a game from 64 to 1,024 games: most unlike the first's"
    growth = "decode in games: growth by that of its multiply-adds"
    assert told(games)[flat][0] is not None and told(long)[growth][0] is not None
    games[2 * missing]["repeats"], long[1 + missing]["repeats"] = [], []
    assert told([games[1], *games])[flat] == told(long)[growth] == (None, None)


def test_targets_of_256_games_are_asked_of_256_games() -> None:
    slower = "generate at 256 games, context 1,024: times as long, rollout"
    for games, context in ((51, 1024), (256, 512)):
        baselines = [made_up("ours", games, 1.0, context), made_up("generate", games, 12.0, context)]
        assert told([made_up("ours", 51, 1.0)], baselines)[slower] == (None, None)
    wide = [made_up("ours", 51, 1.0, 512), made_up("ours", 256, 1.0, 512, decode_of_limit=0.9)]
    assert told(wide)["decode at 256 games, context 1,024: share of its limit"] == (None, None)


def test_attention_alone_may_grow() -> None:
    """A step of 1 s at the short end and 2.5 at the long one, of which attention takes .5 and 1.9; a pass that reads of
    2 and 4 s, attention's .5 and 2. In games both phases take 6 times as long over 3 times the multiply-adds, for which
    there is no bound: in decode passes of four times as many rows share what a pass costs, and attention's may take
    longer than others."""
    ends = [
        made_up("ours", 51, 1.0, 256, macs=1e9, decode_rows=10.0),
        made_up("ours", 51, 6.0, 2048, macs=3e9, decode_rows=40.0),
    ]
    for row, seconds, macs in zip(ends, (1.0, 6.0), (1.0, 3.0), strict=True):
        repeat = row["repeats"][0]
        repeat["seconds"]["prefill"], repeat["read"]["prefill"] = seconds, 10
        repeat["limit"]["prefill"] = {"macs": macs}
    steps: list[dict[str, Any]] = [
        {"rows": 256, "context": n, "seconds": spent, "macs": macs, "limit": 0.5, "attention": torchs, "products": 0.3,
         "own_attention": own, "reading": reading, "reading_attention": reading_own}
        for n, spent, macs, torchs, own, reading, reading_own in (
            (256, 1.0, 1.0, 0.2, 0.5, 2.0, 0.5),
            (1024, 2.0, 2.0, 0.9, 1.4, 3.0, 1.3),
            (2048, 2.5, 3.0, 1.4, 1.9, 4.0, 2.0),
        )
    ]  # fmt: skip
    found = told([made_up("ours", 51, 2.0), *ends], steps=steps)
    whole = "a step of 256 rows, from 256 to 2,048 tokens each: growth without attention"
    reading = "a pass that reads, from 256 to 2,048 tokens: growth without attention"
    assert found[whole] == (pytest.approx(0.6 / 0.5), False)
    assert found[reading] == (pytest.approx(2.0 / 1.5), False)
    assert found["its growth by that of its multiply-adds"] == (pytest.approx(2.5 / 3), None)
    assert found["a step of 256 rows, 1,024 tokens each: share of its limit"] == (0.25, False)
    assert found["what it takes more from 256 to 2,048 tokens, by what torch's attention does"] == (
        pytest.approx(1.5 / 1.2), False
    )  # fmt: skip
    assert found["prefill in games: growth by that of its multiply-adds"] == (2.0, None)
    assert found["decode in games: growth by that of its multiply-adds"] == (pytest.approx(2.0), None)
    assert found["growth of its passes' rows, which share what a pass costs"] == (4.0, None)
    steps[0]["reading_attention"] = 0.1  # now it takes .1 more than the rest that it had
    assert told(ends, steps=steps)[reading] == (pytest.approx(2.0 / 1.9), True)
    fewer = told(ends, steps=[{**step, "rows": 255} for step in steps])
    assert fewer["a step of 256 rows, 1,024 tokens each: share of its limit"] == (None, None)
    elsewhere = told(ends, steps=[{**step, "own_attention": None, "reading_attention": None} for step in steps])
    assert elsewhere[whole] == elsewhere[reading] == (None, None)
    before = told(ends, steps=[{k: v for k, v in step.items() if "ing" not in k and "own" not in k} for step in steps])
    assert before[whole] == before[reading] == (None, None)  # figures of an earlier version


def test_bfloat16_is_known_by_its_numbers() -> None:
    """Wherever it stands: a centre that was not measured is still the centre, and its neighbour is no bfloat16."""
    centre, half = made_up("ours", 51, 8.0), made_up("ours", 51, 4.0, dtype="bfloat16", update_of_limit=0.45)
    other = made_up("ours", 64, 9.0)
    for around in ([centre, half, other], [centre, other, half]):
        assert ratios(around, [])["bfloat16"]["rollout"]["median"] == pytest.approx(0.5)
        assert told(around)["update, bfloat16: share of its limit"] == (0.45, True)
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


def test_figures_of_another_commit_say_how_to_go_on(
    small: tuple[Settings, dict[str, Any], Tokens], tmp_path: Path, quiet: list[str]
) -> None:
    settings, env, tokens = small
    bench = Told(env, settings, CPU, tokens, tmp_path, points_of(settings, None))
    bench.write()
    path = tmp_path / "benchmark.json"
    kept = json.loads(path.read_text())
    for commit, how in (("0123456789ab", "git worktree add ../0123456789ab 0123456789ab"), ("0123+", "is no commit")):
        path.write_text(json.dumps({**kept, "git_commit": commit}))
        quiet.clear()
        bench.go_on()
        assert "another commit (git_commit)" in quiet[0] and how in quiet[1] and not path.exists()
    path.write_text(json.dumps({**kept, "device": "cuda"}))
    quiet.clear()
    bench.go_on()
    assert len(quiet) == 1 and "(device)" in quiet[0]


@pytest.mark.usefixtures("torchs_attention")
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
    assert predicted[0] - predicted[1] == 100 * 256 * (10 + 8) + 2 * size.slot
    assert predicted[1] == 10 * size.slot + 5000 + 3 * size.weights


def test_a_point_without_room_says_once_how_many_games_have(
    small: tuple[Settings, dict[str, Any], Tokens], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, env, tokens = small
    centre = points_of(chosen, None)[0]
    told = Told(env, chosen, CPU, tokens, tmp_path, [centre, replace(centre, games=50)])
    models = 2 * size_of(told.config(centre), centre.context).weights
    free = told.predicted_bytes(replace(centre, games=7)) + models
    monkeypatch.setattr(bench_module, "free_memory", lambda device: free)
    said: list[str] = []
    monkeypatch.setattr(bench_module, "say", said.append)
    assert [told.has_room(row) for row in (*told.around, *told.around)] == [True, False, True, False]
    assert not told.around[0].skipped and told.around[1].skipped.endswith(": 7 games (35 slots) would fit")
    assert len(said) == 1 and said[0].startswith("ours, 50 games of 5, context 256, width 32, float32: needs at least ")


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


def test_what_the_same_bits_cost_is_measured_apart() -> None:
    """Figures of one mode are no start for the other's; on a CPU both compute the same."""
    plain_, same = (settings_of("bench=quick", f"deterministic={mode}")[0] for mode in ("false", "true"))
    made = [made_by({"game": "dond"}, settings, CPU)["settings"] for settings in (plain_, same)]
    assert {name for name, value in made[0].items() if made[1][name] != value} == {"deterministic"}


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


# -- Its parts ---------------------------------------------------------------------------------------------------------


ENVS: dict[str, dict[str, Any]] = {
    "among_us": {"game": "among_us", "style": "compact", "players": 4, "max_steps": 40},
    "dond": {"game": "dond", "style": "compact", "max_entries": 20},
}


def tokens_of(game: str) -> Tokens:
    texts = scripted_texts(game, [env_maker(ENVS[game])], 0, games=20)
    return Tokens(train_tokenizer(texts, game_module(game).COMPACT_TOKENS, 1024))


@pytest.fixture(scope="module", params=["among_us", "dond"])
def workload(request: pytest.FixtureRequest) -> tuple[Policy, Script]:
    game = request.param
    env, tokens = ENVS[game], tokens_of(game)
    script = record(env, 256, 3, tokens, reply_tokens=12, seed=0)
    policy = Policy(tiny_lm(tokens.size, hidden_size=32, layers=2, context=256), tokens).eval()
    return policy, script


def played(agent: Agent, script: Script) -> list[Episode]:
    episodes = rollout(script.games, everyone(agent), script.make_env, len(script.games))
    script.check(episodes)
    return episodes


def test_engines_believe_the_same(workload: tuple[Policy, Script]) -> None:
    """Belief answers are computed, not forced: every engine reads the right tokens at the right places."""
    policy, script = workload
    watch = Stopwatch(CPU)
    ours = played(ReplayAgent(policy, script, 256, watch), script)
    assert sum(len(e.beliefs) for e in ours) == script.answers > 0
    for keep_cache in (False, True):
        for rows in (1, 64):
            theirs = played(GenerateAgent(policy, script, watch, rows, keep_cache), script)
            for a, b in zip(ours, theirs, strict=True):
                for mine, other in zip(a.beliefs, b.beliefs, strict=True):
                    np.testing.assert_allclose(other.probs, mine.probs, atol=1e-5)


def test_questions_of_a_call_are_answered_in_one_product(
    workload: tuple[Policy, Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As this engine answers those of a pass."""
    policy, script = workload
    agent = GenerateAgent(policy, script, Stopwatch(CPU), 64, False)
    products: list[int] = []
    calls: list[int] = []
    logits, answer = policy.logits, agent._answer

    def multiply(hidden: torch.Tensor) -> torch.Tensor:
        products.append(len(hidden))
        return logits(hidden)

    def call(keys: Sequence[Key]) -> None:
        calls.append(len(keys))
        answer(keys)

    monkeypatch.setattr(policy, "logits", multiply)
    monkeypatch.setattr(agent, "_answer", call)
    played(agent, script)
    assert len(products) == len(calls) < sum(products) == script.answers


@pytest.mark.parametrize("few_shapes", [False, True], ids=["as many rows as there are", "shapes of a captured graph"])
@pytest.mark.parametrize("steps", [1, 4])
def test_speech_in_several_steps_is_the_recorded_one(
    steps: int, few_shapes: bool, workload: tuple[Policy, Script]
) -> None:
    """Token for token (`played` compares), with the same work counted: each token of a reply but its last is read in
    decoding, which has at most a row for each game, as one player at a time speaks."""
    policy, script = workload
    agent = ReplayAgent(policy, script, 256, Stopwatch(CPU), steps)
    agent.engine.few_shapes = few_shapes
    one = ReplayAgent(policy, script, 256, Stopwatch(CPU))
    one.engine.ragged = False
    for mine, other in zip(played(agent, script), played(one, script), strict=True):
        for a, b in zip(mine.beliefs, other.beliefs, strict=True):
            np.testing.assert_allclose(a.probs, b.probs, atol=1e-5)
    decode, singly, mixed = agent.engine.counts["decode"], one.engine.counts["decode"], agent.engine.counts["mixed"]
    assert singly.tokens == sum(len(ids) - 1 for own in script.replies.values() for ids in own)
    assert (mixed.tokens > 0) == (steps == 1) and not one.engine.counts["mixed"].tokens
    for what in ("tokens", "attended"):
        ours, theirs = (sum(getattr(c, what) for c in a.engine.counts.values()) for a in (agent, one))
        assert ours == theirs
    if steps > 1:
        assert (decode.tokens, decode.attended, decode.cached) == (singly.tokens, singly.attended, singly.cached)
        assert decode.passes >= singly.passes
    assert (decode.outputs, singly.outputs) == (decode.tokens * (steps > 1), 0)
    assert 1 <= singly.rows <= len(script.games)
    assert bool(agent.engine._writers) == (few_shapes and steps > 1)


def longest(streams: dict[str, Stream]) -> int:
    return max(map(len, streams.values()))


def test_recorded_games_have_what_was_asked_for(workload: tuple[Policy, Script]) -> None:
    _, script = workload
    assert script.longest <= 256
    assert script.sampled == sum(len(ids) for own in script.replies.values() for ids in own)
    said = [len(ids) for own in script.replies.values() for ids in own if len(ids) > 1]
    assert said and max(said) >= 12
    facts = script.facts()
    assert facts["mean_stream"] == round(facts["tokens"] / facts["slots"]) <= facts["longest_stream"]


@pytest.mark.parametrize(("game", "context"), [("among_us", 150), ("among_us", 200), ("dond", 110)])
def test_each_game_fills_its_context(game: str, context: int) -> None:
    """Its longest stream fits, and one step later would not have; or the game was over by itself."""
    tokens = tokens_of(game)
    script = record(ENVS[game], context, 12, tokens, reply_tokens=12, seed=0)
    assert len(script.games) == len(set(script.games)) == 12
    assert len(script.cuts) > 4 and len(set(script.cuts.values())) > 1
    later = {seed: cut + 1 for seed, cut in script.cuts.items()}
    episodes, _ = play_recorded(ENVS[game], script.games, tokens, 12, 1 << 20, later)
    for played_, streams, episode in zip(script.games, script.streams, episodes, strict=True):
        assert FULL * context <= longest(streams) <= context
        if played_.seed in script.cuts:
            assert longest(episode.streams) > context
            assert all(episode.streams[a].tokens[: len(s)] == s.tokens for a, s in streams.items())
        else:
            assert episode.outcome["how"] and episode.streams == streams


def test_where_few_games_are_full_the_longest_are_played() -> None:
    """No game of four steps comes near this context: of eight times as many the longest, in the order drawn."""
    env, tokens = {**ENVS["among_us"], "max_steps": 4}, tokens_of("among_us")
    drawn = draw_games(0, count=24)
    script = record(env, 4096, 3, tokens, reply_tokens=12, seed=0)
    episodes, _ = play_recorded(env, drawn, tokens, 12, 4096, {})
    sizes = [longest(episode.streams) for episode in episodes]
    assert not script.cuts and sorted(map(longest, script.streams)) == sorted(sizes)[-3:]
    assert [drawn.index(game) for game in script.games] == sorted(drawn.index(game) for game in script.games)


@pytest.mark.parametrize("calls", [ALL_CALLS, range(0, sys.maxsize, 3), range(2, sys.maxsize, 3), range(0)])
def test_calls_that_are_passed_over_change_no_game(calls: range, workload: tuple[Policy, Script]) -> None:
    """Token for token (`played` compares); as many calls are computed as were asked for, and questions of the others
    are answered evenly."""
    policy, script = workload
    agent = GenerateAgent(policy, script, Stopwatch(CPU), 64, False, calls)
    whole = GenerateAgent(policy, script, Stopwatch(CPU), 64, False)
    episodes, full = played(agent, script), played(whole, script)
    assert agent.work == whole.work == whole.computed
    total = agent.work["calls"]
    assert agent.computed["calls"] == len([n for n in range(total) if n in calls])
    assert agent.work["sampling"] == script.sampled and agent.work["beliefs"] == script.answers
    assert agent.work["decode"] == script.sampled - sum(map(len, script.replies.values()))
    same = 0
    for some, all_ in zip(episodes, full, strict=True):
        for a, b in zip(some.beliefs, all_.beliefs, strict=True):
            assert a.probs.sum() == pytest.approx(1) and a.probs.shape == b.probs.shape
            same += np.allclose(a.probs, b.probs, atol=1e-6)
    assert same >= agent.computed["beliefs"] and (same == script.answers) == (calls == ALL_CALLS)


def test_each_call_is_computed_in_one_of_as_many_repeats(workload: tuple[Policy, Script]) -> None:
    policy, script = workload
    agents = [GenerateAgent(policy, script, Stopwatch(CPU), 64, False, range(n, sys.maxsize, 3)) for n in range(3)]
    for agent in agents:
        played(agent, script)
    assert sum((agent.computed for agent in agents), Counter()) == agents[0].work


def test_computed_calls_are_scaled_by_their_work(workload: tuple[Policy, Script]) -> None:
    """By hand: a quarter of the tokens to be read, half of those to be written, a tenth of the questions, no sampling
    at all. Where all calls are computed, nothing changes."""
    policy, script = workload
    agent = GenerateAgent(policy, script, Stopwatch(CPU), 64, False)
    agent.work = Counter(calls=9, prefill=400, decode=60, sampling=5, beliefs=30)
    agent.computed = Counter(calls=2, prefill=100, decode=30, beliefs=3)
    seconds = dict.fromkeys(PHASES, 1.0)
    agent.scale(seconds)
    assert seconds == dict.fromkeys(PHASES, 1.0) | {"prefill": 4.0, "decode": 2.0, "beliefs": 10.0}
    watch = Stopwatch(CPU)
    whole = GenerateAgent(policy, script, watch, 64, False, range(0, sys.maxsize, 1))
    played(whole, script)
    before = dict(watch.seconds)
    whole.scale(watch.seconds)
    assert watch.seconds == before and before["decode"] > 0


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


@pytest.mark.skipif(trl_version() is None, reason="TRL is not installed")
def test_trl_learns_from_the_first_games(workload: tuple[Policy, Script]) -> None:
    """All games are played, one call in three computed; a game's seats are learned from, which is scaled to all."""
    policy, script = workload
    watch, players = Stopwatch(CPU), len(script.streams[0])
    episodes, agent = trl_iteration(policy, script, watch, 8, 2048, players, range(0, sys.maxsize, 3))
    script.check(episodes)
    assert 0 < agent.computed["calls"] <= agent.work["calls"] // 3 + 1 and watch.seconds["update"] > 0
    assert watch.seconds["collation"] > 0  # what `train()` does around its step


def test_the_stopwatch_counts_nothing_twice() -> None:
    watch = Stopwatch(CPU)
    with watch.phase("bookkeeping"):
        with watch.phase("prefill"):
            before = watch.seconds["bookkeeping"]
            sum(range(10_000))
        assert watch.seconds["prefill"] > 0 and watch.seconds["bookkeeping"] == before
    assert watch.seconds["bookkeeping"] > before


def test_counted_work() -> None:
    counts = Counts()
    counts.add(np.array([0, 10]), np.array([3, 1]))  # 1 + 2 + 3 pairs, and 11
    assert (counts.passes, counts.tokens, counts.attended, counts.cached) == (1, 4, 17, 14)


def test_a_models_shape(workload: tuple[Policy, Script]) -> None:
    policy, _ = workload
    shape = Shape.of(policy)
    # tiny_lm: 2 layers of width 32, inside 384; queries and outputs 32 x 32, one key head and one value head of 8
    assert shape.body == 2 * (2 * 32 * 32 + 2 * 32 * 8 + 3 * 32 * 384)
    assert shape.attention == 2 * 2 * 32 and shape.cache == 2 * 2 * 8
    assert shape.head == 32 * policy.tokens.size and shape.output == (32, policy.tokens.size)
    assert sum(a * b for a, b in shape.matrices) == shape.body


def test_limits_by_hand() -> None:
    """Layers of 10 multiply-adds a token and 2 a pair, an output layer of 4, 3 numbers kept of a token, of 2 bytes."""
    shape = Shape(body=10, head=4, parameters=20, attention=2, cache=3, matrices=((2, 5),), output=(2, 2))
    rates = Rates(read=100.0, decode=20.0, mixed=40.0, full=50.0, output=8.0, update=30.0, weights=400.0, cache=600.0)
    counts = {
        "prefill": Counts(passes=1, tokens=40, attended=100, cached=40),
        "decode": Counts(passes=10, tokens=20, attended=60, cached=80, outputs=6),
        "mixed": Counts(passes=2, tokens=30, attended=50, cached=70),
    }
    work = UpdateCounts(tokens=60, attended=160, outputs=20, passes=2, steps=1)
    found = limits(shape, rates, 2, counts, games=4, sampled=26, answers=8, update=work)
    assert found["prefill"] == {"macs": 600, "arithmetic": 6.0, "memory": pytest.approx(0.85), "limit": 6.0}
    # (200 + 120) / 20 + 24 / 8 and 10 passes over 20 bytes of weights; 200 numbers of caches; with 4 rows 5 passes
    assert found["decode"] == {
        "macs": 344, "arithmetic": 19.0, "memory": pytest.approx(1.5), "limit": 19.0, "full": pytest.approx(9.4)
    }  # fmt: skip
    assert found["mixed"] == {"macs": 400, "arithmetic": 10.0, "memory": pytest.approx(1.1), "limit": 10.0}
    assert found["sampling"]["limit"] == 20 * 4 / 8 and found["beliefs"]["macs"] == 32
    assert found["update"]["arithmetic"] == 3 * (600 + 320 + 80) / 30
    memory_bound = limits(shape, replace(rates, weights=1.0), 2, counts, games=4, sampled=26, answers=8, update=work)
    assert memory_bound["decode"]["limit"] == pytest.approx(201.0)
    assert memory_bound["decode"]["full"] == pytest.approx(101.0)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_step_alone(workload: tuple[Policy, Script], steps: int) -> None:
    """Five rows of a context of 60: the token in the last place sees all 60; of the last four, from 57 to 60; several
    at a time go through the output layer, too."""
    policy, _ = workload
    shape, found = Shape.of(policy), step_alone(policy, 5, 60, steps, CPU)
    seen = {1: 60.0, 4: 58.5}[steps]
    assert found["macs"] == 5 * (shape.body + seen * shape.attention + (steps > 1) * shape.head)
    assert 0 < found["limit"] < found["seconds"] and (found["rows"], found["context"]) == (5, 60)
    assert 0 < found["attention"] < found["seconds"] and 0 < found["products"] < found["seconds"]
    if takes(CPU, torch.float32):
        assert 0 < found["reading_attention"] < found["reading"]
        assert steps > 1 or 0 < found["own_attention"] < found["seconds"]  # several at a time are computed otherwise
    assert ALL_ATTENTION_FUNCTIONS[ragged.RAGGED] is ragged.attention  # it is nobody's any more


def test_the_attention_of_all_layers_is_timed(workload: tuple[Policy, Script], monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _ = workload
    attention = ragged.attention
    monkeypatch.setattr(ragged, "attention", lambda *given, **named: time.sleep(0.005) or attention(*given, **named))
    found, layers = step_alone(policy, 5, 60, 1, CPU), policy.lm.config.num_hidden_layers
    assert layers > 1 and min(found["own_attention"], found["reading_attention"]) >= layers * 0.005
    AttentionInterface.register(ragged.RAGGED, attention)  # what was patched is there now


def test_rows_of_a_pass() -> None:
    assert Counts(passes=4, tokens=10).rows == 2 and Counts().rows == 1


def test_places_along_an_axis_are_named_where_there_is_room() -> None:
    assert labels([16, 51, 64, 256, 1024]) == ["16", "51", "", "256", "1,024"]
    assert labels([4, 5, 6, 7]) == ["4", "5", "6", "7"]
    assert labels([1.030912, 15.428608]) == ["1.03", "15.4"]

"""Memory that caches and passes take, and the limits that a system sets."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from experiments.bench.measure import PeakMemory
from marl.common.errors import UserError
from marl.decoding import memory
from marl.decoding.engine import Engine
from marl.decoding.memory import (
    MIB,
    Fit,
    Slots,
    cgroup_memory,
    check_memory,
    free_memory,
    learning_bytes,
    playing_bytes,
    system_memory,
)
from marl.decoding.probes import size_of
from marl.learning.batch import collate, rows_of
from marl.learning.config import UpdateConfig
from marl.learning.update import update
from marl.losses.entropy import EntropyLoss
from marl.losses.policy import PolicyLoss
from marl.model.policy import Policy, tiny_config, tiny_lm
from tests.marl.batches import said, talk
from tests.marl.models import small_tokens

CPU = torch.device("cpu")


def fit(caches: list[Slots], models: int, concurrency: int = 192, **settings: Any) -> Fit:
    return check_memory(
        caches, models, concurrency=concurrency, setting="algo.concurrency", context=1024, device=CPU, **settings
    )


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: size)


def test_one_line_tells_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 384 * MIB + 10)
    assert fit([Slots(2, MIB)], 10) == Fit(192, "cache: 384 slots of 1.0 MiB, 0.4 GiB", 2 * MIB)
    two = fit([Slots(1, MIB), Slots(1, MIB // 2)], 0)
    assert two.line == "cache: 192 slots of 1.0 MiB and 192 slots of 0.5 MiB, 0.3 GiB"
    assert fit([Slots(1, 4000)], 0, 4).line == "cache: 4 slots of 3.9 KiB, 15.6 KiB"
    lowered = "cache: 382 slots of 1.0 MiB, 0.4 GiB; algo.concurrency lowered from 192 to 191: 0.4 GiB are free (cpu)"
    assert fit([Slots(2, MIB)], 11) == Fit(191, lowered, 2 * MIB)


@pytest.mark.parametrize(
    ("caches", "models", "learning", "games"),
    [
        ([Slots(2, 100 * MIB)], 24 * MIB, 0, 5),
        ([Slots(2, 100 * MIB)], 25 * MIB, 0, 4),
        ([Slots(2, 100 * MIB), Slots(1, 12 * MIB)], 0, 0, 4),
        ([Slots(2, 100 * MIB, more=3)], 0, 0, 3),
        ([Slots(2, 100 * MIB)], 0, 400 * MIB, 3),
        ([Slots(2, 100 * MIB)], 824 * MIB, 0, 1),
        ([Slots(2, 100 * MIB, copy=25 * MIB)], 0, 0, 4),
    ],
)
def test_concurrency_is_lowered_to_what_fits(
    caches: list[Slots], models: int, learning: int, games: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 1024 * MIB)
    found = fit(caches, models, 50, learning=learning)
    assert found.concurrency == games
    assert found.line.endswith(f"; algo.concurrency lowered from 50 to {games}: 1.0 GiB are free (cpu)")
    assert fit(caches, models, games, learning=learning).line == found.line.partition(";")[0]


@pytest.mark.parametrize(
    ("models", "learning", "needed"), [(900 * MIB, 0, "1.1 GiB"), (2 << 30, 0, "2.2 GiB"), (0, 1 << 30, "1.2 GiB")]
)
def test_one_game_that_does_not_fit_is_refused(
    models: int, learning: int, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 1024 * MIB)
    with pytest.raises(UserError, match=rf"Not enough memory: even algo.concurrency=1 needs {needed} \(") as error:
        fit([Slots(2, 100 * MIB)], models, 50, learning=learning)
    assert "and 1.0 GiB are free (cpu). Use a smaller model.context than 1024, " in str(error.value)
    assert ("algo.update.token_budget" in str(error.value)) == bool(learning)


def test_no_more_games_have_slots_than_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each player's games count alone: few of training stand beside many of evaluation."""
    free(monkeypatch, 100 * MIB)
    assert fit([Slots(2, MIB, games=8)], 0) == Fit(192, "cache: 16 slots of 1.0 MiB, 16.0 MiB", 2 * MIB)
    assert fit([Slots(2, MIB, games=8), Slots(1, MIB, games=20)], 0).line.startswith("cache: 36 slots")
    assert fit([Slots(2, MIB, games=8), Slots(1, MIB)], 0).concurrency == 84


def test_caches_that_follow_one_another_need_not_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 100 * MIB)
    first = [Slots(1, MIB, games=8), Slots(1, MIB, games=8)]
    assert fit(first, 0, 90, later=[Slots(1, MIB)]) == Fit(90, "cache: 90 slots of 1.0 MiB, 90.0 MiB", 2 * MIB)
    assert fit(first, 90 * MIB, 90, later=[Slots(1, MIB)]).concurrency == 5


def test_passes_of_playing_and_learning_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots.of(tiny_config(300), 256, 2)
    playing = playing_bytes(tiny_config(300), slots=8, context=1024)
    needed = slots.size * 8 + max(playing, 100)
    free(monkeypatch, needed)
    assert fit([slots], 0, 4, learning=100).concurrency == 4
    assert fit([slots], 0, 4, learning=playing + 1).concurrency == 3
    free(monkeypatch, needed - 1)
    assert fit([slots], 0, 4, learning=100).concurrency == 3


def test_a_bfloat16_copy_counts_and_its_slots_are_half_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(300, hidden_size=64, intermediate_size=128, layers=3, context=256)
    whole, half = Slots.of(config, 256, 1), Slots.of(config, 256, 1, bf16=True)
    assert (half.size, half.copy, whole.copy) == (whole.size / 2, size_of(config, 256).weights / 2, 0)
    bare = replace(half, config=None)
    free(monkeypatch, half.size + half.copy)
    assert fit([bare], 0, 1, later=[bare]).line.startswith("cache: 1 slots of")
    with pytest.raises(UserError, match=r"even algo\.concurrency=1 needs"):
        fit([bare], 1, 1)


# --- Passes ---


NOT_MEASURED = "this system does not tell how much memory a process takes"


def rise(work: Callable[[], None]) -> float | None:
    """Median of three measurements of the process's memory, which vary by a fifth; None where the system has none."""
    found = []
    for _ in range(3):
        peak = PeakMemory(CPU)
        work()
        found.append(peak.rise())
    return None if None in found else median(found)


def measured(function: Callable[..., tuple[float, float | None]], *given: Any) -> tuple[float, float]:
    """Calls the function in a process of its own: memory that other tests freed would be taken again, unmeasured."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        predicted, taken = pool.submit(function, *given).result()
    if taken is None:
        pytest.skip(NOT_MEASURED)
    return predicted, taken


SHAPES = [
    {"hidden_size": 128, "intermediate_size": 384, "layers": 4, "context": 1024},
    {"hidden_size": 256, "intermediate_size": 768, "layers": 2, "context": 512},
]


def test_a_split_model_makes_all_logits_at_once() -> None:
    config = tiny_lm(1 << 16, **SHAPES[0]).config
    whole, more = ({"rows": rows, "length": 128, "replies": 64} for rows in (8, 16))
    at_most = memory.MOST_LOGITS * 4 * 5
    assert memory.MOST_LOGITS == 8 * 64 << 16  # the first has as many as are made in one piece
    assert learning_bytes(config, **whole, split=True) == learning_bytes(config, **whole)
    assert learning_bytes(config, **more, split=True) == learning_bytes(config, **more) + at_most


@pytest.mark.slow  # memory of the process, which other machines give back otherwise
@pytest.mark.parametrize(("shape", "checkpointing"), [(SHAPES[0], False), (SHAPES[1], False), (SHAPES[0], True)])
def test_an_update_takes_what_is_predicted(shape: dict[str, int], checkpointing: bool) -> None:
    """Counts gradients and one pass of 16 rows, in this process: in one of its own they vary more."""
    tokens = small_tokens()
    policy = Policy(tiny_lm(tokens.size, **shape), tokens)
    game = talk([said(step) for step in range(40)], [said(step) for step in range(40)])
    batch = collate(rows_of([game] * 8, {"learner"}), {})
    rows, length = batch.shape
    predicted = learning_bytes(
        policy.lm.config, rows=rows, length=length, replies=int(batch.reply.sum()) // rows,
        gradient_checkpointing=checkpointing,
    )  # fmt: skip
    settings = UpdateConfig(token_budget=1 << 20, minibatches=1, gradient_checkpointing=checkpointing)
    weights = sum(p.nbytes for p in policy.parameters())

    def learn() -> None:
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        losses = {"policy": PolicyLoss(), "entropy": EntropyLoss()}
        update(policy, None, batch, losses, optimizer, settings, torch.Generator())
        policy.zero_grad()

    taken = rise(learn)
    if taken is None:
        pytest.skip(NOT_MEASURED)
    assert predicted + weights == pytest.approx(taken, rel=0.2), (predicted, weights, taken)


@torch.no_grad()
def of_a_rollout(shape: dict[str, int], width: int) -> tuple[float, float | None]:
    """Caches and full passes, of single tokens or of long chunks: bytes predicted and taken."""
    tokens, context = small_tokens(), shape["context"]
    policy = Policy(tiny_lm(tokens.size, **shape), tokens)
    Engine(policy, 1, context)
    slots = 64
    predicted = slots * size_of(policy.lm.config, context).slot
    predicted += playing_bytes(policy.lm.config, slots=slots, context=context)
    some = np.array([0, *range(2, 64)])  # no neighbours

    def read() -> None:
        engine = Engine(policy, slots, context)
        engine.lengths[:] = context - width
        engine.read(some, [[5] * width] * len(some))

    return predicted, rise(read)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [1, 128])
def test_a_rollout_takes_what_is_predicted(shape: dict[str, int], width: int) -> None:
    predicted, taken = measured(of_a_rollout, shape, width)
    assert taken <= 1.2 * predicted and (width == 1 or predicted <= 1.2 * taken), (predicted, taken)


# --- What is free ---


def group(folder: Path, version: int, limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")


def test_limits_of_control_groups_are_read_up_to_the_top(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    assert cgroup_memory(own, root) == []
    own.write_text("0::/user/job\n")
    assert cgroup_memory(own, root) == []
    group(root / "user/job", 2, "max", 700, 0)
    assert cgroup_memory(own, root) == []
    group(root / "user", 2, "1000", 700, 200)
    assert cgroup_memory(own, root) == [(1000, 500)]
    group(root / "user/job", 2, "600", 700, 0)
    assert cgroup_memory(own, root) == [(600, -100), (1000, 500)]


def test_version_1_has_a_tree_of_its_own_and_a_container_sees_its_limit_at_the_top(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text("5:cpu,cpuacct:/job\n4:memory:/docker/0123\n0::/\n")
    group(root / "memory", 1, "1000", 300, 100)
    group(tmp_path, 1, "10", 0, 0)  # outside
    assert cgroup_memory(own, root) == [(1000, 800)]


def test_the_tightest_limit_counts_and_processes_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "system_memory", lambda: (1200, 900))
    for limits, left in (([], 900), ([(2000, 1000)], 900), ([(2000, 500), (800, 800)], 500), ([(10, -5)], 0)):
        monkeypatch.setattr(memory, "cgroup_memory", lambda limits=limits: limits)
        assert free_memory(CPU) == left
    monkeypatch.setattr(memory, "cgroup_memory", list)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(CPU) == 225
    monkeypatch.undo()
    assert free_memory(CPU) > MIB and system_memory()[0] >= system_memory()[1] > MIB


def test_jobs_side_by_side_take_at_most_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that start together see the same free memory, and one that starts beside another what that has left."""
    monkeypatch.setenv("JOBS_PER_DEVICE", "3")
    monkeypatch.setattr(memory, "cgroup_memory", lambda: [(900, 890)])
    for free, left in ((1000, 300), (310, 300), (200, 200)):
        monkeypatch.setattr(memory, "system_memory", lambda free=free: (1200, free))
        assert free_memory(CPU) == left
    on_card = {"mem_get_info": (800, 900), "memory_reserved": 60, "memory_allocated": 10}
    for name, found in on_card.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, found=found: found)
    for jobs, left in (("1", 850), ("2", 450), ("3", 300)):
        monkeypatch.setenv("JOBS_PER_DEVICE", jobs)
        assert free_memory(torch.device("cuda")) == left

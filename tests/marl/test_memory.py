"""What caches and passes take beside what is there, in numbers known by hand, and the limits that a system sets."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from marl import memory
from marl.engine import one_pass, slot_cache
from marl.errors import UserError
from marl.memory import (
    GIB,
    MIB,
    Alive,
    Slots,
    cgroup_memory,
    check_memory,
    free_memory,
    learning_bytes,
    peak_bytes,
    playing_bytes,
    system_memory,
)
from marl.policy import recomputing, tiny_config

CPU = torch.device("cpu")


def line(caches: list[Slots], models: int, concurrency: int = 192) -> str:
    return check_memory(caches, models, concurrency=concurrency, setting="algo.concurrency", context=1024, device=CPU)


def test_what_fits_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 384 * MIB + 10)
    assert line([Slots(2, MIB)], 10) == "cache: 384 slots of 1.0 MiB, 0.4 GiB"
    assert (
        line([Slots(1, MIB), Slots(1, MIB // 2)], 0) == "cache: 192 slots of 1.0 MiB and 192 slots of 0.5 MiB, 0.3 GiB"
    )
    assert line([Slots(1, MIB), Slots(1, MIB)], 0) == "cache: 384 slots of 1.0 MiB, 0.4 GiB"
    assert line([Slots(1, 4000)], 0, 4) == "cache: 4 slots of 3.9 KiB, 15.6 KiB"
    with pytest.raises(UserError):
        line([Slots(2, MIB)], 11)


@pytest.mark.parametrize(
    ("caches", "models", "fits"),
    [
        ([Slots(2, 100 * MIB)], 0, "algo.concurrency=5 would fit (10 slots)"),
        ([Slots(2, 100 * MIB)], 24 * MIB, "algo.concurrency=5 would fit (10 slots)"),
        ([Slots(2, 100 * MIB)], 25 * MIB, "algo.concurrency=4 would fit (8 slots)"),
        ([Slots(2, 100 * MIB), Slots(1, 12 * MIB)], 0, "algo.concurrency=4 would fit (12 slots)"),
        ([Slots(2, 100 * MIB, more=3)], 0, "algo.concurrency=3 would fit (9 slots)"),
        ([Slots(2, 100 * MIB)], 900 * MIB, "not even algo.concurrency=1 fits"),
        ([Slots(2, 100 * MIB)], 2 * GIB, "not even algo.concurrency=1 fits"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_number_that_would(
    caches: list[Slots], models: int, fits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 1024 * MIB)
    with pytest.raises(UserError) as error:
        line(caches, models, concurrency=50)
    said = str(error.value)
    assert said.startswith("algo.concurrency=50 and model.context=1024: ") and f": {fits}; or" in said
    assert f"{50 * 2 + caches[0].more} slots of 100.0 MiB" in said and "but 1.0 GiB of memory are free (cpu)" in said


def test_the_number_that_would_fit_fits_and_the_next_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**9 + 7)
    caches = [Slots(3, 1_234_567, more=5), Slots(1, 54_321)]
    with pytest.raises(UserError, match=r"algo\.concurrency=251 would fit \(1009 slots\)"):
        line(caches, 50_000_000, concurrency=252)
    line(caches, 50_000_000, concurrency=251)


def test_what_a_pass_takes_leaves_less_for_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 1024 * MIB)
    with pytest.raises(UserError, match=r"a pass 0\.1 GiB, and models .*=4 would fit .* or algo\.update\.token_budget"):
        check_memory([Slots(2, 100 * MIB)], 0, concurrency=5, setting="n", context=1024, device=CPU, passes=124 * MIB)


# --- What passes take ---


def test_what_is_alive_is_counted_once_and_no_longer_than_it_lives() -> None:
    with Alive() as alive:
        a = torch.ones(1000)
        b = a.view(10, 100)  # of the same bytes
        assert alive.now == alive.most == 4000
        c = b + 1
        del a, b
        assert alive.now == 4000 and alive.most == 8000
        c.mul_(2)  # in place
        del c
    assert alive.now == 0 and alive.most == 8000


def test_a_pass_is_measured_without_making_it() -> None:
    huge = tiny_config(1000, hidden_size=4096, intermediate_size=8192, layers=64, context=1 << 20)

    def work(lm: object) -> None:
        x = torch.zeros(1 << 40)  # 4 TiB
        assert (x + 1).shape == x.shape

    assert peak_bytes(huge, torch.float32, CPU, work) == 8 << 40


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_is_predicted_as_it_then_is(checkpointing: bool) -> None:
    config = tiny_config(300, hidden_size=64, intermediate_size=128, layers=3, context=256)
    asked = {"length": 128, "replies": 64, "gradient_checkpointing": checkpointing}
    found = learning_bytes(config, CPU, rows=4, **asked) / memory.WASTE
    lm = AutoModelForCausalLM.from_config(config).eval()
    for parameter in lm.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with Alive() as alive, recomputing(lm) if checkpointing else nullcontext():
        ids = torch.zeros(4, 128, dtype=torch.int64)
        hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :64]
        logprobs = (lm.lm_head(hidden) + torch.zeros(300)).log_softmax(-1)
        entropy = (logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)
        (logprobs.gather(-1, ids[:, :64, None])[..., 0] + entropy).sum().backward()
    assert found == pytest.approx(alive.most, rel=0.2)
    assert learning_bytes(config, CPU, rows=8, **asked) / memory.WASTE == pytest.approx(2 * found, rel=0.1)


def test_less_is_kept_where_it_is_computed_again_or_in_half_precision() -> None:
    config = tiny_config(300, hidden_size=64, intermediate_size=128, layers=6, context=256)
    whole, again, half = (
        learning_bytes(config, CPU, rows=4, length=128, replies=10, **way)
        for way in ({}, {"gradient_checkpointing": True}, {"bf16": True})
    )
    assert again < 0.5 * whole and half < 0.8 * whole


def test_a_rollout_takes_at_most_what_is_predicted() -> None:
    config = tiny_config(300, hidden_size=64, intermediate_size=128, layers=3, context=256)
    found = playing_bytes(config, torch.float32, CPU, slots=16, context=256, tokens=512)
    lm = AutoModelForCausalLM.from_config(config).eval()
    rows, size = np.array([0, *range(2, 16)]), 512 // 16
    with Alive() as alive, torch.no_grad():
        cache = slot_cache(lm, 16, 256)
        hidden = one_pass(lm, cache, rows, np.full(15, 256 - size), [[0] * size] * 15)
        assert hidden.shape == (15, size, 64)
    there = alive.most - cache.nbytes  # without what attention keeps inside its kernel
    assert there <= found <= 2 * there
    assert found > playing_bytes(config, torch.float32, CPU, slots=16, context=256, tokens=16)


def test_a_model_that_cannot_be_gone_through_so_is_not_counted() -> None:
    config = tiny_config(300, hidden_size=16, layers=1)
    assert peak_bytes(config, torch.float32, CPU, lambda lm: torch.ones(3)[torch.ones(3) > 0].tolist()) == 0


# --- What is there ---


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
    assert cgroup_memory(own, root) == [500]
    group(root / "user/job", 2, "600", 700, 0)
    assert cgroup_memory(own, root) == [-100, 500]


def test_version_1_has_a_tree_of_its_own_and_a_container_sees_its_limit_at_the_top(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text("5:cpu,cpuacct:/job\n4:memory:/docker/0123\n0::/\n")
    group(root / "memory", 1, "1000", 300, 100)
    group(tmp_path, 1, "10", 0, 0)  # outside
    assert cgroup_memory(own, root) == [800]


def test_the_tightest_limit_counts_and_processes_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "system_memory", lambda: 900)
    for limits, free in (([], 900), ([1000], 900), ([500, 800], 500), ([-5], 0)):
        monkeypatch.setattr(memory, "cgroup_memory", lambda limits=limits: limits)
        assert free_memory(CPU) == free
    monkeypatch.setattr(memory, "cgroup_memory", list)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(CPU) == 225


def test_this_machine_has_some() -> None:
    assert free_memory(CPU) > MIB and system_memory() > MIB

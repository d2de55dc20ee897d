"""What caches take beside what is there, in numbers known by hand, and the limits that a system sets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from marl import memory
from marl.errors import UserError
from marl.memory import GIB, MIB, Slots, cgroup_memory, check_memory, free_memory, system_memory

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

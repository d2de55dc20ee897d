"""Devices that runs compute on, bfloat16, and the memory that kernels take."""

import multiprocessing
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig

from experiments.setup.devices import FEW_KERNELS, check_bf16, device_of, has_bf16_instructions, pick_device
from marl.common.errors import UserError


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
        ("cuda", 0, {}, "device=cuda: no CUDA device is there. Use device=cpu or device=auto"),
        ("cuda:1", 0, {}, "device=cuda:1: no CUDA device is there"),
        ("cuda:1", 1, {}, "device=cuda:1: this machine has 1 GPU, cuda:0"),
        ("cuda:4", 4, {"job": 1}, "device=cuda:4: this machine has 4 GPUs, cuda:0 to cuda:3"),
        ("auto", 2, {"rank": 2}, "process 2 finds none left, this machine has 2 GPUs, .*. Use --nproc-per-node 2"),
        ("cuda:1", 2, {"rank": 0}, "each process of torchrun takes a GPU of its own. Use device=cuda"),
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
    worker = multiprocessing.current_process()
    monkeypatch.setattr(worker, "name", "LokyProcess-2")  # the worker's number counts: jobs end in any order
    assert pick_device("auto") == torch.device("cuda:1")
    monkeypatch.setattr(worker, "name", "MainProcess")
    monkeypatch.setattr(HydraConfig.instance(), "cfg", one)  # without a sweep there is no number
    assert pick_device("auto") == torch.device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert pick_device("auto") == torch.device("cuda:3")
    assert [device.index for device in current] == [0, 2, 2, 1, 0, 3]


@pytest.mark.parametrize(("name", "sharing"), [("auto", "2"), ("cuda:1", "3"), ("cpu", "3")])
def test_jobs_side_by_side_share_devices(name: str, sharing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three jobs on two GPUs: two of them share one, unless the setting puts all on one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("JOBS_AT_ONCE", "3")
    monkeypatch.setenv("JOBS_PER_DEVICE", "")
    pick_device(name)
    assert os.environ["JOBS_PER_DEVICE"] == sharing


@pytest.mark.parametrize("able", [False, True])
def test_bfloat16_is_refused_where_a_gpu_has_none(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: able or including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    said = r"^algo\.update\.bf16=true: Tesla T4 has no bfloat16, which would only be imitated. Set it to false\.$"
    with nullcontext() if able else pytest.raises(UserError, match=said):
        check_bf16(torch.device("cuda:0"), "algo.update.bf16")


@pytest.mark.parametrize("instructions", ["avx512_bf16", "avx512_f"])
def test_a_processor_without_bfloat16_is_told(
    instructions: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {instructions: True}, raising=False)
    check_bf16(torch.device("cpu"), "base.bf16")
    warning = "base.bf16=true: this processor has no instructions for bfloat16, so false would be faster\n"
    assert capsys.readouterr().out == ("" if instructions == "avx512_bf16" else warning)


def test_commands_keep_few_kernels_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = FEW_KERNELS
    monkeypatch.delenv(first, raising=False)
    monkeypatch.setenv(second, "7")
    pick_device("cpu")
    assert os.environ[first] == FEW_KERNELS[first] and os.environ[second] == "7"


@pytest.mark.slow
@pytest.mark.skipif(not has_bf16_instructions(), reason="products in bfloat16 have no kernels here")
def test_few_kernels_are_less_memory() -> None:
    """Products of 600 shapes keep less than 64 MiB with FEW_KERNELS, and more without."""
    work = (
        "import torch\nfrom experiments.bench.measure import resident\nw = torch.randn(64, 64).bfloat16()\n"
        "w @ w\nbefore = resident('VmRSS')\n"
        "for n in range(2, 602): torch.nn.functional.linear(w[:1].expand(n, 64).contiguous(), w)\n"
        "print(resident('VmRSS') - before)"
    )

    def kept(extra: dict[str, str]) -> int:
        env = {name: value for name, value in os.environ.items() if name not in FEW_KERNELS} | extra
        return int(subprocess.run([sys.executable, "-c", work], env=env, check=True, capture_output=True).stdout)

    few, many = kept(dict(FEW_KERNELS)), kept({})
    assert few < 64 << 20 < many, (few, many)

"""Devices, threads and determinism."""

from __future__ import annotations

import multiprocessing
import os
import re
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from experiments.launch.terminal import say
from marl.common.errors import UserError

# Kernels for products in bfloat16 that torch and oneDNN keep on a CPU, one a shape: 1,024 each by default, which take
# more memory than the products. Fewer cost time: 16 of oneDNN's made an update of 4 million parameters a third slower.
FEW_KERNELS = {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}


def pick_device(name: str) -> torch.device:
    """The device that this process computes on; a GPU becomes the current one. Sets `FEW_KERNELS`."""
    for variable, count in FEW_KERNELS.items():
        os.environ.setdefault(variable, count)
    rank = os.environ.get("LOCAL_RANK")  # set by torchrun
    hydra: Any = HydraConfig.instance().cfg
    job = 0 if hydra is None else OmegaConf.select(hydra, "hydra.job.num", default=0)  # missing outside a sweep
    worker = re.fullmatch(r"LokyProcess-(\d+)", multiprocessing.current_process().name)  # of joblib, whose jobs
    place = int(worker[1]) - 1 if worker else job  # may end in any order, so that their numbers would share a GPU
    device = device_of(name, torch.cuda.device_count(), place, None if rank is None else int(rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def device_of(name: str, gpus: int, job: int = 0, rank: int | None = None) -> torch.device:
    """The device that a setting names on a machine with so many GPUs: `auto` (a GPU if there is one), `cpu`, `cuda`, or
    the GPU `cuda:N`.

    Jobs of a sweep take the GPUs in turn: `job` is a job's number. `rank`: of a process that torchrun started, among
    those of this machine; each has a GPU to itself. UserError where the setting or the GPU does not exist.
    """
    known = re.fullmatch(r"auto|cpu|cuda|cuda:(\d+)", str(name))
    if not known:
        raise UserError(f"device={name}: must be auto, cpu, cuda or a GPU's number, as in cuda:1")
    if name == "cpu" or (name == "auto" and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise UserError(f"device={name}: no CUDA device is there; use device=cpu or device=auto")
    there = f"this machine has {gpus} GPU{'s' * (gpus > 1)}, cuda:0{f' to cuda:{gpus - 1}' * (gpus > 1)}"
    if known[1] is None:
        if rank is not None and rank >= gpus:
            raise UserError(f"device={name}: process {rank} finds none left, {there}; use --nproc-per-node {gpus}")
        return torch.device("cuda", job % gpus if rank is None else rank)
    if int(known[1]) >= gpus:
        raise UserError(f"device={name}: {there}")
    if rank is not None:
        raise UserError(f"device={name}: each process of torchrun takes a GPU of its own; use device=cuda")
    return torch.device("cuda", int(known[1]))


def check_bf16(device: torch.device, setting: str) -> None:
    """For a setting that asks for bfloat16: UserError where a GPU has none. A CPU without instructions for it computes
    with bfloat16 all the same, and slowly: a line says so."""
    if lacking := without_bf16(device):
        raise UserError(f"{setting}=true: {lacking}; set it to false")
    if device.type == "cpu" and not has_bf16_instructions():
        say(f"{setting}=true: this processor has no instructions for bfloat16, so false would be faster")


def has_bf16_instructions() -> bool:
    """Tells whether this machine's processor has instructions for bfloat16; True where torch cannot tell."""
    able: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # older versions of torch have none
    return not able or any(able.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))  # the last is ARM's


def without_bf16(device: torch.device) -> str:
    """Why a GPU should not compute in bfloat16; empty where it may."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"{torch.cuda.get_device_name(device)} has no bfloat16, which would only be imitated"
    return ""


_threads_before: int | None = None


def set_threads(threads: int | None) -> None:
    """The number of threads torch computes on; None: as many as before a job of this process said a number."""
    global _threads_before
    if threads is None:
        if _threads_before is not None:
            torch.set_num_threads(_threads_before)
            _threads_before = None
    else:
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 4096:
            raise UserError(f"threads={threads}: must be a whole number, at least 1, or null")
        _threads_before = _threads_before or torch.get_num_threads()
        torch.set_num_threads(threads)


def set_deterministic(wanted: bool) -> None:
    """Tells whether torch may take only algorithms that give the same bits each time, on a GPU as well.

    Where an operation has none, torch raises a RuntimeError that names it. On a CPU runs repeat without this.
    """
    # Read when cuBLAS starts, which an earlier job may have it do: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)  # set back too: jobs of a sweep may share a process

"""Devices, threads and determinism."""

import multiprocessing
import os
import re
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from experiments.launch.terminal import say
from marl.common.errors import UserError

# How many compiled bfloat16 kernels torch and oneDNN keep on a CPU, one for each shape. Their defaults of 1,024 take
# more memory than the products themselves; with 16 of oneDNN's an update was a third slower.
FEW_KERNELS = {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
THREADS = torch.get_num_threads()  # of a process that sets none


def pick_device(name: str) -> torch.device:
    """Returns the device that this process computes on, and makes a GPU the current one.

    Sets `FEW_KERNELS`, and how many jobs of a sweep share the device.
    """
    for variable, count in FEW_KERNELS.items():
        os.environ.setdefault(variable, count)
    rank = os.environ.get("LOCAL_RANK")  # set by torchrun
    hydra: Any = HydraConfig.instance().cfg
    job = 0 if hydra is None else OmegaConf.select(hydra, "hydra.job.num", default=0)  # missing outside a sweep
    # joblib's jobs end in any order, so two that run together may have numbers that mean one GPU. Its workers do not.
    if worker := re.fullmatch(r"LokyProcess-(\d+)", multiprocessing.current_process().name):
        job = int(worker[1]) - 1
    device = device_of(name, torch.cuda.device_count(), job, None if rank is None else int(rank))
    jobs = int(os.environ.get("JOBS_AT_ONCE", "1"))  # set by experiments/launch/command.py
    taken_in_turn = torch.cuda.device_count() if device.type == "cuda" and ":" not in name else 1
    os.environ["JOBS_PER_DEVICE"] = str(-(-jobs // taken_in_turn))  # so that memory is shared out
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def device_of(name: str, gpus: int, job: int = 0, rank: int | None = None) -> torch.device:
    """Returns the device that a setting names: `auto` (a GPU if there is one), `cpu`, `cuda`, or the GPU `cuda:N`.

    `gpus`: number of this machine's GPUs. `job`: number of a sweep's job; jobs take the GPUs in turn. `rank`: number
    of a torchrun process on this machine; each has a GPU to itself. UserError if the setting or the GPU doesn't exist.
    """
    known = re.fullmatch(r"auto|cpu|cuda|cuda:(\d+)", str(name))
    if not known:
        raise UserError(f"device={name}: must be auto, cpu, cuda or a GPU's number, as in cuda:1")
    if name == "cpu" or (name == "auto" and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise UserError(f"device={name}: no CUDA device is there. Use device=cpu or device=auto.")
    there = f"this machine has {gpus} GPU{'s' * (gpus > 1)}, cuda:0{f' to cuda:{gpus - 1}' * (gpus > 1)}"
    if known[1] is None:
        if rank is not None and rank >= gpus:
            raise UserError(f"device={name}: process {rank} finds none left, {there}. Use --nproc-per-node {gpus}.")
        return torch.device("cuda", job % gpus if rank is None else rank)
    if int(known[1]) >= gpus:
        raise UserError(f"device={name}: {there}")
    if rank is not None:
        raise UserError(f"device={name}: each process of torchrun takes a GPU of its own. Use device=cuda.")
    return torch.device("cuda", int(known[1]))


def check_bf16(device: torch.device, setting: str) -> None:
    """Refuses a setting that asks for bfloat16 on a GPU without it. Warns where a CPU computes with it slowly."""
    if lacking := without_bf16(device):
        raise UserError(f"{setting}=true: {lacking}. Set it to false.")
    if device.type == "cpu" and not has_bf16_instructions():
        say(f"{setting}=true: this processor has no instructions for bfloat16, so false would be faster")


def has_bf16_instructions() -> bool:
    """Returns whether this machine's processor has bfloat16 instructions; True where torch cannot tell."""
    able: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return not able or any(able.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))  # bf16: ARM


def without_bf16(device: torch.device) -> str:
    """Says why a GPU should not compute in bfloat16; empty where it may."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"{torch.cuda.get_device_name(device)} has no bfloat16, which would only be imitated"
    return ""


def set_threads(threads: int | None) -> None:
    """Sets the number of torch's threads. None restores the number that this process began with."""
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 4096):
        raise UserError(f"threads={threads}: must be a whole number, at least 1, or null")
    if (wanted := threads or THREADS) != torch.get_num_threads():
        torch.set_num_threads(wanted)


def set_deterministic(wanted: bool) -> None:
    """Makes torch take only algorithms that give the same bits each time on a GPU; CPUs do without this.

    Where an operation has none, torch raises a RuntimeError that names it.
    """
    # cuBLAS reads it when it starts: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)  # set back too: jobs of a sweep may share a process

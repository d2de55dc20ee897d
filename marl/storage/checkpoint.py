"""Saves and loads policies and checkpoints: safetensors and JSON only, written in one step, verified by checksum."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import cached_file

from marl.common.distributed import ONE, Ranks
from marl.common.errors import UserError, check_range, prefixed
from marl.common.files import FAULTS, file_digest, fits, read_json, sync_folder, writing
from marl.common.files import digest as digest_of
from marl.model.branches import read_questions
from marl.model.loading import read_tensors
from marl.model.lora import (
    SETTINGS_FILE,
    WEIGHTS_FILE,
    adapted,
    adapter_settings,
    adapter_tensors,
    is_own,
    load_adapter,
    read_adapter,
)
from marl.model.optim import Optimizer, slots_of
from marl.model.policy import Policy, pretrained
from marl.model.sharding import like, whole
from marl.storage.folder import REFERENCE, run_around

WAY_ON = "remove that folder to go on from the checkpoint before it"
FORMAT = 1  # of a checkpoint's files; raise it when their contents change
UNFIT = (*FAULTS, RuntimeError, SafetensorError)  # raised by tensors of another model
STEPPED = "stepped"  # an optimizer's tensor that lists the parameters with a state


# Forms of entries that other code reads, of policy.json and of a checkpoint's state.json.
NUMBER, NONE = (int, float), type(None)
CARD = {
    "game": str,
    "run": str,
    "questions": str,
    "learner": str,
    "made_of": {"base?": dict, "env?": dict},
    "figures": {...: NUMBER},
    "adapts": {"name": str, "digest": str, "bf16": bool},  # of an adapter: the model that it was trained on
}
STATE = {
    "run": str,
    "base": (str, NONE),
    "wall_time": NUMBER,
    "inputs": dict,
    "commits": [str],
    "made_with": [dict],
    "chat": {"calls": int, "tokens": int, "replayed": int, "lost": {...: int}},
    "best": (NONE, {"iteration": NUMBER, "score": NUMBER}),
    "memory": {...: dict},
}
Trained = Mapping[str, tuple[Policy, Optimizer]]  # learners by their name in the cast


# --- Folders with checksums -------------------------------------------------------------------------------------------
def write_folder(folder: str | Path, write: Callable[[Path], None]) -> None:
    """Fills a temporary folder by `write`, adds checksums.json, and moves it to its name in one step."""
    folder = Path(folder)
    temporary = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    with writing(folder), ExitStack() as stack:
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
        sums = {p.name: _sha256(p) for p in sorted(temporary.iterdir()) if p.is_file()}
        (temporary / "checksums.json").write_text(json.dumps(sums, indent=1))
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(temporary)
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.is_dir():  # moved aside, so that one of the two is whole at every moment
            os.replace(folder, old)
        try:
            os.replace(temporary, folder)
        except OSError:
            if old.exists():
                os.replace(old, folder)
            raise
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)


def listed(folder: str | Path) -> dict[str, str]:
    """Reads checksums.json: digests by file. UserError if there is none, or it names a file outside the folder."""
    folder = Path(folder)
    sums = read_json(folder / "checksums.json")
    for name, digest in sums.items():
        plain = re.fullmatch(r"[^/\\\0:]+", name) and len(name.encode()) < 256  # a colon is a drive on Windows
        if not plain or name in (".", "..", "checksums.json") or not isinstance(digest, str):
            raise UserError(
                f"{folder}: checksums.json names {name[:80]!r}, which is no file of the folder. Take a whole copy."
            )
        if (folder / name).is_symlink():
            raise UserError(f"{folder / name} is a link. Put the file itself there.")
    return sums


def verify_folder(folder: str | Path) -> str:
    """Describes the damage of a folder that `write_folder` made; empty if it is whole."""
    folder = Path(folder)
    try:
        sums = listed(folder)
    except UserError as error:
        return f"{folder}: checksums.json cannot be read ({error})"
    if not sums:
        return f"{folder}: checksums.json lists no file"
    try:
        wrong = [n for n, digest in sums.items() if not (folder / n).is_file() or _sha256(folder / n) != digest]
    except OSError as error:
        return f"{error.filename or folder} cannot be read ({error.strerror})"
    if wrong:
        return f"{folder}: damaged file {', '.join(wrong)}"
    read = {path.name for path in folder.glob("[!.]*") if path.suffix in (".json", ".safetensors")}
    unlisted = read - {*sums, "checksums.json"}
    return f"{folder}: checksums.json does not list {', '.join(sorted(unlisted))}" if unlisted else ""


def folder_digest(folder: str | Path) -> str:
    """Digest of all files of a folder that `write_folder` made: twelve hexadecimal digits."""
    return digest_of(listed(folder))


def policy_digest(policy: Policy) -> str:
    """Digest of all parameters of a policy: twelve hexadecimal digits."""
    found = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def make_once(path: Path, make: Callable[[], object], report: Callable[[str], None] = print) -> None:
    """Makes `path` by `make`, in one step, unless it exists. Of several processes one does so, and the others wait."""
    if path.exists():
        return
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f".{path.name}.lock"))  # freed when its holder dies
        try:
            lock.acquire(blocking=False)
        except Timeout:
            report(f"waiting for another process, which is making {path}")
            lock.acquire(poll_interval=0.5)
    try:
        if not path.exists():
            make()
    finally:
        lock.release()


# --- Policies ---------------------------------------------------------------------------------------------------------
def save_policy(folder: str | Path, policy: Policy, card: Mapping[str, Any]) -> None:
    """Saves model, tokenizer, value head, and a card that describes the policy (policy.json).

    An adapted policy's adapter is saved alone, as peft reads it; the card names its base.
    """
    name = policy.lm.name_or_path or ""
    if policy.adapter:
        assert name, "an adapter's base has a folder or a name on the hub"
        card = {**card, "adapts": {"name": name, "digest": model_digest(name), "bf16": policy.adapter.config.bf16}}

    def write(to: Path) -> None:
        if policy.adapter:
            save_file(adapter_tensors(policy), to / WEIGHTS_FILE)
            (to / SETTINGS_FILE).write_text(adapter_settings(policy, name))
            policy.lm.config.save_pretrained(to)
        else:
            policy.lm.save_pretrained(to)
        assert (to / "config.json").exists(), "transformers saves on the first rank alone"
        policy.tokens.tokenizer.save_pretrained(to)
        save_file({k: v.contiguous() for k, v in policy.value_head.state_dict().items()}, to / "value_head.safetensors")
        beside = {"questions": "beside"} if policy.tokens.beside else {}
        own = {"privileged_size": policy.privileged_size, **beside}
        (to / "policy.json").write_text(json.dumps({**card, **own}, indent=1))

    write_folder(folder, write)


def copy_folder(source: str | Path, to: str | Path) -> None:
    """Copies a whole folder that `write_folder` made, by hard links if possible."""
    source = Path(source)
    if problem := verify_folder(source):
        raise UserError(f"{problem}. Remove the folder.")

    def write(new: Path) -> None:
        for name in listed(source):
            try:
                os.link(source / name, new / name)
            except OSError:
                shutil.copyfile(source / name, new / name)

    write_folder(to, write)


def load_policy(
    folder: str | Path,
    device: torch.device | str = "cpu",
    privileged_size: int | None = None,
    over: Policy | None = None,
    dtype: torch.dtype = torch.float32,
) -> Policy:
    """Loads what `save_policy` wrote. With another `privileged_size` the value head is a new one.

    over: a policy whose tensors an adapter shares if it is its base; otherwise all adapters in use share one copy.
    dtype: of the weights; an adapter's base has its own.
    """
    folder = Path(folder)
    if problem := verify_folder(folder):
        raise UserError(f"{problem}. Remove the folder and make it again.")
    own_size = read_card(folder).get("privileged_size")
    if type(own_size) is not int or own_size < 0:
        raise UserError(f"{folder / 'policy.json'} does not say what its critic reads. Make it again.")
    size = own_size if privileged_size is None else privileged_size
    head = read_tensors(folder / "value_head.safetensors") if size == own_size else {}
    other_critic = UserError(
        f"{folder / 'value_head.safetensors'} is not the critic of {size} extra numbers that policy.json describes. "
        "Make both again."
    )
    if head and size > sum(tensor.numel() for tensor in head.values()):  # never allocate that size
        raise other_critic
    if is_adapter(folder):
        policy = _load_adapted(folder, device, size, over)
    else:
        policy = pretrained(str(folder), size, seed=0, exact=True, dtype=dtype)  # the seed fixes a new head
    read_questions(policy.tokens, policy.lm, str(read_card(folder).get("questions", "stream")))
    if size == own_size:
        try:
            policy.value_head.load_state_dict(head)
        except RuntimeError as error:
            raise other_critic from error
    return policy.to(device).eval()


def is_adapter(folder: str | Path) -> bool:
    """Tells whether a policy's folder holds an adapter."""
    return (Path(folder) / SETTINGS_FILE).is_file()


def model_folder(name: str) -> Path:
    """Returns the folder of a model, or of the copy of a hub name that was loaded."""
    return Path(name) if Path(name).is_dir() else Path(str(cached_file(name, "config.json"))).parent


def model_digest(name: str) -> str:
    """Digest of the files of a model, a folder or a hub name that was loaded: twelve hexadecimal digits."""
    folder = model_folder(name)
    if (folder / "checksums.json").is_file():
        return folder_digest(folder)
    return digest_of({p.name: file_digest(p) for p in [*folder.glob("config.json"), *folder.glob("*.safetensors")]})


def adapter_base(folder: str | Path) -> tuple[str, str, bool]:
    """Finds the model that an adapter was trained on: its name, digest, and whether it was in bfloat16.

    UserError unless it is where it was, beside the run or in it, with the same contents.
    """
    folder = Path(folder)
    adapts = read_card(folder).get("adapts")
    if not adapts:
        raise UserError(f"{folder / 'policy.json'} does not say which model it adapts. Make the run again.")
    name, digest, bf16 = adapts["name"], adapts["digest"], adapts["bf16"]
    run, last = run_around(folder), Path(name).name
    places = [Path(name), run.parent / "bases" / last, run / REFERENCE]
    there = [str(place) for place in places if (place / "config.json").is_file()]
    if own := [place for place in there if model_digest(place) == digest]:
        return own[0], digest, bf16
    if there:
        raise UserError(
            f"{folder} is an adapter for another base than {there[0]}, whose files have changed since. Put the old "
            "ones back."
        )
    if name.count("/") > 1 or name.startswith(("/", ".")):
        raise UserError(f"{folder} is an adapter, and its base {name} is not there. Put it back.")
    return name, digest, bf16  # on the hub


_BASES: WeakValueDictionary[tuple[str, str, str], Policy] = WeakValueDictionary()  # of adapters that are in use


def frozen_base(name: str, digest: str, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Policy:
    """Loads a model that nobody trains in full: once, as long as it is in use."""
    key = (digest, str(torch.device(device)), str(dtype))
    found = _BASES.get(key)
    if found is None:
        own = (Path(name) / "policy.json").is_file()
        found = load_policy(name, device, dtype=dtype) if own else pretrained(name, seed=0, dtype=dtype).to(device)
        if model_digest(name) != digest:
            raise UserError(f"{name} is another model than the one of this digest ({digest}). Put the old one back.")
        _BASES[key] = found.eval().requires_grad_(False)
    return found


def _load_adapted(folder: Path, device: torch.device | str, privileged_size: int, over: Policy | None) -> Policy:
    """Loads an adapter over its base, with a new value head."""
    name, digest, bf16 = adapter_base(folder)
    config, tensors = read_adapter(folder, bf16), read_tensors(folder / WEIGHTS_FILE)
    known = over.lm.name_or_path if over is not None and over.lm.dtype == config.dtype else None
    if over is not None and known and model_digest(known) == digest:
        base = over
    else:
        base = frozen_base(name, digest, device, config.dtype)
    policy = adapted(base, config)
    load_adapter(policy, tensors, str(folder / WEIGHTS_FILE))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy.new_critic(privileged_size)
    return policy


def read_card(folder: str | Path) -> dict[str, Any]:
    """Reads policy.json. UserError if an entry is not of the kind that readers expect."""
    folder = Path(folder)
    with prefixed(f"{folder} holds no policy of this project: "):
        card = read_json(folder / "policy.json")
    for name, value in card.items():
        if not fits(value, CARD.get(name, object)):
            raise UserError(f"{folder / 'policy.json'} is damaged: {name} is {str(value)[:60]!r}. Make it again.")
    return card


def started_from(folder: str | Path) -> str | None:
    """The folder of the base that a run's policy in `folder` started from; None for an untouched model."""
    folder = Path(folder)
    if (run := run_around(folder)) != folder.parent:  # a past self began where its run's policy did
        folder = run / "policy"
    base = read_card(folder).get("base", ...)
    if base is not None and not isinstance(base, str):
        raise UserError(f"{folder}: its policy.json does not say from which base it started. Name another run.")
    return base


# --- Checkpoints of training ------------------------------------------------------------------------------------------
def save_training(
    folder: Path,
    iteration: int,
    trained: Trained,
    state: Mapping[str, Any],
    keep: int,
    ranks: Ranks = ONE,
    best: int | None = None,
    every: int = 1,
) -> None:
    """Saves checkpoint `folder/iteration-NNNNNN`, and removes old ones (`prune`). All ranks call this."""
    moments = {name: optimizer_tensors(optimizer, ranks.first) for name, (_, optimizer) in trained.items()}
    if not ranks.first:
        return

    def write(to: Path) -> None:
        for name, (policy, _) in trained.items():
            save_file(_distinct(own_tensors(policy)), to / f"{name}.safetensors")
            save_file(moments[name], to / f"{name}-optimizer.safetensors")
        notes = {**state, "iteration": iteration, "format": FORMAT}
        (to / "state.json").write_text(json.dumps(notes, sort_keys=True))

    write_folder(folder / _name(iteration), write)
    prune(folder, iteration, keep, best, every)


def prune(folder: Path, iteration: int, keep: int, best: int | None = None, every: int = 1) -> None:
    """Keeps the last `keep` checkpoints at multiples of `every`, those of `iteration` and `best`, and no other."""
    regular = [number for number in range(every, iteration + 1, every) if (folder / _name(number)).is_dir()]
    stay = {_name(number) for number in (*regular[-keep:], iteration, *([] if best is None else [best]))}
    for other in checkpoints_in(folder):
        if other.name not in stay:
            with writing(other):
                shutil.rmtree(other)
    for left in folder.glob(".iteration-*"):
        if re.fullmatch(r"\.iteration-\d{6}\.(new|old)", left.name):
            shutil.rmtree(left, ignore_errors=True)


def checkpoints_in(folder: str | Path) -> list[Path]:
    """A run's checkpoints, the oldest first. Ignores other names."""
    folder = Path(folder)
    return sorted(p for p in folder.glob("iteration-*") if re.fullmatch(r"iteration-\d{6}", p.name) and p.is_dir())


def newest_checkpoint(folder: str | Path, report: Callable[[str], None] = print) -> Path | None:
    """The newest whole checkpoint of a run. Reports damaged ones and passes over them."""
    for number, path in reversed([*enumerate(checkpoints_in(folder))]):
        if not (problem := verify_folder(path)):
            return path
        way = "going back to the checkpoint before it" if number else "no checkpoint is left, and the run begins anew"
        report(f"{problem}; {way}")
    return None


def load_training(newest: Path | None, trained: Trained, ranks: Ranks = ONE) -> dict[str, Any] | None:
    """Restores the first rank's newest checkpoint, and returns its state; None for none. All ranks call this."""
    path = ranks.objects(newest)[0]
    if path is None:
        return None
    if ranks.size > 1:
        check_same(path, ranks)
    state = read_state(path)
    for name, (policy, optimizer) in trained.items():
        try:
            load_weights(policy, read_tensors(path / f"{name}.safetensors"))
            load_optimizer(optimizer, load_file(path / f"{name}-optimizer.safetensors"))
        except UNFIT as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{path} does not fit {name} as it is now ({reason}): {WAY_ON}") from error
    return state


def load_weights(policy: Policy, tensors: Mapping[str, Tensor]) -> None:
    """Loads a policy's weights; tied ones are stored once. ValueError or RuntimeError if they do not fit."""
    own = own_tensors(policy)
    lacking, unexpected = {*_distinct(own)} - {*tensors}, {*tensors} - {*own}
    if lacking or unexpected:
        raise ValueError(f"missing {sorted(lacking)}, unexpected {sorted(unexpected)}")
    policy.load_state_dict(tensors, strict=False)


def own_tensors(policy: Policy) -> dict[str, Tensor]:
    """The tensors of a policy that its checkpoints hold: of an adapted one those that it does not share."""
    return {name: t for name, t in policy.state_dict().items() if policy.adapter is None or is_own(name)}


def check_same(checkpoint: Path, ranks: Ranks) -> None:
    """Raises on every rank if one of them reads another checkpoint than the first."""
    problem = verify_folder(checkpoint)
    found = ranks.objects((problem, "" if problem else folder_digest(checkpoint)))
    for rank, (problem, digest) in enumerate(found):
        if (problem, digest) != found[0]:
            raise UserError(
                f"{problem or f'{checkpoint} is another one'}, as process {rank} of {ranks.size} reads it: let all "
                f"processes read the same folder, or {WAY_ON}"
            )


def check_alike(policies: Mapping[str, Policy], ranks: Ranks) -> None:
    """Raises on every rank if parameters differ across ranks."""
    if ranks.size == 1:
        return
    digests = ranks.objects({name: policy_digest(policy) for name, policy in policies.items()})
    for rank, found in enumerate(digests):
        if differ := [name for name in found if found[name] != digests[0][name]]:
            raise UserError(
                f"{', '.join(differ)}: process {rank} of {ranks.size} has other parameters than the first one. Let all "
                "processes read the same cache and the same runs, on hardware of one kind."
            )


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Reads a checkpoint's state.json; `iteration` is the number of iterations done. UserError if it is damaged."""
    state = read_json(checkpoint / "state.json")
    if (made := state.pop("format", 0)) != FORMAT:
        raise UserError(
            f"{checkpoint} was saved by another version of this project (format {made}, here {FORMAT}): go on with "
            "that version (state.json lists its commits), or remove the run's folder to begin anew"
        )
    if not isinstance(state.get("iteration"), int) or _name(state["iteration"]) != checkpoint.name:
        raise UserError(f"{checkpoint}: in state.json iteration is {state.get('iteration')}: {WAY_ON}")
    for name, value in state.items():
        if not fits(value, STATE.get(name, object)):
            raise UserError(f"{checkpoint}: in state.json {name} is {value!r}: {WAY_ON}")
    return state


def optimizer_tensors(optimizer: Optimizer, keep: bool = True) -> dict[str, Tensor]:
    """The optimizer's state as tensors `INDEX.NAME`; `stepped` lists the parameters with a state.

    All ranks gather sharded tensors; those without `keep` drop them.
    """
    found = {}
    stepped = optimizer.state_dict()["state"]
    for index, slots in stepped.items():
        for name, value in slots.items():
            tensor = whole(value)
            if keep:
                found[f"{index}.{name}"] = tensor.cpu().contiguous()
    return {**found, STEPPED: torch.tensor(sorted(stepped), dtype=torch.int64)}


def load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`. ValueError for tensors of another optimizer or model."""
    if STEPPED not in tensors:
        raise ValueError(f"it does not say which parameters were {STEPPED}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = slots_of(optimizer)
    state: dict[int, dict[str, Tensor]] = {index: {} for index in tensors[STEPPED].tolist()}
    if not state.keys() <= set(range(len(parameters))):
        raise ValueError(f"it has moments of {len(state)} parameters, the optimiser {len(parameters)} parameters")
    slots = {f"{at}.{slot}": (at, slot, scalar) for at in state for slot, scalar in kept[at].items()}
    if other := sorted(slots.keys() ^ (tensors.keys() - {STEPPED})):
        raise ValueError(f"its tensors are not the optimiser's: {', '.join(other[:4])}")
    for name, (at, slot, scalar) in slots.items():
        tensor, parameter = tensors[name], parameters[at]
        if tensor.shape != (torch.Size([]) if scalar else parameter.shape):
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} is of no parameter of the optimiser")
        if not tensor.isfinite().all():
            raise ValueError(f"{name} is not finite")
        state[at][slot] = tensor if scalar else like(parameter, tensor)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _name(iteration: int) -> str:
    return f"iteration-{iteration:06d}"


def _distinct(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without repeats of tied weights, which safetensors refuses."""
    seen: dict[int, str] = {}
    for name, tensor in tensors.items():
        seen.setdefault(tensor.data_ptr(), name)
    return {name: tensors[name].contiguous() for name in seen.values()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class CheckpointConfig:
    """Saves a checkpoint every `every` iterations and keeps the last `keep`."""

    every: int = 5
    keep: int = 2

    def __post_init__(self) -> None:
        check_range(self, "checkpoint", "[1, inf)", "every", "keep")

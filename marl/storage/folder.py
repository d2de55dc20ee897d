"""A run's folder: its settings (config.yaml), its lock, its card (run.json).

Its name follows from the configuration, so the same command finds its run again, and another configuration never
writes into it.
"""

import fcntl
import glob
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, reduce
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, TextIO

import torch
import yaml

from marl.common.errors import UserError, check_sizes
from marl.common.files import canonical, fits, read_json, read_text, read_yaml, reading, write_json, write_text
from marl.common.secrets import redacted

CARD = "run.json"
CONFIG = "config.yaml"
REFERENCE = "reference"
# Settings that do not make another run: places, what is kept, and hardware, which changes last digits (the run card
# notes it as `made_with`). Human dialogues count by their contents.
ELSEWHERE = ("runs", "tracker", "progress", "threads", "cache", "shard", "deterministic", "data", "checkpoint",
             "only")  # fmt: skip
GROUPS = ("env", "cast", "eval.env", "eval.cast", "algo", "loss", "model", "base")  # groups that every run has
SETTINGS: dict[str, type | tuple[type, ...]] = {  # settings that studies read
    "env.game": str,
    "eval.temperature": (int, float),
    "algo.iterations": int,
    "algo.context": int,
    "algo.max_new_tokens": int,
    **dict.fromkeys(GROUPS, dict),
}


def run_around(policy: Path) -> Path:
    """Returns the folder of the run that a policy's folder lies in: RUN for RUN/policy and for RUN/pool/PAST_SELF."""
    above = policy.parent
    return above.parent if above.name == "pool" and (above.parent / CONFIG).is_file() else above


def read_run_card(folder: str | Path) -> dict[str, Any] | None:
    """Reads the card of a finished run; None if there is none yet. UserError if it is damaged."""
    path = Path(folder) / CARD
    if not os.path.lexists(path):
        return None
    try:
        card = read_json(path)
        if not fits(card, {"inputs?": dict}):
            raise UserError(f"{path}: expected inputs by name")
        return card
    except UserError as error:
        raise UserError(f"{error}. Remove it: the run's own command goes on from its last checkpoint.") from error


def read_settings(folder: str | Path) -> dict[str, Any]:
    """Reads a run's config.yaml as plain data. UserError if there is none, or it is something else."""
    folder = Path(folder)
    path = folder / CONFIG
    check_sizes(str(folder), "folder")
    if not os.path.lexists(path):
        raise UserError(
            f"{folder} is not a run's folder: it has no {CONFIG}. Name folders that experiments.train wrote."
        )
    settings = read_yaml(path)
    group = (dict, type(None))
    if not fits(settings, {"env?": group, "algo?": group, "init?": group}):
        raise UserError(f"{path}: expected the settings of a run, with groups env and algo. Name another run.")
    own = {name: part for name, part in settings.items() if name != "chat"}  # chat.extra may have any keys and texts
    if unnamed := _unnamed(own):
        raise UserError(f"{path}: expected settings by name, and {unnamed[0]!r} is no name. Name another run.")
    if open_ := [name for name, value in flat(own).items() if "${" in f"{value}" or "???" in f"{value}"]:
        raise UserError(f"{path}: {open_[0]} is no value but a reference (${{...}} or ???). Write its value there.")
    for name in ("name", "arm"):
        if "/" in f"{settings.get(name)}":
            raise UserError(f"{path}: {name} is part of a folder's name. Write it without slashes.")
    return settings


def _unnamed(settings: Any) -> list[Any]:
    """Keys at any depth that are not text."""
    if isinstance(settings, list):
        return [key for value in settings for key in _unnamed(value)]
    if not isinstance(settings, dict):
        return []
    return [key for key in settings if not isinstance(key, str)] + _unnamed(list(settings.values()))


def run_settings(folder: str | Path) -> dict[str, Any]:
    """Reads a run's config.yaml. UserError if it lacks one of SETTINGS."""
    settings = read_settings(folder)
    if lacking := [n for n, kind in SETTINGS.items() if not isinstance(reduce(_part, n.split("."), settings), kind)]:
        raise UserError(
            f"{Path(folder) / CONFIG} lacks {', '.join(lacking)}: it is damaged, or of an older version of this "
            "project. Name another run."
        )
    return settings


def _part(settings: Any, key: str) -> Any:
    return settings.get(key) if isinstance(settings, dict) else None


def finished_run(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the settings and the card of a finished run. UserError if either is not whole."""
    folder = Path(folder)
    settings, card = run_settings(folder), read_run_card(folder)
    if card is None:
        raise UserError(
            f"{folder} is not the folder of a finished run: it has no {CARD}. Start its command again, which goes on."
        )
    if not fits(card, {"arm": str, "seeds": [int]}) or not card["seeds"]:
        raise UserError(f"{folder / CARD}: expected the card of a run, with arm and seeds. Name another run.")
    return settings, card


@contextmanager
def claim(folder: Path, config_yaml: str) -> Iterator[TextIO]:
    """Makes the folder and holds its lock, so that no other process writes into it. Yields the lock's file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_lock(folder / ".lock")
    except OSError as error:
        raise UserError(
            f"runs={folder.parent}: the output folder cannot be written ({error.strerror}). Name another."
        ) from error
    with lock:
        if not take_lock(lock, f"runs={folder.parent}"):
            raise UserError(f"{folder} is being written by another process. Wait for it, or change the configuration.")
        check_unedited(folder, config_yaml)
        if not (folder / CONFIG).exists():
            write_text(folder / CONFIG, config_yaml)
        yield lock


def open_lock(path: Path) -> TextIO:
    """Opens or makes the file of a lock. OSError for a link or a pipe."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "r+")


def take_lock(lock: TextIO, where: str) -> bool:
    """Locks the file until it is closed. False if another process holds it. UserError, naming `where`, if none can."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UserError(
            f"{where}: its file system has no locks ({error.strerror}). Name a folder on another one."
        ) from error
    return True


def check_unedited(folder: Path, config_yaml: str) -> None:
    """Raises UserError if the folder's config.yaml is not the configuration that its name follows from."""
    path = folder / CONFIG
    if not os.path.lexists(path):
        return
    with suppress(UserError):
        if read_text(path) == config_yaml:
            return
    there, here = _settings(path), yaml.safe_load(config_yaml)
    with reading(path):
        same = canonical(there) == canonical(here)
    if not same:
        raise UserError(
            f"{path} was edited{_listed(differences(there, here))}: it does not fit the folder's name. Restore or "
            "remove it."
        )


def check_there(folder: Path, lock: TextIO) -> None:
    """Raises UserError if a running run's folder was removed, or made anew with another lock than the run holds."""
    there = folder / ".lock"
    if not (folder / CONFIG).exists() or not there.exists():
        raise UserError(f"{folder} was moved or removed during its run. Put it back, and start the same command again.")
    if not os.path.samestat(os.fstat(lock.fileno()), there.stat()):
        raise UserError(
            f"{folder} was removed and made anew during its run. This process stops and leaves it to the new run."
        )


def nearest_run(folder: Path) -> str:
    """Compares with the run of the same name, arm and seed whose settings differ least; "" if there is none."""
    own, same = _settings(folder / CONFIG), glob.escape(folder.name.rpartition("-")[0])
    others = [p for p in sorted(folder.parent.glob(f"{same}-*/{CONFIG}")) if p.parent != folder]
    found = [(p.parent.name, differences(_settings(p), own)) for p in others]
    if not found:
        return ""
    name, differ = min(found, key=lambda each: len(each[1]))
    return f"another configuration than {name}{_listed(differ)}"


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Differences between two configurations, as `algo.games=8, here 16`."""
    old, new = ({**dict.fromkeys((*flat(there), *flat(here)), "absent"), **flat(of)} for of in (there, here))
    return [f"{name}={old[name]}, here {new[name]}" for name in sorted(old) if old[name] != new[name]]


def _listed(differ: Sequence[str]) -> str:
    more = f"; and {len(differ) - 4} more" if len(differ) > 4 else ""
    return f" ({'; '.join(differ[:4])}{more})" if differ else ""


def flat(settings: Any, name: str = "") -> dict[str, Any]:
    """Settings by dotted name."""
    if not isinstance(settings, Mapping) or not settings:
        return {name: settings}
    return {
        k: v for key, each in settings.items() for k, v in flat(each, f"{name}.{key}" if name else f"{key}").items()
    }


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Settings that differ between two runs, without seeds, names, players of other seeds, and hardware."""
    first, second = (
        {key: re.sub(r"-s\d+-[0-9a-f]{8}", "", value) if isinstance(value, str) else value for key, value in of.items()}
        for of in (flat(one), flat(other))
    )
    seeds = ("seed", "base.seed", "seeds.games", "seeds.sampling", "seeds.shuffling")
    same = (*seeds, "name", "device", "algo.concurrency", "algo.update.token_budget")
    differ = [key for key, value in first.items() if key in second and second[key] != value and key not in same]
    return [key for key in differ if key.partition(".")[0] not in ELSEWHERE]


def _settings(path: Path) -> dict[str, Any]:
    """Reads a configuration; {} if it is gone or not YAML of settings."""
    try:
        found = read_yaml(path)
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def run_card(folder: Path, config_hash: str, seed: int, **facts: Any) -> dict[str, Any]:
    """Writes `run.json`: command, commit, versions, hardware, seed, and further `facts`."""
    card = {
        "run": folder.name,
        "config_hash": config_hash,
        "command": redacted([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git_commit": git_commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "pettingzoo", "numpy", "hydra-core")},
        },
        "hardware": hardware(),
        "seeds": [seed],
        **facts,
    }
    write_json(folder / CARD, card)
    return card


UNKNOWN = "unknown"  # commit of code that is neither in a checkout nor installed
SOURCES = ("envs/*.py", "marl/*.py", "marl/*.csv", "experiments/*.py", "conf/*.yaml")  # git's `*` reaches into folders


@cache
def git_commit() -> str:
    """The commit of the code, with `+` and a digest of edits and new files; cached, so later commits do not count.

    An installed package: its version. Another copy: `unknown`. Only SOURCES count.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # never a repository around it
        return _installed_version(root)

    def git(*arguments: str) -> bytes:
        return subprocess.run(
            ["git", "--no-optional-locks", *arguments], cwd=root, capture_output=True, check=True
        ).stdout

    try:
        commit = git("rev-parse", "--short=12", "HEAD").decode().strip()
        edits = git("diff", "--no-ext-diff", "HEAD", "--", *SOURCES)
        new = git("ls-files", "-z", "--others", "--exclude-standard", "--", *SOURCES).split(b"\0")[:-1]
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    found, edited = hashlib.sha256(edits), bool(edits)
    for name in new:
        with suppress(OSError):  # an editor's lock, or gone since
            found.update(b"\0" + name + b"\0" + (root / os.fsdecode(name)).read_bytes())
            edited = True
    return commit + (f"+{found.hexdigest()[:6]}" if edited else "")


def _installed_version(root: Path) -> str:
    """The version of the package that was installed into this folder."""
    try:
        package = distribution("marl-language-games")
    except PackageNotFoundError:
        return UNKNOWN
    installed = Path(str(package.locate_file("marl"))).resolve() == root / "marl"  # else another copy was installed
    return package.version if installed else UNKNOWN


def hardware() -> dict[str, Any]:
    """The hardware of this process."""
    return {
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }

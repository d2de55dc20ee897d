"""Files that appear whole or not at all, and JSON that is refused by its name where it is something else.

Where a disk is full, or a folder may not be written, what is there stays as it is, and one sentence names the place.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError

from marl.errors import UserError

ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WAY_ON = "start the same command again; it goes on from what is there"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses to write in the block becomes a UserError that names the place, the reason, the fix."""
    try:
        yield
    except Exception as error:
        # The libraries in Rust raise errors of their own, in which the system's is quoted.
        if not isinstance(error, OSError | SafetensorError) and "(os error " not in str(error):
            raise
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        room = isinstance(error, OSError) and error.errno in ROOM
        room = room or any(os.strerror(number) in reason for number in ROOM)
        fix = "make room there" if room else "see that it can be written"
        raise UserError(f"{path} cannot be written ({reason}): {fix}, and {WAY_ON}") from error


@contextmanager
def whole_file(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """A text file that takes its name in one step, once all is written. Whoever is killed leaves the old one."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with writing(path):
            with temporary.open("w", encoding="utf-8", newline=newline) as file:
                yield file
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # half a file would only take the room that is wanted
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a text in one step."""
    with whole_file(path) as file:
        file.write(text)


def write_json(path: Path, data: Any) -> None:
    """Writes JSON in one step."""
    write_text(path, json.dumps(data, indent=1, sort_keys=True) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. UserError, with its name, where it cannot be read or is something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected one JSON object ({error})") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected one JSON object, got {str(data)[:60]!r}")
    return data

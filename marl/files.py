"""Files that appear whole or not at all, and JSON that is refused by its name where it is something else.

Where a disk is full, or a folder may not be written, what is there stays as it is, and one sentence names the place.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from marl.errors import LONGEST, UserError, bytes_of

ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WAY_ON = "start the same command again; it goes on from what is there"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses to write in the block becomes a UserError that names the place, the reason, the fix."""
    try:
        yield
    except Exception as error:
        quoted = re.search(r"\(os error (\d+)\)", str(error))  # libraries in Rust raise errors of their own
        number = error.errno if isinstance(error, OSError) else int(quoted[1]) if quoted else None
        if number is None and not isinstance(error, OSError):
            raise
        reason = " ".join(str(error).split()) if number is None else os.strerror(number)
        fix = "make room there" if number in ROOM else "see that it can be written"
        raise UserError(f"{path} cannot be written ({reason}): {fix}, and {WAY_ON}") from error


@contextmanager
def whole_file(path: str | Path, newline: str | None = None) -> Iterator[TextIO]:
    """A text file that takes its name in one step, once all is on the disk. Who is killed, or loses power, leaves the
    old one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.new")
    try:
        with writing(path):
            with temporary.open("w", encoding="utf-8", newline=newline) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):  # half a file would only take the room that is wanted
            temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Sees that the names in a folder are on the disk: without, a loss of power may take a rename back."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def joined_name(parts: Iterable[str], by: str) -> str:
    """A file's name made of several; one that would be too long is cut, and ends in a digest of all of it."""
    name = by.join(parts)
    if bytes_of(name) <= LONGEST:
        return name
    whole = name.encode(errors="surrogatepass")
    digest = hashlib.sha256(whole).hexdigest()[:12]
    return f"{whole[: LONGEST - len(digest) - 1].decode(errors='ignore')}-{digest}"


def write_text(path: str | Path, text: str) -> None:
    """Writes a text in one step."""
    with whole_file(path) as file:
        file.write(text)


def write_json(path: str | Path, data: Any) -> None:
    """Writes JSON in one step."""
    write_text(path, json.dumps(data, indent=1, sort_keys=True) + "\n")


def canonical(data: Any) -> str:
    """JSON of plain data, the same however whole numbers were typed: `1` or `1.0`."""

    def typed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: typed(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [typed(each) for each in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(typed(data), sort_keys=True)


def read_json(path: str | Path) -> dict[str, Any]:
    """A file that holds one JSON object. UserError, with its name, where it cannot be read or is something else."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected one JSON object ({error})") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected one JSON object, got {str(data)[:60]!r}")
    return data

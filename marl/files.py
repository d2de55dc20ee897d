"""Files that appear whole or not at all, and JSON that is refused by its name where it is something else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from marl.errors import UserError


@contextmanager
def whole_file(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """A text file that takes its name in one step, once all is written. Whoever is killed leaves the old one."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8", newline=newline) as file:
        yield file
    os.replace(temporary, path)


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

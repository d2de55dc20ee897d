"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


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

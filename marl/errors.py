"""What goes wrong by someone's input rather than by our mistake."""

from __future__ import annotations

import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PLACES = {  # settings of commands, and what they name
    **dict.fromkeys(("runs", "cache", "cells", "publish", "human"), "folder"),
    **dict.fromkeys(("published", "curves", "data.table"), "file"),
    **dict.fromkeys(("out", "data"), "folder or file"),
    "data.dond": "folder",
}
COLDEST, HOTTEST = 1e-3, 1000.0  # temperatures


class UserError(ValueError):
    """Bad input: its text is one clear sentence that names the setting or file, its value, and the fix.

    Commands print the sentence and leave with a non-zero status, without a traceback.
    """


@contextmanager
def naming(setting: str, term: object) -> Iterator[None]:
    """Within, whatever a term's own code raises becomes a UserError with the setting, the error and the line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # anybody's code may raise anything
        file = getattr(sys.modules.get(type(term).__module__), "__file__", None)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == file]
        place = (own or frames)[-1]
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{setting}: {type(term).__name__} raised {told} ({place.filename}, line {place.lineno}); "
            "mend it, or leave it out"
        ) from error


def check_writable(folder: Path, setting: str) -> None:
    """Makes the folder. UserError, naming the setting, if nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{setting}={folder}: the folder cannot be written ({error.strerror}); name another") from error


def check_places(settings: Mapping[str, Any]) -> None:
    """Refuses settings that cannot say where something is, or is to be kept. Each command has some of them; whether
    others than `runs`, `cache` and `cells`, or a name, may be null is for its defaults to say (experiments/cli.py)."""
    data = settings.get("data")
    if isinstance(data, Mapping):  # a group in some commands
        settings = {**settings, **{f"data.{name}": value for name, value in data.items()}, "data": None}
    for name in (name for name in PLACES if name in settings):
        value, may_be_null = settings[name], name not in ("runs", "cache", "cells")
        if not (value is None and may_be_null) and (not isinstance(value, str) or not value or "\0" in value):
            raise UserError(f"{name}={value!r}: must be the name of a {PLACES[name]}")
    for name in {"name", "arm"} & settings.keys():  # parts of the folder's own name
        value = settings[name]
        if not (value is None and name == "name") and (
            isinstance(value, bool)
            or not isinstance(value, str | int | float)
            or not re.fullmatch(r"[^/\0]+", f"{value}")
        ):
            raise UserError(f"{name}={value!r}: must be a name that can be part of a folder's, without slashes")


def check_temperature(value: Any, name: str) -> None:
    """Refuses what logits cannot be divided by; 0 stands for the likeliest."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and (value == 0 or COLDEST <= value <= HOTTEST)):
        raise UserError(f"{name}={value}: must be a number from {COLDEST} to {HOTTEST:,}, or 0 for the likeliest")


def check_text(value: Any, name: str) -> None:
    """Refuses what is neither text nor null."""
    if value is not None and (not isinstance(value, str) or "\0" in value):
        raise UserError(f"{name}={value!r}: must be text, or null")

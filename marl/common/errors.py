"""Errors about bad input, and checks of settings that several commands share."""

import difflib
import math
import re
import sys
import tempfile
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATHS = {  # settings of commands, and what they name; null means none, but for REQUIRED
    **dict.fromkeys(("runs", "cache", "cells", "publish", "human", "data.dond"), "folder"),
    **dict.fromkeys(("published", "curves", "data.table"), "file"),
    **dict.fromkeys(("out", "data"), "folder or file"),
}
REQUIRED = ("runs", "cache", "cells")
NAMES = (*PATHS, "players", "opponent", "voices", "select", "model.name", "env.contexts")  # of files and folders
CASTS = ("init.", "cast.", "eval.cast.")  # settings that may name folders, too
LONGEST_PART = 255  # bytes of a file's name, on every common file system
LONGEST_NAME = 200  # bytes of a name that the project gives: files beside it add to it, as `.NAME_per_seed.csv.gz.new`
COLDEST, HOTTEST = 1e-3, 1000.0  # temperatures
LARGEST = 1e30  # number of a setting: float32 holds its products, too
MOST = 10**6  # of whole numbers that say how many or how long
MOST_OF = {  # the same, by the setting's last name, where more makes sense
    "seed": 2**63 - 1, "sampling": 2**63 - 1, "shuffling": 2**63 - 1,
    "tokens": 10**12, "calls": 10**9, "token_budget": 10**9, "exact_limit": 10**9,
}  # fmt: skip
LONGEST_ERROR = 2000  # letters of an error


class UserError(ValueError):
    """Bad input. The text names the setting or file, its value, and the fix.

    Commands print it without a traceback and exit with a non-zero status. Characters that a terminal cannot print are
    escaped, and a very long text is cut.
    """

    def __init__(self, sentence: str) -> None:
        text = str(sentence).encode(errors="backslashreplace").decode()
        super().__init__(text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}...")


@contextmanager
def naming(setting: str, term: object) -> Iterator[None]:
    """Turns any error of a term's own code into a UserError with the setting, the error and the line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # anybody's code may raise anything
        file = getattr(sys.modules.get(type(term).__module__), "__file__", None)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == file]
        place = (own or frames)[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{setting}: {type(term).__name__} raised {text} ({place.filename}, line {place.lineno}); "
            "mend it, or leave it out"
        ) from error


@contextmanager
def prefixed(prefix: str, *others: type[Exception]) -> Iterator[None]:
    """Puts a prefix, such as a setting's name, before a UserError within the block; `others` become one."""
    caught: tuple[type[Exception], ...] = (UserError, *others)
    try:
        yield
    except caught as error:
        raise UserError(f"{prefix}{error}") from error


def check_writable(folder: str | Path, setting: str) -> None:
    """Makes the folder. UserError if nothing can be written into it."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{setting}={folder}: the folder cannot be written ({error.strerror}). Name another."
        ) from error


def check_settings(settings: Any) -> None:
    """Raises UserError for numbers, paths and names, anywhere in a command's settings, that no command can use."""
    check_sizes(settings, "")
    data = settings.get("data")
    if isinstance(data, Mapping):  # a group in some commands
        settings = {**settings, **{f"data.{name}": value for name, value in data.items()}, "data": None}
    for name in (name for name in PATHS if name in settings):
        value = settings[name]
        if not (value is None and name not in REQUIRED) and (not isinstance(value, str) or not value or "\0" in value):
            raise UserError(f"{name}={value!r}: must be the name of a {PATHS[name]}")
    for name in {"name", "arm"} & settings.keys():  # parts of the folder's own name
        value = f"{settings[name]}"
        plain = isinstance(settings[name], str | int | float) and not isinstance(settings[name], bool)
        if settings[name] is None and name == "name":
            continue
        if not plain or not value or "/" in value or "\0" in value:
            raise UserError(
                f"{name}={settings[name]!r}: must be a name that can be part of a folder's, without slashes"
            )
        check_length(value, name)


def bytes_of(name: str) -> int:
    """Length of a name in bytes, as file systems count it."""
    return len(name.encode(errors="surrogatepass"))


def check_length(name: str, setting: str) -> None:
    """Refuses a name that is too long to become part of a file name."""
    if bytes_of(name) > LONGEST_NAME:
        raise UserError(
            f"{setting}={name[:60]}...: {bytes_of(name)} bytes are too many for a name. Use {LONGEST_NAME}."
        )


def check_sizes(value: Any, name: str) -> None:
    """Refuses whole numbers beyond MOST, text that is not UTF-8 and over-long file names, at any depth of a setting."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            check_sizes(key, name)
            check_sizes(each, f"{name}.{key}" if name else f"{key}")
    elif isinstance(value, list | tuple):
        for each in value:
            check_sizes(each, name)
    elif isinstance(value, int):
        most = MOST_OF["seed"] if name.startswith("seeds.") else MOST_OF.get(name.rpartition(".")[2], MOST)
        if abs(value) > most:
            raise UserError(f"{name}={value if abs(value) < LARGEST else 'a huge number'}: must be at most {most:,}")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UserError(f"{name}={value!r}: holds a character that is not UTF-8. Leave it out.") from None
        if (name in NAMES or name.startswith(CASTS)) and any(bytes_of(p) > LONGEST_PART for p in value.split("/")):
            raise UserError(f"{name}={value[:60]}...: a file's name has at most {LONGEST_PART} bytes. Shorten it.")


def check_count(value: Any, name: str, least: int = 1) -> None:
    """Refuses a value that is not a whole number from `least` to the setting's maximum."""
    if type(value) is not int or value < least:
        raise UserError(f"{name}={value}: must be a whole number, at least {least}")
    check_sizes(value, name)


def check_counts(settings: object, names: Iterable[str], least: int = 1, where: str = "") -> None:
    """Refuses settings of these names as `check_count` does. `where`: the group that they stand in."""
    for name in names:
        check_count(getattr(settings, name), dotted(where, name), least)


def check_choices(settings: object, where: str, **known: Collection[str]) -> None:
    """Refuses settings, by name, whose value is not among the known choices."""
    for name, allowed in known.items():
        if (value := getattr(settings, name)) not in allowed:
            raise UserError(f"{dotted(where, name)}={value}: must be one of {', '.join(allowed)}")


def check_range(settings: object, where: str, interval: str, *names: str) -> None:
    """Refuses settings outside an interval, such as `[0, 1)`: from 0 to below 1, or `(0, inf)`: any above 0.

    Words behind the interval end the error, as in `[0, 1], or null`: with these, null passes.
    """
    parts = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])(.*)", interval)
    assert parts, interval
    first, low, high, last, hint = parts.groups()
    ends = f"{'at least' if first == '[' else 'above'} {low}", f"{'at most' if last == ']' else 'below'} {high}"
    words = {"[]": f"from {low} to {high}", "()": f"between {low} and {high}"}.get(first + last, " and ".join(ends))
    for name in names:
        value = getattr(settings, name)
        if value is None and "null" in hint:
            continue
        above = value is not None and (value > float(low) or (first == "[" and value == float(low)))
        if not above or not (value < float(high) or (last == "]" and value == float(high))):
            finite = "finite" if value == math.inf else ends[0]
            raise UserError(f"{dotted(where, name)}={value}: must be {finite if high == 'inf' else words}{hint}")


def dotted(where: str, name: str) -> str:
    """The full name of a setting in a group, or of one in none."""
    return f"{where}.{name}" if where else name


def check_temperature(value: Any, name: str) -> None:
    """Refuses a sampling temperature that logits cannot be divided by; 0 takes the likeliest token."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and (value == 0 or COLDEST <= value <= HOTTEST)):
        raise UserError(f"{name}={value}: must be a number from {COLDEST} to {HOTTEST:,}, or 0 for the likeliest")


def check_text(value: Any, name: str) -> None:
    """Refuses a value that is neither text nor null."""
    if value is not None and (not isinstance(value, str) or "\0" in value):
        raise UserError(f"{name}={value!r}: must be text, or null")


def nearest(word: str, names: Iterable[str]) -> str:
    """A clause with the names most like a word; empty if none is. A word without dots finds last parts: `algo.lr`."""
    like = {
        name: difflib.SequenceMatcher(None, word, name if "." in word else name.rpartition(".")[2]).ratio()
        for name in names
    }
    least = max(0.6, max(like.values(), default=0.0) - 0.1)
    found = sorted((name for name in like if like[name] >= least), key=lambda name: -like[name])[:3]
    return f"the nearest {'is' if len(found) == 1 else 'are'} {', '.join(found)}" if found else ""

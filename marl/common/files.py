"""Writes files in one step, and reads files that strangers may have written.

A failed write leaves the old file as it is. A run's folder may come from anybody, so it is read as plain data of a
limited size, from plain files, without references to the environment or to code. Every fault becomes a UserError.
"""

import csv
import errno
import gzip
import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cache, lru_cache
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import yaml

from marl.common.errors import LARGEST, LONGEST_NAME, UserError, bytes_of

ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WAY_ON = "start the same command again; it goes on from what is there"

# Largest files in bytes. YAML is slow to read (64 KiB take two seconds); a run's settings have 3 KiB.
MOST_YAML, MOST_JSON, MOST_LINES = 1 << 16, 1 << 24, 1 << 28
DEEPEST = 40  # levels of data within data

# Errors of Python for data that a reader does not expect. A UserError is a ValueError, and is raised as it is.
FAULTS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError,
    csv.Error, yaml.YAMLError,
)  # fmt: skip


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failed write within the block into a UserError that names the path, the reason and the fix."""
    try:
        yield
    except Exception as error:  # libraries raise their own for a full disk; all others go on
        quoted = re.search(r"\(os error (\d+)\)", str(error))  # libraries in Rust raise errors of their own
        number = error.errno if isinstance(error, OSError) else int(quoted[1]) if quoted else None
        if number is None and not isinstance(error, OSError):
            raise
        reason = " ".join(str(error).split()) if number is None else os.strerror(number)
        fix = "make room there" if number in ROOM else "see that it can be written"
        raise UserError(f"{path} cannot be written ({reason}): {fix}, and {WAY_ON}") from error


@contextmanager
def whole_file(path: str | Path, newline: str | None = None) -> Iterator[TextIO]:
    """Opens a text file that takes its name in one step, once all is on the disk: a killed process leaves the old
    file. A name that ends in `.gz` is compressed, to the same bytes each time."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.new")
    try:
        with writing(path):
            temporary.unlink(missing_ok=True)  # a link of this name would lead the text elsewhere
            with temporary.open("xb") as file:
                packed = gzip.GzipFile("", "wb", 9, file, mtime=0) if path.suffix == ".gz" else file
                text = TextIOWrapper(packed, "utf-8", newline=newline)
                yield text
                text.detach()  # flushes
                if packed is not file:
                    packed.close()
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):  # half a file would only take space
            temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Flushes a folder's names to the disk: otherwise a loss of power may undo a rename."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def joined_name(parts: Iterable[str], by: str) -> str:
    """Joins parts to a file's name. A name that is too long is cut and ends in a digest of the whole."""
    name = by.join(parts)
    if bytes_of(name) <= LONGEST_NAME:
        return name
    whole = name.encode(errors="surrogatepass")
    digest = hashlib.sha256(whole).hexdigest()[:12]
    return f"{whole[: LONGEST_NAME - len(digest) - 1].decode(errors='ignore')}-{digest}"


def write_text(path: str | Path, text: str) -> None:
    """Writes a text in one step."""
    with whole_file(path) as file:
        file.write(text)


def write_json(path: str | Path, data: Any) -> None:
    """Writes JSON in one step."""
    write_text(path, json.dumps(data, indent=1, sort_keys=True) + "\n")


def canonical(data: Any) -> str:
    """Canonical JSON of plain data: `1` and `1.0` are written alike."""

    def typed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: typed(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [typed(each) for each in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(typed(data), sort_keys=True)


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turns errors within the block into a UserError that calls `what`, a folder or file, damaged."""
    try:
        yield
    except UserError:
        raise
    except FAULTS as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"{what} is damaged, or of another version of this project ({reason}). Name another."
        ) from error


@contextmanager
def reading_kept(path: str | Path, what: str) -> Iterator[None]:
    """Turns errors within the block into a UserError: a kept file does not hold `what`; a command makes it again."""
    try:
        yield
    except FAULTS as error:
        raise UserError(f"{path} does not hold {what}: remove it, and the same command makes it again") from error


def read_bytes(path: str | Path, most: int = MOST_LINES, linked: bool = False) -> bytes:
    """Bytes of a plain file. UserError if it cannot be read, has more than `most` bytes, or is a pipe, a device or a
    link out of its folder. `linked` allows links, for files that the command line names."""
    path = Path(path)
    try:
        if not linked and path.is_symlink():
            inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent))
            if not inside:
                raise UserError(f"{path} is a link that leads out of its folder. Put the file itself there.")
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:  # not at a pipe
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"{path} is no plain file. Put a file there.")
            if found.st_size > most:
                raise UserError(f"{path} has more than {most:,} bytes, too many for this kind of file. Name another.")
            return file.read(most)
    except OSError as error:
        raise UserError(f"{path}: the file cannot be read ({error.strerror})") from error


def read_text(path: str | Path, most: int = MOST_LINES, linked: bool = False) -> str:
    """Text of a plain file, as `read_bytes`. UserError if it is not UTF-8."""
    try:
        return read_bytes(path, most, linked).decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: the file is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error


def check_plain(data: Any) -> None:
    """Raises ValueError unless data are JSON's types, finite numbers up to LARGEST, text that UTF-8 can encode, and at
    most DEEPEST levels of nesting."""
    left = [(data, 0)]
    while left:
        value, depth = left.pop()
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
        if isinstance(value, dict):
            left += ((each, depth + 1) for pair in value.items() for each in pair)
        elif isinstance(value, list):
            left += ((each, depth + 1) for each in value)
        elif isinstance(value, str):
            value.encode()  # ValueError for half a surrogate pair
        elif value is not None and not isinstance(value, int | float):
            raise ValueError(f"a {type(value).__name__} is no plain data")
        elif value is not None and not abs(value) <= LARGEST:  # nor is nan
            raise ValueError(f"a number is not between {-LARGEST:g} and {LARGEST:g}")


def parsed_json(text: str) -> Any:
    """Plain data from JSON text. Raises ValueError as `check_plain` does."""
    if len(text) > MOST_JSON:
        raise ValueError(f"it has more than {MOST_JSON:,} letters")
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from error
    check_plain(data)
    return data


def fits(value: Any, form: Any) -> bool:
    """Tells whether plain data has a form: a type, a list `[form]`, a dict `{name: form}`, or one of a tuple of forms.

    `name?` may be missing, `...` stands for every name.
    """
    if isinstance(form, tuple):
        return any(fits(value, each) for each in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(each, form[0]) for each in value)
    if not isinstance(form, dict):
        return isinstance(value, form)
    if not isinstance(value, dict):
        return False
    if ... in form and not all(fits(each, form[...]) for each in value.values()):
        return False
    named = {name: each for name, each in form.items() if name is not ...}
    needed = {name for name in named if not name.endswith("?")}
    known = {name.removesuffix("?"): each for name, each in named.items()}
    return needed <= value.keys() and all(fits(value[name], each) for name, each in known.items() if name in value)


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file. UserError if the file cannot be read or holds anything else."""
    path = Path(path)
    try:
        data = parsed_json(read_text(path, MOST_JSON))
    except ValueError as error:
        raise UserError(f"{path}: expected one JSON object ({_reason(path, error)})") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected one JSON object, got {str(data)[:60]!r}")
    return data


def _reason(path: Path, error: Exception) -> str:
    """First line of an error's text, without the file's name."""
    first = next(iter(f"{error}".splitlines()), "")
    return first.removeprefix(f"{path}").lstrip(": ") or type(error).__name__


class _PlainLoader(yaml.SafeLoader):
    """YAML loader without aliases, by which a few lines could stand for endless data."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias (*NAME) stands for another part")
        return super().compose_node(parent, index)


def read_yaml(path: Path) -> Any:
    """Plain data in a YAML file. UserError if the file cannot be read or holds anything else."""
    try:
        return deepcopy(_parsed_yaml(read_text(path, MOST_YAML)))
    except FAULTS as error:
        raise UserError(f"{path}: expected YAML ({_reason(path, error)})") from error


@lru_cache(maxsize=64)
def _parsed_yaml(text: str) -> Any:
    """Plain data from YAML text, cached per process: the same runs' settings are read again and again."""
    data = yaml.load(text, _PlainLoader)
    check_plain(data)
    return data


def csv_rows(path: str | Path) -> list[dict[str, str]]:
    """Reads the lines of a csv file (`.csv` or `.csv.gz`) by column. UserError if it cannot be read; csv.Error or
    ValueError if it is no csv file."""
    path = Path(path)
    text = unpacked(path) if path.suffix == ".gz" else read_text(path, linked=True)
    return [*csv.DictReader(StringIO(text, newline=""), strict=True)]


def unpacked(path: Path) -> str:
    """Reads a compressed text. UserError if it is not one, or longer than MOST_LINES."""
    try:
        with gzip.open(BytesIO(read_bytes(path, linked=True))) as file:
            text = file.read(MOST_LINES + 1)
        if len(text) > MOST_LINES:
            raise UserError(f"{path} holds more than {MOST_LINES:,} bytes: no file of this kind does. Name another.")
        return text.decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no compressed text ({error}): name another") from error


def stem(path: Path) -> str:
    """The file's name without `.csv` or `.csv.gz`."""
    return path.name.removesuffix(".gz").removesuffix(".csv")


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits; cached per process until the file changes: weights are gigabytes."""
    found = path.stat()
    return _file_digest(path, found.st_size, found.st_mtime_ns)


@cache
def _file_digest(path: Path, size: int, modified: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(settings: Mapping[str, Any]) -> str:
    """Digest of settings: twelve hexadecimal digits."""
    return hashlib.sha256(canonical(settings).encode()).hexdigest()[:12]

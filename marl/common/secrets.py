"""What might be a secret, and how it is kept: as a digest, or not at all.

A setting might be one by its name, at any depth: keys, tokens of access, passwords, headers of authorization. So might
a text that holds a secret which is known, as the endpoint's key. Left out: secrets under names that don't say so.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

# Searched in a name in lower case, its words joined by `_`. Marks of a tokenizer and counts of tokens are no secrets.
SECRET = re.compile(
    r"secret|password|passwd|passphrase|credential|bearer|authori[sz]ation|cookie|api_?key"
    r"|(^|_)(auth|jwt|pass|pwd)(_|$)"
    r"|(^|_)(access|auth|private|session)?keys?$"
    r"|(^|(?<!eos)(?<!bos)(?<!pad)(?<!unk)(?<!stop)_)token$"
    r"|(access|api|auth|refresh|session)_?tokens?$"
)
DIGEST = re.compile("secret:[0-9a-f]{12}")
SHORTEST = 8  # characters of a secret that is worth looking for in texts; a shorter one may stand there by chance
UNTOLD = ("chat.key", "chat.url", "chat.extra")  # settings in which somebody may have written a secret


def might_be_secret(name: str) -> bool:
    """Whether a setting, or a header, of this name might hold a secret; of a dotted name any part may say so."""
    parts = (re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", part) for part in name.split("."))
    return any(SECRET.search(re.sub("[^a-z0-9]+", "_", part.lower()).strip("_")) for part in parts)


@cache
def digest_of(secret: str) -> str:
    """A digest that tells secrets apart; a digest is its own. Slow, so that a short password isn't found by trying."""
    if DIGEST.fullmatch(secret):
        return secret
    found = hashlib.pbkdf2_hmac("sha256", secret.encode("utf-8", "surrogatepass"), b"marl", 100_000, 6)
    return f"secret:{found.hex()}"


def hidden(
    settings: Any, known: Sequence[str] = (), mark: Callable[[str], str] = digest_of, secret: bool = False
) -> Any:
    """The same settings (plain data) with a `mark` in the place of each value that might be a secret.

    `known`: secrets that may stand in any text. `secret`: whether all values here might be secrets.
    """
    if isinstance(settings, Mapping):
        return {k: hidden(v, known, mark, secret or might_be_secret(str(k))) for k, v in settings.items()}
    if isinstance(settings, list | tuple):
        return [hidden(each, known, mark, secret) for each in settings]
    if settings is None or settings == "" or isinstance(settings, bool):
        return settings
    text = str(settings)
    hide = secret or DIGEST.fullmatch(text) or any(each in text for each in known)
    return mark(text) if hide else settings


def secrets_in(settings: Any) -> list[str]:
    """The values in settings that might be secrets, as texts."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    hidden(settings, mark=note)
    return found


def told(arguments: Iterable[str]) -> str:
    """A command's arguments as they may be shown and kept: `KEY=...` where the value might be, or hold, a secret."""
    return " ".join(_told(*argument.partition("=")) for argument in arguments)


def _told(key: str, sign: str, value: str) -> str:
    name = key.lstrip("+~")
    group = name == "chat" and "{" in value
    inner = re.findall(r"([\w.-]+)[\"']?\s*[:=]", value)  # names of settings within the value
    if name.startswith(UNTOLD) or group or might_be_secret(name) or any(map(might_be_secret, inner)):
        return f"{key}=..." if sign else key
    return key + sign + value

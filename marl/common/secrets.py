"""Hides secrets in settings and arguments: each is replaced by a digest or left out.

A setting counts as secret by its name, at any depth (keys, access tokens, passwords, authorization headers), and a text
if it holds a known secret. Left out: secrets under other names.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

# Searched in a lower-case name whose words are joined by `_`. A tokenizer's marks and token counts are no secrets.
SECRET = re.compile(
    r"secret|password|passwd|passphrase|credential|bearer|authori[sz]ation|cookie|api_?key"
    r"|(^|_)(auth|jwt|pass|pwd)(_|$)"
    r"|(^|_)(access|auth|private|session)?keys?$"
    r"|(^|(?<!eos)(?<!bos)(?<!pad)(?<!unk)(?<!stop)_)token$"
    r"|(access|api|auth|refresh|session)_?tokens?$"
)
DIGEST = re.compile("secret:[0-9a-f]{12}")
SHORTEST = 8  # characters of a secret that is searched for in texts; a shorter one may stand there by chance
ALWAYS_REDACTED = (
    "chat.key",
    "chat.url",
    "chat.extra",
)  # settings that may hold a secret whatever their value looks like


def might_be_secret(name: str) -> bool:
    """Tells whether a setting or header of this name may hold a secret; any part of a dotted name can say so."""
    parts = (re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", part) for part in name.split("."))
    return any(SECRET.search(re.sub("[^a-z0-9]+", "_", part.lower()).strip("_")) for part in parts)


@cache
def digest_of(secret: str) -> str:
    """Digest of a secret; a digest is its own. Slow on purpose, so that short passwords cannot be guessed."""
    if DIGEST.fullmatch(secret):
        return secret
    found = hashlib.pbkdf2_hmac("sha256", secret.encode("utf-8", "surrogatepass"), b"marl", 100_000, 6)
    return f"secret:{found.hex()}"


def hidden(
    settings: Any, known: Sequence[str] = (), mark: Callable[[str], str] = digest_of, secret: bool = False
) -> Any:
    """Copies settings (plain data) with a `mark` in place of each value that may be a secret.

    known: secrets that may stand in any text. secret: whether all values here count as secrets.
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
    """Lists the values in settings that may be secrets, as texts."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    hidden(settings, mark=note)
    return found


def redacted(arguments: Iterable[str]) -> str:
    """Joins a command's arguments for display; a value that may hold a secret becomes `KEY=...`."""
    return " ".join(_redacted(*argument.partition("=")) for argument in arguments)


def _redacted(key: str, sign: str, value: str) -> str:
    name = key.lstrip("+~")
    group = name == "chat" and "{" in value
    inner = re.findall(r"([\w.-]+)[\"']?\s*[:=]", value)  # settings within the value
    if name.startswith(ALWAYS_REDACTED) or group or might_be_secret(name) or any(map(might_be_secret, inner)):
        return f"{key}=..." if sign else key
    return key + sign + value

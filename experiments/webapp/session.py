"""Identifies visitors: sessions by signed cookies, the token, the origin of a form, and how often one may ask.

A session is a random name. Neither addresses nor names of browsers are kept.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping

from starlette.responses import Response

COOKIE = "session"
LOCAL = ("127.0.0.1", "localhost", "[::1]")


class Sessions:
    """Signs and reads cookies. Another token makes all earlier cookies void."""

    def __init__(self, secret: str, token: str | None) -> None:
        self.token = token
        self._key = hashlib.sha256(f"{secret}/{token or ''}".encode()).digest()

    def new(self) -> str:
        """A cookie for a new person."""
        name = secrets.token_hex(12)
        return f"{name}.{self._sign(name)}"

    def person(self, cookie: str | None) -> str | None:
        """The person of a cookie; None if it is not one that this server signed."""
        name, _, signature = (cookie or "").partition(".")
        good = hmac.compare_digest(self._sign(name).encode(), signature.encode(errors="replace"))
        return name if good and name else None

    def admits(self, token: str) -> bool:
        return self.token is not None and hmac.compare_digest(token.encode(errors="replace"), self.token.encode())

    def _sign(self, name: str) -> str:
        return hmac.new(self._key, name.encode(errors="replace"), hashlib.sha256).hexdigest()


class Rate:
    """Counts requests a minute for each of many askers; forgets them all when they become too many."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._left: dict[str, tuple[float, float]] = {}

    def allows(self, asker: str) -> bool:
        now = time.monotonic()
        if len(self._left) > 10_000:
            self._left.clear()
        left, at = self._left.get(asker, (float(self.most), now))
        left = min(float(self.most), left + (now - at) * self.most / 60)
        self._left[asker] = (left - 1 if left >= 1 else left, now)
        return left >= 1


def host_is_fine(headers: Mapping[str, str], token: str | None) -> bool:
    """Tells whether a host may be answered. Without a token only this machine's names may: no other site leads here."""
    if token is not None:
        return True
    host = headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return name in LOCAL


def origin_is_fine(headers: Mapping[str, str]) -> bool:
    """A form comes from our own pages."""
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host", "")


def set_cookie(response: Response, name: str, value: str) -> None:
    """Sets a cookie that no script and no other site can use."""
    response.set_cookie(name, value, max_age=90 * 24 * 3600, httponly=True, samesite="lax")

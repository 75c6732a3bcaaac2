"""Sessions of the dashboard: a cookie and a second secret stand for the token that logged in.

Browsers send a cookie to all ports of a host, so it is a random value without any right. The second
secret, a MAC of the cookie by the token and a key of the home, is in the storage of the page's own
origin; the page sends it as a header. The gateway stores neither: sessions survive its restart, and
a new token ends them all.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

LIFETIME_S = 30 * 86_400
HEADER = "x-warmd-session"  # the second secret
_COOKIE = re.compile(r"([0-9]{1,12})\.[0-9a-f]{32}\.([A-Za-z0-9._-]{1,64})", re.ASCII)
_PORT = re.compile(r":([0-9]{1,5})$", re.ASCII)


class Session(NamedTuple):
    """Both halves of a session."""

    cookie: str
    secret: str


def cookie_name(host: str) -> str:
    """Return the name of the cookie for a Host header: servers at other ports have other names."""
    port = _PORT.search(host)
    return "warmd" if port is None else f"warmd-{port[1]}"


def issue(name: str, key: bytes) -> Session:
    """Return a new session of the token called `name`; `key` is known only with the token."""
    cookie = f"{int(time.time()) + LIFETIME_S}.{secrets.token_hex(16)}.{name}"
    return Session(cookie, _mac(key, cookie))


def verify(session: Session, key_of: Callable[[str], bytes | None]) -> str | None:
    """Return the name of the token that a session stands for; None for an invalid session.

    `key_of` returns the key of a token by its name, None if there is no such token.
    """
    name = holder(session.cookie)
    key = None if name is None else key_of(name)
    if key is None:
        return None
    is_right = hmac.compare_digest(session.secret.encode(), _mac(key, session.cookie).encode())
    return name if is_right else None


def holder(cookie: str) -> str | None:
    """Return the name in a cookie, which anyone can make up; None if it is none or has expired."""
    found = _COOKIE.fullmatch(cookie)
    return found[2] if found is not None and time.time() < int(found[1]) else None


def _mac(key: bytes, cookie: str) -> str:
    return hmac.new(key, f"warmd session {cookie}".encode(), hashlib.sha256).hexdigest()

"""Sessions of the dashboard: a signed cookie stands for the token, and scripts cannot read it.

The cookie holds the time at which it expires and a MAC of it under the token. The gateway stores
nothing, so sessions survive its restart, and a new token ends them all.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time

LIFETIME_S = 30 * 86_400
_VALUE = re.compile(r"([0-9]{1,12})\.([0-9a-f]{64})", re.ASCII)


def cookie_name(port: int) -> str:
    """Return the name of the cookie; browsers send the cookies of a host to all its ports."""
    return f"warmd-{port}"


def issue(token: str) -> str:
    """Return the cookie's value for someone who knows the token."""
    expires = str(int(time.time()) + LIFETIME_S)
    return f"{expires}.{_mac(token, expires)}"


def is_valid(token: str, value: str) -> bool:
    """Whether a cookie's value was issued under this token and has not expired."""
    found = _VALUE.fullmatch(value)
    if found is None or not hmac.compare_digest(found[2], _mac(token, found[1])):
        return False
    return time.time() < int(found[1])


def _mac(token: str, expires: str) -> str:
    return hmac.new(token.encode(), f"warmd session {expires}".encode(), hashlib.sha256).hexdigest()

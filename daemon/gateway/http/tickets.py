"""Tickets: addresses for downloads, where a browser cannot send the header of its session.

A ticket admits one GET of one path, within seconds, together with the cookie of the session that
requested it.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from typing import NamedTuple

from .session import Session

LIFETIME_S = 10.0
_MAX_OPEN = 50  # unused tickets of one session; older ones are dropped
_QUERY = re.compile(rb"ticket=([0-9a-f]{32})")


class _Ticket(NamedTuple):
    path: str
    session: Session
    expires: float  # of time.monotonic


class Tickets:
    """The unused tickets of one gateway."""

    def __init__(self) -> None:
        self._open: dict[str, _Ticket] = {}  # the oldest first

    def issue(self, path: str, session: Session) -> str:
        """Return an address of `path` that can be requested once, by this session."""
        now = time.monotonic()
        while self._open and next(iter(self._open.values())).expires <= now:
            del self._open[next(iter(self._open))]
        own = [value for value, ticket in self._open.items() if ticket.session == session]
        if len(own) >= _MAX_OPEN:
            del self._open[own[0]]
        value = secrets.token_hex(16)
        self._open[value] = _Ticket(path, session, now + LIFETIME_S)
        return f"{path}?ticket={value}"

    def redeem(self, path: str, query: bytes, cookie: str) -> str | None:
        """Return the session's second secret for a query string that is a ticket, else None.

        The ticket is used up, also where path or cookie are not its own.
        """
        found = _QUERY.fullmatch(query)
        ticket = None if found is None else self._open.pop(found[1].decode(), None)
        if ticket is None or ticket.path != path or ticket.expires <= time.monotonic():
            return None
        is_right = hmac.compare_digest(ticket.session.cookie.encode(), cookie.encode())
        return ticket.session.secret if is_right else None

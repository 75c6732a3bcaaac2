"""The gateway's connections: many may be open, and who sends no request is hung up on.

uvicorn closes a connection that is idle after an answer. One that never asked anything, or sends
the head of a request byte by byte, it would keep for ever.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0  # for the head of a request to come
_MOST_FILES = 65_536  # open at once


class Door(H11Protocol):
    """A connection, with a time limit for the head of each request."""

    _hanging_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._hanging_up is not None:
            self._hanging_up.cancel()

    def _watch(self) -> None:
        awaits_head = self.cycle is None or self.cycle.response_complete
        if awaits_head and self._hanging_up is None:
            self._hanging_up = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)
        elif not awaits_head and self._hanging_up is not None:
            self._hanging_up.cancel()
            self._hanging_up = None


def allow_many() -> None:
    """Let this process have as many connections as the system lets it: often 1024 unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

"""The gateway's connections: many may be open, none for nothing, and none takes all of the time.

uvicorn closes a connection that is idle after an answer. One that never asked anything, or sends
the head of a request byte by byte, or does not read its answer, it would keep for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0  # for the head of a request to come
UNREAD_S = 30.0  # in which a client must read something of its answer
MOST_CONNECTIONS = 2_000
_LEAST_READ = 1024  # bytes a second of an answer, where it does not come at once
_MOST_FILES = 65_536  # open at once
_OTHER_FILES = 128  # files that are no connections
_READ_AT_ONCE = 64 * 1024  # bytes of a connection, before it is another one's turn
_LARGEST_HEAD = 16 * 1024  # bytes
_MOST_HEADERS = 100
_MOST_CRUMBS = 128  # chunks of a body, in a row of which
_CRUMB = 256  # each has at least so many bytes, on the average
_BLANK = re.compile(rb"\n\r?\n")
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


class _Requests(h11.Connection):
    """Takes requests apart, but for those that are made to take long at it or to mislead."""

    _crumbs = _crumb_bytes = 0

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            self._check_head()
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._crumbs = self._crumb_bytes = 0
            _check_framing(event)
        elif isinstance(event, h11.Data) and event.chunk_end:
            self._check_chunk(len(event.data))
        return event

    def _check_head(self) -> None:
        data, _ = self.trailing_data
        end = _BLANK.search(data, 0, _LARGEST_HEAD)
        head = data[: end.start() if end is not None else _LARGEST_HEAD]
        if head.count(b"\n") > _MOST_HEADERS or (end is None and len(data) > _LARGEST_HEAD):
            raise h11.RemoteProtocolError("too many headers", error_status_hint=431)

    def _check_chunk(self, size: int) -> None:
        self._crumbs += 1
        self._crumb_bytes += size
        if self._crumbs > _MOST_CRUMBS and self._crumb_bytes < self._crumbs * _CRUMB:
            raise h11.RemoteProtocolError("a body in chunks that are too small")


def _check_framing(request: h11.Request) -> None:
    """Refuse what a proxy in front may read as another request than we do (RFC 9112, 6.1)."""
    names = {bytes(name) for name, _ in request.headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        raise h11.RemoteProtocolError("Content-Length together with Transfer-Encoding")


class Door(H11Protocol):
    """A connection with time limits: for the head of each request, and for reading its answer."""

    _hanging_up: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    # Connections that wait for a request, the longest first.
    _idle: ClassVar[dict[Door, None]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Requests(h11.SERVER, _LARGEST_HEAD)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        with contextlib.suppress(AttributeError):  # of a loop that is not asyncio's own
            transport.max_size = _READ_AT_ONCE
        if len(self.connections) > most_connections() and not self._make_room():
            transport.write(_FULL)
            transport.close()
            return
        self._watch()

    def _make_room(self) -> bool:
        """Hang up on whoever has sent no request for the longest time."""
        for door in self._idle:
            door.transport.abort()
            del self._idle[door]
            return True
        return False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._idle.pop(self, None)
        for timer in (self._hanging_up, self._unread):
            if timer is not None:
                timer.cancel()

    def _watch(self) -> None:
        awaits_head = self.cycle is None or self.cycle.response_complete
        if awaits_head and self._hanging_up is None:
            self._idle[self] = None
            self._hanging_up = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)
        elif not awaits_head and self._hanging_up is not None:
            self._idle.pop(self, None)
            self._hanging_up.cancel()
            self._hanging_up = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _await_reading(self) -> None:
        before = self.transport.get_write_buffer_size()

        def check() -> None:
            if before - self.transport.get_write_buffer_size() < UNREAD_S * _LEAST_READ:
                self.transport.abort()
            else:
                self._await_reading()

        self._unread = self.loop.call_later(UNREAD_S, check)


def most_connections() -> int:
    """Return how many connections may be open at once."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files < 0 else min(MOST_CONNECTIONS, files - _OTHER_FILES)


def allow_many() -> None:
    """Let this process have as many connections as the system lets it: often 1024 unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

"""Connection limits: number of connections, time for headers, time for reading the response.

uvicorn closes connections that are idle after a response. It would keep connections forever that
never send a request, send headers byte by byte (Slowloris), or do not read their response.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import socket
from collections import Counter
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .client import CLIENT, share_of
from .turns import leave

HEAD_S = 10.0  # time limit for the headers of a request
UNREAD_S = 30.0  # period in which a client must read part of its response
MAX_CONNECTIONS = 2_000
MAX_STRANGERS = 500  # connections without an authorized request; older ones make room
_IDLE_SHARE = 4  # 1/4 of all connections may be idle before new ones close them
FRESH_S = 2.0  # time for a connection's next request to arrive and to be authorized
_LEAST_READ = 1024  # bytes per second that a client must read
OTHER_FILES = 128  # open files that are not connections
_READ_AT_ONCE = 64 * 1024  # bytes per connection and event loop iteration
_MAX_HEAD = 16 * 1024  # bytes
_MAX_HEADERS = 100
_MAX_SMALL_CHUNKS = 128  # chunks of a body; beyond these they must have, on average,
_SMALL_CHUNK = 256  # at least this many bytes
_BLANK = re.compile(rb"\n\r?\n")
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


class _Requests(h11.Connection):
    """h11's parser, with refusal of requests crafted to be slow or ambiguous to parse."""

    _chunks = _chunk_bytes = 0

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            self._check_head()
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._chunk_bytes = 0
            _check_framing(event)
        elif isinstance(event, h11.Data) and event.chunk_end:
            self._check_chunk(len(event.data))
        return event

    def _check_head(self) -> None:
        data, _ = self.trailing_data
        end = _BLANK.search(data, 0, _MAX_HEAD)
        head = data[: end.start() if end is not None else _MAX_HEAD]
        if head.count(b"\n") > _MAX_HEADERS or (end is None and len(data) > _MAX_HEAD):
            raise h11.RemoteProtocolError("too many headers", error_status_hint=431)

    def _check_chunk(self, size: int) -> None:
        self._chunks += 1
        self._chunk_bytes += size
        if self._chunks > _MAX_SMALL_CHUNKS and self._chunk_bytes < self._chunks * _SMALL_CHUNK:
            raise h11.RemoteProtocolError("the chunks of the body are too small")


def _check_framing(request: h11.Request) -> None:
    """Refuse requests that a proxy may parse differently (smuggling: RFC 9112, section 6.1)."""
    names = {bytes(name) for name, _ in request.headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        raise h11.RemoteProtocolError("Content-Length together with Transfer-Encoding")


class LimitedConnection(H11Protocol):
    """A connection with time limits for the headers of a request and for reading the response.

    A client that opens many connections closes its own: beyond MAX_STRANGERS the oldest one without
    an authorized request, and beyond MAX_CONNECTIONS an idle one, else one of the client with most
    requests.
    """

    _idle_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    # Connections without a request, the longest idle first, and since when.
    _idle: ClassVar[dict[LimitedConnection, float]] = {}
    # Connections that had no authorized request when last looked at, the oldest first.
    _strangers: ClassVar[dict[LimitedConnection, None]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Requests(h11.SERVER, _MAX_HEAD)
        self._made = self._begun = self.loop.time()  # the connection, and its latest request
        self._received = 0  # bytes since `_begun`

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # asyncio sets it only if the listening socket was created with the number of TCP. Without
        # it the body of a response waits for the acknowledgement of its headers: 40 ms.
        line = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # the client has left already
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(AttributeError):  # an event loop other than asyncio's
            transport.max_size = _READ_AT_ONCE
        self._strangers[self] = None
        self._close_strangers()
        if len(self.connections) > max_connections() and not self._make_room():
            transport.write(_FULL)
            transport.close()
            return
        self._watch()

    def _close_strangers(self) -> None:
        """Close the oldest connections that authorized none of their requests, beyond the limit."""
        while len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            if not oldest._is_authorized():
                if self.loop.time() - oldest._made < FRESH_S:
                    return  # many clients connect at the same time
                oldest.transport.abort()
            del self._strangers[oldest]

    def _is_authorized(self) -> bool:
        return self.cycle is not None and share_of(self.cycle.scope) is not None

    def _make_room(self) -> bool:
        """Close a connection; return whether there was one to close.

        It is the one that has been idle longest. One that has been idle for less than FRESH_S may
        send its request in a moment: while at most 1/4 of all connections are idle, one with a
        request is closed instead, if there is one.
        """
        idle = next(iter(self._idle), None)
        least = idle
        if idle is None or (
            self.loop.time() - self._idle[idle] < FRESH_S
            and len(self._idle) <= max_connections() // _IDLE_SHARE
        ):
            least = self._least_of_busiest() or idle
        if least is None:
            return False
        self._idle.pop(least, None)
        least.transport.abort()
        return True

    def _least_of_busiest(self) -> LimitedConnection | None:
        """Return a connection of the client with most requests; None without any request.

        It is the one whose unfinished body arrives most slowly, else its oldest stream, else its
        oldest request.
        """
        others = self._with_request()
        numbers = Counter(one._share for one in others)
        most = max(numbers.values(), default=0)
        others = [one for one in others if numbers[one._share] == most]
        unfinished = [one for one in others if one.cycle.more_body]
        if unfinished:
            return min(unfinished, key=lambda one: one._speed)
        streams = [one for one in others if one.cycle.response_started]
        return min(streams or others, key=lambda one: one._begun, default=None)

    @property
    def _speed(self) -> float:
        """Bytes per second of its body; one that has just begun is not slow."""
        return (self._received + _READ_AT_ONCE) / (self.loop.time() - self._begun + 1)

    @property
    def _share(self) -> str:
        """The share of its client; all requests without token, where one is set, have one share.

        A request that the middleware has not seen yet has a share of its own.
        """
        scope = self.cycle.scope
        return (share_of(scope) or "") if CLIENT in scope else f"unseen {id(self)}"

    def _with_request(self) -> list[LimitedConnection]:
        """Return the other connections that have a request and are not being closed."""
        return [
            one
            for one in self.connections
            if isinstance(one, LimitedConnection)
            and one is not self
            and one not in self._idle
            and one.cycle is not None
            and not one.transport.is_closing()
        ]

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._idle.pop(self, None)
        self._strangers.pop(self, None)
        if self.cycle is not None:
            leave(self.cycle.scope)
        for timer in (self._idle_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()

    def _watch(self) -> None:
        awaits_head = self.cycle is None or self.cycle.response_complete
        if awaits_head and self._idle_timer is None:
            self._idle[self] = self.loop.time()
            self._idle_timer = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)
        elif not awaits_head and self._idle_timer is not None:
            self._idle.pop(self, None)
            self._idle_timer.cancel()
            self._idle_timer = None
            self._begun, self._received = self.loop.time(), 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _await_reading(self) -> None:
        before = self.transport.get_write_buffer_size()

        def check() -> None:
            if before - self.transport.get_write_buffer_size() < UNREAD_S * _LEAST_READ:
                self.transport.abort()
            else:
                self._await_reading()

        self._unread_timer = self.loop.call_later(UNREAD_S, check)


def max_connections() -> int:
    """Return the maximum number of open connections."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files < 0 else min(MAX_CONNECTIONS, files - OTHER_FILES)

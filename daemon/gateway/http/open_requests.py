"""The requests that are being answered, and how one is ended before its response is complete."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import Message, Send

from .client import HttpClient
from .errors import ApiError

log = logging.getLogger(__name__)

_STREAM = "text/event-stream"
_CANCEL_AGAIN_S = 0.1  # redis-py sometimes swallows a cancellation


@dataclass(eq=False)
class OpenRequest:
    """A request that is being answered by a task."""

    client: HttpClient
    right: str  # that it needs
    send: Send
    task: asyncio.Task[object] = field(default_factory=lambda: _current_task())
    error: ApiError | None = None  # why it is ended
    status: int | None = None  # of its response
    is_stream: bool = False  # of events
    is_over: bool = False  # its task has left the application,
    was_ended: bool = False  # by `end`

    async def note(self, message: Message) -> None:
        """Send a message of the response, and note what it is."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self.is_stream = kind.startswith(_STREAM)
        await self.send(message)

    @property
    def has_started(self) -> bool:
        """Whether its response has."""
        return self.status is not None

    def end(self, error: ApiError) -> None:
        """End it with an error: its response, or the last event of its stream."""
        if self.error is None and not self.is_over:
            self.error = error
            self._cancel()

    def _cancel(self) -> None:
        if not self.is_over and not self.task.done():
            self.task.cancel()
            asyncio.get_running_loop().call_later(_CANCEL_AGAIN_S, self._cancel)


class OpenRequests:
    """The open requests of all clients. For one event loop."""

    def __init__(self) -> None:
        self._open: set[OpenRequest] = set()

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._open))

    @contextmanager
    def holding(self, request: OpenRequest) -> Iterator[None]:
        """Count a request while it is answered.

        A cancellation that `OpenRequest.end` has caused leaves the block without an exception (its
        traceback would hold the body): then `was_ended` is true.
        """
        self._open.add(request)
        try:
            yield
        except asyncio.CancelledError:
            if request.error is None:
                raise
            request.was_ended = request.is_over = True
            while request.task.uncancel():
                pass
        finally:
            request.is_over = True
            self._open.discard(request)

    def numbers(self) -> dict[str, tuple[int, int]]:
        """Return for each name with open requests their number, and that of streams in them."""
        named = [one for one in self._open if one.client.name is not None]
        requests = Counter(str(one.client.name) for one in named)
        streams = Counter(str(one.client.name) for one in named if one.is_stream)
        return {name: (number, streams[name]) for name, number in requests.items()}


def _current_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task

"""Server-sent events for pages that stay open: numbered, kept alive, ended with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi.responses import StreamingResponse

from ..http.errors import frame, from_any
from .sse import comment

KEEP_ALIVE_S = 5.0  # of silence before a comment
_RETRY_MS = 1000  # before a browser connects again

# For the OpenAPI description of a stream.
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events.", "content": {"text/event-stream": {}}}
}


def event(data: Any, *, id: int | None = None, name: str | None = None) -> bytes:
    """Return one server-sent event. Browsers send the last `id` back when they connect again."""
    lines = [b"retry: %d" % _RETRY_MS] if id is None else [b"id: %d" % id]
    if name is not None:
        lines.append(b"event: " + name.encode())
    lines.append(b"data: " + orjson.dumps(data))
    return b"\n".join(lines) + b"\n\n"


def response(events: AsyncIterator[bytes]) -> StreamingResponse:
    """Stream events, and a comment where there is none for some seconds."""
    return StreamingResponse(
        _kept_alive(events),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )


async def _kept_alive(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    following: asyncio.Future[bytes] | None = None
    try:
        while True:
            if following is None:
                following = asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({following}, timeout=KEEP_ALIVE_S)
            if not done:
                yield comment("no news")
                continue
            try:
                yield following.result()
            except StopAsyncIteration:
                return
            except Exception as error:  # the status line is sent: report it in an event
                yield frame(from_any(error), is_named=True)
                return
            following = None
    finally:
        if following is not None:
            following.cancel()
            await asyncio.wait({following})
        await events.aclose()  # type: ignore[attr-defined]

"""Server-sent events for pages that stay open: numbered, kept alive, ended with a reason."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import orjson
from fastapi.responses import StreamingResponse

from ..http.errors import frame, from_any

_RETRY_MS = 1000  # before a browser connects again

# For the OpenAPI description of a stream.
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events.", "content": {"text/event-stream": {}}}
}


def comment(text: str) -> bytes:
    """Return a comment line, which clients skip; it keeps proxies from closing the connection."""
    return f": {text}\n\n".encode()


SILENT = comment("no news")


def event(data: Any, *, id: int | None = None, name: str | None = None) -> bytes:
    """Return one server-sent event. Browsers send the last `id` back when they connect again."""
    lines = [b"retry: %d" % _RETRY_MS] if id is None else [b"id: %d" % id]
    if name is not None:
        lines.append(b"event: " + name.encode())
    lines.append(b"data: " + orjson.dumps(data))
    return b"\n".join(lines) + b"\n\n"


def response(events: AsyncGenerator[bytes, None]) -> StreamingResponse:
    """Stream events; an error after the first is one of them."""
    return StreamingResponse(
        _ended(events),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )


async def _ended(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        async for part in events:
            yield part
    except Exception as error:  # the status line is sent: report it in an event
        yield frame(from_any(error), is_named=True)
    finally:
        await events.aclose()

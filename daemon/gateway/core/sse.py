"""Server-sent events: the frames of a streamed response, and comments while it waits."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import orjson
from fastapi.responses import StreamingResponse

from ..http import errors
from ..http.errors import from_any
from . import answers
from .answers import Begun, Text, fingerprint_of
from .event_reader import JobState
from .sampling import usage_of
from .state import AppState
from .waiters import Caller

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE_S = 5.0  # of silence before a comment


def frame(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def comment(text: str) -> bytes:
    """Return a comment line, which clients skip; it keeps proxies from closing the connection."""
    return f": {text}\n\n".encode()


def response(
    state: AppState,
    caller: Caller,
    job_id: str,
    headers: dict[str, str],
    *,
    chunk: dict[str, Any],
    opening: Iterable[dict[str, Any]],
    on_text: Callable[[Text], Iterable[dict[str, Any]]],
    on_end: Callable[[dict[str, Any]], dict[str, Any]],
    wants_usage: bool,
) -> StreamingResponse:
    """Stream a job's text. An error after the first byte is sent as a frame.

    `chunk` holds the fields of every frame but `system_fingerprint`, which is null until the job
    begins. `opening`, `on_text` and `on_end` give the choices of frames: before the text, for a
    piece of text, and for a finished choice.
    """
    chunk = {**chunk, "system_fingerprint": None}

    def choose(choice: dict[str, Any]) -> bytes:
        return frame({**chunk, "choices": [choice]})

    async def frames() -> AsyncIterator[bytes]:
        with state.waiters.wait_for(job_id, caller) as wait:
            try:
                for choice in opening:
                    yield choose(choice)
                last, shown = time.monotonic(), None
                async for piece in answers.pieces(state, job_id):
                    if isinstance(piece, Begun):
                        chunk["system_fingerprint"] = piece.fingerprint
                        continue
                    if isinstance(piece, Text):
                        for choice in on_text(piece):
                            yield choose(choice)
                    elif isinstance(piece, JobState):
                        is_new = piece.position is not None and piece.position != shown
                        if not is_new and time.monotonic() - last < _KEEP_ALIVE_S:
                            continue
                        shown = piece.position
                        yield comment(_describe(state, piece))
                    else:
                        wait.is_answered = True
                        state.metrics.count_tokens(piece["usage"])
                        chunk["system_fingerprint"] = fingerprint_of(piece.get("weights"))
                        for choice in piece["choices"]:
                            yield choose(on_end(choice))
                        if wants_usage:
                            yield frame({**chunk, "choices": [], "usage": usage_of(piece)})
                        yield DONE
                    last = time.monotonic()
            except Exception as error:  # the status line is sent: report it in a frame
                state.metrics.count_failed_stream()
                yield errors.frame(from_any(error), is_named=False)

    return StreamingResponse(
        frames(),
        media_type="text/event-stream",
        headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"},
    )


def _describe(state: AppState, job_state: JobState) -> str:
    if job_state.position is None:
        return job_state.status or "waiting"
    eta = state.eta.start_in_s(job_state.position - 1)
    return f"position {job_state.position}" + ("" if eta is None else f", starts in {eta:g} s")

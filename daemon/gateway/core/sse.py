"""Server-sent events: the frames of a streamed answer, with comments while there is nothing."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import orjson
from fastapi.responses import StreamingResponse

from ..http.errors import from_any
from . import answers
from .answers import Begun, Text, fingerprint_of
from .event_reader import Standing
from .sampling import usage_of
from .state import Gate
from .waiters import Caller

DONE = b"data: [DONE]\n\n"
_BEAT_S = 5.0  # of silence, after which a comment keeps the connection alive


def frame(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def comment(text: str) -> bytes:
    """Return what every client passes over: a line for people and for proxies."""
    return f": {text}\n\n".encode()


def response(
    gate: Gate,
    caller: Caller,
    job_id: str,
    headers: dict[str, str],
    *,
    chunk: dict[str, Any],
    opening: Iterable[dict[str, Any]],
    on_text: Callable[[Text], dict[str, Any]],
    on_end: Callable[[dict[str, Any]], dict[str, Any]],
    wants_usage: bool,
) -> StreamingResponse:
    """Stream a job's text. What fails after the first byte comes as a frame with an error.

    `chunk`: what every frame has besides `system_fingerprint`, which is null until the job begins;
    the others give one choice each, `on_end` for each of the result.
    """
    chunk = {**chunk, "system_fingerprint": None}

    def choose(choice: dict[str, Any]) -> bytes:
        return frame({**chunk, "choices": [choice]})

    async def frames() -> AsyncIterator[bytes]:
        with gate.audience.attend(job_id, caller) as stay:
            try:
                for choice in opening:
                    yield choose(choice)
                last, shown = time.monotonic(), None
                async for piece in answers.pieces(gate, job_id):
                    if isinstance(piece, Begun):
                        chunk["system_fingerprint"] = piece.fingerprint
                        continue
                    if isinstance(piece, Text):
                        yield choose(on_text(piece))
                    elif isinstance(piece, Standing):
                        is_new = piece.position is not None and piece.position != shown
                        if not is_new and time.monotonic() - last < _BEAT_S:
                            continue
                        shown = piece.position
                        yield comment(_standing(gate, piece))
                    else:
                        stay.is_over = True
                        gate.metrics.count_tokens(piece["usage"])
                        chunk["system_fingerprint"] = fingerprint_of(piece.get("weights"))
                        for choice in piece["choices"]:
                            yield choose(on_end(choice))
                        if wants_usage:
                            yield frame({**chunk, "choices": [], "usage": usage_of(piece)})
                        yield DONE
                    last = time.monotonic()
            except Exception as error:  # the status is out: only a frame can tell
                gate.metrics.count_failed_stream()
                yield frame(from_any(error).body)

    return StreamingResponse(
        frames(),
        media_type="text/event-stream",
        headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"},
    )


def _standing(gate: Gate, standing: Standing) -> str:
    if standing.position is None:
        return standing.status or "waiting"
    eta = gate.pace.eta_s(standing.position - 1)
    return f"position {standing.position}" + ("" if eta is None else f", begins in {eta:g} s")

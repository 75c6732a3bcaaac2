"""Server-sent events: the frames of a streamed response, and comments while it waits."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from fastapi.responses import StreamingResponse

from ..http import errors
from ..http.errors import ApiError, from_any
from . import answers
from .answers import Begun, Text, fingerprint_of, prompt_format_of
from .event_reader import JobState
from .inbox import SILENCE_S
from .live import comment
from .sampling import usage_of
from .state import AppState
from .waiters import Caller

DONE = b"data: [DONE]\n\n"


def frame(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


class Form(Protocol):
    """What a stream looks like: each method yields frames."""

    def begin(self, fingerprint: str | None) -> None:
        """Note that a worker has begun the job; `fingerprint`: of the model that answers."""

    def opening(self) -> Iterable[bytes]:
        """Yield what comes before the first text, while the job waits."""

    def of_text(self, piece: Text) -> Iterable[bytes]: ...

    def of_result(self, result: Mapping[str, Any]) -> Iterable[bytes]: ...

    def of_error(self, error: ApiError) -> Iterable[bytes]: ...


@dataclass
class Chunks:
    """The form of chat and text completions: chunks of choices.

    `chunk` holds the fields of every frame but `system_fingerprint`, which is null until the job
    begins, and `prompt_format`, which the last frames have. `opened` and `on_end` give the choices
    of frames: before the text, and for a finished choice; `on_text` gives the further fields of
    frames for a piece of text.
    """

    chunk: dict[str, Any]
    opened: Iterable[dict[str, Any]]
    on_text: Callable[[Text], Iterable[dict[str, Any]]]
    on_end: Callable[[dict[str, Any]], dict[str, Any]]
    wants_usage: bool
    _fingerprint: str | None = field(default=None, init=False)

    def begin(self, fingerprint: str | None) -> None:
        self._fingerprint = fingerprint

    def opening(self) -> Iterator[bytes]:
        for choice in self.opened:
            yield self._frame(choices=[choice])

    def of_text(self, piece: Text) -> Iterator[bytes]:
        for fields in self.on_text(piece):
            yield self._frame(**fields)

    def of_result(self, result: Mapping[str, Any]) -> Iterator[bytes]:
        self._fingerprint = fingerprint_of(result.get("weights"))
        self.chunk |= prompt_format_of(result)
        for choice in result["choices"]:
            yield self._frame(choices=[self.on_end(choice)])
        if self.wants_usage:
            yield self._frame(choices=[], usage=usage_of(result))
        yield DONE

    def of_error(self, error: ApiError) -> Iterator[bytes]:
        yield errors.frame(error, is_named=False)

    def _frame(self, **fields: Any) -> bytes:
        return frame({**self.chunk, "system_fingerprint": self._fingerprint, **fields})


def response(
    state: AppState, caller: Caller, job_id: str, headers: dict[str, str], form: Form
) -> StreamingResponse:
    """Stream a job's text. An error after the first byte is sent as a frame."""

    async def frames() -> AsyncIterator[bytes]:
        with state.waiters.wait_for(job_id, caller) as wait:
            try:
                for one in form.opening():
                    yield one
                last, shown = time.monotonic(), None
                async for piece in answers.pieces(state, job_id):
                    if isinstance(piece, Begun):
                        form.begin(piece.fingerprint)
                        continue
                    if isinstance(piece, Text):
                        for one in form.of_text(piece):
                            yield one
                    elif isinstance(piece, JobState):
                        is_new = piece.position is not None and piece.position != shown
                        if not is_new and time.monotonic() - last < SILENCE_S:
                            continue
                        shown = piece.position
                        yield comment(_describe(state, piece))
                    else:
                        wait.is_answered = True
                        state.metrics.count_tokens(piece["usage"])
                        for one in form.of_result(piece):
                            yield one
                        state.agents.acknowledge(job_id)
                    last = time.monotonic()
            except Exception as error:  # the status line is sent: report it in a frame
                state.metrics.count_failed_stream()
                for one in form.of_error(from_any(error)):
                    yield one

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

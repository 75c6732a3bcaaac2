"""Responses from a job's events: whole, or streamed piece by piece.

A job that lost its worker is restarted with the same seed, so it generates the same text again. The
part that was sent already is skipped; if the text differs, the stream ends with an error.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from ....jobs import spec_class
from ....jobs.ids import kind_of
from ..http.errors import CLIENT_DISCONNECTED, ApiError, unavailable
from .event_reader import JobState
from .state import AppState
from .submitter import Submission
from .waiters import Caller, disconnected

_NO_RETRY = {"x-should-retry": "false"}


@dataclass(frozen=True)
class Text:
    """A piece of one choice: of its text, and of a message's reasoning and calls."""

    index: int
    text: str
    logprobs: list[dict[str, Any]] | None = None  # of its tokens; None: not requested
    reasoning: str = ""
    calls: Sequence[dict[str, str]] = ()  # whole ones: id, name, arguments
    first_call: int = 0  # the number of the first of them


@dataclass(frozen=True)
class Begun:
    """A worker has begun the job."""

    fingerprint: str | None  # of the model that answers


Piece = Text | JobState | Begun | dict[str, Any]


def fingerprint_of(weights: Mapping[str, str] | None) -> str | None:
    """Return OpenAI's `system_fingerprint`: another one for other weights or another precision.

    None if an earlier version wrote the result, without its weights.
    """
    if weights is None:
        return None
    identity = f"{weights['digest']} {weights.get('precision')}"
    return f"fp_{hashlib.sha256(identity.encode()).hexdigest()[:10]}"


async def submit(
    state: AppState, caller: Caller, submission: Submission
) -> tuple[str, dict[str, str]]:
    """Queue the job of a request, or find the one it has; return job id and response headers.

    Raises WarmdError, or ApiError 429 when the queue is full.
    """
    job_id = state.waiters.take_abandoned(caller)
    if job_id is not None:
        return job_id, {"x-warmd-job": job_id}
    waiting = await state.queue_length(submission.spec.queue)
    if caller.key is None:
        job_id = await state.submitter.submit(submission)
    else:
        job_id, is_new = await state.submitter.submit_once(
            caller.key, caller.fingerprint, submission
        )
        if not is_new:
            return job_id, {"x-warmd-job": job_id}
    headers = {"x-warmd-job": job_id, "x-warmd-position": str(waiting + 1)}
    eta = state.eta.start_in_s(waiting)
    return job_id, headers | ({} if eta is None else {"x-warmd-eta": f"{eta:g}"})


async def pieces(state: AppState, job_id: str) -> AsyncGenerator[Piece, None]:
    """Yield the text as it is generated, job states in between, and the result last.

    Each execution begins with `Begun`. Raises ApiError when the job ends without a result.
    """
    sent: dict[tuple[int, str], str] = {}  # texts of each choice by their names, and
    seen: dict[tuple[int, str], int] = {}  # characters in this execution
    sent_calls: Counter[int] = Counter()
    seen_calls: Counter[int] = Counter()
    sent_tokens: Counter[int] = Counter()  # log-probabilities of each choice, and
    seen_tokens: Counter[int] = Counter()  # those in this execution
    execution, begun, failure = None, None, None
    async for item in state.event_reader.follow(job_id):
        if isinstance(item, JobState):
            if not item.has_ended:
                yield item
                continue
            result = None
            if item.status == "finished":
                result = await state.in_thread(state.client.result, job_id)
            if result is None:
                raise _failure(job_id, item.status, failure)
            yield result
            return
        if item["execution"] != execution:
            execution, seen = item["execution"], {}
            seen_tokens, seen_calls = Counter(), Counter()
        match item["type"]:
            case "started":
                begun = item["time"]
                yield Begun(fingerprint_of(item.get("weights")))
            case "failed":
                failure = item
            case "finished":
                if begun is not None:
                    state.eta.record(item["time"] - begun)
                yield item["result"]
                return
            case "text":
                index, fresh = item["index"], {}
                for name in ("text", "reasoning"):
                    text, place = item.get(name, ""), (index, name)
                    at, before = seen.get(place, 0), sent.get(place, "")
                    repeated = before[at : at + len(text)]
                    if not text.startswith(repeated):
                        raise ApiError(
                            500,
                            f"{job_id} lost its worker and was restarted: the text differs from "
                            "what was sent already",
                            code="interrupted",
                        )
                    seen[place] = at + len(text)
                    fresh[name] = text[len(repeated) :]
                    sent[place] = before + fresh[name]
                known_calls = max(sent_calls[index] - seen_calls[index], 0)
                seen_calls[index] += len(item.get("calls", ()))
                calls, first = item.get("calls", ())[known_calls:], sent_calls[index]
                sent_calls[index] += len(calls)
                logprobs = item.get("logprobs")
                known = max(sent_tokens[index] - seen_tokens[index], 0)
                seen_tokens[index] += len(logprobs or ())
                sent_tokens[index] = max(sent_tokens[index], seen_tokens[index])
                new = logprobs[known:] if logprobs is not None else None
                if fresh["text"] or fresh["reasoning"] or calls or new:
                    yield Text(index, fresh["text"], new, fresh["reasoning"], calls, first)


async def full(state: AppState, request: Request, caller: Caller, job_id: str) -> dict[str, Any]:
    """Wait for a job's result until the client disconnects.

    Raises ApiError when the job ends without a result.
    """
    with state.waiters.wait_for(job_id, caller) as wait:
        answer = asyncio.ensure_future(_result(state, job_id))
        left = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                wait.is_answered = True
                return answer.result()
        finally:
            answer.cancel()
            left.cancel()
        raise CLIENT_DISCONNECTED


async def _result(state: AppState, job_id: str) -> dict[str, Any]:
    async for piece in pieces(state, job_id):
        if isinstance(piece, dict):
            return piece
    raise AssertionError("`pieces` ends with a result or an error")


def _failure(job_id: str, status: str | None, failed: dict[str, Any] | None) -> ApiError:
    if status == "failed":
        reason = failed["error"] if failed is not None else "see `warmd logs`"
        field = reason.partition(": ")[0]
        options = spec_class(kind_of(job_id)).options()
        if failed is not None and failed["traceback"] is None and field in options:
            return ApiError(400, reason, param=field)  # an option that only the worker can check
        return ApiError(500, f"{job_id} failed: {reason}", code="job_failed", headers=_NO_RETRY)
    if status in ("stopped", "canceled"):
        return ApiError(409, f"{job_id} was {status}", code="job_canceled", headers=_NO_RETRY)
    return unavailable(f"{job_id} is no longer in Redis")

"""From a job's events to an answer: whole, or piece by piece as the text comes.

A job that lost its worker begins anew. The seed is in its spec, so that the same text comes again:
what was sent already is left out, and only if it comes out otherwise does the stream end.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from ....jobs import spec_class
from ..http.errors import CLIENT_GONE, ApiError, unavailable
from .event_reader import Standing
from .state import Gate
from .submitter import Order
from .waiters import Caller, gone

_NO_RETRY = {"x-should-retry": "false"}


@dataclass(frozen=True)
class Text:
    """A piece of one choice's text."""

    index: int
    text: str


@dataclass(frozen=True)
class Begun:
    """A worker has begun the job."""

    fingerprint: str | None  # of what answers


Piece = Text | Standing | Begun | dict[str, Any]


def fingerprint_of(weights: Mapping[str, str] | None) -> str | None:
    """Return OpenAI's `system_fingerprint`: another one for other weights or another precision.

    None where an earlier version wrote the result, without its weights.
    """
    if weights is None:
        return None
    identity = f"{weights['digest']} {weights.get('precision')}"
    return f"fp_{hashlib.sha256(identity.encode()).hexdigest()[:10]}"


async def submit(gate: Gate, caller: Caller, order: Order) -> tuple[str, dict[str, str]]:
    """Queue a request's job, or join the one that it has; return its id and the answer's headers.

    Raises WarmdError, or ApiError when too many wait.
    """
    job_id = gate.audience.adopt(caller)
    if job_id is not None:
        return job_id, {"x-warmd-job": job_id}
    waiting = await gate.waiting(order.spec.queue)
    if caller.key is None:
        job_id = await gate.intake.submit(order)
    else:
        job_id, is_new = await gate.intake.submit_once(caller.key, caller.fingerprint, order)
        if not is_new:
            return job_id, {"x-warmd-job": job_id}
    headers = {"x-warmd-job": job_id, "x-warmd-position": str(waiting + 1)}
    eta = gate.pace.eta_s(waiting)
    return job_id, headers | ({} if eta is None else {"x-warmd-eta": f"{eta:g}"})


async def pieces(gate: Gate, job_id: str) -> AsyncGenerator[Piece, None]:
    """Yield the text as it comes, where the job stands meanwhile, and last its result.

    Each execution begins with `Begun`.

    Raises ApiError when there will be none.
    """
    sent: dict[int, str] = {}
    seen: dict[int, int] = {}  # characters of each choice in this execution
    execution, begun, failure = None, None, None
    async for item in gate.hub.follow(job_id):
        if isinstance(item, Standing):
            if not item.has_ended:
                yield item
                continue
            result = None
            if item.status == "finished":
                result = await gate.blocking(gate.client.result, job_id)
            if result is None:
                raise _failure(job_id, item.status, failure)
            yield result
            return
        if item["execution"] != execution:
            execution, seen = item["execution"], {}
        match item["type"]:
            case "started":
                begun = item["time"]
                yield Begun(fingerprint_of(item.get("weights")))
            case "failed":
                failure = item
            case "finished":
                if begun is not None:
                    gate.pace.note(item["time"] - begun)
                yield item["result"]
                return
            case "text":
                index, text = item["index"], item["text"]
                at, before = seen.get(index, 0), sent.get(index, "")
                repeated = before[at : at + len(text)]
                if not text.startswith(repeated):
                    raise ApiError(
                        500,
                        f"{job_id} lost its worker and was begun anew: the text came out "
                        "otherwise than what was sent already",
                        code="interrupted",
                    )
                seen[index] = at + len(text)
                if fresh := text[len(repeated) :]:
                    sent[index] = before + fresh
                    yield Text(index, fresh)


async def whole(gate: Gate, request: Request, caller: Caller, job_id: str) -> dict[str, Any]:
    """Wait for a job's result, for as long as the client does.

    Raises ApiError when there will be none.
    """
    with gate.audience.attend(job_id, caller) as stay:
        answer = asyncio.ensure_future(_result(gate, job_id))
        left = asyncio.ensure_future(gone(request))
        try:
            await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                stay.is_over = True
                return answer.result()
        finally:
            answer.cancel()
            left.cancel()
        raise CLIENT_GONE


async def _result(gate: Gate, job_id: str) -> dict[str, Any]:
    async for piece in pieces(gate, job_id):
        if isinstance(piece, dict):
            return piece
    raise AssertionError("a follow that ends has said why")


def _failure(job_id: str, status: str | None, failed: dict[str, Any] | None) -> ApiError:
    if status == "failed":
        reason = failed["error"] if failed is not None else "see `warmd logs`"
        field = reason.partition(": ")[0]
        options = spec_class(job_id.split("-")[0]).options()
        if failed is not None and failed["traceback"] is None and field in options:
            return ApiError(400, reason, param=field)  # what only the worker could check
        return ApiError(500, f"{job_id} failed: {reason}", code="job_failed", headers=_NO_RETRY)
    if status in ("stopped", "canceled"):
        return ApiError(409, f"{job_id} was {status}", code="job_canceled", headers=_NO_RETRY)
    return unavailable(f"{job_id} is not in the server any more")

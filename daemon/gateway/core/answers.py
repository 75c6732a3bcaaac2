"""Responses from a job's events: whole, or streamed piece by piece.

A job that lost its worker is restarted with the same seed, so it generates the same text again. The
part that was sent already is skipped; if the text differs, the stream ends with an error.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from ....jobs import spec_class
from ....jobs.errors import NotFound
from ....jobs.ids import kind_of
from ..http.errors import CLIENT_DISCONNECTED, ApiError, unavailable
from .event_reader import Item, JobState
from .inbox import SILENCE_S
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
    token_ids: list[int] | None = None  # as of `logprobs`
    prompt_ids: list[int] | None = None  # of its prompt, once


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


def prompt_format_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field that tells what prompts were put into; none if they were used as given."""
    return {"prompt_format": result["prompt_format"]} if "prompt_format" in result else {}


async def submit(
    state: AppState, caller: Caller, submission: Submission
) -> tuple[str, dict[str, str]]:
    """Queue the job of a request, or find the one it has; return job id and response headers.

    Raises WarmdError, or ApiError 429 when the queue is full.
    """
    if caller.agent is not None:
        await state.submitter.check_form(submission.spec)
        return state.agents.submit(caller, submission.spec), {}
    job_id = state.waiters.take_abandoned(caller)
    if job_id is not None:
        return job_id, {"x-warmd-job": job_id}
    waiting = await state.queue_length(submission.spec.queue)
    job_id, is_new = await state.submitter.submit(submission, caller)
    if not is_new:
        return job_id, {"x-warmd-job": job_id}
    headers = {"x-warmd-job": job_id, "x-warmd-position": str(waiting + 1)}
    eta = state.eta.start_in_s(waiting)
    return job_id, headers | ({} if eta is None else {"x-warmd-eta": f"{eta:g}"})


class _Sent:
    """What a stream has sent of each choice, which a restarted job generates again."""

    def __init__(self) -> None:
        self._texts: dict[tuple[int, str], str] = {}  # by choice and name
        self._counts: Counter[tuple[int, str]] = Counter()  # of calls and log-probabilities
        self._seen: Counter[tuple[int, str]] = Counter()  # of this execution: characters, items

    def begin(self) -> None:
        """Expect everything again: another execution has begun."""
        self._seen.clear()

    def new_of(self, event: Mapping[str, Any]) -> Text | None:
        """Return what was not sent; None: nothing. Raises ValueError if the text differs."""
        index = event["index"]
        text, reasoning = (self._new_text(index, name, event) for name in ("text", "reasoning"))
        first_call = self._counts[index, "calls"]
        calls = self._new_items(index, "calls", event) or ()
        logprobs, ids, prompt = (
            self._new_items(index, name, event)
            for name in ("logprobs", "token_ids", "prompt_token_ids")
        )
        if not (text or reasoning or calls or logprobs or ids or prompt):
            return None
        return Text(index, text, logprobs, reasoning, calls, first_call, ids, prompt)

    def _new_text(self, index: int, name: str, event: Mapping[str, Any]) -> str:
        text, place = event.get(name, ""), (index, name)
        at, before = self._seen[place], self._texts.get(place, "")
        repeated = before[at : at + len(text)]
        if not text.startswith(repeated):
            raise ValueError(f"{name} differs from what was sent")
        new: str = text[len(repeated) :]
        self._seen[place] += len(text)
        self._texts[place] = before + new
        return new

    def _new_items(self, index: int, name: str, event: Mapping[str, Any]) -> list[Any] | None:
        """Return those that were not sent; None: the event has none."""
        if (items := event.get(name)) is None:
            return None
        place = (index, name)
        new: list[Any] = items[max(self._counts[place] - self._seen[place], 0) :]
        self._seen[place] += len(items)
        self._counts[place] += len(new)
        return new


async def pieces(state: AppState, job_id: str) -> AsyncGenerator[Piece, None]:
    """Yield the text as it is generated, job states in between, and the result last.

    Each execution begins with `Begun`. Raises ApiError when the job ends without a result.
    """
    if (reply := state.agents.reply(job_id)) is not None:
        async for piece in _of_agent(reply):
            yield piece
        return
    sent, execution, begun, failure = _Sent(), None, None, None
    async for item in _items(state, job_id):
        if isinstance(item, JobState):
            if not item.has_ended:
                yield item
                continue
            if item.status != "finished":
                raise _failure(job_id, item.status, failure)
            yield await _stored_result(state, job_id)
            return
        if item["execution"] != execution:
            execution = item["execution"]
            sent.begin()
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
                try:
                    new = sent.new_of(item)
                except ValueError:
                    raise ApiError(
                        500,
                        f"{job_id} lost its worker and was restarted: the text differs from what "
                        "was sent already",
                        code="interrupted",
                    ) from None
                if new is not None:
                    yield new


async def _of_agent(reply: asyncio.Future[dict[str, Any]]) -> AsyncGenerator[Piece, None]:
    """Yield a turn of a job that plays with agents: whole, once it is over."""
    while not (await asyncio.wait({reply}, timeout=SILENCE_S))[0]:
        yield JobState("started", None)
    result = reply.result()
    (choice,) = result["choices"]
    (prompt_ids,) = result.get("prompt_token_ids", (None,))
    yield Begun(None)
    yield Text(
        0,
        choice["text"],
        reasoning=choice.get("reasoning", ""),
        calls=choice.get("calls", ()),
        token_ids=choice.get("token_ids"),
        prompt_ids=prompt_ids,
    )
    yield result


async def _items(state: AppState, job_id: str) -> AsyncGenerator[Item, None]:
    async for items in state.event_reader.follow(job_id):
        for item in items:
            yield item


async def _stored_result(state: AppState, job_id: str) -> dict[str, Any]:
    """Return the result of a job whose events are gone. Raises ApiError, which names no places."""
    with suppress(NotFound):
        if (found := await state.in_thread(state.client.jobs.result, job_id)) is not None:
            return dict(found)
    raise ApiError(
        404,
        f"{job_id} has finished, but its result was removed or is on another machine",
        headers=_NO_RETRY,
    )


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
                result = answer.result()
                if not left.done():
                    state.agents.acknowledge(job_id)
                return result
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

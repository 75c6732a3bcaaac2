"""Waiters: which requests wait for which job. A job without waiters is canceled.

A client that timed out often retries at once, so its job gets a grace period. OpenAI's clients send
retry count and timeout in headers (`x-stainless-…`); their retry joins the job of the first try
even without an Idempotency-Key.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Header, Request

from ....jobs.environments.agent_keys import AgentKey
from ....jobs.errors import WarmdError
from ...host.backoff import backoff_s
from ..http.client import CLIENT
from ..http.strict import ParsedRequest

log = logging.getLogger(__name__)

_KEY_GRACE_S = 15.0  # for a job with an Idempotency-Key
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 8.0  # backoff of OpenAI's client, doubling
_RETRY_SLACK_S = 2.0
_CLOCK_SLACK_S = 0.5  # between the client's clock and ours
_MAX_KEY = 255
_RETRY_COUNT = r"[0-9]{1,3}"


@dataclass
class Caller:
    """What a request says about its client."""

    fingerprint: str  # of path and body: the same for a retry
    key: str | None  # Idempotency-Key
    retry: int | None  # number of earlier tries; None: unknown
    timeout_s: float | None  # of the client; None: unknown
    agent: AgentKey | None = None  # of an agent, whose requests its job answers
    began: float = field(default_factory=time.monotonic)

    def grace_s(self) -> float:
        """How long the job is kept for a retry if the client disconnects now."""
        patience = 0.0 if self.key is None else _KEY_GRACE_S
        if self.retry is not None and self.timeout_s is not None:
            gave_up = time.monotonic() - self.began > self.timeout_s - _CLOCK_SLACK_S
            if gave_up:
                wait = backoff_s(self.retry, first_s=_FIRST_RETRY_S, longest_s=_LAST_RETRY_S)
                patience = max(patience, wait + _RETRY_SLACK_S)
        return patience


async def _caller(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(min_length=1, max_length=_MAX_KEY, description="Identifies the request for a day."),
    ] = None,
) -> Caller:
    assert isinstance(request, ParsedRequest)
    retry = request.headers.get("x-stainless-retry-count", "")
    return Caller(
        fingerprint=request.parsed.fingerprint,
        key=idempotency_key,
        retry=int(retry) if re.fullmatch(_RETRY_COUNT, retry) else None,
        timeout_s=_seconds(request.headers.get("x-stainless-read-timeout", "")),
        agent=request.scope[CLIENT].agent,
    )


CallerDep = Annotated[Caller, Depends(_caller)]


def _seconds(text: str) -> float | None:
    with suppress(ValueError):
        return float(text)
    return None


class Wait:
    """One request's wait for a job."""

    is_answered = False


class Waiters:
    """The waiting requests of this process, by job."""

    def __init__(self, cancel: Callable[[str], Awaitable[str]], stopping: asyncio.Event) -> None:
        """`cancel` cancels a job and returns how; once `stopping` is set, jobs are left alone."""
        self._cancel = cancel
        self._stopping = stopping
        self._waiting: Counter[str] = Counter()
        self._abandoned: defaultdict[str, list[str]] = defaultdict(list)  # fingerprint -> jobs
        self._tasks: set[asyncio.Task[None]] = set()

    def take_abandoned(self, caller: Caller) -> str | None:
        """Return the job that an earlier try of the same request abandoned, if any."""
        if caller.agent or not caller.retry or not self._abandoned.get(caller.fingerprint):
            return None
        return self._abandoned[caller.fingerprint].pop(0)

    @contextmanager
    def wait_for(self, job_id: str, caller: Caller) -> Iterator[Wait]:
        """Register a waiter. When the last one leaves before the job ends, the job is canceled."""
        wait = Wait()
        self._waiting[job_id] += 1
        try:
            yield wait
        finally:
            self._waiting[job_id] -= 1
            if not self._waiting[job_id]:
                del self._waiting[job_id]
            # A stopping gateway leaves the jobs alone: they stay in the queue. A request of an
            # agent is no job of its own.
            is_over = wait.is_answered or caller.agent is not None
            if not is_over and not self._stopping.is_set():
                task = asyncio.create_task(self._cancel_after_grace(job_id, caller))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _cancel_after_grace(self, job_id: str, caller: Caller) -> None:
        """Cancel an abandoned job after its grace period, unless a retry joins it."""
        patience = caller.grace_s()
        if patience:
            abandoned = self._abandoned[caller.fingerprint]
            abandoned.append(job_id)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), patience)
            if job_id in abandoned:
                abandoned.remove(job_id)
            if not abandoned:
                self._abandoned.pop(caller.fingerprint, None)
        if self._waiting[job_id] or self._stopping.is_set():
            return
        try:
            how = await self._cancel(job_id)
            log.info("%s: http: %s: the client has disconnected", job_id, how)
        except WarmdError as error:  # it ended by itself, or Redis cannot be reached
            log.debug("%s: http: not canceled: %s", job_id, error)


async def disconnected(request: Request) -> None:
    """Return when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""Who waits for which job: a job that nobody waits for any more is ended, but not too early.

A client that gives up by its own clock often asks again at once. Clients made as OpenAI's is say
so in headers (`x-stainless-…`), without a key of their own: their next try finds the job of the
one before.
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

from ....jobs.errors import WarmdError
from ..http.strict import ReadRequest

log = logging.getLogger(__name__)

_KEY_PATIENCE_S = 15.0  # for which a job with a key is kept when its client has gone
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 8.0  # OpenAI's client waits so long, doubling
_RETRY_SLACK_S = 2.0
_CLOCK_SLACK_S = 0.5  # between a client's clock and ours
_LONGEST_KEY = 255
_RETRY_COUNT = r"[0-9]{1,3}"


@dataclass
class Caller:
    """What a request says of whoever sent it."""

    fingerprint: str  # of path and body: the same for a retry
    key: str | None  # Idempotency-Key
    retry: int | None  # how many tries came before; None when the client does not say
    timeout_s: float | None  # after which the client gives up
    began: float = field(default_factory=time.monotonic)

    def patience_s(self) -> float:
        """How long the job is kept for another try, if the client left just now."""
        patience = 0.0 if self.key is None else _KEY_PATIENCE_S
        if self.retry is not None and self.timeout_s is not None:
            gave_up = time.monotonic() - self.began > self.timeout_s - _CLOCK_SLACK_S
            if gave_up:
                wait = min(_FIRST_RETRY_S * 2**self.retry, _LAST_RETRY_S)
                patience = max(patience, wait + _RETRY_SLACK_S)
        return patience


async def _caller(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(min_length=1, max_length=_LONGEST_KEY, description="Names the request for a day."),
    ] = None,
) -> Caller:
    assert isinstance(request, ReadRequest)
    retry = request.headers.get("x-stainless-retry-count", "")
    return Caller(
        fingerprint=request.taken.fingerprint,
        key=idempotency_key,
        retry=int(retry) if re.fullmatch(_RETRY_COUNT, retry) else None,
        timeout_s=_seconds(request.headers.get("x-stainless-read-timeout", "")),
    )


CallerDep = Annotated[Caller, Depends(_caller)]


def _seconds(text: str) -> float | None:
    with suppress(ValueError):
        return float(text)
    return None


class Stay:
    """One request's wait for a job."""

    is_over = False  # it has its answer


class Audience:
    """The waiting requests of this process."""

    def __init__(self, cancel: Callable[[str], Awaitable[str]], stopping: asyncio.Event) -> None:
        """`cancel` ends a job and says how; `stopping`: whether the gateway leaves jobs alone."""
        self._cancel = cancel
        self._stopping = stopping
        self._present: Counter[str] = Counter()
        self._orphans: defaultdict[str, list[str]] = defaultdict(list)  # fingerprint -> jobs
        self._tasks: set[asyncio.Task[None]] = set()

    def adopt(self, caller: Caller) -> str | None:
        """Return the job that an earlier try of the same request left behind."""
        if not caller.retry or not self._orphans.get(caller.fingerprint):
            return None
        return self._orphans[caller.fingerprint].pop(0)

    @contextmanager
    def attend(self, job_id: str, caller: Caller) -> Iterator[Stay]:
        """Be there for a job. Whoever leaves last before its end has it canceled."""
        stay = Stay()
        self._present[job_id] += 1
        try:
            yield stay
        finally:
            self._present[job_id] -= 1
            if not self._present[job_id]:
                del self._present[job_id]
            # A gateway that stops leaves the jobs alone: they are in the queue, and safe.
            if not stay.is_over and not self._stopping.is_set():
                task = asyncio.create_task(self._outlive(job_id, caller))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _outlive(self, job_id: str, caller: Caller) -> None:
        """End a job that its client left, unless somebody comes for it in time."""
        patience = caller.patience_s()
        if patience:
            orphans = self._orphans[caller.fingerprint]
            orphans.append(job_id)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), patience)
            if job_id in orphans:
                orphans.remove(job_id)
            if not orphans:
                self._orphans.pop(caller.fingerprint, None)
        if self._present[job_id] or self._stopping.is_set():
            return
        try:
            how = await self._cancel(job_id)
            log.info("%s: http: %s, its client has gone", job_id, how)
        except WarmdError as error:  # it ended by itself, or the server is away
            log.debug("%s: http: not canceled: %s", job_id, error)


async def gone(request: Request) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass

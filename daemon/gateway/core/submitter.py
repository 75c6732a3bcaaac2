"""From a spec to a queued job: in few milliseconds, and once for each Idempotency-Key.

A key's job is noted in the server before the job is queued, and the note outlives this process:
whoever finds a note without a job in the queue completes what a gateway that died began.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from ....jobs.errors import NotFound, SpecError
from ....jobs.spec import Spec
from ...client.client import Client
from ...host.image_store import ImageStore
from ...queue import keys
from ...queue.jobs import JobStatus
from ...runs.rundir import RunDir
from ..http.errors import ApiError

_COPIES = 3  # of its texts: in the spec, where it is checked, and on the way to the disk
KEPT_S = 86_400  # for which a key stands for its job
_VOID = (JobStatus.CANCELED, JobStatus.STOPPED)  # nobody waited for them: there is no answer

Blocking = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Order:
    """What to queue."""

    spec: Spec
    about: Mapping[str, Any] = field(default_factory=dict)  # stands in spec.json beside the spec
    images: Mapping[Path, bytes] = field(default_factory=dict)  # of the ImageStore, by their places

    @property
    def size(self) -> int:
        """The bytes that it takes in memory until it is queued, roughly."""
        texts = len(getattr(self.spec, "messages", ""))
        return _COPIES * texts + sum(map(len, self.images.values()))


@dataclass
class _Turn:
    """The requests of one key, one at a time."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    holders: int = 0


class Intake:
    """Queues jobs. One event loop uses it."""

    def __init__(self, client: Client, blocking: Blocking) -> None:
        self._client = client
        self._blocking = blocking
        self._turns: dict[str, _Turn] = {}

    async def submit(self, order: Order) -> str:
        """Check and queue a job; return its id when it is durable. Raises WarmdError."""
        rundir = await self._blocking(self._prepare, order)
        return await self._queue(rundir, order.spec.queue)

    async def submit_once(self, key: str, fingerprint: str, order: Order) -> tuple[str, bool]:
        """Return the id of the key's job, and whether this call queued it.

        Raises ApiError 409 when the key came with another request before (another fingerprint).
        """
        name = hashlib.sha256(key.encode()).hexdigest()
        async with self._turn(name):
            note = keys.http_request(self._client.home.key, name)
            known = await self._blocking(self._read_note, note)
            if known is not None:
                if known["fingerprint"] != fingerprint:
                    raise ApiError(
                        409,
                        "Idempotency-Key: came with another request before: use a new one",
                        param="Idempotency-Key",
                        code="idempotency_key_reused",
                        headers={"x-should-retry": "false"},
                    )
                if await self._revive(known["job"], order.spec.queue):
                    return known["job"], False
            rundir = await self._blocking(self._prepare, order)
            document = orjson.dumps({"job": rundir.path.name, "fingerprint": fingerprint})
            try:
                await self._blocking(lambda: self._client.connection.set(note, document, ex=KEPT_S))
            except BaseException:
                rundir.remove()
                raise
            return await self._queue(rundir, order.spec.queue), True

    @asynccontextmanager
    async def _turn(self, name: str) -> Any:
        turn = self._turns.setdefault(name, _Turn())
        turn.holders += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.holders -= 1
            if not turn.holders:
                del self._turns[name]

    def _read_note(self, note: str) -> dict[str, str] | None:
        raw: Any = self._client.connection.get(note)
        try:
            document = orjson.loads(raw) if raw is not None else None
        except orjson.JSONDecodeError:
            return None
        is_note = isinstance(document, dict) and {"job", "fingerprint"} <= document.keys()
        return document if is_note else None

    async def _revive(self, job_id: str, queue: str) -> bool:
        """Whether the job of a note can answer; one that was noted and never queued is now."""
        try:
            rundir = await self._blocking(self._client.rundir, job_id)
        except NotFound:
            return False
        job = await self._blocking(self._client.store.fetch, job_id)
        if job is None:
            await self._queue(rundir, queue)
            return True
        return job.get_status(refresh=False) not in _VOID

    def _prepare(self, order: Order) -> RunDir:
        # No folder to import from: nothing that comes over HTTP may name code.
        about = {**order.about, "python_path": [], "origin": "http"}
        document = {**self._client.check(order.spec), **about}
        runs = self._client.home.runs
        rundir = RunDir.create(runs, order.spec.kind, document, durable=False)
        if order.images:
            try:
                ImageStore(runs).hold(rundir.path, order.images)
            except OSError as error:
                rundir.remove()
                raise SpecError("home", f"cannot store an image: {error}") from error
        return rundir

    async def _queue(self, rundir: RunDir, queue: str) -> str:
        """Queue a job while its files are flushed: each flush alone would take as long as all.

        A power cut in between leaves a job that nobody was told of.
        """
        job_id = rundir.path.name
        try:
            await asyncio.gather(
                self._blocking(self._client.store.enqueue, job_id, queue),
                *(self._blocking(_flush, path) for path in rundir.unflushed),
            )
        except BaseException:
            rundir.remove()
            raise
        return job_id


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

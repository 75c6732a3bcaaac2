"""Submits jobs for requests: a few milliseconds each, once per Idempotency-Key.

The job id of a key is recorded in Redis before the job is queued. If the gateway dies in between,
the next request with the key finds the record without a queued job and queues it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from ....configs.queues import TRAIN
from ....jobs import spec_class
from ....jobs.errors import NotFound, SpecError
from ....jobs.files import records
from ....jobs.ids import kind_of
from ....jobs.infer.options import InferSpec
from ....jobs.spec import Spec
from ...client.client import Client
from ...host.image_store import ImageStore
from ...lifecycle.check import check_ranks
from ...lifecycle.submit import enqueue, write
from ...queue import keys
from ...queue.jobs import JobStatus
from ...runs import labels
from ...runs.labels import NO_LABELS, Labels
from ...runs.rundir import RunDir
from ..http.bodies import InThread
from ..http.client import HttpClient, current, current_name
from ..http.errors import ApiError, unwritable
from .queue_shares import QueueShares
from .waiters import Caller

_COPIES = 3  # of the texts: in the spec, while it is checked, while it is written
KEPT_S = 86_400  # lifetime of an Idempotency-Key
_WITHOUT_RESULT = (JobStatus.CANCELED, JobStatus.STOPPED)


@dataclass(frozen=True)
class Submission:
    """A job to queue."""

    spec: Spec
    about: Mapping[str, Any] = field(default_factory=dict)  # further fields of spec.json
    images: Mapping[Path, bytes] = field(default_factory=dict)  # path in the ImageStore -> bytes
    labels: Labels = NO_LABELS

    @property
    def size(self) -> int:
        """Approximate memory in bytes that it takes until the job is queued."""
        texts = len(getattr(self.spec, "messages", ""))
        return _COPIES * texts + sum(map(len, self.images.values()))


@dataclass(frozen=True)
class _Note:
    """The job of an Idempotency-Key, and the fingerprint of its request."""

    job: str
    fingerprint: str


@dataclass
class _KeyLock:
    """Serializes the requests of one key; dropped with its last holder."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    holders: int = 0


class Submitter:
    """Queues jobs. For one event loop."""

    def __init__(
        self,
        client: Client,
        threads: Mapping[str | None, InThread],
        shares: QueueShares | None,
    ) -> None:
        """`threads`: by what a check reads, a `schema` or `data`; `completion`: for the checks of
        other completions, and to queue jobs; None: for all else.

        `shares`: in which the places of queues are divided; None: they are not.
        """
        self._client = client
        self._shares = shares
        self._threads = threads
        self._in_thread = threads[None]
        self._locks: dict[str, _KeyLock] = {}

    async def submit(self, submission: Submission, caller: Caller) -> tuple[str, bool]:
        """Check and queue a job, once per Idempotency-Key of the caller.

        Returns its id once it is durable, and whether this call queued it. Raises WarmdError, and
        ApiError 409 for a key that was used for another request.
        """
        if caller.key is None:
            return await self._queue(*await self._prepared(submission)), True
        return await self._submit_once(caller.key, caller.fingerprint, submission)

    async def check_form(self, spec: Spec) -> None:
        """Check the form of completions that are not queued as a job. Raises SpecError."""
        if isinstance(spec, InferSpec) and spec.has_form:
            await self._threads["schema"](spec.check_form)

    async def _submit_once(
        self, key: str, fingerprint: str, submission: Submission
    ) -> tuple[str, bool]:
        """Return the id of the key's job, and whether this call queued it.

        Raises ApiError 409 when the key was used for a different request (another fingerprint).
        """
        # Another client's key is another key.
        named = key if self._shares is None else f"{current_name()}\n{key}"
        name = hashlib.sha256(named.encode()).hexdigest()
        async with self._locked(name):
            note = keys.http_request(self._client.home.key, name)
            known = await self._in_thread(self._read_note, note)
            if known is not None:
                if known.fingerprint != fingerprint:
                    raise ApiError(
                        409,
                        "Idempotency-Key: was used for a different request: use a new one",
                        param="Idempotency-Key",
                        code="idempotency_key_reused",
                        headers={"x-should-retry": "false"},
                    )
                if await self._can_answer(known.job):
                    return known.job, False
            rundir, document = await self._prepared(submission)
            about = orjson.dumps(_Note(rundir.path.name, fingerprint))
            try:
                await self._in_thread(lambda: self._client.connection.set(note, about, ex=KEPT_S))
            except BaseException:
                rundir.remove()
                raise
            return await self._queue(rundir, document), True

    @asynccontextmanager
    async def _locked(self, name: str) -> Any:
        key = self._locks.setdefault(name, _KeyLock())
        key.holders += 1
        try:
            async with key.lock:
                yield
        finally:
            key.holders -= 1
            if not key.holders:
                del self._locks[name]

    def _read_note(self, note: str) -> _Note | None:
        raw: Any = self._client.connection.get(note)
        with suppress(ValueError):
            return None if raw is None else records.decode(raw, _Note)
        return None

    async def _can_answer(self, job_id: str) -> bool:
        """Whether a recorded job has or will have a result. Queues it if it never was queued."""
        try:
            rundir = await self._in_thread(self._client.rundir, job_id)
        except NotFound:
            return False
        job = await self._in_thread(self._client.store.fetch, job_id)
        if job is None:
            await self._queue(rundir, await self._in_thread(rundir.read_spec))
            return True
        return job.get_status(refresh=False) not in _WITHOUT_RESULT

    async def _prepared(self, submission: Submission) -> tuple[RunDir, dict[str, Any]]:
        """Check a job in a thread: one whose data or schema is read, apart from the others."""
        spec = submission.spec
        if isinstance(spec, InferSpec):
            run = self._threads["schema" if spec.has_form else "completion"]
        else:
            run = self._threads["data" if spec.queue == TRAIN or spec.kind == "eval" else None]
        prepared: tuple[RunDir, dict[str, Any]] = await run(
            self._prepare, submission, current_name()
        )
        return prepared

    def _prepare(
        self, submission: Submission, submitted_by: str | None
    ) -> tuple[RunDir, dict[str, Any]]:
        # No folder to import from: an HTTP request must not name code.
        about = {**submission.about, "python_path": [], "origin": "http"}
        about |= {"submitted_by": submitted_by}
        # The job refuses a prompt that is too long as soon: the client waits for it. Tokenizing in
        # this process would let a few such requests delay all others.
        is_awaited = submission.spec.kind == "infer"
        checked = self._client.jobs.check(submission.spec, reads_tokenizer=not is_awaited)
        check_ranks(self._client.places, self._client.config, [checked["spec"]])
        document = {**checked, **about}
        try:
            rundir, document = write(self._client.places, submission.spec.kind, document)
        except SpecError as error:
            raise unwritable(str(error)) from error
        try:
            labels.write(rundir, submission.labels)
        except OSError as error:
            rundir.remove()
            raise unwritable(f"home: cannot store the labels: {error}") from error
        if submission.images:
            try:
                ImageStore(self._client.home.runs).hold(rundir.path, submission.images)
            except OSError as error:
                rundir.remove()
                raise unwritable(f"home: cannot store an image: {error}") from error
        return rundir, document

    async def _queue(self, rundir: RunDir, document: Mapping[str, Any]) -> str:
        """Queue a job and flush its files concurrently: one flush takes as long as all of them.

        A power failure in between loses only a job whose id was not returned yet.
        """
        try:
            await asyncio.gather(
                self._threads["completion"](self._enqueue, rundir.path.name, document, current()),
                *(self._in_thread(_flush, path) for path in rundir.unflushed),
            )
        except BaseException:
            rundir.remove()
            raise
        return rundir.path.name

    def _enqueue(self, job_id: str, document: Mapping[str, Any], client: HttpClient | None) -> None:
        if self._shares is None or client is None:
            enqueue(self._client.places, job_id, document)
            return
        self._shares.note(job_id, client.share)
        enqueue(self._client.places, job_id, document)
        store, queue = self._client.store, spec_class(kind_of(job_id)).queue
        if queue == TRAIN:  # its order is the user's
            return
        others = [other for other in store.order(queue) if other != job_id]
        position = self._shares.turn(others, client.share)
        if position is not None and (job := store.fetch(job_id)) is not None:
            store.move(job, position)


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Event reader: reads the event streams and states of all followed jobs over one connection.

One blocking XREAD waits for the events of all jobs, and one pipeline every 0.5 s reads their
statuses and queue positions. A thread or connection per request would cost more than the request.

The stream of a job is read once for all who follow it. Who begins later, or falls behind, reads
what it lacks from the file, piece by piece, and goes on with the stream; pages share a thread for
that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from ....configs.queues import INFER
from ...client.client import Client
from ...lifecycle.statuses import ENDED
from ...queue import keys, stream
from ...queue.clients import async_client
from ...queue.jobs import Job, status_of
from ...runs import events
from ..http.bodies import InThread
from ..http.errors import unavailable
from .inbox import SILENCE_S, Inbox, Pace

log = logging.getLogger(__name__)

_BLOCK_MS = 5_000  # longest wait of one XREAD; a new follower ends it
_POLL_S = 0.5  # between two reads of the statuses and the queue
_RECONNECT_S = 0.2  # between two tries to reach Redis
_BATCH = 1000  # events per stream and reply
_UNREAD = 1000  # events per follower; further ones are read from the file
_PIECE = 16 * 1024  # bytes of the file, or a longer line
_REQUIRED = {"seq", "execution", "type", "time"}  # fields of every event


@dataclass(frozen=True)
class JobState:
    """Status and queue position of a job."""

    status: str | None  # RQ's status; None: unknown to Redis
    position: int | None  # 1: next; None: not waiting

    @property
    def has_ended(self) -> bool:
        return self.status is None or self.status in ENDED


_CONNECTIONS = 10  # one for the blocking read, one for the state of jobs

Event = dict[str, Any]
Item = Event | JobState


class _Job:
    """A job that is followed."""

    def __init__(self, seq: int) -> None:
        self.followers: set[Inbox[Event]] = set()
        self.seq = seq  # of the last event read
        self.is_readable = True  # False: its key in Redis is not a stream
        self.state: JobState | None = None  # None: not read yet

    def deliver(self, event: Event) -> None:
        for inbox in self.followers:
            if not inbox.is_full:  # else its client is slow
                inbox.put(event)

    def enter(self, state: JobState) -> None:
        if state != self.state:
            self.state = state
            for inbox in self.followers:
                inbox.wake()


class EventReader:
    """Delivers events and states of jobs to their followers."""

    def __init__(
        self, client: Client, in_thread: InThread, in_page_thread: InThread, pace: Pace
    ) -> None:
        """`in_page_thread` and `pace`: of the followers that ask for turns."""
        self._client = client
        self._in_thread = in_thread
        self._in_page_thread = in_page_thread
        self._pace = pace
        self._redis = async_client(
            client.url,
            max_connections=_CONNECTIONS,
            socket_timeout=_BLOCK_MS / 1000 + 5,  # longer than a blocking read
            retry=Retry(NoBackoff(), 0),  # a reconnect would change the client id of the reader
        )
        self._jobs: dict[str, _Job] = {}
        self._queue_key = client.store.queue(INFER).key
        self._read_number = 0  # of the current XREAD, which includes every earlier job
        self._reader_id: int | None = None  # client id, set while XREAD waits
        self._wanted = asyncio.Event()
        self._is_stale = asyncio.Event()  # the current XREAD lacks a job
        self._poll_soon = asyncio.Event()

    # --- for requests -----------------------------------------------------------------------

    async def follow(
        self, job_id: str, *, after: int = 0, is_paced: bool = False
    ) -> AsyncGenerator[Sequence[Item], None]:
        """Yield the job's events with seq above `after`, and its new states, until it ends.

        They come in lists: all that is there. The state comes again every SILENCE_S; where it is
        not known, an empty list after as much silence. The last item is the JobState of an ended
        job; no event ends a job, as a resumed job has events after `finished`. `is_paced`: in turns
        with others, for pages. Raises ApiError when the gateway stops.
        """
        with self._inbox(job_id, after, is_paced) as (job, inbox):
            shown: JobState | None = None
            shown_at = 0.0
            is_behind = job.seq > after
            while True:
                state = job.state
                has_ended = state is not None and state.has_ended  # and its events are written
                if is_behind or has_ended:
                    async for past in self._past(job_id, after, inbox, is_paced):
                        yield past
                        after = past[-1]["seq"]
                        self._expect_end(past)
                if state is not None and has_ended:
                    yield [state]
                    return

                taken = await inbox.take()
                if taken is None:
                    raise unavailable(f"the daemon is stopping; {job_id} stays in the queue")
                fresh = _successive(taken, after)
                after += len(fresh)
                is_behind = job.seq > after  # the stream lacks some, or the inbox was full
                items: list[Item] = [*fresh]
                state = job.state
                now = time.monotonic()
                is_new = state != shown or now - shown_at >= SILENCE_S
                if state is not None and is_new and not state.has_ended:
                    items.append(state)
                    shown, shown_at = state, now
                if items or state is None:
                    yield items
                    self._expect_end(fresh)

    def _expect_end(self, found: Sequence[Event]) -> None:
        """Read the statuses soon if the job may have ended with these events."""
        if found and found[-1]["type"] in events.TERMINAL:
            self._poll_soon.set()

    async def _past(
        self, job_id: str, after: int, inbox: Inbox[Event], is_paced: bool
    ) -> AsyncGenerator[list[Event], None]:
        """Yield the events with seq above `after` that are in the file, or only in the stream."""
        in_thread = self._in_page_thread if is_paced else self._in_thread
        path = self._client.home.runs / job_id / "events.jsonl"
        newest = await in_thread(events.newest, path, 1)
        # The newest event tells whether the file has any to yield; reading all of it takes long.
        is_in_file = not newest or newest[0]["seq"] > after
        offset = 0
        while True:
            found: list[Event] = []
            if is_in_file:
                found, offset = await in_thread(events.read_piece, path, offset, after, _PIECE)
            found = found or await self._in_stream(job_id, after)
            if not found:
                return
            await inbox.turn()
            yield found
            after = found[-1]["seq"]

    async def _in_stream(self, job_id: str, after: int) -> list[Event]:
        """Return events right behind number `after` that the stream has."""
        try:
            entries: Any = await self._redis.xrange(
                keys.events(job_id), min=f"({after}-0", count=_BATCH
            )
        except redis.RedisError:  # it is tried again
            return []
        return _successive(_events_of(job_id, entries), after)

    @contextmanager
    def _inbox(
        self, job_id: str, after: int, is_paced: bool
    ) -> Iterator[tuple[_Job, Inbox[Event]]]:
        inbox: Inbox[Event] = Inbox(_UNREAD, self._pace if is_paced else None)
        if (job := self._jobs.get(job_id)) is None:
            job = self._jobs[job_id] = _Job(after)
            self._is_stale.set()
        job.followers.add(inbox)
        self._wanted.set()
        try:
            yield job, inbox
        finally:
            job.followers.remove(inbox)
            if not job.followers:
                del self._jobs[job_id]

    # --- the three loops --------------------------------------------------------------------

    async def run(self) -> None:
        """Run the three loops until canceled."""
        async with asyncio.TaskGroup() as group:
            for loop in (self._read, self._unblock_reader, self._poll_statuses):
                group.create_task(self._retry_forever(loop))

    async def _retry_forever(self, loop: Callable[[], Any]) -> None:
        while True:
            try:
                await loop()
            except (redis.RedisError, OSError) as error:
                log.warning("http: cannot reach Redis: %s", error)
                await asyncio.sleep(_RECONNECT_S)

    async def _read(self) -> None:
        async with self._redis.client() as connection:
            reader_id = await connection.client_id()
            while True:
                await self._until_followed()
                self._read_number += 1
                positions = {
                    keys.events(job_id): job.seq
                    for job_id, job in self._jobs.items()
                    if job.is_readable
                }
                if not positions:  # only jobs whose events are read from the file
                    await asyncio.sleep(_POLL_S)
                    continue
                self._reader_id = reader_id
                try:
                    found: Any = await connection.xread(
                        {key: f"{seq}-0" for key, seq in positions.items()},
                        count=_BATCH,
                        block=_BLOCK_MS,
                    )
                except redis.ResponseError:
                    await self._leave_out_foreign(positions)
                    continue
                finally:
                    self._reader_id = None
                for raw_key, entries in found or ():
                    key = keys.text(raw_key)
                    self._deliver(keys.job_of_events(key), entries, positions[key])

    async def _leave_out_foreign(self, keys_read: Collection[str]) -> None:
        """Drop keys that are not streams: one of them makes the whole XREAD fail."""
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys_read:
            pipeline.type(key)
        foreign = [
            key
            for key, found in zip(keys_read, await pipeline.execute(), strict=True)
            if found not in (b"stream", b"none")
        ]
        for key in foreign:
            log.warning("http: %s: must be a stream, got another type", key)
            if (job := self._jobs.get(keys.job_of_events(key))) is not None:
                job.is_readable = False
        if not foreign:  # another error, possibly temporary
            await asyncio.sleep(_RECONNECT_S)

    async def _unblock_reader(self) -> None:
        """End the current XREAD (CLIENT UNBLOCK) when a follower is added, so the next includes it.

        Not in the request's own task: redis-py sometimes swallows the cancellation of a task whose
        client has disconnected.
        """
        while True:
            await self._is_stale.wait()
            self._is_stale.clear()
            number = self._read_number
            while self._read_number == number and self._reader_id is not None:
                # 0: XREAD has not reached Redis yet, so try again.
                if await self._redis.client_unblock(self._reader_id):
                    break
                await asyncio.sleep(0.001)

    def _deliver(self, job_id: str, entries: list[Any], position: int) -> None:
        job = self._jobs.get(job_id)
        if job is None or job.seq != position:  # followed anew meanwhile, from elsewhere
            return
        job.seq = _seq_of(entries[-1])
        for event in _events_of(job_id, entries):
            job.deliver(event)

    async def _poll_statuses(self) -> None:
        while True:
            await self._until_followed()
            job_ids = list(self._jobs)
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.lrange(self._queue_key, 0, -1)
            for job_id in job_ids:
                pipeline.hget(Job.key_for(job_id), "status")
            waiting, *statuses = await pipeline.execute()
            places = {keys.text(job_id): place for place, job_id in enumerate(waiting, start=1)}
            for job_id, status in zip(job_ids, statuses, strict=True):
                known = status_of(status)
                if (job := self._jobs.get(job_id)) is not None:
                    job.enter(JobState(None if known is None else known.value, places.get(job_id)))
            try:
                await asyncio.wait_for(self._poll_soon.wait(), _POLL_S)
                self._poll_soon.clear()
                await asyncio.sleep(0.01)  # the worker writes the status after the last event
            except TimeoutError:
                pass

    async def _until_followed(self) -> None:
        while not self._jobs:
            self._wanted.clear()
            await self._wanted.wait()

    def stop(self) -> None:
        """End every `follow` with an error."""
        for job in self._jobs.values():
            for inbox in job.followers:
                inbox.close()

    async def close(self) -> None:
        await self._redis.aclose()


def _events_of(job_id: str, entries: list[Any]) -> list[dict[str, Any]]:
    """Return the events in a stream's entries; entries that are not warmd's are skipped."""
    found = []
    for entry in entries:
        event = stream.checked(entry)
        if event is not None and event.keys() >= _REQUIRED:
            found.append(event)
        else:
            log.warning("%s: not an event in its stream: entry %.40r", job_id, entry[0])
    return found


def _seq_of(entry: Any) -> int:
    """Return the seq in an entry's id, whose form Redis guarantees."""
    return int(keys.text(entry[0]).partition("-")[0])


def _successive(found: list[Event], after: int) -> list[Event]:
    """Return the events with seq `after` + 1, `after` + 2, … up to the first that is missing."""
    successive = []
    for event in found:
        if event["seq"] == after + 1:
            successive.append(event)
            after += 1
    return successive

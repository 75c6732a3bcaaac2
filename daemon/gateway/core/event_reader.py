"""Event reader: reads the event streams and states of all followed jobs over one connection.

One blocking XREAD waits for the events of all jobs, and one pipeline every 0.5 s reads their
statuses and queue positions. A thread or connection per request would cost more than the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
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
from ..http.errors import unavailable

log = logging.getLogger(__name__)

_BLOCK_MS = 5_000  # longest wait of one XREAD; a new follower ends it
_POLL_S = 0.5  # between two reads of the statuses and the queue
_RECONNECT_S = 0.2  # between two tries to reach Redis
_BATCH = 1000  # events per stream and reply
_UNREAD = 1000  # items per follower; further events are read from the file
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

Item = dict[str, Any] | JobState
_Inbox = asyncio.Queue[Item | None]  # None: the gateway stops


class EventReader:
    """Delivers events and states of jobs to their followers."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._redis = async_client(
            client.url,
            max_connections=_CONNECTIONS,
            socket_timeout=_BLOCK_MS / 1000 + 5,  # longer than a blocking read
            retry=Retry(NoBackoff(), 0),  # a reconnect would change the client id of the reader
        )
        self._inboxes: dict[str, list[_Inbox]] = defaultdict(list)
        self._cursors: dict[str, int] = {}  # job -> seq of the last event read
        self._queue_key = client.store.queue(INFER).key
        self._read_number = 0  # of the current XREAD, which includes every earlier follower
        self._reader_id: int | None = None  # client id, set while XREAD waits
        self._wanted = asyncio.Event()
        self._is_stale = asyncio.Event()  # the current XREAD lacks a follower
        self._poll_soon = asyncio.Event()

    # --- for requests -----------------------------------------------------------------------

    async def follow(self, job_id: str, *, after: int = 0) -> AsyncGenerator[Item, None]:
        """Yield the job's events with seq above `after`, and its states, until it ends.

        The last item is the event `finished`, or the JobState of an ended job. Raises ApiError when
        the gateway stops.
        """
        path = self._client.home.runs / job_id / "events.jsonl"

        def missed() -> list[dict[str, Any]]:
            return list(events.read(path, after=after))

        with self._inbox(job_id, after) as inbox:
            while True:
                item = await inbox.get()
                if item is None:
                    raise unavailable(f"the daemon is stopping; {job_id} stays in the queue")
                if isinstance(item, JobState):
                    fresh = await asyncio.to_thread(missed) if item.has_ended else []
                elif item["seq"] <= after:
                    continue
                else:
                    # Events missing from the stream (lost or trimmed) are in the file.
                    has_gap = item["seq"] > after + 1
                    fresh = await asyncio.to_thread(missed) if has_gap else [item]
                for event in fresh:
                    after = event["seq"]
                    yield event
                    if event["type"] == "finished":
                        return
                    if event["type"] in events.TERMINAL:
                        self._poll_soon.set()
                if isinstance(item, JobState):
                    yield item
                    if item.has_ended:
                        return

    @contextmanager
    def _inbox(self, job_id: str, after: int) -> Iterator[_Inbox]:
        inbox: _Inbox = asyncio.Queue(_UNREAD)
        self._inboxes[job_id].append(inbox)
        # Read from the new follower's position; others skip events that they have seen.
        self._cursors[job_id] = min(after, self._cursors.get(job_id, after))
        self._wanted.set()
        self._is_stale.set()
        try:
            yield inbox
        finally:
            self._inboxes[job_id].remove(inbox)
            if not self._inboxes[job_id]:
                del self._inboxes[job_id]
                self._cursors.pop(job_id, None)

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
                positions = {keys.events(job_id): seq for job_id, seq in self._cursors.items()}
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
                    await self._leave_out_foreign(list(positions))
                    continue
                finally:
                    self._reader_id = None
                for raw_key, entries in found or ():
                    key = keys.text(raw_key)
                    self._deliver(key.removeprefix(keys.events("")), entries, positions[key])

    async def _leave_out_foreign(self, keys_read: list[str]) -> None:
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
            self._cursors.pop(key.removeprefix(keys.events("")), None)
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
        if job_id not in self._cursors:
            return
        if self._cursors[job_id] == position:  # otherwise a new follower has reset it
            self._cursors[job_id] = _seq_of(entries[-1])
        for event in _events_of(job_id, entries):
            for inbox in self._inboxes[job_id]:
                _put(inbox, event)

    async def _poll_statuses(self) -> None:
        while True:
            await self._until_followed()
            job_ids = list(self._inboxes)
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.lrange(self._queue_key, 0, -1)
            for job_id in job_ids:
                pipeline.hget(Job.key_for(job_id), "status")
            waiting, *statuses = await pipeline.execute()
            places = {keys.text(job_id): place for place, job_id in enumerate(waiting, start=1)}
            for job_id, status in zip(job_ids, statuses, strict=True):
                known = status_of(status)
                job_state = JobState(None if known is None else known.value, places.get(job_id))
                for inbox in self._inboxes.get(job_id, ()):
                    _put(inbox, job_state)
            try:
                await asyncio.wait_for(self._poll_soon.wait(), _POLL_S)
                self._poll_soon.clear()
                await asyncio.sleep(0.01)  # the worker writes the status after the last event
            except TimeoutError:
                pass

    async def _until_followed(self) -> None:
        while not self._inboxes:
            self._wanted.clear()
            await self._wanted.wait()

    def stop(self) -> None:
        """End every `follow` with an error."""
        for inboxes in self._inboxes.values():
            for inbox in inboxes:
                while inbox.full():
                    inbox.get_nowait()
                inbox.put_nowait(None)

    async def close(self) -> None:
        await self._redis.aclose()


def _put(inbox: _Inbox, item: Item) -> None:
    # A full inbox belongs to a slow client: the next event reveals the gap, and states repeat.
    if not inbox.full():
        inbox.put_nowait(item)


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

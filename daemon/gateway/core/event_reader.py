"""One reader of the event streams of all requests, and of where their jobs stand.

A thread or a connection for each request would cost more than the request: one blocking XREAD
waits for the events of all jobs together, and one round trip a moment asks for their statuses.
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
from ...queue import keys, stream
from ...queue.jobs import ENDED, Job
from ...runs import events
from ..http.errors import unavailable

log = logging.getLogger(__name__)

_BLOCK_MS = 5_000  # how long one XREAD waits; a new request ends it sooner
_LOOK_S = 0.5  # between two looks at the statuses and at the queue
_AWAY_S = 0.2  # between two tries to reach a server that is away
_BATCH = 1000  # events of one stream in one reply
_UNREAD = 1000  # items for one follower; what does not fit in comes from the file
_ENDED = frozenset(status.value for status in ENDED)
_PARTS = {"seq", "execution", "type", "time"}  # of every event


@dataclass(frozen=True)
class Standing:
    """Where a job stands."""

    status: str | None  # RQ's word; None when the server does not know the job
    position: int | None  # 1 for the next, None when it does not wait

    @property
    def has_ended(self) -> bool:
        return self.status is None or self.status in _ENDED


Item = dict[str, Any] | Standing
_Inbox = asyncio.Queue[Item | None]  # None: the gateway stops


class Hub:
    """Follows jobs for as long as somebody wants to know of them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._redis = redis.asyncio.Redis.from_url(
            client.url,
            socket_timeout=_BLOCK_MS / 1000 + 5,  # a reply may be as late as the wait that it ends
            retry=Retry(NoBackoff(), 0),  # or the reader would go on under another id
        )
        self._inboxes: dict[str, list[_Inbox]] = defaultdict(list)
        self._cursors: dict[str, int] = {}  # job -> the number of the last event that was read
        self._queue_key = client.store.queue(INFER).key
        self._turn = 0  # of the reader: what was added before it began is in its XREAD
        self._reader_id: int | None = None  # while it waits
        self._wanted = asyncio.Event()
        self._is_stale = asyncio.Event()  # somebody came, of whom the reader does not know
        self._look_soon = asyncio.Event()

    # --- for requests -----------------------------------------------------------------------

    async def follow(self, job_id: str, *, after: int = 0) -> AsyncGenerator[Item, None]:
        """Yield the job's events above `after`, and now and then where it stands, to its end.

        The last item is the event `finished`, or the Standing of an ended job. Raises ApiError when
        the gateway stops.
        """
        path = self._client.home.runs / job_id / "events.jsonl"

        def missed() -> list[dict[str, Any]]:
            return list(events.read(path, after=after))

        with self._inbox(job_id) as inbox:
            while True:
                item = await inbox.get()
                if item is None:
                    raise unavailable(f"the daemon is stopping; {job_id} stays in the queue")
                if isinstance(item, Standing):
                    fresh = await asyncio.to_thread(missed) if item.has_ended else []
                elif item["seq"] <= after:
                    continue
                else:
                    # What the stream lost or trimmed is in the file.
                    has_gap = item["seq"] > after + 1
                    fresh = await asyncio.to_thread(missed) if has_gap else [item]
                for event in fresh:
                    after = event["seq"]
                    yield event
                    if event["type"] == "finished":
                        return
                    if event["type"] in events.TERMINAL:
                        self._look_soon.set()
                if isinstance(item, Standing):
                    yield item
                    if item.has_ended:
                        return

    @contextmanager
    def _inbox(self, job_id: str) -> Iterator[_Inbox]:
        inbox: _Inbox = asyncio.Queue(_UNREAD)
        self._inboxes[job_id].append(inbox)
        # From the start, also when others follow it: they leave out what they have seen.
        self._cursors[job_id] = 0
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
        """Read and look until canceled."""
        async with asyncio.TaskGroup() as group:
            for loop in (self._read, self._interrupt, self._look):
                group.create_task(self._insist(loop))

    async def _insist(self, loop: Callable[[], Any]) -> None:
        while True:
            try:
                await loop()
            except (redis.RedisError, OSError) as error:
                log.warning("http: no server: %s", error)
                await asyncio.sleep(_AWAY_S)

    async def _read(self) -> None:
        async with self._redis.client() as connection:
            reader_id = await connection.client_id()
            while True:
                await self._somebody()
                self._turn += 1
                asked = {keys.events(job_id): seq for job_id, seq in self._cursors.items()}
                if not asked:  # but jobs whose events come from the file
                    await asyncio.sleep(_LOOK_S)
                    continue
                self._reader_id = reader_id
                try:
                    found: Any = await connection.xread(
                        {key: f"{seq}-0" for key, seq in asked.items()},
                        count=_BATCH,
                        block=_BLOCK_MS,
                    )
                except redis.ResponseError:
                    await self._leave_out_foreign(list(asked))
                    continue
                finally:
                    self._reader_id = None
                for key, entries in found or ():
                    self._deliver(
                        keys.text(key).removeprefix(keys.events("")), entries, asked[keys.text(key)]
                    )

    async def _leave_out_foreign(self, asked: list[str]) -> None:
        """Read no more of the keys that hold something else: they fail the read of all."""
        pipeline = self._redis.pipeline(transaction=False)
        for key in asked:
            pipeline.type(key)
        foreign = [
            key
            for key, found in zip(asked, await pipeline.execute(), strict=True)
            if found not in (b"stream", b"none")
        ]
        for key in foreign:
            log.warning("http: %s: must be a stream, and is something else", key)
            self._cursors.pop(key.removeprefix(keys.events("")), None)
        if not foreign:  # another reason, which may pass
            await asyncio.sleep(_AWAY_S)

    async def _interrupt(self) -> None:
        """Have the reader's wait end when somebody came, so that the next one includes them.

        Not in the requests themselves: redis-py at times swallows the cancellation of one whose
        client has gone.
        """
        while True:
            await self._is_stale.wait()
            self._is_stale.clear()
            turn = self._turn
            while self._turn == turn and self._reader_id is not None:
                # 0 when its command has not arrived yet: asked too early.
                if await self._redis.client_unblock(self._reader_id):
                    break
                await asyncio.sleep(0.001)

    def _deliver(self, job_id: str, entries: list[Any], asked: int) -> None:
        if job_id not in self._cursors:
            return
        if self._cursors[job_id] == asked:  # else somebody came meanwhile and wants all of it
            self._cursors[job_id] = _seq_of(entries[-1])
        for event in _events_of(job_id, entries):
            for inbox in self._inboxes[job_id]:
                _put(inbox, event)

    async def _look(self) -> None:
        while True:
            await self._somebody()
            job_ids = list(self._inboxes)
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.lrange(self._queue_key, 0, -1)
            for job_id in job_ids:
                pipeline.hget(Job.key_for(job_id), "status")
            waiting, *statuses = await pipeline.execute()
            places = {keys.text(job_id): place for place, job_id in enumerate(waiting, start=1)}
            for job_id, status in zip(job_ids, statuses, strict=True):
                standing = Standing(
                    keys.text(status) if status is not None else None, places.get(job_id)
                )
                for inbox in self._inboxes.get(job_id, ()):
                    _put(inbox, standing)
            try:
                await asyncio.wait_for(self._look_soon.wait(), _LOOK_S)
                self._look_soon.clear()
                await asyncio.sleep(0.01)  # the worker is about to tell the server
            except TimeoutError:
                pass

    async def _somebody(self) -> None:
        while not self._inboxes:
            self._wanted.clear()
            await self._wanted.wait()

    def stop(self) -> None:
        """End every follow with an error."""
        for inboxes in self._inboxes.values():
            for inbox in inboxes:
                while inbox.full():
                    inbox.get_nowait()
                inbox.put_nowait(None)

    async def close(self) -> None:
        await self._redis.aclose()


def _put(inbox: _Inbox, item: Item) -> None:
    # Of a client that reads slowly. The next event shows the gap, and where the job stands comes
    # again.
    if not inbox.full():
        inbox.put_nowait(item)


def _events_of(job_id: str, entries: list[Any]) -> list[dict[str, Any]]:
    """Return the events of a stream's entries, without what others than warmd have put there."""
    found = []
    for entry in entries:
        try:
            event = stream.event_of(entry)
            is_event = event["seq"] == _seq_of(entry) and event.keys() >= _PARTS
        except (LookupError, ValueError, TypeError, AttributeError):
            is_event = False
        if is_event:
            found.append(event)
        else:
            log.warning("%s: its stream has no event at %.40r", job_id, entry[0])
    return found


def _seq_of(entry: Any) -> int:
    """Return the number in an entry's id, which Redis made sure of."""
    return int(keys.text(entry[0]).partition("-")[0])

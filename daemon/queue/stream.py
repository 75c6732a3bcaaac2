"""The Redis stream of a job's events: a copy of events.jsonl for readers that wait for events.

Entry `SEQ-0` is event SEQ, so an event that is published twice is stored once. Missing events are
copied from the file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import orjson
import redis

from ..runs import events
from . import keys, totals

log = logging.getLogger(__name__)

_SHORT_WAIT_S = 0.01
_MAX_EVENTS = 10_000  # per stream; older ones are only in the file
_MAX_EVENTS_ENDED = 64  # the same for ended jobs
_BATCH = 1000  # events per round trip


class StreamWriter:
    """Writes the events of all jobs of a worker, those of one loop iteration in one transaction.

    Redis syncs its append-only file before each reply: with 16 jobs decoding, writing every token's
    event by itself would take most of the time of a decode step.
    """

    def __init__(self, connection: redis.Redis) -> None:
        self.connection = connection
        self.is_redis_down = False  # set by the worker; nothing is sent meanwhile
        self._unsent: list[tuple[Publisher, dict[str, Any]]] = []

    def add(self, publisher: Publisher, event: dict[str, Any]) -> None:
        """Write an event at the next `flush`."""
        self._unsent.append((publisher, event))

    def flush(self) -> None:
        """Write all added events; does not raise if Redis is unreachable."""
        if not self._unsent:
            return
        unsent, self._unsent = self._unsent, []
        try:
            if self.is_redis_down:
                raise redis.ConnectionError("Redis is unreachable")
            problems = _add(self.connection, [(one.key, event) for one, event in unsent])
        except redis.RedisError as error:
            problems = [error] * len(unsent)
        for (publisher, _), problem in zip(unsent, problems, strict=True):
            if problem is not None:
                publisher.fall_behind(problem)


@dataclass(frozen=True)
class Ahead:
    """How far a stream is ahead of the file."""

    events: list[dict[str, Any]]  # that the file has lost, in order
    last_seq: int  # of the stream
    is_copy: bool  # False: the stream had other events than the file, and was dropped


class Publisher:
    """Copies the events of one job to its stream. Used by the worker.

    Events that are lost while Redis is unreachable are copied from the file afterwards.
    """

    def __init__(self, writer: StreamWriter, job_id: str, path: Path) -> None:
        self.key = keys.events(job_id)
        self.path = path
        self._writer = writer
        self._connection = writer.connection
        self._seq = 0  # of the newest event that was published
        self._behind = path.exists()  # a killed worker may have left events out
        # The stream is dropped for a new copy of the file once the file has this event.
        self._renew_at: int | None = None

    def publish(self, event: dict[str, Any]) -> None:
        """Copy one event, now or at the next flush; does not raise if Redis is unreachable."""
        if event["seq"] != self._seq + 1:
            self._behind = True  # a killed horse has not sent some events
        self._seq = event["seq"]
        if self._behind:
            self.catch_up()
        else:
            self._writer.add(self, event)

    @property
    def next_seq(self) -> int:
        """The number of the next event, if the newest one is known here."""
        return self._seq + 1

    def publish_unwritten(self, event: dict[str, Any]) -> None:
        """Copy an event that the file does not have yet, after all that it has."""
        self.catch_up()
        self._seq = event["seq"]
        self._writer.add(self, event)

    def ahead(self) -> Ahead:
        """Return what the stream has after the newest event of the file. Raises RedisError.

        A stream that has another event under the newest number of the file is not a copy of it: an
        earlier version continued the file after a power failure. It is dropped, and written anew
        from the file. So is a stream with damaged entries, of which those ahead end at the first
        damaged one: a power failure can leave zeros within a value of Redis' file.
        """
        in_file = next(iter(events.newest(self.path, 1)), None)
        seq = 0 if in_file is None else in_file["seq"]
        found = []
        is_damaged = False
        for number, event in self._entries():
            is_damaged = is_damaged or event is None
            if event is None and number > seq:
                break
            if event is not None and number >= max(seq, 1):
                found.append(event)
        if found and found[0]["seq"] == seq and found[0] != in_file:
            log.warning("%s: is no copy of %s: dropped", self.key, self.path)
            self._connection.delete(self.key)
            self._behind = True
            return Ahead([], last_seq=found[-1]["seq"], is_copy=False)
        if is_damaged:
            log.warning("%s: has damaged entries: written anew from %s", self.key, self.path)
            self._renew_at = found[-1]["seq"] if found else seq
            self._behind = True
        found = [event for event in found if event["seq"] > seq]
        if not found:
            return Ahead([], last_seq=seq, is_copy=True)
        self._seq = found[-1]["seq"]
        return Ahead(found, last_seq=self._seq, is_copy=True)

    def _entries(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Yield the number and the event of each entry; None for a damaged one."""
        entries: Any = self._connection.xrange(self.key)
        for entry in entries:
            yield int(entry[0].split(b"-")[0]), checked(entry)

    def fall_behind(self, problem: redis.RedisError) -> None:
        """Note that an event was not copied: Redis is unreachable, or the key is not a stream."""
        if not self._behind:
            log.warning("%s: events missing in the stream: %s", self.key, problem)
        self._behind = True

    def catch_up(self) -> None:
        """Copy the missing events from the file, if Redis is reachable."""
        if not self._behind or self._writer.is_redis_down:
            return
        try:
            if self._renew_at is not None:
                if events.last_seq(self.path) < self._renew_at:
                    return
                self._connection.delete(self.key)
                self._renew_at = None
            missed = events.read(self.path, after=last_seq(self._connection, self.key))
            while batch := [(self.key, event) for event in islice(missed, _BATCH)]:
                if any(_add(self._connection, batch)):
                    return
            self._behind = False
        except (redis.RedisError, OSError):
            return

    def trim(self) -> None:
        """Keep only the last events of an ended job, so that thousands of jobs fit into memory.

        Readers of all events find the earlier ones in the file.
        """
        try:
            self._connection.xtrim(self.key, maxlen=_MAX_EVENTS_ENDED, approximate=False)
        except redis.RedisError as error:
            log.debug("%s: not trimmed: %s", self.key, error)


def _add(
    connection: redis.Redis, batch: Sequence[tuple[str, dict[str, Any]]]
) -> list[redis.RedisError | None]:
    """Add events to the streams with these keys; return the error of each, or None.

    In one transaction: a reader that waits for several streams is woken once, when all are there.
    Counts the alerts among them, each once: one that the stream has already is an error.
    """
    with connection.pipeline() as pipeline:
        for key, event in batch:
            pipeline.xadd(
                key,
                {"event": orjson.dumps(event)},
                id=f"{event['seq']}-0",
                maxlen=_MAX_EVENTS,
                approximate=True,
            )
        replies = pipeline.execute(raise_on_error=False)
    for (key, event), reply in zip(batch, replies, strict=True):
        if event["type"] in totals.ALERTS and not isinstance(reply, redis.ResponseError):
            totals.alerted(connection, keys.job_of_events(key), event["type"])
    return [
        reply
        if isinstance(reply, redis.ResponseError) and "equal or smaller" not in str(reply)
        else None
        for reply in replies
    ]


def last_seq(connection: redis.Redis, key: str) -> int:
    """The number of the newest event in a stream, 0 if it is empty."""
    newest = cast(list[Any], connection.xrevrange(key, count=1))
    return int(newest[0][0].split(b"-")[0]) if newest else 0


def newest(connection: redis.Redis, counts: Mapping[str, int]) -> list[list[dict[str, Any]]]:
    """The newest events of each job, newest first, as many as `counts` says; in one round trip."""
    with connection.pipeline(transaction=False) as pipeline:
        for job_id, count in counts.items():
            pipeline.xrevrange(keys.events(job_id), count=count)
        found = pipeline.execute(raise_on_error=False)
    # A key that is not a stream counts as a job without events.
    return [
        [] if isinstance(entries, redis.ResponseError) else _events(entries) for entries in found
    ]


def follow(
    connection: redis.Redis,
    job_id: str,
    path: Path,
    *,
    after: int = 0,
    has_ended: Callable[[], bool],
    pause_s: float = 0.5,
    before_read: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, Any] | None]:
    """Yield the events after number `after`; wait for more until `has_ended()` and all are read.

    Events that the stream lacks, because it was trimmed or lost, come from the file, which
    `before_read` brings up to date. Yields None after at most `pause_s` without an event.
    """
    key = keys.events(job_id)
    end_expected = 0.0  # until this time the job is expected to end at any moment
    while True:
        wait_s = _SHORT_WAIT_S if time.monotonic() < end_expected else pause_s
        ended = has_ended()  # before the read: an event written before the end must still be seen
        batch = cast(
            Any,
            connection.xread(
                {key: f"{after}-0"}, count=1000, block=None if ended else int(wait_s * 1000)
            ),
        )
        entries = [entry for _, found in batch or [] for entry in found]
        fresh = _events(entries)
        is_damaged = len(fresh) < len(entries)
        if is_damaged or (fresh and fresh[0]["seq"] > after + 1) or (ended and not fresh):
            before_read()
            fresh = list(events.read(path, after=after))
        if is_damaged and not fresh and not ended:
            time.sleep(wait_s)  # the damaged entries do not block
        for event in fresh:
            after = event["seq"]
            if event["type"] in events.TERMINAL:
                end_expected = time.monotonic() + 2 * pause_s
            yield event
        if not fresh:
            if ended:
                return
            yield None


def checked(entry: Any) -> dict[str, Any] | None:
    """Return the event in a stream entry of redis-py, None if it is damaged."""
    event = events.parse(entry[1].get(b"event", b"") + b"\n")
    return event if event is not None and entry[0] == b"%d-0" % event["seq"] else None


def _events(entries: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the events of entries, without damaged ones."""
    return [event for entry in entries if (event := checked(entry)) is not None]

"""Events of a job for those who wait for them: from its Redis stream, else from its file.

`Publisher` lets the stream follow the file, and `follow` reads the stream, and the file where the
stream has gaps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import redis

from ..queue import keys, stream
from ..queue.stream import StreamWriter
from ..runs import events

log = logging.getLogger(__name__)

_SHORT_WAIT_S = 0.01
_BATCH = 1000  # events per round trip


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
        self._unwritten: list[dict[str, Any]] = []  # published events that are not in the file yet
        # The stream is dropped for a new copy of the file once the file has this event.
        self._renew_at: int | None = None

    def publish(self, event: dict[str, Any]) -> None:
        """Copy one event, now or at the next flush; does not raise if Redis is unreachable."""
        if event["seq"] != self._seq + 1:
            self._behind = True  # a killed horse has not sent some events
        self._unwritten.clear()  # events are written in order: the file has them now
        self._add(event)

    @property
    def next_seq(self) -> int:
        """The number of the next event, if the newest one is known here."""
        return self._seq + 1

    def publish_unwritten(self, event: dict[str, Any]) -> None:
        """Copy an event that the file does not have yet, after all that it has."""
        self._unwritten.append(event)
        self._add(event)

    def _add(self, event: dict[str, Any]) -> None:
        self._seq = event["seq"]
        if self._behind:
            self.catch_up()
        else:
            self._writer.add(self.key, event, self.fall_behind)

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
        for number, event in stream.entries_of(self._connection, self.key):
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

    def fall_behind(self, problem: redis.RedisError) -> None:
        """Note that an event was not copied: Redis is unreachable, or the key is not a stream."""
        if not self._behind:
            log.warning("%s: events missing in the stream: %s", self.key, problem)
        self._behind = True

    def catch_up(self) -> None:
        """Copy the missing events, also those not in the file yet, if Redis is reachable."""
        if not self._behind or self._writer.is_redis_down:
            return
        try:
            if self._renew_at is not None:
                if events.last_seq(self.path) < self._renew_at:
                    return
                self._connection.delete(self.key)
                self._renew_at = None
            missed = self._after(stream.last_seq(self._connection, self.key))
            while batch := [(self.key, event) for event in islice(missed, _BATCH)]:
                if any(stream.add(self._connection, batch)):
                    return
            self._behind = False
        except (redis.RedisError, OSError):
            return

    def _after(self, seq: int) -> Iterator[dict[str, Any]]:
        """Yield the events after number `seq`, also those that the file does not have yet."""
        for event in chain(events.read(self.path, after=seq), self._unwritten):
            if event["seq"] > seq:
                seq = event["seq"]
                yield event

    def trim(self) -> None:
        """Keep only the last events of an ended job, so that thousands of jobs fit into memory.

        Readers of all events find the earlier ones in the file.
        """
        try:
            stream.trim_ended(self._connection, self.key)
        except redis.RedisError as error:
            log.debug("%s: not trimmed: %s", self.key, error)


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
        fresh, is_damaged = stream.wait_for(connection, key, after, None if ended else wait_s)
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

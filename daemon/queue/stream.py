"""The Redis stream of a job's events: a copy for whoever watches, rebuilt from the file at will.

Entry `SEQ-0` holds event SEQ, so that publishing an event twice cannot show it twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import orjson
import redis

from ..runs import events
from . import keys

log = logging.getLogger(__name__)

_SHORT_S = 0.01
_KEPT = 10_000  # events; older ones are in the file
_KEPT_OF_ENDED = 64
_AT_ONCE = 1000  # events of one round trip


class Outbox:
    """Events on their way to the streams of a worker's jobs: those of one moment go together.

    The server flushes its file before it replies. One by one, a token of 16 answers each would
    keep worker and server at work for most of the time that the next token takes.
    """

    def __init__(self, connection: redis.Redis) -> None:
        self.connection = connection
        self.is_away = False  # the server: set by whoever finds out, and nothing is sent meanwhile
        self._unsent: list[tuple[Publisher, dict[str, Any]]] = []

    def put(self, publisher: Publisher, event: dict[str, Any]) -> None:
        """Have an event copied by the next `send`."""
        self._unsent.append((publisher, event))

    def send(self) -> None:
        """Copy what was put here; never raises for a server that is away."""
        if not self._unsent:
            return
        unsent, self._unsent = self._unsent, []
        try:
            if self.is_away:
                raise redis.ConnectionError("no server")
            problems = _add(self.connection, [(one.key, event) for one, event in unsent])
        except redis.RedisError as error:
            problems = [error] * len(unsent)
        for (publisher, _), problem in zip(unsent, problems, strict=True):
            if problem is not None:
                publisher.fall_behind(problem)


class Publisher:
    """Copies the events of one job to its stream. Used by the worker.

    Redis may be away at any moment: what was missed meanwhile comes from the file afterwards.
    """

    def __init__(self, outbox: Outbox, job_id: str, path: Path) -> None:
        self.key = keys.events(job_id)
        self.path = path
        self._outbox = outbox
        self._connection = outbox.connection
        self._seq = 0  # of the newest event that was to be copied
        self._behind = path.exists()  # a killed worker may have left a gap

    def publish(self, event: dict[str, Any]) -> None:
        """Have one event copied, now or by the outbox; never raises for a server that is away."""
        if event["seq"] != self._seq + 1:
            self._behind = True  # a killed horse kept the events between to itself
        self._seq = event["seq"]
        if self._behind:
            self.catch_up()
        else:
            self._outbox.put(self, event)

    def fall_behind(self, problem: redis.RedisError) -> None:
        """Note that an event was not copied: no server, or something else in the stream's place."""
        if not self._behind:
            log.warning("%s: stream falls behind: %s", self.key, problem)
        self._behind = True

    def catch_up(self) -> None:
        """Copy whatever the stream lacks, if the server is there."""
        if not self._behind or self._outbox.is_away:
            return
        try:
            missed = events.read(self.path, after=last_seq(self._connection, self.key))
            while batch := [(self.key, event) for event in islice(missed, _AT_ONCE)]:
                if any(_add(self._connection, batch)):
                    return
            self._behind = False
        except (redis.RedisError, OSError):
            return

    def trim(self) -> None:
        """Keep the end alone, for a job that has ended: thousands of trainings fill the memory.

        Whoever reads all of it finds the beginning in the file.
        """
        try:
            self._connection.xtrim(self.key, maxlen=_KEPT_OF_ENDED, approximate=False)
        except redis.RedisError as error:
            log.debug("%s: not trimmed: %s", self.key, error)


def _add(
    connection: redis.Redis, batch: Sequence[tuple[str, dict[str, Any]]]
) -> list[redis.RedisError | None]:
    """Copy events to the streams with these keys; return what is wrong with each.

    In one transaction: a reader who waits for several streams is woken once, when all are there.
    """
    with connection.pipeline() as pipeline:
        for key, event in batch:
            pipeline.xadd(
                key,
                {"event": orjson.dumps(event)},
                id=f"{event['seq']}-0",
                maxlen=_KEPT,
                approximate=True,
            )
        replies = pipeline.execute(raise_on_error=False)
    return [
        reply
        if isinstance(reply, redis.ResponseError) and "equal or smaller" not in str(reply)
        else None
        for reply in replies
    ]


def last_seq(connection: redis.Redis, key: str) -> int:
    """The number of the newest event in a stream, 0 for none."""
    newest = cast(list[Any], connection.xrevrange(key, count=1))
    return int(newest[0][0].split(b"-")[0]) if newest else 0


def newest(connection: redis.Redis, counts: Mapping[str, int]) -> list[list[dict[str, Any]]]:
    """So many of the newest events of each job, newest first, in one round trip."""
    with connection.pipeline(transaction=False) as pipeline:
        for job_id, count in counts.items():
            pipeline.xrevrange(keys.events(job_id), count=count)
        found = pipeline.execute(raise_on_error=False)
    # Something else in a stream's place is a job without events, not the end of the list.
    return [
        [] if isinstance(entries, redis.ResponseError) else [event_of(entry) for entry in entries]
        for entries in found
    ]


def follow(
    connection: redis.Redis,
    job_id: str,
    path: Path,
    *,
    after: int = 0,
    over: Callable[[], bool],
    pause_s: float = 0.5,
) -> Iterator[dict[str, Any] | None]:
    """Yield the events after number `after`, waiting for more until `over()` and none is left.

    What the stream lacks at its beginning (trimmed, or a server that lost it) comes from the file.
    Yields None after every `pause_s` of silence, or sooner.
    """
    key = keys.events(job_id)
    end_expected = 0.0  # until then the job's end should follow its last event any moment
    while True:
        wait_s = _SHORT_S if time.monotonic() < end_expected else pause_s
        ended = over()  # asked first: an event written before the end must still be seen
        batch = cast(
            Any,
            connection.xread(
                {key: f"{after}-0"}, count=1000, block=None if ended else int(wait_s * 1000)
            ),
        )
        fresh = [event_of(entry) for _, entries in batch or [] for entry in entries]
        if (fresh and fresh[0]["seq"] > after + 1) or (ended and not fresh):
            fresh = list(events.read(path, after=after))
        for event in fresh:
            after = event["seq"]
            if event["type"] in events.TERMINAL:
                end_expected = time.monotonic() + 2 * pause_s
            yield event
        if not fresh:
            if ended:
                return
            yield None


def event_of(entry: Any) -> dict[str, Any]:
    """The event in an entry of a stream, as redis-py gives it."""
    event: dict[str, Any] = orjson.loads(entry[1][b"event"])
    return event

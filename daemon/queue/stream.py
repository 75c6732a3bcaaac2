"""The Redis stream of a job's events: a copy of events.jsonl for readers that wait for events.

Entry `SEQ-0` is event SEQ, so an event that is published twice is stored once. `lifecycle.follow`
copies missing events from the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import orjson
import redis

from ...jobs.event_format import parse
from . import keys, totals

OnLost = Callable[[redis.RedisError], None]

_MAX_EVENTS = 10_000  # per stream; older ones are only in the file
_MAX_EVENTS_ENDED = 64  # the same for ended jobs


class StreamWriter:
    """Writes the events of all jobs of a worker, those of one loop iteration in one transaction.

    Redis syncs its append-only file before each reply: with 16 jobs decoding, writing every token's
    event by itself would take most of the time of a decode step.
    """

    def __init__(self, connection: redis.Redis) -> None:
        self.connection = connection
        self.is_redis_down = False  # set by the worker; nothing is sent meanwhile
        self._unsent: list[tuple[str, dict[str, Any], OnLost]] = []

    def add(self, key: str, event: dict[str, Any], on_lost: OnLost) -> None:
        """Write an event to a stream at the next `flush`; `on_lost` is called if that fails."""
        self._unsent.append((key, event, on_lost))

    def flush(self) -> None:
        """Write all added events; does not raise if Redis is unreachable."""
        if not self._unsent:
            return
        unsent, self._unsent = self._unsent, []
        try:
            if self.is_redis_down:
                raise redis.ConnectionError("Redis is unreachable")
            problems = add(self.connection, [(key, event) for key, event, _ in unsent])
        except redis.RedisError as error:
            problems = [error] * len(unsent)
        for (_, _, on_lost), problem in zip(unsent, problems, strict=True):
            if problem is not None:
                on_lost(problem)


def add(
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


def entries_of(connection: redis.Redis, key: str) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number and the event of each entry of a stream; None for a damaged one."""
    entries: Any = connection.xrange(key)
    for entry in entries:
        yield int(entry[0].split(b"-")[0]), checked(entry)


def trim_ended(connection: redis.Redis, key: str) -> None:
    """Keep only the last events of an ended job, so that thousands of jobs fit into memory."""
    connection.xtrim(key, maxlen=_MAX_EVENTS_ENDED, approximate=False)


def wait_for(
    connection: redis.Redis, key: str, after: int, wait_s: float | None
) -> tuple[list[dict[str, Any]], bool]:
    """Return the events after number `after`, and whether damaged ones are among them.

    Waits for up to `wait_s` where there is none yet; None: not at all.
    """
    block = None if wait_s is None else int(wait_s * 1000)
    batch: Any = connection.xread({key: f"{after}-0"}, count=1000, block=block)
    entries = [entry for _, found in batch or [] for entry in found]
    fresh = _events(entries)
    return fresh, len(fresh) < len(entries)


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


def checked(entry: Any) -> dict[str, Any] | None:
    """Return the event in a stream entry of redis-py, None if it is damaged."""
    event = parse(entry[1].get(b"event", b"") + b"\n")
    return event if event is not None and entry[0] == b"%d-0" % event["seq"] else None


def _events(entries: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the events of entries, without damaged ones."""
    return [event for entry in entries if (event := checked(entry)) is not None]

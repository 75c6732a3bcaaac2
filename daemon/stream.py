"""The Redis stream of a job's events: a copy for whoever watches, rebuilt from the file at will.

Entry `SEQ-0` holds event SEQ, so that publishing an event twice cannot show it twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import orjson
import redis

from . import events, keys

log = logging.getLogger(__name__)

_SHORT_S = 0.01
_KEPT = 10_000  # events; older ones are in the file
_KEPT_OF_ENDED = 64


class Publisher:
    """Copies the events of one job to its stream. Used by the worker.

    Redis may be away at any moment: what was missed meanwhile comes from the file afterwards.
    """

    def __init__(self, connection: redis.Redis, job_id: str, path: Path) -> None:
        self.connection = connection
        self.key = keys.events(job_id)
        self.path = path
        self._behind = True  # until the first sync: a killed worker may have left a gap

    def publish(self, event: dict[str, Any]) -> None:
        """Copy one event; never raises for a server that is away or holds something else there."""
        if self._behind:
            self.catch_up()
            return
        try:
            self._add(event)
        except redis.RedisError as error:
            log.warning("%s: stream falls behind: %s", self.key, error)
            self._behind = True

    def catch_up(self) -> bool:
        """Copy whatever the stream lacks. Returns whether it lacks nothing now."""
        if self._behind:
            try:
                for event in events.read(self.path, after=last_seq(self.connection, self.key)):
                    self._add(event)
                self._behind = False
            except (redis.RedisError, OSError):
                return False
        return True

    def trim(self) -> None:
        """Keep the end alone, for a job that has ended: thousands of trainings fill the memory.

        Whoever reads all of it finds the beginning in the file.
        """
        try:
            self.connection.xtrim(self.key, maxlen=_KEPT_OF_ENDED, approximate=False)
        except redis.RedisError as error:
            log.debug("%s: not trimmed: %s", self.key, error)

    def _add(self, event: dict[str, Any]) -> None:
        try:
            self.connection.xadd(
                self.key,
                {"event": orjson.dumps(event)},
                id=f"{event['seq']}-0",
                maxlen=_KEPT,
                approximate=True,
            )
        except redis.ResponseError as error:
            if "equal or smaller" not in str(error):
                raise


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

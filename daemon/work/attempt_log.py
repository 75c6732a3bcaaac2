"""The worker's part of a job's event log: it publishes the horse's events, and writes its own.

All events are copied to the stream in Redis. The worker writes events before the horse starts and
after it has ended. On a full disk events wait here for space: the horse's are in the stream
already, the worker's are added to the stream if the execution ends before there is space. Events
that only the stream has, because a power failure took them from the file, are written back before
the horse starts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import redis

from ...jobs.files.shortage import Shortage, shortage
from ..lifecycle.follow import Publisher
from ..queue.stream import StreamWriter
from ..runs.events import EventLog, last_seq
from ..runs.rundir import RunDir

log = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 1.0  # for the horse to finish writing an event
_FIRST_PAUSE_S = 0.1  # between two tries to write
_LONGEST_PAUSE_S = 5.0


class AttemptLog:
    """Writes and publishes the events of one execution."""

    def __init__(
        self, writer: StreamWriter, rundir: RunDir, execution: int, offset_s: Callable[[], float]
    ) -> None:
        """`offset_s` returns how far Redis' clock is ahead of this machine's."""
        self.lacks: Shortage | None = None  # shortage for which events wait
        self._publisher = Publisher(writer, rundir.path.name, rundir.events)
        self._rundir = rundir
        self._execution = execution
        self._offset_s = offset_s
        self._announced: list[dict[str, Any]] = []  # in the stream, not in the file
        self._own: list[tuple[str, dict[str, Any]]] = []  # of this worker, not written yet
        self._numbered_after = 0  # own events get higher numbers
        self._due = 0.0  # time of the next try
        self._pause_s = _FIRST_PAUSE_S

    @property
    def is_behind(self) -> bool:
        """Whether events wait to be written that the file must have before a horse starts."""
        return bool(self._announced or self._own)

    def received(self, event: dict[str, Any], *, is_written: bool) -> None:
        """Publish an event of the horse."""
        if is_written:
            self._announced.clear()  # the horse has written them first
            self._publisher.publish(event)
        else:
            self._announced.append(event)
            self._publisher.publish_unwritten(event)

    def restore(self) -> None:
        """Write back what the stream has and the file has lost. Raises RedisError."""
        try:
            ahead = self._publisher.ahead()
        except redis.ResponseError as error:  # the key is not a stream
            log.warning("%s: %s", self._rundir.path.name, error)
            return
        if not ahead.is_copy:
            self._numbered_after = ahead.last_seq  # readers have seen these numbers
            self._own.append(("warning", {"message": "events: some are lost in a power failure"}))
        elif ahead.events:
            self._announced = ahead.events
            missing = ahead.events[0]["seq"] - 1 - last_seq(self._rundir.events)
            log.warning(
                "%s: %d events are restored from Redis, %d are lost",
                *(self._rundir.path.name, len(ahead.events), missing),
            )
            if missing:
                message = f"events: {missing} are lost in a power failure"
                self._own.append(("warning", {"message": message}))
        if self.is_behind:
            self._write()

    def emit(self, type: str, **fields: Any) -> None:
        """Write an event, now or when there is room for it, and publish it then."""
        self._own.append((type, fields))
        self._write()

    def write_if_due(self) -> None:
        """Try again to write what waits."""
        if self.is_behind and time.monotonic() >= self._due:
            self._write()

    def _write(self) -> None:
        try:
            with EventLog(
                self._rundir.events,
                execution=self._execution,
                clock_offset_s=self._offset_s(),
                publish=self._publisher.publish,
                patience_s=_LOCK_TIMEOUT_S,
            ) as events:
                events.restore(self._announced)
                self._announced = []
                events.continue_after(self._numbered_after)
                while self._own:
                    type, fields = self._own[0]
                    events.emit(type, **fields)
                    del self._own[0]
        except BlockingIOError:  # a horse that hangs holds the lock
            self._wait()
        except OSError as error:
            self.lacks = shortage(error, self._rundir.path)
            if self.lacks is None:  # Redis still gets the reason of the end
                log.warning("%s: events not written: %s", self._rundir.path.name, error)
                self.publish_own()
                self._announced = []
            else:
                self._wait()
        else:
            self.lacks, self._pause_s = None, _FIRST_PAUSE_S

    def _wait(self) -> None:
        self._due = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def publish_own(self) -> None:
        """Publish this worker's events that are not in the file: the execution ends without them.

        The next execution writes them into the file.
        """
        own, self._own = self._own, []
        for type, fields in own:
            event = {
                "seq": self._publisher.next_seq,
                "execution": self._execution,
                "time": round(time.time() + self._offset_s(), 6),
                "type": type,
                "step": None,
                **fields,
            }
            self._publisher.publish_unwritten(event)

    def catch_up(self) -> None:
        """Copy the events that the stream missed while Redis was unreachable."""
        self._publisher.catch_up()

    def trim(self) -> None:
        """Keep only the last events in the stream: the job has ended."""
        self._publisher.trim()

"""The order of each queue after the latest move, for the case that Redis loses it.

Everything else about the order is in the run directories (asked.py). A move concerns the jobs that
it passes too, so the file has the whole queue: the jobs in it were submitted, continued or resumed
before the move, and those that follow later are placed by their own requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...jobs.files.atomic import locked, write_atomic
from .seal import sealed, unsealed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Queue:
    at: float  # unix seconds of the move
    jobs: list[str]


class Order:
    """The file of one home."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, queue: str, read: Callable[[], list[str]]) -> None:
        """Record the order of a queue durably; `read` returns its jobs, the next one first.

        If it cannot be written (a full disk), the move holds all the same, and a log line says so.
        """
        try:
            with locked(self._path.parent):  # of two moves the later order is written last
                now = _Queue(round(time.time(), 3), read())
                write_atomic(self._path, sealed({**self._read(), queue: now}))
        except OSError as error:
            log.warning("%s: the order of the queue is not recorded: %s", self._path, error)

    def ranks(self) -> dict[str, tuple[int, float]]:
        """Return the place of each job in its queue, and the time of the move (unix seconds)."""
        return {
            job: (place, queue.at)
            for queue in self._read().values()
            for place, job in enumerate(queue.jobs)
        }

    def _read(self) -> dict[str, _Queue]:
        """Return the queues; none if there is no file that can be read."""
        with suppress(OSError, ValueError):
            return unsealed(self._path.read_bytes(), dict[str, _Queue])
        return {}

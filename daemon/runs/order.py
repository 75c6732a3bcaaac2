"""The order of each queue after the latest move, for the case that Redis loses it.

Everything else about the order is in the run directories (asked.py). A move concerns the jobs that
it passes too, so the file has the whole queue: the jobs in it were submitted, continued or resumed
before the move, and those that follow later are placed by their own requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from ...jobs.files.atomic import locked, write_atomic
from .seal import is_whole, sealed

log = logging.getLogger(__name__)


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
                now = {"at": round(time.time(), 3), "jobs": read()}
                write_atomic(self._path, sealed({**self._read(), queue: now}))
        except OSError as error:
            log.warning("%s: the order of the queue is not recorded: %s", self._path, error)

    def ranks(self) -> dict[str, tuple[int, float]]:
        """Return the place of each job in its queue, and the time of the move (unix seconds)."""
        return {
            job: (place, float(queue["at"]))
            for queue in self._read().values()
            for place, job in enumerate(queue["jobs"])
        }

    def _read(self) -> dict[str, Any]:
        """Return the queues; none if there is no file that can be read."""
        try:
            document = orjson.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return document if isinstance(document, dict) and is_whole(document) else {}

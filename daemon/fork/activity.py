"""Reports the job's current activity from the horse to its worker's watchdog.

A thread sends at most one report per second, and only if the activity has changed. Silence means
that the last reported activity continues, or that the whole process hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from ...jobs.context import Activity

PERIOD_S = 1.0


class ActivityReporter:
    """A context manager that reports the latest activity of one job."""

    def __init__(self, send: Callable[[Activity | None], None]) -> None:
        self._send = send
        self._latest: Activity | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None  # none for jobs that report no activity

    def working(self, activity: Activity | None) -> None:
        """Set the current activity of the job (jobs.context.Context.working).

        Raises RuntimeError while the machine can start no thread.
        """
        self._latest = activity
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="activity", daemon=True)
            thread.start()
            self._thread = thread  # only if it has started: __exit__ joins it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        sent: Activity | None = None
        while not self._closed.wait(PERIOD_S):
            latest = self._latest
            if latest != sent:
                self._send(latest)
                sent = latest

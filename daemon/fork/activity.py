"""What a job does now, on its way from the horse to the watchdog of its worker.

Sent by a thread of its own, at most once a second, and only when it has changed: silence means that
the job still does what was said last, or that the whole process hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Self

from ...jobs.context import Activity

PERIOD_S = 1.0


class Pulse:
    """Sends the latest activity of one job while its block lasts."""

    def __init__(self, send: Callable[[dict[str, Any] | None], None]) -> None:
        self._send = send
        self._latest: Activity | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None  # none for the jobs that never say anything

    def working(self, activity: Activity | None) -> None:
        """Note what the job does from now on (jobs.context.Context.working)."""
        self._latest = activity
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
            self._thread.start()

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
                self._send(asdict(latest) if latest is not None else None)
                sent = latest

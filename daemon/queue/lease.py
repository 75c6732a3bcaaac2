"""A worker's lease: while it lasts nobody else takes the worker's jobs.

A thread renews it over a connection of its own, so that nothing that the worker does, and nothing
that it waits for, costs it its jobs.
"""

from __future__ import annotations

import threading
import time

import redis

from . import keys
from .jobs import JobStore
from .workers import Roster

LEASE_S = 15.0  # a worker that was silent this long is dead for the other machines

RENEWALS = 7  # in the time that a lease lasts; one that takes longer than its share has failed
_USABLE = 2 / 3  # of a lease; in the rest horses end before somebody else has their jobs
_AWAY_S = 0.2  # between two tries to reach a server that is away


def clock() -> float:
    """Seconds that go on while the machine sleeps, where it can tell them, as the lease does."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class Lease:
    """The lease of one worker, in the hands of its thread."""

    def __init__(self, url: str, worker: str, queue: str, *, length_s: float) -> None:
        self.renewed_at: float | None = None  # by `clock`, when the newest renewal was sent
        self._worker = worker
        self._queue = queue
        self._length_s = length_s
        self._pause_s = length_s / RENEWALS
        self._roster = Roster(JobStore(keys.connect_once(url, timeout_s=self._pause_s)))
        self._hurry = threading.Event()
        self._is_ending = False

    def start(self) -> None:
        """Renew it from now on; the first time lists the worker."""
        threading.Thread(target=self._run, name="lease", daemon=True).start()

    def renew_soon(self) -> None:
        """Renew it without waiting for the time to come: somebody found the server away."""
        self._hurry.set()

    def end(self) -> None:
        """Renew it no more."""
        self._is_ending = True
        self._hurry.set()

    def is_running_out(self) -> bool:
        """Whether it was not renewed for so long that others may soon take the worker's jobs."""
        return self.renewed_at is not None and clock() - self.renewed_at > self.usable_s

    @property
    def usable_s(self) -> float:
        return self._length_s * _USABLE

    def _run(self) -> None:
        while not self._is_ending:
            sent = clock()
            pause_s = self._pause_s
            try:
                self._roster.register(self._worker, self._queue, lease_s=self._length_s)
                self.renewed_at = sent
            except redis.RedisError:
                pause_s = _AWAY_S
            self._hurry.wait(pause_s)
            self._hurry.clear()

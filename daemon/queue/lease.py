"""A worker's lease: until it expires, no other daemon requeues the worker's jobs.

A thread renews it over its own connection, so that a busy or blocked worker keeps its jobs.
"""

from __future__ import annotations

import threading

import redis
from redis.backoff import EqualJitterBackoff

from . import keys
from .clocks import clock
from .jobs import JobStore
from .rq_workers import WorkerState
from .workers import WorkerRegistry

LEASE_S = 15.0  # after this time without renewal, other daemons requeue the worker's jobs

RENEWALS = 10  # per lease; a command that takes longer than its share has failed
_USABLE = 2 / 3  # of a lease; in the rest of it horses end, before others take their jobs
# Delays between attempts to reach Redis: growing and random, as many workers lose it at once.
_BACKOFF = EqualJitterBackoff(cap=1.0, base=0.2)


class Lease:
    """The lease of one worker, and the thread that renews it."""

    def __init__(self, url: str, worker: str, queue: str, *, length_s: float) -> None:
        self.renewed_at: float | None = None  # by `clock`: start of the last renewal
        self.state = WorkerState()  # for RQ's tools; replaced by the worker's main thread
        self._worker = worker
        self._queue = queue
        self._length_s = length_s
        self._pause_s = length_s / RENEWALS
        self._roster = WorkerRegistry(JobStore(keys.connect_once(url, timeout_s=self._pause_s)))
        self._wake = threading.Event()
        self._is_ending = False

    def start(self) -> None:
        """Renew it from now on. The first renewal registers the worker."""
        threading.Thread(target=self._run, name="lease", daemon=True).start()

    def renew_soon(self) -> None:
        """Renew it at once, after the worker could not reach Redis."""
        self._wake.set()

    def end(self) -> None:
        """Stop renewing it."""
        self._is_ending = True
        self._wake.set()

    def is_running_out(self) -> bool:
        """Whether it expires soon: other daemons may then requeue the worker's jobs."""
        return self.renewed_at is not None and clock() - self.renewed_at > self.usable_s

    @property
    def usable_s(self) -> float:
        return self._length_s * _USABLE

    def _run(self) -> None:
        failures = 0  # in a row
        while not self._is_ending:
            sent = clock()
            pause_s = self._pause_s
            try:
                self._roster.register(
                    self._worker, self._queue, lease_s=self._length_s, state=self.state
                )
                self.renewed_at = sent
                failures = 0
            except redis.RedisError:
                pause_s = _BACKOFF.compute(failures)
                failures += 1
            self._wake.wait(pause_s)
            self._wake.clear()

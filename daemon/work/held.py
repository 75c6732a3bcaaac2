"""What a worker holds: its jobs, their horses and its connections; and how it gives them up.

It does so on a signal, after its number of jobs, and with its lease: a machine that was suspended,
or whose network is cut, cannot renew it, and other workers may have its jobs when it continues.
"""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass, field
from typing import Any

from ...configs.config import WorkerConfig
from ..host.downloads import Downloads
from ..host.home import Home
from ..queue.clocks import clock
from ..queue.jobs import JobStore
from ..queue.mailbox import Mailbox
from ..queue.stream import StreamWriter
from ..queue.workers import Lease, WorkerRegistry
from .attempt import Attempt
from .gangs import GangWork
from .horse import Horse
from .seats import Seat
from .stored_runs import StoredRuns

log = logging.getLogger(__name__)

_DRAIN_TIMEOUT_S = 1.0  # for Redis to come back when the worker is to end


@dataclass(frozen=True, kw_only=True)
class Held:
    """The state that all parts of one worker share."""

    home: Home
    config: WorkerConfig
    name: str
    is_shared: bool  # workers of other daemons may take its jobs when its lease ends
    store: JobStore
    registry: WorkerRegistry
    writer: StreamWriter
    mailbox: Mailbox
    lease: Lease
    stored: StoredRuns | None  # None: run directories are in the home
    gangs: GangWork
    downloads: Downloads = field(default_factory=Downloads)
    horses: list[Horse] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def taken(self) -> list[Attempt | Seat]:
        """All jobs of which it runs ranks."""
        return [*self.attempts, *self.gangs.seats.taken]

    def has_room(self) -> bool:
        """Whether a slot is free."""
        # Suspects without a horse take no slot.
        # Nor do ended jobs whose files are being uploaded.
        slots = [a for a in self.attempts if not a.has_ended or a.is_stored]
        running = sum(not (a.is_suspect and a.horse is None) for a in slots)
        # Horses that have no job left, but have not exited, still take memory.
        leaving = sum(horse.is_leaving and not horse.job_ids for horse in self.horses)
        return running + self.gangs.num_slots + leaving < self.config.slots


class Leaving:
    """Whether a worker takes jobs, lets them end, or makes them save."""

    def __init__(self, held: Held, *, max_jobs: int | None) -> None:
        """`max_jobs`: after these the worker closes; None: no limit."""
        self.draining = False  # jobs save and are requeued
        self.closing = False  # jobs run to their end, and no more are taken
        self.num_taken = 0  # jobs of which it began to run ranks, without seats
        self.has_given_back = False  # all jobs, since the lease ran out
        self._held = held
        self._max_jobs = max_jobs
        self._saved_at = 0.0  # when the last job ended whose end is not in Redis yet

    def catch_signals(self) -> None:
        """SIGTERM: drain. SIGUSR1: close."""
        signal.signal(signal.SIGTERM, self._drain)
        signal.signal(signal.SIGUSR1, self._close)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _drain(self, *_: Any) -> None:
        self.draining = True

    def _close(self, *_: Any) -> None:
        self.closing = True

    @property
    def num_jobs(self) -> int:
        """How many jobs it has begun to run, or a part of them."""
        return self.num_taken + self._held.gangs.seats.num_begun

    def is_closing(self) -> bool:
        """Whether it takes no more jobs: on request, or as it has taken its number of them."""
        return self.closing or (self._max_jobs is not None and self.num_jobs >= self._max_jobs)

    def is_leaving(self) -> bool:
        """Whether it takes no more jobs, for any of the reasons."""
        return self.draining or self.is_closing()

    def has_closed(self) -> bool:
        """Whether it closes, and neither runs a job nor may receive another one."""
        is_idle = not self._held.taken and not self._held.mailbox.is_waiting
        return self.is_closing() and is_idle

    def is_done(self, down_since: float | None) -> bool:
        """Whether nothing is left to do, or nothing that can be done without Redis.

        Jobs whose end Redis did not receive stay started there. They are requeued later, and
        resume from their last checkpoint or finish with the result on disk. `down_since`: when
        Redis became unreachable; None: it is reachable.
        """
        attempts, seats = self._held.attempts, self._held.gangs.seats.taken
        has_seat = any(down_since is None or seat.settle is None for seat in seats)
        if down_since is None or not attempts:
            return not attempts and not has_seat
        if not all(attempt.has_ended for attempt in attempts):
            self._saved_at = clock()
            return False
        return clock() - max(down_since, self._saved_at) > _DRAIN_TIMEOUT_S

    def enforce_lease(self) -> None:
        """End all jobs before the lease runs out: after that, other machines may take them."""
        is_over = self.is_lease_over()
        if is_over and self._held.attempts and not self.has_given_back:
            log.error(
                "%s: could not renew its lease for %g s: ending its jobs, other workers may take "
                "them",
                self._held.name,
                self._held.lease.usable_s,
            )
        if is_over:
            for attempt in self._held.attempts:
                attempt.release()  # in every tick: a horse may have been forked just now
            self._held.gangs.seats.release()
        self.has_given_back = is_over

    def is_lease_over(self) -> bool:
        """Whether other workers may soon take its jobs."""
        return self._held.is_shared and self._held.lease.is_running_out()

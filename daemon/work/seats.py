"""The seats that a worker has in jobs that other nodes lead."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ...configs.labels import Labels, unmet
from ...jobs.errors import WarmdError
from ..host.messages import RunJob
from ..queue.gangs import Gangs
from ..queue.jobs import Job, JobStore
from .seat import Seat

log = logging.getLogger(__name__)


class Seats:
    """Takes seats, and reports their end."""

    def __init__(
        self, store: JobStore, worker: str, node: str, address: str | None, *, wait_s: float
    ) -> None:
        """`node`: the name of this node. `address`: where its ranks listen; None: it takes no seat.

        `wait_s`: after a job that cannot run here.
        """
        self.taken: list[Seat] = []
        self.num_begun = 0  # seats whose execution has begun
        self._store = store
        self._gangs = Gangs(store.connection)
        self._worker = worker
        self._node = node
        self._address = address
        self._wait_s = wait_s
        self._refused: tuple[str, float] = ("", 0.0)  # a job without a seat for this node, and when

    def take(self, job_id: str, labels: Labels, request: Callable[[Job], RunJob]) -> Seat | None:
        """Take a seat in the job that gathers, if there is one that this node can run.

        `labels`: of this node. `request`: makes the request for a horse; raises WarmdError.
        """
        now = time.monotonic()
        has_refused = self._refused[0] == job_id and now - self._refused[1] < self._wait_s
        if self._address is None or has_refused:
            return None
        gang, job = self._gangs.gang(job_id), self._store.fetch(job_id)
        if gang is None or job is None or unmet(gang.needs, labels):
            return None
        try:
            wanted = request(job)
        except (WarmdError, OSError, LookupError, TypeError, ValueError) as error:  # damaged
            log.info("%s: %s: takes no part: %r", job_id, self._worker, error)
            self._refused = job_id, now
            return None
        home_key = self._worker.split(":")[1]
        token = self._gangs.join(job_id, self._worker, home_key, self._node)
        if token is None:
            return None
        log.info("%s: %s: takes part, led by %s", job_id, self._worker, gang.node)
        seat = Seat(self._gangs, job, token, self._worker, self._node, wanted)
        self.taken.append(seat)
        return seat

    def release(self) -> None:
        """End the ranks of other nodes' jobs here: this worker's lease runs out."""
        for seat in self.taken:
            seat.leave()

    def settle(self) -> None:
        """Report the end of seats that have one. Raises RedisError."""
        for seat in list(self.taken):
            if seat.settle is not None:
                seat.settle()
                self.taken.remove(seat)

    def advance(self, *, is_stopping: bool, is_closing: bool) -> None:
        """Do what their gangs require now; arguments as for `Seat.advance`. Raises RedisError."""
        if self._address is not None:
            for seat in self.taken:
                had_begun = seat.has_begun
                seat.advance(self._address, is_stopping=is_stopping, is_closing=is_closing)
                self.num_begun += seat.has_begun and not had_begun

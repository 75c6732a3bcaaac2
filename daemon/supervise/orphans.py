"""Requeues the jobs of dead workers, of this daemon and of others that share its Redis."""

from __future__ import annotations

import logging
import time

from ..host.home import Home
from ..queue import keys
from ..queue.jobs import JobStore
from ..queue.workers import WorkerRegistry

log = logging.getLogger(__name__)

_CHECK_PERIOD_S = 3.0  # between two checks of the leases of other daemons' workers
_SCAN_PERIOD_S = 60.0  # between two scans for jobs of workers that are not registered


class Orphans:
    """The jobs of dead workers in one Redis."""

    def __init__(self, store: JobStore, home: Home) -> None:
        self._registry = WorkerRegistry(store)
        self._home = home
        self._checked_at = self._scanned_at = float("-inf")

    def requeue(self, worker: str, queue: str) -> None:
        """Requeue the jobs of a dead worker."""
        _log(self._registry.requeue_orphans(worker, queue), worker)

    def requeue_of_previous_run(self, url: str) -> None:
        """Requeue the jobs of all workers of this home, which only one daemon at a time can use.

        Uses its own connection, with a timeout that is long enough for many jobs.
        """
        with keys.connect(url) as connection:
            registry = WorkerRegistry(JobStore(connection))
            for worker, queue in registry.workers().items():
                if self._is_ours(worker):
                    _log(registry.requeue_orphans(worker, queue), worker)

    def requeue_of_other_daemons(self) -> None:
        """Requeue the jobs of other daemons' workers whose lease has expired; for the leader."""
        if time.monotonic() - self._checked_at < _CHECK_PERIOD_S:
            return
        self._checked_at = time.monotonic()
        for worker, queue in self._registry.silent().items():
            if not self._is_ours(worker):
                self.requeue(worker, queue)
        if time.monotonic() - self._scanned_at > _SCAN_PERIOD_S:
            _log(self._registry.requeue_unregistered(), "(not registered)")
            self._scanned_at = time.monotonic()

    def _is_ours(self, worker: str) -> bool:
        return worker.split(":")[1] == self._home.key


def _log(job_ids: list[str], worker: str) -> None:
    for job_id in job_ids:
        log.warning("%s: requeued, worker %s is dead", job_id, worker)

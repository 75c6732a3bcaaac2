"""This daemon as a node among those that share its Redis: heartbeats, and leaving.

A node that leaves takes no more jobs, lets the running ones end, and exits. Reasons:
`nodes --drain`, no job for `idle_exit`, or `max_jobs` taken.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence

from ... import __version__
from ...configs.config import DaemonConfig
from ...configs.labels import GANG_ADDRESS, GANG_SOFTWARE
from ...configs.queues import TRAIN
from ..host.home import Home
from ..host.machine import machine_labels, machine_name, node_name, software_label
from ..queue import sockets
from ..queue.election import Election
from ..queue.jobs import JobStore
from ..queue.nodes import BEAT_S, DRAINING, READY, STARTING, NodeRecord, NodeRegistry
from ..runs.rundir import SCHEMA
from .children import WorkerChild

log = logging.getLogger(__name__)

_FORGET_PERIOD_S = 600.0  # between two removals of nodes that were silent for long


class Membership:
    """The membership of one daemon among the nodes of its Redis."""

    def __init__(
        self,
        store: JobStore,
        config: DaemonConfig,
        home: Home,
        workers: Sequence[WorkerChild],
    ) -> None:
        self.name = node_name(home)
        self.labels = machine_labels(config.labels)
        self.election = Election(store.connection, self.name)
        self.leaving: str | None = None  # why it takes no more jobs
        self._config = config
        self._home = home
        self._workers = workers
        self._connection = store.connection
        self._registry = NodeRegistry(store.connection)
        self._run = secrets.token_hex(8)
        self._beat_at = float("-inf")
        self._busy_at = time.monotonic()  # when a job was last seen
        self._forget_at = time.monotonic()
        self._reported: object = None

    def join(self) -> None:
        """Delete an order to leave that an earlier run of this node did not carry out.

        Raises RedisError.
        """
        self._registry.withdraw_drain(self.name)

    def find_gang_address(self) -> None:
        """Find out where jobs of several nodes listen here, for the labels. Raises RedisError."""
        config = self._config
        trains = [worker for worker in config.workers if worker.queue == TRAIN]
        if config.gang_address is None or not trains:
            return
        if not any(worker.takes_part for worker in trains):
            log.warning(
                "gang_address: has no effect without a worker of queue train with isolation=fork "
                "and without a GPU (device=cpu)"
            )
            return
        if not config.is_shared or config.run_store is not None:
            log.warning("gang_address: has no effect without a shared Redis and a shared folder")
            return
        try:
            address = sockets.address_here(self._connection, config.gang_address)
        except OSError as error:
            log.error(
                "gang_address: must be an address of this machine, got %s: %s: no jobs of several "
                "nodes run here",
                config.gang_address,
                error,
            )
        else:
            self.labels = {**self.labels, GANG_ADDRESS: address, GANG_SOFTWARE: software_label()}

    @property
    def jobs_left(self) -> int | None:
        """How many more jobs the daemon may take; None: no limit."""
        most = self._config.max_jobs
        return None if most is None else max(most - self._num_taken(), 0)

    def has_left(self) -> bool:
        """Whether it is leaving and all its workers have ended."""
        return self.leaving is not None and all(w.process is None for w in self._workers)

    def update(self, *, is_ready: bool) -> None:
        """Send a heartbeat if one is due; if a reason to leave applies, close the workers.

        `is_ready`: all workers accept jobs. Raises RedisError.
        """
        now = time.monotonic()
        if self._jobs() or not is_ready:
            self._busy_at = now
        self._check_limits(now)
        if self.leaving is not None:
            for worker in self._workers:
                worker.close()
        record = self._record(is_ready)
        if now - self._beat_at >= BEAT_S or record != self._reported:
            if self._registry.beat(self.name, record, run=self._run):
                self._leave("drained on request")
            self._beat_at, self._reported = now, record
        if now > self._forget_at and self.election.is_leader():
            self._registry.forget_old()
            self._forget_at = now + _FORGET_PERIOD_S

    def end(self) -> None:
        """Leave the list of nodes. Raises RedisError."""
        self.election.resign()
        self._registry.leave(self.name, self._run)

    def _jobs(self) -> list[str]:
        return sorted(job for worker in self._workers for job in worker.held)

    def _num_taken(self) -> int:
        return sum(worker.taken for worker in self._workers)

    def _check_limits(self, now: float) -> None:
        idle_s = self._config.idle_exit_s
        if self.jobs_left == 0:
            self._leave(f"took {self._num_taken()} jobs (max_jobs: {self._config.max_jobs})")
        if idle_s is not None and now - self._busy_at >= idle_s:
            self._leave(f"had no job for {idle_s:g} s (idle_exit)")

    def _leave(self, reason: str) -> None:
        if self.leaving is None:
            log.info("node: %s %s: takes no more jobs", self.name, reason)
            self.leaving = reason

    def _record(self, is_ready: bool) -> NodeRecord:
        queues: dict[str, int] = {}
        for worker in self._config.workers:
            queues[worker.queue] = queues.get(worker.queue, 0) + worker.slots
        state = READY if is_ready else STARTING
        return NodeRecord(
            machine=machine_name(),
            version=__version__,
            schema=SCHEMA,
            labels=self.labels,
            queues=queues,
            pid=os.getpid(),
            home=str(self._home.path),
            state=DRAINING if self.leaving is not None else state,
            jobs=self._jobs(),
            jobs_taken=self._num_taken(),
        )

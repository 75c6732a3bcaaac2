"""This daemon as a node among those that share its Redis: heartbeats, and when it is to leave.

A node that leaves takes no more jobs, lets the running ones end, and exits. Reasons: `warmd drain`,
no job for `idle_exit`, or `max_jobs` taken.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection
from dataclasses import dataclass

from ... import __version__
from ...configs.config import DaemonConfig
from ..host.home import Home
from ..host.machine import machine_labels, machine_name, node_name
from ..queue.election import Election
from ..queue.jobs import JobStore
from ..queue.nodes import BEAT_S, DRAINING, READY, STARTING, NodeRecord, NodeRegistry
from ..runs.rundir import SCHEMA

log = logging.getLogger(__name__)

_FORGET_PERIOD_S = 600.0  # between two removals of nodes that were silent for long


@dataclass(frozen=True)
class Load:
    """What the workers of this daemon do."""

    jobs: list[str]  # that they hold
    taken: int  # jobs since the daemon was started
    is_ready: bool  # all workers accept jobs


class Membership:
    """The part of one daemon in the life of all."""

    def __init__(self, store: JobStore, config: DaemonConfig, home: Home) -> None:
        self.name = node_name(home)
        self.labels = machine_labels(config.labels)
        self.election = Election(store.connection, self.name)
        self.leaving: str | None = None  # why it takes no more jobs
        self._config = config
        self._home = home
        self._registry = NodeRegistry(store.connection)
        self._beat_at = float("-inf")
        self._busy_at = time.monotonic()  # when a job was last seen
        self._forget_at = time.monotonic()
        self._reported: object = None

    def join(self) -> None:
        """Drop the order to leave that an earlier run of this node did not live to obey.

        Raises RedisError.
        """
        self._registry.withdraw_drain(self.name)

    def update(self, load: Load) -> None:
        """Send a heartbeat if one is due, and find out whether to leave. Raises RedisError."""
        now = time.monotonic()
        if load.jobs or not load.is_ready:
            self._busy_at = now
        self._check_limits(load, now)
        record = self._record(load)
        if now - self._beat_at >= BEAT_S or record != self._reported:
            if self._registry.beat(self.name, record):
                self._leave("drained on request")
            self._beat_at, self._reported = now, record
        if now > self._forget_at and self.election.is_leader():
            self._registry.forget_old()
            self._forget_at = now + _FORGET_PERIOD_S

    def end(self) -> None:
        """Leave the list of nodes. Raises RedisError."""
        self.election.resign()
        self._registry.remove(self.name)

    def _check_limits(self, load: Load, now: float) -> None:
        most, idle_s = self._config.max_jobs, self._config.idle_exit_s
        if most is not None and load.taken >= most:
            self._leave(f"took {load.taken} jobs (max_jobs: {most})")
        if idle_s is not None and now - self._busy_at >= idle_s:
            self._leave(f"had no job for {idle_s:g} s (idle_exit)")

    def _leave(self, reason: str) -> None:
        if self.leaving is None:
            log.info("node: %s %s: takes no more jobs", self.name, reason)
            self.leaving = reason

    def _record(self, load: Load) -> NodeRecord:
        queues: dict[str, int] = {}
        for worker in self._config.workers:
            queues[worker.queue] = queues.get(worker.queue, 0) + worker.slots
        state = READY if load.is_ready else STARTING
        return NodeRecord(
            machine=machine_name(),
            version=__version__,
            schema=SCHEMA,
            labels=self.labels,
            queues=queues,
            pid=os.getpid(),
            home=str(self._home.path),
            state=DRAINING if self.leaving is not None else state,
            jobs=sorted(load.jobs),
            jobs_taken=load.taken,
        )


def load_of(held: Collection[tuple[list[str], int]], *, is_ready: bool) -> Load:
    """Add up what the workers hold: the jobs of each, and how many it has taken."""
    jobs = [job for own, _ in held for job in own]
    return Load(jobs, sum(taken for _, taken in held), is_ready)

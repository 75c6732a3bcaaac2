"""Queues jobs that are due: scheduled jobs whose time has come, deferred jobs that may run.

The scheduled time is measured by Redis' clock. A job that finishes queues its dependents in the
same transaction. The scan of deferred jobs covers what that misses, such as a removed dependency;
each call scans a limited number, so its cost does not depend on how many wait.
"""

from __future__ import annotations

from ...configs.queues import QUEUES
from . import keys, others
from .rq_format import DeferredJobRegistry, Job, ScheduledJobRegistry, ready_key
from .waiting import Waiting

_BATCH = 100  # jobs per queue and registry

_Member = tuple[str, bytes]  # the key of a registry, and a member


class DueJobs:
    """Scans the scheduled and deferred jobs, a batch per call."""

    def __init__(self, store: Waiting) -> None:
        self._store = store
        self._cursors: dict[str, int] = {}  # ZSCAN cursor of each registry of deferred jobs

    def enqueue(self) -> None:
        """Queue jobs that are due, a few hundred at most; two round trips if there are none."""
        scheduled, deferred = self._scan()
        jobs = self._jobs(scheduled)
        waiting = self._jobs(deferred)
        jobs += [
            job for job, is_met in zip(waiting, self._store.are_met(waiting), strict=True) if is_met
        ]
        for job in jobs:
            self._store.release(job)

    def _scan(self) -> tuple[list[_Member], list[_Member]]:
        """Return the scheduled jobs whose time has come, and the next batch of deferred jobs."""
        now = self._store.clock()
        scheduled = [ScheduledJobRegistry.key_template.format(name) for name in QUEUES]
        deferred = [DeferredJobRegistry.key_template.format(name) for name in QUEUES]
        deferred += map(ready_key, QUEUES)  # tools of RQ 3 defer a job until their maintenance
        with self._store.connection.pipeline(transaction=False) as pipeline:
            for key in scheduled:
                pipeline.zrangebyscore(key, 0, now, start=0, num=_BATCH)
            for key in deferred:
                pipeline.zscan(key, self._cursors.get(key, 0), count=_BATCH)
            due, scans = (found := pipeline.execute())[: len(scheduled)], found[len(scheduled) :]
        self._cursors = {key: cursor for key, (cursor, _) in zip(deferred, scans, strict=True)}
        return (
            [(key, id) for key, ids in zip(scheduled, due, strict=True) for id in ids],
            [(key, id) for key, (_, ids) in zip(deferred, scans, strict=True) for id, _ in ids],
        )

    def _jobs(self, members: list[_Member]) -> list[Job]:
        """Fetch warmd's jobs of registry members; members without a job are removed."""
        foreign = others.among(self._store.connection, [id for _, id in members])
        members = [member for member in members if member[1] not in foreign]
        jobs = self._store.fetch_many([keys.text(id) for _, id in members]) if members else []
        for (key, id), job in zip(members, jobs, strict=True):
            if job is None:
                self._store.connection.zrem(key, id)
        return [job for job in jobs if job is not None]

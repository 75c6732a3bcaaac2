"""Waiting jobs whose wait is over: the scheduled ones by the server's clock, and the deferred ones.

A finished job queues those behind it in the transaction of its end. Looking through the deferred
ones is for what that cannot see, such as a removed job, and goes through few of them at a time: a
turn costs the same however many wait.
"""

from __future__ import annotations

from rq.job import Job
from rq.registry import DeferredJobRegistry, ScheduledJobRegistry

from ...configs.queues import QUEUES
from . import keys
from .jobs import JobStore

_AT_ONCE = 100  # of each queue and each sort

_Member = tuple[str, bytes]  # a registry's key, and what stands in it


class Due:
    """Goes round through the jobs that wait."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._cursors: dict[str, int] = {}  # in each registry of deferred jobs

    def move(self) -> None:
        """Queue what is due, a few hundred jobs at most. Two round trips when nobody waits."""
        scheduled, deferred = self._look()
        jobs = self._jobs(scheduled)
        behind = self._jobs(deferred)
        jobs += [
            job for job, is_met in zip(behind, self._store.are_met(behind), strict=True) if is_met
        ]
        for job in jobs:
            self._store.release(job)

    def _look(self) -> tuple[list[_Member], list[_Member]]:
        """Those scheduled jobs whose time has come, and the next ones among the deferred."""
        now = self._store.clock()
        scheduled = [ScheduledJobRegistry.key_template.format(name) for name in QUEUES]
        deferred = [DeferredJobRegistry.key_template.format(name) for name in QUEUES]
        with self._store.connection.pipeline(transaction=False) as pipeline:
            for key in scheduled:
                pipeline.zrangebyscore(key, 0, now, start=0, num=_AT_ONCE)
            for key in deferred:
                pipeline.zscan(key, self._cursors.get(key, 0), count=_AT_ONCE)
            due, scans = (found := pipeline.execute())[: len(scheduled)], found[len(scheduled) :]
        self._cursors = {key: cursor for key, (cursor, _) in zip(deferred, scans, strict=True)}
        return (
            [(key, id) for key, ids in zip(scheduled, due, strict=True) for id in ids],
            [(key, id) for key, (_, ids) in zip(deferred, scans, strict=True) for id, _ in ids],
        )

    def _jobs(self, members: list[_Member]) -> list[Job]:
        """The jobs of members of registries; what is no job is taken out."""
        jobs = self._store.fetch_many([keys.text(id) for _, id in members]) if members else []
        for (key, id), job in zip(members, jobs, strict=True):
            if job is None:
                self._store.connection.zrem(key, id)
        return [job for job in jobs if job is not None]

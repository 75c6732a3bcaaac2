"""Pausing and continuing jobs.

A running job is held: it stays started, with the request in its hash. Any other job is parked:
scheduled for a date that never comes, until `unpause`.
"""

from __future__ import annotations

from typing import Any

from redis.client import Pipeline

from . import keys
from .records import NEVER, WAITING, text_or_none
from .rq_format import Job, JobStatus, leave_all
from .set_aside import SetAside
from .transactions import change

_PAUSE_FIELDS = (keys.FIELD_PAUSE, keys.FIELD_PAUSED_AT)


class Pausing(SetAside):
    """The changes of a job's state for pausing and continuing."""

    def request_pause(self, job: Job, how: str) -> bool:
        """Request that a started job waits in memory ("hold"), or saves and ends ("release")."""
        return self._request(job, lambda p: self._write_pause(job, how, p))

    def withdraw_pause(self, job: Job) -> bool:
        """Continue a held job; False if it is not started."""
        return self._request(job, lambda p: p.hdel(job.key, *_PAUSE_FIELDS))

    def pause_of(self, job: Job) -> str | None:
        """The requested pause that is still in effect: "hold" or "release"."""
        return text_or_none(self.connection.hget(job.key, keys.FIELD_PAUSE))

    def pause_waiting(self, job: Job) -> bool:
        """Park a waiting job until `unpause`; False if it does not wait."""

        needs = self.needs_of(job)

        def write(pipeline: Pipeline) -> None:
            leave_all(job, pipeline)
            self._leave_set_aside(job, pipeline, needs)
            for dependency in job._dependency_ids:
                # Otherwise the end of the dependency would queue the job.
                pipeline.srem(Job.dependents_key_for(dependency), job.id)
            if due is not None and due < NEVER:
                pipeline.hset(job.key, keys.FIELD_DUE, due)
            self._put_away(job, pipeline)

        due: Any = self.connection.zscore(self._scheduled(job).key, job.id)
        return bool(change(self.connection, job, WAITING, write))

    def unpause(self, job: Job) -> JobStatus | None:
        """Return a parked job to the front of its queue, or to its earlier wait.

        Returns its status then, before a worker takes it; None if it is not parked.
        """
        raw: Any = self.connection.hget(job.key, keys.FIELD_DUE)
        due = float(raw or 0)
        is_early = due > self.clock()
        # If the dependencies finish just now, `DueJobs` queues it soon.
        is_deferred = not self.are_met([job])[0]

        def write(pipeline: Pipeline) -> None:
            pipeline.hdel(job.key, *_PAUSE_FIELDS, keys.FIELD_DUE)
            if is_early:
                pipeline.zadd(self._scheduled(job).key, {job.id: due})
            elif is_deferred:
                self._defer(job, pipeline)
            else:
                self._push(job, pipeline, front=True)

        if self.pause_of(job) is None:
            return None
        if not change(self.connection, job, (JobStatus.SCHEDULED,), write):
            return None
        if is_early:
            return JobStatus.SCHEDULED
        return JobStatus.DEFERRED if is_deferred else JobStatus.QUEUED

"""Jobs in Redis: every change of a job's state, in RQ's own data structures.

A job is always in exactly one place, and each move is one transaction:

  queue ──pop──> taken by a worker ──begin──> started ──finish/fail/stop──> its registry
   ^ ^                   │                        │
   │ └─ requeue_orphans ─┴── requeue(_orphans) ───┤
   └─ unpause ─────────── paused <────────────────┘ (if a pause was requested)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

import redis
from redis.client import Pipeline

from ...configs.labels import SCHEMA as SCHEMA_LABEL, line_of
from ..runs.rundir import SCHEMA
from . import job_index, keys
from .executions import (
    ControlRequests as ControlRequests,
    Executions,
    StartedExecution as StartedExecution,
)
from .ordering import Ordering
from .pausing import Pausing
from .records import ENDED as ENDED, NEVER as NEVER, TRANSIENT_FIELDS, WAITING as WAITING
from .rq_format import (
    BaseRegistry,
    CanceledJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    Job as Job,
    JobStatus as JobStatus,
    Result,
    leave_all,
    status_of as status_of,
    utcformat,
)
from .transactions import add, change

# A job that a foreign RQ worker takes by mistake fails there: it cannot import the job's function.
# RQ then schedules it again, up to this many times and after this many seconds.
_STRAY_RETRIES = 1000
_STRAY_RETRY_S = 2


@dataclass(frozen=True)
class EndedJob:
    """An ended job as recorded in its run directory; times in unix seconds."""

    job_id: str
    queue: str
    status: JobStatus
    created_at: float
    ended_at: float
    executions: int
    from_cli: bool
    needs: Mapping[str, str]


class JobStore(Executions, Pausing, Ordering):
    """All jobs of one Redis."""

    def enqueue(
        self,
        job_id: str,
        queue: str,
        *,
        front: bool = False,
        after: str | None = None,
        at: datetime | None = None,
        retries: int = 0,
        timeout_s: float | None = None,
        from_cli: bool = False,
        needs: Mapping[str, str] | None = None,
    ) -> None:
        """Add a job: to its queue, deferred until `after` has finished, or scheduled for `at`.

        With both, it is scheduled first and deferred at that time if `after` has not finished.
        `from_cli`: submitted from the command line; commands without a job id consider only such
        jobs. `needs`: the labels that its node must have.
        """
        self._publish(job_id)
        target = self.queue(queue)
        status = JobStatus.QUEUED if at is None else JobStatus.SCHEDULED
        job = self._new_job(job_id, queue, status, after=after, timeout_s=timeout_s)
        job.created_at = self.now()
        job.retries_left, job.retry_intervals = _STRAY_RETRIES, [_STRAY_RETRY_S]
        job.enqueue_at_front = front
        fields: dict[Any, Any] = {keys.FIELD_RETRIES: retries, keys.FIELD_NEEDS: _needs_line(needs)}

        def write(pipeline: Pipeline) -> None:
            if at is not None:
                target.schedule_job(job, at, pipeline=pipeline)
                # RQ cuts the time to whole seconds: the job would begin up to a second early.
                pipeline.zadd(self._scheduled(job).key, {job.id: at.timestamp()})
            else:
                target.enqueue_job(job, pipeline=pipeline, at_front=front)
                if job.get_status(refresh=False) == JobStatus.QUEUED:
                    fields["enqueued_at"] = utcformat(self.now())  # RQ's is this machine's
            pipeline.hset(job.key, mapping=fields)
            job_index.created(pipeline, job, from_cli=from_cli)

        add(self.connection, job, write)

    def restore(
        self,
        job_id: str,
        queue: str,
        *,
        asked: Mapping[str, Any],
        from_cli: bool,
        needs: Mapping[str, str],
        created_at: float,
        executions: int,
        paused_at: float | None,
        is_deferred: bool,
    ) -> bool:
        """Add a waiting job as recorded in its run directory; False if Redis has it already.

        `asked`: `front`, `after`, `at` (ISO 8601), `retries` and `timeout_s` as for `enqueue`.
        `paused_at`: in unix seconds; it is parked then. `is_deferred`: `after` is added later.
        """
        self._publish(job_id)
        after, timeout_s = asked.get("after"), asked.get("timeout_s")
        job = self._new_job(job_id, queue, JobStatus.QUEUED, after=after, timeout_s=timeout_s)
        job.created_at = datetime.fromtimestamp(created_at, UTC)
        job.retries_left, job.retry_intervals = _STRAY_RETRIES, [_STRAY_RETRY_S]
        job.enqueue_at_front = is_front = bool(asked.get("front"))
        at = asked.get("at")
        due = 0.0 if at is None else datetime.fromisoformat(at).timestamp()
        is_early, is_met = due > self.clock(), self.are_met([job])[0]
        fields: dict[Any, Any] = {
            keys.FIELD_RETRIES: int(asked.get("retries") or 0),
            keys.FIELD_NEEDS: _needs_line(needs),
            keys.FIELD_EXECUTION: executions,
        }

        def write(pipeline: Pipeline) -> None:
            job.save(pipeline=pipeline)
            pipeline.hset(job.key, mapping=fields)
            pipeline.sadd(self.queue(queue).redis_queues_keys, self.queue(queue).key)
            job_index.created(pipeline, job, from_cli=from_cli)
            if paused_at is not None:
                pipeline.hset(job.key, keys.FIELD_PAUSED_AT, str(paused_at))
                if is_early:
                    pipeline.hset(job.key, keys.FIELD_DUE, due)
                self._put_away(job, pipeline)
            elif is_early:
                pipeline.zadd(self._scheduled(job).key, {job.id: due})
                pipeline.hset(job.key, "status", JobStatus.SCHEDULED)
            elif is_deferred or not is_met:
                self._defer(job, pipeline)
            else:
                self._push(job, pipeline, front=is_front)

        return add(self.connection, job, write, only_new=True)

    def enqueue_again(
        self, job: Job, *, front: bool = False, needs: Mapping[str, str] | None = None
    ) -> bool:
        """Queue an ended job again; False if it is not ended.

        `needs`: the labels that its node must have; None: those of before.
        """
        self._publish(job.id)

        def write(pipeline: Pipeline) -> None:
            leave_all(job, pipeline)
            job.ended_at = job._exc_info = None
            pipeline.hdel(job.key, *TRANSIENT_FIELDS, "exc_info")
            if needs is not None:
                pipeline.hset(job.key, keys.FIELD_NEEDS, _needs_line(needs))
            job_index.revived(pipeline, job)
            self._push(job, pipeline, front=front)

        return bool(change(self.connection, job, ENDED, write))

    def _publish(self, job_id: str) -> None:
        """Make the run directory known to all machines, before one of them takes the job."""
        if self.remote is not None:
            self.remote.publish(job_id)

    def refresh(self, job_id: str) -> None:
        """Update a job's run directory on this machine, except weights. Raises StoreUnavailable."""
        if self.remote is not None:
            self.remote.refresh(job_id)

    def refresh_ended(self, job: Job) -> None:
        """The same for a training that has ended, once per end: nothing is uploaded after it."""
        is_known = job.id in self._refreshed and self._refreshed[job.id] == job.ended_at
        if self.remote is None or is_known:
            return
        self.remote.refresh(job.id)
        self._refreshed[job.id] = job.ended_at

    def release(self, job: Job) -> None:
        """Queue a job whose start time has come or whose dependencies have finished.

        A scheduled job with unfinished dependencies becomes deferred. Dependencies are checked
        again afterwards: one that finishes in between must not leave the job deferred.
        """
        if not self.are_met([job])[0]:
            change(self.connection, job, (JobStatus.SCHEDULED,), partial(self._defer, job))
        if self.are_met([job])[0]:
            is_front = bool(job.enqueue_at_front)

            def write(pipeline: Pipeline) -> None:
                self._push(job, pipeline, front=is_front)

            change(self.connection, job, (JobStatus.SCHEDULED, JobStatus.DEFERRED), write)

    def request_stop(self, job: Job, how: str) -> bool:
        """Request that a started job is stopped ("cancel") or killed ("kill")."""
        return self._request(job, lambda p: p.hset(job.key, keys.FIELD_STOP, how))

    def cancel_waiting(self, job: Job) -> bool:
        """Cancel a waiting job; False if it does not wait."""
        return self.end_waiting(job, JobStatus.CANCELED, self.now())

    def end_waiting(self, job: Job, status: JobStatus, ended_at: datetime) -> bool:
        """End a waiting job without a result; False if it does not wait."""

        needs = self.needs_of(job)

        def write(pipeline: Pipeline) -> None:
            leave_all(job, pipeline)
            self._leave_set_aside(job, pipeline, needs)
            job._status, job.ended_at = status, ended_at  # some registries save the job
            fields: dict[Any, Any] = {"status": status, "ended_at": utcformat(ended_at)}
            pipeline.hset(job.key, mapping=fields)
            pipeline.hdel(job.key, *TRANSIENT_FIELDS)
            self._registry_of(job, status).add(job, ttl=-1, pipeline=pipeline)
            job_index.ended(pipeline, job, status, ended_at)

        return bool(change(self.connection, job, WAITING, write))

    def note_executions(self, job: Job, number: int) -> None:
        """Set the number of executions of a job that have begun."""
        self.connection.hset(job.key, keys.FIELD_EXECUTION, str(number))

    def remove(self, job: Job) -> bool:
        """Delete an ended job and all its data in Redis; False if it is not ended."""

        def write(pipeline: Pipeline) -> None:
            job.delete(pipeline=pipeline, remove_from_queue=False)
            pipeline.delete(Result.get_key(job.id), keys.events(job.id))
            job_index.removed(pipeline, job.id)

        return bool(change(self.connection, job, ENDED, write))

    def adopt_many(self, ended: Sequence[EndedJob]) -> list[str]:
        """Add ended jobs in one transaction, without those that Redis has; return the added."""
        names = [one.job_id for one in ended]
        while True:
            with self.connection.pipeline() as pipeline:
                pipeline.watch(*map(Job.key_for, names))
                with self.connection.pipeline(transaction=False) as reading:
                    for name in names:
                        reading.exists(Job.key_for(name))
                    known = reading.execute()
                new = [one for one, is_known in zip(ended, known, strict=True) if not is_known]
                pipeline.multi()
                for one in new:
                    self._write_ended(one, pipeline)
                try:
                    pipeline.execute()
                except redis.WatchError:  # one was added just now
                    continue
                return [one.job_id for one in new]

    def _write_ended(self, one: EndedJob, pipeline: Pipeline) -> None:
        job = self._new_job(one.job_id, one.queue, one.status)
        job.created_at = datetime.fromtimestamp(one.created_at, UTC)
        ended_at = job.ended_at = datetime.fromtimestamp(one.ended_at, UTC)
        job.save(pipeline=pipeline)
        pipeline.hset(job.key, keys.FIELD_EXECUTION, str(one.executions))
        pipeline.hset(job.key, keys.FIELD_NEEDS, _needs_line(one.needs))
        self._registry_of(job, one.status).add(job, ttl=-1, pipeline=pipeline)
        job_index.created(pipeline, job, from_cli=one.from_cli)
        job_index.ended(pipeline, job, one.status, ended_at)

    def _new_job(
        self,
        job_id: str,
        queue: str,
        status: JobStatus,
        *,
        after: str | None = None,
        timeout_s: float | None = None,
    ) -> Job:
        job = self.queue(queue).create_job(
            keys.JOB_FUNCTION,
            args=(job_id,),
            job_id=job_id,
            description=job_id,
            timeout=-1 if timeout_s is None else timeout_s,  # type: ignore[arg-type]
            result_ttl=-1,
            failure_ttl=-1,
            depends_on=after,
            status=status,
        )
        return cast(Job, job)  # the class of the queue's jobs

    def _registry_of(self, job: Job, status: JobStatus) -> BaseRegistry:
        registries = {
            JobStatus.FINISHED: FinishedJobRegistry,
            JobStatus.CANCELED: CanceledJobRegistry,
        }
        # RQ keeps stopped jobs in the registry of failed ones.
        return registries.get(status, FailedJobRegistry)(job.origin, connection=self.connection)


def _needs_line(needs: Mapping[str, str] | None) -> str:
    """The needs as a line; every job needs a node that reads this version's run directories."""
    return line_of({**(needs or {}), SCHEMA_LABEL: str(SCHEMA)})

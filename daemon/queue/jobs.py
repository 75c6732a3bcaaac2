"""The jobs of one Redis, in RQ's own data structures: adding, resuming and removing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import redis
from redis.client import Pipeline

from ...configs.labels import line_of
from . import keys
from .claims import (
    Claims,
    ControlRequests as ControlRequests,
    StartedExecution as StartedExecution,
)
from .records import NEVER as NEVER
from .rq_format import (
    Job as Job,
    JobStatus as JobStatus,
    Result,
    leave_all,
    status_of as status_of,
    utcformat,
)
from .states import ENDED as ENDED, WAITING as WAITING, follow, move
from .waiting import Waiting

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


class JobStore(Claims, Waiting):
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
        target = self.queue(queue)
        status = JobStatus.QUEUED if at is None else JobStatus.SCHEDULED
        job = self._new_job(job_id, queue, status, after=after, timeout_s=timeout_s)
        job.created_at = self.now()
        job.retries_left, job.retry_intervals = _STRAY_RETRIES, [_STRAY_RETRY_S]
        job.enqueue_at_front = front
        fields: dict[Any, Any] = {
            keys.FIELD_RETRIES: retries,
            keys.FIELD_NEEDS: line_of(needs or {}),
        }

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

        move(self.connection, job, "submit", write, from_cli=from_cli)

    def restore(
        self,
        job_id: str,
        queue: str,
        *,
        front: bool,
        after: str | None,
        at: datetime | None,
        retries: int,
        timeout_s: float | None,
        from_cli: bool,
        needs: Mapping[str, str],
        created_at: float,
        executions: int,
        paused_at: float | None,
        is_deferred: bool,
    ) -> bool:
        """Add a waiting job as recorded in its run directory; False if Redis has it already.

        `front` to `needs` as for `enqueue`.
        `paused_at`: in unix seconds; it is parked then. `is_deferred`: `after` is added later.
        """
        job = self._new_job(job_id, queue, JobStatus.QUEUED, after=after, timeout_s=timeout_s)
        job.created_at = datetime.fromtimestamp(created_at, UTC)
        job.retries_left, job.retry_intervals = _STRAY_RETRIES, [_STRAY_RETRY_S]
        job.enqueue_at_front = front
        due = 0.0 if at is None else at.timestamp()
        is_early, is_met = due > self.clock(), self.are_met([job])[0]
        fields: dict[Any, Any] = {
            keys.FIELD_RETRIES: retries,
            keys.FIELD_NEEDS: line_of(needs or {}),
            keys.FIELD_EXECUTION: executions,
        }

        def write(pipeline: Pipeline) -> None:
            job.save(pipeline=pipeline)
            pipeline.hset(job.key, mapping=fields)
            pipeline.sadd(self.queue(queue).redis_queues_keys, self.queue(queue).key)
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
                self._push(job, pipeline, front=front)

        added = move(self.connection, job, "restore", write, from_cli=from_cli, only_new=True)
        return added is not None

    def enqueue_again(
        self, job: Job, *, front: bool = False, needs: Mapping[str, str] | None = None
    ) -> bool:
        """Queue an ended job again; False if it is not ended.

        `needs`: the labels that its node must have; None: those of before.
        """

        def write(pipeline: Pipeline) -> None:
            leave_all(job, pipeline)
            job.ended_at = job._exc_info = None
            if needs is not None:
                pipeline.hset(job.key, keys.FIELD_NEEDS, line_of(needs or {}))
            self._push(job, pipeline, front=front)

        return move(self.connection, job, "resume", write) is not None

    def note_executions(self, job: Job, number: int) -> None:
        """Set the number of executions of a job that have begun."""
        self.connection.hset(job.key, keys.FIELD_EXECUTION, str(number))

    def remove(self, job: Job) -> bool:
        """Delete an ended job and all its data in Redis; False if it is not ended."""

        def write(pipeline: Pipeline) -> None:
            job.delete(pipeline=pipeline, remove_from_queue=False)
            pipeline.delete(Result.get_key(job.id), keys.events(job.id))

        return move(self.connection, job, "remove", write) is not None

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
        job.ended_at = datetime.fromtimestamp(one.ended_at, UTC)
        job.save(pipeline=pipeline)
        pipeline.hset(job.key, keys.FIELD_EXECUTION, str(one.executions))
        pipeline.hset(job.key, keys.FIELD_NEEDS, line_of(one.needs))
        self._registry_of(job, one.status).add(job, ttl=-1, pipeline=pipeline)
        follow(pipeline, job, "record", to=one.status, from_cli=one.from_cli)

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

"""Executions: the changes of a job's state by a worker, from taking it to its end.

An execution is a worker's claim to a job. Only its holder can end it, and only while Redis still
has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.client import Pipeline

from ...jobs.user_code import tracebacks
from . import job_index, keys, totals
from .records import EXECUTION_FIELDS, TRANSIENT_FIELDS, JobRecords, text_or_none
from .rq_format import (
    Execution,
    FinishedJobRegistry,
    Job,
    JobStatus,
    Result,
    begin as begin_execution,
    take_dependents,
    utcformat,
)
from .transactions import change, end

# RQ fails a started job whose heartbeat is late, and does so even when a registry is counted: after
# a night of sleep every running job would fail. Leases detect dead workers instead (lease.py).
_NEVER_S = 10 * 365 * 86_400


@dataclass(frozen=True)
class StartedExecution:
    """An execution that was started just now."""

    claim: Execution
    number: int  # of this execution, from 1
    kills: int  # earlier deaths of the job's horse in a row
    suspect: bool  # a horse died that ran this job and others
    retries_left: int
    retried: int  # how often it has been tried again
    control: ControlRequests


@dataclass(frozen=True)
class ControlRequests:
    """What users currently request of a started job."""

    stop: str | None  # "cancel" or "kill"
    pause: str | None  # "hold" or "release"
    has_claim: bool = True  # whether the execution is still the current one


class Executions(JobRecords):
    """The changes of a job's state that its worker makes."""

    def begin(self, popped: bytes, queue: str, worker: str) -> tuple[Job, StartedExecution] | None:
        """Start an execution of a job that was popped for the worker.

        Returns None if there is nothing to start: the job was canceled, or is not a job.
        """
        job = self.fetch(keys.text(popped))
        begun: list[Any] = []

        def write(pipeline: Pipeline) -> None:
            assert job is not None
            pipeline.lrem(keys.taken(worker), 1, job.id)
            begun[:] = [begin_execution(job, worker, _NEVER_S, pipeline)]
            job.started_at = self.now()
            pipeline.hset(job.key, "started_at", utcformat(job.started_at))
            totals.begun(pipeline, job)
            job_index.revived(pipeline, job)  # RQ's own tools can requeue ended jobs
            pipeline.hdel(job.key, keys.FIELD_WAITS)
            pipeline.hincrby(job.key, keys.FIELD_EXECUTION, 1)
            pipeline.hmget(job.key, *EXECUTION_FIELDS, keys.FIELD_RETRIES, keys.FIELD_RETRIED)

        if job is not None and job.origin == queue:
            results = change(self.connection, job, (JobStatus.QUEUED,), write)
            if results:
                number, (kills, suspect, stop, pause, retries, retried) = results[-2:]
                orders = ControlRequests(text_or_none(stop), text_or_none(pause))
                left = (job.retries_left or 0) if retries is None else int(retries)
                noted = int(kills or 0), suspect is not None, left, int(retried or 0)
                return job, StartedExecution(begun[0], number, *noted, orders)
        raw: Any = popped  # redis-py's annotation allows str only
        self.connection.lrem(keys.taken(worker), 1, raw)
        return None

    def control_requests(self, started: Sequence[tuple[Job, Execution]]) -> list[ControlRequests]:
        """What users request of started jobs, in one round trip."""
        with self.connection.pipeline(transaction=False) as pipeline:
            for job, claim in started:
                pipeline.hmget(job.key, keys.FIELD_STOP, keys.FIELD_PAUSE)
                pipeline.zscore(job.started_job_registry.key, claim.composite_key)
            found = pipeline.execute()
        return [
            ControlRequests(text_or_none(stop), text_or_none(pause), score is not None)
            for (stop, pause), score in zip(found[::2], found[1::2], strict=True)
        ]

    def note_wait(self, job: Job, what: str | None) -> None:
        """Note what a started job waits for, for those who list jobs; None: nothing any more."""
        if what is None:
            self.connection.hdel(job.key, keys.FIELD_WAITS)
        else:
            self.connection.hset(job.key, keys.FIELD_WAITS, what)

    def finish(self, job: Job, execution: Execution, result: dict[str, Any]) -> bool:
        """Finish a job. False if the execution was no longer the current one."""

        dependents: list[Job] = []

        def take(pipeline: Pipeline) -> None:
            dependents[:] = take_dependents(job, fetch, pipeline)

        def write(pipeline: Pipeline) -> None:
            job.ended_at = self.now()
            job._status = JobStatus.FINISHED
            job.save(pipeline=pipeline, include_meta=False, include_result=False)
            totals.ended(pipeline, job, JobStatus.FINISHED)
            pipeline.hdel(job.key, *TRANSIENT_FIELDS)
            self._record(job, execution, Result.Type.SUCCESSFUL, pipeline, return_value=result)
            registry = FinishedJobRegistry(job.origin, connection=self.connection)
            registry.add(job, -1, pipeline)
            job_index.ended(pipeline, job, JobStatus.FINISHED, job.ended_at)
            for dependent in dependents:
                self._push(dependent, pipeline, front=bool(dependent.enqueue_at_front))

        fetch = partial(self.fetch_many, any_queue=True)
        return end(self.connection, job, execution, write, watching=take)

    def fail(self, job: Job, execution: Execution, error: str) -> bool:
        """Fail a job; `error` is a message or a traceback, whose last line is the message."""
        return self._give_up(job, execution, JobStatus.FAILED, Result.Type.FAILED, error)

    def stop(self, job: Job, execution: Execution, reason: str) -> bool:
        """Stop a job on request."""
        return self._give_up(job, execution, JobStatus.STOPPED, Result.Type.STOPPED, reason)

    def _give_up(
        self, job: Job, execution: Execution, status: JobStatus, type: Result.Type, error: str
    ) -> bool:
        error = tracebacks.cut(error, tracebacks.MOST_TRACE)

        def write(pipeline: Pipeline) -> None:
            job.ended_at = self.now()
            job._status = status
            # RQ keeps stopped jobs in the registry of failed ones.
            job.failed_job_registry.add(job, ttl=-1, exc_string=error, pipeline=pipeline)
            pipeline.hset(job.key, "exc_info", error)
            totals.ended(pipeline, job, status)
            pipeline.hdel(job.key, *TRANSIENT_FIELDS)
            self._record(job, execution, type, pipeline, exc_string=error)
            job_index.ended(pipeline, job, status, job.ended_at)

        return end(self.connection, job, execution, write)

    def requeue(
        self,
        job: Job,
        execution: Execution,
        *,
        reason: totals.Reason = "requested",
        retry_in_s: float | None = None,
        kills: int | None = None,
        suspect: bool = False,
    ) -> bool:
        """Put a started job back at the front of its queue, to resume from its checkpoint.

        If a pause was requested, it is parked instead (see `pausing`). `kills`: deaths of its horse
        in a row. `suspect`: its horse died while it ran other jobs too. `reason`: what ended the
        execution. `retry_in_s`: uses one of its retries, and begins after this time.
        """
        retries = None if retry_in_s is None else self.retries_left(job) - 1
        due = None if retry_in_s is None else self.clock() + retry_in_s

        def note(pipeline: Pipeline) -> None:
            totals.requeued(pipeline, job, reason)
            if retries is not None:
                pipeline.hset(job.key, keys.FIELD_RETRIES, retries)
                pipeline.hincrby(job.key, keys.FIELD_RETRIED, 1)
            if kills is not None:
                pipeline.hset(job.key, keys.FIELD_KILLS, kills)
            if suspect:
                pipeline.hset(job.key, keys.FIELD_SUSPECT, 1)

        def push(pipeline: Pipeline) -> None:
            note(pipeline)
            if due is None:
                self._push(job, pipeline, front=True)
                return
            job.enqueue_at_front = True
            job._status = JobStatus.SCHEDULED
            job.save(pipeline=pipeline, include_meta=False, include_result=False)
            pipeline.zadd(self._scheduled(job).key, {job.id: due})

        def put_away(pipeline: Pipeline) -> None:
            note(pipeline)
            job.save(pipeline=pipeline, include_meta=False, include_result=False)
            self._put_away(job, pipeline)

        return end(self.connection, job, execution, push, if_paused=put_away)

    def _record(
        self, job: Job, execution: Execution, type: Result.Type, pipeline: Pipeline, **what: Any
    ) -> None:
        Result.create(
            job,
            type,
            -1,
            worker_name=execution.worker_name,
            pipeline=pipeline,
            execution_id=execution.id,
            execution_started_at=execution.created_at,
            execution_ended_at=job.ended_at,
            **what,
        )

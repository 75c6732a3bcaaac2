"""Claims: the moves of a job by a worker, from taking it to the end of the execution.

An execution is a worker's claim to a job. Only its holder can end it, and only while Redis still
has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.client import Pipeline

from ...configs.labels import line_of, model_need
from ...jobs.user_code import tracebacks
from . import keys, totals
from .records import JobRecords, text_or_none
from .rq_format import (
    Execution,
    FinishedJobRegistry,
    Job,
    JobStatus,
    Result,
    begin as begin_execution,
    mark_queued,
    take_dependents,
    utcformat,
)
from .states import EXECUTION_FIELDS, MOVES, move, move_claimed

# RQ fails a started job whose heartbeat is late, and does so even when a registry is counted: after
# a night of sleep every running job would fail. Leases detect dead workers instead (workers.py).
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


class Claims(JobRecords):
    """The moves of a job that its worker makes."""

    def begin(self, popped: bytes, queue: str, worker: str) -> tuple[Job, StartedExecution] | None:
        """Start an execution of a job that was popped for the worker.

        Returns None if there is nothing to start: the job was canceled, or is not a job.
        """
        job = self.fetch(keys.text(popped))
        begun: list[Any] = []
        place: list[int] = []  # of the replies that are read, for each try

        def write(pipeline: Pipeline) -> None:
            assert job is not None
            pipeline.lrem(keys.taken(worker), 1, job.id)
            begun[:] = [begin_execution(job, worker, _NEVER_S, pipeline)]
            job.started_at = self.now()
            pipeline.hset(job.key, "started_at", utcformat(job.started_at))
            place.append(len(pipeline))
            pipeline.hincrby(job.key, keys.FIELD_EXECUTION, 1)
            pipeline.hmget(job.key, *EXECUTION_FIELDS, keys.FIELD_RETRIES, keys.FIELD_RETRIED)

        if job is not None and job.origin == queue:
            replies = move(self.connection, job, "begin", write)
            if replies is not None:
                number, fields = replies[place[-1] : place[-1] + 2]
                kills, suspect, stop, pause, retries, retried = fields
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

    def finish(self, job: Job, execution: Execution) -> bool:
        """Finish a job, whose result is on disk. False if the execution was not the current one."""

        dependents: list[Job] = []

        def take(pipeline: Pipeline) -> str:
            fetch = partial(self.fetch_many, any_queue=True)
            dependents[:] = take_dependents(job, fetch, pipeline)
            return "finish"

        def write(pipeline: Pipeline) -> None:
            job.ended_at = self.now()
            job._status = JobStatus.FINISHED
            job.save(pipeline=pipeline, include_meta=False, include_result=False)
            self._record(job, execution, Result.Type.SUCCESSFUL, pipeline)
            registry = FinishedJobRegistry(job.origin, connection=self.connection)
            registry.add(job, -1, pipeline)
            for dependent in dependents:
                self._push(dependent, pipeline, front=bool(dependent.enqueue_at_front))

        moves = {"finish": write}
        return move_claimed(self.connection, job, execution, moves, choose=take) is not None

    def fail(self, job: Job, execution: Execution, error: str) -> bool:
        """Fail a job; `error` is a message or a traceback, whose last line is the message."""
        return self._give_up(job, execution, "fail", Result.Type.FAILED, error)

    def stop(self, job: Job, execution: Execution, reason: str) -> bool:
        """Stop a job on request."""
        return self._give_up(job, execution, "stop", Result.Type.STOPPED, reason)

    def _give_up(
        self, job: Job, execution: Execution, how: str, type: Result.Type, error: str
    ) -> bool:
        error = tracebacks.cut(error, tracebacks.MOST_TRACE)

        def write(pipeline: Pipeline) -> None:
            job.ended_at = self.now()
            job._status = MOVES[how].to[0]
            # RQ keeps stopped jobs in the registry of failed ones.
            job.failed_job_registry.add(job, ttl=-1, exc_string=error, pipeline=pipeline)
            pipeline.hset(job.key, "exc_info", error)
            self._record(job, execution, type, pipeline, exc_string=error)

        moves = {how: write}
        ended = move_claimed(self.connection, job, execution, moves, choose=lambda _: how)
        return ended is not None

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

        If a pause was requested, it is parked instead (see `waiting`). `kills`: deaths of its horse
        in a row. `suspect`: its horse died while it ran other jobs too. `reason`: what ended the
        execution. `retry_in_s`: uses one of its retries, and begins after this time.
        """
        retries = None if retry_in_s is None else self.retries_left(job) - 1
        due = None if retry_in_s is None else self.clock() + retry_in_s

        def note(pipeline: Pipeline) -> None:
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

        how = "requeue" if due is None else "retry"
        return self._queue_again(job, execution, how, push, note, reason)

    def set_aside_for_model(self, job: Job, execution: Execution, path: str) -> bool:
        """End an execution whose machine does not have the model folder at `path`.

        The job waits for a machine that has it; if a pause was requested it is parked. False if the
        execution was no longer the current one.
        """
        needs = line_of({**self.needs_of(job), **model_need(path)})

        def note(pipeline: Pipeline) -> None:
            pipeline.hset(job.key, keys.FIELD_NEEDS, needs)

        def write(pipeline: Pipeline) -> None:
            mark_queued(job, self.now())
            job.save(pipeline=pipeline, include_meta=False, include_result=False)
            note(pipeline)
            self._put_aside(job, needs, pipeline)

        return self._queue_again(job, execution, "requeue", write, note, "model_missing")

    def _queue_again(
        self,
        job: Job,
        execution: Execution,
        how: str,
        write: Callable[[Pipeline], None],
        note: Callable[[Pipeline], None],
        reason: totals.Reason,
    ) -> bool:
        """End an execution by `write`; where a pause was requested by `note`, and park the job."""

        def park(pipeline: Pipeline) -> None:
            job.save(pipeline=pipeline, include_meta=False, include_result=False)
            note(pipeline)
            self._put_away(job, pipeline)

        def choose(pipeline: Pipeline) -> str:
            return "park" if pipeline.hexists(job.key, keys.FIELD_PAUSE) else how

        moves = {how: write, "park": park}
        left = move_claimed(self.connection, job, execution, moves, choose=choose, reason=reason)
        return left is not None

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

"""Jobs in Redis: every change of a job's life, in RQ's own structures.

A job is at any moment in exactly one place, and moves between them in one transaction:

  queue ──take──> taken by a worker ──begin──> started ──finish/fail/stop──> its registry
    ^                    │                        │
    └────── bury ────────┴─── requeue, bury ──────┘

RQ's own worker keeps one hand-off list for all workers and waits a minute before it fails what
lies there; here each worker has its own, so that when one dies it is known what it held. An
execution is a worker's claim to a job: whoever ends it must still hold it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import redis
from redis.client import Pipeline
from rq import Queue
from rq.exceptions import DeserializationError
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.registry import (
    CanceledJobRegistry,
    DeferredJobRegistry,
    FinishedJobRegistry,
    ScheduledJobRegistry,
    StartedJobRegistry,
)
from rq.results import Result
from rq.utils import now

from . import keys

log = logging.getLogger(__name__)

# RQ fails a started job whose heartbeat is late, and counting a registry is enough to make it
# do so: after a night of sleep every running job would be lost. Leases do that work here.
_NEVER_S = 10 * 365 * 86_400

ENDED = (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED)


class JobStore:
    """All jobs of one Redis."""

    def __init__(self, connection: redis.Redis) -> None:
        self.connection = connection

    def queue(self, name: str) -> Queue:
        return Queue(name, connection=self.connection, serializer=keys.Serializer)

    def fetch(self, job_id: str) -> Job | None:
        """Return a job as Redis has it; None when there is none, or something else in its place."""
        return self.fetch_many([job_id])[0]

    def fetch_many(self, job_ids: Sequence[str]) -> list[Job | None]:
        """The same for several jobs, in one round trip."""
        with self.connection.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hgetall(Job.key_for(job_id))
            found = pipeline.execute(raise_on_error=False)
        return [self._restore(*pair) for pair in zip(job_ids, found, strict=True)]

    def _restore(self, job_id: str, fields: Any) -> Job | None:
        if not fields:
            return None
        try:
            if isinstance(fields, redis.ResponseError):
                raise ValueError(str(fields))
            job = Job(job_id, connection=self.connection, serializer=keys.Serializer)
            job.restore(fields)
            if job.origin not in keys.QUEUES or not isinstance(job._dependency_ids, list):
                raise ValueError(f"queue {job.origin!r}, behind {job._dependency_ids!r}")
        except Exception as error:  # RQ's parser meets garbage with whatever comes
            log.warning("%r: not a job of RQ's: %s", job_id[:80], str(error)[:200])
            return None
        return job

    def is_ours(self, job: Job) -> bool:
        """Whether the job asks for warmd's own function; anything else is not even read."""
        try:
            return job.func_name == keys.JOB_FUNCTION and job.args == [job.id]
        except DeserializationError:
            return False

    # --- into the queue ---------------------------------------------------------------------

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
    ) -> None:
        """Accept a job: into its queue, or deferred behind `after`, or scheduled for `at`."""
        target = self.queue(queue)
        job = target.create_job(
            keys.JOB_FUNCTION,
            args=(job_id,),
            job_id=job_id,
            description=job_id,
            timeout=-1 if timeout_s is None else timeout_s,  # type: ignore[arg-type]
            result_ttl=-1,
            failure_ttl=-1,
            depends_on=after,
            status=JobStatus.QUEUED if at is None else JobStatus.SCHEDULED,
        )
        job.retries_left = retries
        job.enqueue_at_front = front
        if at is not None:
            target.schedule_job(job, at)
        else:
            target.enqueue_job(job, at_front=front)

    def enqueue_again(self, job: Job, *, front: bool = False) -> bool:
        """Put an ended job back into its queue; False when it is not ended (any more)."""

        def write(pipeline: Pipeline) -> None:
            job._remove_from_registries(pipeline=pipeline)
            job.ended_at = job._exc_info = None
            pipeline.hdel(job.key, keys.FIELD_STOP, keys.FIELD_KILLS, "exc_info")
            self._push(job, pipeline, front=front)

        return self._change(job, ENDED, write)

    def enqueue_due(self) -> None:
        """Move scheduled jobs whose time has come, and deferred ones whose wait is over."""
        for name in keys.QUEUES:
            registry = ScheduledJobRegistry(name, connection=self.connection)
            due: Any = self.connection.zrangebyscore(registry.key, 0, time.time())
            for member in due:
                job = self.fetch(keys.text(member))
                if job is None:
                    self.connection.zrem(registry.key, member)
                    continue
                self._change(job, (JobStatus.SCHEDULED,), self._release(job, registry))
            waiting = DeferredJobRegistry(name, connection=self.connection)
            deferred: Any = self.connection.zrange(waiting.key, 0, -1)
            for member in deferred:
                # A worker that was killed between ending a job and releasing those behind it.
                job = self.fetch(keys.text(member))
                if job is None:
                    self.connection.zrem(waiting.key, member)
                elif job.dependencies_are_met():
                    self._change(job, (JobStatus.DEFERRED,), self._release(job, waiting))

    def _release(self, job: Job, registry: Any) -> Callable[[Pipeline], None]:
        def write(pipeline: Pipeline) -> None:
            registry.remove(job.id, pipeline=pipeline)
            self._push(job, pipeline, front=bool(job.enqueue_at_front))

        return write

    # --- through a worker -------------------------------------------------------------------

    def take(self, queue: str, worker: str, *, timeout_s: float) -> Job | None:
        """Wait for a job and move it to the worker's list, in one command. None for none.

        What the list still holds comes first: a server that died kept its reply to itself.
        """
        source, target = self.queue(queue).key, keys.taken(worker)
        popped: Any = self.connection.lindex(target, 0)
        if popped is None:
            # Fractions of a second are fine since Redis 6, redis-py's annotation knows whole ones.
            popped = self.connection.blmove(source, target, timeout_s, "LEFT", "RIGHT")  # type: ignore[arg-type]
        if popped is None:
            return None
        job = self.fetch(keys.text(popped))
        if job is None or job.origin != queue:
            self.connection.lrem(target, 1, popped)
            return None
        return job

    def begin(self, job: Job, worker: str) -> Execution | None:
        """Start an execution of a job that the worker took; None when it was canceled meanwhile."""
        execution: list[Execution] = []

        def write(pipeline: Pipeline) -> None:
            pipeline.lrem(keys.taken(worker), 1, job.id)
            execution[:] = [Execution.create(job, _NEVER_S, pipeline, worker_name=worker)]
            job.prepare_for_execution(worker, pipeline)
            pipeline.hincrby(job.key, keys.FIELD_EXECUTION, 1)

        if not self._change(job, (JobStatus.QUEUED,), write):
            self.connection.lrem(keys.taken(worker), 1, job.id)
            return None
        return execution[0]

    def execution_number(self, job: Job) -> int:
        """How many executions of the job have begun."""
        return int(self.connection.hget(job.key, keys.FIELD_EXECUTION) or 0)

    def kills(self, job: Job) -> int:
        """How often in a row the job's horse was killed, as last noted."""
        return int(self.connection.hget(job.key, keys.FIELD_KILLS) or 0)

    def note_kills(self, job: Job, number: int) -> None:
        """Note how often in a row the job's horse was killed; may be repeated."""
        self.connection.hset(job.key, keys.FIELD_KILLS, number)

    def finish(self, job: Job, execution: Execution, result: dict[str, Any]) -> bool:
        """The job is done. False when the execution was no longer this worker's to end."""

        def write(pipeline: Pipeline) -> None:
            job.ended_at = now()
            job._status = JobStatus.FINISHED
            job.save(pipeline=pipeline, include_meta=False, include_result=False)
            pipeline.hdel(job.key, keys.FIELD_STOP, keys.FIELD_KILLS)
            self._record(job, execution, Result.Type.SUCCESSFUL, pipeline, return_value=result)
            registry = FinishedJobRegistry(job.origin, connection=self.connection)
            registry.add(job, -1, pipeline)

        return self._end(job, execution, write, release_dependents=True)

    def fail(self, job: Job, execution: Execution, error: str) -> bool:
        """The job failed for good; `error` is the reason, its last line the short of it."""
        return self._give_up(job, execution, JobStatus.FAILED, Result.Type.FAILED, error)

    def stop(self, job: Job, execution: Execution, reason: str) -> bool:
        """The job stopped because somebody asked for it."""
        return self._give_up(job, execution, JobStatus.STOPPED, Result.Type.STOPPED, reason)

    def _give_up(
        self, job: Job, execution: Execution, status: JobStatus, type: Result.Type, error: str
    ) -> bool:
        def write(pipeline: Pipeline) -> None:
            job.ended_at = now()
            job._status = status
            # RQ keeps stopped jobs with the failed ones, too.
            job.failed_job_registry.add(job, ttl=-1, exc_string=error, pipeline=pipeline)
            pipeline.hset(job.key, "exc_info", error)
            pipeline.hdel(job.key, keys.FIELD_STOP, keys.FIELD_KILLS)
            self._record(job, execution, type, pipeline, exc_string=error)

        return self._end(job, execution, write)

    def requeue(self, job: Job, execution: Execution, *, use_retry: bool = False) -> bool:
        """Put a started job back at the front of its queue, to go on from its checkpoint."""

        def write(pipeline: Pipeline) -> None:
            if use_retry:
                job.retries_left = (job.retries_left or 0) - 1
            self._push(job, pipeline, front=True)

        return self._end(job, execution, write)

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

    def holds(self, job: Job, execution: Execution) -> bool:
        """Whether the execution is still the one that Redis knows of."""
        key = job.started_job_registry.key
        return self.connection.zscore(key, execution.composite_key) is not None

    # --- requests to a running job, and away from the queue ---------------------------------

    def request_stop(self, job: Job, how: str) -> bool:
        """Ask for a started job to be stopped ("cancel") or killed ("kill"); the worker sees it."""
        return self._change(
            job, (JobStatus.STARTED,), lambda p: p.hset(job.key, keys.FIELD_STOP, how)
        )

    def stop_requested(self, job: Job) -> str | None:
        value = self.connection.hget(job.key, keys.FIELD_STOP)
        return keys.text(value) if value is not None else None

    def cancel_waiting(self, job: Job) -> bool:
        """Take a waiting job out; False when it does not wait (any more)."""
        waiting = (JobStatus.QUEUED, JobStatus.DEFERRED, JobStatus.SCHEDULED)

        def write(pipeline: Pipeline) -> None:
            job._remove_from_registries(pipeline=pipeline)
            pipeline.hset(job.key, mapping={"status": JobStatus.CANCELED, "ended_at": _timestamp()})
            CanceledJobRegistry(job.origin, connection=self.connection).add(
                job, ttl=-1, pipeline=pipeline
            )

        return self._change(job, waiting, write)

    # --- when a worker is dead --------------------------------------------------------------

    def workers(self) -> dict[str, str]:
        """The queue of every worker that may hold a job, by the worker's name."""
        found = self.connection.hgetall(keys.WORKERS)
        named = {keys.text(name): keys.text(queue) for name, queue in found.items()}
        return {name: q for name, q in named.items() if q in keys.QUEUES and name.count(":") == 2}

    def renew_lease(self, worker: str, *, seconds: int) -> None:
        self.connection.set(keys.lease(worker), 1, ex=seconds)

    def has_lease(self, worker: str) -> bool:
        return bool(self.connection.exists(keys.lease(worker)))

    def register(self, worker: str, queue: str) -> None:
        """Known before it takes its first job, so that it is missed when it dies."""
        self.connection.hset(keys.WORKERS, worker, queue)

    def bury(self, worker: str, queue: str) -> list[str]:
        """Put back whatever a dead worker held; return the ids. Safe to run twice or by two."""
        returned = []
        target = self.queue(queue).key
        while (
            job_id := self.connection.lmove(keys.taken(worker), target, "RIGHT", "LEFT")
        ) is not None:
            returned.append(keys.text(job_id))
        registry = StartedJobRegistry(queue, connection=self.connection)
        members: Any = self.connection.zrange(registry.key, 0, -1)
        for member in members:
            job_id, _, execution_id = keys.text(member).partition(":")
            execution = Execution(execution_id, job_id, self.connection)
            holder = self.connection.hget(execution.key, "worker_name")
            if holder is not None and holder != worker.encode():
                continue
            job = self.fetch(job_id)
            if job is None:
                self.connection.zrem(registry.key, member)
            elif self.requeue(job, execution):
                returned.append(job_id)
        self.connection.hdel(keys.WORKERS, worker)
        return returned

    # --- transactions -----------------------------------------------------------------------

    def _push(self, job: Job, pipeline: Pipeline, *, front: bool) -> None:
        self.queue(job.origin)._enqueue_job(job, pipeline=pipeline, at_front=front)

    def _change(
        self,
        job: Job,
        statuses: tuple[JobStatus, ...],
        write: Callable[[Pipeline], Any],
    ) -> bool:
        """Run `write` in a transaction if the job's status is one of `statuses`."""
        while True:
            with self.connection.pipeline() as pipeline:
                pipeline.watch(job.key)
                status = pipeline.hget(job.key, "status")  # at once: the pipeline is watching
                if status not in [known.value.encode() for known in statuses]:
                    return False
                job._status = JobStatus(keys.text(status))
                pipeline.multi()
                write(pipeline)
                try:
                    pipeline.execute()
                except redis.WatchError:
                    continue
                return True

    def _end(
        self,
        job: Job,
        execution: Execution,
        write: Callable[[Pipeline], None],
        *,
        release_dependents: bool = False,
    ) -> bool:
        """Run `write` in the transaction that ends an execution, if it is still there to end."""
        key = job.started_job_registry.key
        while True:
            with self.connection.pipeline() as pipeline:
                pipeline.watch(key, job.dependents_key)
                if pipeline.zscore(key, execution.composite_key) is None:
                    return False
                if release_dependents:
                    self.queue(job.origin).enqueue_dependents(job, pipeline=pipeline)
                if not pipeline.explicit_transaction:
                    pipeline.multi()
                execution.delete(job, pipeline)
                write(pipeline)
                try:
                    pipeline.execute()
                except redis.WatchError:
                    continue
                return True


def _timestamp() -> str:
    return now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")

"""Jobs in Redis: every change of a job's life, in RQ's own structures.

A job is at any moment in exactly one place, and moves between them in one transaction:

  queue ──pop──> taken by a worker ──begin──> started ──finish/fail/stop──> its registry
   ^ ^                   │                        │
   │ └────── bury ───────┴─── requeue, bury ──────┤
   └─ unpause ─────────── paused <────────────────┘ (when its pause was asked for)

An execution is a worker's claim to a job: whoever ends it must still hold it.

A paused job that runs is held: it stays started, with what was asked in its hash. Any other is
scheduled for the end of time, in RQ's terms, and comes back by `unpause` alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

import redis
from redis.client import Pipeline
from rq import Queue
from rq.exceptions import DeserializationError
from rq.executions import Execution
from rq.job import Job as Job, JobStatus as JobStatus
from rq.registry import (
    BaseRegistry,
    CanceledJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ScheduledJobRegistry,
)
from rq.results import Result
from rq.utils import now

from ...configs.queues import QUEUES
from ...jobs.user_code import tracebacks
from . import job_index, keys
from .transactions import add, change, end

log = logging.getLogger(__name__)

# RQ fails a started job whose heartbeat is late, and counting a registry is enough to make it
# do so: after a night of sleep every running job would be lost. Leases do that work here.
_NEVER_S = 10 * 365 * 86_400

# When a paused job is scheduled for: far enough, and RQ's own tools can still show it as a date.
NEVER = 253_402_214_400.0  # 9999-12-31, in unix seconds

ENDED = (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED)
WAITING = (JobStatus.QUEUED, JobStatus.DEFERRED, JobStatus.SCHEDULED)

# What is noted in a job's hash about its executions: of no meaning once the job has ended.
_NOTED = (keys.FIELD_KILLS, keys.FIELD_SUSPECT, keys.FIELD_STOP, keys.FIELD_PAUSE)
_PASSING = (*_NOTED, keys.FIELD_DUE)


@dataclass(frozen=True)
class Begun:
    """An execution that has begun."""

    claim: Execution
    number: int  # how many have begun, this one included
    kills: int  # how often in a row the job's horse was killed, as last noted
    suspect: bool  # a horse died with this job and others in it
    orders: Orders


@dataclass(frozen=True)
class Orders:
    """What is asked of a started job just now."""

    stop: str | None  # "cancel" or "kill"
    pause: str | None  # "hold" or "release"
    is_held: bool = True  # whether the claim to it still stands


class JobStore:
    """All jobs of one Redis."""

    def __init__(self, connection: redis.Redis) -> None:
        self.connection = connection
        self._queues: dict[str, Queue] = {}  # RQ asks the server's version once for each

    def queue(self, name: str) -> Queue:
        if name not in self._queues:
            self._queues[name] = Queue(name, connection=self.connection, serializer=keys.Serializer)
        return self._queues[name]

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
            if job.origin not in QUEUES or not isinstance(job._dependency_ids, list):
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
        from_cli: bool = False,
    ) -> None:
        """Accept a job: into its queue, or deferred behind `after`, or scheduled for `at`.

        With both it is scheduled first, and deferred when the time has come before the other's end.
        `from_cli`: somebody typed it, and commands without a job's id may mean it.
        """
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

        def write(pipeline: Pipeline) -> None:
            if at is not None:
                target.schedule_job(job, at, pipeline=pipeline)
            else:
                target.enqueue_job(job, pipeline=pipeline, at_front=front)
            job_index.created(pipeline, job, from_cli=from_cli)

        add(self.connection, job, write)

    def enqueue_again(self, job: Job, *, front: bool = False) -> bool:
        """Put an ended job back into its queue; False when it is not ended (any more)."""

        def write(pipeline: Pipeline) -> None:
            job._remove_from_registries(pipeline=pipeline)
            job.ended_at = job._exc_info = None
            pipeline.hdel(job.key, *_PASSING, "exc_info")
            job_index.revived(pipeline, job)
            self._push(job, pipeline, front=front)

        return bool(change(self.connection, job, ENDED, write))

    def clock(self) -> float:
        """The time by the server's clock, in unix seconds: that of all hosts that share it."""
        seconds, microseconds = cast(Any, self.connection.time())
        return float(seconds + microseconds / 1e6)

    def are_met(self, jobs: Sequence[Job]) -> list[bool]:
        """Whether all that each job is behind has finished, or is no more; in one round trip."""
        behind = list({dependency for job in jobs for dependency in job._dependency_ids})
        with self.connection.pipeline(transaction=False) as pipeline:
            for dependency in behind:
                pipeline.hget(Job.key_for(dependency), "status")
            statuses = pipeline.execute()
        over = (None, JobStatus.FINISHED.value.encode())
        done = {one for one, status in zip(behind, statuses, strict=True) if status in over}
        return [done.issuperset(job._dependency_ids) for job in jobs]

    def release(self, job: Job) -> None:
        """Queue a job whose start time has come or whose dependencies have finished.

        A scheduled job with unfinished dependencies becomes deferred. Dependencies are checked
        again afterwards, so that one that finishes in between does not leave it deferred.
        """
        if not self.are_met([job])[0]:
            change(self.connection, job, (JobStatus.SCHEDULED,), partial(self._defer, job))
        if self.are_met([job])[0]:
            is_front = bool(job.enqueue_at_front)

            def write(pipeline: Pipeline) -> None:
                for registry in (
                    self._scheduled(job),
                    self.queue(job.origin).deferred_job_registry,
                ):
                    registry.remove(job.id, pipeline=pipeline)
                self._push(job, pipeline, front=is_front)

            change(self.connection, job, (JobStatus.SCHEDULED, JobStatus.DEFERRED), write)

    def _defer(self, job: Job, pipeline: Pipeline) -> None:
        self._scheduled(job).remove(job.id, pipeline=pipeline)
        job.set_status(JobStatus.DEFERRED, pipeline=pipeline)
        job.register_dependency(pipeline=pipeline)

    # --- through a worker -------------------------------------------------------------------

    def begin(self, popped: bytes, queue: str, worker: str) -> tuple[Job, Begun] | None:
        """Start an execution of a job that was popped for the worker.

        None when there is nothing to start: canceled meanwhile, or no job at all.
        """
        job = self.fetch(keys.text(popped))
        begun: list[Any] = []

        def write(pipeline: Pipeline) -> None:
            assert job is not None
            pipeline.lrem(keys.taken(worker), 1, job.id)
            begun[:] = [Execution.create(job, _NEVER_S, pipeline, worker_name=worker)]
            job.prepare_for_execution(worker, pipeline)
            job_index.revived(pipeline, job)  # RQ's own tools requeue jobs, too
            pipeline.hincrby(job.key, keys.FIELD_EXECUTION, 1)
            pipeline.hmget(job.key, *_NOTED)

        if job is not None and job.origin == queue:
            results = change(self.connection, job, (JobStatus.QUEUED,), write)
            if results:
                number, (kills, suspect, stop, pause) = results[-2:]
                orders = Orders(_text_or_none(stop), _text_or_none(pause))
                noted = int(kills or 0), suspect is not None
                return job, Begun(begun[0], number, *noted, orders)
        raw: Any = popped  # redis-py's annotation knows text alone
        self.connection.lrem(keys.taken(worker), 1, raw)
        return None

    def orders(self, started: Sequence[tuple[Job, Execution]]) -> list[Orders]:
        """What is asked of started jobs, in one round trip."""
        with self.connection.pipeline(transaction=False) as pipeline:
            for job, claim in started:
                pipeline.hmget(job.key, keys.FIELD_STOP, keys.FIELD_PAUSE)
                pipeline.zscore(job.started_job_registry.key, claim.composite_key)
            found = pipeline.execute()
        return [
            Orders(_text_or_none(stop), _text_or_none(pause), score is not None)
            for (stop, pause), score in zip(found[::2], found[1::2], strict=True)
        ]

    def finish(self, job: Job, execution: Execution, result: dict[str, Any]) -> bool:
        """The job is done. False when the execution was no longer this worker's to end."""

        def write(pipeline: Pipeline) -> None:
            job.ended_at = now()
            job._status = JobStatus.FINISHED
            job.save(pipeline=pipeline, include_meta=False, include_result=False)
            pipeline.hdel(job.key, *_PASSING)
            self._record(job, execution, Result.Type.SUCCESSFUL, pipeline, return_value=result)
            registry = FinishedJobRegistry(job.origin, connection=self.connection)
            registry.add(job, -1, pipeline)
            job_index.ended(pipeline, job, JobStatus.FINISHED, job.ended_at)

        def release(pipeline: Pipeline) -> None:
            self.queue(job.origin).enqueue_dependents(job, pipeline=pipeline)

        return end(self.connection, job, execution, write, watching=release)

    def fail(self, job: Job, execution: Execution, error: str) -> bool:
        """The job failed for good; `error` is the reason, its last line the short of it."""
        return self._give_up(job, execution, JobStatus.FAILED, Result.Type.FAILED, error)

    def stop(self, job: Job, execution: Execution, reason: str) -> bool:
        """The job stopped because somebody asked for it."""
        return self._give_up(job, execution, JobStatus.STOPPED, Result.Type.STOPPED, reason)

    def _give_up(
        self, job: Job, execution: Execution, status: JobStatus, type: Result.Type, error: str
    ) -> bool:
        error = tracebacks.cut(error, tracebacks.MOST_TRACE)

        def write(pipeline: Pipeline) -> None:
            job.ended_at = now()
            job._status = status
            # RQ keeps stopped jobs with the failed ones, too.
            job.failed_job_registry.add(job, ttl=-1, exc_string=error, pipeline=pipeline)
            pipeline.hset(job.key, "exc_info", error)
            pipeline.hdel(job.key, *_PASSING)
            self._record(job, execution, type, pipeline, exc_string=error)
            job_index.ended(pipeline, job, status, job.ended_at)

        return end(self.connection, job, execution, write)

    def requeue(
        self,
        job: Job,
        execution: Execution,
        *,
        use_retry: bool = False,
        kills: int | None = None,
        suspect: bool = False,
    ) -> bool:
        """Put a started job back at the front of its queue, to go on from its checkpoint.

        One whose pause was asked for stays away instead. `kills` is noted; `suspect` marks a job
        as one that may have killed a horse with others in it.
        """
        if use_retry:
            job.retries_left = (job.retries_left or 0) - 1

        def note(pipeline: Pipeline) -> None:
            if kills is not None:
                pipeline.hset(job.key, keys.FIELD_KILLS, kills)
            if suspect:
                pipeline.hset(job.key, keys.FIELD_SUSPECT, 1)

        def push(pipeline: Pipeline) -> None:
            note(pipeline)
            self._push(job, pipeline, front=True)

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

    # --- requests to a running job, and away from the queue ---------------------------------

    def request_stop(self, job: Job, how: str) -> bool:
        """Ask for a started job to be stopped ("cancel") or killed ("kill"); the worker sees it."""
        return self._steer(job, lambda p: p.hset(job.key, keys.FIELD_STOP, how))

    def request_pause(self, job: Job, how: str) -> bool:
        """Ask for a started job to wait in memory ("hold"), or to save and end ("release")."""
        return self._steer(job, lambda p: p.hset(job.key, keys.FIELD_PAUSE, how))

    def withdraw_pause(self, job: Job) -> bool:
        """Let a started job go on; False when it is not started (any more)."""
        return self._steer(job, lambda p: p.hdel(job.key, keys.FIELD_PAUSE))

    def _steer(self, job: Job, write: Callable[[Pipeline], Any]) -> bool:
        def write_and_tell(pipeline: Pipeline) -> None:
            write(pipeline)
            pipeline.publish(keys.STEER, job.id)

        return bool(change(self.connection, job, (JobStatus.STARTED,), write_and_tell))

    def cancel_waiting(self, job: Job) -> bool:
        """Take a waiting job out; False when it does not wait (any more)."""

        def write(pipeline: Pipeline) -> None:
            job._remove_from_registries(pipeline=pipeline)
            pipeline.hset(job.key, mapping={"status": JobStatus.CANCELED, "ended_at": _timestamp()})
            pipeline.hdel(job.key, *_PASSING)
            CanceledJobRegistry(job.origin, connection=self.connection).add(
                job, ttl=-1, pipeline=pipeline
            )
            job_index.ended(pipeline, job, JobStatus.CANCELED, now())

        return bool(change(self.connection, job, WAITING, write))

    def remove(self, job: Job) -> bool:
        """Forget an ended job with all that Redis has of it; False when it is not ended."""

        def write(pipeline: Pipeline) -> None:
            job.delete(pipeline=pipeline, remove_from_queue=False)
            pipeline.delete(Result.get_key(job.id), keys.events(job.id))
            job_index.removed(pipeline, job.id)

        return bool(change(self.connection, job, ENDED, write))

    def adopt(
        self,
        job_id: str,
        queue: str,
        status: JobStatus,
        *,
        created_at: float,
        ended_at: float,
        executions: int,
        from_cli: bool,
    ) -> bool:
        """Note an ended job that Redis does not know; False when it does (by now).

        As the job's run directory tells it: Redis has lost it, or never had it.
        """
        job = self.queue(queue).create_job(
            keys.JOB_FUNCTION, args=(job_id,), job_id=job_id, description=job_id, timeout=-1,
            result_ttl=-1, failure_ttl=-1, status=status,
        )  # fmt: skip
        job.created_at = datetime.fromtimestamp(created_at, UTC)
        ended = job.ended_at = datetime.fromtimestamp(ended_at, UTC)

        def write(pipeline: Pipeline) -> None:
            job.save(pipeline=pipeline)
            pipeline.hset(job.key, keys.FIELD_EXECUTION, executions)
            self._registry_of(job, status).add(job, ttl=-1, pipeline=pipeline)
            job_index.created(pipeline, job, from_cli=from_cli)
            job_index.ended(pipeline, job, status, ended)

        return add(self.connection, job, write, only_new=True)

    def _registry_of(self, job: Job, status: JobStatus) -> BaseRegistry:
        registries = {
            JobStatus.FINISHED: FinishedJobRegistry,
            JobStatus.CANCELED: CanceledJobRegistry,
        }
        # RQ keeps stopped jobs with the failed ones.
        return registries.get(status, FailedJobRegistry)(job.origin, connection=self.connection)

    # --- paused -----------------------------------------------------------------------------

    def pause_of(self, job: Job) -> str | None:
        """What pause was asked for and not undone since: "hold" or "release"."""
        return _text_or_none(self.connection.hget(job.key, keys.FIELD_PAUSE))

    def pause_waiting(self, job: Job) -> bool:
        """Put a waiting job away until `unpause`; False when it does not wait (any more)."""

        def write(pipeline: Pipeline) -> None:
            job._remove_from_registries(pipeline=pipeline)
            for dependency in job._dependency_ids:
                # Or the end of that one would queue this one.
                pipeline.srem(Job.dependents_key_for(dependency), job.id)
            if due is not None and due < NEVER:
                pipeline.hset(job.key, keys.FIELD_DUE, due)
            self._put_away(job, pipeline)

        due: Any = self.connection.zscore(self._scheduled(job).key, job.id)
        return bool(change(self.connection, job, WAITING, write))

    def unpause(self, job: Job) -> bool:
        """Put a job that was put away back: to the front of its queue, or to what it waited for.

        False when it is not put away (any more).
        """
        raw: Any = self.connection.hget(job.key, keys.FIELD_DUE)
        due = float(raw or 0)
        is_early = due > self.clock()
        # When these are met just now, `Due` finds it soon.
        is_deferred = not self.are_met([job])[0]

        def write(pipeline: Pipeline) -> None:
            pipeline.hdel(job.key, keys.FIELD_PAUSE, keys.FIELD_DUE)
            if is_early:
                pipeline.zadd(self._scheduled(job).key, {job.id: due})
            elif is_deferred:
                self._defer(job, pipeline)
            else:
                self._scheduled(job).remove(job.id, pipeline=pipeline)
                self._push(job, pipeline, front=True)

        is_paused = self.pause_of(job) is not None
        return is_paused and bool(change(self.connection, job, (JobStatus.SCHEDULED,), write))

    def _put_away(self, job: Job, pipeline: Pipeline) -> None:
        pipeline.zadd(self._scheduled(job).key, {job.id: NEVER})
        pipeline.hset(job.key, "status", JobStatus.SCHEDULED)
        pipeline.hset(job.key, keys.FIELD_PAUSE, "release")

    def _scheduled(self, job: Job) -> ScheduledJobRegistry:
        return ScheduledJobRegistry(job.origin, connection=self.connection)

    def _push(self, job: Job, pipeline: Pipeline, *, front: bool) -> None:
        self.queue(job.origin)._enqueue_job(job, pipeline=pipeline, at_front=front)


def _text_or_none(raw: Any) -> str | None:
    return keys.text(raw) if raw is not None else None


def _timestamp() -> str:
    return now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")

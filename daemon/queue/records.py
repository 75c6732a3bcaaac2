"""Jobs as records in Redis: reading them, and putting them into their places."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, cast

import redis
from redis.client import Pipeline

from ...configs.labels import parse_line
from ...configs.queues import QUEUES
from ...jobs.files.shortage import shortage
from . import keys
from .clocks import SharedClock
from .rq_format import (
    BaseRegistry,
    CanceledJobRegistry,
    DeserializationError,
    FailedJobRegistry,
    FinishedJobRegistry,
    Job as Job,
    JobStatus as JobStatus,
    Queue,
    ScheduledJobRegistry,
    push,
)

log = logging.getLogger(__name__)

# The time for which a paused job is scheduled: a distant date that RQ's own tools can show.
NEVER = 253_402_214_400.0  # 9999-12-31, in unix seconds


class JobRecords:
    """The jobs of one Redis, as records."""

    def __init__(self, connection: redis.Redis) -> None:
        self.connection = connection
        self.shared_clock = SharedClock(connection)
        self._queues: dict[str, Queue] = {}  # RQ queries the version of Redis once for each

    def queue(self, name: str) -> Queue:
        if name not in self._queues:
            self._queues[name] = Queue(
                name, connection=self.connection, job_class=Job, serializer=keys.Serializer
            )
        return self._queues[name]

    def fetch(self, job_id: str) -> Job | None:
        """Return a job, or None if Redis has none, or no valid one, under this id."""
        return self.fetch_many([job_id])[0]

    def fetch_many(self, job_ids: Sequence[str], *, any_queue: bool = False) -> list[Job | None]:
        """The same for several jobs, in one round trip. `any_queue`: also other programs' jobs."""
        with self.connection.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hgetall(Job.key_for(job_id))
            found = pipeline.execute(raise_on_error=False)
        pairs = zip(job_ids, found, strict=True)
        return [self._restore(*pair, any_queue=any_queue) for pair in pairs]

    def _restore(self, job_id: str, fields: Any, *, any_queue: bool) -> Job | None:
        if not fields:
            return None
        try:
            if isinstance(fields, redis.ResponseError):
                raise ValueError(str(fields))
            job = Job(job_id, connection=self.connection, serializer=keys.Serializer)
            job.restore(fields)
            is_known = any_queue or job.origin in QUEUES
            if not is_known or not isinstance(job._dependency_ids, list):
                raise ValueError(f"queue {job.origin!r}, after {job._dependency_ids!r}")
        except Exception as error:  # RQ's parser raises many types for invalid data
            if shortage(error) is not None:  # of descriptors, in an import
                raise
            log.warning("%r: not an RQ job: %s", job_id[:80], str(error)[:200])
            return None
        return job

    def is_ours(self, job: Job) -> bool:
        """Whether the job names warmd's own function; other jobs are refused."""
        try:
            return job.func_name == keys.JOB_FUNCTION and job.args == [job.id]
        except DeserializationError:
            return False

    def num_executions(self, job_id: str) -> int:
        """Return how many executions of the job have begun."""
        raw: Any = self.connection.hget(Job.key_for(job_id), keys.FIELD_EXECUTION)
        return int(raw or 0)

    def retries_left(self, job: Job) -> int:
        """How often the job may be tried again after a failure."""
        raw = text_or_none(self.connection.hget(job.key, keys.FIELD_RETRIES))
        return (job.retries_left or 0) if raw is None else int(raw)

    def needs_of(self, job: Job) -> dict[str, str]:
        """The labels that the job needs."""
        return parse_line(text_or_none(self.connection.hget(job.key, keys.FIELD_NEEDS)) or "")

    def needs_of_popped(self, popped: bytes) -> dict[str, str]:
        """The labels that a popped job needs; none if it is not a job."""
        raw: Any = None
        with suppress(redis.ResponseError):  # no hash: not a job; `begin` drops it
            raw = self.connection.hget(Job.key_for(keys.text(popped)), keys.FIELD_NEEDS)
        return parse_line(text_or_none(raw) or "")

    def now(self) -> datetime:
        """The time by Redis' clock, without a round trip unless it has to be measured again."""
        return datetime.fromtimestamp(self.shared_clock.now(), UTC)

    def clock(self) -> float:
        """The time of Redis' clock in unix seconds, the same for all hosts that share it."""
        seconds, microseconds = cast(Any, self.connection.time())
        return float(seconds + microseconds / 1e6)

    def are_met(self, jobs: Sequence[Job]) -> list[bool]:
        """For each job, whether its dependencies have finished or are gone; in one round trip."""
        behind = list({dependency for job in jobs for dependency in job._dependency_ids})
        with self.connection.pipeline(transaction=False) as pipeline:
            for dependency in behind:
                pipeline.hget(Job.key_for(dependency), "status")
            statuses = pipeline.execute()
        over = (None, JobStatus.FINISHED.value.encode())
        done = {one for one, status in zip(behind, statuses, strict=True) if status in over}
        return [done.issuperset(job._dependency_ids) for job in jobs]

    def _defer(self, job: Job, pipeline: Pipeline) -> None:
        self._scheduled(job).remove(job.id, pipeline=pipeline)
        job.set_status(JobStatus.DEFERRED, pipeline=pipeline)
        job.register_dependency(pipeline=pipeline)

    def _put_away(self, job: Job, pipeline: Pipeline) -> None:
        pipeline.zadd(self._scheduled(job).key, {job.id: NEVER})
        pipeline.hset(job.key, "status", JobStatus.SCHEDULED)
        self._write_pause(job, "release", pipeline)

    def _put_aside(self, job: Job, line: str, pipeline: Pipeline) -> None:
        pipeline.sadd(keys.needs(job.origin), line)
        aside = keys.set_aside(job.origin, line)
        pipeline.zadd(aside, {job.id: job.created_at.timestamp()})

    def _write_pause(self, job: Job, how: str, pipeline: Pipeline) -> None:
        pipeline.hset(job.key, keys.FIELD_PAUSE, how)
        # Kept if it is set: a job that was held and is parked now has been paused all the time.
        pipeline.hsetnx(job.key, keys.FIELD_PAUSED_AT, str(self.shared_clock.now()))

    def _scheduled(self, job: Job) -> ScheduledJobRegistry:
        return ScheduledJobRegistry(job.origin, connection=self.connection)

    def _registry_of(self, job: Job, status: JobStatus) -> BaseRegistry:
        registries = {
            JobStatus.FINISHED: FinishedJobRegistry,
            JobStatus.CANCELED: CanceledJobRegistry,
        }
        # RQ keeps stopped jobs in the registry of failed ones.
        return registries.get(status, FailedJobRegistry)(job.origin, connection=self.connection)

    def _push(self, job: Job, pipeline: Pipeline, *, front: bool) -> None:
        push(self.queue(job.origin), job, self.now(), pipeline, front=front)


def text_or_none(raw: Any) -> str | None:
    return keys.text(raw) if raw is not None else None

"""Indices of all jobs in Redis: the cost of a read depends on the size of its result only.

    warmd:jobs:QUEUE      all jobs of a queue, by time of creation
    warmd:kind:KIND       all jobs of a kind, by time of creation
    warmd:cli             jobs submitted from the command line, by time of creation
    warmd:answers         ended jobs of queue infer, by time of their end
    warmd:stopped:QUEUE   stopped jobs, which RQ keeps in the registry of failed ones

Each is updated in the transaction that changes the job. `index_builder` adds jobs of an earlier
version, and run directories without a job in Redis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import redis
from redis.client import Pipeline

from ...configs.queues import INFER, QUEUES, TRAIN
from ...jobs.ids import kind_of
from . import keys
from .rq_format import Job, JobStatus


def created(pipeline: Pipeline, job: Job, *, from_cli: bool) -> None:
    """Add a new job."""
    at = {job.id: job.created_at.timestamp()}
    pipeline.zadd(keys.jobs(job.origin), at)
    pipeline.zadd(keys.of_kind(kind_of(job.id)), at)
    if from_cli:
        pipeline.zadd(keys.FROM_CLI, at)


def ended(pipeline: Pipeline, job: Job, status: JobStatus, at: datetime) -> None:
    """Add the end of a job."""
    if job.origin == INFER:
        pipeline.zadd(keys.ANSWERS, {job.id: at.timestamp()})
    if status == JobStatus.STOPPED:
        pipeline.sadd(keys.stopped(job.origin), job.id)


def revived(pipeline: Pipeline, job: Job) -> None:
    """Remove a job from the indices of ended jobs."""
    pipeline.zrem(keys.ANSWERS, job.id)
    pipeline.srem(keys.stopped(job.origin), job.id)


def removed(pipeline: Pipeline, job_id: str) -> None:
    """Remove a job from all indices, in a transaction that deletes it."""
    pipeline.zrem(keys.FROM_CLI, job_id)
    pipeline.zrem(keys.ANSWERS, job_id)
    pipeline.zrem(keys.of_kind(kind_of(job_id)), job_id)
    for queue in QUEUES:
        pipeline.zrem(keys.jobs(queue), job_id)
        pipeline.srem(keys.stopped(queue), job_id)


def newest(connection: redis.Redis, queues: Iterable[str], limit: int | None) -> list[str]:
    """The ids of the latest jobs of some queues, newest first."""
    return _newest_of(connection, map(keys.jobs, queues), limit)


def newest_of_kinds(connection: redis.Redis, kinds: Iterable[str], limit: int | None) -> list[str]:
    """The ids of the latest jobs of some kinds, newest first."""
    return _newest_of(connection, map(keys.of_kind, kinds), limit)


def _newest_of(connection: redis.Redis, indices: Iterable[str], limit: int | None) -> list[str]:
    last = -1 if limit is None else limit - 1
    with connection.pipeline(transaction=False) as pipeline:
        for index in indices:
            pipeline.zrange(index, 0, last, desc=True, withscores=True)
        pairs = [pair for pairs in pipeline.execute() for pair in pairs]
    pairs.sort(key=lambda pair: (pair[1], pair[0]), reverse=True)
    return [keys.text(job_id) for job_id, _ in pairs[:limit]]


def trainings(connection: redis.Redis, limit: int, *, after: str | None) -> list[str]:
    """The ids of training jobs, newest first, starting after the job `after`."""
    key, start = keys.jobs(TRAIN), 0
    if after is not None:
        place: Any = connection.zrevrank(key, after)
        if place is None:
            return []
        start = place + 1
    found: Any = connection.zrange(key, start, start + limit - 1, desc=True)
    return [keys.text(job_id) for job_id in found]


def from_cli_newest(connection: redis.Redis, start: int, count: int) -> list[str]:
    """The ids of jobs submitted from the command line, newest first; `start`: how many to skip."""
    found: Any = connection.zrange(keys.FROM_CLI, start, start + count - 1, desc=True)
    return [keys.text(job_id) for job_id in found]


def are_from_cli(connection: redis.Redis, job_ids: Sequence[str]) -> list[bool]:
    """For each job, whether it was submitted from the command line."""
    if not job_ids:
        return []
    found: Any = connection.zmscore(keys.FROM_CLI, list(job_ids))
    return [score is not None for score in found]


def forget(connection: redis.Redis, job_id: str) -> None:
    """Remove a job without a record from all indices.

    It may be a run directory of another home on this Redis, which then indexes it again.
    """
    with connection.pipeline() as pipeline:
        removed(pipeline, job_id)
        pipeline.delete(keys.LISTED)
        pipeline.execute()

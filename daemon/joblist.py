"""Looking at many jobs at once, in few round trips.

Never by RQ's counting methods: they fail a started job whose heartbeat is late.
"""

from __future__ import annotations

from collections.abc import Sequence

import redis
from rq import Queue
from rq.executions import Execution
from rq.job import Job
from rq.registry import (
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ScheduledJobRegistry,
    StartedJobRegistry,
)

from . import keys
from .jobstore import NEVER, JobStore

_REGISTRIES = {
    "started": StartedJobRegistry,
    "finished": FinishedJobRegistry,
    "failed": FailedJobRegistry,  # and stopped
    "deferred": DeferredJobRegistry,
    "scheduled": ScheduledJobRegistry,
    "canceled": CanceledJobRegistry,
}


def every_job(connection: redis.Redis) -> list[Job]:
    """Every job of every queue."""
    ids = [
        job_id
        for queue in keys.QUEUES
        for members in _members(connection, queue).values()
        for job_id in members
    ]
    workers = [keys.text(name) for name in connection.hkeys(keys.WORKERS)]
    with connection.pipeline(transaction=False) as pipeline:
        for worker in workers:
            pipeline.lrange(keys.taken(worker), 0, -1)
        ids += [keys.text(job_id) for taken in pipeline.execute() for job_id in taken]
    jobs = JobStore(connection).fetch_many(list(dict.fromkeys(ids)))
    return [job for job in jobs if job is not None]


def counts(connection: redis.Redis, queue: str) -> dict[str, int]:
    """How many jobs of a queue have each status."""
    members = _members(connection, queue)
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in members["failed"]:
            pipeline.hget(Job.key_for(job_id), "status")
        stopped = pipeline.execute().count(b"stopped")
    found = {status: len(ids) for status, ids in members.items()}
    return {**found, "failed": found["failed"] - stopped, "stopped": stopped}


def ended(connection: redis.Redis, queue: str) -> list[str]:
    """The ids of every ended job of a queue."""
    members = _members(connection, queue)
    return [job_id for status in ("finished", "failed", "canceled") for job_id in members[status]]


def positions(connection: redis.Redis) -> dict[str, int]:
    """The place of every queued job in its queue, 1 for the next."""
    return {
        job_id: place
        for queue in keys.QUEUES
        for place, job_id in enumerate(_members(connection, queue)["queued"], start=1)
    }


def notes(connection: redis.Redis, jobs: Sequence[Job]) -> list[tuple[int, bool]]:
    """How many executions of each job have begun, and whether its pause was asked for."""
    with connection.pipeline(transaction=False) as pipeline:
        for job in jobs:
            pipeline.hmget(job.key, keys.FIELD_EXECUTION, keys.FIELD_PAUSE)
        return [(int(number or 0), pause is not None) for number, pause in pipeline.execute()]


def scheduled_at(connection: redis.Redis, jobs: Sequence[Job]) -> dict[str, float]:
    """When the scheduled ones are to be queued, in unix seconds; paused ones are left out."""
    scheduled = [job for job in jobs if job._status == "scheduled"]
    with connection.pipeline(transaction=False) as pipeline:
        for job in scheduled:
            pipeline.zscore(ScheduledJobRegistry.key_template.format(job.origin), job.id)
        scores = pipeline.execute()
    found = zip(scheduled, scores, strict=True)
    return {job.id: score for job, score in found if score is not None and score < NEVER}


def started(connection: redis.Redis, queue: str) -> list[tuple[str, str]]:
    """The started jobs of a queue, each with the name of the worker that runs it."""
    pairs = [
        keys.text(member).partition(":")[::2]
        for member in connection.zrange(StartedJobRegistry.key_template.format(queue), 0, -1)
    ]
    with connection.pipeline(transaction=False) as pipeline:
        for job_id, execution_id in pairs:
            pipeline.hget(Execution(execution_id, job_id, connection).key, "worker_name")
        holders = pipeline.execute()
    return [
        (job_id, keys.text(name or b"")) for (job_id, _), name in zip(pairs, holders, strict=True)
    ]


def _members(connection: redis.Redis, queue: str) -> dict[str, list[str]]:
    """The ids in a queue and in each of its registries, by status."""
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.lrange(Queue(queue, connection=connection).key, 0, -1)
        for registry in _REGISTRIES.values():
            pipeline.zrange(registry.key_template.format(queue), 0, -1)
        found = pipeline.execute()
    return {
        status: [keys.text(entry).split(":")[0] for entry in entries]
        for status, entries in zip(("queued", *_REGISTRIES), found, strict=True)
    }

"""Changes of a job as optimistic transactions (WATCH, MULTI, EXEC).

Each reads the job's status and then writes. If the job changes in between, nothing is written and
the transaction is retried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis
from redis.client import Pipeline

from . import keys
from .rq_format import Execution, Job, JobStatus, end as end_execution, status_of


def change(
    connection: redis.Redis,
    job: Job,
    statuses: tuple[JobStatus, ...],
    write: Callable[[Pipeline], Any],
) -> list[Any]:
    """Run `write` in a transaction if the job's status is one of `statuses`.

    Returns the replies; an empty list for another status.
    """
    while True:
        with connection.pipeline() as pipeline:
            pipeline.watch(job.key)
            # Executed at once: the pipeline is watching.
            status = status_of(pipeline.hget(job.key, "status"))
            if status not in statuses:
                return []
            job._status = status
            pipeline.multi()
            write(pipeline)
            try:
                return pipeline.execute()
            except redis.WatchError:
                continue


def add(
    connection: redis.Redis,
    job: Job,
    write: Callable[[Pipeline], Any],
    *,
    only_new: bool = False,
) -> bool:
    """Run `write`, which adds a job, in a transaction; it may WATCH and read first.

    `only_new`: if Redis has the job already, nothing is written and False is returned.
    """
    status = job._status
    while True:
        with connection.pipeline() as pipeline:
            if only_new:
                pipeline.watch(job.key)
                if pipeline.exists(job.key):
                    return False
                pipeline.multi()
            try:
                write(pipeline)
                pipeline.execute()
            except redis.WatchError:
                job._status = status
                continue
            return True


def end(
    connection: redis.Redis,
    job: Job,
    execution: Execution,
    write: Callable[[Pipeline], None],
    *,
    watching: Callable[[Pipeline], object] | None = None,
    if_paused: Callable[[Pipeline], None] | None = None,
) -> bool:
    """Run `write` in the transaction that ends an execution; False if it has ended already.

    `if_paused` replaces `write` if a pause was requested. `watching` is called first: it may WATCH
    and read more keys, and begin the transaction.
    """
    key = job.started_job_registry.key
    while True:
        with connection.pipeline() as pipeline:
            # Watches the hash and not the registry, which every claim of every worker changes: an
            # execution never ends without a change of its job's hash.
            pipeline.watch(job.key, job.dependents_key)
            if pipeline.zscore(key, execution.composite_key) is None:
                return False
            chosen = write
            if if_paused is not None and pipeline.hexists(job.key, keys.FIELD_PAUSE):
                chosen = if_paused
            if watching is not None:
                watching(pipeline)
            if not pipeline.explicit_transaction:
                pipeline.multi()
            end_execution(job, execution, pipeline)
            chosen(pipeline)
            try:
                pipeline.execute()
            except redis.WatchError:
                continue
            return True

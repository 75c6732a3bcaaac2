"""RQ's data format; the only module that imports RQ.

warmd writes RQ's records so that RQ's tools work; none of RQ's processes run. Other modules import
RQ's public names from here. The functions are what differs between the versions of RQ that
pyproject.toml allows: the nodes and tools of one Redis may have several. Undocumented are the
attributes `_status`, `_dependency_ids` and `_exc_info` of Job, `Queue._enqueue_rate_limited_job`,
and the keys: tests/project/test_versions.py notices when a version changes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, cast

from redis.client import Pipeline

from ...jobs.errors import SpecError

try:
    from rq import Queue as Queue, Worker
except ValueError as error:  # RQ 3 checks the prefix of its keys when it is imported
    raise SpecError(
        "RQ_KEY_PREFIX",
        f"must be letters, digits and any of _.:-{{}}, got {os.environ.get('RQ_KEY_PREFIX')!r}",
    ) from error
from rq.exceptions import DeserializationError as DeserializationError
from rq.executions import Execution as Execution
from rq.job import Job as _Job, JobStatus as JobStatus
from rq.registry import (
    BaseRegistry as BaseRegistry,
    CanceledJobRegistry as CanceledJobRegistry,
    DeferredJobRegistry as DeferredJobRegistry,
    FailedJobRegistry as FailedJobRegistry,
    FinishedJobRegistry as FinishedJobRegistry,
    ScheduledJobRegistry as ScheduledJobRegistry,
    StartedJobRegistry as StartedJobRegistry,
)
from rq.results import Result as Result
from rq.suspension import WORKERS_SUSPENDED as WORKERS_SUSPENDED
from rq.utils import now as now, str_to_date as str_to_date, utcformat as utcformat
from rq.version import VERSION as VERSION
from rq.worker import WorkerStatus as WorkerStatus
from rq.worker_registration import (
    REDIS_WORKER_KEYS as REDIS_WORKER_KEYS,
    WORKERS_BY_QUEUE_KEY as WORKERS_BY_QUEUE_KEY,
)

# The prefix of RQ's keys before version 3, which alone reads RQ_KEY_PREFIX.
DEFAULT_PREFIX = "rq"
PREFIX = Queue.redis_queue_namespace_prefix.removesuffix(":queue:")

# Registries from which a job must be removed when its status changes. RQ keeps stopped jobs among
# the failed ones; the members for started jobs are executions.
_REGISTRIES: tuple[type[BaseRegistry], ...] = (
    FinishedJobRegistry,
    FailedJobRegistry,
    DeferredJobRegistry,
    ScheduledJobRegistry,
    CanceledJobRegistry,
)

# What RQ 3 adds: a job whose dependencies have finished, on its way to the queue, and a job that
# waits because too many with the same key run. Both wait, and RQ 2 does not know them.
_WAITING = (b"ready_to_enqueue", b"rate_limited")


def status_of(raw: Any) -> JobStatus | None:
    """The status in a job's hash; None if there is none, or not a valid one.

    Two statuses that only RQ 3 has, and that its tools may set, are `deferred`.
    """
    if raw in _WAITING:
        return JobStatus.DEFERRED
    try:
        return JobStatus(bytes(raw or b"").decode())
    except ValueError:
        return None


class Job(_Job):
    """RQ's job, whose statuses are those of `status_of` in every version."""

    def restore(self, raw_data: Any) -> Any:
        if raw_data.get(b"status") in _WAITING:
            raw_data = {**raw_data, b"status": JobStatus.DEFERRED.value.encode()}
        return super().restore(raw_data)

    def get_status(self, refresh: bool = True) -> JobStatus:
        if refresh and (status := status_of(self.connection.hget(self.key, "status"))) is not None:
            self._status = status
            return status
        return super().get_status(refresh)  # raises if Redis has no valid status


def queue_key(queue: str) -> str:
    """List of the ids of a queue's jobs, in order."""
    return f"{Queue.redis_queue_namespace_prefix}{queue}"


def ready_key(queue: str) -> str:
    """Sorted set of the jobs that are `ready_to_enqueue`; RQ's ReadyJobRegistry."""
    return f"{PREFIX}:ready:{queue}"


def rate_limits_key() -> str:
    """Set of the names of all rate limits; RQ's RateLimitRegistry."""
    return f"{PREFIX}:rl-keys"


def rate_limited_key(limit: str) -> str:
    """Sorted set of the jobs that are `rate_limited` by one of these."""
    return f"{PREFIX}:rl:{limit}:rate_limited"


def worker_key(worker: str) -> str:
    """Hash of a worker."""
    return f"{Worker.redis_worker_namespace_prefix}{worker}"


def worker_executions_key(worker: str) -> str:
    """Set of the members of a worker's executions, which RQ 3 keeps and its tools read."""
    return f"{PREFIX}:worker:{worker}:executions"


def leave_all(job: Job, pipeline: Pipeline) -> None:
    """Remove a job that is not started from its queue and from all registries.

    RQ's own method removes it where it belongs by its status, which it reads outside of the
    transaction, and which RQ 2 may not know.
    """
    pipeline.lrem(queue_key(job.origin), 1, job.id)
    for registry in _REGISTRIES:
        pipeline.zrem(registry.key_template.format(job.origin), job.id)
    pipeline.zrem(ready_key(job.origin), job.id)


def mark_queued(job: Job, at: datetime) -> None:
    """Set the fields of a queued job; `save` writes them."""
    job._status = JobStatus.QUEUED
    job.enqueued_at = at


def push(queue: Queue, job: Job, at: datetime, pipeline: Pipeline, *, front: bool) -> None:
    """Put a job that does not wait for others into its queue."""
    for registry in (DeferredJobRegistry, ScheduledJobRegistry):
        pipeline.zrem(registry.key_template.format(job.origin), job.id)
    pipeline.zrem(ready_key(job.origin), job.id)
    for dependency in job._dependency_ids:
        pipeline.srem(Job.dependents_key_for(dependency), job.id)
    if getattr(job, "has_rate_limit", False):  # another program's job, of RQ 3
        cast(Any, queue)._enqueue_rate_limited_job(job, pipeline=pipeline, at_front=front)
        return
    mark_queued(job, at)
    job.save(pipeline=pipeline)
    job.cleanup(ttl=job.ttl, pipeline=pipeline)
    queue.push_job_id(job.id, pipeline=pipeline, at_front=front)


def begin(job: Job, worker: str, ttl_s: int, pipeline: Pipeline) -> Execution:
    """Start an execution of a job by a worker."""
    execution = Execution.create(job, ttl_s, pipeline, worker_name=worker)
    key = worker_executions_key(worker)
    pipeline.sadd(key, execution.composite_key)
    pipeline.expire(key, ttl_s)
    job.prepare_for_execution(worker, pipeline)
    return execution


def end(job: Job, execution: Execution, pipeline: Pipeline) -> None:
    """End an execution, of a node with any version."""
    execution.delete(job, pipeline)
    pipeline.srem(worker_executions_key(execution.worker_name), execution.composite_key)


def take_dependents(
    job: Job, fetch: Callable[[Sequence[str]], Sequence[Job | None]], pipeline: Pipeline
) -> list[Job]:
    """Return the jobs that waited for `job` alone, and begin the transaction that finishes it.

    The caller has to push them in that transaction. RQ 3 does so in a second one, and until then
    they are `ready_to_enqueue`: a kill in between would leave them to the maintenance of its
    workers, and a node with RQ 2 does not know the status. `pipeline` is watching the dependents of
    `job`; `fetch` returns jobs of any queue by their ids.
    """
    found: Any = pipeline.smembers(job.dependents_key)
    ids = sorted(raw.decode(errors="backslashreplace") for raw in found)
    if ids:
        pipeline.watch(*map(Job.key_for, ids))  # one may be canceled or paused just now
    waiting = [
        one
        for one in fetch(ids)
        if one is not None and one.get_status(refresh=False) == JobStatus.DEFERRED
    ]
    released = [one for one in waiting if one.dependencies_are_met(job, pipeline)]
    pipeline.multi()
    if ended := set(ids) - {one.id for one in waiting}:
        pipeline.srem(job.dependents_key, *ended)  # retention keeps a job with dependents
    return released

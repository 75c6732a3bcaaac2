"""The workers in RQ's own records, so that `rq info` and rq-dashboard show them.

RQ keeps a hash per worker, which expires, and sets with the keys of these hashes.
"""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass

from redis.client import Pipeline

from ... import __version__
from .rq_format import (
    REDIS_WORKER_KEYS,
    WORKERS_BY_QUEUE_KEY,
    WorkerStatus,
    now,
    utcformat,
    worker_executions_key,
    worker_key,
)

_LEASES = 4  # leases for which the record is kept
_BORN = utcformat(now())


@dataclass(frozen=True)
class WorkerState:
    """The state of a worker as RQ's tools show it."""

    job: str | None = None  # the first one that it runs
    is_suspended: bool = False
    finished: int = 0  # jobs since its start
    failed: int = 0

    @property
    def status(self) -> str:
        if self.job is not None:
            return str(WorkerStatus.BUSY.value)
        return str((WorkerStatus.SUSPENDED if self.is_suspended else WorkerStatus.IDLE).value)


def record(
    pipeline: Pipeline, worker: str, queue: str, state: WorkerState, *, lease_s: float
) -> None:
    """Record this process as a worker, in the transaction that renews its lease."""
    key = worker_key(worker)
    pipeline.sadd(REDIS_WORKER_KEYS, key)
    pipeline.sadd(WORKERS_BY_QUEUE_KEY % queue, key)
    pipeline.hset(
        key,
        mapping={
            "birth": _BORN,
            "last_heartbeat": utcformat(now()),
            "queues": queue,
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "version": f"warmd {__version__}",
            "python_version": platform.python_version(),
            "state": state.status,
            "successful_job_count": state.finished,
            "failed_job_count": state.failed,
        },
    )
    if state.job is None:
        pipeline.hdel(key, "current_job")  # rq-dashboard takes an empty one for a job
    else:
        pipeline.hset(key, "current_job", state.job)
    for each in (key, worker_executions_key(worker)):
        pipeline.expire(each, int(_LEASES * lease_s) + 1)


def forget(pipeline: Pipeline, worker: str, queue: str) -> None:
    """Remove the record of a worker that has ended."""
    key = worker_key(worker)
    pipeline.srem(REDIS_WORKER_KEYS, key)
    pipeline.srem(WORKERS_BY_QUEUE_KEY % queue, key)
    pipeline.delete(key, worker_executions_key(worker))

"""The workers that may hold jobs: which there are, which live, and what the dead ones held.

RQ's own worker keeps one hand-off list for all workers and waits a minute before it fails what
lies there; here each worker has its own, so that when one dies it is known what it held.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rq.executions import Execution
from rq.registry import StartedJobRegistry

from . import keys
from .jobstore import JobStore


class Roster:
    """All workers of one Redis."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._connection = store.connection

    def workers(self) -> dict[str, str]:
        """The queue of every worker that may hold a job, by the worker's name."""
        found = self._connection.hgetall(keys.WORKERS)
        named = {keys.text(name): keys.text(queue) for name, queue in found.items()}
        return {name: q for name, q in named.items() if q in keys.QUEUES and name.count(":") == 2}

    def has_lease(self, worker: str) -> bool:
        return bool(self._connection.exists(keys.lease(worker)))

    def register(self, worker: str, queue: str, *, lease_s: int) -> None:
        """Give a sign of life, good for so long, and be known: who dies is then missed.

        Again and again: one that was silent for too long may have been buried alive.
        """
        with self._connection.pipeline() as pipeline:
            pipeline.set(keys.lease(worker), 1, ex=lease_s)
            pipeline.hset(keys.WORKERS, worker, queue)
            pipeline.execute()

    def taken(self, worker: str) -> list[bytes]:
        """The ids, as they stood in the queue, that were popped for a worker and are not begun."""
        found: Any = self._connection.lrange(keys.taken(worker), 0, -1)
        return list(found)

    def bury(self, worker: str, queue: str, *, spare: Collection[Execution] = ()) -> list[str]:
        """Put back whatever a dead worker held; return the ids. Safe to run twice or by two.

        `spare`: executions that are alive; a worker that lives calls this for what it lost.
        """
        returned = []
        target = self._store.queue(queue).key
        while (
            job_id := self._connection.lmove(keys.taken(worker), target, "RIGHT", "LEFT")
        ) is not None:
            returned.append(keys.text(job_id))
        registry = StartedJobRegistry(queue, connection=self._connection)
        members: Any = self._connection.zrange(registry.key, 0, -1)
        for member in members:
            job_id, _, execution_id = keys.text(member).partition(":")
            execution = Execution(execution_id, job_id, self._connection)
            if execution in spare:
                continue
            holder = self._connection.hget(execution.key, "worker_name")
            if holder is not None and holder != worker.encode():
                continue
            job = self._store.fetch(job_id)
            if job is None:
                self._connection.zrem(registry.key, member)
            elif self._store.requeue(job, execution):
                returned.append(job_id)
        self._connection.hdel(keys.WORKERS, worker)
        return returned

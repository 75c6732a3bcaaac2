"""The workers that may hold jobs: which there are, which live, and what the dead ones held.

RQ's own worker keeps one hand-off list for all workers and waits a minute before it fails what
lies there; here each worker has its own, so that when one dies it is known what it held.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from rq.executions import Execution
from rq.registry import StartedJobRegistry

from ...configs.queues import QUEUES
from . import keys
from .jobs import JobStore


class _Claim(NamedTuple):
    """A started job in the hands of a worker."""

    member: bytes  # of the registry of started jobs
    execution: Execution
    holder: str | None  # the worker; None where that is not known


class Roster:
    """All workers of one Redis."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._connection = store.connection

    def workers(self) -> dict[str, str]:
        """The queue of every worker that may hold a job, by the worker's name."""
        found = self._connection.hgetall(keys.WORKERS)
        named = {keys.text(name): keys.text(queue) for name, queue in found.items()}
        return {name: q for name, q in named.items() if q in QUEUES and name.count(":") == 2}

    def has_lease(self, worker: str) -> bool:
        return bool(self._connection.exists(keys.lease(worker)))

    def silent(self) -> dict[str, str]:
        """Those of `workers` that have no lease, in two round trips."""
        workers = self.workers()
        silent = self._without_lease(workers)
        return {name: queue for name, queue in workers.items() if name in silent}

    def register(self, worker: str, queue: str, *, lease_s: float) -> None:
        """Renew the worker's lease and list it, so that its death is noticed.

        It is listed at every renewal: another daemon may have called `bury` while it was silent.
        Only `bury` removes it from the list, so every worker that may hold a job is listed.
        """
        with self._connection.pipeline() as pipeline:
            pipeline.set(keys.lease(worker), 1, px=int(lease_s * 1000))
            pipeline.hset(keys.WORKERS, worker, queue)
            pipeline.execute()

    def taken(self, worker: str) -> list[bytes]:
        """The ids, as they stood in the queue, that were popped for a worker and are not begun."""
        found: Any = self._connection.lrange(keys.taken(worker), 0, -1)
        return list(found)

    def reclaim(self, worker: str, queue: str, *, spare: Collection[Execution] = ()) -> list[str]:
        """Put back what a worker holds; return the ids. Safe to run twice or by two.

        `spare`: executions that are alive; a worker that lives calls this for what it lost.
        """
        returned = []
        target = self._store.queue(queue).key
        while (
            job_id := self._connection.lmove(keys.taken(worker), target, "RIGHT", "LEFT")
        ) is not None:
            returned.append(keys.text(job_id))
        for claim in self._claims(queue):
            if claim.holder in (None, worker) and claim.execution not in spare:
                returned += self._return(queue, claim)
        return returned

    def bury(self, worker: str, queue: str) -> list[str]:
        """Requeue the jobs of a dead worker, then remove it from the list; return their ids.

        In this order: a process killed in between leaves the worker listed, so `bury` runs again.
        """
        returned = self.reclaim(worker, queue)
        self._connection.hdel(keys.WORKERS, worker)
        return returned

    def sweep(self) -> list[str]:
        """Requeue the jobs held by workers that are not listed and have no lease; return their ids.

        A slow worker may have taken a job after `bury` removed it. Scans all keys.
        """
        held = self._hand_offs()
        for queue in QUEUES:
            for claim in self._claims(queue):
                if claim.holder is not None:
                    held[claim.holder] = queue
        gone = self._without_lease(held.keys() - self.workers().keys())
        return [job_id for name in gone for job_id in self.reclaim(name, held[name])]

    def _hand_offs(self) -> dict[str, str]:
        """The queue that each hand-off list with a job in it was filled from, by its worker."""
        prefix = keys.taken("")
        found = {}
        for key in self._connection.scan_iter(match=f"{prefix}*", count=1000):
            worker = keys.text(key).removeprefix(prefix)
            for job in self._store.fetch_many([keys.text(raw) for raw in self.taken(worker)]):
                if job is not None:
                    found[worker] = job.origin
        return found

    def _without_lease(self, workers: Collection[str]) -> set[str]:
        with self._connection.pipeline(transaction=False) as pipeline:
            for worker in workers:
                pipeline.exists(keys.lease(worker))
            found = pipeline.execute()
        return {worker for worker, has_one in zip(workers, found, strict=True) if not has_one}

    def _claims(self, queue: str) -> list[_Claim]:
        """All claims to a queue's jobs, in two round trips."""
        registry = StartedJobRegistry(queue, connection=self._connection)
        members: Any = self._connection.zrange(registry.key, 0, -1)
        parts = [keys.text(member).partition(":") for member in members]
        executions = [Execution(own, job_id, self._connection) for job_id, _, own in parts]
        with self._connection.pipeline(transaction=False) as pipeline:
            for execution in executions:
                pipeline.hget(execution.key, "worker_name")
            found = pipeline.execute(raise_on_error=False)
        holders = [keys.text(raw) if isinstance(raw, bytes) else None for raw in found]
        return [_Claim(*parts) for parts in zip(members, executions, holders, strict=True)]

    def _return(self, queue: str, claim: _Claim) -> list[str]:
        """Queue the job of a claim again, if the claim still stands; return its id."""
        job = self._store.fetch(claim.execution.job_id)
        if job is not None:
            return [job.id] if self._store.requeue(job, claim.execution) else []
        registry = StartedJobRegistry(queue, connection=self._connection)
        self._connection.zrem(registry.key, claim.member)
        return []

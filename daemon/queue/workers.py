"""The registry of workers: their leases and their jobs; requeues the jobs of dead workers.

RQ's own workers share one hand-off list, and jobs in it fail after a minute. Here every worker has
its own list, so the jobs of a dead worker are known.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, NamedTuple

import redis
from redis.backoff import EqualJitterBackoff

from ...configs.queues import QUEUES
from . import keys, others, rq_workers
from .claims import Claims
from .clocks import clock
from .rq_format import PREFIX, Execution, StartedJobRegistry
from .rq_workers import WorkerState

RENEWALS = 10  # per lease; a command that takes longer than its share has failed
_USABLE = 2 / 3  # of a lease; in the rest of it horses end, before others take their jobs
# Delays between attempts to reach Redis: growing and random, as many workers lose it at once.
_BACKOFF = EqualJitterBackoff(cap=1.0, base=0.2)


class _Claim(NamedTuple):
    """A started job and its worker."""

    member: bytes  # of the registry of started jobs
    execution: Execution
    holder: str | None  # the worker; None: unknown


class WorkerRegistry:
    """All workers of one Redis."""

    def __init__(self, store: Claims) -> None:
        self._store = store
        self._connection = store.connection
        self._stray: dict[str, set[bytes]] = {queue: set() for queue in QUEUES}

    def workers(self) -> dict[str, str]:
        """The queue of every registered worker, by its name."""
        found = self._connection.hgetall(keys.WORKERS)
        named = {keys.text(name): keys.text(queue) for name, queue in found.items()}
        return {name: q for name, q in named.items() if q in QUEUES and name.count(":") == 2}

    def has_lease(self, worker: str) -> bool:
        return bool(self._connection.exists(keys.lease(worker)))

    def silent(self) -> dict[str, str]:
        """The registered workers without a lease, in two round trips."""
        workers = self.workers()
        silent = self._without_lease(workers)
        return {name: queue for name, queue in workers.items() if name in silent}

    def register(
        self,
        worker: str,
        queue: str,
        *,
        lease_s: float,
        state: WorkerState = WorkerState(),  # noqa: B008 - frozen
    ) -> None:
        """Renew the worker's lease and register it, so that its death is noticed.

        It is registered at every renewal: another daemon may have called `requeue_orphans` while
        the worker was silent. Only `requeue_orphans` unregisters it, so every worker that may hold
        a job is registered.
        """
        with self._connection.pipeline() as pipeline:
            pipeline.set(keys.lease(worker), 1, px=int(lease_s * 1000))
            pipeline.hset(keys.WORKERS, worker, queue)
            rq_workers.record(pipeline, worker, queue, state, lease_s=lease_s)
            pipeline.set(keys.RQ_PREFIX, PREFIX, nx=True)  # in case Redis has lost its data
            pipeline.execute()

    def taken(self, worker: str) -> list[bytes]:
        """The raw ids of the jobs that were popped for a worker and are not started."""
        found: Any = self._connection.lrange(keys.taken(worker), 0, -1)
        return list(found)

    def reclaim(self, worker: str, queue: str, *, spare: Collection[Execution] = ()) -> list[str]:
        """Requeue the jobs that a worker holds; return their ids. May run twice or concurrently.

        `spare`: executions that are running, when a living worker calls this.
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

    def requeue_orphans(self, worker: str, queue: str) -> list[str]:
        """Requeue the jobs of a dead worker, then unregister it; return the jobs' ids.

        In this order: if this process is killed in between, the worker stays registered and the
        call is repeated.
        """
        returned = self.reclaim(worker, queue)
        with self._connection.pipeline() as pipeline:
            pipeline.hdel(keys.WORKERS, worker)
            rq_workers.forget(pipeline, worker, queue)
            pipeline.execute()
        return returned

    def requeue_unregistered(self) -> list[str]:
        """Requeue jobs of workers that are not registered and have no lease; return their ids.

        A slow worker may have taken a job after `requeue_orphans` unregistered it. Also requeues
        jobs that an RQ worker, started by mistake, popped before it was killed. Scans all keys.
        """
        held = self._hand_offs()
        for queue in QUEUES:
            for claim in self._claims(queue):
                if claim.holder is not None:
                    held[claim.holder] = queue
        gone = self._without_lease(held.keys() - self.workers().keys())
        stray = [job_id for queue in QUEUES for job_id in self._return_stray(queue)]
        return stray + [job_id for name in gone for job_id in self.reclaim(name, held[name])]

    def _return_stray(self, queue: str) -> list[str]:
        """Requeue what RQ workers popped before the previous call; return the jobs' ids.

        A living one starts or fails a job within moments. If it does so just now, the job is in the
        queue twice; when it is popped for the second time it is dropped.
        """
        key = self._store.queue(queue).intermediate_queue_key
        listed: Any = self._connection.lrange(key, 0, -1)
        foreign = others.among(self._connection, listed)
        popped = [job_id for job_id in listed if job_id not in foreign]
        stay = [job_id for job_id in popped if job_id in self._stray[queue]]
        self._stray[queue] = set(popped)
        returned = []
        for job_id in stay:
            with self._connection.pipeline() as pipeline:
                pipeline.lrem(key, 1, job_id)
                pipeline.rpush(self._store.queue(queue).key, job_id)
                pipeline.execute()
            returned.append(keys.text(job_id))
        return returned

    def _hand_offs(self) -> dict[str, str]:
        """The queue of each worker whose hand-off list has a job, by the worker's name."""
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
        """All claims to warmd's jobs of a queue, in two round trips."""
        registry = StartedJobRegistry(queue, connection=self._connection)
        members: Any = self._connection.zrange(registry.key, 0, -1)
        ids = {member: member.partition(b":")[0] for member in members}
        foreign = others.among(self._connection, ids.values())
        members = [member for member in members if ids[member] not in foreign]
        parts = [keys.text(member).partition(":") for member in members]
        executions = [Execution(own, job_id, self._connection) for job_id, _, own in parts]
        with self._connection.pipeline(transaction=False) as pipeline:
            for execution in executions:
                pipeline.hget(execution.key, "worker_name")
            found = pipeline.execute(raise_on_error=False)
        holders = [keys.text(raw) if isinstance(raw, bytes) else None for raw in found]
        for execution, holder in zip(executions, holders, strict=True):
            execution.worker_name = holder or ""
        return [_Claim(*parts) for parts in zip(members, executions, holders, strict=True)]

    def _return(self, queue: str, claim: _Claim) -> list[str]:
        """Requeue the job of a claim that still exists; return its id."""
        job = self._store.fetch(claim.execution.job_id)
        if job is not None:
            has_left = self._store.requeue(job, claim.execution, reason="worker_died")
            return [job.id] if has_left else []
        registry = StartedJobRegistry(queue, connection=self._connection)
        self._connection.zrem(registry.key, claim.member)
        return []


class Lease:
    """The lease of one worker: until it expires, no other daemon requeues the worker's jobs.

    A thread renews it over its own connection, so that a busy or blocked worker keeps its jobs.
    """

    def __init__(self, url: str, worker: str, queue: str, *, length_s: float) -> None:
        self.renewed_at: float | None = None  # by `clock`: start of the last renewal
        self.state = WorkerState()  # for RQ's tools; replaced by the worker's main thread
        self._worker = worker
        self._queue = queue
        self._length_s = length_s
        self._pause_s = length_s / RENEWALS
        self._roster = WorkerRegistry(Claims(keys.connect_once(url, timeout_s=self._pause_s)))
        self._wake = threading.Event()
        self._is_ending = False

    def start(self) -> None:
        """Renew it from now on. The first renewal registers the worker."""
        threading.Thread(target=self._run, name="lease", daemon=True).start()

    def renew_soon(self) -> None:
        """Renew it at once, after the worker could not reach Redis."""
        self._wake.set()

    def end(self) -> None:
        """Stop renewing it."""
        self._is_ending = True
        self._wake.set()

    def is_running_out(self) -> bool:
        """Whether it expires soon: other daemons may then requeue the worker's jobs."""
        return self.renewed_at is not None and clock() - self.renewed_at > self.usable_s

    @property
    def usable_s(self) -> float:
        return self._length_s * _USABLE

    def _run(self) -> None:
        failures = 0  # in a row
        while not self._is_ending:
            sent = clock()
            pause_s = self._pause_s
            try:
                self._roster.register(
                    self._worker, self._queue, lease_s=self._length_s, state=self.state
                )
                self.renewed_at = sent
                failures = 0
            except redis.RedisError:
                pause_s = _BACKOFF.compute(failures)
                failures += 1
            self._wake.wait(pause_s)
            self._wake.clear()

"""Queries over many jobs, in few round trips.

RQ's own counting methods are not used: they fail started jobs whose heartbeat is late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import redis

from ...configs.labels import OWN_NEEDS, model_path, num_nodes, parse_line
from ...configs.queues import QUEUES
from ...jobs.ids import by_time
from . import keys, waiting
from .gangs import Gangs
from .records import NEVER, JobRecords
from .rq_format import (
    CanceledJobRegistry,
    DeferredJobRegistry,
    Execution,
    FailedJobRegistry,
    FinishedJobRegistry,
    Job,
    ScheduledJobRegistry,
    StartedJobRegistry,
    queue_key,
    rate_limited_key,
    rate_limits_key,
    ready_key,
    str_to_date,
)

_BATCH = 100  # jobs per round trip
# Jobs at the front of a queue that are read. The oldest job is behind those that were put at the
# front, which are always fewer than this.
_FRONT = 1000
_FEW = 8  # jobs whose positions are searched one by one

_REGISTRIES = {
    "started": StartedJobRegistry,
    "finished": FinishedJobRegistry,
    "failed": FailedJobRegistry,  # and stopped
    "deferred": DeferredJobRegistry,
    "scheduled": ScheduledJobRegistry,
    "canceled": CanceledJobRegistry,
}
STATUSES = ("queued", *_REGISTRIES, "stopped")


def every_id(connection: redis.Redis) -> list[str]:
    """The ids of all jobs in Redis."""
    return _members(connection, QUEUES, STATUSES)


def ids_with(connection: redis.Redis, statuses: Collection[str]) -> list[str]:
    """The ids of the jobs with some statuses, newest first. A few may have another one by now."""
    return sorted(_members(connection, QUEUES, set(statuses)), key=by_time, reverse=True)


def with_status(
    connection: redis.Redis,
    statuses: Collection[str],
    limit: int | None = None,
    fits: Callable[[str], bool] = lambda job_id: True,
) -> list[Job]:
    """The jobs with some statuses whose ids match, or the latest of them, newest first."""
    ids = list(filter(fits, ids_with(connection, statuses)))
    return of_ids(connection, ids, statuses, limit)


def of_ids(
    connection: redis.Redis, ids: Sequence[str], statuses: Collection[str], limit: int | None = None
) -> list[Job]:
    """The jobs with these ids that have one of the statuses, in this order, at most `limit`."""
    store, found = JobRecords(connection), list[Job]()
    for start in range(0, len(ids), _BATCH):
        jobs = store.fetch_many(ids[start : start + _BATCH])
        # A registry holds failed and stopped jobs, and a job may have changed its status.
        found += [job for job in jobs if job is not None and job._status in statuses]
        if limit is not None and len(found) >= limit:
            break
    return found[:limit]


def not_given_up(connection: redis.Redis, queue: str) -> list[str]:
    """The ids of all jobs of a queue except failed, stopped and canceled ones, newest first."""
    registries = (_REGISTRIES[status] for status in ("failed", "canceled"))
    given_up = [registry.key_template.format(queue) for registry in registries]
    found: Any = connection.zdiff([keys.jobs(queue), *given_up])
    return sorted(map(keys.text, found), key=by_time, reverse=True)


def counts(connection: redis.Redis, queue: str) -> dict[str, int]:
    """How many jobs of a queue have each status."""
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.llen(queue_key(queue))
        for registry in _REGISTRIES.values():
            pipeline.zcard(registry.key_template.format(queue))
        pipeline.scard(keys.stopped(queue))
        pipeline.zcard(ready_key(queue))
        pipeline.smembers(rate_limits_key())
        *found, stopped, ready, limits = pipeline.execute()
    numbers = dict(zip(("queued", *_REGISTRIES), found, strict=True))
    numbers["queued"] += len(waiting.members(connection, queue))
    numbers["deferred"] += ready + len(_rate_limited(connection, [queue], limits))
    return {**numbers, "failed": max(numbers["failed"] - stopped, 0), "stopped": stopped}


def positions(connection: redis.Redis, jobs: Sequence[Job]) -> dict[str, int]:
    """The position in its queue of each of these jobs that is queued, 1 for the next."""
    queued = [job for job in jobs if job._status == "queued"]
    if len(queued) <= _FEW:  # searched by Redis: the queue may have thousands of jobs
        with connection.pipeline(transaction=False) as pipeline:
            for job in queued:
                pipeline.lpos(queue_key(job.origin), job.id)
            places = pipeline.execute()
        pairs = zip(queued, places, strict=True)
        return {job.id: place + 1 for job, place in pairs if place is not None}
    with connection.pipeline(transaction=False) as pipeline:
        for queue in {job.origin for job in queued}:
            pipeline.lrange(queue_key(queue), 0, -1)
        found = pipeline.execute()
    return {keys.text(job_id): n for ids in found for n, job_id in enumerate(ids, start=1)}


class Notes(NamedTuple):
    """warmd's fields in a job's hash, in addition to RQ's."""

    executions: int
    is_paused: bool  # from the request until `unpause`
    paused_at: float | None  # unix seconds; None also for a pause by an earlier version
    needs: dict[str, str]  # labels of the node
    every_need: dict[str, str]  # also those that warmd sets alone
    model_path: str | None  # of a model folder that some nodes do not have
    retries_left: int
    waits_for: str | None  # what the machine of a running job lacks


class Nodes(NamedTuple):
    """The nodes of a job that runs on several."""

    names: Sequence[str] = ()  # in the order of their ranks
    awaited: str | None = None  # what a queued job waits for


def notes(connection: redis.Redis, jobs: Sequence[Job]) -> list[Notes]:
    """Return the notes of each job."""
    fields = (
        *(keys.FIELD_EXECUTION, keys.FIELD_PAUSE, keys.FIELD_PAUSED_AT),
        *(keys.FIELD_NEEDS, keys.FIELD_RETRIES, keys.FIELD_WAITS),
    )
    with connection.pipeline(transaction=False) as pipeline:
        for job in jobs:
            pipeline.hmget(job.key, *fields)
        found = pipeline.execute()
    return [_notes(job, *fields) for job, fields in zip(jobs, found, strict=True)]


def _notes(
    job: Job, number: Any, pause: Any, at: Any, needs: Any, retries: Any, waits: Any
) -> Notes:
    pairs = parse_line(keys.text(needs or b""))
    return Notes(
        executions=int(number or 0),
        is_paused=pause is not None,
        paused_at=None if at is None else float(at),
        needs={key: value for key, value in pairs.items() if key not in OWN_NEEDS},
        every_need=pairs,
        model_path=model_path(pairs),
        # Earlier versions had it in RQ's own field.
        retries_left=(job.retries_left or 0) if retries is None else int(retries),
        waits_for=None if waits is None else keys.text(waits),
    )


def nodes_of(connection: redis.Redis, jobs: Sequence[Job], found: Sequence[Notes]) -> list[Nodes]:
    """Return the nodes of each job of several nodes, or the reason why it waits."""
    gangs = Gangs(connection)
    nodes = []
    for job, note in zip(jobs, found, strict=True):
        wanted = num_nodes(note.every_need)
        if wanted == 1 or job._status not in ("queued", "started"):
            nodes.append(Nodes())
            continue
        gang = gangs.gang(job.id)
        if job._status == "started" or (gang is not None and gang.is_gathering):
            names = [] if gang is None else gang.nodes
            joined = None if job._status == "started" else f"{wanted} nodes, {len(names)} joined"
            nodes.append(Nodes(names if joined is None else [], joined))
        else:
            present = gangs.num_suitable(note.every_need)
            nodes.append(Nodes([], f"{wanted} nodes at once, {present} there"))
    return nodes


def scheduled_at(connection: redis.Redis, jobs: Sequence[Job]) -> dict[str, float]:
    """The times of the scheduled jobs in unix seconds; without paused jobs."""
    scheduled = [job for job in jobs if job._status == "scheduled"]
    with connection.pipeline(transaction=False) as pipeline:
        for job in scheduled:
            pipeline.zscore(ScheduledJobRegistry.key_template.format(job.origin), job.id)
        scores = pipeline.execute()
    found = zip(scheduled, scores, strict=True)
    return {job.id: score for job, score in found if score is not None and score < NEVER}


def started(connection: redis.Redis, queue: str) -> list[tuple[str, str]]:
    """The started jobs of a queue, each with the Redis name of its worker."""
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


def _members(
    connection: redis.Redis, queues: Collection[str], statuses: Collection[str]
) -> list[str]:
    """The ids of the jobs with one of the statuses, read in one transaction."""
    workers = connection.hgetall(keys.WORKERS) if "queued" in statuses else {}
    limits: Any = connection.smembers(rate_limits_key()) if "deferred" in statuses else set()
    with connection.pipeline() as pipeline:
        for worker in workers:
            pipeline.lrange(keys.taken(keys.text(worker)), 0, -1)
        for queue in queues:
            if "queued" in statuses:
                pipeline.lrange(queue_key(queue), 0, -1)
            for status, registry in _REGISTRIES.items():
                if status in statuses or (status == "failed" and "stopped" in statuses):
                    pipeline.zrange(registry.key_template.format(queue), 0, -1)
            if "deferred" in statuses:
                pipeline.zrange(ready_key(queue), 0, -1)
        found = pipeline.execute()
    found.append(_rate_limited(connection, queues, limits))
    if "queued" in statuses:
        found += [waiting.members(connection, queue) for queue in queues]
    ids = (keys.text(entry).split(":")[0] for entries in found for entry in entries)
    return list(dict.fromkeys(ids))


def _rate_limited(
    connection: redis.Redis, queues: Collection[str], limits: Collection[bytes]
) -> list[bytes]:
    """The ids of the jobs of some queues that RQ 3 holds back because of one of these limits."""
    if not limits:
        return []
    with connection.pipeline(transaction=False) as pipeline:
        for limit in limits:
            pipeline.zrange(rate_limited_key(keys.text(limit)), 0, -1)
        ids = [job_id for found in pipeline.execute() for job_id in found]
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in ids:
            pipeline.hget(Job.key_for(keys.text(job_id)), "origin")
        origins = pipeline.execute()
    return [
        one for one, queue in zip(ids, origins, strict=True) if keys.text(queue or b"") in queues
    ]


def oldest_wait_s(connection: redis.Redis, queue: str) -> float:
    """Return for how many seconds the oldest waiting job has been queued; 0 if none waits.

    Jobs that are set aside for a node with certain labels count as well.
    """
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.lrange(queue_key(queue), 0, _FRONT - 1)
        pipeline.smembers(keys.needs(queue))
        ids, lines = pipeline.execute()
    with connection.pipeline(transaction=False) as pipeline:
        for line in lines:
            pipeline.zrange(keys.set_aside(queue, keys.text(line)), 0, 0)
        ids += [job_id for found in pipeline.execute() for job_id in found]
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in ids:
            pipeline.hget(Job.key_for(keys.text(job_id)), "enqueued_at")
        pipeline.time()  # the times of jobs are by this clock
        *times, now = pipeline.execute(raise_on_error=False)  # a key may hold something else
    since = [at for at in map(_seconds, times) if at is not None]
    return max(now[0] + now[1] / 1e6 - min(since), 0.0) if since else 0.0


def _seconds(raw: Any) -> float | None:
    if not isinstance(raw, bytes) or not raw:
        return None
    try:
        return float(str_to_date(raw).timestamp())
    except ValueError:
        return None

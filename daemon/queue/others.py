"""Jobs of other RQ applications in a queue of warmd's: they stay in their place.

A pop by BLMOVE takes whatever is first. Another application's job is put back, and until no such
job is in the queue, workers pick warmd's jobs from between them. Such a job has a record, and an id
that is not one of warmd's; an id without a record is garbage, which the worker drops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import redis

from ...jobs.ids import is_job_id
from . import keys
from .rq_format import Job, queue_key

_MOST = 10_000  # jobs from the front of a queue that are examined at a time

# Moves the first of warmd's jobs in a queue to the list of a worker. KEYS: the queue, that list.
# ARGV: how many jobs to examine, pattern and longest length of warmd's ids, prefix of the keys of
# jobs. Returns the id, or how many other jobs there are.
_TAKE = """
local ids = redis.call('LRANGE', KEYS[1], 0, ARGV[1] - 1)
for _, id in ipairs(ids) do
  local is_own = #id <= tonumber(ARGV[3]) and string.find(id, ARGV[2])
  if is_own or redis.call('EXISTS', ARGV[4] .. id) == 0 then
    redis.call('LREM', KEYS[1], 1, id)
    redis.call('RPUSH', KEYS[2], id)
    return id
  end
end
return #ids
"""
_PATTERN = "^%l[%l%d]*%-" + "%d" * 8 + "%-" + "%d" * 6 + "%-" + "[%l%d]" * 4 + "$"  # as is_job_id
_LONGEST_ID = 37


def among(connection: redis.Redis, job_ids: Collection[bytes]) -> set[bytes]:
    """Return the ids among these that are of jobs of other applications."""
    foreign = [job_id for job_id in job_ids if not is_job_id(keys.text(job_id))]
    if not foreign:
        return set()
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in foreign:
            pipeline.exists(_record_of(job_id))
        found = pipeline.execute()
    return {job_id for job_id, has_record in zip(foreign, found, strict=True) if has_record}


def put_back(connection: redis.Redis, popped: bytes, queue: str, worker: str) -> None:
    """Put a job that was popped for a worker back to the front of its queue."""
    raw: Any = popped  # redis-py's annotation allows str only
    with connection.pipeline() as pipeline:
        pipeline.lrem(keys.taken(worker), 1, raw)
        pipeline.lpush(queue_key(queue), raw)
        pipeline.execute()


def take_from_between(connection: redis.Redis, queue: str, worker: str) -> tuple[bytes | None, int]:
    """Pop warmd's first job for a worker; return its id, or None and the number of other jobs."""
    listed, taken = queue_key(queue), keys.taken(worker)
    arguments = (str(_MOST), _PATTERN, str(_LONGEST_ID), Job.key_for(""))
    found: Any = connection.eval(_TAKE, 2, listed, taken, *arguments)
    return (None, found) if isinstance(found, int) else (bytes(found), 0)


def count(connection: redis.Redis, queues: Iterable[str]) -> dict[str, int]:
    """Return how many other jobs each queue has at its front; queues without any are left out."""
    found = {}
    for queue in queues:
        ids: Any = connection.lrange(queue_key(queue), 0, _MOST - 1)
        if others := among(connection, ids):
            found[queue] = len(others)
    return found


def _record_of(job_id: bytes) -> Any:
    """The key of a job's record; redis-py's annotation allows str only."""
    return Job.key_for("").encode() + job_id

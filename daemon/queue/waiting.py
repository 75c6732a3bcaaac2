"""How long the jobs of a queue have been waiting."""

from __future__ import annotations

from typing import Any

import redis

from . import keys
from .rq_format import Job, queue_key, str_to_date

# Jobs at the front of a queue that are read. The oldest job is behind those that were put at the
# front, which are always fewer than this.
_FRONT = 1000


def oldest_s(connection: redis.Redis, queue: str) -> float:
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

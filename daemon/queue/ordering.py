"""The order of a queue: a queued job is moved in one transaction."""

from __future__ import annotations

from typing import Any

import redis

from . import keys
from .records import Job, JobRecords


class Ordering(JobRecords):
    """Moves queued jobs."""

    def order(self, queue: str) -> list[str]:
        """Return the queued jobs of a queue, the next one first."""
        found: Any = self.connection.lrange(self.queue(queue).key, 0, -1)
        return [keys.text(name) for name in found]

    def move(self, job: Job, position: int) -> int | None:
        """Move a job to a position of its queue, 1 for the next; return its new position.

        None if the queue does not hold the job: it has started, or waits for something else.
        """
        key = self.queue(job.origin).key
        while True:
            with self.connection.pipeline() as pipeline:
                pipeline.watch(key)
                others = [keys.text(name) for name in pipeline.lrange(key, 0, -1)]
                if job.id not in others:
                    return None
                others.remove(job.id)
                pipeline.multi()
                pipeline.lrem(key, 1, job.id)
                if position > len(others):
                    pipeline.rpush(key, job.id)
                else:
                    pipeline.linsert(key, "BEFORE", others[position - 1], job.id)
                try:
                    pipeline.execute()
                except redis.WatchError:  # a worker has taken a job, or one was added
                    continue
                return min(position, len(others) + 1)

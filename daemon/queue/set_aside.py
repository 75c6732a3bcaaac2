"""Jobs set aside: queued jobs that wait for a node with certain labels.

Such a job is queued like any other. A worker that pops it and lacks a label sets it aside, next to
the queue, where only workers with the labels find it. So a pop stays one command, and a job is set
aside once, however many workers cannot run it. A job that needs a later format of run directories
than this version knows (`schema`) is refused in the same way.

The need for a model folder is added when a worker has started a job and its machine does not have
the folder: a machine meets the need while the folder is on its disk. The need for several nodes is
met while enough nodes are there to gather for the job (gangs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis
from redis.client import Pipeline

from ...configs.labels import (
    MODEL,
    NODES,
    Labels,
    line_of,
    model_need,
    model_path,
    parse_line,
    unmet,
)
from . import keys, totals
from .records import JobRecords, text_or_none
from .rq_format import WORKERS_SUSPENDED, Execution, Job, JobStatus, mark_queued
from .transactions import change, end


@dataclass(frozen=True)
class Offer:
    """What the machine of a worker offers to jobs."""

    labels: Labels
    has_model: Callable[[str], bool]  # whether the model folder at a path is on this machine
    has_nodes: Callable[[Labels], bool]  # whether enough nodes are there for these needs

    def unmet(self, needs: Labels) -> dict[str, str]:
        """Return the needs that are not met now."""
        special = (MODEL, NODES)
        missing = unmet({k: need for k, need in needs.items() if k not in special}, self.labels)
        if missing:
            return missing
        path = model_path(needs)
        if path is not None and not self.has_model(path):
            return model_need(path)
        if NODES in needs and not self.has_nodes(needs):
            return {NODES: needs[NODES]}
        return {}


# Moves the oldest of the jobs that are set aside to the list of a worker. KEYS: that list, the set
# of needs, and a sorted set for each of the needs in ARGV. Returns the id; removes empty sets.
_TAKE = """
local best, from, oldest
for i = 3, #KEYS do
  local first = redis.call('ZRANGE', KEYS[i], 0, 0, 'WITHSCORES')
  if #first == 0 then
    redis.call('SREM', KEYS[2], ARGV[i - 2])
  elseif not best or tonumber(first[2]) < oldest then
    best, from, oldest = first[1], KEYS[i], tonumber(first[2])
  end
end
if best then
  redis.call('ZREM', from, best)
  redis.call('RPUSH', KEYS[1], best)
end
return best
"""


class SetAside(JobRecords):
    """Sets jobs aside and finds them again."""

    def needs_of(self, job: Job) -> dict[str, str]:
        """The labels that the job needs."""
        return parse_line(text_or_none(self.connection.hget(job.key, keys.FIELD_NEEDS)) or "")

    def needs_of_popped(self, popped: bytes) -> dict[str, str]:
        """The labels that a popped job needs; none if it is not a job."""
        raw: Any = None
        with suppress(redis.ResponseError):  # no hash: not a job; `begin` drops it
            raw = self.connection.hget(Job.key_for(keys.text(popped)), keys.FIELD_NEEDS)
        return parse_line(text_or_none(raw) or "")

    def set_aside(self, popped: bytes, queue: str, worker: str, needs: Labels) -> bool:
        """Set a job aside that was popped for a worker and has needs that are not met now.

        False if the job does not wait any more: `begin` drops it then.
        """
        job_id = keys.text(popped)
        job = self.fetch(job_id)
        if job is None or job.origin != queue:
            return False
        line = line_of(needs)

        def write(pipeline: Pipeline) -> None:
            pipeline.lrem(keys.taken(worker), 1, job_id)
            pipeline.sadd(keys.needs(queue), line)
            pipeline.zadd(keys.set_aside(queue, line), {job_id: job.created_at.timestamp()})

        return bool(change(self.connection, job, (JobStatus.QUEUED,), write))

    def set_aside_for_model(self, job: Job, execution: Execution, path: str) -> bool:
        """End an execution whose machine does not have the model folder at `path`.

        The job waits for a machine that has it; if a pause was requested it is parked. False if the
        execution was no longer the current one.
        """
        needs = line_of({**self.needs_of(job), **model_need(path)})

        def note(pipeline: Pipeline) -> None:
            totals.requeued(pipeline, job, "model_missing")
            pipeline.hset(job.key, keys.FIELD_NEEDS, needs)

        def write(pipeline: Pipeline) -> None:
            mark_queued(job, self.now())
            job.save(pipeline=pipeline, include_meta=False, include_result=False)
            note(pipeline)
            pipeline.sadd(keys.needs(job.origin), needs)
            aside = keys.set_aside(job.origin, needs)
            pipeline.zadd(aside, {job.id: job.created_at.timestamp()})

        def put_away(pipeline: Pipeline) -> None:
            job.save(pipeline=pipeline, include_meta=False, include_result=False)
            note(pipeline)
            self._put_away(job, pipeline)

        return end(self.connection, job, execution, write, if_paused=put_away)

    def waiting_needs(self, queue: str, offer: Offer) -> tuple[bool, list[str], str | None]:
        """Whether workers may take jobs (`rq suspend`), and which needs this machine meets.

        The needs are those for which jobs of the queue may be set aside. The last value is the job
        that gathers nodes now.
        """
        with self.connection.pipeline(transaction=False) as pipeline:
            pipeline.exists(WORKERS_SUSPENDED)
            pipeline.smembers(keys.needs(queue))
            pipeline.get(keys.GATHERING)
            is_suspended, lines, gathering = pipeline.execute()
        met = [line for line in map(keys.text, lines) if not offer.unmet(parse_line(line))]
        return not is_suspended, sorted(met), text_or_none(gathering)

    def take_set_aside(self, queue: str, worker: str, lines: list[str]) -> bytes | None:
        """Pop the oldest job with one of these needs for a worker; return its id."""
        zsets = [keys.set_aside(queue, line) for line in lines]
        taken = (keys.taken(worker), keys.needs(queue), *zsets)
        found: Any = self.connection.eval(_TAKE, len(taken), *taken, *lines)
        return found if found is None else bytes(found)

    def _leave_set_aside(self, job: Job, pipeline: Pipeline, needs: Labels) -> None:
        """Remove a job that no longer waits, in the transaction that changes it."""
        if needs:
            pipeline.zrem(keys.set_aside(job.origin, line_of(needs)), job.id)


def members(connection: redis.Redis, queue: str) -> list[bytes]:
    """The ids of all jobs of a queue that are set aside."""
    lines: Any = connection.smembers(keys.needs(queue))
    with connection.pipeline(transaction=False) as pipeline:
        for line in sorted(map(keys.text, lines)):
            pipeline.zrange(keys.set_aside(queue, line), 0, -1)
        return [job_id for found in pipeline.execute() for job_id in found]

"""Jobs set aside: queued jobs that wait for a node with certain labels.

Such a job is queued like any other. A worker that pops it and lacks a label sets it aside, next to
the queue, where only workers with the labels find it. So a pop stays one command, and a job is set
aside once, however many workers cannot run it. A job that needs a later format of run directories
than this version knows (`schema`) is refused in the same way.

The need for a model folder is added when a worker has started a job and its machine does not have
the folder: a machine meets the need while the folder is on its disk.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import redis
from redis.client import Pipeline
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.suspension import WORKERS_SUSPENDED

from ...configs.labels import MODEL, Labels, line_of, model_need, model_path, parse_line, unmet
from . import keys, totals
from .records import JobRecords, text_or_none
from .transactions import change, end

HasModel = Callable[[str], bool]  # whether the model folder at a path is on this machine

# Moves the oldest of the jobs that are set aside to the list of a worker. KEYS: that list, the set
# of needs, and a sorted set for each of the needs in ARGV. Returns the id; forgets empty sets.
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

    def set_aside(
        self, popped: bytes, queue: str, worker: str, labels: Labels, has_model: HasModel
    ) -> tuple[str, dict[str, str]] | None:
        """Set a job aside that was popped for a worker with these labels and needs others.

        Returns its id and the unmet needs; None if the worker may begin it.
        """
        job_id = keys.text(popped)
        raw: Any = None
        with suppress(redis.ResponseError):  # no hash: no job, which `begin` drops
            raw = self.connection.hget(Job.key_for(job_id), keys.FIELD_NEEDS)
        needs = parse_line(text_or_none(raw) or "")
        missing = _unmet(needs, labels, has_model)
        job = self.fetch(job_id) if missing else None
        if job is None or job.origin != queue:
            return None
        line = line_of(needs)

        def write(pipeline: Pipeline) -> None:
            pipeline.lrem(keys.taken(worker), 1, job_id)
            pipeline.sadd(keys.needs(queue), line)
            pipeline.zadd(keys.set_aside(queue, line), {job_id: job.created_at.timestamp()})

        is_done = change(self.connection, job, (JobStatus.QUEUED,), write)
        return (job_id, missing) if is_done else None

    def set_aside_for_model(self, job: Job, execution: Execution, path: str) -> bool:
        """End an execution whose machine does not have the model folder at `path`.

        The job waits for a machine that has it; if a pause was requested it is put away. False if
        the execution was no longer the current one.
        """
        needs = line_of({**self.needs_of(job), **model_need(path)})

        def note(pipeline: Pipeline) -> None:
            totals.requeued(pipeline, job, "model_missing")
            pipeline.hset(job.key, keys.FIELD_NEEDS, needs)

        def write(pipeline: Pipeline) -> None:
            self.queue(job.origin)._prepare_for_queue(job)
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

    def offers(self, queue: str, labels: Labels, has_model: HasModel) -> tuple[bool, list[str]]:
        """Whether workers may take jobs (`rq suspend`), and the needs that this machine meets.

        The needs are those for which jobs of the queue may be set aside.
        """
        with self.connection.pipeline(transaction=False) as pipeline:
            pipeline.exists(WORKERS_SUSPENDED)
            pipeline.smembers(keys.needs(queue))
            is_suspended, lines = pipeline.execute()
        met = [
            line
            for line in map(keys.text, lines)
            if not _unmet(parse_line(line), labels, has_model)
        ]
        return not is_suspended, sorted(met)

    def take_set_aside(self, queue: str, worker: str, lines: list[str]) -> bytes | None:
        """Pop the oldest job with one of these needs for a worker; return its id."""
        zsets = [keys.set_aside(queue, line) for line in lines]
        taken = (keys.taken(worker), keys.needs(queue), *zsets)
        found: Any = self.connection.eval(_TAKE, len(taken), *taken, *lines)
        return found if found is None else bytes(found)

    def _leave_set_aside(self, job: Job, pipeline: Pipeline, needs: Labels) -> None:
        """Remove a job that will wait no more, in the transaction that changes it."""
        if needs:
            pipeline.zrem(keys.set_aside(job.origin, line_of(needs)), job.id)


def _unmet(needs: Labels, labels: Labels, has_model: HasModel) -> dict[str, str]:
    missing = unmet({key: need for key, need in needs.items() if key != MODEL}, labels)
    path = model_path(needs)
    if path is not None and not missing and not has_model(path):
        missing = model_need(path)
    return missing


def members(connection: redis.Redis, queue: str) -> list[bytes]:
    """The ids of all jobs of a queue that are set aside."""
    lines: Any = connection.smembers(keys.needs(queue))
    with connection.pipeline(transaction=False) as pipeline:
        for line in sorted(map(keys.text, lines)):
            pipeline.zrange(keys.set_aside(queue, line), 0, -1)
        return [job_id for found in pipeline.execute() for job_id in found]

"""Waiting jobs: set aside for a node with certain labels, paused, released, canceled, reordered.

A job that is set aside is queued like any other. A worker that pops it and lacks a label sets it
aside, next to the queue, where only workers with the labels find it. So a pop stays one command,
and a job is set aside once, however many workers cannot run it. A job that needs a later format of
run directories than this version knows (`schema`) is refused in the same way.

The need for a model folder is added when a worker has started a job and its machine does not have
the folder: a machine meets the need while the folder is on its disk. The need for several nodes is
met while enough nodes are there to gather for the job (gangs.py).

A running job that is paused is held: it stays started, with the request in its hash. Any other job
is parked: scheduled for a date that never comes, until `unpause`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
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
from . import keys
from .records import NEVER, JobRecords, text_or_none
from .rq_format import WORKERS_SUSPENDED, Job, JobStatus, leave_all, utcformat
from .states import move

_PAUSE_FIELDS = (keys.FIELD_PAUSE, keys.FIELD_PAUSED_AT)


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


class Waiting(JobRecords):
    """The moves of jobs that wait, and the requests of users to running ones."""

    # --- set aside for a node with certain labels ---------------------------------------------

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
            assert job is not None
            pipeline.lrem(keys.taken(worker), 1, job_id)
            self._put_aside(job, line, pipeline)

        return move(self.connection, job, "set aside", write) is not None

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

    # --- paused -------------------------------------------------------------------------------

    def request_pause(self, job: Job, how: str) -> bool:
        """Request that a started job waits in memory ("hold"), or saves and ends ("release")."""
        return self._request(job, lambda p: self._write_pause(job, how, p))

    def withdraw_pause(self, job: Job) -> bool:
        """Continue a held job; False if it is not started."""
        return self._request(job, lambda p: p.hdel(job.key, *_PAUSE_FIELDS))

    def pause_of(self, job: Job) -> str | None:
        """The requested pause that is still in effect: "hold" or "release"."""
        return text_or_none(self.connection.hget(job.key, keys.FIELD_PAUSE))

    def pause_waiting(self, job: Job) -> bool:
        """Park a waiting job until `unpause`; False if it does not wait."""

        needs = self.needs_of(job)

        def write(pipeline: Pipeline) -> None:
            leave_all(job, pipeline)
            self._leave_set_aside(job, pipeline, needs)
            for dependency in job._dependency_ids:
                # Otherwise the end of the dependency would queue the job.
                pipeline.srem(Job.dependents_key_for(dependency), job.id)
            if due is not None and due < NEVER:
                pipeline.hset(job.key, keys.FIELD_DUE, due)
            self._put_away(job, pipeline)

        due: Any = self.connection.zscore(self._scheduled(job).key, job.id)
        return move(self.connection, job, "pause", write) is not None

    def unpause(self, job: Job) -> JobStatus | None:
        """Return a parked job to the front of its queue, or to its earlier wait.

        Returns its status then, before a worker takes it; None if it is not parked.
        """
        raw: Any = self.connection.hget(job.key, keys.FIELD_DUE)
        due = float(raw or 0)
        is_early = due > self.clock()
        # If the dependencies finish just now, `DueJobs` queues it soon.
        is_deferred = not self.are_met([job])[0]

        def write(pipeline: Pipeline) -> None:
            pipeline.hdel(job.key, *_PAUSE_FIELDS, keys.FIELD_DUE)
            if is_early:
                pipeline.zadd(self._scheduled(job).key, {job.id: due})
            elif is_deferred:
                self._defer(job, pipeline)
            else:
                self._push(job, pipeline, front=True)

        if self.pause_of(job) is None:
            return None
        if move(self.connection, job, "unpause", write) is None:
            return None
        if is_early:
            return JobStatus.SCHEDULED
        return JobStatus.DEFERRED if is_deferred else JobStatus.QUEUED

    # --- released, stopped, canceled ----------------------------------------------------------

    def release(self, job: Job) -> None:
        """Queue a job whose start time has come or whose dependencies have finished.

        A scheduled job with unfinished dependencies becomes deferred. Dependencies are checked
        again afterwards: one that finishes in between must not leave the job deferred.
        """
        if not self.are_met([job])[0]:
            move(self.connection, job, "defer", partial(self._defer, job))
        if self.are_met([job])[0]:
            is_front = bool(job.enqueue_at_front)

            def write(pipeline: Pipeline) -> None:
                self._push(job, pipeline, front=is_front)

            move(self.connection, job, "release", write)

    def request_stop(self, job: Job, how: str) -> bool:
        """Request that a started job is stopped ("cancel") or killed ("kill")."""
        return self._request(job, lambda p: p.hset(job.key, keys.FIELD_STOP, how))

    def cancel_waiting(self, job: Job) -> bool:
        """Cancel a waiting job; False if it does not wait."""
        return self.end_waiting(job, JobStatus.CANCELED, self.now())

    def end_waiting(self, job: Job, status: JobStatus, ended_at: datetime) -> bool:
        """End a waiting job without a result; False if it does not wait."""
        needs = self.needs_of(job)

        def write(pipeline: Pipeline) -> None:
            leave_all(job, pipeline)
            self._leave_set_aside(job, pipeline, needs)
            job._status, job.ended_at = status, ended_at  # some registries save the job
            fields: dict[Any, Any] = {"status": status, "ended_at": utcformat(ended_at)}
            pipeline.hset(job.key, mapping=fields)
            self._registry_of(job, status).add(job, ttl=-1, pipeline=pipeline)

        return move(self.connection, job, "cancel", write, to=status) is not None

    def _request(self, job: Job, write: Callable[[Pipeline], Any]) -> bool:
        def write_and_publish(pipeline: Pipeline) -> None:
            write(pipeline)
            pipeline.publish(keys.CONTROL_CHANNEL, job.id)

        return move(self.connection, job, "request", write_and_publish) is not None

    # --- the order of a queue -----------------------------------------------------------------

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


def members(connection: redis.Redis, queue: str) -> list[bytes]:
    """The ids of all jobs of a queue that are set aside."""
    lines: Any = connection.smembers(keys.needs(queue))
    with connection.pipeline(transaction=False) as pipeline:
        for line in sorted(map(keys.text, lines)):
            pipeline.zrange(keys.set_aside(queue, line), 0, -1)
        return [job_id for found in pipeline.execute() for job_id in found]

"""The states of a job and the moves between them: one table for the code, the tests and the docs.

A job is always in exactly one place, and each move is one transaction (WATCH, MULTI, EXEC). If the
job changes while it is read, nothing is written, and the move is tried again.

  queue ──pop──> taken by a worker ──begin──> started ──finish/fail/stop──> its registry
   ^ ^                   │                        │
   │ └─ requeue_orphans ─┴── requeue(_orphans) ───┤
   └─ unpause ─────────── paused <──── park ──────┘ (if a pause was requested)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import redis
from redis.client import Pipeline

from . import job_index, keys, totals
from .rq_format import Execution, Job, JobStatus, end as end_execution, status_of

QUEUED, DEFERRED, SCHEDULED = JobStatus.QUEUED, JobStatus.DEFERRED, JobStatus.SCHEDULED
STARTED, FINISHED, FAILED = JobStatus.STARTED, JobStatus.FINISHED, JobStatus.FAILED
STOPPED, CANCELED = JobStatus.STOPPED, JobStatus.CANCELED

WAITING = (QUEUED, DEFERRED, SCHEDULED)
ENDED = (FINISHED, FAILED, STOPPED, CANCELED)

# The place of a job in each state: RQ keeps stopped jobs in the registry of failed ones.
REGISTRIES = {
    QUEUED: "queue",
    DEFERRED: "deferred",
    SCHEDULED: "scheduled",
    STARTED: "started",
    FINISHED: "finished",
    FAILED: "failed",
    STOPPED: "failed",
    CANCELED: "canceled",
}

# Fields of a job's hash about its current executions: meaningless once the job has ended.
EXECUTION_FIELDS = (keys.FIELD_KILLS, keys.FIELD_SUSPECT, keys.FIELD_STOP, keys.FIELD_PAUSE)
_TRANSIENT = (
    *EXECUTION_FIELDS,
    keys.FIELD_PAUSED_AT,
    keys.FIELD_DUE,
    keys.FIELD_BEGUN,
    keys.FIELD_WAITS,
    keys.FIELD_RETRIED,
)


@dataclass(frozen=True)
class Move:
    """One way from state to state."""

    source: tuple[JobStatus, ...]  # none: Redis does not have the job
    to: tuple[JobStatus, ...]  # the possible ones; none: Redis has it no more
    index: tuple[Literal["created", "ended", "revived", "removed"], ...] = ()  # of job_index
    counter: Literal["begun", "ended", "requeued"] | None = None  # of totals
    clears: tuple[str, ...] = ()  # fields of the job's hash


MOVES = {
    "submit": Move((), WAITING, ("created",)),
    "restore": Move((), WAITING, ("created",)),
    "record": Move((), ENDED, ("created", "ended")),
    "set aside": Move((QUEUED,), (QUEUED,)),
    "release": Move((SCHEDULED, DEFERRED), (QUEUED,)),
    "defer": Move((SCHEDULED,), (DEFERRED,)),
    "pause": Move(WAITING, (SCHEDULED,)),
    "unpause": Move((SCHEDULED,), WAITING),
    "cancel": Move(WAITING, ENDED, ("ended",), clears=_TRANSIENT),
    "begin": Move((QUEUED,), (STARTED,), ("revived",), "begun", (keys.FIELD_WAITS,)),
    "request": Move((STARTED,), (STARTED,)),
    "finish": Move((STARTED,), (FINISHED,), ("ended",), "ended", _TRANSIENT),
    "fail": Move((STARTED,), (FAILED,), ("ended",), "ended", _TRANSIENT),
    "stop": Move((STARTED,), (STOPPED,), ("ended",), "ended", _TRANSIENT),
    "requeue": Move((STARTED,), (QUEUED,), counter="requeued"),
    "retry": Move((STARTED,), (SCHEDULED,), counter="requeued"),
    "park": Move((STARTED,), (SCHEDULED,), counter="requeued"),
    "resume": Move(ENDED, (QUEUED,), ("revived",), clears=(*_TRANSIENT, "exc_info")),
    "remove": Move(ENDED, (), ("removed",)),
}


def move(
    connection: redis.Redis,
    job: Job,
    how: str,
    write: Callable[[Pipeline], Any],
    *,
    to: JobStatus | None = None,
    from_cli: bool = False,
    only_new: bool = False,
) -> list[Any] | None:
    """Make a move: `write` puts the job into its new place, and the table says what follows.

    Returns the replies; None if the job is not where the move begins. `to`: the new state, where
    the table has several ends. `from_cli`: of a new job. Its `write` may WATCH and read first,
    unless it is `only_new`: then None is returned if Redis has the job.
    """
    row, status = MOVES[how], job._status
    while True:
        with connection.pipeline() as pipeline:
            if row.source or only_new:
                pipeline.watch(job.key)
                # Executed at once: the pipeline is watching.
                found = status_of(pipeline.hget(job.key, "status"))
                if row.source and found is not None and found in row.source:
                    job._status = found
                elif row.source or pipeline.exists(job.key):
                    return None
                pipeline.multi()
            try:
                write(pipeline)
                follow(pipeline, job, how, to=to, from_cli=from_cli)
                return pipeline.execute()
            except redis.WatchError:
                job._status = status


def move_claimed(
    connection: redis.Redis,
    job: Job,
    claim: Execution,
    moves: Mapping[str, Callable[[Pipeline], Any]],
    *,
    choose: Callable[[Pipeline], str],
    reason: totals.Reason = "requested",
) -> str | None:
    """End an execution by one of these moves; return it, or None if it has ended already.

    `choose` is called first, in each try: it may WATCH and read more, and begin the transaction.
    `reason`: why the job is queued again.
    """
    key = job.started_job_registry.key
    while True:
        with connection.pipeline() as pipeline:
            # Watches the hash and not the registry, which every claim of every worker changes: an
            # execution never ends without a change of its job's hash.
            pipeline.watch(job.key, job.dependents_key)
            if pipeline.zscore(key, claim.composite_key) is None:
                return None
            how = choose(pipeline)
            if not pipeline.explicit_transaction:
                pipeline.multi()
            end_execution(job, claim, pipeline)
            moves[how](pipeline)
            follow(pipeline, job, how, reason=reason)
            try:
                pipeline.execute()
            except redis.WatchError:
                continue
            return how


def follow(
    pipeline: Pipeline,
    job: Job,
    how: str,
    *,
    to: JobStatus | None = None,
    from_cli: bool = False,
    reason: totals.Reason = "requested",
) -> None:
    """Write what follows from a move: counters, cleared fields and indices."""
    row = MOVES[how]
    ended = to if to is not None else row.to[0] if row.to else None
    match row.counter:
        case "begun":
            totals.begun(pipeline, job)
        case "ended":
            assert ended is not None
            totals.ended(pipeline, job, ended)
        case "requeued":
            totals.requeued(pipeline, job, reason)
    if row.clears:
        pipeline.hdel(job.key, *row.clears)
    if "created" in row.index:
        job_index.created(pipeline, job, from_cli=from_cli)
    if "ended" in row.index:
        assert ended is not None
        assert job.ended_at is not None
        job_index.ended(pipeline, job, ended, job.ended_at)
    if "revived" in row.index:
        job_index.revived(pipeline, job)
    if "removed" in row.index:
        job_index.removed(pipeline, job.id)

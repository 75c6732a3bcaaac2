"""Adoption of the jobs that Redis has lost, at the start of the daemon, before its workers start.

Redis may have lost everything, or only its latest writes, so each job of this home is compared with
its run directory, which is authoritative. Waiting and running jobs are queued as they were, paused
and ended ones recorded as such. Jobs of earlier versions, whose run directories do not have what
was asked, are adopted only after a repair of the append-only file, and only if they had begun.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson

from ...jobs import KINDS, spec_class
from ...jobs.errors import Conflict, WarmdError
from ...jobs.files import records
from ...jobs.files.atomic import write_atomic
from ...jobs.ids import by_time
from ..host.home import Home
from ..queue import listing
from ..queue.jobs import ENDED, WAITING, EndedJob, Job
from ..queue.nodes import NodeRegistry
from ..runs import asked
from ..runs.order import Order
from ..runs.rundir import RunDir, job_ids
from . import adopt
from .adopt import Standing
from .places import Places

log = logging.getLogger(__name__)

_REPORT = "adopted.json"  # in the folder of the copies of append-only files
_SHOWN = 10  # ids in a line
_BATCH = 100  # jobs per transaction or round trip

# Clients elsewhere submit to an external Redis at any time, and may be about to queue a job. Jobs
# of this time before the start are adopted by the second try.
_SUBMITTING_S = 60.0

# For horses of a daemon that was killed. The lock of a run directory is released with its horse.
_PATIENCE_S = 5.0

_JUST_SUBMITTED = "submitted just now, perhaps by a client that is about to queue it"
_EARLIER = "never begun, and submitted by an earlier version: `warmd resume` queues it"


@dataclass
class Adoption:
    """What one start has adopted."""

    at: float = field(default_factory=time.time)  # unix seconds
    adopted: list[str] = field(default_factory=list)  # jobs that wait, are scheduled or paused
    ended: list[str] = field(default_factory=list)  # jobs that are recorded as ended
    corrected: list[str] = field(default_factory=list)  # jobs of which Redis had an earlier state
    missing: dict[str, str] = field(default_factory=dict)  # jobs not restored, with the reason
    repairs: list[str] = field(default_factory=list)  # the copies of all earlier repairs
    has_lost: bool = False  # whether it is the first one after a repair

    def describe(self) -> list[str]:
        """Return what happened in lines; none if nothing did."""
        lines = [
            f"{len(ids)} {'job' if len(ids) == 1 else 'jobs'} {what}: {_some(ids)}"
            for ids, what in (
                (self.adopted, "adopted from run directories"),
                (self.ended, "recorded as ended"),
                (self.corrected, "set to the state in their run directories"),
            )
            if ids
        ]
        lines += [f"not restored: {job}: {reason}" for job, reason in self.missing.items()]
        return lines[:_SHOWN] + ([f"… {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])


def latest(home: Home) -> Adoption | None:
    """Return the latest adoption of a home that did anything."""
    return records.read(home.damaged / _REPORT, Adoption)


def has_lost(home: Home, repairs: Collection[str]) -> bool:
    """Whether an append-only file was repaired after the latest adoption; `repairs`: the copies."""
    before = latest(home)
    return not set(repairs) <= set([] if before is None else before.repairs)


class Adopter:
    """Compares the jobs of a home with its Redis."""

    def __init__(self, places: Places, *, is_shared: bool) -> None:
        """`is_shared`: the Redis is an external one, which other nodes may use."""
        self._places = places
        self._store = places.store
        self._home = places.home
        self._is_shared = is_shared
        self._patient_until = time.monotonic() + _PATIENCE_S

    def run(
        self, *, begun_at: float, repairs: list[str], earlier: Adoption | None = None
    ) -> Adoption:
        """Adopt what Redis has lost. Raises RedisError.

        `begun_at`: when Redis was started; jobs submitted since are left to their clients.
        `repairs`: the copies of the append-only files that were repaired. `earlier`: an adoption of
        this start, which is tried again for the jobs that it could not restore.
        """
        if earlier is None:
            found = Adoption(repairs=repairs, has_lost=has_lost(self._home, repairs))
        else:
            found = replace(earlier, missing={})
        settled_at = begun_at
        if self._is_shared and earlier is None:
            settled_at -= _SUBMITTING_S
        recorded = set(listing.every_id(self._store.connection))
        on_disk = sorted(job_ids(self._home.runs), key=by_time)
        lost: list[tuple[RunDir, Standing]] = []
        ended: list[EndedJob] = []
        for job_id in on_disk:
            if job_id not in recorded:
                with _noting(found, job_id):
                    rundir = RunDir(self._home.runs / job_id)
                    standing = self._standing(rundir, found, begun_at, settled_at)
                    if standing is not None and standing.ended is None:
                        lost.append((rundir, standing))
                    elif standing is not None:
                        ended.append(_ended_job(rundir, standing))
        for start in range(0, len(ended), _BATCH):
            found.ended += self._store.adopt_many(ended[start : start + _BATCH])
        names = {rundir.path.name for rundir, _ in lost}
        for rundir, standing, is_front in _in_order(lost, Order(self._home.order).ranks()):
            with _noting(found, rundir.path.name):
                self._restore(rundir, standing, found, names, is_front=is_front)
        self._correct([job_id for job_id in on_disk if job_id in recorded], found, begun_at)
        if found.describe() or found.has_lost:
            self._report(found)
        return found

    def _report(self, found: Adoption) -> None:
        for line in found.describe():
            log.warning("adoption: %s", line)
        try:
            self._home.damaged.mkdir(mode=0o700, exist_ok=True)
            write_atomic(self._home.damaged / _REPORT, orjson.dumps(found))
        except OSError as error:  # a full disk
            log.warning("adoption: not recorded: %s", error)

    # --- jobs that Redis does not know ------------------------------------------------------

    def _standing(
        self, rundir: RunDir, found: Adoption, begun_at: float, settled_at: float
    ) -> Standing | None:
        """Return where a job stands; None if it is not to be adopted."""
        changed_at = (rundir.path / "spec.json").stat().st_mtime
        if changed_at >= begun_at:
            return None
        try:
            is_own = adopt.is_of(rundir, self._places)
        except Conflict:
            if found.has_lost:
                raise
            return None
        if is_own is None and found.has_lost and not self._is_shared:
            is_own = True
            if not asked.executions(rundir) and rundir.read_result() is None:
                found.missing[rundir.path.name] = _EARLIER
                return None
        if is_own and changed_at >= settled_at:
            found.missing[rundir.path.name] = _JUST_SUBMITTED
            return None
        return adopt.standing(rundir) if is_own else None

    def _restore(
        self,
        rundir: RunDir,
        standing: Standing,
        found: Adoption,
        names: Collection[str],
        *,
        is_front: bool,
    ) -> None:
        """Let a job wait again, at the front or the end of its queue.

        `names`: all jobs that are to be restored.
        """
        job_id = rundir.path.name
        if self._is_shared and (node := self._node_that_runs(job_id)) is not None:
            found.missing[job_id] = f"node {node} runs it"
            return
        while rundir.is_held() and time.monotonic() < self._patient_until:
            time.sleep(0.05)  # its horse ends soon: its worker is dead
        queue = _queue_of(rundir)  # raises Conflict: before the run directory is changed
        adopt.take_over(self._store.connection, rundir)
        document = rundir.read_spec()
        self._places.publish(job_id)
        if self._store.restore(
            job_id,
            queue,
            front=is_front,
            after=standing.queueing.after,
            at=standing.queueing.at,
            retries=standing.queueing.retries,
            timeout_s=standing.queueing.timeout_s,
            from_cli=rundir.origin() == "cli",
            needs=adopt.needs_of(document),
            created_at=rundir.created_at(),
            executions=standing.executions,
            paused_at=standing.paused_at,
            is_deferred=standing.queueing.after in names,
        ):
            found.adopted.append(job_id)

    def _node_that_runs(self, job_id: str) -> str | None:
        nodes = NodeRegistry(self._store.connection).all()
        return next((node.name for node in nodes if job_id in node.jobs), None)

    # --- jobs of which Redis has an earlier state -------------------------------------------

    def _correct(self, job_ids: list[str], found: Adoption, begun_at: float) -> None:
        """Set jobs in Redis to the state that their run directories have."""
        waiting = set(listing.ids_with(self._store.connection, [one.value for one in WAITING]))
        changed = [job_id for job_id in job_ids if self._may_differ(job_id, job_id in waiting)]
        for start in range(0, len(changed), _BATCH):
            batch = changed[start : start + _BATCH]
            for job_id, job in zip(batch, self._store.fetch_many(batch), strict=True):
                if job is not None:
                    with _noting(found, job_id):
                        self._correct_one(job, RunDir(self._home.runs / job_id), found, begun_at)

    def _may_differ(self, job_id: str, is_waiting: bool) -> bool:
        """Whether a run directory may know more than Redis; reads no file."""
        folder: Path = self._home.runs / job_id
        return (folder / asked.NAME).exists() or (is_waiting and RunDir(folder).events.exists())

    def _correct_one(self, job: Job, rundir: RunDir, found: Adoption, begun_at: float) -> None:
        store = self._store
        if not adopt.is_of(rundir, self._places):
            return
        standing = adopt.standing(rundir)
        if standing.asked is not None and standing.asked.at >= begun_at:
            return
        status, number = job.get_status(refresh=False), store.num_executions(job.id)
        is_corrected = False
        if status in ENDED and standing.asked is not None:
            is_lost = standing.asked.state == asked.RESUMED and standing.asked.executions >= number
            is_corrected = is_lost and self._queue_again(job, front=standing.asked.front)
        if status in WAITING or is_corrected:
            # A worker takes a result from the run directory.
            if standing.ended is not None and rundir.read_result() is None:
                ended_at = adopt.ended_at(rundir)
                is_corrected |= store.end_waiting(job, standing.ended, ended_at)
            elif standing.paused_at is not None and store.pause_of(job) is None:
                is_corrected |= store.pause_waiting(job)
        if number < standing.executions and (status in WAITING or is_corrected):
            store.note_executions(job, standing.executions)
        if is_corrected:
            found.corrected.append(job.id)

    def _queue_again(self, job: Job, *, front: bool) -> bool:
        self._places.publish(job.id)
        return self._store.enqueue_again(job, front=front)


@contextmanager
def _noting(found: Adoption, job_id: str) -> Iterator[None]:
    """Note the problem of one job, which must not keep the others."""
    try:
        yield
    except (WarmdError, OSError, KeyError, ValueError) as error:
        found.missing[job_id] = str(error)


def _ended_job(rundir: RunDir, standing: Standing) -> EndedJob:
    past = adopt.past_of(rundir)
    return EndedJob(
        job_id=rundir.path.name,
        queue=_queue_of(rundir),
        status=standing.ended or past.status,
        created_at=past.created_at,
        ended_at=adopt.ended_at(rundir).timestamp(),
        executions=standing.executions,
        from_cli=past.from_cli,
        needs=past.needs,
    )


def _queue_of(rundir: RunDir) -> str:
    kind = str(rundir.read_spec()["kind"])
    if kind not in KINDS:
        raise Conflict(f"kind {kind} is not installed")
    return spec_class(kind).queue


def _in_order(
    jobs: list[tuple[RunDir, Standing]], ranks: Mapping[str, tuple[int, float]]
) -> list[tuple[RunDir, Standing, bool]]:
    """Return jobs so that queuing one after the other gives the order in which they were.

    With each: whether it is queued at the front. Those that had begun are first, then those that
    were put at the front, the latest first, then those of `ranks`, the order after the latest move.
    """

    def is_ranked(rundir: RunDir, standing: Standing) -> bool:
        rank = ranks.get(rundir.path.name)
        # A later request has given it another place.
        return rank is not None and (standing.asked is None or standing.asked.at <= rank[1])

    by_age = sorted(jobs, key=lambda job: (job[1].since, by_time(job[0].path.name)))
    begun = [job for job in by_age if job[1].has_begun]
    waiting = [job for job in by_age if not job[1].has_begun]
    ranked = [job for job in waiting if is_ranked(*job)]
    ranked.sort(key=lambda job: ranks[job[0].path.name][0])
    others = [job for job in waiting if not is_ranked(*job)]
    front = [job for job in others if job[1].queueing.front]
    back = [job for job in others if not job[1].queueing.front]
    return [
        *((*job, False) for job in (*ranked, *back)),
        *((*job, True) for job in (*front, *reversed(begun))),
    ]


def _some(ids: list[str]) -> str:
    shown = ", ".join(ids[:_SHOWN])
    return shown if len(ids) <= _SHOWN else f"{shown}, …"

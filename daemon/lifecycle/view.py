"""Jobs as others see them, from Redis, their run directories and latest events."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...configs.labels import OWN_NEEDS
from ...configs.queues import TRAIN
from ...jobs import KINDS, spec_class
from ...jobs.errors import Conflict, WarmdError
from ...jobs.ids import by_time, kind_of
from ...jobs.spec import Spec
from ..queue import listing, stream
from ..queue.jobs import Job
from ..queue.totals import ALERTS
from ..runs import events, labels
from ..runs.estimate import Estimate
from ..runs.labels import Labels
from ..runs.rundir import RunDir
from ..runs.running_time import running_s
from .places import Places
from .statuses import UNREGISTERED

# Messages of jobs that have a run directory or a record in Redis, but not both.
NOT_IN_REDIS = "not in Redis: `resume` queues it again, `rm` removes it"
FILES_GONE = "its files are gone: `rm` removes its record"

# Events that are read per job: enough for its last steps and its end; for a running training also
# for the evaluations and checkpoints between the steps.
RECENT = 32
_RECENT_RUNNING = 1000


def listed_kinds() -> tuple[str, ...]:
    """Return the kinds whose jobs lists have without being asked for: trainings and evaluations.

    Others, such as answers, come by the thousand.
    """
    specs = {kind: spec_class(kind) for kind in KINDS}
    return tuple(kind for kind, spec in specs.items() if spec.queue == TRAIN or spec.is_kept)


@dataclass(frozen=True, kw_only=True)
class JobFilter:
    """Which jobs of a home; by default all."""

    statuses: Collection[str] | None = None
    kinds: Collection[str] | None = None
    name: str | None = None  # a pattern such as lr-*
    tags: tuple[str, ...] = ()  # all of which a job must have
    text: str = ""  # a part of the id
    older_than: str | None = None  # a job id, to continue a list behind it
    hidden: Collection[str] = ()  # ids that are left out
    limit: int | None = None

    @property
    def labels(self) -> Labels:
        return Labels(name=self.name, tags=self.tags)

    @property
    def is_by_id(self) -> bool:
        """Whether ids are left out for another reason than their kind."""
        return bool(self.text or self.older_than is not None or self.hidden)

    def fits_id(self, job_id: str) -> bool:
        """Whether a job may belong to it by its id."""
        is_kind = self.kinds is None or kind_of(job_id) in self.kinds
        is_older = self.older_than is None or by_time(job_id) < by_time(self.older_than)
        return is_kind and is_older and self.text in job_id and job_id not in self.hidden

    def fits(self, job: JobView) -> bool:
        """Whether a job whose id and labels fit belongs to it."""
        return self.statuses is None or job.status in self.statuses


EVERY_JOB = JobFilter()


@dataclass(frozen=True, kw_only=True)
class JobView:
    """The known fields of a job, as in `warmd show --json`; times are unix seconds."""

    id: str
    kind: str
    name: str | None
    tags: list[str]
    notes: list[dict[str, Any]]
    status: str
    paused: bool
    paused_at: float | None
    queue: str
    model: str | None
    init_from: str | None
    sweep: str | None
    curriculum: str | None
    submitted_by: str | None
    step: int
    steps_total: int | None
    rows_done: int | None
    rows_total: int | None
    execution: int
    run_dir: str
    error: str | None
    problem: str | None
    alert: str | None
    result: dict[str, Any] | None
    created_at: float | None
    enqueued_at: float | None
    started_at: float | None
    ended_at: float | None
    earlier_s: float  # running time of executions before the one that `started_at` is of
    scheduled_at: float | None
    position: int | None
    after: list[str]
    needs: dict[str, str]
    missing_model: str | None
    nodes: list[str]
    awaited_nodes: str | None
    worker: str | None
    seconds_per_step: float | None
    eta_s: float | None
    retries_left: int
    waits_for: str | None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


_NO_NODES = listing.Nodes()


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What a job's record says; of a job without one, what its run directory says."""

    status: str
    queue: str
    notes: listing.Notes
    created_at: float | None
    ended_at: float | None
    enqueued_at: float | None = None
    started_at: float | None = None
    error: str | None = None
    after: Sequence[str] = ()
    worker: str | None = None
    nodes: listing.Nodes = _NO_NODES
    position: int | None = None
    due: float | None = None  # when a scheduled job is queued


def views_of(jobs: Sequence[Job], places: Places) -> list[JobView]:
    """Return all known fields of each job."""
    connection, now = places.connection, places.store.shared_clock.now()
    positions = listing.positions(connection, jobs)
    recent = stream.newest(connection, {job.id: _num_recent(job) for job in jobs})
    notes = listing.notes(connection, jobs)
    nodes = listing.nodes_of(connection, jobs, notes)
    due = listing.scheduled_at(connection, jobs)
    found = []
    for job, last, note, among in zip(jobs, recent, notes, nodes, strict=True):
        facts = _Facts(
            status=job.get_status(refresh=False).value,
            queue=job.origin,
            notes=note,
            created_at=_seconds(job.created_at),
            ended_at=_seconds(job.ended_at),
            enqueued_at=_seconds(job.enqueued_at),
            started_at=_seconds(job.started_at),
            error=_last_line(job._exc_info),
            after=job._dependency_ids,
            worker=job.worker_name,
            nodes=among,
            position=positions.get(job.id),
            due=due.get(job.id),
        )
        found.append(_view(places.rundir(job.id), facts, last, now=now))
    return found


def view_of_folder(rundir: RunDir) -> JobView:
    """Return all known fields of a job that is not in Redis, from its run directory.

    Raises Conflict if its spec.json cannot be read.
    """
    return replace(_folder_view(rundir), status=UNREGISTERED, problem=NOT_IN_REDIS)


def _folder_view(rundir: RunDir) -> JobView:
    """A job by its run directory alone."""
    from . import adopt  # few jobs are not in Redis

    past = adopt.past_of(rundir)
    kind = str(rundir.read_spec()["kind"])
    facts = _Facts(
        status=past.status.value,
        queue=spec_class(kind).queue if kind in KINDS else "",
        notes=listing.Notes(
            past.executions,
            is_paused=False,
            paused_at=None,
            needs={key: need for key, need in past.needs.items() if key not in OWN_NEEDS},
            every_need=past.needs,
            model_path=None,
            retries_left=0,
            waits_for=None,
        ),
        created_at=round(past.created_at, 3),
        ended_at=round(past.ended_at, 3),
    )
    return _view(rundir, facts, events.newest(rundir.events, RECENT), now=time.time())


def view_without_redis(rundir: RunDir) -> JobView:
    """Return the fields of a job from its run directory while no daemon runs, without Redis.

    A job that has not ended is `queued` or `paused`: the next start of the daemon resumes it. One
    that an earlier version canceled before it began looks queued, too.
    Raises Conflict for one whose spec.json cannot be read.
    """
    from . import adopt

    view, found = _folder_view(rundir), adopt.standing(rundir)
    if found.ended is not None:
        ended_at = _seconds(adopt.ended_at(rundir))
        return replace(view, status=found.ended.value, ended_at=ended_at)
    if found.paused_at is not None:
        view = replace(view, paused=True, paused_at=found.paused_at)
    status = "queued" if found.paused_at is None else "scheduled"
    return replace(view, status=status, ended_at=None)


def _view(rundir: RunDir, facts: _Facts, recent: list[dict[str, Any]], *, now: float) -> JobView:
    """`recent`: the job's latest events, newest first. `now`: by the clock of the events."""
    document: dict[str, Any] = {}
    problem = None if rundir.path.is_dir() else FILES_GONE
    try:
        document = rundir.read_spec()
    except Conflict as damage:
        problem = problem or str(damage)
    job_id, status, notes = rundir.path.name, facts.status, facts.notes
    steps_total = steps_total_of(document, recent)
    estimate = Estimate()
    for event in reversed(recent):
        estimate.update(event)
    estimate.steps_total = steps_total
    step_s = estimate.seconds_per_step
    labeled = labels.read(rundir)
    failures = (event["error"] for event in recent if event["type"] == "failed")
    error = next(failures, None) or facts.error
    is_set_aside = status == "queued" and facts.position is None and not notes.is_paused
    is_computing = status == "started" and not notes.is_paused
    return JobView(
        id=job_id,
        kind=kind_of(job_id),
        name=labeled.name,
        tags=list(labeled.tags),
        notes=[asdict(note) for note in labeled.notes],
        status=status,
        paused=notes.is_paused,
        paused_at=notes.paused_at,
        queue=facts.queue,
        model=document.get("spec", {}).get("model"),
        init_from=document.get("init_from"),
        sweep=document.get("sweep"),
        curriculum=document.get("curriculum"),
        submitted_by=document.get("submitted_by"),
        step=_step(recent),
        steps_total=steps_total,
        rows_done=estimate.rows_done,
        rows_total=estimate.rows_total,
        execution=notes.executions,
        run_dir=str(rundir.path),
        error=error if status in ("failed", "stopped") else None,
        problem=problem,
        alert=_alert(recent, notes.executions),
        result=rundir.read_result() if status == "finished" and document else None,
        created_at=facts.created_at,
        enqueued_at=facts.enqueued_at,
        started_at=facts.started_at,
        ended_at=facts.ended_at,
        earlier_s=_earlier_s(rundir, facts),
        scheduled_at=facts.due,
        position=facts.position,
        after=list(facts.after),
        needs=notes.needs,
        missing_model=notes.model_path if is_set_aside else None,
        nodes=list(facts.nodes.names),
        awaited_nodes=facts.nodes.awaited if facts.position is None else None,
        worker=facts.worker if status == "started" else None,
        seconds_per_step=None if step_s is None else round(step_s, 4),
        eta_s=estimate.eta_s(now) if is_computing else None,
        retries_left=notes.retries_left,
        waits_for=notes.waits_for if status == "started" else None,
    )


def _earlier_s(rundir: RunDir, facts: _Facts) -> float:
    """Return the running time of executions before the current one, or of all of a waiting job."""
    number = facts.notes.executions
    if facts.status != "started" and facts.ended_at is None and number:  # it waits
        return _running_s(rundir.events, number + 1)
    return _ended_s(rundir.events, number) if number > 1 else 0.0


def _running_s(path: Path, before: int) -> float:
    return round(float(running_s(events.read(path), before=before)), 3)


_ended_s = lru_cache(maxsize=10_000)(_running_s)  # of executions that have ended


def _alert(recent: list[dict[str, Any]], execution: int) -> str | None:
    """The latest warning of a job's latest execution, in a few words."""
    for event in recent:
        if event["type"] in ALERTS and event["execution"] == execution:
            at = "" if event["step"] is None else f" at step {event['step']}"
            reason = event.get("message") or event.get("error")
            return f"{event['type'].replace('_', ' ')}{at}" + (f": {reason}" if reason else "")
    return None


def _num_recent(job: Job) -> int:
    is_running = job._status == "started" and job.origin == TRAIN
    return _RECENT_RUNNING if is_running else RECENT


def spec_of(document: dict[str, Any]) -> Spec:
    """Return the spec in a job's spec.json. Raises WarmdError for an incompatible version."""
    return spec_class(document["kind"]).parse(document["spec"])


def steps_total_of(document: dict[str, Any], recent: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the optimizer steps of a training; None: unknown.

    `recent`: its latest events, newest first. They have the steps of epochs, which may be fewer
    than the spec tells, since rows without a token to learn are dropped, and the planned steps of a
    time limit.
    """
    try:
        spec = spec_of(document) if document else None
    except WarmdError:  # an incompatible version
        spec = None
    if getattr(spec, "steps", None) is None:
        totals = (event.get("steps_total") for event in recent)
        if (latest := next((total for total in totals if total is not None), None)) is not None:
            return int(latest)
    return getattr(spec, "steps_total", None)


def _step(recent: list[dict[str, Any]]) -> int:
    """The latest step of a job's latest execution."""
    stepped = [event for event in recent if event["step"] is not None]
    latest = [e["step"] for e in stepped if e["execution"] == stepped[0]["execution"]]
    return max(latest, default=0)


def _seconds(when: datetime | None) -> float | None:
    return round(when.timestamp(), 3) if when is not None else None


def _last_line(text: str | None) -> str | None:
    return text.strip().splitlines()[-1] if text and text.strip() else None

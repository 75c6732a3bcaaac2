"""Jobs as plain values, from Redis, their run directories and latest events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis

from ...configs.labels import OWN_NEEDS
from ...configs.queues import TRAIN
from ...jobs import KINDS, spec_class
from ...jobs.errors import Conflict, WarmdError
from ...jobs.ids import kind_of
from ...jobs.spec import Spec
from ..lifecycle import adopt
from ..queue import keys, listing, stream
from ..queue.jobs import Job, JobStore
from ..queue.totals import ALERTS
from ..runs import events, labels
from ..runs.estimate import Estimate
from ..runs.rundir import RunDir

# Status and messages of jobs that have a run directory or a record in Redis, but not both.
UNREGISTERED = "unregistered"
NOT_IN_REDIS = "not in Redis: `resume` queues it again, `rm` removes it"
FILES_GONE = "its files are gone: `rm` removes its record"

# Events that are read per job: enough for its last steps and its end; for a running training also
# for the evaluations and checkpoints between the steps.
RECENT = 32
_RECENT_RUNNING = 1000


def views_of(jobs: Sequence[Job], store: JobStore, runs: Path) -> list[dict[str, Any]]:
    """Return all known fields of each job."""
    connection, now = store.connection, store.shared_clock.now()
    places = listing.positions(connection, jobs)
    recent = stream.newest(connection, {job.id: _num_recent(job) for job in jobs})
    notes = listing.notes(connection, jobs)
    nodes = listing.nodes_of(connection, jobs, notes)
    due = listing.scheduled_at(connection, jobs)
    return [
        _view(job, runs / job.id, last, note, among, places.get(job.id), due.get(job.id), now=now)
        for job, last, note, among in zip(jobs, recent, notes, nodes, strict=True)
    ]


def view_of_folder(rundir: RunDir, connection: redis.Redis) -> dict[str, Any]:
    """Return all known fields of a job that is not in Redis, from its run directory.

    Raises Conflict if its spec.json cannot be read.
    """
    view = _folder_view(rundir, connection)
    return {**view, "status": UNREGISTERED, "problem": NOT_IN_REDIS}


def _folder_view(rundir: RunDir, connection: redis.Redis) -> dict[str, Any]:
    """A job by its run directory alone; `connection` is not used."""
    past = adopt.past_of(rundir)
    kind = str(rundir.read_spec()["kind"])
    job = Job(rundir.path.name, connection=connection, serializer=keys.Serializer)
    job.origin = spec_class(kind).queue if kind in KINDS else ""
    job._status = past.status
    job.created_at = datetime.fromtimestamp(past.created_at, UTC)
    job.ended_at = datetime.fromtimestamp(past.ended_at, UTC)
    recent = events.newest(rundir.events, RECENT)
    notes = listing.Notes(
        past.executions,
        is_paused=False,
        paused_at=None,
        needs={key: need for key, need in past.needs.items() if key not in OWN_NEEDS},
        every_need=past.needs,
        model_path=None,
        retries_left=0,
        waits_for=None,
    )
    nodes = listing.Nodes()
    return _view(job, rundir.path, recent, notes, nodes, None, None, now=time.time())


def view_without_redis(rundir: RunDir, connection: redis.Redis) -> dict[str, Any]:
    """Return the fields of a job from its run directory while no daemon runs, without Redis.

    A job that has not ended is `queued` or `paused`: the next start of the daemon resumes it. One
    that an earlier version canceled before it began looks queued, too.
    Raises Conflict for one whose spec.json cannot be read.
    """
    view = _folder_view(rundir, connection)
    found = adopt.standing(rundir)
    if found.ended is not None:
        ended_at = _seconds(adopt.ended_at(rundir))
        return {**view, "status": found.ended.value, "ended_at": ended_at}
    if found.paused_at is not None:
        paused = {"paused": True, "paused_at": found.paused_at}
        return {**view, **paused, "status": "scheduled", "ended_at": None}
    return {**view, "status": "queued", "ended_at": None}


def _view(
    job: Job,
    rundir: Path,
    recent: list[dict[str, Any]],
    notes: listing.Notes,
    nodes: listing.Nodes,
    position: int | None,
    due: float | None,
    *,
    now: float,
) -> dict[str, Any]:
    """`recent`: the job's latest events, newest first. `due`: when a scheduled job is queued.

    `now`: by the clock of the events.
    """
    document: dict[str, Any] = {}
    problem = None if rundir.is_dir() else FILES_GONE
    try:
        document = RunDir(rundir).read_spec()
    except Conflict as damage:
        problem = problem or str(damage)
    status = job.get_status(refresh=False).value
    steps_total = steps_total_of(document, recent)
    estimate = Estimate()
    for event in reversed(recent):
        estimate.update(event)
    estimate.steps_total = steps_total
    step_s = estimate.seconds_per_step
    labeled = labels.read(RunDir(rundir))
    failures = (event["error"] for event in recent if event["type"] == "failed")
    error = next(failures, None) or _last_line(job._exc_info)
    is_set_aside = status == "queued" and position is None and not notes.is_paused
    is_computing = status == "started" and not notes.is_paused
    return {
        "id": job.id,
        "kind": kind_of(job.id),
        "name": labeled.name,
        "tags": list(labeled.tags),
        "notes": [asdict(note) for note in labeled.notes],
        "status": status,
        "paused": notes.is_paused,
        "paused_at": notes.paused_at,
        "queue": job.origin,
        "model": document.get("spec", {}).get("model"),
        "init_from": document.get("init_from"),
        "sweep": document.get("sweep"),
        "curriculum": document.get("curriculum"),
        "submitted_by": document.get("submitted_by"),
        "step": _step(recent),
        "steps_total": steps_total,
        "rows_done": estimate.rows_done,
        "rows_total": estimate.rows_total,
        "execution": notes.executions,
        "run_dir": str(rundir),
        "error": error if status in ("failed", "stopped") else None,
        "problem": problem,
        "alert": _alert(recent, notes.executions),
        "result": RunDir(rundir).read_result() if status == "finished" and document else None,
        "created_at": _seconds(job.created_at),
        "enqueued_at": _seconds(job.enqueued_at),
        "started_at": _seconds(job.started_at),
        "ended_at": _seconds(job.ended_at),
        "scheduled_at": due,
        "position": position,
        "after": list(job._dependency_ids),
        "needs": notes.needs,
        "missing_model": notes.model_path if is_set_aside else None,
        "nodes": list(nodes.names),
        "awaited_nodes": nodes.awaited if position is None else None,
        "worker": job.worker_name if status == "started" else None,
        "seconds_per_step": None if step_s is None else round(step_s, 4),
        "eta_s": estimate.eta_s(now) if is_computing else None,
        "retries_left": notes.retries_left,
        "waits_for": notes.waits_for if status == "started" else None,
    }


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
    than the spec tells, since rows without a token to learn are dropped.
    """
    try:
        spec = spec_of(document) if document else None
    except WarmdError:  # an incompatible version
        spec = None
    if getattr(spec, "steps", None) is None:
        totals = (event["steps_total"] for event in recent if "steps_total" in event)
        if (latest := next(totals, None)) is not None:
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

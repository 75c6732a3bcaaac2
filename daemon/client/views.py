"""What is known of jobs as plain values: from Redis, their run directories and latest events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis

from ...configs.queues import TRAIN
from ...jobs import KINDS, spec_class
from ...jobs.errors import Conflict, WarmdError
from ...jobs.spec import Spec
from ..queue import keys, listing, stream
from ..queue.adoption import past_of
from ..queue.jobs import Job
from ..runs import events
from ..runs.estimate import Estimate
from ..runs.rundir import RunDir

# The status of a job whose run directory is there and which Redis does not know, and what is said.
UNREGISTERED = "unregistered"
NOT_IN_REDIS = "not in Redis: `resume` queues it again, `rm` removes it"
FILES_GONE = "its files are gone: `rm` removes its record"

# Events that a look at a job reads: enough for its last steps and its end, and, of a training
# that runs, for the evaluations and checkpoints between them.
_RECENT = 32
_RECENT_RUNNING = 1000


def views_of(jobs: Sequence[Job], connection: redis.Redis, runs: Path) -> list[dict[str, Any]]:
    """Return all that is known of each job."""
    places = listing.positions(connection, jobs)
    recent = stream.newest(connection, {job.id: _num_recent(job) for job in jobs})
    notes = listing.notes(connection, jobs)
    due = listing.scheduled_at(connection, jobs)
    return [
        _view(job, runs / job.id, last, number, paused, places.get(job.id), due.get(job.id))
        for job, last, (number, paused) in zip(jobs, recent, notes, strict=True)
    ]


def view_of_folder(rundir: RunDir, connection: redis.Redis) -> dict[str, Any]:
    """Return what a run directory tells of a job that Redis does not know.

    Raises Conflict for one whose spec.json cannot be read.
    """
    past = past_of(rundir)
    kind = str(rundir.read_spec()["kind"])
    job = Job(rundir.path.name, connection=connection, serializer=keys.Serializer)
    job.origin = spec_class(kind).queue if kind in KINDS else ""
    job._status = past.status
    job.created_at = datetime.fromtimestamp(past.created_at, UTC)
    job.ended_at = datetime.fromtimestamp(past.ended_at, UTC)
    recent = events.newest(rundir.events, _RECENT)
    view = _view(job, rundir.path, recent, past.executions, False, None, None)
    return {**view, "status": UNREGISTERED, "problem": NOT_IN_REDIS}


def _view(
    job: Job,
    rundir: Path,
    recent: list[dict[str, Any]],
    number: int,
    paused: bool,
    position: int | None,
    due: float | None,
) -> dict[str, Any]:
    """`recent`: its newest events, newest first; `number`: of its latest execution."""
    try:
        document = RunDir(rundir).read_spec()
    except Conflict:
        document = {}
    status = job.get_status(refresh=False).value
    totals = [event["steps_total"] for event in recent if "steps_total" in event]
    steps_total = totals[0] if status == "started" and totals else _steps_total(document)
    estimate = Estimate()
    for event in reversed(recent):
        estimate.update(event)
    estimate.steps_total = steps_total
    pace = estimate.seconds_per_step
    failures = (event["error"] for event in recent if event["type"] == "failed")
    error = next(failures, None) or _last_line(job._exc_info)
    return {
        "id": job.id,
        "kind": job.id.split("-")[0],
        "status": status,
        "paused": paused,
        "queue": job.origin,
        "model": document.get("spec", {}).get("model"),
        "init_from": document.get("init_from"),
        "step": _step(recent),
        "steps_total": steps_total,
        "execution": number,
        "run_dir": str(rundir),
        "error": error if status in ("failed", "stopped") else None,
        "problem": None if rundir.is_dir() else FILES_GONE,
        "result": RunDir(rundir).read_result() if status == "finished" and document else None,
        "created_at": _seconds(job.created_at),
        "enqueued_at": _seconds(job.enqueued_at),
        "started_at": _seconds(job.started_at),
        "ended_at": _seconds(job.ended_at),
        "scheduled_at": due,
        "position": position,
        "after": list(job._dependency_ids),
        "worker": job.worker_name if status == "started" else None,
        "seconds_per_step": None if pace is None else round(pace, 4),
        "eta_s": estimate.eta_s(time.time()) if status == "started" and not paused else None,
        "retries_left": job.retries_left or 0,
    }


def _num_recent(job: Job) -> int:
    is_running = job._status == "started" and job.origin == TRAIN
    return _RECENT_RUNNING if is_running else _RECENT


def spec_of(document: dict[str, Any]) -> Spec:
    """Return the spec in a job's spec.json. Raises WarmdError for one of another version."""
    return spec_class(document["kind"]).parse(document["spec"])


def _steps_total(document: dict[str, Any]) -> int | None:
    """The optimizer steps of a training as it is asked for now; None where that cannot be said."""
    try:
        return getattr(spec_of(document), "steps_total", None) if document else None
    except WarmdError:  # of another version
        return None


def _step(recent: list[dict[str, Any]]) -> int:
    """The step that a job has reached: of its latest execution, newest first."""
    told = [event for event in recent if event["step"] is not None]
    return max((e["step"] for e in told if e["execution"] == told[0]["execution"]), default=0)


def _seconds(when: datetime | None) -> float | None:
    return round(when.timestamp(), 3) if when is not None else None


def _last_line(text: str | None) -> str | None:
    return text.strip().splitlines()[-1] if text and text.strip() else None

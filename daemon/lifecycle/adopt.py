"""Adoption of jobs that Redis does not know, from their run directories.

The run directory was copied from another machine, Redis has lost its data, or the daemon uses
another Redis than before. On adoption the directory is marked with the new Redis: a daemon of the
old one, which may still have the job in its queue, then does not run it.

A job of this home that its Redis has lost is adopted at the next start, with what was asked of it
at the submission (`queueing` in spec.json) and since (queue.json). Others, such as copied ones, are
adopted by `warmd resume` only.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis

from ...configs.labels import SCHEMA as SCHEMA_LABEL, with_ranks
from ...jobs.errors import Conflict
from ..queue import keys
from ..queue.jobs import JobStatus
from ..runs import asked, events
from ..runs.asked import Asked
from ..runs.rundir import SCHEMA, RunDir
from .places import Places
from .queueing import Queueing

_OWNER = "redis"  # in spec.json
QUEUEING = "queueing"  # in spec.json: the home, its Redis, and the options for the queue
_RECENT = 1000  # events that are searched for the retries left


@dataclass(frozen=True)
class Past:
    """The history of a job, as read from its run directory."""

    status: JobStatus
    created_at: float
    ended_at: float
    executions: int
    from_cli: bool
    needs: dict[str, str]


def past_of(rundir: RunDir) -> Past:
    """Read the history of a job. Raises Conflict for a spec.json that cannot be read."""
    created_at = rundir.created_at()
    latest = next(iter(events.newest(rundir.events, 1)), None)
    document = rundir.read_spec()
    return Past(
        status=_status(rundir, latest),
        created_at=created_at,
        ended_at=created_at if latest is None else latest["time"],
        executions=0 if latest is None else latest["execution"],
        from_cli=rundir.origin() == "cli",
        needs=needs_of(document),
    )


def _status(rundir: RunDir, latest: dict[str, Any] | None) -> JobStatus:
    if rundir.read_result() is not None:
        return JobStatus.FINISHED
    if latest is None:
        return JobStatus.CANCELED  # it was never started
    return JobStatus.FAILED if latest["type"] == "failed" else JobStatus.STOPPED


def needs_of(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels that the node of a job must have; `document`: its spec.json.

    Every job needs a node that reads this version's run directories.
    """
    return {**with_ranks(document.get("needs"), document["spec"]), SCHEMA_LABEL: str(SCHEMA)}


def asked_of(document: Mapping[str, Any]) -> Queueing:
    """Return how a job was to be queued at its submission; `document`: its spec.json."""
    return Queueing.from_json(document.get(QUEUEING) or {})


@dataclass(frozen=True)
class Standing:
    """Where a job stands by its run directory alone."""

    ended: JobStatus | None  # None: it waits, or ran when Redis was lost
    paused_at: float | None  # unix seconds; None: not paused
    executions: int
    has_begun: bool  # it has events, and no request (paused, resumed, …) came after them
    since: float  # when it was queued, in unix seconds
    queueing: Queueing  # as it is now
    asked: Asked | None  # the latest request


def standing(rundir: RunDir) -> Standing:
    """Read where a job stands. Raises Conflict for a spec.json that cannot be read."""
    document = rundir.read_spec()
    recent = events.newest(rundir.events, _RECENT)
    latest = next(iter(recent), None)
    request = asked.read(rundir)
    number = asked.executions(rundir)
    is_latest = request is not None and (latest is None or request.seq >= latest["seq"])
    ended: JobStatus | None = None
    if rundir.read_result() is not None:
        ended = JobStatus.FINISHED
    elif request is not None and request.state == asked.CANCELED:
        ended = JobStatus.STOPPED if number else JobStatus.CANCELED
        if latest is not None and latest["type"] == "failed":
            ended = JobStatus.FAILED
    elif latest is not None and latest["type"] in events.TERMINAL and not is_latest:
        ended = _status(rundir, latest)
    paused_at = None
    if request is not None and request.state == asked.PAUSED:
        paused_at = request.at
    elif request is None and latest is not None and latest["type"] == "paused":
        paused_at = float(latest["time"])  # by an earlier version
    how = asked_of(document)
    left = (event["retries_left"] for event in recent if "retries_left" in event)
    how = replace(how, retries=next(left, how.retries))
    has_events = latest is not None
    if request is not None and is_latest and (has_events or request.state == asked.RESUMED):
        how = replace(how, after=None, at=None)  # a request after the first execution or an end
    if request is not None:
        how = replace(how, front=request.front or how.front)
    return Standing(
        ended=ended,
        paused_at=paused_at,
        executions=number,
        has_begun=has_events and not is_latest,
        since=rundir.created_at() if request is None else request.at,
        queueing=how,
        asked=request,
    )


def ended_at(rundir: RunDir) -> datetime:
    """Return when an ended job ended, by its latest event or request."""
    request = asked.read(rundir)
    past = past_of(rundir)
    at = past.ended_at if request is None else max(past.ended_at, request.at)
    return datetime.fromtimestamp(at, UTC)


def is_of(rundir: RunDir, places: Places) -> bool | None:
    """Whether the job was submitted from a home to its Redis; None: by an earlier version."""
    about = rundir.read_spec().get(QUEUEING)
    if not isinstance(about, dict):
        return None
    return all(about.get(name) == value for name, value in places.own.items())


def move_to(rundir: RunDir, places: Places) -> None:
    """Record that the job is now one of this home and Redis."""
    about = rundir.read_spec().get(QUEUEING) or {}
    rundir.annotate(**{QUEUEING: {**about, **places.own}})


def identity(connection: redis.Redis) -> str:
    """Return the random id of the data in a Redis; the first caller sets it."""
    connection.set(keys.IDENTITY, secrets.token_hex(8), nx=True)
    found: Any = connection.get(keys.IDENTITY)
    return keys.text(found)


def is_foreign(connection: redis.Redis, rundir: RunDir) -> bool:
    """Whether the job was taken over by another Redis."""
    owner = rundir.read_spec().get(_OWNER)
    return owner is not None and owner != identity(connection)


def take_over(connection: redis.Redis, rundir: RunDir) -> None:
    """Mark the run directory as this Redis's. Raises Conflict while a daemon runs the job."""
    job_id = rundir.path.name
    if rundir.is_held():
        raise Conflict(f"job: {job_id} is running in another daemon: cancel it there first")
    document = rundir.read_spec()
    if document["id"] != job_id:
        raise Conflict(f"job: {rundir.path} holds {document['id']}: rename it to that id")
    own_weights = rundir.path / "init"
    model = document.get("model")
    if model is not None and own_weights.is_dir() and Path(model["path"]).name == own_weights.name:
        model = {**model, "path": str(own_weights)}  # the directory was moved
    rundir.annotate(**{_OWNER: identity(connection)}, **({} if model is None else {"model": model}))


def check_model(rundir: RunDir) -> None:
    """Raise Conflict if the model folder of a job is not on this machine."""
    model = rundir.read_spec().get("model")
    if model is not None and Path(model["path"]).is_absolute() and not Path(model["path"]).is_dir():
        raise Conflict(
            f"job: {rundir.path.name} needs the model folder {model['path']}, which is not on this "
            "machine: copy it there, or create a symbolic link"
        )

"""Adoption of jobs that Redis does not know, from their run directories.

The run directory was copied from another machine, Redis has lost its data, or the daemon uses
another Redis than before. On adoption the directory is marked with the new Redis: a daemon of the
old one, which may still have the job in its queue, then does not run it.

A job of this home that its Redis has lost is adopted at the next start, with what was asked of it
at the submission (`queueing` in spec.json) and since (queue.json). Others, such as copied ones, are
adopted by `warmd resume` only.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis

from ...configs.labels import with_ranks
from ...jobs.errors import Conflict
from ..host.home import Home
from ..runs import asked, events
from ..runs.asked import Asked
from ..runs.rundir import RunDir
from . import keys
from .rq_format import JobStatus

_OWNER = "redis"  # in spec.json
_QUEUEING = "queueing"  # in spec.json: the home, its Redis, and the options for the queue
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
        needs=with_ranks(document.get("needs"), document["spec"]),
    )


def _status(rundir: RunDir, latest: dict[str, Any] | None) -> JobStatus:
    if rundir.read_result() is not None:
        return JobStatus.FINISHED
    if latest is None:
        return JobStatus.CANCELED  # it was never started
    return JobStatus.FAILED if latest["type"] == "failed" else JobStatus.STOPPED


def queueing(
    home: Home, connection: redis.Redis, how: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the part of a new job's spec.json for its adoption. The home must exist.

    `how`: `front`, `after`, `at` (ISO 8601), `retries`, `timeout_s`; those that are not given have
    the defaults of `JobStore.enqueue`. `needs` is left out: spec.json has it anyway.
    """
    place = keys.place(connection)
    if os.path.realpath(place) == os.path.realpath(home.redis_socket):
        place = "embedded"  # also if the home is moved
    options = {name: value for name, value in (how or {}).items() if name != "needs"}
    return {_QUEUEING: {"home": home.id(), "redis": place, **options}}


@dataclass(frozen=True)
class Standing:
    """Where a job stands by its run directory alone."""

    ended: JobStatus | None  # None: it waits, or ran when Redis was lost
    paused_at: float | None  # unix seconds; None: not paused
    executions: int
    has_begun: bool  # it has events, and no request (paused, resumed, …) came after them
    since: float  # when it was queued, in unix seconds
    queueing: dict[str, Any]  # the options for the queue, as they are now
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
    how = dict(document.get(_QUEUEING) or {})
    left = (event["retries_left"] for event in recent if "retries_left" in event)
    how["retries"] = next(left, how.get("retries", 0))
    has_events = latest is not None
    if request is not None and is_latest and (has_events or request.state == asked.RESUMED):
        how |= {"after": None, "at": None}  # a request after the first execution or an end
    if request is not None:
        how["front"] = request.front or how.get("front", False)
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


def is_of(rundir: RunDir, own: Mapping[str, Any]) -> bool | None:
    """Whether the job was submitted from a home to its Redis; None: by an earlier version.

    `own`: what `queueing` returns for this home and Redis.
    """
    about = rundir.read_spec().get(_QUEUEING)
    if not isinstance(about, dict):
        return None
    own = own[_QUEUEING]
    return all(about.get(name) == value for name, value in own.items())


def move_to(rundir: RunDir, home: Home, connection: redis.Redis) -> None:
    """Record that the job is now one of this home and Redis."""
    about = rundir.read_spec().get(_QUEUEING) or {}
    rundir.annotate(queueing={**about, **queueing(home, connection)[_QUEUEING]})


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

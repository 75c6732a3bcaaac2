"""Jobs that Redis does not know: what their run directories tell, and making them jobs again.

A run directory was copied from elsewhere, or Redis has lost its data, or is another one than
before. The directory then names the Redis that the job belongs to from now on, so that a daemon of
another one, which may still have the job in its queue, leaves it alone.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from rq.job import JobStatus

from ...jobs.errors import Conflict
from ..runs import events
from ..runs.rundir import RunDir
from . import keys

_OWNER = "redis"  # in spec.json


@dataclass(frozen=True)
class Past:
    """What a run directory tells of its job."""

    status: JobStatus
    created_at: float
    ended_at: float
    executions: int
    from_cli: bool


def past_of(rundir: RunDir) -> Past:
    """Read what became of a job. Raises Conflict for a spec.json that cannot be read."""
    created_at = rundir.created_at()
    latest = next(iter(events.newest(rundir.events, 1)), None)
    return Past(
        status=_status(rundir, latest),
        created_at=created_at,
        ended_at=created_at if latest is None else latest["time"],
        executions=0 if latest is None else latest["execution"],
        from_cli=rundir.origin() == "cli",
    )


def _status(rundir: RunDir, latest: dict[str, Any] | None) -> JobStatus:
    if rundir.read_result() is not None:
        return JobStatus.FINISHED
    if latest is None:
        return JobStatus.CANCELED  # it never began
    return JobStatus.FAILED if latest["type"] == "failed" else JobStatus.STOPPED


def identity(connection: redis.Redis) -> str:
    """Return the name of a Redis' data, which its first user gives it."""
    connection.set(keys.IDENTITY, secrets.token_hex(8), nx=True)
    found: Any = connection.get(keys.IDENTITY)
    return keys.text(found)


def is_foreign(connection: redis.Redis, rundir: RunDir) -> bool:
    """Whether the job was taken over by another Redis."""
    owner = rundir.read_spec().get(_OWNER)
    return owner is not None and owner != identity(connection)


def take_over(connection: redis.Redis, rundir: RunDir) -> None:
    """Make the job one of this Redis. Raises Conflict while a daemon runs it."""
    job_id = rundir.path.name
    if rundir.is_held():
        raise Conflict(f"job: {job_id} is running in another daemon: cancel it there first")
    document = rundir.read_spec()
    if document["id"] != job_id:
        raise Conflict(f"job: {rundir.path} holds {document['id']}: give it that name again")
    own_weights = rundir.path / "init"
    model = document.get("model")
    if model is not None and own_weights.is_dir() and Path(model["path"]).name == own_weights.name:
        model = {**model, "path": str(own_weights)}  # the directory had another place
    rundir.annotate(**{_OWNER: identity(connection)}, **({} if model is None else {"model": model}))


def check_model(rundir: RunDir) -> None:
    """Raise Conflict when the model that a job is to be given is not on this machine."""
    model = rundir.read_spec().get("model")
    if model is not None and Path(model["path"]).is_absolute() and not Path(model["path"]).is_dir():
        raise Conflict(
            f"job: {rundir.path.name} needs the model folder {model['path']}, which is not on this "
            "machine: copy it there, or make a link"
        )

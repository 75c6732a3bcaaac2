"""Adoption of jobs that Redis does not know, from their run directories.

The run directory was copied from another machine, Redis has lost its data, or the daemon uses
another Redis than before. On adoption the directory is marked with the new Redis: a daemon of the
old one, which may still have the job in its queue, then does not run it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from ...configs.labels import with_ranks
from ...jobs.errors import Conflict
from ..runs import events
from ..runs.rundir import RunDir
from . import keys
from .rq_format import JobStatus

_OWNER = "redis"  # in spec.json


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

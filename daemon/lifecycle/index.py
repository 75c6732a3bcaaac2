"""Builds the job indices: for a home of an earlier version, and at every start of a daemon.

Existing entries are never changed, so building twice or concurrently does no harm.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import redis
from redis.client import Pipeline

from ...configs.queues import INFER, QUEUES
from ...jobs import KINDS, spec_class
from ...jobs.errors import WarmdError
from ...jobs.ids import is_job_id, kind_of
from ..queue import job_index, keys, listing
from ..queue.jobs import ENDED, Job, JobStatus, status_of
from ..runs.rundir import RunDir, job_ids

_VERSION = b"2"
_BATCH = 500  # jobs per transaction
_SETTLED_NS = 1_000_000_000  # after this, a further change has another modification time


def ensure(connection: redis.Redis, runs: Path) -> None:
    """Build the indices if they are missing or of an earlier version."""
    if connection.get(keys.INDEXED) != _VERSION:
        build(connection, runs)


def build(connection: redis.Redis, runs: Path) -> None:
    """Add every job and every run directory that is missing in an index."""
    indexed = set(job_index.newest(connection, QUEUES, None))
    recorded = listing.every_id(connection)
    indexed &= set(job_index.newest_of_kinds(connection, KINDS, None))
    new = [job_id for job_id in job_ids(runs) if job_id not in indexed]
    folders = {job_id: _is_from_cli(runs, job_id) for job_id in new}
    for start in range(0, len(recorded), _BATCH):
        _add_jobs(connection, recorded[start : start + _BATCH], folders)
    for job_id in folders.keys() - set(recorded):
        _add_folder(connection, runs, job_id, from_cli=folders[job_id])
    connection.set(keys.INDEXED, _VERSION)


def add_folders(connection: redis.Redis, runs: Path) -> None:
    """Add run directories without a job in Redis that were created since the last call.

    While the folder of run directories is unchanged, this costs one `stat` and one command.
    """
    try:
        changed_ns = runs.stat().st_mtime_ns
    except FileNotFoundError:
        return
    if connection.hget(keys.LISTED, str(runs)) == str(changed_ns).encode():
        return
    indexed = set(job_index.newest(connection, QUEUES, None))
    for job_id in job_ids(runs):
        if job_id not in indexed:
            _add_folder(connection, runs, job_id, from_cli=_is_from_cli(runs, job_id))
    if time.time_ns() - changed_ns > _SETTLED_NS:
        connection.hset(keys.LISTED, str(runs), str(changed_ns))


def _is_from_cli(runs: Path, job_id: str) -> bool:
    with suppress(WarmdError):
        return RunDir(runs / job_id).origin() == "cli"
    return False


def _add_jobs(connection: redis.Redis, ids: Sequence[str], folders: dict[str, bool]) -> None:
    """Add a batch of jobs; if one of them changes meanwhile, the batch is read again."""
    while True:
        with connection.pipeline() as pipeline, suppress(redis.WatchError):
            pipeline.watch(*map(Job.key_for, ids))
            found = _read(connection, ids)
            pipeline.multi()
            for job_id, fields in zip(ids, found, strict=True):
                _add(pipeline, job_id, fields, from_cli=folders.get(job_id, False))
            pipeline.execute()
            return


def _read(connection: redis.Redis, ids: Sequence[str]) -> list[Any]:
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in ids:
            pipeline.hmget(Job.key_for(job_id), "origin", "status", "created_at", "ended_at")
        return pipeline.execute(raise_on_error=False)


def _add(pipeline: Pipeline, job_id: str, fields: Any, *, from_cli: bool) -> None:
    if isinstance(fields, redis.ResponseError) or fields[0] is None:
        return  # not a job
    queue, status, created_at, ended_at = fields
    if not is_job_id(job_id) or keys.text(queue) not in QUEUES:
        return  # not one of warmd's jobs
    at = {job_id: _seconds(created_at)}
    pipeline.zadd(keys.jobs(keys.text(queue)), at, nx=True)
    pipeline.zadd(keys.of_kind(kind_of(job_id)), at, nx=True)
    if from_cli:
        pipeline.zadd(keys.FROM_CLI, at, nx=True)
    if status_of(status) in ENDED and keys.text(queue) == INFER:
        pipeline.zadd(keys.ANSWERS, {job_id: _seconds(ended_at)}, nx=True)
    if status_of(status) == JobStatus.STOPPED:
        pipeline.sadd(keys.stopped(keys.text(queue)), job_id)


def _add_folder(connection: redis.Redis, runs: Path, job_id: str, *, from_cli: bool) -> None:
    """Add a run directory without a job in Redis, so that it is listed."""
    kind = kind_of(job_id)
    if kind not in KINDS:
        return
    with suppress(WarmdError):
        at = {job_id: RunDir(runs / job_id).created_at()}
        connection.zadd(keys.jobs(spec_class(kind).queue), at, nx=True)
        connection.zadd(keys.of_kind(kind), at, nx=True)
        if from_cli:
            connection.zadd(keys.FROM_CLI, at, nx=True)


def _seconds(raw: bytes | None) -> float:
    """Parse a time of a job's hash; return unix seconds, 0 if unknown."""
    try:
        return datetime.fromisoformat((raw or b"").decode()).timestamp()
    except ValueError:
        return 0.0

"""Prepares a job that a worker has taken: reads its run directory before a horse is requested.

The outcome is a request for the horse, or the reason why there is nothing to run.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from ...configs.config import ModelConfig, WorkerConfig
from ...jobs.errors import Conflict, NotFound, WarmdError
from ...jobs.files.shortage import shortage
from ..host import fetch
from ..host.messages import LocalModel, RunJob
from ..lifecycle import adopt
from ..queue.jobs import Job, JobStore, StartedExecution
from ..runs.rundir import RunDir
from . import model_folders

log = logging.getLogger(__name__)


class _ModelNotHere(NotFound):
    """The folder of a job's model is not on this machine, but may be on another."""

    def __init__(self, reason: str, path: str) -> None:
        super().__init__(reason)
        self.path = path  # as in the spec


@dataclass
class Prepared:
    """A job that was read from its run directory."""

    rundir: RunDir | None = None  # None if it has none, or one of another Redis
    request: RunJob | None = None  # what to send to a horse
    result: dict[str, Any] | None = None  # of an execution whose worker died before it finished
    failure: str | None = None  # why the job cannot be run
    missing_model: str | None = None  # path of the model folder that the job waits for, elsewhere


def prepare(
    store: JobStore,
    runs: Path,
    worker: str,
    config: WorkerConfig,
    job: Job,
    started: StartedExecution,
    *,
    is_shared: bool,
) -> Prepared:
    """Read a started job. A damaged job fails, and must not end the worker.

    `is_shared`: other machines take jobs from the same queue, and may have a model that is missing
    here. Raises RedisError: an unreachable Redis must not fail the job. Raises what a shortage of
    the machine has caused.
    """
    prepared = Prepared()
    try:
        if not store.is_ours(job):
            raise NotFound(f"job: {job.id} is not one of warmd's")
        rundir = RunDir.open(runs, job.id)
        if adopt.is_foreign(store.connection, rundir):
            raise Conflict(f"job: {job.id} was taken over by another Redis: resume it there")
        prepared.rundir = rundir
        prepared.result = rundir.read_result()
        offset_s = store.shared_clock.offset_s()
        prepared.request = request_of(rundir, worker, config, job, started.number, offset_s)
    except _ModelNotHere as error:
        prepared.failure = str(error)
        if is_shared:
            prepared.missing_model = error.path
    except WarmdError as error:
        if shortage(error) is not None:
            raise
        prepared.failure = str(error)
    except redis.RedisError:
        raise
    except Exception as error:
        if shortage(error) is not None:
            raise
        log.exception("%s: %s", job.id, worker)
        prepared.failure = f"{type(error).__name__}: {error}"
    return prepared


def request_of(
    rundir: RunDir,
    worker: str,
    config: WorkerConfig,
    job: Job,
    execution: int,
    offset_s: float,
) -> RunJob:
    """Return the request for the horse. Raises WarmdError."""
    model = None
    if (document := rundir.read_spec().get("model")) is not None:
        path = document["path"]
        document = {**document, "path": model_folders.path_here(rundir, path)}
        model_config = ModelConfig(**document)
        try:
            folder = fetch.folder_at_hand(model_config)
        except fetch.NoModelFolder as error:
            if model_folders.is_own(rundir, path):
                raise
            raise _ModelNotHere(str(error), path) from error
        model = LocalModel(model_config, None if folder is None else str(folder))
    return RunJob(
        job_id=job.id,
        worker=worker,
        run_dir=str(rundir.path),
        execution=execution,
        slots=config.slots,
        threads=config.threads,
        niceness=config.niceness,
        device=config.device,
        gpu_memory=config.gpu_memory,
        copy_threads=config.copy_threads,
        enqueued_at=job.enqueued_at.timestamp() if job.enqueued_at else None,
        clock_offset_s=offset_s,
        model=model,
    )

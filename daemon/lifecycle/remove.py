"""Removal of a job: its run directory and its data in Redis, completely even if interrupted.

First the run directory is renamed within `runs`, which works on a full disk too; then the record in
Redis is deleted, then the files. A removal that was interrupted is finished by the next process
that finds the renamed folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from fcntl import LOCK_EX
from pathlib import Path
from typing import Any

from ...configs.queues import TRAIN
from ...jobs import KINDS, spec_class
from ...jobs.errors import Conflict, WarmdError
from ...jobs.files.atomic import locked
from ...jobs.ids import is_job_id, kind_of
from ...jobs.models.adapters import base_of, is_adapter
from ..host.warm_set import known_models
from ..queue import job_index, listing
from ..queue.jobs import ENDED, Job
from ..runs.rundir import REMOVED, RunDir, job_ids, trainer_of
from .places import Places
from .statuses import PENDING, UNREGISTERED


def remove(places: Places, job_id: str) -> int:
    """Remove an ended job, or the rest of one; return the bytes freed.

    Raises Conflict for a job that is not ended, or that another daemon runs.
    """
    runs = places.runs
    with locked(runs, LOCK_EX):
        run_dir, removed_dir = runs / job_id, runs / f"{REMOVED}{job_id}"
        job = places.store.fetch(job_id)
        if job is None and RunDir(run_dir).is_held():
            raise Conflict(f"job: {job_id} is running in another daemon: cancel it there first")
        if job is not None and job.get_status(refresh=False) not in ENDED:
            raise _not_ended(job)
        if run_dir.is_dir():
            if removed_dir.exists():  # of an earlier copy of the job
                shutil.rmtree(removed_dir)
            run_dir.rename(removed_dir)
        elif places.remote is not None:
            # It marks the removal as unfinished, if this process is killed.
            removed_dir.mkdir(mode=0o700, exist_ok=True)
        return _finish(places, run_dir, removed_dir)


def finish_all(places: Places) -> dict[str, int]:
    """Finish interrupted removals; return the bytes freed for each job."""
    freed: dict[str, int] = {}
    runs = places.runs
    # The lock changes the folder, after which every list of jobs reads all of it again.
    if not _removed_dirs(runs):
        return freed
    with locked(runs, LOCK_EX):
        for removed_dir in _removed_dirs(runs):
            job_id = removed_dir.name.removeprefix(REMOVED)
            with suppress(Conflict):  # resumed meanwhile, and renamed back
                freed[job_id] = _finish(places, runs / job_id, removed_dir)
    return freed


def _removed_dirs(runs: Path) -> list[Path]:
    """The run directories whose removal has begun."""
    with suppress(FileNotFoundError):
        return [runs / name for name in os.listdir(runs) if name.startswith(REMOVED)]
    return []


def _finish(places: Places, run_dir: Path, removed_dir: Path) -> int:
    """Delete `removed_dir` and the job's data in Redis; return the bytes freed."""
    job = places.store.fetch(run_dir.name)
    if job is None:
        job_index.forget(places.connection, run_dir.name)
    elif not places.store.remove(job):
        if removed_dir.exists() and not run_dir.exists():
            removed_dir.rename(run_dir)
        raise _not_ended(job)  # it was resumed just now
    if places.remote is not None:
        places.remote.withdraw(run_dir.name)
    freed = size_bytes(removed_dir)
    if removed_dir.is_dir():
        shutil.rmtree(removed_dir)
    return freed


def _not_ended(job: Job) -> Conflict:
    return Conflict(f"job: {job.id} is {job.get_status(refresh=False).value}: cancel it first")


def _resumable(rundir: RunDir) -> list[Path]:
    """Return the folders that are needed to resume a job, but not to use its model."""
    return [rundir.checkpoints, rundir.path / "init"]


def size_bytes(folder: Path) -> int:
    """Return the bytes that deleting a folder frees: files with other hard links do not count."""
    freed = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                found = os.lstat(os.path.join(root, name))
                freed += found.st_size if found.st_nlink == 1 else 0
    return freed


def remove_resume_state(places: Places, job_id: str) -> int:
    """Remove the files to resume an ended job, but not its model; return the bytes freed."""
    job = places.fetch(job_id)
    if job.get_status() not in ENDED:
        raise Conflict(f"job: {job_id} is {job.get_status().value}: cancel it first")
    freed = resume_bytes(places, job_id)
    for folder in _resumable(places.current(job_id)):
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
    if places.remote is not None:
        places.remote.note_removed_checkpoints(job_id)
    return freed


def has_model(places: Places, job_id: str) -> bool:
    """Whether a job has made a model, on this machine or in the run store."""
    if (places.runs / job_id / "model").is_dir():
        return True
    return places.remote is not None and places.remote.size_bytes(job_id, "model") > 0


def resume_bytes(places: Places, job_id: str) -> int:
    """Return the bytes of what an ended job would resume from; in the run store, if any."""
    folders = _resumable(RunDir(places.runs / job_id))
    if places.remote is not None:
        return sum(places.remote.size_bytes(job_id, folder.name) for folder in folders)
    return sum(map(size_bytes, folders))


def ended(places: Places, statuses: Collection[str], *, before: float) -> list[str]:
    """Return the ids of jobs with one of the statuses that ended before then, newest first."""
    jobs = listing.with_status(places.connection, statuses)
    old = [job for job in jobs if job.ended_at and job.ended_at.timestamp() < before]
    return [job.id for job in sorted(old, key=lambda job: job.created_at, reverse=True)]


# --- dependencies between jobs --------------------------------------------------------------------


def dependents(runs: Path, job_ids: list[str]) -> dict[str, list[str]]:
    """Return the jobs whose files other jobs need, each with those other jobs.

    A job submitted with --init-from has its own files. A job whose `model` is another job reads
    that job's model until it has finished, and an adapter needs its base model forever.
    """
    found: dict[str, list[str]] = {}
    for job_id in job_ids:
        for path in _read_by(RunDir(runs / job_id)):
            parent = owner_of(runs, path)
            if parent is not None and parent != job_id:
                found.setdefault(parent, []).append(job_id)
    return found


def owner_of(runs: Path, path: str) -> str | None:
    """Return the job in whose run directory a path lies.

    The path may be that on another machine, or lead through a link to `runs`.
    """
    with suppress(ValueError):
        parts = Path(path).relative_to(runs.resolve()).parts
        return parts[0] if parts and is_job_id(parts[0]) else None
    return trainer_of(path)


def _read_by(rundir: RunDir) -> Iterator[str]:
    with suppress(WarmdError, OSError, ValueError, KeyError, TypeError):
        document = rundir.read_spec()
        model = document.get("model")
        is_here = (rundir.path / "model").is_dir()
        # An adapter that is in the run store alone says what its base is by the job's options.
        is_adapter_elsewhere = document["spec"].get("lora") is not None and not is_here
        if model is not None and (rundir.read_result() is None or is_adapter_elsewhere):
            yield str(model["path"])
        for folder in (rundir.path / "model", rundir.path / "init"):
            if is_adapter(folder):
                yield base_of(folder)


def refuse_removal(job: Mapping[str, Any], needed_by: Sequence[str]) -> None:
    """Raise Conflict for a job (as `Jobs.get` returns it) that runs, waits or is needed."""
    if job["status"] not in (*ENDED, UNREGISTERED):
        raise Conflict(f"job: {job['id']} is {job['status']}: cancel it first")
    if needed_by:
        raise Conflict(f"job: {job['id']} is still needed by {', '.join(needed_by[:3])}")


def needed(places: Places) -> dict[str, list[str]]:
    """Return the jobs that others still need, each with those other jobs and warm models."""
    if places.remote is not None:
        places.remote.refresh_summaries(places.remote.ids())
    trainings = [
        job_id
        for job_id in job_ids(places.runs)
        if (kind := kind_of(job_id)) in KINDS and spec_class(kind).queue == TRAIN
    ]
    pending = listing.with_status(places.connection, PENDING)
    readers = list(dict.fromkeys([*trainings, *(job.id for job in pending)]))
    found = dependents(places.runs, readers)
    for job in pending:
        for parent in job._dependency_ids:
            found.setdefault(parent, []).append(job.id)
    for name, model in known_models(places.home).items():
        owner = owner_of(places.runs, model.path)
        if owner is not None:
            found.setdefault(owner, []).append(
                f"warm model {name} (`warmd models --unload {name}`)"
            )
    return found

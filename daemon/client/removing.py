"""Removing jobs, and finding out which ones are still needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...configs.queues import TRAIN
from ...jobs import KINDS, spec_class
from ...jobs.errors import Conflict
from ...jobs.ids import kind_of
from ..host.warm_set import known_models
from ..lifecycle import remove
from ..lifecycle.find import PENDING
from ..lifecycle.view import UNREGISTERED
from ..queue import listing
from ..queue.jobs import ENDED
from ..runs.rundir import RunDir, job_ids
from .connection import ClientConnection, needs_redis

_ENDED = {UNREGISTERED, *(status.value for status in ENDED)}


def refuse_removal(job: Mapping[str, Any], needed_by: Sequence[str]) -> None:
    """Raise Conflict for a job (as `Client.job` returns it) that runs, waits or is needed."""
    if job["status"] not in _ENDED:
        raise Conflict(f"job: {job['id']} is {job['status']}: cancel it first")
    if needed_by:
        raise Conflict(f"job: {job['id']} is still needed by {', '.join(needed_by[:3])}")


class Removing(ClientConnection):
    """Removes ended jobs, or the files from which they would resume."""

    @needs_redis
    def remove(self, job_id: str) -> int:
        """Remove an ended job: its run directory with everything in it, and its data in Redis.

        Returns the bytes freed. If interrupted, the next call finishes it. Raises Conflict for a
        job that is not ended.
        """
        return remove.remove(self.places, job_id)

    @needs_redis
    def finish_removals(self) -> dict[str, int]:
        """Finish interrupted removals; return the bytes freed for each job."""
        return remove.finish_all(self.places)

    @needs_redis
    def remove_resume_state(self, job_id: str) -> int:
        """Remove the files to resume an ended job, but not its model; return the bytes freed."""
        job = self.fetch(job_id)
        if job.get_status() not in ENDED:
            raise Conflict(f"job: {job_id} is {job.get_status().value}: cancel it first")
        stored = self.resume_bytes(job_id)
        freed = remove.remove_resume_state(self.current_rundir(job_id))
        self.note_removed_checkpoints(job_id)
        return freed if self.remote is None else stored

    def has_model(self, job_id: str) -> bool:
        """Whether a job has made a model, on this machine or in the run store."""
        if (self.home.runs / job_id / "model").is_dir():
            return True
        return self.remote is not None and self.remote.size_bytes(job_id, "model") > 0

    def resume_bytes(self, job_id: str) -> int:
        """Return the bytes of what an ended job would resume from; in the run store, if any."""
        folders = remove.resumable(RunDir(self.home.runs / job_id))
        if self.remote is not None:
            return sum(self.remote.size_bytes(job_id, folder.name) for folder in folders)
        return sum(map(remove.size_bytes, folders))

    def note_removed_checkpoints(self, job_id: str) -> None:
        """Remove from the run store, if there is one, the checkpoints that are gone here."""
        if self.remote is not None:
            self.remote.note_removed_checkpoints(job_id)

    @needs_redis
    def ended(self, statuses: Collection[str], *, before: float) -> list[str]:
        """Return the ids of jobs with one of the statuses that ended before then, newest first."""
        jobs = listing.with_status(self.connection, statuses)
        old = [job for job in jobs if job.ended_at and job.ended_at.timestamp() < before]
        return [job.id for job in sorted(old, key=lambda job: job.created_at, reverse=True)]

    @needs_redis
    def needed(self) -> dict[str, list[str]]:
        """Return the jobs that others still need, each with those other jobs and warm models."""
        if self.remote is not None:
            self.remote.refresh_summaries(self.remote.ids())
        trainings = [
            job_id
            for job_id in job_ids(self.home.runs)
            if (kind := kind_of(job_id)) in KINDS and spec_class(kind).queue == TRAIN
        ]
        pending = listing.with_status(self.connection, PENDING)
        readers = list(dict.fromkeys([*trainings, *(job.id for job in pending)]))
        found = remove.dependents(self.home.runs, readers)
        for job in pending:
            for parent in job._dependency_ids:
                found.setdefault(parent, []).append(job.id)
        for name, model in known_models(self.home).items():
            owner = remove.owner_of(self.home.runs, model.path)
            if owner is not None:
                found.setdefault(owner, []).append(f"warm model {name} (`warmd unload {name}`)")
        return found

"""The places of the jobs of a home: their records, their run directories, and the run store."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import redis

from ...jobs.errors import NotFound
from ...jobs.ids import is_job_id
from ..host.home import Home
from ..queue import keys
from ..queue.jobs import Job, JobStore
from ..runs.rundir import RunDir

if TYPE_CHECKING:
    from ..store.remote import RemoteRuns


@dataclass(frozen=True)
class Places:
    """Where the jobs of a home are."""

    home: Home
    store: JobStore  # the records, in Redis
    remote: RemoteRuns | None  # None: run directories are in a folder that all machines see
    # Jobs as of their latest end, by id.
    _refreshed: dict[str, datetime | None] = field(default_factory=dict)

    @property
    def connection(self) -> redis.Redis:
        return self.store.connection

    @cached_property
    def own(self) -> dict[str, str]:
        """The home and its Redis, as spec.json names them. The home must exist."""
        place = keys.place(self.connection)
        if os.path.realpath(place) == os.path.realpath(self.home.redis_socket):
            place = "embedded"  # also if the home is moved
        return {"home": self.home.id(), "redis": place}

    @property
    def runs(self) -> Path:
        """The folder of run directories on this machine."""
        return self.home.runs

    def rundir(self, job_id: str) -> RunDir:
        """The run directory of a job on this machine; it may not be there."""
        return RunDir(self.runs / job_id)

    def current(self, job_id: str) -> RunDir:
        """The run directory of a job to change it: as it is now. Raises NotFound."""
        if is_job_id(job_id):
            self.refresh(job_id)
        return RunDir.open(self.runs, job_id)

    def fetch(self, job_id: str) -> Job:
        """The record of a job. Raises NotFound."""
        job = self.store.fetch(job_id)
        if job is None:
            raise NotFound(
                f"job: {job_id} is not in Redis, but its files are in {self.current(job_id).path}: "
                f"`warmd resume {job_id}` queues it again"
            )
        return job

    def publish(self, job_id: str) -> None:
        """Make the run directory known to all machines, before one of them takes the job."""
        if self.remote is not None:
            self.remote.publish(job_id)

    def refresh(self, job_id: str) -> None:
        """Update a job's run directory on this machine, except weights. Raises StoreUnavailable."""
        if self.remote is not None:
            self.remote.refresh(job_id)

    def refresh_ended(self, job: Job) -> None:
        """The same for a training that has ended, once per end: nothing is uploaded after it."""
        is_known = job.id in self._refreshed and self._refreshed[job.id] == job.ended_at
        if self.remote is None or is_known:
            return
        self.remote.refresh(job.id)
        self._refreshed[job.id] = job.ended_at

"""Jobs by their run directories alone, for reading while no daemon runs."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from ...jobs.errors import Conflict
from ..runs.rundir import RunDir, by_time, job_ids
from .views import view_without_redis


class Offline:
    """The run directories of one home. `connection` names its Redis, and is never used."""

    def __init__(self, runs: Path, connection: redis.Redis) -> None:
        self._runs = runs
        self._connection = connection

    def job(self, job_id: str) -> dict[str, Any]:
        """Return what is known of a job. Raises NotFound and Conflict."""
        return view_without_redis(RunDir.open(self._runs, job_id), self._connection)

    def jobs(
        self,
        *,
        statuses: Collection[str] | None = None,
        limit: int | None = None,
        kinds: Collection[str] | None = None,
    ) -> list[dict[str, Any]]:
        """Return every job, or those of some statuses and kinds, newest first, at most `limit`."""
        found: list[dict[str, Any]] = []
        for job_id in sorted(job_ids(self._runs), key=by_time, reverse=True):
            if len(found) == limit:
                break
            if kinds is not None and job_id.split("-")[0] not in kinds:
                continue
            with suppress(Conflict):  # a spec.json that cannot be read
                job = self.job(job_id)
                if statuses is None or job["status"] in statuses:
                    found.append(job)
        return found

"""Jobs by their run directories alone, for reading while no daemon runs."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from ...jobs.errors import Conflict, NotFound
from ...jobs.ids import by_time, kind_of
from ..runs import labels as job_labels
from ..runs.labels import NO_LABELS, Labels
from ..runs.rundir import RunDir, job_ids
from .views import view_without_redis


class Offline:
    """The run directories of one home. `connection` names its Redis, and is never used."""

    def __init__(self, runs: Path, connection: redis.Redis) -> None:
        self._runs = runs
        self._connection = connection

    def job(self, job_id: str) -> dict[str, Any]:
        """Return the known fields of a job. Raises NotFound and Conflict."""
        return view_without_redis(RunDir.open(self._runs, job_id), self._connection)

    def several(self, ids: list[str]) -> list[dict[str, Any]]:
        """Return the known fields of these jobs, without jobs that were removed."""
        found = []
        for job_id in ids:
            with suppress(Conflict, NotFound):
                found.append(self.job(job_id))
        return found

    def jobs(
        self,
        *,
        statuses: Collection[str] | None = None,
        limit: int | None = None,
        kinds: Collection[str] | None = None,
        labels: Labels = NO_LABELS,
        text: str = "",
        older_than: str | None = None,
        hidden: Collection[str] = (),
    ) -> list[dict[str, Any]]:
        """Return every job, or those that the filters leave, newest first, at most `limit`."""
        found: list[dict[str, Any]] = []
        for job_id in sorted(job_ids(self._runs), key=by_time, reverse=True):
            if len(found) == limit:
                break
            if job_id in hidden:
                continue
            if kinds is not None and kind_of(job_id) not in kinds:
                continue
            if text not in job_id or (older_than and by_time(job_id) >= by_time(older_than)):
                continue
            with suppress(Conflict):  # a spec.json that cannot be read
                if not job_labels.read(RunDir(self._runs / job_id)).fits(labels):
                    continue
                job = self.job(job_id)
                if statuses is None or job["status"] in statuses:
                    found.append(job)
        return found

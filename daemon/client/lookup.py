"""Finding jobs: which one a text means, and which there are, with or without a record in Redis."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from heapq import nlargest
from pathlib import Path
from typing import Any

import redis

from ...configs.queues import QUEUES
from ...jobs.errors import Conflict, NotFound, SpecError
from ..queue import index_builder, job_index, listing
from ..queue.jobs import JobStore
from ..runs.rundir import RunDir, by_time, is_id_prefix, is_job_id, job_ids
from .views import UNREGISTERED, view_of_folder, views_of

PENDING = ("started", "queued", "scheduled", "deferred")
_AT_ONCE = 20  # jobs that are looked at for the latest


@dataclass(frozen=True)
class Pending:
    """A job that runs or waits."""

    id: str
    status: str  # RQ's
    is_paused: bool  # or is about to be


class Lookup:
    """The jobs of one folder of run directories and of its Redis."""

    def __init__(self, store: JobStore, runs: Path) -> None:
        self._store = store
        self._runs = runs

    @cached_property
    def indexed(self) -> redis.Redis:
        """The connection, once the indices of jobs are built."""
        index_builder.ensure(self._store.connection, self._runs)
        return self._store.connection

    def find(self, text: str | None) -> str:
        """Return the id that an id or an unambiguous beginning of one means.

        `-` or nothing means the latest job of the command line, never an HTTP answer.
        Raises SpecError and NotFound.
        """
        if text is None or text == "-":
            return self._latest()
        if not is_id_prefix(text):
            raise SpecError(
                "job", f"must be a job id such as grpo-20260131-184200-x7f2, got {text[:80]!r}"
            )
        if is_job_id(text) and (self._runs / text).is_dir():
            return text
        matches = [job_id for job_id in job_ids(self._runs) if job_id.startswith(text)]
        matches = matches or [job_id for job_id in self._known() if job_id.startswith(text)]
        if len(matches) > 1:
            first = ", ".join(sorted(matches, key=by_time)[:4])
            raise SpecError("job", f"{text!r} begins {len(matches)} ids: {first}")
        if not matches:
            raise NotFound(f"job: no job {text!r} in {self._runs}")
        return matches[0]

    def _latest(self) -> str:
        """The latest job of the command line whose files are there."""
        start = 0
        with suppress(redis.RedisError):
            while found := job_index.from_cli_newest(self.indexed, start, _AT_ONCE):
                for job_id in found:
                    if is_job_id(job_id) and (self._runs / job_id).is_dir():
                        return job_id
                start += len(found)
        for job_id in sorted(job_ids(self._runs), key=by_time, reverse=True):
            with suppress(Conflict):
                if RunDir(self._runs / job_id).origin() == "cli":
                    return job_id
        raise NotFound(f"job: none in {self._runs} yet: `warmd submit` makes one")

    def _known(self) -> list[str]:
        """The jobs that Redis knows, where there is one: those whose files are gone, too."""
        with suppress(redis.RedisError):
            return [j for j in job_index.newest(self.indexed, QUEUES, None) if is_job_id(j)]
        return []

    def jobs(self, statuses: Collection[str] | None, limit: int | None) -> list[dict[str, Any]]:
        """Return every job, or those of some statuses, newest first, at most `limit`."""
        if statuses is None:
            return self._newest(limit)
        found = listing.with_status(self._store.connection, statuses, limit)
        views = views_of(found, self._store.connection, self._runs)
        if UNREGISTERED in statuses:
            views += [job for job in self._newest(None) if job["status"] == UNREGISTERED]
        return sorted(views, key=_age)[:limit]

    def _newest(self, limit: int | None) -> list[dict[str, Any]]:
        """The latest jobs, with and without a record in Redis."""
        while True:
            indexed = job_index.newest(self.indexed, QUEUES, limit)
            has_more = len(indexed) == limit
            names = job_ids(self._runs, since=by_time(indexed[-1]) if has_more else "")
            latest = names if limit is None else nlargest(limit, names, key=by_time)
            ids = list(dict.fromkeys([*indexed, *latest]))
            records = self._store.fetch_many(ids)
            lost = [
                job_id
                for job_id, record in zip(ids, records, strict=True)
                if record is None and not (self._runs / job_id).is_dir()
            ]
            for job_id in lost:
                job_index.forget(self._store.connection, job_id)
            if not lost:
                break
        known = [record for record in records if record is not None]
        views = views_of(known, self._store.connection, self._runs)
        for job_id, record in zip(ids, records, strict=True):
            if record is None:
                with suppress(Conflict):  # nothing that can be read
                    views.append(
                        view_of_folder(RunDir.open(self._runs, job_id), self._store.connection)
                    )
        return sorted(views, key=_age)[:limit]

    def job(self, job_id: str) -> dict[str, Any]:
        """Return all that is known of a job. Raises NotFound and Conflict."""
        record = self._store.fetch(job_id)
        if record is not None:
            return views_of([record], self._store.connection, self._runs)[0]
        return view_of_folder(RunDir.open(self._runs, job_id), self._store.connection)

    def pending(self) -> list[Pending]:
        """Return the jobs of the command line that run or wait, newest first."""
        jobs = listing.with_status(self._store.connection, PENDING)
        marks = job_index.are_from_cli(self.indexed, [job.id for job in jobs])
        ours = [job for job, is_ours in zip(jobs, marks, strict=True) if is_ours]
        notes = listing.notes(self._store.connection, ours)
        return [
            Pending(job.id, job.get_status(refresh=False).value, is_paused)
            for job, (_, is_paused) in zip(ours, notes, strict=True)
        ]


def _age(job: Mapping[str, Any]) -> tuple[float, str]:
    """What jobs are sorted by, newest first."""
    return -job["created_at"], job["id"]

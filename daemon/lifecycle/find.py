"""Finding jobs by id or prefix, and listing them, with or without a record in Redis.

`Lookup` reads Redis and run directories; `Offline` the run directories alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import redis

from ...configs.queues import QUEUES, TRAIN
from ...jobs import KINDS, spec_class
from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.ids import by_time, is_id_prefix, is_job_id, kind_of
from ..queue import job_index, listing
from ..queue.jobs import Job
from ..runs import labels
from ..runs.labels import NO_LABELS, Labels
from ..runs.rundir import RunDir, job_ids
from . import index
from .places import Places
from .statuses import PENDING, UNREGISTERED
from .view import (
    JobFilter,
    JobView,
    view_of_folder,
    view_without_redis,
    views_of,
)

if TYPE_CHECKING:
    from ..store.reading import ReadableRuns

_BATCH = 20  # jobs per round trip in the search for the latest


@dataclass(frozen=True)
class Pending:
    """A running or waiting job."""

    id: str
    status: str  # RQ's
    is_paused: bool  # or a pause is requested


class Lookup:
    """The jobs of a home in its folder of run directories and in its Redis."""

    def __init__(self, places: Places, remote: ReadableRuns | None) -> None:
        """`remote`: the run store for reading, if run directories here are only copies."""
        self._places = places
        self._store = places.store
        self._runs = places.runs
        self._remote = remote

    @cached_property
    def indexed(self) -> redis.Redis:
        """The connection to Redis, after the job indices have been built."""
        index.ensure(self._store.connection, self._runs)
        return self._store.connection

    def find(self, text: str | None, *, is_training: bool = False) -> str:
        """Return the id of the job that an id, a unique prefix of one or a unique name names.

        `-` or None is the latest job submitted from the command line, never an HTTP request; with
        `is_training`, the latest training job. Raises SpecError and NotFound.
        """
        if text is None or text == "-":
            return self.latest(_training_kinds() if is_training else None)
        if not is_id_prefix(text):
            if labels.is_name(text):
                return self._named(text)
            raise SpecError(
                "job", f"must be a job id such as grpo-20260131-184200-x7f2, got {text[:80]!r}"
            )
        if is_job_id(text) and self._remote is not None:
            self._remote.refresh(text)
        if is_job_id(text) and (self._runs / text).is_dir():
            return text
        matches = [job_id for job_id in job_ids(self._runs) if job_id.startswith(text)]
        if not matches or self._remote is not None:
            known = (job_id for job_id in self._known() if job_id.startswith(text))
            matches = list(dict.fromkeys([*matches, *known]))
        if len(matches) > 1:
            first = labels.first_of(sorted(matches, key=by_time))
            raise SpecError("job", f"{text!r} is a prefix of {len(matches)} ids: {first}")
        return matches[0] if matches else self._named(text)

    def _named(self, name: str) -> str:
        """The only job with a name. Raises SpecError and NotFound."""
        self._refresh_all()
        found = labels.fitting(self._runs, Labels(name=name))
        if len(found) > 1:
            raise labels.ambiguous("job", name, found)
        if not found:
            raise NotFound(f"job: no job {name!r} in {self._runs}")
        return found[0]

    def latest(self, kinds: Collection[str] | None = None) -> str:
        """Return the latest job, of some kinds, that was submitted from the command line.

        Only jobs with a run directory count. Raises NotFound.
        """

        def fits(job_id: str) -> bool:
            return kinds is None or kind_of(job_id) in kinds

        start = 0
        with suppress(redis.RedisError):
            while found := job_index.from_cli_newest(self.indexed, start, _BATCH):
                self._refresh(filter(is_job_id, found))
                for job_id in found:
                    if is_job_id(job_id) and fits(job_id) and (self._runs / job_id).is_dir():
                        return job_id
                start += len(found)
        for job_id in sorted(filter(fits, job_ids(self._runs)), key=by_time, reverse=True):
            with suppress(Conflict):
                if RunDir(self._runs / job_id).origin() == "cli":
                    return job_id
        wanted = "none" if kinds is None else f"none of {', '.join(kinds)}"
        raise NotFound(f"job: {wanted} in {self._runs} yet: `warmd submit` creates one")

    def _known(self) -> list[str]:
        """The ids in Redis, if it is reachable; includes jobs whose files are gone."""
        with suppress(redis.RedisError):
            return [j for j in job_index.newest(self.indexed, QUEUES, None) if is_job_id(j)]
        return []

    def jobs(self, wanted: JobFilter) -> list[JobView]:
        """Return the jobs of a filter, newest first."""
        statuses, limit = wanted.statuses, wanted.limit
        if wanted.labels != NO_LABELS:
            self._refresh_all()
            ids = list(filter(wanted.fits_id, labels.fitting(self._runs, wanted.labels)))
            fitting = filter(wanted.fits, self._views(ids, self._store.fetch_many(ids)))
            return sorted(fitting, key=_age, reverse=True)[:limit]
        if statuses is None:
            return self._newest(wanted)
        found = listing.with_status(self._store.connection, statuses, limit, wanted.fits_id)
        self._refresh(job.id for job in found)
        views = views_of(found, self._places)
        if UNREGISTERED in statuses:
            every = self._newest(replace(wanted, limit=None))
            views += [job for job in every if job.status == UNREGISTERED]
        return sorted(views, key=_age, reverse=True)[:limit]

    def _newest(self, wanted: JobFilter) -> list[JobView]:
        """The latest jobs by ids and kinds, with and without a record in Redis."""
        index.add_folders(self.indexed, self._runs)
        while True:
            ids = self._newest_ids(wanted)
            records = self._store.fetch_many(ids)
            self._refresh(ids)
            lost = [
                job_id
                for job_id, record in zip(ids, records, strict=True)
                if record is None and not (self._runs / job_id).is_dir()
            ]
            for job_id in lost:
                job_index.forget(self._store.connection, job_id)
            if not lost:
                break
        return sorted(self._views(ids, records), key=_age, reverse=True)[: wanted.limit]

    def _newest_ids(self, wanted: JobFilter) -> list[str]:
        """The ids of the latest jobs that fit; older ones are read only while some are missing."""
        kinds, limit = wanted.kinds, wanted.limit
        number = limit
        while True:
            if kinds is None:
                ids = job_index.newest(self.indexed, QUEUES, number)
            else:
                ids = job_index.newest_of_kinds(self.indexed, kinds, number)
            found = (list(filter(wanted.fits_id, ids)) if wanted.is_by_id else ids)[:limit]
            if limit is None or number is None or len(found) == limit or len(ids) < number:
                return found
            number = max(4 * number, _BATCH)

    def several(self, ids: list[str]) -> list[JobView]:
        """Return all known fields of these jobs, without jobs that were removed."""
        records = self._store.fetch_many(ids) if ids else []
        self._refresh(ids)
        known = [
            (job_id, record)
            for job_id, record in zip(ids, records, strict=True)
            if record is not None or (self._runs / job_id / "spec.json").is_file()
        ]
        return self._views([job_id for job_id, _ in known], [record for _, record in known])

    def _views(self, ids: list[str], records: list[Job | None]) -> list[JobView]:
        """The jobs with these ids, each by its record in Redis or else by its run directory."""
        known = [record for record in records if record is not None]
        views = views_of(known, self._places)
        for job_id, record in zip(ids, records, strict=True):
            if record is None:
                with suppress(Conflict):  # its spec.json cannot be read
                    views.append(view_of_folder(RunDir.open(self._runs, job_id)))
        return views

    def job(self, job_id: str) -> JobView:
        """Return all known fields of a job. Raises NotFound and Conflict."""
        record = self._store.fetch(job_id)
        if self._remote is not None:
            self._remote.refresh(job_id)
        if record is not None:
            return views_of([record], self._places)[0]
        return view_of_folder(RunDir.open(self._runs, job_id))

    def _refresh(self, ids: Iterable[str]) -> None:
        """Fetch the files of these jobs that lists show, if they are in a run store."""
        if self._remote is not None:
            self._remote.refresh_summaries(list(ids))

    def _refresh_all(self) -> None:
        if self._remote is not None:
            self._remote.refresh_all()

    def pending(self) -> list[Pending]:
        """Return running and waiting jobs submitted from the command line, newest first."""
        # The jobs of HTTP clients, of which there may be thousands, are not read.
        ids = listing.ids_with(self._store.connection, PENDING)
        marks = job_index.are_from_cli(self.indexed, ids)
        typed = [job_id for job_id, is_ours in zip(ids, marks, strict=True) if is_ours]
        ours = listing.of_ids(self._store.connection, typed, PENDING)
        notes = listing.notes(self._store.connection, ours)
        return [
            Pending(job.id, job.get_status(refresh=False).value, note.is_paused)
            for job, note in zip(ours, notes, strict=True)
        ]


class Offline:
    """The jobs in a folder of run directories, while no daemon runs."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs

    def job(self, job_id: str) -> JobView:
        """Return the known fields of a job. Raises NotFound and Conflict."""
        return view_without_redis(RunDir.open(self._runs, job_id))

    def several(self, ids: list[str]) -> list[JobView]:
        """Return the known fields of these jobs, without jobs that were removed."""
        found = []
        for job_id in ids:
            with suppress(Conflict, NotFound):
                found.append(self.job(job_id))
        return found

    def jobs(self, wanted: JobFilter) -> list[JobView]:
        """Return the jobs of a filter, newest first."""
        found: list[JobView] = []
        ids = filter(wanted.fits_id, job_ids(self._runs))
        for job_id in sorted(ids, key=by_time, reverse=True):
            if len(found) == wanted.limit:
                break
            with suppress(Conflict):  # a spec.json that cannot be read
                if labels.read(RunDir(self._runs / job_id)).fits(wanted.labels):
                    job = self.job(job_id)
                    found += [job] if wanted.fits(job) else []
        return found


def _training_kinds() -> list[str]:
    return [name for name in KINDS if spec_class(name).queue == TRAIN]


def _age(job: JobView) -> tuple[float, str]:
    """The sort key of jobs, oldest first; ids order jobs of the same second."""
    return job.created_at or 0.0, by_time(job.id)

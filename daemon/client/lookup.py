"""Finding jobs by id or prefix, and listing them, with or without a record in Redis."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import redis

from ...configs.queues import QUEUES, TRAIN
from ...jobs import KINDS, spec_class
from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.ids import by_time, is_id_prefix, is_job_id, kind_of
from ..lifecycle import index
from ..queue import job_index, listing
from ..queue.jobs import Job, JobStore
from ..runs import labels
from ..runs.labels import NO_LABELS, Labels
from ..runs.rundir import RunDir, job_ids
from ..store.reading import ReadableRuns
from .views import UNREGISTERED, view_of_folder, views_of

PENDING = ("started", "queued", "scheduled", "deferred")
_BATCH = 20  # jobs per round trip in the search for the latest


@dataclass(frozen=True)
class Pending:
    """A running or waiting job."""

    id: str
    status: str  # RQ's
    is_paused: bool  # or a pause is requested


class Lookup:
    """The jobs in a folder of run directories and in its Redis."""

    def __init__(self, store: JobStore, runs: Path, remote: ReadableRuns | None) -> None:
        """`remote`: the run store, if `runs` has only copies."""
        self._store = store
        self._runs = runs
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
            first = _first(sorted(matches, key=by_time))
            raise SpecError("job", f"{text!r} is a prefix of {len(matches)} ids: {first}")
        return matches[0] if matches else self._named(text)

    def _named(self, name: str) -> str:
        """The only job with a name. Raises SpecError and NotFound."""
        self._refresh_all()
        found = labels.fitting(self._runs, Labels(name=name))
        if len(found) > 1:
            raise SpecError("job", f"{name!r} is the name of {len(found)} jobs: {_first(found)}")
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

    def jobs(
        self,
        statuses: Collection[str] | None,
        limit: int | None,
        kinds: Collection[str] | None = None,
        wanted: Labels = NO_LABELS,
        text: str = "",
        older_than: str | None = None,
        hidden: Collection[str] = (),
    ) -> list[dict[str, Any]]:
        """Return every job, or those that the filters leave, newest first, at most `limit`.

        `text`: a part of the id. `older_than`: a job id, to continue a list behind it. `hidden`:
        ids that are left out.
        """

        def fits(job_id: str) -> bool:
            is_kind = kinds is None or kind_of(job_id) in kinds
            is_older = older_than is None or by_time(job_id) < by_time(older_than)
            return is_kind and is_older and text in job_id and job_id not in hidden

        is_exact = not text and older_than is None and not hidden
        if wanted != NO_LABELS:
            return self._labeled(wanted, statuses, limit, fits)
        if statuses is None:
            return self._newest(limit, kinds, None if is_exact else fits)
        found = listing.with_status(self._store.connection, statuses, limit, fits)
        self._refresh(job.id for job in found)
        views = views_of(found, self._store, self._runs)
        if UNREGISTERED in statuses:
            every = self._newest(None, kinds, fits)
            views += [job for job in every if job["status"] == UNREGISTERED]
        return sorted(views, key=_age, reverse=True)[:limit]

    def _newest(
        self, limit: int | None, kinds: Collection[str] | None, fits: Callable[[str], bool] | None
    ) -> list[dict[str, Any]]:
        """The latest jobs of some kinds whose ids fit, with and without a record in Redis."""
        index.add_folders(self.indexed, self._runs)
        while True:
            ids = self._newest_ids(limit, kinds, fits)
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
        return sorted(self._views(ids, records), key=_age, reverse=True)[:limit]

    def _newest_ids(
        self, limit: int | None, kinds: Collection[str] | None, fits: Callable[[str], bool] | None
    ) -> list[str]:
        """The ids of the latest jobs that fit; older ones are read only while some are missing."""
        number = limit
        while True:
            if kinds is None:
                ids = job_index.newest(self.indexed, QUEUES, number)
            else:
                ids = job_index.newest_of_kinds(self.indexed, kinds, number)
            found = list(filter(fits, ids))[:limit]
            if limit is None or number is None or len(found) == limit or len(ids) < number:
                return found
            number = max(4 * number, _BATCH)

    def _labeled(
        self,
        wanted: Labels,
        statuses: Collection[str] | None,
        limit: int | None,
        fits: Callable[[str], bool],
    ) -> list[dict[str, Any]]:
        """The latest jobs whose ids and labels fit."""
        self._refresh_all()
        ids = list(filter(fits, labels.fitting(self._runs, wanted)))
        views = self._views(ids, self._store.fetch_many(ids))
        of_statuses = [job for job in views if statuses is None or job["status"] in statuses]
        return sorted(of_statuses, key=_age, reverse=True)[:limit]

    def several(self, ids: list[str]) -> list[dict[str, Any]]:
        """Return all known fields of these jobs, without jobs that were removed."""
        records = self._store.fetch_many(ids) if ids else []
        self._refresh(ids)
        known = [
            (job_id, record)
            for job_id, record in zip(ids, records, strict=True)
            if record is not None or (self._runs / job_id / "spec.json").is_file()
        ]
        return self._views([job_id for job_id, _ in known], [record for _, record in known])

    def _views(self, ids: list[str], records: list[Job | None]) -> list[dict[str, Any]]:
        """The jobs with these ids, each by its record in Redis or else by its run directory."""
        known = [record for record in records if record is not None]
        views = views_of(known, self._store, self._runs)
        for job_id, record in zip(ids, records, strict=True):
            if record is None:
                with suppress(Conflict):  # its spec.json cannot be read
                    views.append(
                        view_of_folder(RunDir.open(self._runs, job_id), self._store.connection)
                    )
        return views

    def job(self, job_id: str) -> dict[str, Any]:
        """Return all known fields of a job. Raises NotFound and Conflict."""
        record = self._store.fetch(job_id)
        if self._remote is not None:
            self._remote.refresh(job_id)
        if record is not None:
            return views_of([record], self._store, self._runs)[0]
        return view_of_folder(RunDir.open(self._runs, job_id), self._store.connection)

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


def _training_kinds() -> list[str]:
    return [name for name in KINDS if spec_class(name).queue == TRAIN]


def _first(ids: list[str]) -> str:
    """The first few of many ids."""
    return ", ".join(ids[:4])


def _age(job: Mapping[str, Any]) -> tuple[float, str]:
    """The sort key of jobs, oldest first; ids order jobs of the same second."""
    return job["created_at"], by_time(job["id"])

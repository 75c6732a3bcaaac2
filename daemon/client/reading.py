"""Reading jobs: their state, results and events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import redis

from ...configs.queues import QUEUES, TRAIN
from ...jobs.errors import NotFound
from ..lifecycle.find import Pending
from ..lifecycle.follow import follow as follow_events
from ..lifecycle.view import EVERY_JOB, JobFilter
from ..queue import job_index, listing
from ..queue.jobs import ENDED, JobStatus
from ..queue.nodes import NodeRegistry
from ..runs import events, labels as job_labels
from ..runs.labels import Labels
from .connection import ClientConnection, needs_redis

_RETRY_S = 0.2  # between two attempts to reach Redis


class Reading(ClientConnection):
    """Returns the fields of jobs as plain values."""

    def job(self, job_id: str) -> dict[str, Any]:
        """Return all known fields of a job. Raises NotFound and Conflict."""
        return self.read(lambda jobs: jobs.job(job_id)).to_json()

    def jobs(self, wanted: JobFilter = EVERY_JOB) -> list[dict[str, Any]]:
        """Return the jobs of a filter, newest first."""
        return [job.to_json() for job in self.read(lambda jobs: jobs.jobs(wanted))]

    def several(self, ids: list[str]) -> list[dict[str, Any]]:
        """Return all known fields of these jobs, without jobs that were removed."""
        return [job.to_json() for job in self.read(lambda jobs: jobs.several(ids))]

    def labels(self, job_id: str) -> Labels:
        """Return name, tags and notes of a job. Raises NotFound."""
        return job_labels.read(self.rundir(job_id))

    def add_note(self, job_id: str, text: str) -> Labels:
        """Add a note to a job; return all labels. Raises NotFound and SpecError."""
        added = job_labels.add_note(self.current_rundir(job_id), text)
        self.places.publish(job_id)
        return added

    @needs_redis
    def pending(self) -> list[Pending]:
        """Return running and waiting jobs submitted from the command line, newest first."""
        return self.lookup.pending()

    @needs_redis
    def trainings(self, limit: int, *, after: str | None = None) -> list[str]:
        """Return the ids of training jobs, newest first; `after`: only older ones than this."""
        return job_index.trainings(self.lookup.indexed, limit, after=after)

    @needs_redis
    def trainings_not_given_up(self) -> list[str]:
        """Return the ids of training jobs that may have a final model, newest first."""
        return listing.not_given_up(self.lookup.indexed, TRAIN)

    @needs_redis
    def queues(self) -> list[dict[str, Any]]:
        """Return the number of jobs per status, for each queue."""
        return [{"name": name, **listing.counts(self.connection, name)} for name in QUEUES]

    @needs_redis
    def result(self, job_id: str) -> dict[str, Any] | None:
        """Return the result of the job, or None if there is none yet.

        Raises NotFound, with the place of the result, if it is not on this machine or was removed.
        """
        try:
            rundir = self.rundir(job_id)
        except NotFound:
            if not self._has_finished(job_id):
                raise
            nodes = NodeRegistry(self.connection).all()
            homes = "".join(f"; {node.machine}: {node.home}" for node in nodes)
            raise NotFound(
                f"result: {self.home.runs} has no run directory of {job_id}: it was removed, or is "
                f"in the home whose node ran the job{homes}"
            ) from None
        result = rundir.read_result()
        if result is None and self._has_finished(job_id):
            raise NotFound(
                f"result: {rundir.path / 'result.json'} was removed or is damaged: `warmd resume "
                f"{job_id}` computes it again from the last checkpoint"
            )
        return result

    def _has_finished(self, job_id: str) -> bool:
        job = None if self.is_offline else self.store.fetch(job_id)
        return job is not None and job.get_status(refresh=False) == JobStatus.FINISHED

    def text(self, job_id: str) -> Iterator[str | None]:
        """Yield the text of an answer in pieces until its job ends.

        None: its process died after the first piece, and the text starts again.
        """
        for event in self.text_events(job_id):
            yield None if event is None else event["text"]

    def text_events(self, job_id: str) -> Iterator[dict[str, Any] | None]:
        """Yield the events with an answer's text, reasoning and calls until its job ends.

        None: its process died after the first one, and the answer starts again.
        """
        has_text = False
        for event in self.follow(job_id):
            if event is None:
                continue
            if event["type"] == "begin" and has_text:
                has_text = False
                yield None
            elif event["type"] == "text" and event["index"] == 0:
                has_text = True
                yield event

    def follow(
        self, job_id: str, *, live: bool = True, after_seq: int = 0
    ) -> Iterator[dict[str, Any] | None]:
        """Yield a job's events until it ends, and None after every half second without one.

        If Redis is unreachable, waits for it as long as the daemon runs: the daemon is restarting
        it, or the machine is overloaded. Raises Unavailable if the daemon has ended.
        """
        path = self.rundir(job_id).events
        if self.is_offline:
            yield from events.read(path, after=after_seq)
            return

        def has_ended() -> bool:
            self.check_keys()
            job = self.store.fetch(job_id) if live else None
            return job is None or job.get_status(refresh=False) in ENDED

        def refresh() -> None:
            if self.readable is not None:
                self.readable.refresh(job_id)

        while True:
            following = follow_events(
                self.connection,
                job_id,
                path,
                after=after_seq,
                has_ended=has_ended,
                before_read=refresh,
            )
            try:
                for event in following:
                    if event is not None:
                        after_seq = event["seq"]
                    yield event
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if self.go_offline():
                    yield from events.read(path, after=after_seq)
                    return
                if not self.home.is_locked():
                    raise self.unavailable(error) from error
                yield None
                time.sleep(_RETRY_S)
            else:
                return

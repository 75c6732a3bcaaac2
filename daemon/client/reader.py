"""Reading jobs and groups: all that commands that change nothing need.

A command that reads takes as long as its imports. Nothing here imports what submits or steers, and
what only some homes have (groups, a run store) is imported where it is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import redis

from ...configs.queues import QUEUES, TRAIN
from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.ids import kind_of
from ..groups.folder import (
    CURRICULUM,
    RUNNING,
    SWEEP,
    all_folders,
    group_ids,
    is_group_id,
    is_id_prefix,
    overview,
)
from ..lifecycle.find import Pending
from ..lifecycle.follow import follow as follow_events
from ..lifecycle.view import EVERY_JOB, JobFilter
from ..queue import job_index, listing
from ..queue.jobs import ENDED, JobStatus
from ..queue.nodes import NodeRegistry
from ..runs import events, labels as job_labels
from ..runs.labels import Labels
from .connection import ClientConnection, needs_redis

if TYPE_CHECKING:
    from ..groups.folder import Folder
    from ..groups.sweep import State, Sweep, SweepFolder

_RETRY_S = 0.2  # between two attempts to reach Redis


class Reader(ClientConnection):
    """Finds and reads jobs and groups; returns their fields as plain values."""

    # --- jobs -------------------------------------------------------------------------------

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

    # --- all groups -------------------------------------------------------------------------

    def groups(self, newest: int) -> list[dict[str, Any]]:
        """Return the newest sweeps and curricula, and all active ones, as `overview` does."""
        return overview(self.home, newest)

    def find_any(self, text: str | None, *, is_training: bool = False) -> str:
        """Return the id of a job or a group, by id, unique prefix or name. As `find`."""
        if text is None or text == "-":
            return self.find(text, is_training=is_training)
        folders = all_folders(self.home)
        matches = [folder.id for folder in folders if folder.id.startswith(text)]
        if not is_id_prefix(text) or not matches:
            matches = [folder.id for folder in folders if _name_of(folder) == text]
        if len(matches) > 1:
            kind = kind_of(matches[-1])
            raise SpecError(kind, f"{text!r} may be any of {len(matches)}: {matches[-1]}, …")
        if matches:
            return matches[0]
        if is_group_id(text):
            kind = kind_of(text)
            raise NotFound(f"{kind}: no {kind} {text!r} in {self.home.path}")
        return self.find(text)

    # --- sweeps -----------------------------------------------------------------------------

    def sweep(self, sweep_id: str) -> dict[str, Any]:
        """Return a sweep with its points, their scores and jobs. Raises NotFound and Conflict."""
        from . import sweep_views

        folder, sweep, state = self._sweep(sweep_id)
        is_active = folder.is_active  # read before the jobs, so that jobs queued meanwhile are seen
        jobs = self._jobs_of(state)
        if self.readable is not None:
            for member in state.members:  # the scores are in their events
                with suppress(NotFound):
                    self.readable.refresh(member.id)
        return sweep_views.table_of(is_active, sweep, state, jobs, self.home.runs)

    def sweeps(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the sweeps of this home, newest first, each as one line of a list of jobs."""
        found: list[dict[str, Any]] = []
        for sweep_id in reversed(group_ids(self.home, SWEEP)):
            if len(found) == limit:
                break
            with suppress(Conflict, NotFound):  # it cannot be read, or was removed just now
                found.append(self._sweep_line(sweep_id))
        return found

    def _sweep_line(self, sweep_id: str) -> dict[str, Any]:
        from . import sweep_views

        folder, sweep, state = self._sweep(sweep_id)
        is_active = folder.is_active
        return sweep_views.line_of(is_active, sweep, state, self._jobs_of(state))

    def sweep_members(self, sweep_id: str | None = None) -> list[str]:
        """Return the ids of the jobs of a sweep, or of all sweeps."""
        found: list[str] = []
        for one in group_ids(self.home, SWEEP) if sweep_id is None else [sweep_id]:
            with suppress(Conflict, NotFound) if sweep_id is None else nullcontext():
                found += [member.id for member in self._sweep(one)[2].members]
        return found

    def _sweep(self, sweep_id: str) -> tuple[SweepFolder, Sweep, State]:
        from ..groups.sweep import SweepFolder

        folder = SweepFolder.open(self.home, sweep_id)
        return folder, folder.read(), folder.state()

    def _jobs_of(self, state: State) -> dict[str, dict[str, Any]]:
        ids = [member.id for member in state.members]
        return {job["id"]: job for job in self.several(ids)}

    # --- curricula --------------------------------------------------------------------------

    def curriculum(self, curriculum_id: str) -> dict[str, Any]:
        """Return a curriculum with its attempts, jobs and decisions. Raises NotFound, Conflict."""
        from ..groups.curriculum import CurriculumFolder

        folder = CurriculumFolder.open(self.home, curriculum_id)
        plan, state = folder.read(), folder.state()
        jobs = {job["id"]: job for job in self.several(state.jobs)}
        attempts = [
            {
                "stage": plan.stages[attempt.stage].name,
                "attempt": attempt.number + 1,
                "job": attempt.job,
                **_progress(jobs.get(attempt.job)),
                "questions": attempt.rounds[-1].questions if attempt.rounds else None,
                "evaluations": [asdict(one) for one in attempt.rounds],
                "decision": attempt.decision,
                "comparison": attempt.comparison,
            }
            for attempt in state.attempts
        ]
        return {
            "id": plan.id,
            "kind": plan.kind,
            "name": plan.name,
            "tags": plan.tags,
            "status": "started" if state.phase == RUNNING else state.phase,
            "problem": state.problem,
            "created_at": plan.created,
            "stages": [stage.name for stage in plan.stages],
            "attempts": attempts,
            "jobs": state.jobs,
            "model": state.begin_of(len(plan.stages)),  # the latest that passed a gate
        }

    def curricula(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the curricula of this home, newest first."""
        found: list[dict[str, Any]] = []
        for one in reversed(group_ids(self.home, CURRICULUM)):
            if len(found) == limit:
                break
            with suppress(Conflict, NotFound):
                found.append(self.curriculum(one))
        return found


def _progress(job: Mapping[str, Any] | None) -> dict[str, Any]:
    if job is None:
        return {"status": "removed", "step": None, "steps_total": None}
    status = "paused" if job["paused"] else job["status"]
    return {"status": status, "step": job["step"], "steps_total": job["steps_total"]}


def _name_of(folder: Folder) -> Any:
    with suppress(Conflict, NotFound):
        return folder.read_plan().get("name")
    return None

"""Resuming ended jobs, with the same or with revised options."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...jobs.context import step_of
from ...jobs.errors import CheckpointDamaged, Conflict, SpecError
from ...jobs.user_code.modules import SOURCES, changed
from ..lifecycle import adopt
from ..lifecycle.resume import queue_again
from ..lifecycle.view import RECENT, spec_of, steps_total_of
from ..queue.jobs import ENDED, EndedJob, Job, JobStatus
from ..runs import events
from ..runs.checkpoints import Checkpoints
from ..runs.rundir import RunDir
from .capacity import check_ranks
from .connection import needs_redis
from .steering import Steering


class Resuming(Steering):
    """Queues ended jobs again."""

    @needs_redis
    def resume(
        self,
        job_id: str,
        *,
        changes: Mapping[str, Any] | None = None,
        front: bool = False,
        strict: bool = False,
    ) -> str:
        """Queue an ended job again; it resumes from its latest checkpoint.

        `changes`: new (raw) values of options that may change on resume; with more `steps` a
        finished job continues. `strict`: refuse if `changed_sources` is not empty.
        Returns "queued", or "finished" if there is nothing left to do.
        A job that Redis does not know is adopted from its run directory.
        Raises SpecError, NotFound and Conflict.
        """
        rundir = self.current_rundir(job_id)
        if strict and (files := self.changed_sources(job_id)):
            raise Conflict(
                f"reward: changed since the latest checkpoint of {job_id}: {', '.join(files)}; "
                "restore it, or resume without --strict"
            )
        with rundir.revising():
            job = self.store.fetch(job_id)
            if job is None or adopt.is_foreign(self.connection, rundir):
                job = self._adopt(rundir)
            return self._resume(job, rundir, changes or {}, front=front)

    def _adopt(self, rundir: RunDir) -> Job:
        """Add a job to Redis from its run directory. Raises Conflict."""
        job_id = rundir.path.name
        self.prepare_home()
        queue = spec_of(rundir.read_spec()).queue
        adopt.take_over(self.connection, rundir)
        adopt.check_model(rundir)
        adopt.move_to(rundir, self.places)
        self.store.adopt_many([EndedJob(job_id, queue, **adopt.past_of(rundir).__dict__)])
        return self.fetch(job_id)

    def changed_sources(self, job_id: str) -> list[str]:
        """Return the reward source files that changed since a job's latest checkpoint."""
        checkpoints = Checkpoints(self.rundir(job_id).checkpoints)
        for path in reversed(checkpoints.list()):
            with suppress(CheckpointDamaged):
                return changed(checkpoints.about(path).get(SOURCES, {}))
        return []

    def _resume(self, job: Job, rundir: RunDir, changes: Mapping[str, Any], *, front: bool) -> str:
        job_id, status = job.id, job.get_status()
        if status not in ENDED and self.store.pause_of(job) is not None:
            if not changes:
                return self.unpause(job_id)
            raise Conflict(
                f"job: {job_id} is paused: `warmd unpause` continues it unchanged; to change "
                f"{', '.join(changes)}, cancel it first"
            )
        if status not in ENDED:
            raise Conflict(f"job: {job_id} is {status.value}: nothing to resume")
        document = rundir.read_spec()
        spec = spec_of(document)
        revised = spec.revised(changes)
        changed = revised.changes(spec.to_json())
        old_steps = steps_total_of(document, events.newest(rundir.events, RECENT))
        steps = getattr(revised, "steps_total", None) if "steps" in changes else old_steps
        if steps == old_steps and status == JobStatus.FINISHED and rundir.read_result() is not None:
            if names := ", ".join(name for name in changed if name != "steps"):
                raise Conflict(
                    f"job: {job_id} is finished: {names} takes effect only with more steps"
                )
            return "finished"
        check_ranks(self, [revised.to_json()])
        done = max(map(step_of, Checkpoints(rundir.checkpoints).list()), default=0)
        if status == JobStatus.FINISHED and rundir.read_result() is not None and not done:
            raise Conflict(
                f"job: {job_id} has no checkpoint left to resume from: start a new job from "
                f"its model with --init-from {job_id}"
            )
        if steps != old_steps and steps is not None and steps < done:
            raise SpecError("steps", f"must be at least {done}, its latest checkpoint, got {steps}")
        if changed:
            revision = {"revision": document["revision"] + 1, "time": time.time()}
            rundir.revise(
                spec=revised.to_json(),
                revisions=[*document.get("revisions", ()), {**revision, "changes": changed}],
            )
        needs = adopt.needs_of({**document, "spec": revised.to_json()})
        if not queue_again(self.places, job, front=front, needs=needs):
            raise Conflict(f"job: {job_id} was resumed by another process")
        return "queued"

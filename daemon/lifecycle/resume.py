"""Resuming ended jobs, with the same or with revised options."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...configs.config import DaemonConfig
from ...jobs.context import step_of
from ...jobs.errors import CheckpointDamaged, Conflict, SpecError
from ...jobs.spec import Spec
from ...jobs.training.options import TrainingSpec
from ...jobs.user_code.modules import SOURCES, changed
from ..queue.jobs import ENDED, EndedJob, Job, JobStatus
from ..runs import asked, events
from ..runs.checkpoints import Checkpoints
from ..runs.rundir import RunDir
from . import adopt, runs_owner
from .check import check_ranks
from .places import Places
from .steer import unpause
from .view import RECENT, spec_of, steps_total_of


def resume(
    places: Places,
    config: DaemonConfig,
    job_id: str,
    *,
    changes: Mapping[str, Any] | None = None,
    front: bool = False,
    strict: bool = False,
) -> str:
    """Queue an ended job again; it resumes from its latest checkpoint.

    `changes`: new (raw) values of options that may change on resume; with more `steps` or a longer
    `time_limit` a finished job continues. `strict`: refuse if `changed_sources` is not empty.
    Returns "queued", or "finished" if there is nothing left to do.
    A job that Redis does not know is adopted from its run directory.
    Raises SpecError, NotFound and Conflict.
    """
    rundir = places.current(job_id)
    if strict and (files := changed_sources(rundir)):
        raise Conflict(
            f"reward: changed since the latest checkpoint of {job_id}: {', '.join(files)}; "
            "restore it, or resume without --strict"
        )
    with rundir.revising():
        job = places.store.fetch(job_id)
        if job is None or adopt.is_foreign(places.connection, rundir):
            job = _adopt(places, config, rundir)
        return _resume(places, config, job, rundir, changes or {}, front=front)


def _adopt(places: Places, config: DaemonConfig, rundir: RunDir) -> Job:
    """Add a job to Redis from its run directory. Raises Conflict."""
    job_id = rundir.path.name
    runs_owner.prepare(places, config)
    queue = spec_of(rundir.read_spec()).queue
    adopt.take_over(places.connection, rundir)
    adopt.check_model(rundir)
    adopt.move_to(rundir, places)
    places.store.adopt_many([EndedJob(job_id, queue, **adopt.past_of(rundir).__dict__)])
    return places.fetch(job_id)


def changed_sources(rundir: RunDir) -> list[str]:
    """Return the reward source files that changed since a job's latest checkpoint."""
    checkpoints = Checkpoints(rundir.checkpoints)
    for path in reversed(checkpoints.list()):
        with suppress(CheckpointDamaged):
            return changed(checkpoints.about(path).get(SOURCES, {}))
    return []


def _resume(
    places: Places,
    config: DaemonConfig,
    job: Job,
    rundir: RunDir,
    changes: Mapping[str, Any],
    *,
    front: bool,
) -> str:
    job_id, status = job.id, job.get_status()
    if status not in ENDED and places.store.pause_of(job) is not None:
        if not changes:
            return unpause(places, job_id)
        raise Conflict(
            f"job: {job_id} is paused: without options it continues unchanged; to change "
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
    is_finished = status == JobStatus.FINISHED and rundir.read_result() is not None
    if is_finished and "time_limit" in changed:
        _check_longer(job_id, spec, revised)
    elif is_finished and steps == old_steps:
        if names := ", ".join(name for name in changed if name != "steps"):
            raise Conflict(f"job: {job_id} is finished: {names} takes effect only with more steps")
        return "finished"
    check_ranks(places, config, [revised.to_json()])
    done = max(map(step_of, Checkpoints(rundir.checkpoints).list()), default=0)
    if is_finished and not done:
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
    if not queue_again(places, job, front=front, needs=needs):
        raise Conflict(f"job: {job_id} was resumed by another process")
    return "queued"


def _check_longer(job_id: str, spec: Spec, revised: Spec) -> None:
    """Raise SpecError unless the new time limit of a finished training is longer."""
    assert isinstance(spec, TrainingSpec)
    assert isinstance(revised, TrainingSpec)
    before_s, after_s = spec.time_limit_s, revised.time_limit_s
    if before_s is not None and after_s is not None and after_s <= before_s:
        raise SpecError(
            "time_limit",
            f"must be longer than {spec.time_limit}, which {job_id} has used, got "
            f"{revised.time_limit}",
        )


def queue_again(
    places: Places, job: Job, *, front: bool = False, needs: Mapping[str, str] | None = None
) -> bool:
    """Note the request in the run directory, publish it and queue the job; False if not ended.

    `needs`: the labels that its node must have (`adopt.needs_of`); None: those of before.
    """
    asked.note(places.rundir(job.id), asked.RESUMED, front=front)
    places.publish(job.id)
    return places.store.enqueue_again(job, front=front, needs=needs)

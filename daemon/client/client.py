"""What a user of the queue does with jobs: submit, look, follow, stop, resume. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cached_property, wraps
from typing import Any, TypeVar, cast

import redis

from ...configs.config import DaemonConfig, ModelConfig, redacted_url
from ...configs.queues import INFER, QUEUES, TRAIN
from ...jobs import KINDS, spec_class
from ...jobs.context import step_of
from ...jobs.errors import CheckpointDamaged, Conflict, NotFound, SpecError, Unavailable
from ...jobs.spec import Spec
from ...jobs.user_code.modules import SOURCES, changed
from ..host.home import Home
from ..host.warm_set import known_models
from ..queue import adoption, job_index, keys, listing, removal, runs_owner, stream
from ..queue.jobs import ENDED, Job, JobStatus, JobStore
from ..runs import weights
from ..runs.checkpoints import Checkpoints
from ..runs.rundir import RunDir, job_ids
from ..runs.weights import Weights
from . import checking
from .lookup import PENDING, Lookup, Pending
from .views import spec_of

Method = TypeVar("Method", bound=Callable[..., Any])

_REFUSALS = ("MISCONF", "NOREPLICAS")  # a full disk, or a replica that is missing
# Full memory, or a replica: redis-py cuts these words off the message.
_REFUSED = (redis.exceptions.OutOfMemoryError, redis.exceptions.ReadOnlyError)
_PATIENCE_S = 0.2  # between two tries to reach a server that is away


def _needs_server(method: Method) -> Method:
    """Turn a server that is not there into Unavailable, with what to do about it."""

    @wraps(method)
    def wrapper(self: Client, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise self.unavailable(error) from error
        except redis.ResponseError as error:
            if isinstance(error, _REFUSED) or str(error).startswith(_REFUSALS):
                raise Unavailable(f"Redis takes no changes: {error}") from error
            raise

    return cast(Method, wrapper)


class Client:
    """The jobs of one home, by way of its server."""

    def __init__(self, config: DaemonConfig) -> None:
        self.config = config
        self.home = Home(config.home)

    @cached_property
    def url(self) -> str:
        """The configured server, else the one that the daemon of this home uses or last used."""
        if self.config.redis_url is not None:
            return self.config.redis_url
        state = self.home.read_state()
        return state["url"] if state is not None else self.home.server_url

    @cached_property
    def connection(self) -> redis.Redis:
        return keys.connect(self.url)

    @cached_property
    def store(self) -> JobStore:
        return JobStore(self.connection)

    @cached_property
    def lookup(self) -> Lookup:
        return Lookup(self.store, self.home.runs)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if "connection" in self.__dict__:
            self.connection.close()

    def unavailable(self, error: Exception) -> Unavailable:
        if self.url == self.home.server_url and self.home.is_full():
            return Unavailable(
                f"the disk of {self.home.path} is full, and Redis has ended: make room there, for "
                "example with `warmd checkpoints prune`, and run `warmd start`"
            )
        if self.url == self.home.server_url:
            return Unavailable(f"no daemon runs in {self.home.path}: start it with `warmd start`")
        return Unavailable(f"no server at {redacted_url(self.url)}: {error}")

    # --- submitting -------------------------------------------------------------------------

    def weights(self, text: str) -> Weights:
        """Return what `JOB` (its final model) or `JOB@STEP` names, verified. Needs no server.

        Raises SpecError, NotFound and CheckpointDamaged.
        """
        job, at, step = text.partition("@")
        rundir = self.rundir(self.find(job))
        if not at:
            return weights.final_model(rundir)
        if not (step.isascii() and step.isdigit()):
            raise SpecError("init_from", f"must be JOB or JOB@STEP, got {text[:80]!r}")
        return weights.checkpoint(rundir, int(step))

    def check(
        self, spec: Spec, *, init: Weights | None = None, model: ModelConfig | None = None
    ) -> dict[str, Any]:
        """Check a spec against files and models; return what its run directory will say.

        Raises SpecError or NotFound. Needs no server.
        """
        return checking.document_of(spec, self.config, init=init, model=model)

    @_needs_server
    def submit(
        self,
        spec: Spec,
        *,
        front: bool = False,
        after: str | None = None,
        at: datetime | None = None,
        retries: int = 0,
        timeout_s: float | None = None,
        init: Weights | None = None,
        model: ModelConfig | None = None,
        origin: str = "cli",
    ) -> str:
        """Check and queue a job; return its id. Raises SpecError, NotFound, Conflict, Unavailable.

        The run directory is whole before the job is queued, and gone again if it cannot be.
        `init`: the weights to start from, by whose name the spec calls its model. `model`: what the
        spec's name for it stands for, where that need not be found out. `origin`: one of
        rundir.ORIGINS.
        """
        document = {**self.check(spec, init=init, model=model), "origin": origin}
        self.connection.ping()
        self.home.create()
        if self.config.redis_url is not None:
            runs_owner.claim(self.connection, self.home)
        if after is not None:
            after = self.find(after)
        rundir = RunDir.create(self.home.runs, spec.kind, document)
        try:
            if init is not None:
                # Under a name of its own: the zygote tells models by their names, and the same
                # checkpoint may be the beginning of several jobs.
                folder = rundir.path / "init"
                weights.link(init, folder)
                own = ModelConfig(name=f"{rundir.path.name}:init", path=str(folder))
                rundir.revise(model=own.__dict__)
            self.store.enqueue(
                rundir.path.name,
                spec.queue,
                front=front,
                after=after,
                at=at,
                retries=retries,
                timeout_s=timeout_s,
                from_cli=origin == "cli",
            )
        except BaseException:
            rundir.remove()
            raise
        return rundir.path.name

    @_needs_server
    def submit_again(self, job_id: str, *, stop_at: int) -> str:
        """Queue a copy of a job before all others, to end with a checkpoint at a step.

        Its schedule is that of all steps; it reports to no tracker.
        """
        document = self.rundir(job_id).read_spec()
        kept = ("python_path", "model", "init_from")
        copy: dict[str, Any] = {name: document[name] for name in kept if name in document}
        copy["spec"] = {**document["spec"], "report_to": []}
        copy |= {"stop_at": stop_at, "origin": "check"}
        rundir = RunDir.create(self.home.runs, document["kind"], copy)
        try:
            self.store.enqueue(rundir.path.name, spec_of(document).queue, front=True)
        except BaseException:
            rundir.remove()
            raise
        return rundir.path.name

    # --- looking ----------------------------------------------------------------------------

    def find(self, text: str | None) -> str:
        """Return the id that an id or an unambiguous beginning of one means.

        `-` or nothing means the latest job of the command line, never an HTTP answer.
        Raises SpecError and NotFound.
        """
        return self.lookup.find(text)

    def rundir(self, job_id: str) -> RunDir:
        return RunDir.open(self.home.runs, job_id)

    @_needs_server
    def job(self, job_id: str) -> dict[str, Any]:
        """Return all that is known of a job as plain values. Raises NotFound and Conflict."""
        return self.lookup.job(job_id)

    @_needs_server
    def jobs(
        self, *, statuses: Collection[str] | None = None, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """Return every job, or those of some statuses, newest first, at most `limit`."""
        return self.lookup.jobs(statuses, limit)

    @_needs_server
    def pending(self) -> list[Pending]:
        """Return the jobs of the command line that run or wait, newest first."""
        return self.lookup.pending()

    @_needs_server
    def trainings(self, limit: int, *, after: str | None = None) -> list[str]:
        """Return the ids of training jobs, newest first: the latest, or those that follow one."""
        return job_index.trainings(self.lookup.indexed, limit, after=after)

    @_needs_server
    def perhaps_with_model(self) -> list[str]:
        """Return the ids of training jobs that may have made a model, newest first."""
        return listing.not_given_up(self.lookup.indexed, TRAIN)

    @_needs_server
    def queues(self) -> list[dict[str, Any]]:
        """Return how many jobs of each status every queue has."""
        return [{"name": name, **listing.counts(self.connection, name)} for name in QUEUES]

    @_needs_server
    def result(self, job_id: str) -> dict[str, Any] | None:
        """Return what the job made, or None while it has not."""
        result = self.rundir(job_id).read_result()
        if result is None and (job := self.store.fetch(job_id)) is not None:
            result = job.return_value() if job.get_status() == JobStatus.FINISHED else None
        return result

    def follow(
        self, job_id: str, *, live: bool = True, after_seq: int = 0
    ) -> Iterator[dict[str, Any] | None]:
        """Yield a job's events, and None for every half second of silence, until the job ends.

        A server that is away is waited for as long as the daemon of this home lives: it is being
        replaced, or the machine is short of breath. Raises Unavailable when the daemon is gone.
        """
        path = self.rundir(job_id).events

        def over() -> bool:
            job = self.store.fetch(job_id) if live else None
            return job is None or job.get_status(refresh=False) in ENDED

        while True:
            follow = stream.follow(self.connection, job_id, path, after=after_seq, over=over)
            try:
                for event in follow:
                    if event is not None:
                        after_seq = event["seq"]
                    yield event
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if not self.home.is_locked():
                    raise self.unavailable(error) from error
                yield None
                time.sleep(_PATIENCE_S)
            else:
                return

    def _fetch(self, job_id: str) -> Job:
        job = self.store.fetch(job_id)
        if job is None:
            raise NotFound(
                f"job: {job_id} is not in Redis, but its files are in {self.rundir(job_id).path}: "
                f"`warmd resume {job_id}` queues it again"
            )
        return job

    # --- steering ---------------------------------------------------------------------------

    @_needs_server
    def cancel(self, job_id: str) -> str:
        """Take a waiting job out ("canceled"), or have a running one save and stop ("stopping")."""
        return self._end(job_id, "cancel", "stopping")

    @_needs_server
    def kill(self, job_id: str) -> str:
        """Take a waiting job out ("canceled"), or end a running one now ("killing")."""
        return self._end(job_id, "kill", "killing")

    def _end(self, job_id: str, how: str, answer: str) -> str:
        job = self._fetch(job_id)
        while True:
            # A job may start or end between two of these.
            if self.store.cancel_waiting(job):
                return "canceled"
            if self.store.request_stop(job, how):
                return answer
            status = job.get_status()
            if status in ENDED:
                raise Conflict(f"job: {job_id} is {status.value} already")

    @_needs_server
    def pause(self, job_id: str, *, release: bool = False) -> str:
        """Have a running job wait at its next step's end ("pausing"), or put a waiting one away.

        `release`: a running one saves, ends, and is put away, too ("paused" when it waits now).
        What was put away comes back by `unpause` alone. Raises Conflict.
        """
        job = self._fetch(job_id)
        how = "release" if release else "hold"
        while True:
            status = job.get_status()
            if status in ENDED:
                raise Conflict(f"job: {job_id} is {status.value}: nothing to pause")
            if self.store.pause_of(job) in (how, "release"):
                raise Conflict(f"job: {job_id} is paused already: `warmd unpause` lets it go on")
            if self.store.pause_waiting(job):
                return "paused"
            if job.origin == INFER and not release:
                raise Conflict(f"job: {job_id} answers now, and cannot wait: cancel it instead")
            if self.store.request_pause(job, how):
                return "pausing"

    @_needs_server
    def unpause(self, job_id: str) -> str:
        """Let a paused job go on ("going on"), or back to where it waited, at the front.

        Returns the status of one that waits again. Raises Conflict.
        """
        job = self._fetch(job_id)
        while True:
            if self.store.pause_of(job) is None:
                raise Conflict(f"job: {job_id} is not paused")
            if self.store.withdraw_pause(job):
                return "going on"
            if self.store.unpause(job):
                return job.get_status().value

    @_needs_server
    def resume(
        self,
        job_id: str,
        *,
        changes: Mapping[str, Any] | None = None,
        front: bool = False,
        strict: bool = False,
    ) -> str:
        """Queue an ended job again, to go on from its latest checkpoint.

        `changes`: other (raw) values for options that may change on resume; more `steps` make a
        finished job go on. `strict`: refuse where `changed_sources` has any.
        Returns "queued", or "finished" when there is nothing left to do.
        A job that Redis does not know is made one again from its run directory.
        Raises SpecError, NotFound and Conflict.
        """
        rundir = self.rundir(job_id)
        if strict and (files := self.changed_sources(job_id)):
            raise Conflict(
                f"reward: changed since the latest checkpoint of {job_id}: {', '.join(files)}; "
                "restore it, or resume without --strict"
            )
        with rundir.revising():
            job = self.store.fetch(job_id)
            if job is None or adoption.is_foreign(self.connection, rundir):
                job = self._adopt(rundir)
            return self._resume(job, rundir, changes or {}, front=front)

    def _adopt(self, rundir: RunDir) -> Job:
        """Make a job of what a run directory tells, in this Redis. Raises Conflict."""
        job_id = rundir.path.name
        if self.config.redis_url is not None:
            runs_owner.claim(self.connection, self.home)
        queue = spec_of(rundir.read_spec()).queue
        adoption.take_over(self.connection, rundir)
        adoption.check_model(rundir)
        past = adoption.past_of(rundir)
        self.store.adopt(job_id, queue, **past.__dict__)
        return self._fetch(job_id)

    def changed_sources(self, job_id: str) -> list[str]:
        """Return the source files of its rewards that changed since a job's latest checkpoint."""
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
                f"job: {job_id} is paused: `warmd unpause` lets it go on as it is; to change "
                f"{', '.join(changes)}, cancel it first"
            )
        if status not in ENDED:
            raise Conflict(f"job: {job_id} is {status.value}: nothing to resume")
        document = rundir.read_spec()
        spec = spec_of(document)
        revised = spec.revised(changes)
        changed = revised.changes(spec.to_json())
        steps, old_steps = (getattr(s, "steps_total", None) for s in (revised, spec))
        if steps == old_steps and status == JobStatus.FINISHED and rundir.read_result() is not None:
            if changed:
                names = ", ".join(changed)
                raise Conflict(f"job: {job_id} is finished: {names} would count with more steps")
            return "finished"
        done = max(map(step_of, Checkpoints(rundir.checkpoints).list()), default=0)
        if status == JobStatus.FINISHED and rundir.read_result() is not None and not done:
            raise Conflict(
                f"job: {job_id} has no checkpoints any more to resume from: start a new job from "
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
        if not self.store.enqueue_again(job, front=front):
            raise Conflict(f"job: {job_id} was resumed by somebody else")
        return "queued"

    # --- removing ---------------------------------------------------------------------------

    @_needs_server
    def remove(self, job_id: str) -> int:
        """Remove an ended job: its run directory with all that it made, and what Redis knows.

        Returns the bytes that are free now. Killed in between, the next call finishes. Raises
        Conflict for a job that is not ended.
        """
        return removal.remove(self.store, self.home.runs, job_id)

    @_needs_server
    def finish_removals(self) -> dict[str, int]:
        """Finish what a `remove` that was killed began; return the jobs with the bytes of each."""
        return removal.finish_all(self.store, self.home.runs)

    @_needs_server
    def strip(self, job_id: str) -> int:
        """Remove what an ended job would resume from, not its model; return the bytes."""
        job = self._fetch(job_id)
        if job.get_status() not in ENDED:
            raise Conflict(f"job: {job_id} is {job.get_status().value}: cancel it first")
        return removal.strip(self.rundir(job_id))

    @_needs_server
    def ended(self, statuses: Collection[str], *, before: float) -> list[str]:
        """Return the ids of jobs of some statuses that ended before a time, newest first."""
        jobs = listing.with_status(self.connection, statuses)
        old = [job for job in jobs if job.ended_at and job.ended_at.timestamp() < before]
        return [job.id for job in sorted(old, key=lambda job: job.created_at, reverse=True)]

    @_needs_server
    def needed(self) -> dict[str, list[str]]:
        """Return the ended jobs that others still need, each with these: jobs and warm models."""
        trainings = [
            job_id
            for job_id in job_ids(self.home.runs)
            if (kind := job_id.split("-")[0]) in KINDS and spec_class(kind).queue == TRAIN
        ]
        pending = listing.with_status(self.connection, PENDING)
        readers = list(dict.fromkeys([*trainings, *(job.id for job in pending)]))
        found = removal.needs(self.home.runs, readers)
        for job in pending:
            for parent in job._dependency_ids:
                found.setdefault(parent, []).append(job.id)
        for name, model in known_models(self.home).items():
            owner = removal.owner_of(self.home.runs, model.path)
            if owner is not None:
                found.setdefault(owner, []).append(f"warm model {name} (`warmd unload {name}`)")
        return found

"""Jobs of a client: finding, reading, submitting, steering and removing them.

A command that reads takes as long as its imports: what submits, resumes or concerns groups is
imported where it is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from ...configs.queues import QUEUES, TRAIN
from ...jobs import spec_class
from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.ids import is_job_id, kind_of
from ..groups.folder import CANCELED, PAUSED, RUNNING, is_group_id
from ..lifecycle import steer
from ..lifecycle.find import Pending
from ..lifecycle.follow import follow as follow_events
from ..lifecycle.queueing import AT_ONCE, Queueing
from ..lifecycle.view import EVERY_JOB, JobFilter, listed_kinds
from ..queue import job_index, listing
from ..queue.jobs import ENDED, JobStatus
from ..queue.nodes import NodeRegistry
from ..runs import events, labels as job_labels
from ..runs.labels import Labels
from .connection import needs_redis

if TYPE_CHECKING:
    from ...configs.config import DaemonConfig, ModelConfig
    from ...jobs.spec import Spec
    from ..runs.weights import Weights
    from .connection import Connection

_RETRY_S = 0.2  # between two attempts to reach Redis


@dataclass(frozen=True)
class Template:
    """The options of a job, for another job."""

    options: dict[str, Any]  # raw; without the model if that came from a job
    init_from: str | None  # JOB or JOB@STEP that the weights came from


class Jobs:
    """The jobs of a client. The methods raise what `Connection.asking` does.

    Methods that steer, resume or remove a job also take the id of a group, for all of its jobs.
    """

    def __init__(self, client: Connection) -> None:
        self._client = client

    @property
    def config(self) -> DaemonConfig:
        """The settings of the home."""
        return self._client.config

    def get(self, job_id: str) -> dict[str, Any]:
        """Return all known fields of a job. Raises NotFound and Conflict."""
        return self._client.read(lambda jobs: jobs.job(job_id)).to_json()

    def all(self, wanted: JobFilter = EVERY_JOB) -> list[dict[str, Any]]:
        """Return the jobs of a filter, newest first."""
        return [job.to_json() for job in self._client.read(lambda jobs: jobs.jobs(wanted))]

    def several(self, ids: list[str]) -> list[dict[str, Any]]:
        """Return all known fields of these jobs, without jobs that were removed."""
        return [job.to_json() for job in self._client.read(lambda jobs: jobs.several(ids))]

    def labels(self, job_id: str) -> Labels:
        """Return name, tags and notes of a job. Raises NotFound."""
        return job_labels.read(self._client.rundir(job_id))

    def named(self, text: str, kinds: Collection[str] | None = None) -> str:
        """Return the id of the job of some kinds that a whole id or a name names.

        `-` is the latest one, whatever it was submitted from, by default of the listed kinds.
        Whether the job of an id exists is not checked. Raises SpecError if several have the name,
        and NotFound.
        """
        if is_job_id(text):
            return text
        if text == "-":
            wanted = JobFilter(kinds=kinds or listed_kinds(), limit=1)
        elif job_labels.is_name(text):
            wanted = JobFilter(kinds=kinds, name=text)
        else:
            raise NotFound(f"job: no job {text[:80]!r}")
        found = [str(job["id"]) for job in self.all(wanted)]
        if len(found) > 1:
            raise job_labels.ambiguous("job", text, found)
        if not found:
            raise NotFound(f"job: no job {text!r}")
        return found[0]

    def add_note(self, job_id: str, text: str) -> Labels:
        """Add a note to a job; return all labels. Raises NotFound and SpecError."""
        added = job_labels.add_note(self._client.places.current(job_id), text)
        self._client.places.publish(job_id)
        return added

    @needs_redis
    def pending(self) -> list[Pending]:
        """Return running and waiting jobs submitted from the command line, newest first."""
        return self._client.lookup.pending()

    @needs_redis
    def trainings(self, limit: int, *, after: str | None = None) -> list[str]:
        """Return the ids of training jobs, newest first; `after`: only older ones than this."""
        return job_index.trainings(self._client.lookup.indexed, limit, after=after)

    @needs_redis
    def trainings_not_given_up(self) -> list[str]:
        """Return the ids of training jobs that may have a final model, newest first."""
        return listing.not_given_up(self._client.lookup.indexed, TRAIN)

    @needs_redis
    def queues(self) -> list[dict[str, Any]]:
        """Return the number of jobs per status, for each queue."""
        return [{"name": name, **listing.counts(self._client.connection, name)} for name in QUEUES]

    @needs_redis
    def result(self, job_id: str) -> dict[str, Any] | None:
        """Return the result of the job, or None if there is none yet.

        Raises NotFound, with the place of the result, if it is not on this machine or was removed.
        """
        try:
            rundir = self._client.rundir(job_id)
        except NotFound:
            if not self._has_finished(job_id):
                raise
            nodes = NodeRegistry(self._client.connection).all()
            homes = "".join(f"; {node.machine}: {node.home}" for node in nodes)
            raise NotFound(
                f"result: {self._client.home.runs} has no run directory of {job_id}: it was "
                f"removed, or is in the home whose node ran the job{homes}"
            ) from None
        result = rundir.read_result()
        if result is None and self._has_finished(job_id):
            raise NotFound(
                f"result: {rundir.path / 'result.json'} was removed or is damaged: `warmd resume "
                f"{job_id}` computes it again from the last checkpoint"
            )
        return result

    def _has_finished(self, job_id: str) -> bool:
        job = None if self._client.is_offline else self._client.store.fetch(job_id)
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
        path = self._client.rundir(job_id).events
        if self._client.is_offline:
            yield from events.read(path, after=after_seq)
            return

        def has_ended() -> bool:
            self._client.check_keys()
            job = self._client.store.fetch(job_id) if live else None
            return job is None or job.get_status(refresh=False) in ENDED

        def refresh() -> None:
            if self._client.readable is not None:
                self._client.readable.refresh(job_id)

        while True:
            following = follow_events(
                self._client.connection,
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
                if self._client.go_offline():
                    yield from events.read(path, after=after_seq)
                    return
                if not self._client.home.is_locked():
                    raise self._client.unavailable(error) from error
                yield None
                time.sleep(_RETRY_S)
            else:
                return

    # --- submitting ----------------------------------------------------------------------------

    def template(self, text: str, kind: str) -> Template:
        """Return the options of a job of this kind. Needs no Redis, but for the latest job.

        Raises SpecError, NotFound and Conflict.
        """
        document = self._client.rundir(self._client.find(text)).read_spec()
        if document["kind"] != kind:
            raise SpecError("like", f"must be a {kind} job, got {document['id']}")
        options, init_from = dict(document["spec"]), document.get("init_from")
        if init_from is not None:
            options.pop("model", None)
        return Template(options, init_from)

    def check(
        self,
        spec: Spec,
        *,
        init: Weights | None = None,
        model: ModelConfig | None = None,
        reads_tokenizer: bool = True,
    ) -> dict[str, Any]:
        """Check a spec against files and models; return the content of its spec.json.

        `reads_tokenizer`: whether prompts are counted, which may take a second. Raises SpecError or
        NotFound. Needs no Redis, but for the jobs that a spec names.
        """
        from . import checking
        from .capacity import check_memory

        spec = self._with_full_ids(spec)
        document = checking.document_of(
            spec,
            self._client.config,
            init=init,
            model=model,
            report=self._client.fetch_report,
            on_note=self._client.on_note,
            reads_tokenizer=reads_tokenizer,
        )
        check_memory(self._client.config, spec, document)
        self._name_model(document)
        return document

    def _name_model(self, document: dict[str, Any]) -> None:
        """Replace a model `-`, or a group, by the job that it means now, as it changes later."""
        named, model = document["spec"].get("model"), document.get("model") or {}
        job_id = model.get("name", "")
        if named != job_id and is_job_id(job_id) and self.labels(job_id).name != named:
            document["spec"]["model"] = job_id

    def first_prompt(self, kind: str, document: Mapping[str, Any]) -> str | None:
        """Return the first prompt that a checked job trains on or is evaluated on, rendered.

        `document` is what `check` returned. None for kinds without prompts. Raises SpecError.
        """
        from . import checking

        return checking.first_prompt(spec_class(kind).parse(document["spec"]), document)

    def _with_full_ids(self, spec: Spec) -> Spec:
        """Return the spec with whole ids of the jobs that it names. Raises SpecError, NotFound."""
        found: dict[str, Any] = {}
        for name in spec.names_jobs:
            if (text := getattr(spec, name)) is not None:
                found[name] = self._client.find(text)
                if kind_of(found[name]) != spec.kind:
                    raise SpecError(name, f"must be a job of kind {spec.kind}, got {found[name]}")
        return replace(spec, **found)

    def _unfinished(self, spec: Spec, document: dict[str, Any]) -> str | None:
        """Return a job that the spec names and that has no result yet."""
        named = [document["spec"][name] for name in spec.names_jobs]
        jobs = [job for job in named if job and self._client.rundir(job).read_result() is None]
        return jobs[0] if jobs else None

    def check_ready(self, options: Iterable[Mapping[str, Any]]) -> None:
        """Raise what keeps jobs with these options from being queued; create the home."""
        from ..lifecycle import runs_owner
        from ..lifecycle.check import check_ranks

        self._client.connection.ping()
        check_ranks(self._client.places, self._client.config, options)
        runs_owner.prepare(self._client.places, self._client.config)

    @needs_redis
    def submit(
        self,
        spec: Spec,
        queueing: Queueing = AT_ONCE,
        *,
        init: Weights | None = None,
        model: ModelConfig | None = None,
        origin: str = "cli",
    ) -> str:
        """Check and queue a job; return its id. Raises SpecError, NotFound, Conflict, Unavailable.

        The run directory is complete before the job is queued. If that fails or is interrupted,
        nothing of the job is left. A job starts after those that its spec names have finished.
        `init`: the weights to start from, by default those of a spec's `model` of the form
        JOB@STEP; the spec's `model` is their name. `model`: the model that
        the spec's `model` names, if the caller knows it. `origin`: one of rundir.ORIGINS.
        """
        from ..lifecycle.submit import submit
        from ..runs import git
        from .models import Models
        from .trained import check_name, is_checkpoint

        check_name(self._client.config, queueing.name)
        git_state = git.begin_state_of(Path.cwd()) if spec.queue == TRAIN else None
        named = getattr(spec, "model", None)
        if init is None and model is None and named is not None and is_checkpoint(named):
            # Whole, and kept when the checkpoint is pruned.
            init = Models(self._client).weights(named)
            spec = type(spec).parse({**spec.to_json(), "model": init.name})
        document = {**self.check(spec, init=init, model=model), "origin": origin}
        self.check_ready([document["spec"]])
        unfinished = self._unfinished(spec, document)
        queueing = self.found(queueing)
        if queueing.after is None:
            queueing = replace(queueing, after=unfinished)
        if unfinished not in (None, queueing.after):
            raise SpecError(
                "after", f"must be {unfinished}, which is still to end, got {queueing.after}"
            )
        return submit(
            self._client.places, spec.kind, document, queueing, init=init, git_state=git_state
        )

    def found(self, queueing: Queueing) -> Queueing:
        """The same with the whole id of `after` and the time by Redis' clock. Raises NotFound."""
        after = None if queueing.after is None else self._client.find(queueing.after)
        now = 0.0 if queueing.delay_s is None else self._client.store.clock()
        return replace(queueing, after=after).begun_at(now)

    @needs_redis
    def submit_again(self, job_id: str, *, stop_at: int) -> str:
        """Queue a copy of a job at the front; it ends with a checkpoint at step `stop_at`.

        Its learning-rate schedule is that of all steps; it reports to no tracker.
        """
        from ..lifecycle.submit import submit

        document = self._client.rundir(job_id).read_spec()
        kept = ("python_path", "model", "init_from", "rules")
        copy: dict[str, Any] = {name: document[name] for name in kept if name in document}
        copy["spec"] = {**document["spec"], "report_to": []}
        copy |= {"stop_at": stop_at, "origin": "check"}
        queueing = Queueing(front=True, needs=document.get("needs") or {})
        return submit(self._client.places, document["kind"], copy, queueing)

    # --- steering ------------------------------------------------------------------------------

    def changed_sources(self, job_id: str) -> list[str]:
        """Return the reward sources that changed since the latest checkpoint of a job, or of any
        job of a group that can be resumed."""
        from ..groups import actions
        from ..lifecycle.resume import changed_sources

        if not is_group_id(job_id):
            return changed_sources(self._client.rundir(job_id))
        files: dict[str, None] = {}
        for member_id in actions.to_resume(self._client.home, job_id):
            with suppress(NotFound):
                files |= dict.fromkeys(changed_sources(self._client.rundir(member_id)))
        return list(files)

    @needs_redis
    def cancel(self, job_id: str) -> str:
        """Cancel a job, or all jobs of a group; nothing of it continues then."""
        return self._steer(job_id, CANCELED, partial(steer.cancel, self._client.places))

    def cancel_if_pending(self, job_id: str) -> bool:
        """Cancel a job unless it has ended; return whether it had not."""
        try:
            self.cancel(job_id)
        except Conflict:
            return False
        return True

    @needs_redis
    def kill(self, job_id: str) -> str:
        """Kill a job, or all jobs of a group."""
        return self._steer(job_id, CANCELED, partial(steer.kill, self._client.places))

    @needs_redis
    def pause(self, job_id: str, *, release: bool = False) -> str:
        """Pause a job, or all jobs of a group."""
        return self._steer(
            job_id, PAUSED, partial(steer.pause, self._client.places, release=release)
        )

    @needs_redis
    def unpause(self, job_id: str) -> str:
        """Continue a paused job, or all those of a group."""
        return self._steer(job_id, RUNNING, partial(steer.unpause, self._client.places))

    @needs_redis
    def move(self, job_id: str, position: int) -> int:
        """Move a queued job to a position of its queue, as `steer.move`."""
        return steer.move(self._client.places, job_id, position)

    def _steer(self, job_id: str, phase: str, act: Callable[[str], str]) -> str:
        """Act on a job; for a group, set its phase and act on its jobs."""
        if is_group_id(job_id):
            from ..groups import actions

            return actions.steer(self._client.places, job_id, phase, act)
        return act(job_id)

    @needs_redis
    def resume(
        self,
        job_id: str,
        *,
        changes: Mapping[str, Any] | None = None,
        front: bool = False,
        strict: bool = False,
    ) -> str:
        """Queue an ended job again, or the jobs of a group that have not done their part."""
        from ..groups import actions
        from ..lifecycle.resume import resume

        again = partial(
            resume, self._client.places, self._client.config, front=front, strict=strict
        )
        if not is_group_id(job_id):
            return again(job_id, changes=changes)
        if changes:
            kind = kind_of(job_id)
            raise SpecError(next(iter(changes)), f"cannot change for all jobs of a {kind}")
        return actions.resume(self._client.places, job_id, again)

    def check_removal(self, ids: Sequence[str]) -> None:
        """Raise Conflict for a job, or a job of a group, that runs, waits or is needed by others.

        Jobs that are removed together may need each other.
        """
        from ..groups import actions
        from ..lifecycle import remove

        jobs = []
        for one in ids:
            if is_group_id(one):
                jobs += self.several(actions.jobs_of(self._client.home, one))
            else:
                jobs.append(self.get(one))
        removed = {job["id"] for job in jobs}
        needed = self.needed()
        for job in jobs:
            remove.refuse_removal(
                job, [one for one in needed.get(job["id"], ()) if one not in removed]
            )

    @needs_redis
    def remove(self, job_id: str) -> int:
        """Remove an ended job, or a group with all its jobs; return the bytes freed."""
        from ..lifecycle import remove

        if not is_group_id(job_id):
            return remove.remove(self._client.places, job_id)
        from ..groups import actions

        self.check_removal([job_id])
        folder, jobs = actions.close(self._client.home, job_id)
        freed = sum(remove.remove(self._client.places, one) for one in jobs)
        folder.remove()
        return freed

    @needs_redis
    def finish_removals(self) -> dict[str, int]:
        """Finish interrupted removals; return the bytes freed for each job."""
        from ..lifecycle import remove

        return remove.finish_all(self._client.places)

    @needs_redis
    def remove_resume_state(self, job_id: str) -> int:
        """As `remove.remove_resume_state`."""
        from ..lifecycle import remove

        return remove.remove_resume_state(self._client.places, job_id)

    @needs_redis
    def ended(self, statuses: Collection[str], *, before: float) -> list[str]:
        """As `remove.ended`."""
        from ..lifecycle import remove

        return remove.ended(self._client.places, statuses, before=before)

    @needs_redis
    def needed(self) -> dict[str, list[str]]:
        """As `remove.needed`."""
        from ..lifecycle import remove

        return remove.needed(self._client.places)

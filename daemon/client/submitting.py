"""Submitting jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis

from ...configs.config import ModelConfig
from ...configs.labels import with_ranks
from ...configs.queues import TRAIN
from ...jobs import KINDS, spec_class
from ...jobs.errors import SpecError
from ...jobs.spec import Spec
from ...jobs.training.options import TrainingSpec
from ..host.warm_set import known_models
from ..queue import adoption, runs_owner
from ..runs import git, labels as job_labels, source, weights
from ..runs.labels import NO_LABELS, Labels
from ..runs.rundir import RunDir
from ..runs.weights import Weights
from ..store.bucket import StoreUnavailable
from . import checking
from .capacity import check_memory, check_ranks
from .connection import ClientConnection, needs_redis
from .trained import FetchReport, is_checkpoint
from .views import spec_of


@dataclass(frozen=True)
class Template:
    """The options of a job, for another job."""

    options: dict[str, Any]  # raw; without the model if that came from a job
    init_from: str | None  # JOB or JOB@STEP that the weights came from


class Submitting(ClientConnection):
    """Checks and queues new jobs."""

    fetch_report: FetchReport | None = None  # receives the progress of models that are fetched
    on_left: Callable[[str], None] | None = None  # receives notes on checks that jobs do later

    def weights(self, text: str, kind: str | None = None) -> Weights:
        """Return the verified weights of `JOB` (its final model) or `JOB@STEP`. Needs no Redis.

        `kind`: of the job that starts from them; `-` is then the latest job that trained the same
        type of model. Raises SpecError, NotFound and CheckpointDamaged.
        """
        job, at, step = text.partition("@")
        if job == "-" and kind is not None:
            job = self.lookup.latest(_kinds_like(kind))
        rundir = self.rundir(self.find(job))
        if not at:
            self.fetch_weights(rundir.path.name, final=True)
            return weights.final_model(rundir)
        if not (step.isascii() and step.isdigit()):
            raise SpecError("init_from", f"must be JOB or JOB@STEP, got {text[:80]!r}")
        self.fetch_weights(rundir.path.name, int(step))
        return weights.checkpoint(rundir, int(step))

    def template(self, text: str, kind: str) -> Template:
        """Return the options of a job of this kind. Needs no Redis, but for the latest job.

        Raises SpecError, NotFound and Conflict.
        """
        document = self.rundir(self.find(text)).read_spec()
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
        spec = self._with_full_ids(spec)
        document = checking.document_of(
            spec,
            self.config,
            init=init,
            model=model,
            report=self.fetch_report,
            on_left=self.on_left,
            reads_tokenizer=reads_tokenizer,
        )
        check_memory(self.config, spec, document)
        return document

    def first_prompt(self, kind: str, document: Mapping[str, Any]) -> str | None:
        """Return the first prompt that a checked job trains on or is evaluated on, rendered.

        `document` is what `check` returned. None for kinds without prompts. Raises SpecError.
        """
        return checking.first_prompt(spec_class(kind).parse(document["spec"]), document)

    def _with_full_ids(self, spec: Spec) -> Spec:
        """Return the spec with whole ids of the jobs that it names. Raises SpecError, NotFound."""
        found: dict[str, Any] = {}
        for name in spec.names_jobs:
            if (text := getattr(spec, name)) is not None:
                found[name] = self.find(text)
                if found[name].split("-")[0] != spec.kind:
                    raise SpecError(name, f"must be a job of kind {spec.kind}, got {found[name]}")
        return replace(spec, **found)

    def _unfinished(self, spec: Spec, document: dict[str, Any]) -> str | None:
        """Return a job that the spec names and that has no result yet."""
        named = [document["spec"][name] for name in spec.names_jobs]
        jobs = [job for job in named if job and self.rundir(job).read_result() is None]
        return jobs[0] if jobs else None

    def model_names(self) -> list[str]:
        """Return the names of the configured and the loaded models. Needs no Redis."""
        return list({m.name: m for m in self.config.models} | known_models(self.home))

    @needs_redis
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
        labels: Labels = NO_LABELS,
        delay_s: float | None = None,
        needs: Mapping[str, str] | None = None,
    ) -> str:
        """Check and queue a job; return its id. Raises SpecError, NotFound, Conflict, Unavailable.

        The run directory is complete before the job is queued. If that fails or is interrupted,
        nothing of the job is left. A job starts after those that its spec names have finished.
        `init`: the weights to start from, by default those of a spec's `model` of the form
        JOB@STEP; the spec's `model` is their name. `model`: the model that
        the spec's `model` names, if the caller knows it. `origin`: one of rundir.ORIGINS.
        `labels`: its name and tags. `delay_s`: queue it after this time, by Redis' clock.
        `needs`: labels of the machine that is to run it.
        """
        folder = Path.cwd()
        git_state = git.begin_state_of(folder) if spec.queue == TRAIN else None
        named = getattr(spec, "model", None)
        if init is None and model is None and named is not None and is_checkpoint(named):
            init = self.weights(named)  # whole, and kept when the checkpoint is pruned
            spec = type(spec).parse({**spec.to_json(), "model": init.name})
        document = {**self.check(spec, init=init, model=model), "origin": origin}
        if needs:
            document["needs"] = dict(needs)
        self.connection.ping()
        check_ranks(self, [document["spec"]])
        self.home.create()
        if self.config.redis_url is not None:
            runs_owner.claim(self.connection, self.home, self.remote)
        unfinished = self._unfinished(spec, document)
        after = unfinished if after is None else self.find(after)
        if unfinished not in (None, after):
            raise SpecError("after", f"must be {unfinished}, which is still to end, got {after}")
        if delay_s is not None:
            at = datetime.fromtimestamp(self.store.clock() + delay_s, UTC)
        how: dict[str, Any] = {
            "front": front,
            "after": after,
            "retries": retries,
            "timeout_s": timeout_s,
        }
        due = None if at is None else at.isoformat()
        queueing = adoption.queueing(self.home, self.connection, {**how, "at": due})
        # With weights to link it is written after them: without it nothing adopts the job.
        rundir = RunDir.create(
            self.home.runs, spec.kind, document | (queueing if init is None else {})
        )
        try:
            job_labels.write(rundir, labels)
            if git_state is not None:
                source.record_submission(rundir, document["spec"], folder, git_state)
            if init is not None:
                # The model needs a unique name: the zygote identifies models by name, and several
                # jobs may start from the same checkpoint.
                folder = rundir.path / "init"
                weights.link(init, folder)
                own = ModelConfig(name=f"{rundir.path.name}:init", path=str(folder))
                rundir.revise(model=own.__dict__, **queueing)
            self.store.enqueue(
                rundir.path.name,
                spec.queue,
                at=at,
                from_cli=origin == "cli",
                needs=with_ranks(needs, document["spec"]),
                **how,
            )
        except BaseException as error:  # also Ctrl-C
            self._take_back(rundir, error)
            raise
        return rundir.path.name

    def _take_back(self, rundir: RunDir, error: BaseException) -> None:
        """Remove a job whose submission failed or was interrupted; Redis may have it already."""
        job_id = rundir.path.name
        with suppress(redis.RedisError):
            job = self.store.fetch(job_id)
            if job is not None and not self.store.cancel_waiting(job):
                self.store.request_stop(job, "kill")  # a worker has taken it
                return
            if job is not None:
                self.store.remove(job)
        if self.remote is not None and not isinstance(error, StoreUnavailable):
            with suppress(StoreUnavailable):
                self.remote.withdraw(job_id)
        rundir.remove()

    @needs_redis
    def submit_again(self, job_id: str, *, stop_at: int) -> str:
        """Queue a copy of a job at the front; it ends with a checkpoint at step `stop_at`.

        Its learning-rate schedule is that of all steps; it reports to no tracker.
        """
        document = self.rundir(job_id).read_spec()
        kept = ("python_path", "model", "init_from", "rules")
        copy: dict[str, Any] = {name: document[name] for name in kept if name in document}
        copy["spec"] = {**document["spec"], "report_to": []}
        copy |= {"stop_at": stop_at, "origin": "check"}
        copy |= adoption.queueing(self.home, self.connection, {"front": True})
        rundir = RunDir.create(self.home.runs, document["kind"], copy)
        try:
            needs = with_ranks(document.get("needs"), document["spec"])
            self.store.enqueue(rundir.path.name, spec_of(document).queue, front=True, needs=needs)
        except BaseException as error:  # also Ctrl-C
            self._take_back(rundir, error)
            raise
        return rundir.path.name


def _kinds_like(kind: str) -> list[str]:
    """Return the kinds that train the same type of model."""
    trained = {
        name: spec.trains for name in KINDS if issubclass(spec := spec_class(name), TrainingSpec)
    }
    return [name for name, sort in trained.items() if sort == trained.get(kind)]

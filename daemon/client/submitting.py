"""Submitting jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...configs.config import ModelConfig
from ...configs.queues import TRAIN
from ...jobs import KINDS, spec_class
from ...jobs.errors import SpecError
from ...jobs.ids import kind_of
from ...jobs.spec import Spec
from ...jobs.training.options import TrainingSpec
from ..host.warm_set import known_models
from ..lifecycle import runs_owner
from ..lifecycle.check import check_ranks
from ..lifecycle.queueing import AT_ONCE, Queueing
from ..lifecycle.submit import submit
from ..runs import git, weights
from ..runs.weights import Weights
from . import checking
from .capacity import check_memory
from .connection import ClientConnection, needs_redis
from .trained import FetchReport, is_checkpoint


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
                if kind_of(found[name]) != spec.kind:
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

    def check_ready(self, options: Iterable[Mapping[str, Any]]) -> None:
        """Raise what keeps jobs with these options from being queued; create the home."""
        self.connection.ping()
        check_ranks(self.places, self.config, options)
        runs_owner.prepare(self.places, self.config)

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
        git_state = git.begin_state_of(Path.cwd()) if spec.queue == TRAIN else None
        named = getattr(spec, "model", None)
        if init is None and model is None and named is not None and is_checkpoint(named):
            init = self.weights(named)  # whole, and kept when the checkpoint is pruned
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
        return submit(self.places, spec.kind, document, queueing, init=init, git_state=git_state)

    def found(self, queueing: Queueing) -> Queueing:
        """The same with the whole id of `after` and the time by Redis' clock. Raises NotFound."""
        after = None if queueing.after is None else self.find(queueing.after)
        now = 0.0 if queueing.delay_s is None else self.store.clock()
        return replace(queueing, after=after).begun_at(now)

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
        queueing = Queueing(front=True, needs=document.get("needs") or {})
        return submit(self.places, document["kind"], copy, queueing)


def _kinds_like(kind: str) -> list[str]:
    """Return the kinds that train the same type of model."""
    trained = {
        name: spec.trains for name in KINDS if issubclass(spec := spec_class(name), TrainingSpec)
    }
    return [name for name, sort in trained.items() if sort == trained.get(kind)]

"""`/v1/fine_tuning/jobs`: training jobs by OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from ....configs.queues import TRAIN
from ....jobs.errors import NotFound, SpecError
from ...client.trained import check_name
from ...runs.labels import Labels
from ..core.sampling import only
from ..core.state import AppState, StateDep
from ..core.submitter import Submission
from ..core.waiters import CallerDep
from ..http.errors import RESPONSES
from ..http.hidden import without_paths
from ..http.strict import StrictRoute
from . import integrations, methods
from .named import TrainingDep
from .tuning_views import ABOUT, checkpoints_of, events_of, view

router = APIRouter(
    route_class=StrictRoute,
    prefix="/v1/fine_tuning/jobs",
    tags=["training"],
    responses=RESPONSES,
)

_Limit = Annotated[int, Query(ge=1, le=100)]


class CreateJob(BaseModel):
    """A training job. `method` is {"type": TYPE, TYPE: {"hyperparameters": …}}.

    TYPE is supervised (SFT), dpo, reinforcement (GRPO), mlm, or the method of a kind from outside;
    hyperparameters are the options of `warmd submit KIND`. `suffix` is the name of the job, `tags`
    (an extension) are its tags; `metadata` is stored with it. The trained model is named by the
    job's id.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=200)]
    training_file: Annotated[str, Field(min_length=1, max_length=500)]
    method: dict[str, Any] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    suffix: Annotated[str, Field(max_length=64)] | None = None
    tags: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=20)] = []
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    validation_file: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    integrations: list[dict[str, Any]] | None = None
    hyperparameters: Annotated[
        None, only([], {}, unsupported="not supported: use method.TYPE.hyperparameters")
    ] = None


class Problem(BaseModel):
    """Why a job would be refused; `param` is the field of the request."""

    message: str
    param: str | None

    @classmethod
    def of(cls, error: SpecError) -> Problem:
        return cls(message=without_paths(str(error)), param=error.field)


class JobError(BaseModel):
    """The reason of a failure."""

    code: str
    message: str
    param: str | None


class Job(BaseModel):
    """A training job."""

    id: str
    object: Literal["fine_tuning.job"]
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    status: Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]
    model: str
    fine_tuned_model: str | None
    training_file: str
    validation_file: str | None
    method: dict[str, Any]
    hyperparameters: dict[str, Any]
    seed: int
    metadata: dict[str, str] | None
    error: JobError | None
    organization_id: Literal["warmd"]
    result_files: list[str]
    trained_tokens: None
    integrations: list[dict[str, Any]] | None


class JobList(BaseModel):
    """Jobs, newest first."""

    object: Literal["list"] = "list"
    data: list[Job]
    has_more: bool


class JobEvent(BaseModel):
    """An event of a job."""

    id: str
    object: Literal["fine_tuning.job.event"]
    created_at: int
    level: Literal["info", "warn", "error"]
    type: Literal["message", "metrics"]
    message: str
    data: dict[str, Any]


class EventList(BaseModel):
    """Events, newest first."""

    object: Literal["list"] = "list"
    data: list[JobEvent]
    has_more: bool


class Checkpoint(BaseModel):
    """A checkpoint on disk."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"]
    created_at: int
    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    step_number: int
    metrics: dict[str, Any]


class CheckpointList(BaseModel):
    """Checkpoints, newest first."""

    object: Literal["list"] = "list"
    data: list[Checkpoint]
    first_id: str | None
    last_id: str | None
    has_more: bool


@router.post("", response_model=Job)
async def create_job(body: CreateJob, state: StateDep, caller: CallerDep) -> Any:
    """Queue a training job."""
    await state.queue_length(TRAIN)
    submission = await checked(body, state)
    kind = submission.spec.kind
    try:
        job_id, _ = await state.submitter.submit(submission, caller)
    except SpecError as error:
        raise by_request(error, kind) from error
    return await state.in_thread(view, state.client, job_id)


async def checked(body: CreateJob, state: AppState) -> Submission:
    """Return the job of a request; a SpecError names the field of the request."""
    kind, options = await state.in_thread(checked_options, body, state)
    about = {
        ABOUT: {
            "training_file": body.training_file,
            "validation_file": body.validation_file,
            "method": body.method,
            "suffix": body.suffix,
            "metadata": body.metadata,
            "integrations": body.integrations,
        }
    }
    try:
        spec = state.parse(kind, options)
    except SpecError as error:
        raise by_request(error, kind) from error
    return Submission(
        spec, about, labels=labels_of(state, body.suffix, body.tags, name_field="suffix")
    )


def labels_of(state: AppState, name: str | None, tags: Sequence[str], *, name_field: str) -> Labels:
    """Return the name and the tags of a job.

    `name_field`: the request's field of the name. Raises SpecError with the request's field.
    """
    try:
        check_name(state.config, name or None)
        return Labels.parse(name or None, tags)
    except SpecError as error:
        raise SpecError({"name": name_field, "tag": "tags"}[error.field], error.problem) from None


def checked_options(body: CreateJob, state: AppState) -> tuple[str, dict[str, Any]]:
    """Return the job kind of a request and its options; a model by name becomes its job's id.

    Raises SpecError for a wrong field, and ApiError 404 for a model that is not in `/v1/models`.
    """
    kind, options = read_options(body, state)
    integrations.check(body.integrations, kind, state.config)
    if options["model"] is not None:
        options["model"] = state.model_index.known(body.model)
    return kind, options


def read_options(
    body: CreateJob,
    state: AppState,
    hyperparameters: Mapping[str, Any] | None = None,
    training_file: str | None = None,
) -> tuple[str, dict[str, Any]]:
    """Return the job kind of a request and its options, its model unchecked. Raises SpecError.

    `hyperparameters` and `training_file` take precedence over those of the request, which must be
    valid without them, and do not change its kind.
    """
    method = body.method
    if hyperparameters or training_file:
        method = methods.extended(method, body.training_file, hyperparameters or {})
    return methods.options(
        method,
        body.model,
        training_file or body.training_file,
        body.validation_file,
        body.seed,
        state.files,
        state.config.http_graders,
    )


def by_request(error: SpecError, kind: str) -> SpecError:
    """Return the error of an option with the name that the request has for it."""
    problem = error.problem
    if error.field == "model":
        return error
    method = methods.method_of(kind)
    assert method is not None
    if error.field == method.training_file:
        return SpecError("training_file", problem)
    if error.field == method.validation_file:
        return SpecError("validation_file", problem)
    if error.field == "grader":
        return SpecError(f"method.{method.type}.grader", problem)
    return SpecError(f"method.{method.type}.hyperparameters.{error.field}", problem)


@router.get("", response_model=JobList)
async def list_jobs(state: StateDep, after: str | None = None, limit: _Limit = 20) -> Any:
    """List training jobs, newest first."""

    def page() -> dict[str, Any]:
        ids = state.client.jobs.trainings(limit + 1, after=after)
        if after is not None and not ids:
            view(state.client, after)  # NotFound if it was removed, which would end the list here
        jobs = []
        for job_id in ids[:limit]:
            with suppress(NotFound):  # removed meanwhile
                jobs.append(view(state.client, job_id))
        return {"data": jobs, "has_more": len(ids) > limit}

    return await state.in_thread(page)


@router.get("/{job_id}", response_model=Job)
async def retrieve_job(job_id: TrainingDep, state: StateDep) -> Any:
    """Show a training job."""
    return await state.in_thread(view, state.client, job_id)


@router.post("/{job_id}/cancel", response_model=Job)
async def cancel_job(job_id: TrainingDep, state: StateDep) -> Any:
    """Stop a job after it has saved a checkpoint."""
    return await _steer(state, job_id, state.client.jobs.cancel)


@router.post("/{job_id}/pause", response_model=Job)
async def pause_job(job_id: TrainingDep, state: StateDep) -> Any:
    """Pause a job at the end of its step; it stays in memory."""
    return await _steer(state, job_id, state.client.jobs.pause)


@router.post("/{job_id}/resume", response_model=Job)
async def resume_job(job_id: TrainingDep, state: StateDep) -> Any:
    """Continue a paused job, or resume an ended one from its latest checkpoint."""
    job = await state.in_thread(view, state.client, job_id)
    is_paused = job["status"] == "paused"
    act = state.client.jobs.unpause if is_paused else state.client.jobs.resume
    return await _steer(state, job_id, act)


async def _steer(state: AppState, job_id: str, act: Callable[[str], str]) -> dict[str, Any]:
    await state.in_thread(view, state.client, job_id)  # NotFound unless it is a training job
    await state.in_thread(act, job_id)
    return await state.in_thread(view, state.client, job_id)


@router.get("/{job_id}/events", response_model=EventList)
async def list_events(
    job_id: TrainingDep, state: StateDep, after: str | None = None, limit: _Limit = 20
) -> Any:
    """List a job's events, newest first."""
    return await state.in_thread(events_of, state.client, job_id, after, limit)


@router.get("/{job_id}/checkpoints", response_model=CheckpointList)
async def list_checkpoints(
    job_id: TrainingDep, state: StateDep, after: str | None = None, limit: _Limit = 10
) -> Any:
    """List the checkpoints of a job, newest first."""
    return await state.in_thread(checkpoints_of, state.client, job_id, after, limit)

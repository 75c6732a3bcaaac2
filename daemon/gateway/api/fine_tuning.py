"""`/v1/fine_tuning/jobs`: SFT, GRPO and MLM jobs by OpenAI's API."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from ....configs.queues import TRAIN
from ....jobs.errors import NotFound, SpecError
from ..core.sampling import Unserved
from ..core.state import Gate, GateDep
from ..core.submitter import Order
from ..core.waiters import CallerDep
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from . import methods
from .tuning_views import ABOUT, checkpoints_of, events_of, view

router = APIRouter(
    route_class=StrictRoute,
    prefix="/v1/fine_tuning/jobs",
    tags=["training"],
    responses=RESPONSES,
)

_Limit = Annotated[int, Query(ge=1, le=100)]


class CreateJob(BaseModel):
    """What to train. `method` is {"type": TYPE, TYPE: {"hyperparameters": …}}.

    TYPE is supervised, reinforcement or mlm; hyperparameters are the options that `warmd submit
    sft`, `warmd submit grpo` and `warmd submit mlm` list.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=200)]
    training_file: Annotated[str, Field(min_length=1, max_length=500)]
    method: dict[str, Any] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    suffix: Annotated[str, Field(max_length=64)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    validation_file: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    integrations: Unserved = None
    hyperparameters: Unserved = None


class JobError(BaseModel):
    """Why a job failed."""

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
    integrations: None


class JobList(BaseModel):
    """Jobs, newest first."""

    object: Literal["list"] = "list"
    data: list[Job]
    has_more: bool


class JobEvent(BaseModel):
    """One line of a job's events."""

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
    """A checkpoint that is kept."""

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
async def create_job(body: CreateJob, gate: GateDep, caller: CallerDep) -> Any:
    """Queue a training job."""
    await gate.waiting(TRAIN)
    kind, options = await gate.blocking(
        methods.options,
        body.method,
        body.model,
        body.training_file,
        body.validation_file,
        body.seed,
        gate.files,
    )
    if options["model"] is not None:
        await gate.blocking(gate.catalogue.check, body.model)
    about = {
        ABOUT: {
            "training_file": body.training_file,
            "validation_file": body.validation_file,
            "method": body.method,
            "suffix": body.suffix,
            "metadata": body.metadata,
        }
    }
    try:
        order = Order(gate.parse(kind, options), about)
        if caller.key is None:
            job_id = await gate.intake.submit(order)
        else:
            job_id, _ = await gate.intake.submit_once(caller.key, caller.fingerprint, order)
    except SpecError as error:
        raise _by_request(error, kind) from error
    return await gate.blocking(view, gate.client, job_id)


def _by_request(error: SpecError, kind: str) -> SpecError:
    problem = str(error).partition(": ")[2]
    if error.field == "model":
        return error
    if error.field == methods.DATA[kind][0]:
        return SpecError("training_file", problem)
    if error.field == methods.VALIDATION.get(kind):
        return SpecError("validation_file", problem)
    method = methods.METHODS[kind]
    return SpecError(f"method.{method}.hyperparameters.{error.field}", problem)


@router.get("", response_model=JobList)
async def list_jobs(gate: GateDep, after: str | None = None, limit: _Limit = 20) -> Any:
    """List training jobs, newest first."""

    def page() -> dict[str, Any]:
        ids = gate.client.trainings(limit + 1, after=after)
        jobs = []
        for job_id in ids[:limit]:
            with suppress(NotFound):  # removed meanwhile, or its files were
                jobs.append(view(gate.client, job_id))
        return {"data": jobs, "has_more": len(ids) > limit}

    return await gate.blocking(page)


@router.get("/{job_id}", response_model=Job)
async def retrieve_job(job_id: str, gate: GateDep) -> Any:
    """Show a training job."""
    return await gate.blocking(view, gate.client, job_id)


@router.post("/{job_id}/cancel", response_model=Job)
async def cancel_job(job_id: str, gate: GateDep) -> Any:
    """Have a job save and stop."""
    return await _steer(gate, job_id, "cancel")


@router.post("/{job_id}/pause", response_model=Job)
async def pause_job(job_id: str, gate: GateDep) -> Any:
    """Have a job wait where it is."""
    return await _steer(gate, job_id, "pause")


@router.post("/{job_id}/resume", response_model=Job)
async def resume_job(job_id: str, gate: GateDep) -> Any:
    """Let a paused job go on; one that ended goes on from its latest checkpoint."""
    job = await gate.blocking(view, gate.client, job_id)
    return await _steer(gate, job_id, "unpause" if job["status"] == "paused" else "resume")


async def _steer(gate: Gate, job_id: str, how: str) -> dict[str, Any]:
    await gate.blocking(view, gate.client, job_id)  # NotFound for what is no training job
    await gate.blocking(getattr(gate.client, how), job_id)
    return await gate.blocking(view, gate.client, job_id)


@router.get("/{job_id}/events", response_model=EventList)
async def list_events(
    job_id: str, gate: GateDep, after: str | None = None, limit: _Limit = 20
) -> Any:
    """List a job's events, newest first."""
    return await gate.blocking(events_of, gate.client, job_id, after, limit)


@router.get("/{job_id}/checkpoints", response_model=CheckpointList)
async def list_checkpoints(
    job_id: str, gate: GateDep, after: str | None = None, limit: _Limit = 10
) -> Any:
    """List the checkpoints that a job keeps, newest first."""
    return await gate.blocking(checkpoints_of, gate.client, job_id, after, limit)

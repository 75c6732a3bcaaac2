"""`/v1/warmd/curricula`: trainings in stages, with a gate between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from ....configs.queues import TRAIN
from ....jobs.errors import SpecError
from ...runs.labels import Labels
from ..core.state import AppState, StateDep
from ..core.waiters import CallerDep
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from . import integrations, methods
from .changes import ChangeDep, Nothing
from .fine_tuning import CreateJob
from .jobs import Pause

router = APIRouter(
    route_class=StrictRoute, prefix="/v1/warmd/curricula", tags=["curricula"], responses=RESPONSES
)

_MAX_STAGES = 100
_MOST = "most_samples"  # of a gate; its other fields are options of eval

_Limit = Annotated[int, Query(ge=1, le=100)]
_FileName = Annotated[str, Field(min_length=1, max_length=500)]


class CreateStage(BaseModel):
    """A stage: hyperparameters and data that take precedence over those of the curriculum."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(max_length=32)] | None = None
    training_file: _FileName | None = None
    hyperparameters: Annotated[dict[str, Any], Field(max_length=100)] = {}
    gate: bool = True


class CreateCurriculum(CreateJob):
    """A training in stages. `gate` has the options of the evaluations at the gates.

    Those are options of `warmd eval`, `samples` (questions of the first comparison) and
    `most_samples` (while it is undecided). `dataset` is the id of an uploaded file.
    """

    stages: Annotated[list[CreateStage], Field(min_length=1, max_length=_MAX_STAGES)]
    gate: Annotated[dict[str, Any], Field(max_length=50)] | None = None
    name: Annotated[str, Field(max_length=64)] | None = None
    tags: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=20)] = []  # noqa: RUF012 (pydantic copies it)


class Evaluations(BaseModel):
    """A comparison at a gate: the eval jobs of the weights before and after an attempt."""

    questions: int
    before: str
    after: str


class Attempt(BaseModel):
    """One training of a stage, and what was decided at its gate."""

    stage: str
    attempt: int
    job: str
    status: str
    step: int | None
    steps_total: int | None
    questions: int | None
    evaluations: list[Evaluations]
    decision: str | None
    comparison: dict[str, Any] | None


class CurriculumView(BaseModel):
    """A curriculum; `model` is the job whose model is the latest that a gate let through."""

    id: str
    kind: str
    name: str | None
    tags: list[str]
    status: str
    problem: str | None
    created_at: float
    stages: list[str]
    attempts: list[Attempt]
    jobs: list[str]
    model: str | None


class CurriculumList(BaseModel):
    """Curricula, newest first."""

    data: list[CurriculumView]


class CurriculumOutcome(BaseModel):
    """What became of the job that a curriculum is at, in words."""

    id: str
    outcome: str


class CurriculumRemoved(BaseModel):
    """A removed curriculum, and the bytes that were freed."""

    id: str
    bytes: int


@router.post("", response_model=CurriculumView)
async def create_curriculum(
    body: CreateCurriculum, state: StateDep, caller: CallerDep, _: ChangeDep
) -> Any:
    """Check all stages and the gate, and queue the first stage."""
    if caller.key is not None:
        raise SpecError("Idempotency-Key", "must be left out for a curriculum, got one")
    await state.queue_length(TRAIN)
    kind, values = await state.in_thread(_options, body, {}, body.training_file, state)
    integrations.check(body.integrations, kind, state.config)
    stages = [
        await state.in_thread(_stage, body, number, stage, values, state)
        for number, stage in enumerate(body.stages)
    ]
    given: dict[str, Any] = {"stages": stages}
    if body.gate is not None:
        given["gate"] = await state.in_thread(_gate, body.gate, state)
    labels = Labels.parse(body.name, body.tags)

    def submit() -> dict[str, Any]:
        options = {**state.config.defaults.get(kind, {}), **values}
        submitted = state.client.submit_curriculum(
            kind, options, given, origin="http", labels=labels
        )
        return state.client.curriculum(submitted)

    return await state.in_thread(submit)


def _options(
    body: CreateCurriculum, further: Mapping[str, Any], training_file: str, state: AppState
) -> tuple[str, dict[str, Any]]:
    """The job kind, and its options with further hyperparameters. Raises SpecError."""
    return methods.options(
        methods.extended(body.method, training_file, further) if further else body.method,
        body.model,
        training_file,
        body.validation_file,
        body.seed,
        state.files,
        state.config.http_graders,
    )


def _stage(
    body: CreateCurriculum,
    number: int,
    stage: CreateStage,
    values: Mapping[str, Any],
    state: AppState,
) -> dict[str, Any]:
    """A stage as a job file has it: the options that differ from `values`. Raises SpecError."""
    training_file = stage.training_file or body.training_file
    try:
        _, options = _options(body, stage.hyperparameters, training_file, state)
    except SpecError as error:
        raise SpecError(f"stages.{number}.{error.field}", error.problem) from error
    differing = {name: value for name, value in options.items() if values.get(name) != value}
    name = {} if stage.name is None else {"name": stage.name}
    return {**differing, **name, "gate": stage.gate}


def _gate(given: Mapping[str, Any], state: AppState) -> dict[str, Any]:
    most = {name: value for name, value in given.items() if name == _MOST}
    options = {name: value for name, value in given.items() if name != _MOST}
    return {**methods.evaluation(options, state.files, "gate"), **most}


@router.get("", response_model=CurriculumList)
async def list_curricula(state: StateDep, limit: _Limit = 20) -> Any:
    """List curricula, newest first."""
    return {"data": await state.in_thread(state.client.curricula, limit)}


@router.get("/{curriculum_id}", response_model=CurriculumView)
async def show_curriculum(curriculum_id: str, state: StateDep) -> Any:
    """Show a curriculum: the attempts at its stages, and what was decided."""
    return await state.in_thread(state.client.curriculum, curriculum_id)


@router.post("/{curriculum_id}/pause", response_model=CurriculumOutcome)
async def pause_curriculum(curriculum_id: str, body: Pause, state: StateDep, _: ChangeDep) -> Any:
    """Pause the job that a curriculum is at; no further one is queued."""
    return await _outcome(
        state, curriculum_id, lambda found: state.client.pause(found, release=body.release)
    )


@router.post("/{curriculum_id}/remove", response_model=CurriculumRemoved)
async def remove_curriculum(
    curriculum_id: str, body: Nothing, state: StateDep, _: ChangeDep
) -> Any:
    """Remove an ended curriculum with all its jobs."""

    def remove() -> dict[str, Any]:
        state.client.curriculum(curriculum_id)
        state.client.check_removal([curriculum_id])
        return {"id": curriculum_id, "bytes": state.client.remove(curriculum_id)}

    return await state.in_thread(remove)


@router.post("/{curriculum_id}/{action}", response_model=CurriculumOutcome)
async def act_on_curriculum(
    curriculum_id: str,
    action: Literal["cancel", "kill", "unpause", "resume"],
    body: Nothing,
    state: StateDep,
    _: ChangeDep,
) -> Any:
    """Cancel, kill, continue or resume a curriculum at the job that it is at."""
    return await _outcome(state, curriculum_id, getattr(state.client, action))


async def _outcome(
    state: AppState, curriculum_id: str, act: Callable[[str], str]
) -> dict[str, str]:
    await state.in_thread(state.client.curriculum, curriculum_id)  # NotFound, also for no id
    return {"id": curriculum_id, "outcome": await state.in_thread(act, curriculum_id)}

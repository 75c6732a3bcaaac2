"""`/v1/warmd/curricula`: trainings in stages, with a gate between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from ....configs.queues import TRAIN
from ....jobs.errors import SpecError
from ...client.groups import Groups
from ...lifecycle.queueing import Queueing
from ..core.state import AppState, StateDep
from ..core.waiters import CallerDep
from ..http.client import current_name
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from . import groups, methods, named
from .changes import ChangeDep
from .fine_tuning import CreateJob, checked_options, read_options

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
    """One training of a stage, and the decision at its gate."""

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
    """A curriculum; `model` is the job whose model is the latest that passed a gate."""

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


@router.post("", response_model=CurriculumView)
async def create_curriculum(
    body: CreateCurriculum, state: StateDep, caller: CallerDep, _: ChangeDep
) -> Any:
    """Check all stages and the gate, and queue the first stage."""
    if caller.key is not None:
        raise SpecError("Idempotency-Key", "must be left out for a curriculum, got one")
    await state.queue_length(TRAIN)
    kind, values = await state.in_thread(checked_options, body, state)
    if values["model"] is not None:  # by id, also where the stages take it from the request
        body = body.model_copy(update={"model": values["model"]})
    stages = [
        await state.in_data_thread(_stage, body, number, stage, values, state)
        for number, stage in enumerate(body.stages)
    ]
    given: dict[str, Any] = {"stages": stages}
    if body.gate is not None:
        given["gate"] = await state.in_data_thread(_gate, body.gate, state)
    queueing = Queueing(name=body.name, tags=tuple(body.tags))
    submitted_by = current_name()

    def submit() -> dict[str, Any]:
        options = {**state.config.defaults.get(kind, {}), **values}
        submitted = state.client.groups.submit_curriculum(
            kind, options, given, queueing, origin="http", submitted_by=submitted_by
        )
        return state.client.groups.curriculum(submitted)

    return await state.in_data_thread(submit)


def _stage(
    body: CreateCurriculum,
    number: int,
    stage: CreateStage,
    values: Mapping[str, Any],
    state: AppState,
) -> dict[str, Any]:
    """A stage as a job file has it: the options that differ from `values`. Raises SpecError."""
    try:
        _, options = read_options(body, state, stage.hyperparameters, stage.training_file)
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
    return {"data": await state.in_thread(state.client.groups.curricula, limit)}


@router.get("/{group_id}", response_model=CurriculumView)
async def show_curriculum(group_id: str, state: StateDep) -> Any:
    """Show a curriculum: the attempts at its stages, and the decisions."""
    found = await named.group_id(state, "curriculum", group_id)
    return await state.in_thread(state.client.groups.curriculum, found)


groups.add_actions(router, "curriculum", Groups.curriculum)

"""`/v1/warmd/sweeps`: training jobs that differ in options or seeds, with one id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from ....configs.queues import TRAIN
from ....jobs import spec_class
from ....jobs.errors import SpecError
from ....jobs.spec import OptionInfo
from ...client import sweep_plans
from ...client.groups import Groups
from ...client.sweep_views import steps_total
from ...client.trained import check_name
from ...lifecycle.queueing import Queueing
from ..core.state import AppState, StateDep
from ..core.waiters import CallerDep
from ..http.client import current_name
from ..http.errors import RESPONSES
from ..http.hidden import without_paths
from ..http.strict import StrictRoute
from . import groups, methods, named
from .changes import ChangeDep
from .fine_tuning import CreateJob, Problem, by_request, checked_options, read_options
from .first_prompts import FirstPrompt, first_prompt

router = APIRouter(
    route_class=StrictRoute, prefix="/v1/warmd/sweeps", tags=["sweeps"], responses=RESPONSES
)

_Limit = Annotated[int, Query(ge=1, le=100)]
_FIELDS = ("sweep", "seeds", "array", "halving", "search", "trials", "parallel", "metric")
_Value = Annotated[str, Field(max_length=200)] | int | float | bool


class CreateSweep(CreateJob):
    """Training jobs: `sweep` has options of the method's hyperparameters, each with its values.

    With `search` it may have a range, as ["1e-6..1e-3:log"].
    """

    sweep: Annotated[
        dict[
            Annotated[str, Field(max_length=64)],
            Annotated[list[_Value], Field(min_length=1, max_length=100)],
        ],
        Field(max_length=8),
    ] = {}  # noqa: RUF012 (pydantic copies it)
    seeds: Annotated[int, Field(ge=1, le=1000)] | None = None
    array: Annotated[int, Field(ge=1, le=1000)] | None = None
    halving: Annotated[int, Field(ge=2, le=16)] | None = None
    search: Literal["optuna"] | None = None
    trials: Annotated[int, Field(ge=1, le=1000)] | None = None
    parallel: Annotated[int, Field(ge=1, le=1000)] | None = None
    metric: Annotated[str, Field(max_length=64)] | None = None
    name: Annotated[str, Field(max_length=64)] | None = None


class SweepLine(BaseModel):
    """A sweep; `step` and `steps_total` are sums over its jobs, times are unix seconds."""

    model_config = ConfigDict(extra="ignore")

    id: str
    kind: str
    name: str | None
    tags: list[str]
    status: str
    paused: bool
    jobs: int
    statuses: dict[str, int]
    step: int
    steps_total: int | None
    created_at: float
    ended_at: float | None
    eta_s: float | None


class SweepJob(BaseModel):
    """One job of a sweep, with its score as of the last comparison."""

    id: str
    seed: int
    status: str
    step: int | None
    score: float | None
    error: str | None


class Point(BaseModel):
    """A combination of values: mean of the scores, and its 95 % interval over seeds."""

    values: dict[str, Any]
    step: int
    n: int
    mean: float | None
    low: float | None
    high: float | None
    dropped_at: int | None
    jobs: list[SweepJob]


class SweepView(SweepLine):
    """A sweep with its points; `best` is the index of the best one."""

    metric: str
    lower_is_better: bool
    halving: int | None
    search: dict[str, Any] | None  # sampler, trials and ranges
    rungs: list[int]
    decisions: list[dict[str, Any]]
    points: list[Point]
    best: int | None


class SweepList(BaseModel):
    """Sweeps, newest first."""

    data: list[SweepLine]


class SweepPlan(BaseModel):
    """The jobs that a request for a sweep would queue, or the problem; `param` is the request's
    field.

    `options` and `first_prompt` are those of the first job, `steps_total` the sum over all jobs.
    """

    problem: Problem | None = None
    kind: str | None = None
    options: dict[str, Any] | None = None
    varied: dict[str, list[Any]] | None = None
    jobs: int | None = None
    steps_total: int | None = None
    rungs: list[int] | None = None  # the steps at which combinations are compared
    metric: str | None = None
    first_prompt: FirstPrompt | None = None


@dataclass(frozen=True)
class _SweepRequest:
    """A request for a sweep, read: what `Groups.submit_sweep` takes."""

    kind: str
    values: dict[str, Any]
    given: dict[str, Any]
    queueing: Queueing


def _read_request(body: CreateSweep, state: AppState) -> _SweepRequest:
    """Read a request. Raises SpecError, and ApiError 404 for an unknown model."""
    kind, options = checked_options(body, state)
    http = methods.method_of(kind)
    assert http is not None
    known = methods.options_over_http(kind, http)
    for name in body.sweep:
        if name not in known and name != "seed":
            raise SpecError("sweep", f"must be of options of {kind} over HTTP, got {name!r}")
    _check_values(body, state, known)
    given = {name: getattr(body, name) for name in _FIELDS if getattr(body, name)}
    if not given:
        raise SpecError("sweep", "must be given, or else seeds or array, got none")
    check_name(state.config, body.name)
    values = {**state.config.defaults.get(kind, {}), **options}
    return _SweepRequest(kind, values, given, Queueing(name=body.name, tags=tuple(body.tags)))


@contextmanager
def _named_by_request(kind: str) -> Iterator[None]:
    """Name options in errors as the request names them."""
    try:
        yield
    except SpecError as error:
        own = (*_FIELDS, "name", "tag", "steps")
        raise (error if error.field in own else by_request(error, kind)) from error


@router.post("", response_model=SweepView)
async def create_sweep(body: CreateSweep, state: StateDep, caller: CallerDep, _: ChangeDep) -> Any:
    """Queue the jobs of a sweep."""
    if caller.key is not None:
        raise SpecError("Idempotency-Key", "must be left out for a sweep, got one")
    await state.queue_length(TRAIN)
    submitted_by = current_name()

    def submit() -> dict[str, Any]:
        request = _read_request(body, state)
        with _named_by_request(request.kind):
            sweep_id = state.client.groups.submit_sweep(
                request.kind,
                request.values,
                request.given,
                request.queueing,
                origin="http",
                submitted_by=submitted_by,
            )
        return state.client.groups.sweep(sweep_id)

    return await state.in_data_thread(submit)


@router.post("/check", response_model=SweepPlan)
async def check_sweep(body: CreateSweep, state: StateDep, _: ChangeDep) -> Any:
    """Check a sweep as `POST /v1/warmd/sweeps` does, and queue nothing."""

    def plan() -> dict[str, Any]:
        request = _read_request(body, state)
        with _named_by_request(request.kind):
            sweep, planned = sweep_plans.plan(
                state.client.jobs, request.kind, request.values, request.given, request.queueing
            )
        first = spec_class(sweep.kind).parse(sweep.document["spec"])
        search = sweep.search
        ranges = {name: one.text for name, one in search.ranges.items()} if search else {}
        return {
            "kind": sweep.kind,
            "options": without_paths(sweep.document["spec"]),
            "varied": {**sweep.axes, **{name: [text] for name, text in ranges.items()}},
            "jobs": search.trials * sweep.seeds if search else len(planned.members),
            "steps_total": steps_total(sweep, planned),
            "rungs": sweep.rungs,
            "metric": sweep.metric,
            "first_prompt": first_prompt(state, first),
        }

    try:
        return await state.in_data_thread(plan)
    except SpecError as error:
        return {"problem": Problem.of(error)}


def _check_values(body: CreateSweep, state: AppState, known: Mapping[str, OptionInfo]) -> None:
    """Raise SpecError for a value that a request must not name, as for a single job."""
    for name, values in body.sweep.items():
        if name == "seed" or known[name].type in (int, float):
            continue  # numbers, and ranges of them, are checked by the plan
        for value in values:
            read_options(body, state, {name: value})


@router.get("", response_model=SweepList)
async def list_sweeps(state: StateDep, limit: _Limit = 20) -> Any:
    """List sweeps, newest first."""
    return {"data": await state.in_thread(state.client.groups.sweeps, limit)}


@router.get("/{group_id}", response_model=SweepView)
async def show_sweep(group_id: str, state: StateDep) -> Any:
    """Show a sweep with the scores of its points."""
    found = await named.group_id(state, "sweep", group_id)
    return await state.in_thread(state.client.groups.sweep, found)


groups.add_actions(router, "sweep", Groups.sweep_members)

"""`/v1/warmd/runs`: trainings and evaluations with their options and metrics, for tables."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import BaseModel

from ....jobs import KINDS, spec_class
from ....jobs.errors import Conflict, SpecError
from ....jobs.ids import is_job_id, kind_of
from ...lifecycle import statuses
from ...lifecycle.view import JobFilter, listed_kinds
from ..core.state import AppState, StateDep
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from .jobs import Word, check_words

router = APIRouter(
    route_class=StrictRoute, prefix="/v1/warmd/runs", tags=["jobs"], responses=RESPONSES
)

_MAX_RUNS = 500  # of one page
_MAX_IDS = 100
_MAX_TEXT = 200  # characters of an option's value
_NOT_SHOWN = ("model", "against")  # options that are fields of a run, or an id


class RunMetric(BaseModel):
    """The last value of a metric with its 95 % interval, and the best, if it judges a run."""

    last: float
    best: float | None = None
    low: float | None = None
    high: float | None = None


class RunView(BaseModel):
    """A training or an evaluation. `options` are those that differ from the kind's defaults.

    Texts of options are cut to 200 characters. Metrics have the names of the curves: those of
    evaluations begin with `eval_`. Times are unix seconds.
    """

    id: str
    kind: str
    name: str | None
    tags: list[str]
    status: str
    paused: bool
    model: str | None
    init_from: str | None
    sweep: str | None
    curriculum: str | None
    submitted_by: str | None
    step: int
    steps_total: int | None
    rows_done: int | None
    rows_total: int | None
    error: str | None
    created_at: float | None
    started_at: float | None
    ended_at: float | None
    earlier_s: float
    eta_s: float | None
    options: dict[str, Any]
    metrics: dict[str, RunMetric]


class RunPage(BaseModel):
    """Runs, newest first.

    `defaults`: all options of the kinds on the page with their defaults. `groups`: the names of the
    sweeps and curricula on the page, by id.
    """

    data: list[RunView]
    has_more: bool
    defaults: dict[str, dict[str, Any]]
    groups: dict[str, str]


# Of a job's fields, and in a run.
_FIELDS = tuple(name for name in RunView.model_fields if name not in ("options", "metrics"))


@router.get("", response_model=RunPage)
async def list_runs(
    state: StateDep,
    kind: Annotated[list[Word], Query(max_length=20)] = [],  # noqa: B006 (FastAPI copies it)
    status: Annotated[list[Word], Query(max_length=20)] = [],  # noqa: B006
    name: Annotated[
        str | None, Query(max_length=200, description="A name; * and ? stand for any characters.")
    ] = None,
    tag: Annotated[list[Word], Query(max_length=20)] = [],  # noqa: B006
    id: Annotated[list[Word], Query(max_length=_MAX_IDS, description="Only these runs.")] = [],  # noqa: B006
    after: Annotated[str | None, Query(max_length=60, description="Only older runs.")] = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_RUNS)] = 100,
) -> Any:
    """List trainings and evaluations with their options and metrics, newest first."""
    known = listed_kinds()
    check_words("kind", kind, known)
    check_words("status", status, (*statuses.EVERY, statuses.UNREGISTERED))
    for field, ids in (("id", id), ("after", [after] if after is not None else [])):
        for one in ids:
            if not is_job_id(one) or kind_of(one) not in known:
                raise SpecError(field, f"must be the id of a run, got {one[:80]!r}")
    wanted = JobFilter(
        statuses=status or None,
        kinds=kind or known,
        name=name,
        tags=tuple(tag),
        older_than=after,
        limit=limit + 1,
    )

    def page() -> Response:
        jobs = state.client.jobs
        found = jobs.several(list(dict.fromkeys(id))) if id else jobs.all(wanted)
        # As JSON at once: a model of each of 500 runs would hold up other requests.
        return Response(
            orjson.dumps(_page(state, found[:limit], has_more=len(found) > limit)),
            media_type="application/json",
        )

    return await state.in_thread(page)


def _page(state: AppState, jobs: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    kinds = {job["kind"] for job in jobs}
    groups = {group for job in jobs if (group := job["sweep"] or job["curriculum"])}
    return {
        "data": [_run(state, job) for job in jobs],
        "has_more": has_more,
        "defaults": {kind: _defaults(kind) for kind in sorted(kinds & set(KINDS))},
        "groups": state.client.groups.names(sorted(groups)),
    }


def _run(state: AppState, job: Mapping[str, Any]) -> dict[str, Any]:
    rundir, kind = state.client.places.rundir(job["id"]), job["kind"]
    options: dict[str, Any] = {}
    with suppress(Conflict):  # its files are damaged or gone
        defaults = _defaults(kind)
        options = {
            name: _short(value)
            for name, value in rundir.read_spec()["spec"].items()
            if name in defaults and value != defaults[name]
        }
    fields = {name: job[name] for name in _FIELDS}
    return {**fields, "options": options, "metrics": state.run_metrics.of(rundir, kind)}


@cache
def _defaults(kind: str) -> dict[str, Any]:
    return {
        name: list(info.default) if isinstance(info.default, tuple) else info.default
        for name, info in spec_class(kind).options().items()
        if info.former is None and name not in _NOT_SHOWN
    }


def _short(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > _MAX_TEXT
    return f"{value[:_MAX_TEXT]}…" if is_long else value

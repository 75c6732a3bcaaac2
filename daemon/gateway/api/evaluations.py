"""`/v1/warmd/evaluations`: a model evaluated on a data set, and compared with an earlier one."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from ....jobs import spec_class
from ....jobs.errors import NotFound, SpecError
from ...lifecycle.view import JobView
from ..core.state import AppState, StateDep
from ..core.submitter import Submission
from ..core.waiters import CallerDep
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from . import methods
from .changes import ChangeDep

router = APIRouter(
    route_class=StrictRoute,
    prefix="/v1/warmd/evaluations",
    tags=["evaluations"],
    responses=RESPONSES,
)

_KIND = "eval"
_MAX_OPTIONS = 50


class CreateEvaluation(BaseModel):
    """An evaluation. `options` are those of `warmd eval`; `dataset` is the id of an uploaded file.

    With `against`, an evaluation on the same questions, the result has a comparison for each
    metric and its verdict in words.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=200)]
    against: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    options: Annotated[dict[str, Any], Field(max_length=_MAX_OPTIONS)] = {}


@router.post("", response_model=JobView)
async def create_evaluation(
    body: CreateEvaluation, state: StateDep, caller: CallerDep, _: ChangeDep
) -> Any:
    """Check and queue an evaluation."""
    await state.queue_length(spec_class(_KIND).queue)
    submission = await state.in_thread(_checked, body, state)
    try:
        job_id, _is_new = await state.submitter.submit(submission, caller)
    except SpecError as error:
        raise _by_request(error) from error
    return await state.in_thread(state.client.jobs.get, job_id)


def _checked(body: CreateEvaluation, state: AppState) -> Submission:
    """Return the job of a request. Raises SpecError, and ApiError 404 for an unknown model."""
    for name in ("model", "against"):
        if name in body.options:
            raise SpecError(f"options.{name}", f"must be the field {name} of the request")
    options = methods.evaluation(body.options, state.files, "options")
    state.model_index.check(body.model)
    if body.against is not None:
        try:
            state.client.rundir(body.against)
        except NotFound:
            problem = f"must be the id of an evaluation, got {body.against[:80]!r}"
            raise SpecError("against", problem) from None
    try:
        spec = state.parse(_KIND, {**options, "model": body.model, "against": body.against})
    except SpecError as error:
        raise _by_request(error) from error
    return Submission(spec)


def _by_request(error: SpecError) -> SpecError:
    """Return the error of an option with the name that the request has for it."""
    is_field = error.field in ("model", "against", "home") or error.field.startswith("options.")
    return error if is_field else SpecError(f"options.{error.field}", error.problem)

"""`/v1/warmd/evaluations`: a model evaluated on a data set, and compared with another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from ....jobs import spec_class
from ....jobs.errors import NotFound, SpecError
from ....jobs.eval import journal, summary
from ....jobs.ids import kind_of
from ...lifecycle.view import JobView
from ..core.state import AppState, StateDep
from ..core.submitter import Submission
from ..core.waiters import CallerDep
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from . import methods
from .changes import ChangeDep
from .fine_tuning import labels_of
from .named import JobDep

router = APIRouter(
    route_class=StrictRoute,
    prefix="/v1/warmd/evaluations",
    tags=["evaluations"],
    responses=RESPONSES,
)

_KIND = "eval"
_MAX_OPTIONS = 50
_MAX_QUESTIONS = 200  # of one page


class CreateEvaluation(BaseModel):
    """An evaluation. `options` are those of `warmd eval`; `dataset` is the id of an uploaded file.

    With `against`, an evaluation on the same questions, the result has a comparison for each
    metric and its verdict in words.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=200)]
    against: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    options: Annotated[dict[str, Any], Field(max_length=_MAX_OPTIONS)] = {}
    name: Annotated[str, Field(max_length=200)] | None = None
    tags: Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=100)] = []


class Question(BaseModel):
    """A question as `rows.jsonl` has it, and the same question of the other evaluation.

    `difference`: how much better the score in the primary metric is than that of the other
    evaluation; null if one of them has none.
    """

    row: dict[str, Any]
    other: dict[str, Any] | None
    difference: float | None


class QuestionPage(BaseModel):
    """Questions in their order; with `against`, the comparison of each metric as in a result.

    `total`: questions that fit. `better`, `worse`: those of all whose score differs.
    """

    data: list[Question]
    total: int
    better: int
    worse: int
    comparison: dict[str, dict[str, Any]] | None


@router.get("/{job_id}/questions", response_model=QuestionPage)
async def list_questions(
    job_id: JobDep,
    state: StateDep,
    against: Annotated[
        str | None, Query(max_length=64, description="An evaluation on the same questions.")
    ] = None,
    only: Annotated[
        Literal["better", "worse", "different"] | None,
        Query(description="Only questions whose score is so, compared with `against`."),
    ] = None,
    text: Annotated[
        str, Query(max_length=200, description="A part of a prompt, answer or completion.")
    ] = "",
    offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
    limit: Annotated[int, Query(ge=1, le=_MAX_QUESTIONS)] = 50,
) -> Any:
    """List the questions of an evaluation, side by side with those of another one."""

    def page() -> dict[str, Any]:
        rows = _rows(state, "job_id", job_id)
        other = _evaluation(state, against)
        others = [] if other is None else _rows(state, "against", other)
        pairing = summary.pair(others, rows) if others else None
        if others and pairing is None:
            raise SpecError("against", f"must share questions with {job_id}, got {against}")
        found = _questions(rows, others, pairing)
        signs = {"better": (1,), "worse": (-1,), "different": (1, -1)}
        kept = [
            one
            for one in found
            if (only is None or _sign(one["difference"]) in signs[only])
            and (not text or text in _text(one["row"]) or text in _text(one["other"]))
        ]
        return {
            "data": kept[offset : offset + limit],
            "total": len(kept),
            "better": 0 if pairing is None else len(pairing.gained),
            "worse": 0 if pairing is None else len(pairing.lost),
            "comparison": None if pairing is None else pairing.to_json(),
        }

    return await state.in_data_thread(page)


def _rows(state: AppState, field: str, job_id: str) -> list[dict[str, Any]]:
    """Return the questions that an evaluation has answered. Raises SpecError and NotFound."""
    path = state.client.rundir(job_id).path / journal.ROWS
    if kind_of(job_id) != _KIND:
        raise SpecError(field, f"must be the id of an evaluation, got {job_id}")
    return journal.read(path) if path.is_file() else []


def _questions(
    rows: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    pairing: summary.Pairing | None,
) -> list[dict[str, Any]]:
    by_question = {row["question"]: row for row in others}
    metric = next(iter(pairing.comparisons)) if pairing else None
    changes = {one.after["question"]: one.difference for one in pairing.changes} if pairing else {}
    found = []
    for row in rows:
        other = by_question.get(row["question"])
        is_scored = other is not None and metric in row["metrics"] and metric in other["metrics"]
        difference = changes.get(row["question"], 0.0) if is_scored else None
        found.append({"row": row, "other": other, "difference": difference})
    return found


def _sign(difference: float | None) -> int:
    return 0 if not difference else 1 if difference > 0 else -1


def _text(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    texts = [str(one.get("text", "")) for one in row.get("completions", ())]
    return "\n".join([str(row.get("prompt", "")), str(row.get("answer", "")), *texts])


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
    model = state.model_index.known(body.model)
    against = _evaluation(state, body.against)
    try:
        spec = state.parse(_KIND, {**options, "model": model, "against": against})
    except SpecError as error:
        raise _by_request(error) from error
    return Submission(spec, labels=labels_of(state, body.name, body.tags, name_field="name"))


def _evaluation(state: AppState, text: str | None) -> str | None:
    """Return the id of the evaluation that an id or a name names. Raises SpecError."""
    if text is None:
        return None
    try:
        job_id = state.client.jobs.named(text, (_KIND,))
        state.client.rundir(job_id)
    except NotFound:
        problem = f"must be an evaluation, by id or name, got {text[:80]!r}"
        raise SpecError("against", problem) from None
    except SpecError as error:
        raise SpecError("against", error.problem) from None
    return job_id


def _by_request(error: SpecError) -> SpecError:
    """Return the error of an option with the name that the request has for it."""
    is_field = error.field in ("model", "against", "home") or error.field.startswith("options.")
    return error if is_field else SpecError(f"options.{error.field}", error.problem)

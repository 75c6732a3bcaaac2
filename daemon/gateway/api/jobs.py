"""`/v1/warmd/jobs`: jobs of all kinds, and the actions on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from ....jobs import KINDS
from ....jobs.errors import SpecError
from ....jobs.ids import is_id_prefix, is_job_id
from ...lifecycle import statuses
from ...lifecycle.remove import refuse_removal
from ...lifecycle.view import JobFilter, JobView
from ...reports.diff import Difference, differences
from ..core.state import AppState, StateDep
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from . import methods
from .changes import ChangeDep, Nothing
from .named import JobDep, OtherJobDep

router = APIRouter(
    route_class=StrictRoute, prefix="/v1/warmd/jobs", tags=["jobs"], responses=RESPONSES
)

_MAX_JOBS = 200  # of one page of the list
Word = Annotated[str, Field(max_length=64)]  # of a list in a query: a kind, a status, a tag, an id
_MAX_CHANGES = 20  # options changed by one resume


class JobPage(BaseModel):
    """Jobs, newest first."""

    data: list[JobView]
    has_more: bool


class JobDetail(BaseModel):
    """A job with its options, and their earlier values if it was resumed with changed ones."""

    job: JobView
    options: dict[str, Any]
    revisions: list[dict[str, Any]]
    weights: dict[str, Any] | None  # the model that the job started from


class Differences(BaseModel):
    """What two jobs do not share; null: a job has none."""

    data: list[Difference]


class Outcome(BaseModel):
    """The outcome for a job in one word: canceled, stopping, paused, queued, …"""

    id: str
    outcome: str


class Pause(BaseModel):
    """How to pause a job."""

    model_config = ConfigDict(extra="forbid", strict=True)

    release: Annotated[bool, Field(description="Save and free the memory.")] = False


class Resume(BaseModel):
    """How to resume a job: `changes` has options that may change, such as `steps`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    changes: Annotated[
        dict[
            Annotated[str, Field(max_length=64)],
            Annotated[str, Field(max_length=200)] | int | float | bool | None,
        ],
        Field(max_length=_MAX_CHANGES),
    ] = {}


class Move(BaseModel):
    """Where in its queue a job is to wait, 1 for the next; beyond the end means last."""

    model_config = ConfigDict(extra="forbid", strict=True)

    position: Annotated[int, Field(ge=1, le=1_000_000)]


class Removed(BaseModel):
    """A removed job, and the bytes that were freed."""

    id: str
    bytes: int


@router.get("", response_model=JobPage)
async def list_jobs_of_all_kinds(
    state: StateDep,
    kind: Annotated[list[Word], Query(max_length=20)] = [],  # noqa: B006 (FastAPI copies it)
    status: Annotated[list[Word], Query(max_length=20)] = [],  # noqa: B006
    name: Annotated[
        str | None, Query(max_length=200, description="A name; * and ? stand for any characters.")
    ] = None,
    tag: Annotated[list[Word], Query(max_length=20)] = [],  # noqa: B006
    text: Annotated[str, Query(max_length=40, description="A part of the id.")] = "",
    after: Annotated[str | None, Query(max_length=60, description="Only older jobs.")] = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_JOBS)] = 50,
) -> Any:
    """List jobs, newest first."""
    check_words("kind", kind, tuple(KINDS))
    check_words("status", status, (*statuses.EVERY, statuses.UNREGISTERED))
    if text and not is_id_prefix(text):
        raise SpecError("text", f"must be a part of a job id, got {text!r}")
    if after is not None and not is_job_id(after):
        raise SpecError("after", f"must be a job id, got {after!r}")

    def page() -> dict[str, Any]:
        found = state.client.jobs.all(
            JobFilter(
                statuses=status or None,
                kinds=kind or None,
                name=name,
                tags=tuple(tag),
                text=text,
                older_than=after,
                limit=limit + 1,
            )
        )
        return {"data": found[:limit], "has_more": len(found) > limit}

    return await state.in_thread(page)


def check_words(field: str, words: list[str], known: tuple[str, ...]) -> None:
    """Raise SpecError for a word of a filter that is not known."""
    for word in words:
        if word not in known:
            raise SpecError(field, f"must be one of {', '.join(known)}, got {word[:40]!r}")


@router.get("/{job_id}", response_model=JobDetail)
async def show_job(job_id: JobDep, state: StateDep) -> Any:
    """Show a job with its options."""

    def detail() -> dict[str, Any]:
        document = state.client.rundir(job_id).read_spec()
        return {
            "job": state.client.jobs.get(job_id),
            "options": document["spec"],
            "revisions": document.get("revisions", []),
            "weights": document.get("model"),
        }

    return await state.in_thread(detail)


@router.get("/{job_id}/diff/{other_id}", response_model=Differences)
async def compare_jobs(job_id: JobDep, other_id: OtherJobDep, state: StateDep) -> Any:
    """Compare two jobs: options, model, data, code, versions and results."""

    def compare() -> dict[str, Any]:
        one, other = map(state.client.rundir, (job_id, other_id))
        return {"data": differences(one, other)}

    return await state.in_thread(compare)


@router.post("/{job_id}/cancel", response_model=Outcome)
async def cancel_any_job(job_id: JobDep, body: Nothing, state: StateDep, _: ChangeDep) -> Any:
    """Remove a waiting job from its queue, or save and stop a running one."""
    return await _outcome(state, job_id, state.client.jobs.cancel)


@router.post("/{job_id}/kill", response_model=Outcome)
async def kill_job(job_id: JobDep, body: Nothing, state: StateDep, _: ChangeDep) -> Any:
    """Stop a job at once; work since its last checkpoint is lost."""
    return await _outcome(state, job_id, state.client.jobs.kill)


@router.post("/{job_id}/pause", response_model=Outcome)
async def pause_any_job(job_id: JobDep, body: Pause, state: StateDep, _: ChangeDep) -> Any:
    """Pause a job at the end of its step."""

    def pause(found: str) -> str:
        return state.client.jobs.pause(found, release=body.release)

    return await _outcome(state, job_id, pause)


@router.post("/{job_id}/unpause", response_model=Outcome)
async def unpause_job(job_id: JobDep, body: Nothing, state: StateDep, _: ChangeDep) -> Any:
    """Continue a paused job."""
    return await _outcome(state, job_id, state.client.jobs.unpause)


@router.post("/{job_id}/resume", response_model=Outcome)
async def resume_any_job(job_id: JobDep, body: Resume, state: StateDep, _: ChangeDep) -> Any:
    """Queue an ended job again; it resumes from its latest checkpoint."""

    def resume(found: str) -> str:
        methods.check_changes(state.client.jobs.get(found)["kind"], body.changes)
        return state.client.jobs.resume(found, changes=body.changes)

    return await _outcome(state, job_id, resume)


@router.post("/{job_id}/move", response_model=Outcome)
async def move_job(job_id: JobDep, body: Move, state: StateDep, _: ChangeDep) -> Any:
    """Move a queued job within its queue."""

    def move(found: str) -> str:
        return f"position {state.client.jobs.move(found, body.position)}"

    return await _outcome(state, job_id, move)


@router.post("/{job_id}/remove", response_model=Removed)
async def remove_job(job_id: JobDep, body: Nothing, state: StateDep, _: ChangeDep) -> Any:
    """Remove an ended job: its files, checkpoints and trained model."""

    def remove() -> dict[str, Any]:
        state.client.rundir(job_id)
        needed_by = state.client.jobs.needed().get(job_id, [])
        refuse_removal(state.client.jobs.get(job_id), needed_by)
        return {"id": job_id, "bytes": state.client.jobs.remove(job_id)}

    return await state.in_thread(remove)


async def _outcome(state: AppState, job_id: str, act: Callable[[str], str]) -> dict[str, str]:
    await state.in_thread(state.client.rundir, job_id)  # NotFound, also for an invalid id
    return {"id": job_id, "outcome": await state.in_thread(act, job_id)}

"""`/v1/warmd/jobs/ID/…`: events of a job, as a list and live, its curves, completions and log."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Header, Query
from fastapi.responses import Response
from pydantic import BaseModel

from ....jobs.context import step_of
from ....jobs.errors import CheckpointDamaged
from ...runs import events
from ...runs.checkpoints import Checkpoints, size_bytes
from ...runs.downsampling import downsample
from ..core import kept_completions, live
from ..core.event_reader import JobState
from ..core.state import AppState, StateDep
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from .named import JobDep

router = APIRouter(
    route_class=StrictRoute, prefix="/v1/warmd/jobs/{job_id}", tags=["jobs"], responses=RESPONSES
)

_MAX_EVENTS = 1000  # of one request
_MAX_POINTS = 2000  # of a curve
_MAX_LOG = 256 * 1024  # bytes
_MAX_COMPLETIONS = 10_000  # of one request

_Step = Annotated[int | None, Query(ge=0)]
_Seq = Annotated[int | None, Query(ge=0, lt=2**53)]


class EventPage(BaseModel):
    """Events, oldest first; each has `seq`, `execution`, `time`, `type` and `step`.

    `seq` is that of the job's last event, also of one that is left out; 0: it has none.
    """

    data: list[dict[str, Any]]
    seq: int


class Summary(BaseModel):
    """A metric: its mean, least and largest value in each stretch of steps."""

    mean: list[float | None]
    min: list[float | None]
    max: list[float | None]


class Curves(BaseModel):
    """The metrics of a job in few points: each stands for a stretch of steps, and its end."""

    seq: int  # of the last event that is part of them
    total: int  # steps
    steps: list[int]
    times: list[float]
    tokens: list[int | None]
    metrics: dict[str, Summary]


class Completions(BaseModel):
    """Completions with their rewards, and the steps of which some are kept.

    `step` is the step of all of them; null if they are of several steps, or if there are none.
    """

    step: int | None
    samples: list[dict[str, Any]]
    steps: list[int]
    first_step: int | None
    last_step: int | None
    previous_step: int | None
    next_step: int | None


class CheckpointView(BaseModel):
    """A checkpoint on disk."""

    step: int
    bytes: int
    saved_at: float | None
    metrics: dict[str, Any]
    is_best: bool
    error: str | None


class CheckpointPage(BaseModel):
    """All checkpoints of a job, oldest first."""

    data: list[CheckpointView]


@router.get("/events", response_model=EventPage)
async def list_job_events(
    job_id: JobDep,
    state: StateDep,
    limit: Annotated[int, Query(ge=1, le=_MAX_EVENTS)] = 200,
    without: Annotated[
        list[str], Query(max_length=20, description="Types of events that are left out.")
    ] = [],  # noqa: B006 (FastAPI copies it)
) -> Any:
    """List the newest events of a job."""

    def read() -> dict[str, Any]:
        path = state.client.rundir(job_id).events
        if not without:
            found = events.newest(path, limit)
            return {"data": found[::-1], "seq": found[0]["seq"] if found else 0}
        # The wanted ones may be anywhere in the file, such as `begin` before many steps.
        seq, wanted = 0, deque[dict[str, Any]](maxlen=limit)
        for event in events.read(path):
            seq = event["seq"]
            if event["type"] not in without:
                wanted.append(event)
        return {"data": list(wanted), "seq": seq}

    return await state.in_thread(read)


@router.get("/events/stream", response_class=Response, responses=live.STREAM)
async def stream_job_events(
    job_id: JobDep,
    state: StateDep,
    after: _Seq = None,
    last_event_id: Annotated[str | None, Header(pattern="^[0-9]{1,15}$")] = None,
) -> Response:
    """Send the events of a job as they happen, until it ends.

    Each has its `seq` as id. An interrupted stream continues after `Last-Event-ID`, which browsers
    send, else after `after`. The event `state` has the job's status and queue position; after the
    event `end` nothing follows.
    """
    await state.in_thread(state.client.rundir, job_id)
    seen = int(last_event_id) if last_event_id is not None else after or 0
    return live.response(_events_of(state, job_id, seen))


async def _events_of(state: AppState, job_id: str, after: int) -> AsyncGenerator[bytes, None]:
    shown = None
    async for items in state.event_reader.follow(job_id, after=after, is_paced=True):
        parts = []
        for item in items:
            if not isinstance(item, JobState):
                parts.append(live.event(item, id=item["seq"]))
            elif item != shown:
                shown = item
                found = {"status": item.status, "position": item.position}
                parts.append(live.event(found, name="state"))
        yield b"".join(parts) or live.SILENT
    yield live.event({}, name="end")


@router.get("/curves", response_model=Curves)
async def show_curves(
    job_id: JobDep,
    state: StateDep,
    points: Annotated[int, Query(ge=10, le=_MAX_POINTS)] = 400,
    first: _Step = None,
    last: _Step = None,
) -> Any:
    """Return all metrics of a job between two steps, in at most `points` points."""

    def read() -> dict[str, Any]:
        path = state.client.rundir(job_id).events
        return downsample(events.read(path), points=points, first=first or 0, last=last)

    return await state.in_thread(read)


@router.get("/completions", response_model=Completions)
async def show_completions(
    job_id: JobDep,
    state: StateDep,
    step: _Step = None,
    row: Annotated[
        int | None, Query(ge=0, lt=2**53, description="Row of the prompt in the data.")
    ] = None,
    text: Annotated[
        str, Query(max_length=200, description="Text in completions, in upper or lower case.")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=_MAX_COMPLETIONS)] = _MAX_COMPLETIONS,
) -> Any:
    """Return the logged completions of a step, at most `limit`, the latest ones.

    Without `step`: with `row` or `text` those of all steps, else those of the latest step.
    """

    def read() -> bytes:
        rundir = state.client.rundir(job_id)
        # FastAPI would take longer to check thousands of texts than to find them.
        found = kept_completions.find(rundir, step=step, row=row, text=text, limit=limit)
        return orjson.dumps(found)

    return Response(await state.in_thread(read), media_type="application/json")


@router.get("/checkpoints", response_model=CheckpointPage)
async def list_job_checkpoints(job_id: JobDep, state: StateDep) -> Any:
    """List the checkpoints of a job."""

    def read() -> dict[str, Any]:
        found = Checkpoints(state.client.rundir(job_id).checkpoints)
        best = found.best_one()
        return {"data": [_checkpoint(found, path, path == best) for path in found.list()]}

    return await state.in_thread(read)


def _checkpoint(found: Checkpoints, path: Any, is_best: bool) -> dict[str, Any]:
    about, error = {}, None
    try:
        about = found.about(path)
    except CheckpointDamaged as damage:
        error = str(damage)
    return {
        "step": step_of(path),
        "bytes": size_bytes(path),
        "saved_at": about.get("time"),
        "metrics": about.get("metrics", {}),
        "is_best": is_best,
        "error": error,
    }


@router.get("/log", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def show_log(job_id: JobDep, state: StateDep) -> Response:
    """Return the end of a job's log: the output of libraries and of your code."""

    def read() -> bytes:
        path = state.client.rundir(job_id).log
        if not path.is_file():
            return b""
        with open(path, "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _MAX_LOG, 0))
            return file.read(_MAX_LOG)

    text = (await state.in_thread(read)).decode(errors="replace")
    return Response(text, media_type="text/plain; charset=utf-8")

"""`/v1/warmd/overview`: the daemon, its queues and models, the machine and the pending jobs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel

from ....configs.tokens import RIGHTS
from ...lifecycle.view import JobView
from ..core import live
from ..core.state import AppState, StateDep
from ..http.client import current
from ..http.errors import RESPONSES
from ..http.rights import READ
from ..http.strict import StrictRoute

router = APIRouter(
    route_class=StrictRoute, prefix="/v1/warmd/overview", tags=["operation"], responses=RESPONSES
)


class Machine(BaseModel):
    """The machine that the daemon runs on; the disk is that of its home."""

    cores: int
    load: float
    memory_bytes: int
    memory_free_bytes: int
    disk_bytes: int
    disk_free_bytes: int


class GroupView(BaseModel):
    """A sweep or a curriculum; `kind` is that of its jobs.

    `active`: whether the daemon has decisions left to make in it. `phase`: running, paused or
    canceled, as last requested; that of a curriculum is finished or failed once it has ended.
    `changed_at` (unix seconds): when jobs were added or a decision made; changes of its jobs are in
    `jobs`.
    """

    id: str
    kind: str
    name: str | None
    active: bool
    phase: str
    changed_at: float


class OverviewView(BaseModel):
    """The fields of `warmd status --json`, the machine, and the jobs that run or wait.

    While the daemon does not reply, `problem` says why, and its fields are null.
    """

    problem: str | None
    machine: Machine
    jobs: list[JobView]
    gone: list[str]  # ids of jobs that were removed; only in changes
    groups: list[GroupView]  # the newest, and all active ones
    page: str  # the setting http_page
    may: list[str]  # what the client may do on the page: read, infer, train
    daemon: dict[str, Any] | None = None
    server: dict[str, Any] | None = None
    zygote: dict[str, Any] | None = None
    models: list[dict[str, Any]] | None = None
    workers: list[dict[str, Any]] | None = None
    queues: list[dict[str, Any]] | None = None


@router.get("", response_model=OverviewView)
async def show_overview(state: StateDep) -> Any:
    """Show the daemon, its queues and models, the machine and the pending jobs."""
    return {**await state.overview.snapshot(), "may": _may(state)}


@router.get("/stream", response_class=Response, responses=live.STREAM)
async def stream_overview(state: StateDep) -> Response:
    """Send the overview as event `snapshot`, then its changes as events `change`.

    A change has the keys of the overview that changed; its `jobs` has the jobs that changed. Every
    connection begins with a snapshot, so nothing is missed by connecting again.
    """
    return live.response(state.overview.watch(may=_may(state)))


def _may(state: AppState) -> list[str]:
    client = current()
    assert client is not None
    rights = {READ} if state.config.http_page == "read" else client.rights
    return [right for right in RIGHTS if right in rights]

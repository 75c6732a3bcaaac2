"""The routes that steer and remove a group of jobs: the same for sweeps and curricula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from ...client.groups import Groups
from ..core.state import AppState, StateDep
from . import named
from .changes import ChangeDep, Nothing
from .jobs import Pause


class Outcome(BaseModel):
    """The outcome for the jobs of a group, in words."""

    id: str
    outcome: str


class Removed(BaseModel):
    """A removed group, and the bytes that were freed."""

    id: str
    bytes: int


def add_actions(router: APIRouter, noun: str, find: Callable[[Groups, str], Any]) -> None:
    """Add the routes to a group's router; `find` raises NotFound for other ids.

    `noun`: the kind of the group, which begins its ids.
    """

    async def act(state: AppState, text: str, how: Callable[[str], str]) -> dict[str, str]:
        group_id = await named.group_id(state, noun, text)
        await state.in_thread(find, state.client.groups, group_id)
        return {"id": group_id, "outcome": await state.in_thread(how, group_id)}

    @router.post("/{group_id}/pause", response_model=Outcome, summary=f"Pause a {noun}")
    async def pause(group_id: str, body: Pause, state: StateDep, _: ChangeDep) -> Any:
        return await act(
            state, group_id, lambda found: state.client.jobs.pause(found, release=body.release)
        )

    @router.post("/{group_id}/remove", response_model=Removed, summary=f"Remove an ended {noun}")
    async def remove(group_id: str, body: Nothing, state: StateDep, _: ChangeDep) -> Any:
        def with_its_jobs(found: str) -> dict[str, Any]:
            find(state.client.groups, found)
            state.client.jobs.check_removal([found])
            return {"id": found, "bytes": state.client.jobs.remove(found)}

        found = await named.group_id(state, noun, group_id)
        return await state.in_thread(with_its_jobs, found)

    @router.post(
        "/{group_id}/{action}",
        response_model=Outcome,
        summary=f"Cancel, kill, continue or resume a {noun}",
    )
    async def steer(
        group_id: str,
        action: Literal["cancel", "kill", "unpause", "resume"],
        body: Nothing,
        state: StateDep,
        _: ChangeDep,
    ) -> Any:
        jobs = state.client.jobs
        how = {
            "cancel": jobs.cancel,
            "kill": jobs.kill,
            "unpause": jobs.unpause,
            "resume": jobs.resume,
        }
        return await act(state, group_id, how[action])

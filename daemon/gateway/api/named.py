"""Jobs and groups in the path of a request: by id, by name, or `-` for the latest."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path

from ....jobs import KINDS
from ....jobs.ids import is_job_id
from ..core.state import AppState, StateDep
from ..http.encoded_slashes import SLASH
from .methods import method_of

_Job = Annotated[str, Path(description="The id or the name of a job; -: the latest one.")]


def text_of(segment: str) -> str:
    """Return the name in a segment of a path, in which an encoded slash is still encoded."""
    return segment.replace(SLASH, "/")


async def _job(job_id: _Job, state: StateDep) -> str:
    """Return the id of a training, an evaluation or any other job."""
    if is_job_id(job_id):  # needs no thread
        return job_id
    return await state.in_thread(state.client.jobs.named, text_of(job_id))


async def _other_job(other_id: _Job, state: StateDep) -> str:
    return await _job(other_id, state)


async def _training(job_id: _Job, state: StateDep) -> str:
    """Return the id of a job that the fine-tuning API has."""
    if is_job_id(job_id):
        return job_id
    kinds = tuple(kind for kind in KINDS if method_of(kind) is not None)
    return await state.in_thread(state.client.jobs.named, text_of(job_id), kinds)


async def group_id(state: AppState, kind: str, segment: str) -> str:
    """Return the id of the group of a kind that a segment of a path names."""
    return await state.in_thread(state.client.groups.named, kind, text_of(segment))


JobDep = Annotated[str, Depends(_job)]
OtherJobDep = Annotated[str, Depends(_other_job)]
TrainingDep = Annotated[str, Depends(_training)]

"""`/v1/models`: the models that a request may name."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from ..core.state import StateDep
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from . import named

router = APIRouter(
    route_class=StrictRoute, prefix="/v1/models", tags=["models"], responses=RESPONSES
)


class Model(BaseModel):
    """A model for inference or training."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    """All models."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.get("", response_model=ModelList)
async def list_models(state: StateDep) -> Any:
    """List the warm models and the models that finished jobs trained."""
    return {"data": await state.in_thread(state.model_index.all)}


@router.get("/{name}", response_model=Model)
async def retrieve_model(name: str, state: StateDep) -> Any:
    """Show one model; by the name of a job, a sweep or a curriculum, the model that it means."""
    return await state.in_thread(state.model_index.found, named.text_of(name))

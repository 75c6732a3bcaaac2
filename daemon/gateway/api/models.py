"""`/v1/models`: what may be named as `model`."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from ..core.state import GateDep
from ..http.errors import RESPONSES

router = APIRouter(prefix="/v1/models", tags=["models"], responses=RESPONSES)


class Model(BaseModel):
    """A model that answers or can be trained."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    """Every model."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.get("", response_model=ModelList)
async def list_models(gate: GateDep) -> Any:
    """List the warm models and those of finished jobs."""
    return {"data": await gate.blocking(gate.catalogue.all)}


@router.get("/{name}", response_model=Model)
async def retrieve_model(name: str, gate: GateDep) -> Any:
    """Show one model."""
    await gate.blocking(gate.catalogue.check, name)
    return await gate.blocking(gate.catalogue.find, name)

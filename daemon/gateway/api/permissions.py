"""`/v1/fine_tuning/checkpoints/ID/permissions`: OpenAI's permissions, refused by name."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ..http.errors import RESPONSES, ApiError
from ..http.strict import StrictRoute

router = APIRouter(
    route_class=StrictRoute,
    prefix="/v1/fine_tuning/checkpoints/{checkpoint}/permissions",
    tags=["training"],
    responses=RESPONSES,
)


@router.get("")
@router.post("")
@router.delete("/{permission_id}")
async def refuse_permissions(checkpoint: str, permission_id: str = "") -> Any:
    """Refuse: there are no projects to share a checkpoint with."""
    raise ApiError(
        400,
        "permissions: not supported: every client may name every model; `warmd token` says who is "
        "a client",
        code="unsupported",
    )

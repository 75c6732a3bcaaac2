"""`/health`, `/livez` and `/readyz` for load balancers, `/metrics` for Prometheus."""

from __future__ import annotations

from typing import Any, Literal

import redis
from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from ..core.state import StateDep
from ..http.errors import RESPONSES, ErrorBody, unavailable
from ..http.strict import StrictRoute

router = APIRouter(route_class=StrictRoute, tags=["operation"])


class Health(BaseModel):
    """Yes. A problem is an error."""

    status: Literal["ok"]


@router.head("/health", include_in_schema=False)
@router.get("/health", response_model=Health, responses={503: {"model": ErrorBody}})
async def health(state: StateDep) -> Any:
    """Report whether a worker can take requests."""
    reason = await state.unready_reason.get()
    if reason is not None:
        raise unavailable(reason)
    return JSONResponse({"status": "ok"})


@router.head("/livez", include_in_schema=False)
@router.get("/livez", response_model=Health)
async def livez() -> Any:
    """Report that the gateway is live, also while models load or Redis is unreachable."""
    return JSONResponse({"status": "ok"})


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", response_model=Health, responses={503: {"model": ErrorBody}})
async def readyz(state: StateDep) -> Any:
    """Report whether the gateway accepts requests, which may have to wait for a worker."""
    try:
        await state.redis.ping()
    except redis.RedisError as error:
        raise unavailable(f"Redis is unreachable: {error}") from error
    return JSONResponse({"status": "ok"})


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses={s: RESPONSES[s] for s in (401, 403, 503)},
)
async def metrics(state: StateDep) -> Response:
    """Return counters and gauges in Prometheus' text format."""
    return Response(await state.in_thread(state.metrics.text), media_type=CONTENT_TYPE_LATEST)

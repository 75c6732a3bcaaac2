"""`/health`, `/livez` and `/readyz` for load balancers, `/metrics` for Prometheus."""

from __future__ import annotations

from typing import Any, Literal

import redis
from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from ....configs.config import DaemonConfig
from ....configs.queues import INFER
from ....jobs.errors import Unavailable
from ...client import control
from ...client.client import Client
from ..core.state import StateDep
from ..http.errors import RESPONSES, ErrorBody, unavailable

router = APIRouter(tags=["operation"])

_TIMEOUT_S = 5.0  # for the daemon's reply: the wait holds one of few threads


class Health(BaseModel):
    """Yes. A problem is an error."""

    status: Literal["ok"]


def unready_reason(config: DaemonConfig, client: Client) -> str | None:
    """Return why no worker can take requests now, or None. Asks the daemon, or Redis for nodes."""
    if not config.workers:
        return None if client.serving(INFER) else "no node takes jobs of the queue infer"
    if not any(worker.queue == INFER for worker in config.workers):
        return "the daemon has no worker for the queue infer"
    ready = control.ready(config, timeout_s=_TIMEOUT_S)
    if not ready["zygote"]:
        return "libraries and models are loading"
    if INFER not in ready["queues"]:
        return "the workers of the queue infer are starting"
    return None


@router.get("/health", response_model=Health, responses={503: {"model": ErrorBody}})
async def health(state: StateDep) -> Any:
    """Report whether a worker can take requests."""
    try:
        reason = await state.in_control_thread(unready_reason, state.config, state.client)
    except Unavailable as error:
        reason = str(error)
    if reason is not None:
        raise unavailable(reason)
    return JSONResponse({"status": "ok"})


@router.get("/livez", response_model=Health)
async def livez() -> Any:
    """Report that the gateway is live, also while models load or Redis is unreachable."""
    return JSONResponse({"status": "ok"})


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

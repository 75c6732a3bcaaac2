"""`/health` and `/metrics`: for whoever watches over the machine."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from ....configs.config import DaemonConfig
from ....configs.queues import INFER
from ....jobs.errors import Unavailable
from ...client import control
from ..core.state import GateDep
from ..http.errors import RESPONSES, ErrorBody, unavailable

router = APIRouter(tags=["operation"])

_PATIENCE_S = 5.0  # with a daemon that does not answer: a thread waits, and there are few


class Health(BaseModel):
    """Somebody can answer."""

    status: Literal["ok"]


def why_not(config: DaemonConfig) -> str | None:
    """Return why no worker can answer just now; None when one can. Asks the daemon."""
    if not any(worker.queue == INFER for worker in config.workers):
        return "no worker of the daemon takes the queue infer"
    ready = control.ready(config, timeout_s=_PATIENCE_S)
    if not ready["zygote"]:
        return "the libraries and models are being loaded"
    if INFER not in ready["queues"]:
        return "the workers of the queue infer are being started"
    return None


@router.get("/health", response_model=Health, responses={503: {"model": ErrorBody}})
async def health(gate: GateDep) -> Any:
    """Tell whether a worker can answer."""
    try:
        reason = await gate.asking(why_not, gate.config)
    except Unavailable as error:
        reason = str(error)
    if reason is not None:
        raise unavailable(reason)
    return JSONResponse({"status": "ok"})


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses={s: RESPONSES[s] for s in (401, 403, 503)},
)
async def metrics(gate: GateDep) -> Response:
    """Return counters and gauges in Prometheus' text format."""
    return Response(await gate.blocking(gate.metrics.text), media_type=CONTENT_TYPE_LATEST)

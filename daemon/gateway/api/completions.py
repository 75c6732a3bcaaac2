"""`/v1/completions`: a text, gone on with by an infer job."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from ..core import answers, sse
from ..core.sampling import FinishReason, SamplingRequest, Unserved, Usage, usage_of
from ..core.state import GateDep
from ..core.submitter import Order
from ..core.waiters import CallerDep
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from .chat import STREAMED

router = APIRouter(route_class=StrictRoute, tags=["inference"], responses=RESPONSES)

_Prompt = Annotated[str, Field(min_length=1)]


class CompletionRequest(SamplingRequest):
    """A text to go on with."""

    prompt: _Prompt | Annotated[list[_Prompt], Field(fail_fast=True, min_length=1, max_length=1)]
    echo: Unserved = None
    suffix: Unserved = None
    best_of: Unserved = None


class CompletionChoice(BaseModel):
    """One of the completions."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: None = None


class Completion(BaseModel):
    """What the model wrote; `timings` is warmd's own."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None
    timings: dict[str, Any]


@router.post("/v1/completions", response_model=Completion, responses=STREAMED)
async def create_completion(
    body: CompletionRequest, gate: GateDep, caller: CallerDep, request: Request
) -> Response:
    """Go on with a text, at once or piece by piece."""
    await gate.blocking(gate.catalogue.check, body.model)
    prompt = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
    spec = gate.parse("infer", body.options() | {"prompt": prompt})
    job_id, headers = await answers.submit(gate, caller, Order(spec))
    head = {
        "id": f"cmpl-{job_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
    }
    if body.stream:
        return sse.response(
            gate,
            caller,
            job_id,
            headers,
            chunk=head,
            opening=(),
            on_text=lambda piece: _choice(piece.index, piece.text),
            on_end=lambda choice: _choice(choice["index"], "", choice["finish_reason"]),
            wants_usage=body.wants_usage,
        )
    result = await answers.whole(gate, request, caller, job_id)
    gate.metrics.count_tokens(result["usage"])
    answer = {
        **head,
        "choices": [_choice(c["index"], c["text"], c["finish_reason"]) for c in result["choices"]],
        "usage": usage_of(result),
        "system_fingerprint": answers.fingerprint_of(result.get("weights")),
        "timings": result["timings"],
    }
    return JSONResponse(answer, headers=headers)


def _choice(index: int, text: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": reason, "logprobs": None}

"""`/v1/completions`: text completion by an infer job."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, BeforeValidator, Field

from ..core import answers, sse
from ..core.sampling import (
    FinishReason,
    OneOnly,
    SamplingRequest,
    Unsupported,
    Usage,
    usage_of,
)
from ..core.state import StateDep
from ..core.submitter import Submission
from ..core.waiters import CallerDep
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from .chat import STREAMED

router = APIRouter(route_class=StrictRoute, tags=["inference"], responses=RESPONSES)


def _one_prompt(value: object) -> object:
    if isinstance(value, list) and not (len(value) == 1 and isinstance(value[0], str)):
        raise ValueError(
            "lists of prompts and of token ids are not supported: send one text per request"
        )
    return value


_Prompt = Annotated[str, Field(min_length=1)]


class CompletionRequest(SamplingRequest):
    """A prompt to complete: a text, or a list with one text."""

    prompt: Annotated[
        _Prompt | Annotated[list[_Prompt], Field(min_length=1, max_length=1)],
        BeforeValidator(_one_prompt),
    ]
    best_of: OneOnly = None
    echo: Unsupported = None
    suffix: Unsupported = None


class CompletionChoice(BaseModel):
    """One completion."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: None = None


class Completion(BaseModel):
    """The response to a prompt; `timings` is a warmd extension."""

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
    body: CompletionRequest, state: StateDep, caller: CallerDep, request: Request
) -> Response:
    """Complete a prompt, whole or streamed."""
    await state.in_thread(state.model_index.check, body.model)
    prompt = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
    spec = state.parse("infer", body.options() | {"prompt": prompt})
    job_id, headers = await answers.submit(state, caller, Submission(spec))
    head = {
        "id": f"cmpl-{job_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
    }
    if body.stream:
        return sse.response(
            state,
            caller,
            job_id,
            headers,
            chunk=head,
            opening=(),
            on_text=lambda piece: _choice(piece.index, piece.text),
            on_end=lambda choice: _choice(choice["index"], "", choice["finish_reason"]),
            wants_usage=body.wants_usage,
        )
    result = await answers.full(state, request, caller, job_id)
    state.metrics.count_tokens(result["usage"])
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

"""`/v1/chat/completions`: a chat, answered by an infer job."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from ....jobs.errors import SpecError
from ..core import answers, sse
from ..core.sampling import (
    FinishReason,
    Forgotten,
    SamplingRequest,
    Unserved,
    Usage,
    usage_of,
)
from ..core.state import Gate, GateDep, as_param
from ..core.submitter import Order
from ..core.waiters import CallerDep
from ..http.auth import SHARE
from ..http.bodies import Share
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from . import images
from .formats import ResponseFormat, schema_of

router = APIRouter(route_class=StrictRoute, tags=["inference"], responses=RESPONSES)

_STREAM_TYPE = "text/event-stream"
_MOST_MESSAGES = 4096
_MOST_PARTS = 1024  # of one message


class TextPart(BaseModel):
    """A part of a message that is text."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class ImageURL(BaseModel):
    """An image, as data:image/png;base64,… or, below the folder http_files, as file:///…"""

    model_config = ConfigDict(extra="forbid")

    url: str
    detail: Forgotten = None


class ImagePart(BaseModel):
    """A part of a message that is an image."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["image_url"]
    image_url: ImageURL


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(fail_fast=True, min_length=1, max_length=_MOST_PARTS)]


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts
    name: Forgotten = None
    refusal: Forgotten = None
    annotations: Forgotten = None
    tool_calls: Unserved = None
    function_call: Unserved = None
    audio: Unserved = None


class ChatRequest(SamplingRequest):
    """A chat to answer. `actions` and `screen` are warmd's own: see the options of infer."""

    messages: Annotated[
        list[Message], Field(fail_fast=True, min_length=1, max_length=_MOST_MESSAGES)
    ]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    actions: Literal["none", "ui-tars"] | None = None
    screen: Annotated[str, Field(min_length=1, max_length=20)] | None = None
    parallel_tool_calls: Forgotten = None
    reasoning_effort: Forgotten = None
    modalities: Forgotten = None
    top_logprobs: Unserved = None
    tools: Unserved = None
    tool_choice: Unserved = None
    response_format: ResponseFormat | None = None

    def images(self) -> list[ImageURL]:
        """Every image of the chat, in order."""
        return [
            part.image_url
            for message in self.messages
            if isinstance(message.content, list)
            for part in message.content
            if isinstance(part, ImagePart)
        ]


class AnswerMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One of the answers; `actions` is warmd's own, where the request asks for it."""

    index: int
    message: AnswerMessage
    actions: dict[str, Any] | None = None
    finish_reason: FinishReason
    logprobs: None = None


class ChatCompletion(BaseModel):
    """The answer to a chat; `timings` is warmd's own."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    timings: dict[str, Any]


STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, its pieces.",
        "content": {_STREAM_TYPE: {"schema": {"type": "string"}}},
    }
}


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
async def create_chat_completion(
    body: ChatRequest, gate: GateDep, caller: CallerDep, request: Request
) -> Response:
    """Answer a chat, at once or piece by piece."""
    await gate.blocking(gate.catalogue.check, body.model)
    share: Share = request.scope[SHARE]
    try:
        if share.is_large or body.images():
            order = await gate.taking_apart(_order, body, gate)
        else:
            order = _order(body, gate)
        body.messages.clear()  # the order has them: while the answer is waited for, once is enough
        await share.grow(order.size)
        job_id, headers = await answers.submit(gate, caller, order)
        del order
        share.shrink(0)
    except SpecError as error:
        raise as_param(error, {"prompt": "messages", "json_schema": "response_format"}) from error
    head = {"id": f"chatcmpl-{job_id}", "created": int(time.time()), "model": body.model}
    if body.stream:
        return sse.response(
            gate,
            caller,
            job_id,
            headers,
            chunk={**head, "object": "chat.completion.chunk"},
            opening=[
                _delta(index, {"role": "assistant", "content": ""}) for index in range(body.n or 1)
            ],
            on_text=lambda piece: _delta(piece.index, {"content": piece.text}),
            on_end=lambda choice: {
                **_delta(choice["index"], {}, choice["finish_reason"]),
                **_actions(choice),
            },
            wants_usage=body.wants_usage,
        )
    result = await answers.whole(gate, request, caller, job_id)
    gate.metrics.count_tokens(result["usage"])
    choices = [
        {
            "index": choice["index"],
            "message": {"role": "assistant", "content": choice["text"], "refusal": None},
            "finish_reason": choice["finish_reason"],
            "logprobs": None,
            **_actions(choice),
        }
        for choice in result["choices"]
    ]
    answer = {
        **head,
        "object": "chat.completion",
        "choices": choices,
        "usage": usage_of(result),
        "system_fingerprint": answers.fingerprint_of(result.get("weights")),
        "timings": result["timings"],
    }
    return JSONResponse(answer, headers=headers)


def _order(body: ChatRequest, gate: Gate) -> Order:
    """Return the job of a chat. Raises SpecError."""
    files = gate.config.http_files
    found = images.take(body.images(), "messages", files, gate.images) if body.images() else {}
    messages = [message.model_dump(include={"role", "content"}) for message in body.messages]
    options = body.options() | {"messages": orjson.dumps(messages).decode()}
    if body.max_completion_tokens is not None:
        options["max_tokens"] = body.max_completion_tokens
    for name in ("actions", "screen"):
        if (value := getattr(body, name)) is not None:
            options[name] = value
    if schema := schema_of(body.response_format):
        options["json_schema"] = schema
    return Order(gate.parse("infer", options), images=found)


def _delta(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}


def _actions(choice: dict[str, Any]) -> dict[str, Any]:
    return {"actions": choice["actions"]} if "actions" in choice else {}

"""`/v1/chat/completions`: chat completion by an infer job."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from ....jobs.errors import SpecError
from ....jobs.files.chats import tool_calls_of
from ....jobs.infer.options import MESSAGE, MOST_TOP, InferSpec
from ..core import answers, sse
from ..core.answers import Text
from ..core.sampling import (
    FORMS,
    FinishReason,
    PromptFormat,
    SamplingRequest,
    TextOnly,
    Unsupported,
    Usage,
    usage_of,
)
from ..core.state import AppState, StateDep, as_param
from ..core.submitter import Submission
from ..core.waiters import Caller, CallerDep
from ..http.auth import RESERVATION
from ..http.bodies import Reservation
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from . import images
from .formats import ResponseFormat, schema_of
from .tools import Added, SentToolCall, Tool, ToolCall, ToolChoice, choice_of, spoken

router = APIRouter(route_class=StrictRoute, tags=["inference"], responses=RESPONSES)

_STREAM_TYPE = "text/event-stream"
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message
MAX_TOOLS = 128


class TextPart(BaseModel):
    """The text part of a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class ImageURL(BaseModel):
    """An image: data:image/png;base64,… or, for files below `http_files`, file:///…

    `detail` has no effect: images are always read in full, and scaled down only where they exceed
    the model's limit. "low" is refused.
    """

    model_config = ConfigDict(extra="forbid")

    url: str
    detail: Literal["auto", "high"] | None = None


class ImagePart(BaseModel):
    """The image part of a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["image_url"]
    image_url: ImageURL


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]


class Message(BaseModel):
    """One message of a chat.

    What the model's chat template does not use is refused: tool calls, messages of role tool, a
    name, `reasoning_content` (which is an extension of vLLM and others).
    """

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    name: str | None = None
    tool_calls: (
        Annotated[list[SentToolCall], Field(fail_fast=True, max_length=MAX_PARTS)] | None
    ) = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Clients send back the assistant messages that they received, with these fields.
    refusal: Unsupported = None
    annotations: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    parsed: Added = None
    provider_specific_fields: Added = None  # of LiteLLM


class ChatRequest(SamplingRequest):
    """A chat to complete.

    `actions` and `screen` are warmd extensions, `chat_template_kwargs` and
    `thinking_token_budget` are some of vLLM: see the infer options.
    """

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    actions: Literal["none", "ui-tars"] | None = None
    screen: Annotated[str, Field(min_length=1, max_length=20)] | None = None
    parallel_tool_calls: Annotated[bool, Field(description="No effect without tools.")] | None = (
        None
    )
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    modalities: TextOnly = None
    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=2**31)] | None = None
    tool_choice: ToolChoice = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None
    response_format: ResponseFormat | None = None

    def images(self) -> list[ImageURL]:
        """Return every image of the chat."""
        return images_of(self.messages)


def images_of(messages: Iterable[Message]) -> list[ImageURL]:
    """Return every image of a chat, in order."""
    return [
        part.image_url
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
        if isinstance(part, ImagePart)
    ]


class AnswerMessage(BaseModel):
    """The message that the model generated.

    `reasoning_content` is an extension of vLLM and others. `content` is null where there are only
    calls.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Alternative(BaseModel):
    """A token that was likely at a place; `logprob` is a natural logarithm."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative):
    """A generated token, and the most likely ones at its place."""

    top_logprobs: list[Alternative]


class ChatLogprobs(BaseModel):
    """The log-probabilities of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatChoice(BaseModel):
    """One completion; `actions` and `token_ids` are extensions, present when requested."""

    index: int
    message: AnswerMessage
    actions: dict[str, Any] | None = None
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The response to a chat; what OpenAI's API does not have comes last."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    timings: dict[str, Any]
    prompt_format: PromptFormat | None = None
    prompt_token_ids: list[int] | None = None


STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The completion; with `stream`, server-sent events.",
        "content": {_STREAM_TYPE: {}},  # OpenAPI 3.1 cannot describe single events
    }
}


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
async def create_chat_completion(
    body: ChatRequest, state: StateDep, caller: CallerDep, request: Request
) -> Response:
    """Complete a chat, whole or streamed."""
    try:
        job_id, headers = await submit(body, state, caller, request)
    except SpecError as error:
        raise as_param(error, {"prompt": "messages"} | FORMS) from error
    head = {"id": f"chatcmpl-{job_id}", "created": int(time.time()), "model": body.model}
    if body.stream:
        await state.agents.refusal(job_id)
        return sse.response(
            state,
            caller,
            job_id,
            headers,
            sse.Chunks(
                {**head, "object": "chat.completion.chunk"},
                opened=[
                    _delta(index, {"role": "assistant", "content": ""})
                    for index in range(body.n or 1)
                ],
                on_text=_deltas,
                on_end=lambda choice: {
                    **_delta(choice["index"], {}, choice["finish_reason"]),
                    **_actions(choice),
                },
                wants_usage=body.wants_usage,
            ),
        )
    result = await answers.full(state, request, caller, job_id)
    state.metrics.count_tokens(result["usage"])
    choices = [
        {
            "index": choice["index"],
            "message": _message(choice),
            "finish_reason": choice["finish_reason"],
            "logprobs": _logprobs(choice.get("logprobs")),
            **_actions(choice),
            **({"token_ids": choice["token_ids"]} if "token_ids" in choice else {}),
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
        **answers.prompt_format_of(result),
    }
    if "prompt_token_ids" in result:
        (answer["prompt_token_ids"],) = result["prompt_token_ids"]
    return JSONResponse(answer, headers=headers)


async def submit(
    body: ChatRequest, state: AppState, caller: Caller, request: Request
) -> tuple[str, dict[str, str]]:
    """Queue the job of a chat; return job id and response headers.

    Clears the large fields of `body`. Raises SpecError, which names options of the infer job, and
    as `answers.submit`.
    """
    model = body.model
    if caller.agent is None:  # whose model is that of its job, whatever the request has
        model = await state.in_thread(state.model_index.known, model)
    reservation: Reservation = request.scope[RESERVATION]
    if reservation.is_large or body.images():
        submission = await state.in_parser_thread(_submission, body, model, state, caller)
    else:
        submission = _submission(body, model, state, caller)
    # The submission holds copies: no second ones during the wait.
    body.messages.clear()
    body.tools = body.response_format = body.chat_template_kwargs = None
    await reservation.grow(submission.size)
    job_id, headers = await answers.submit(state, caller, submission)
    del submission
    reservation.shrink(0)
    return job_id, headers


def _submission(body: ChatRequest, model: str, state: AppState, caller: Caller) -> Submission:
    """Return the job for a chat on a model. Raises SpecError."""
    files = state.config.http_files
    # The request of an agent has its images in it, as no run directory holds their files.
    store = state.images if caller.agent is None else None
    found = images.collect(body.images(), "messages", files, store) if body.images() else {}
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    options = body.options() | {"model": model, "messages": orjson.dumps(messages).decode()}
    if body.max_completion_tokens is not None:
        options["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise SpecError("top_logprobs", "must go with logprobs set to true")
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    for name in ("actions", "screen", "reasoning_effort", "thinking_token_budget"):
        if (value := getattr(body, name)) is not None:
            options[name] = value
    if body.chat_template_kwargs:
        options["chat_template_kwargs"] = orjson.dumps(body.chat_template_kwargs).decode()
    if schema := schema_of(body.response_format):
        options["json_schema"] = schema
    options |= _tool_options(body)
    if body.actions in (None, "none"):
        options["reply"] = MESSAGE
    if caller.agent is not None:  # the defaults of its job are others
        return Submission(InferSpec.parse(options))
    return Submission(state.parse("infer", options), images=found)


def _tool_options(body: ChatRequest) -> dict[str, Any]:
    """Return the options of the infer job for tools. Raises SpecError."""
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise SpecError("tool_choice", "must go with tools, got it alone")
        return {}
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    options: dict[str, Any] = {"tools": orjson.dumps(tools).decode()}
    if body.tool_choice is not None:
        options["tool_choice"] = choice_of(body.tool_choice, body.tools)
    if body.parallel_tool_calls is not None:
        options["parallel_tool_calls"] = body.parallel_tool_calls
    return options


def _message(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the message of a choice in a result."""
    calls = tool_calls_of(choice.get("calls", ()))
    found = {"role": "assistant", "content": spoken(choice["text"], calls), "refusal": None}
    if "reasoning" in choice:
        found["reasoning_content"] = choice["reasoning"]
    return {**found, "tool_calls": calls} if calls else found


def _deltas(piece: Text) -> Iterator[dict[str, Any]]:
    """Yield the frames of a piece; the first one has its token ids, and those of the prompt."""
    for number, choice in enumerate(_choices(piece)):
        found: dict[str, Any] = {"choices": [choice]}
        if number == 0:
            if piece.token_ids is not None:
                choice["token_ids"] = piece.token_ids
            if piece.prompt_ids is not None:
                found["prompt_token_ids"] = piece.prompt_ids
        yield found


def _choices(piece: Text) -> Iterator[dict[str, Any]]:
    """Yield what a piece adds to its message: reasoning, content, then calls.

    A call's arguments follow its name, as clients expect them; they are whole.
    """
    if piece.reasoning:
        yield _delta(piece.index, {"reasoning_content": piece.reasoning})
    if piece.text or piece.logprobs or not (piece.reasoning or piece.calls):
        yield _delta(piece.index, {"content": piece.text}, logprobs=piece.logprobs)
    for number, call in enumerate(tool_calls_of(piece.calls), piece.first_call):
        function = call["function"]
        begin = {**call, "function": {"name": function["name"], "arguments": ""}}
        yield _delta(piece.index, {"tool_calls": [{"index": number, **begin}]})
        rest = {"index": number, "function": {"arguments": function["arguments"]}}
        yield _delta(piece.index, {"tool_calls": [rest]})


def _delta(
    index: int,
    delta: dict[str, Any],
    reason: str | None = None,
    *,
    logprobs: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "finish_reason": reason,
        "logprobs": _logprobs(logprobs),
    }


def _logprobs(found: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """Return log-probabilities in the shape of OpenAI's chats."""
    if found is None:
        return None
    return {"content": token_logprobs(found), "refusal": None}


def token_logprobs(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return log-probabilities in the shape that chats and responses share."""
    return [
        {**_alternative(one), "top_logprobs": [_alternative(other) for other in one["top"]]}
        for one in found
    ]


def _alternative(one: dict[str, Any]) -> dict[str, Any]:
    return {name: one[name] for name in ("token", "logprob", "bytes")}


def _actions(choice: dict[str, Any]) -> dict[str, Any]:
    return {"actions": choice["actions"]} if "actions" in choice else {}

"""`/v1/responses`: OpenAI's newer form of a chat, on the machinery of `/v1/chat/completions`.

Nothing is stored: each request has the whole conversation, and an answer is not kept.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from ....jobs.errors import SpecError
from ....jobs.infer.options import MOST_TOP, InferSpec
from ..core import answers, sse
from ..core.sampling import (
    Ignored,
    ModelName,
    PromptFormat,
    ServiceTier,
    Temperature,
    TopP,
    Unsupported,
    only,
)
from ..core.state import StateDep, as_param
from ..core.waiters import CallerDep
from ..http.bodies import SMALL
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from . import chat
from .chat import STREAMED, ChatRequest
from .formats import NamedSchema, ObjectFormat, SchemaFormat, TextFormat
from .response_events import ResponseEvents
from .response_items import Item, messages_of
from .tools import ChosenFunction, ChosenTool, FunctionTool, Tool

router = APIRouter(route_class=StrictRoute, tags=["inference"], responses=RESPONSES)

_LOGPROBS = "message.output_text.logprobs"
# Fields of the API -> options of the infer job.
_PARAMS = {
    "prompt": "input",
    "messages": "input",
    "json_schema": "text.format",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
_NotKept = Annotated[
    None,
    only(False, unsupported="not supported: nothing is stored, send the whole conversation"),
    Field(description="Not supported: each request has the whole conversation."),
]


class SchemaInText(NamedSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


class TextSettings(BaseModel):
    """The form of the text."""

    model_config = ConfigDict(extra="forbid")

    format: (
        Annotated[TextFormat | ObjectFormat | SchemaInText, Field(discriminator="type")] | None
    ) = None
    verbosity: Unsupported = None


class ReasoningSettings(BaseModel):
    """How long the model thinks; summaries are not made: reasoning is shown as it is."""

    model_config = ConfigDict(extra="forbid")

    effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    summary: Annotated[None, only("auto"), Field(description='Not supported: "auto" only.')] = None
    generate_summary: Unsupported = None


class _Function(BaseModel):
    """The only type of tool: the first field, so that errors are about it."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]


class ResponseTool(FunctionTool, _Function):
    """A function that the model may call."""


class NamedTool(_Function):
    """The function that the model must call."""

    name: str


class ResponseStreamOptions(BaseModel):
    """What a stream contains."""

    model_config = ConfigDict(extra="forbid")

    include_obfuscation: Ignored = None


class ResponsesRequest(BaseModel):
    """A conversation to continue. `chat_template_kwargs` is an extension of vLLM."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: ModelName
    input: Annotated[
        Annotated[str, Tag("str")]
        | Annotated[
            list[Item],
            Field(fail_fast=True, min_length=1, max_length=chat.MAX_MESSAGES),
            Tag("list[Item]"),
        ],
        Discriminator(lambda value: "list[Item]" if isinstance(value, list) else "str"),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    tools: (
        Annotated[list[ResponseTool], Field(fail_fast=True, max_length=chat.MAX_TOOLS)] | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: (
        Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None
    ) = None

    store: _NotKept = None
    previous_response_id: _NotKept = None
    conversation: _NotKept = None
    background: Unsupported = None
    max_tool_calls: Unsupported = None
    prompt: Unsupported = None
    service_tier: ServiceTier = None
    truncation: Annotated[
        None, only("disabled"), Field(description='Not supported: "disabled" only.')
    ] = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    user: Ignored = None

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    def as_chat(self) -> ChatRequest:
        """Return the chat that asks for the same. Raises SpecError."""
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise SpecError("top_logprobs", f"must go with {_LOGPROBS!r} in include")
        return ChatRequest(
            model=self.model,
            messages=messages_of(self.instructions, self.input),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            tools=None if self.tools is None else [_tool(one) for one in self.tools],
            tool_choice=_chosen(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def echoed(self) -> dict[str, Any]:
        """Return the fields of a response that repeat its request, with warmd's defaults.

        Instructions, tools and a schema that are large together are not repeated: they would stay
        in memory for as long as the request waits.
        """
        effort = None if self.reasoning is None else self.reasoning.effort
        text = None if self.text is None else self.text.format
        repeated = {
            "instructions": self.instructions,
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "text": {"format": (text or TextFormat(type="text")).model_dump(by_alias=True)},
        }
        if len(orjson.dumps(repeated)) > SMALL:
            repeated = {"instructions": None, "tools": [], "text": {"format": {"type": "text"}}}
        choice = self.tool_choice or "auto"
        return {
            "created_at": int(time.time()),
            "model": self.model,
            **repeated,
            "max_output_tokens": self.max_output_tokens,
            "temperature": InferSpec.temperature if self.temperature is None else self.temperature,
            "top_p": InferSpec.top_p if self.top_p is None else self.top_p,
            "top_logprobs": self.top_logprobs or 0,
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": effort, "summary": None},
            "metadata": self.metadata or {},
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
        }


class ResponseObject(BaseModel):
    """A response; `timings` and `prompt_format` are extensions of warmd."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    incomplete_details: dict[str, str] | None
    output: list[dict[str, Any]]
    usage: dict[str, Any]
    timings: dict[str, Any]
    prompt_format: PromptFormat | None = None


@router.post("/v1/responses", response_model=ResponseObject, responses=STREAMED)
async def create_response(
    body: ResponsesRequest, state: StateDep, caller: CallerDep, request: Request
) -> Response:
    """Continue a conversation, whole or streamed. Nothing is stored."""
    echoed = body.echoed()
    try:
        asked = body.as_chat()
        # The chat holds them until its job is queued.
        body.input, body.instructions, body.tools, body.text = "", None, None, None
        body.chat_template_kwargs = None
        job_id, headers = await chat.submit(asked, state, caller, request)
    except SpecError as error:
        raise as_param(error, _PARAMS) from error
    events = ResponseEvents(job_id, echoed)
    if body.stream:
        await state.agents.refusal(job_id)
        return sse.response(state, caller, job_id, headers, events)
    result = await answers.full(state, request, caller, job_id)
    state.metrics.count_tokens(result["usage"])
    return JSONResponse(events.of_whole(result), headers=headers)


def _tool(tool: ResponseTool) -> Tool:
    function = FunctionTool(**tool.model_dump(exclude={"type"}))
    return Tool(type="function", function=function)


def _chosen(
    choice: Literal["none", "auto", "required"] | NamedTool | None,
) -> Literal["none", "auto", "required"] | ChosenTool | None:
    if isinstance(choice, NamedTool):
        return ChosenTool(type="function", function=ChosenFunction(name=choice.name))
    return choice


def _format(settings: TextSettings | None) -> TextFormat | ObjectFormat | SchemaFormat | None:
    wanted = None if settings is None else settings.format
    if isinstance(wanted, SchemaInText):
        return SchemaFormat(type="json_schema", json_schema=wanted)
    return wanted

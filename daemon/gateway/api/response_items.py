"""The input items of `/v1/responses`, and their conversion to chat messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from ..core.sampling import Ignored, Unsupported
from .chat import MAX_PARTS, ImagePart, ImageURL, Message, TextPart
from .tools import Added, SentFunction, SentToolCall


class _Item(BaseModel):
    """An item. Clients send the items of responses back, with their ids."""

    model_config = ConfigDict(extra="forbid")

    id: Ignored = None
    status: Ignored = None


class InputText(BaseModel):
    """A text of the user or the system."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["input_text"]
    text: str


class InputImage(BaseModel):
    """An image: data:image/png;base64,… or, for files below `http_files`, file:///…"""

    model_config = ConfigDict(extra="forbid")

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "high"] | None = None
    file_id: Unsupported = None


class OutputText(BaseModel):
    """A text of the model."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["output_text"]
    text: str
    annotations: Unsupported = None
    logprobs: Ignored = None
    parsed: Added = None


Part = Annotated[InputText | InputImage | OutputText, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]

Content = Annotated[
    Annotated[str, Tag("str")] | Annotated[Parts, Tag("list[Part]")],
    Discriminator(lambda value: "list[Part]" if isinstance(value, list) else "str"),
]


class InputMessage(_Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Unsupported = None


class FunctionCall(_Item):
    """A call of a function by the model; `arguments` is the JSON text of an object."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    parsed_arguments: Added = None


class FunctionCallOutput(_Item):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningText(BaseModel):
    """A part of the model's reasoning."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["reasoning_text"]
    text: str


class Reasoning(_Item):
    """The reasoning before a message or a call."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MAX_PARTS)] | None = (
        None
    )
    summary: Unsupported = None
    encrypted_content: Unsupported = None


def _tag(item: object) -> str:
    """Return the union tag of an item; the `type` of a message may be absent."""
    if not isinstance(item, dict):
        return f"item:{getattr(item, 'type', None)}"
    return f"item:{item.get('type', 'message')}"


Item = Annotated[
    Annotated[InputMessage, Tag("item:message")]
    | Annotated[FunctionCall, Tag("item:function_call")]
    | Annotated[FunctionCallOutput, Tag("item:function_call_output")]
    | Annotated[Reasoning, Tag("item:reasoning")],
    Discriminator(
        _tag,
        custom_error_type="item",
        custom_error_message="type must be one of message, function_call, function_call_output, "
        "reasoning",
    ),
]


def messages_of(instructions: str | None, given: str | Iterable[Item]) -> list[Message]:
    """Convert items to chat messages; the model's items of one turn become one message."""
    items = [InputMessage(role="user", content=given)] if isinstance(given, str) else given
    found = [] if instructions is None else [Message(role="system", content=instructions)]
    for item in items:
        turn = found[-1] if found and found[-1].role == "assistant" else None
        match item:
            case InputMessage() if item.role == "assistant" and turn is not None and _begins(turn):
                turn.content = _content(item.content)
            case InputMessage():
                found.append(Message(role=item.role, content=_content(item.content)))
            case FunctionCallOutput():
                content = _content(item.output)
                found.append(Message(role="tool", tool_call_id=item.call_id, content=content))
            case Reasoning():
                text = "".join(part.text for part in item.content or ())
                found.append(Message(role="assistant", content="", reasoning_content=text))
            case FunctionCall():
                if turn is None:
                    found.append(turn := Message(role="assistant"))
                function = SentFunction(name=item.name, arguments=item.arguments)
                call = SentToolCall(id=item.call_id, function=function)
                turn.tool_calls = [*(turn.tool_calls or ()), call]
                turn.content = turn.content or None
    return found


def _begins(turn: Message) -> bool:
    """Whether a turn has only reasoning so far."""
    return turn.content == "" and turn.reasoning_content is not None and not turn.tool_calls


def _content(given: str | list[Part]) -> str | list[TextPart | ImagePart]:
    if isinstance(given, str):
        return given
    return [
        ImagePart(type="image_url", image_url=ImageURL(url=part.image_url, detail=part.detail))
        if isinstance(part, InputImage)
        else TextPart(type="text", text=part.text)
        for part in given
    ]

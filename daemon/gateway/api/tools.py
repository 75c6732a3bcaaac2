"""Tools of a chat: their definitions, the choice among them, and calls in a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ....jobs.errors import SpecError

_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class FunctionTool(BaseModel):
    """A function that the model may call; `parameters` is a JSON Schema of an object.

    With `strict`, and where a call is forced, the arguments follow the schema.
    """

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool: a function."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: FunctionTool


class CalledFunction(BaseModel):
    """The function of a tool call; `arguments` is the JSON text of an object."""

    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A tool call of an assistant message."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


# What clients add to a message that they parsed or put together from a stream, and send back.
Added = Annotated[Any, Field(description="Accepted, no effect.", exclude=True)]


class SentFunction(CalledFunction):
    """The function of a tool call that a client sends back."""

    parsed_arguments: Added = None


class SentToolCall(ToolCall):
    """A tool call of an assistant message that a client sends back."""

    function: SentFunction
    index: Added = None


class ChosenFunction(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(extra="forbid")

    name: str


class ChosenTool(BaseModel):
    """The tool that the model must call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenTool | None,
    Field(description="auto: the model decides; required: one of the tools is called."),
]


def choice_of(choice: str | ChosenTool, tools: Sequence[Tool]) -> str:
    """Return the option `tool_choice` of the infer job. Raises SpecError."""
    if isinstance(choice, str):
        return choice
    names = [tool.function.name for tool in tools]
    name = choice.function.name
    if name not in names:
        raise SpecError("tool_choice", f"must name one of {', '.join(names)}, got {name[:80]!r}")
    return f"function {name}"


def spoken(text: str, calls: Sequence[object]) -> str | None:
    """Return the content of a message: null where it only has calls."""
    return None if calls and not text else text

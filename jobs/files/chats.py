"""Chats: messages, and what a chat template gets with them; their checks. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from . import jsonl
from .jsonl import Place
from .numbers import Digits, loads

Message = dict[str, Any]
Messages = list[Message]
CheckPart = Callable[[dict[str, Any], Place], None]

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same part of a message
TOOLS, ARGUMENTS = "tools", "chat_template_kwargs"  # names of columns, options and HTTP fields
TOOL_CALLS, TOOL_ROLE, NAME = "tool_calls", "role tool", "name"

MOST_BYTES = 2**20  # of tools, or of arguments, as JSON
_MOST_LEVELS = 64  # of lists and objects in each other
_INTEGER = re.compile(r"-?[0-9]{1,1000}\Z")

# Parameters of transformers' apply_chat_template: none of them is a variable of a template that a
# chat may set.
RESERVED = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "kwargs", "self"),
    )
)


@dataclass(frozen=True)
class TemplateInputs:
    """What a chat template gets with the messages: `tools`, and values of its own variables."""

    tools: list[dict[str, Any]] | None = None  # JSON Schemas as in OpenAI's API; not empty
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tools or self.arguments)

    @property
    def content(self) -> dict[str, Any]:
        """Those that are given, by the names of their columns, as plain JSON values."""
        given = {TOOLS: self.tools, ARGUMENTS: dict(self.arguments)}
        return {name: value for name, value in given.items() if value}

    def over(self, others: TemplateInputs) -> TemplateInputs:
        """Return these inputs, and those of `others` that they lack."""
        return TemplateInputs(self.tools or others.tools, {**others.arguments, **self.arguments})


NO_INPUTS = TemplateInputs()


@dataclass(frozen=True)
class Chat:
    """A chat as a template renders it."""

    messages: Messages
    inputs: TemplateInputs = NO_INPUTS

    @property
    def parts(self) -> frozenset[str]:
        """What a template must know to render it: see chat_templates.unused."""
        arguments = (f"{ARGUMENTS}.{name}" for name in self.inputs.arguments)
        return _parts_of(self.messages).union(arguments, [TOOLS] if self.inputs.tools else ())

    @property
    def num_characters(self) -> int:
        """The size of what it has, which its template may repeat or leave out."""
        size = sum(map(_num_characters, self.messages))
        return size + len(orjson.dumps(self.inputs.content)) if self.inputs else size

    def with_argument(self, name: str, value: Any) -> Chat:
        """Return the chat with another value for a variable of the template."""
        arguments = {**self.inputs.arguments, name: value}
        return replace(self, inputs=replace(self.inputs, arguments=arguments))


def tool_calls_of(calls: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return the calls of a completion (`id`, `name`, `arguments`) as a message has them."""
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in calls
    ]


def _parts_of(messages: Iterable[Message]) -> frozenset[str]:
    """Return what messages have beyond a role and a content, by the names of Chat.parts."""
    found: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            found.add(TOOL_ROLE)
        if len(message) == 2 and "content" in message:
            continue
        if message.get(TOOL_CALLS):
            found.add(TOOL_CALLS)
        if any(message.get(name) is not None for name in REASONING):
            found.add(REASONING[0])
        if message.get(NAME) and message["role"] != "tool":  # there it repeats that of the call
            found.add(NAME)
    return frozenset(found)


def _num_characters(message: Message) -> int:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    calls = message.get(TOOL_CALLS)
    size = len(content) + sum(len(message.get(name) or "") for name in REASONING)
    return size + _num_bytes(calls) if calls else size


# Checks.


def read_messages(value: Any, place: Place, check_part: CheckPart | None = None) -> Messages:
    """Return the messages of a chat, at least one. Raises SpecError.

    `check_part` raises SpecError for a content part that is not text, such as an image; then
    content keeps its parts, and may be blank: it is a request. Without it, parts are texts, and
    joined.

    The arguments of tool calls become objects where they are JSON text.
    """
    if not isinstance(value, list):
        raise place.fault("chat messages", jsonl.kind_of(value))
    if not value:
        raise place.fault("chat messages", "an empty list")
    return [_message(item, place.item(index), check_part) for index, item in enumerate(value)]


_KEYS = {  # of a message by its role, with role and content
    "assistant": {NAME, TOOL_CALLS, *REASONING},
    "tool": {NAME, "tool_call_id"},
}


def _message(value: Any, place: Place, check_part: CheckPart | None) -> Message:
    if not isinstance(value, dict):
        raise place.fault("an object of role and content", jsonl.kind_of(value))
    given = {key: item for key, item in value.items() if item is not None and item != []}
    if len(given) > 2 or "role" not in given or "content" not in given:
        _check_keys(given, place)
    role = given["role"]
    if role not in ROLES:
        got = repr(role)[:80] if isinstance(role, str) else jsonl.kind_of(role)
        raise place.field("role").fault(f"one of {', '.join(ROLES)}", got)
    found = {"role": role}
    may_be_blank = check_part is not None or role == "tool" or TOOL_CALLS in given
    if "content" in given:
        content = _content(given["content"], place.field("content"), check_part)
        if isinstance(content, str) and not may_be_blank:
            jsonl.text(content, place.field("content"))
        found["content"] = content
    for key in given.keys() - {"role", "content", TOOL_CALLS}:
        if not jsonl.is_text(given[key]):
            raise place.field(key).fault("text", jsonl.kind_of(given[key]))
    found |= {key: given[key] for key in given if key not in ("role", "content")}
    if TOOL_CALLS in given:
        # Models generate integers of any size, which clients send back in chats. Records of data
        # are stored and compared as JSON, whose integers have 64 bits here.
        has_long = check_part is not None
        found[TOOL_CALLS] = _calls(given[TOOL_CALLS], place.field(TOOL_CALLS), has_long=has_long)
    return found


def _check_keys(given: Mapping[str, Any], place: Place) -> None:
    """Check the keys of a message that has other keys than role and content. Raises SpecError."""
    role = given.get("role")
    more = _KEYS.get(role, {NAME}) if isinstance(role, str) else {NAME}
    is_call = role == "assistant" and TOOL_CALLS in given
    needed = {"role"} if is_call else {"role", "content"}
    # Other keys are refused: dropping them would change the prompt.
    if not needed <= given.keys() <= {"role", "content", *more}:
        named = role if isinstance(role, str) and role in ROLES else "any role"
        takes = f"an object of role and content (and, for {named}, of {', '.join(sorted(more))})"
        raise place.fault(takes, jsonl.keys_of(dict(given)))


def _content(value: Any, place: Place, check_part: CheckPart | None) -> Any:
    if not isinstance(value, list):
        if not jsonl.is_text(value):
            raise place.fault("text or a list of parts", jsonl.kind_of(value))
        return value
    texts = []
    for index, part in enumerate(value):
        there = place.item(index)
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and jsonl.is_text(part.get("text")):
            texts.append(part["text"])
        elif check_part is None or not isinstance(part, dict):
            got = f"type {kind!r}"[:80] if jsonl.is_text(kind) else jsonl.kind_of(part)
            raise there.fault("a part of type text, with its text", got)
        else:
            check_part(part, there)
    return "".join(texts) if check_part is None else value


def _calls(value: Any, place: Place, *, has_long: bool) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise place.fault("a list of tool calls", jsonl.kind_of(value))
    return [_call(item, place.item(index), has_long=has_long) for index, item in enumerate(value)]


def _call(value: Any, place: Place, *, has_long: bool) -> dict[str, Any]:
    """`has_long`: arguments may have integers of more than 64 bits."""
    keys = {"id", "type", "function"}
    if not isinstance(value, dict) or not {"function"} <= value.keys() <= keys:
        got = jsonl.keys_of(value) if isinstance(value, dict) else jsonl.kind_of(value)
        raise place.fault("an object of function, and of id and type", got)
    for name in value.keys() & {"id", "type"}:
        if value[name] is not None and not jsonl.is_text(value[name]):
            raise place.field(name).fault("text", jsonl.kind_of(value[name]))
    if value.get("type") not in (None, "function"):
        raise place.field("type").fault("function", repr(value["type"])[:80])
    function, there = value["function"], place.field("function")
    if not isinstance(function, dict) or not {"name"} <= function.keys() <= {"name", "arguments"}:
        got = jsonl.keys_of(function) if isinstance(function, dict) else jsonl.kind_of(function)
        raise there.fault("an object of name and arguments", got)
    name = jsonl.text(function["name"], there.field("name"))
    arguments = function.get("arguments")
    if arguments in (None, ""):  # of a function without parameters
        arguments = {}
    arguments = _object(arguments, there.field("arguments"), has_long=has_long)
    kept = {key: item for key, item in value.items() if item is not None}
    return {**kept, "function": {"name": name, "arguments": arguments}}


def inputs_of(values: Mapping[str, Any], place: Place) -> TemplateInputs:
    """Return the tools and arguments of a record, or of an object with these names.

    Each may be JSON text. Null and empty are absent. Raises SpecError.
    """
    if TOOLS not in values and ARGUMENTS not in values:  # nearly all records
        return NO_INPUTS
    tools, arguments = values.get(TOOLS), values.get(ARGUMENTS)
    return TemplateInputs(
        None if _is_absent(tools) else _tools(tools, place.field(TOOLS)),
        {} if _is_absent(arguments) else _arguments(arguments, place.field(ARGUMENTS)),
    )


def _is_absent(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _tools(value: Any, place: Place) -> list[dict[str, Any]] | None:
    found = _parsed(value, place)
    if not isinstance(found, list):
        raise place.fault("a list of tools, or its JSON text", jsonl.kind_of(found))
    for index, tool in enumerate(found):
        there = place.item(index)
        if not isinstance(tool, dict):
            raise there.fault("an object (a JSON Schema of a function)", jsonl.kind_of(tool))
        # The usual form; some templates take others.
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not jsonl.is_text(function.get("name")):
            raise there.fault("an object of type and function, with its name", jsonl.keys_of(tool))
    _check_plain(found, place)
    return found or None


def _arguments(value: Any, place: Place) -> dict[str, Any]:
    found = _object(value, place)
    for name in found:
        if name in RESERVED:
            raise place.fault(
                "an object of variables of the chat template", f"{name}, which is another input"
            )
    return found


def _object(value: Any, place: Place, *, has_long: bool = False) -> dict[str, Any]:
    """Return a value that is an object, or its JSON text."""
    found = _parsed(value, place)
    if not isinstance(found, dict):
        raise place.fault("an object, or its JSON text", jsonl.kind_of(found))
    _check_plain(found, place, has_long=has_long)
    return {name: _with_integers(item) for name, item in found.items()} if has_long else found


def _parsed(value: Any, place: Place) -> Any:
    """Return the value of a JSON text, and any other value unchanged."""
    if not jsonl.is_text(value):
        return value
    try:
        return loads(value.encode())
    except (orjson.JSONDecodeError, UnicodeEncodeError) as error:
        raise place.fault("JSON", f"{value[:60]!r}: {error}") from None


def _with_integers(value: Any) -> Any:
    """Return a value of `_parsed` with int in place of Digits."""
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, Digits) else value


def _check_plain(value: Any, place: Place, *, has_long: bool = False) -> None:
    """Check that a value is small, shallow, and has no number that JSON readers round.

    `has_long`: it may have integers of more than 64 bits, as Digits.
    """
    levels, left = 0, [value]
    while left:
        levels += 1
        if levels > _MOST_LEVELS:
            raise place.fault(f"at most {_MOST_LEVELS} levels deep", "more")
        if any(
            isinstance(item, Digits) and not (has_long and _INTEGER.match(item)) for item in left
        ):
            raise place.fault("numbers of at most 64 bits", "a longer one")
        inner: list[Any] = []
        for item in left:
            if isinstance(item, dict | list):
                inner += item.values() if isinstance(item, dict) else item
        left = inner
    if (size := len(orjson.dumps(value))) > MOST_BYTES:
        raise place.fault(f"at most {MOST_BYTES:,} bytes as JSON", f"{size:,}")


def _num_bytes(value: Any) -> int:
    """Return the size of a value as JSON."""
    try:
        return len(orjson.dumps(value))
    except TypeError:  # an integer of more than 64 bits
        return len(json.dumps(value))


def refuse_inputs(inputs: TemplateInputs, place: Place) -> None:
    """Raise SpecError for inputs of a record that is no chat. `place`: of the record."""
    for name in inputs.content:
        raise place.field(name).fault("absent for a text: only a chat has a template", "one")


def of_option(name: str, value: str) -> Any:
    """Return the value of an option of JSON text, TOOLS or ARGUMENTS; None: it is not given.

    Raises SpecError.
    """
    if not value:
        return None
    place = Place(name, "the value", 0)
    return _tools(value, place) if name == TOOLS else _arguments(value, place)

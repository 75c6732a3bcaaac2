"""Messages, tools and template arguments are read as they are meant, or refused by their place."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import tool_chats
from transformers import PreTrainedTokenizerBase

from warmd.jobs.errors import SpecError
from warmd.jobs.files.chats import (
    MOST_BYTES,
    RESERVED,
    Chat,
    TemplateInputs,
    inputs_of,
    of_option,
    read_messages,
)
from warmd.jobs.files.jsonl import Place

PLACE = Place("dataset", "f, line 1", 1)
USER = {"role": "user", "content": "?"}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_arguments_as_json_text_become_objects():
    found = read_messages(tool_chats.chat(as_text=True), PLACE)
    assert found == read_messages(tool_chats.chat(), PLACE)
    assert found[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 2}


@pytest.mark.parametrize("arguments", ["", None])
def test_a_call_without_arguments_has_an_empty_object(arguments):
    (message,) = read_messages([tool_chats.call(arguments)], PLACE)
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}


def test_null_and_empty_fields_are_absent_and_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"content": parts, "role": "user", "tool_calls": [], "name": None}
    assert read_messages([message], PLACE) == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({**USER, "tool_calls": [1]}, "must be an object of role and content (and, for user"),
        ({**USER, "tool_call_id": "a"}, "must be an object of role and content (and, for user"),
        ({"role": "tool"}, "must be an object of role and content"),
        ({"role": "assistant"}, "must be an object of role and content"),
        ({**USER, "content": 5}, "content: must be text or a list of parts, got a number"),
        ({**USER, "content": [{"type": "image_url"}]}, "content[0]: must be a part of type text"),
        ({**USER, "name": 5}, "name: must be text, got a number"),
        ({**USER, "role": "bot"}, "role: must be one of system, developer, user, assistant, tool"),
        (tool_chats.call("{"), "tool_calls[0]: function: arguments: must be JSON, got '{'"),
        (tool_chats.call("[1]"), "tool_calls[0]: function: arguments: must be an object, or its"),
        (tool_chats.call({"a": nested(70)}), "arguments: must be at most 64 levels deep, got more"),
        (tool_chats.call('{"a": 1e999}'), "arguments: must be numbers of at most 64 bits"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls: must be a list of tool calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool_calls[0]: must be an object of function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a"}, "type": "custom"}]},
            "tool_calls[0]: type: must be function, got 'custom'",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": " "}}]},
            "tool_calls[0]: function: name: must be text, got an empty one",
        ),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(message, problem):
    with pytest.raises(SpecError) as refused:
        read_messages([USER, message], PLACE)
    assert str(refused.value).startswith("dataset: f, line 1[1]: ")
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"tools": {"a": 1}}, "tools: must be a list of tools, or its JSON text, got an object"),
        ({"tools": "[{"}, "tools: must be JSON, got '[{'"),
        ({"tools": [5]}, "tools[0]: must be an object (a JSON Schema of a function), got a number"),
        ({"tools": [{"type": "function"}]}, "tools[0]: must be an object of type and function"),
        ({"tools": [{"name": "a", "b": nested(80)}]}, "tools: must be at most 64 levels deep"),
        (
            {"tools": [{"name": "a", "description": "b" * MOST_BYTES}]},
            "tools: must be at most 1,048,576 bytes as JSON, got",
        ),
        (
            {"chat_template_kwargs": [1]},
            "chat_template_kwargs: must be an object, or its JSON",
        ),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs: must be an object of variables of the chat template, got messa",
        ),
    ],
)
def test_wrong_inputs_are_refused_by_their_place(values, problem):
    with pytest.raises(SpecError) as refused:
        inputs_of(values, PLACE)
    assert str(refused.value).startswith(f"dataset: f, line 1: {problem}")


def test_inputs_may_be_json_text_and_empty_ones_are_absent():
    given = {"tools": tool_chats.TOOLS, "chat_template_kwargs": {"a": None}}
    texts = {name: json.dumps(value) for name, value in given.items()}
    assert inputs_of(texts, PLACE) == inputs_of(given, PLACE)
    assert inputs_of(given, PLACE).content == given
    absent: dict[str, Any]
    for absent in ({}, {"tools": [], "chat_template_kwargs": None}, {"tools": "[]"}):
        assert not inputs_of(absent, PLACE)
    assert of_option("tools", texts["tools"]) == tool_chats.TOOLS
    assert of_option("tools", "") is None


def test_inputs_of_a_record_go_before_those_of_the_job():
    record, job = TemplateInputs(None, {"a": 1}), TemplateInputs(tool_chats.TOOLS, {"a": 2, "b": 3})
    assert record.over(job) == TemplateInputs(tool_chats.TOOLS, {"a": 1, "b": 3})


def test_what_a_template_must_know_is_named():
    inputs = TemplateInputs(tool_chats.TOOLS, {"enable_thinking": False})
    assert Chat([USER]).parts == frozenset()
    assert Chat(tool_chats.chat(), inputs).parts == {
        *("tools", "tool_calls", "role tool", "chat_template_kwargs.enable_thinking"),
    }
    assert Chat([{**USER, "name": "Al", "thinking": "a"}]).parts == {"name", "reasoning_content"}


def test_the_reserved_names_are_all_other_parameters_of_transformers():
    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert {*taken, "messages"} - {"documents"} <= RESERVED

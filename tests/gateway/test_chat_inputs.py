"""Chats over HTTP with calls, results, reasoning and template arguments reach the job unchanged."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
import tool_chats
from gateway_requests import refusal
from gateways import CALLS, Gateway
from openai import BadRequestError

USER = {"role": "user", "content": "?"}


def chat(gateway: Gateway, messages: Any, **options: Any) -> Any:
    return gateway.openai().chat.completions.create(model="tiny", messages=messages, **options)


def test_calls_results_and_reasoning_reach_the_job(thinking, background):
    messages = tool_chats.chat(as_text=True)[:3]
    messages[1] |= {"content": None, "reasoning_content": "hm"}
    answer = background.submit(chat, thinking, messages)
    job = thinking.take()
    job.finish("3")
    assert answer.result(10).choices[0].message.content == "3"
    sent = orjson.loads(job.spec["messages"])
    assert sent == [{k: v for k, v in one.items() if v is not None} for one in messages]


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
            {"chat_template_kwargs": '{"enable_thinking":false}', "reasoning_effort": "auto"},
        ),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none"}),
        (
            {"extra_body": {"thinking_token_budget": 5}},
            {"thinking_token_budget": 5, "reasoning_effort": "auto"},
        ),
        ({}, {"reasoning_effort": "auto"}),
    ],
)
def test_template_arguments_and_effort_reach_the_job(thinking, background, given, options):
    answer = background.submit(chat, thinking, [USER], **given)
    job = thinking.take()
    job.finish("3")
    answer.result(10)
    names = ("chat_template_kwargs", "reasoning_effort", "thinking_token_budget", "tools")
    assert {name: job.spec[name] for name in names if job.spec.get(name)} == options


def test_a_message_with_calls(thinking, background):
    answer = background.submit(chat, thinking, [USER], tools=tool_chats.TOOLS)
    job = thinking.take()
    assert (job.spec["reply"], job.spec["tool_choice"]) == ("message", "auto")
    assert orjson.loads(job.spec["tools"]) == tool_chats.TOOLS
    job.finish_with_calls()
    [choice] = answer.result(10).choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert (message.content, message.reasoning_content) == ("Let me", "hm")
    found = [{"id": one.id, **one.function.model_dump()} for one in message.tool_calls]
    assert found == CALLS


def test_a_stream_of_a_message_with_calls_also_of_a_job_that_was_restarted(thinking, background):
    def read() -> Any:
        with thinking.openai().chat.completions.stream(
            model="tiny", messages=[USER], tools=tool_chats.TOOLS
        ) as stream:
            reasoning = "".join(
                getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
                for event in stream
                if event.type == "chunk" and event.chunk.choices
            )
            return reasoning, stream.get_final_completion().choices[0]

    answer = background.submit(read)
    job = thinking.take()
    job.emit("text", index=0, text="Let", tokens=2, reasoning="hm")
    job.emit("text", index=0, text=" me", tokens=9, calls=CALLS[:1])
    job.die().finish_with_calls()
    reasoning, choice = answer.result(10)
    assert reasoning == "hm"
    assert (choice.message.content, choice.finish_reason) == ("Let me", "tool_calls")
    found = [
        {"id": one.id, "name": one.function.name, "arguments": one.function.arguments}
        for one in choice.message.tool_calls
    ]
    assert found == CALLS


def test_a_message_that_a_client_has_put_together_may_be_sent_back(thinking, background):
    """OpenAI's stream helper adds `index`, `parsed` and `parsed_arguments` to the message."""
    parsed = [{"type": "function", "function": {**tool_chats.TOOLS[0]["function"], "strict": True}}]

    def read() -> Any:
        asked: Any = {"model": "tiny", "messages": [USER], "tools": parsed}
        with thinking.openai().chat.completions.stream(**asked) as stream:
            return stream.get_final_completion().choices[0].message

    answer = background.submit(read)
    thinking.take().finish_with_calls()
    message = answer.result(10)
    sent = message.to_dict()
    assert {"parsed"} <= sent.keys()
    assert "index" in sent["tool_calls"][0]
    assert "parsed_arguments" in sent["tool_calls"][0]["function"]
    results = [
        {"role": "tool", "tool_call_id": one.id, "content": "3"} for one in message.tool_calls
    ]
    sent["provider_specific_fields"] = {"refusal": None}  # as LiteLLM does
    answer = background.submit(chat, thinking, [USER, sent, *results])
    job = thinking.take()
    job.finish("3")
    assert answer.result(10).choices[0].message.content == "3"
    found = orjson.loads(job.spec["messages"])[1]["tool_calls"]
    assert [{"id": one["id"], **one["function"]} for one in found] == CALLS
    assert {key for one in found for key in one} == {"id", "type", "function"}


@pytest.mark.parametrize(
    ("choice", "option"),
    [
        ("required", "required"),
        ("none", "none"),
        ({"type": "function", "function": {"name": "add"}}, "function add"),
    ],
)
def test_the_choice_of_tools_reaches_the_job(thinking, background, choice, option):
    given = {"tools": tool_chats.TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    answer = background.submit(chat, thinking, [USER], **given)
    job = thinking.take()
    job.finish("")
    assert answer.result(10).choices[0].message.content == ""
    assert job.spec["tool_choice"] == option
    assert job.spec["parallel_tool_calls"] is False


def bomb() -> dict[str, Any]:
    """A tool whose schema takes hours to compile."""
    number = {"type": "integer", "multipleOf": 99999989}
    parameters = {"type": "object", "properties": {"x": number}}
    return {"type": "function", "function": {"name": "add", "parameters": parameters}}


@pytest.mark.parametrize(
    ("messages", "given", "problem"),
    [
        ([USER], {"reasoning_effort": "low"}, "reasoning_effort: the chat template has no variabl"),
        (
            [USER],
            {"extra_body": {"chat_template_kwargs": {"thinkin": False}}},
            "chat_template_kwargs: the chat template has no variable thinkin",
        ),
        ([{**USER, "name": "Al"}], {}, "messages: the chat template does not use name"),
        ([USER], {"tools": [{"type": "function"}]}, "tools.0.function: must be given"),
        ([USER], {"tool_choice": "required"}, "tool_choice: must go with tools, got it alone"),
        (
            [USER],
            {
                "tools": tool_chats.TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "sub"}},
            },
            "tool_choice: must name one of add, got 'sub'",
        ),
        pytest.param(
            [USER],
            {"tools": [bomb()], "tool_choice": "required"},
            "tools: must be a schema that compiles in time",
            marks=pytest.mark.slow,
        ),
        (
            [tool_chats.call("no")],
            {},
            "messages: chat[0]: tool_calls[0]: function: arguments: mus",
        ),
        (
            [USER],
            {"extra_body": {"chat_template_kwargs": {"a": json.loads("[" * 90 + "]" * 90)}}},
            "chat_template_kwargs: the value: must be at most 64 levels deep",
        ),
    ],
)
def test_what_the_template_does_not_use_is_refused_by_field(thinking, messages, given, problem):
    with pytest.raises(BadRequestError) as refused:
        chat(thinking, messages, **given)
    status, error = refusal(refused.value)
    assert (status, error["param"]) == (400, problem.partition(":")[0])
    assert error["message"].startswith(problem)
    assert thinking.waiting() == []

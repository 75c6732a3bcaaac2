"""Chats over HTTP with calls, results, reasoning and template arguments reach the job unchanged."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import tool_chats
from gateway_requests import refusal
from gateways import Gateway
from openai import BadRequestError

USER = {"role": "user", "content": "?"}


@pytest.fixture(scope="module")
def thinking(tiny_model: Path) -> Iterator[Gateway]:
    """A gateway whose model has the chat template of Qwen3."""
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:  # a short path, for sockets
        made = Gateway(Path(folder, "home"), tiny_model)
        template = Path(made.config.models[0].path, "chat_template.jinja")
        template.write_text(tool_chats.source_of("qwen3"))
        yield made
        made.close()


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
        ({}, {"reasoning_effort": "auto"}),
    ],
)
def test_template_arguments_and_effort_reach_the_job(thinking, background, given, options):
    answer = background.submit(chat, thinking, [USER], **given)
    job = thinking.take()
    job.finish("3")
    answer.result(10)
    names = ("chat_template_kwargs", "reasoning_effort", "tools")
    assert {name: job.spec[name] for name in names if job.spec.get(name)} == options


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
        ([USER], {"tools": tool_chats.TOOLS}, "tools: not supported"),
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

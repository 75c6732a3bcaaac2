"""Jobs on a model that was given a response template, and on one with a wrong template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import tiny
import tool_chats
import trl.chat_template_utils as trl

from warmd.jobs.context import WarmModel
from warmd.jobs.errors import JobFailed
from warmd.jobs.infer.kind import run
from warmd.jobs.infer.options import InferSpec

ASKED = {
    "messages": '[{"role": "user", "content": "1+2?"}]',
    "tools": json.dumps([tool_chats.SHORT_TOOL]),
    "reply": "message",
    "tool_choice": "required",
    "seed": 1,
    "max_tokens": 100,
}


class Given(tiny.Models):
    """The model with a response template."""

    template: Mapping[str, Any] | None = None

    def take(self, name: str) -> WarmModel:
        return replace(super().take(name), response_template=self.template)


@pytest.fixture
def unknown(qwen: tiny.Surroundings) -> Iterator[tiny.Surroundings]:
    """A model whose chat template TRL does not know."""
    before: Any = qwen.ctx.models
    models = Given(before.warm)
    models.tokenizer = before.tokenizer
    qwen.ctx = replace(qwen.ctx, models=models)
    template = models.tokenizer.chat_template
    models.tokenizer.chat_template = "{# mine #}" + template
    yield qwen
    models.tokenizer.chat_template = template
    models.tokenizer.response_template = None


def called(place: tiny.Surroundings, **options: Any) -> Any:
    asked = InferSpec.parse({**ASKED, "parallel_tool_calls": False, **options})
    [choice] = run(asked, place.ctx)["choices"]
    return [call["name"] for call in choice["calls"]]


def test_without_a_template_tools_are_refused_with_the_option_that_helps(unknown):
    with pytest.raises(JobFailed, match=r"^tools: must go with .* --response-template FILE`$"):
        called(unknown)


def test_a_given_template_reads_calls(unknown):
    unknown.ctx.models.template = trl.qwen3_template
    assert called(unknown) == ["add"]


def test_the_given_template_wins(unknown):
    tokenizer = unknown.ctx.models.tokenizer
    tokenizer.response_template = trl.qwen3_template
    assert called(unknown) == ["add"]
    other = json.dumps(trl.qwen3_template).replace("tool_call>", "other>")
    unknown.ctx.models.template = json.loads(other)
    [choice] = run(InferSpec.parse({**ASKED, "tool_choice": "auto"}), unknown.ctx)["choices"]
    assert "calls" not in choice
    unknown.ctx.models.template = {"start_anchor": "a", "fields": {"content": {}}}
    with pytest.raises(JobFailed, match="tools: must go with"):
        called(unknown)


@pytest.mark.parametrize("options", [{}, {"thinking_token_budget": 5, "tools": ""}])
def test_a_wrong_template_of_a_tokenizer_fails_by_name(unknown, options):
    unknown.ctx.models.tokenizer.response_template = {"fields": {"content": {"open_pattern": "("}}}
    given = {**ASKED, **options, "tool_choice": "auto"}
    message = r"^messages: the response_template of demo must be one that transformers takes, got"
    with pytest.raises(JobFailed, match=message):
        run(InferSpec.parse(given), unknown.ctx)


@pytest.mark.slow
def test_an_endless_expression_of_a_tokenizer_fails_by_name(unknown):
    template = {name: one for name, one in trl.qwen3_template.items() if name != "start_anchor"}
    template["start_anchor_pattern"] = "(?:a|aa)+$"
    unknown.ctx.models.tokenizer.response_template = template
    messages = json.dumps([{"role": "user", "content": f"{'a' * 60}!"}])
    with pytest.raises(JobFailed, match=r"^messages: the regular expressions of the response"):
        run(InferSpec.parse({**ASKED, "messages": messages}), unknown.ctx)

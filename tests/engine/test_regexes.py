"""Completions that match a regular expression, and expressions that are refused at submit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import odd_tokenizers
import pytest
import tiny
import tool_chats

from warmd.jobs.engine import regexes
from warmd.jobs.errors import SpecError
from warmd.jobs.infer.kind import run
from warmd.jobs.infer.options import InferSpec


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """The context of jobs whose model writes bytes."""
    tokenizer = odd_tokenizers.bytewise()
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    # A vocabulary of more tokens than the tokenizer has, as is usual.
    model = tiny.model(positions=512, vocab_size=300, eos_token_id=tokenizer.eos_token_id)
    made = tiny.surroundings(tmp_path, model)
    cast(tiny.Models, made.ctx.models).tokenizer = tokenizer
    return made.ctx


def texts(job: Any, regex: str, **options: Any) -> list[str]:
    few = {"model": "demo", "prompt": "a", "max_tokens": 60, "n": 8, "temperature": 1.5}
    found = run(InferSpec.parse({**few, "regex": regex, **options}), job)
    return [choice["text"] for choice in found["choices"] if choice["finish_reason"] == "stop"]


@pytest.mark.parametrize(
    "regex",
    [
        r"Action: click\(start_box='\([0-9]{1,3},[0-9]{1,3}\)'\)",
        r"^(?i:yes|no)$",
        r"-?[0-9]{1,4}(\.[0-9]+)?",
        "[äöü]{3}|a/b",
        regexes.of_choices(["a b", "1+1=2?", "line\nline", "[x]{2}|^$", "é\\"]),
    ],
)
def test_a_completion_that_has_ended_is_a_match(job, regex):
    found = texts(job, regex)
    assert found
    assert all(re.fullmatch(regex, text) for text in found), found


def test_every_choice_is_itself(job):
    choices = ["a b", "1+1=2?", "line\nline", "[x]{2}|^$", "é\\"]
    found = {
        text for seed in range(5) for text in texts(job, regexes.of_choices(choices), seed=seed)
    }
    assert found <= set(choices)
    assert len(found) > 2


@pytest.mark.parametrize(
    ("regex", "problem"),
    [
        ("(a", "unsupported expression: .*regex parse error"),
        (r"\bword", "unsupported expression: .*lookarounds"),
        ("a^b", "unsupported expression: .*lookarounds"),
        ("a" * 70_000, "must have at most 65,536 characters, got 70,000"),
        ("(" * 5000 + ")" * 5000, "unsupported expression|that compiles in time"),
        ("((a{1,1000}){1,1000}){1,1000}", "unsupported expression|that compiles in time"),
        (r"a\Zb|[^\w\W]", "unsupported expression"),
    ],
)
def test_an_expression_that_cannot_be_followed_is_refused_before_the_job_is_queued(regex, problem):
    with pytest.raises(SpecError, match=problem) as caught:
        InferSpec.parse({"prompt": "a", "regex": regex}).check_inputs(None)
    assert caught.value.field == "regex"
    assert len(str(caught.value)) < 600


CHAT = {"messages": '[{"role": "user", "content": "a"}]'}
TOOL = '[{"type": "function", "function": {"name": "a", "parameters": {}}}]'


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"prompt": "a", "json_schema": "{}"}, "must not go with json_schema"),
        ({"prompt": "a", "echo": True, "max_tokens": 0}, "must not go with max_tokens"),
        ({**CHAT, "thinking_token_budget": 9}, "must not go with .*thinking_token_budget"),
        ({**CHAT, "tools": TOOL}, "must go without tools, or with tool_choice none"),
    ],
)
def test_what_does_not_go_with_an_expression_is_refused(options, problem):
    with pytest.raises(SpecError, match=f"regex: {problem}"):
        InferSpec.parse({"regex": "a", **options})


def test_an_expression_goes_with_tools_that_the_model_does_not_get():
    InferSpec.parse({**CHAT, "regex": "a", "tools": TOOL, "tool_choice": "none"})


@pytest.mark.parametrize("form", [{"regex": "ab"}, {"json_schema": '{"const": "ab"}'}])
def test_a_constrained_message_is_content_where_the_template_opens_a_thinking_block(job, form):
    tokenizer = job.models.tokenizer
    tokenizer.chat_template = tool_chats.source_of("qwen3_5_think")
    tokenizer.add_tokens(["<think>", "</think>"])
    few = {"model": "demo", "reply": "message", "max_tokens": 20, "temperature": 0}
    (choice,) = run(InferSpec.parse({**CHAT, **few, **form}), job)["choices"]
    assert (choice["text"].strip('"'), choice["finish_reason"]) == ("ab", "stop")
    assert "reasoning" not in choice

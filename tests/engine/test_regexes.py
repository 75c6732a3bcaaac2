"""Completions that a regular expression forces, and expressions that are refused at submit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import odd_tokenizers
import pytest
import tiny
from transformers import LlamaConfig, LlamaForCausalLM

from warmd.jobs.engine import regexes
from warmd.jobs.errors import SpecError
from warmd.jobs.infer.kind import run
from warmd.jobs.infer.options import InferSpec


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """The context of jobs whose model writes bytes."""
    tokenizer = odd_tokenizers.bytewise()
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model: Any = LlamaForCausalLM(config)
    made = tiny.surroundings(tmp_path, model.requires_grad_(False).eval())
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


@pytest.mark.parametrize(
    "options",
    [{"json_schema": "{}"}, {"tools": "[]", "prompt": "", "messages": "[]"}],
    ids=["schema", "tools"],
)
def test_a_completion_has_one_form(options):
    with pytest.raises(SpecError, match="regex: must not go with "):
        InferSpec.parse({"prompt": "a", "regex": "a", **options})

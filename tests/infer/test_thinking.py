"""Thinking-token budgets: the end-of-thinking token is forced when they are used up."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import tiny
import tool_chats

from warmd.jobs.engine.thinking import Thinking, ThinkingBudget
from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.infer.kind import run
from warmd.jobs.infer.options import InferSpec
from warmd.jobs.models.replies import thinking_tags
from warmd.jobs.models.response_templates import described

MESSAGES = '[{"role": "user", "content": "How long?"}]'
BEGIN, END, WORD = 900, 901, 7


def template_of(tokenizer: Any) -> Any:
    found = described(tokenizer)
    return None if found is None else found.template


def answer(qwen: tiny.Surroundings, **options: Any) -> Any:
    given = {"messages": MESSAGES, "reply": "message", "token_ids": True, "seed": 1, **options}
    return run(InferSpec.parse(given), qwen.ctx)


def thinker(qwen: tiny.Surroundings) -> dict[str, Any]:
    """Options by which the model neither ends its thinking nor begins it again: a logit bias."""
    vocabulary = qwen.ctx.models.take("demo").tokenizer.get_vocab()
    bias = {str(vocabulary[tag]): -100 for tag in ("<think>", "</think>")}
    return {"logit_bias": orjson.dumps(bias).decode()}


def test_the_end_token_is_forced_each_time_that_thinking_begins_again(qwen):
    tokenizer = qwen.ctx.models.take("demo").tokenizer
    begin, end = (tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>"))
    bias = orjson.dumps({str(begin): 100}).decode()
    [choice] = answer(qwen, max_tokens=30, thinking_token_budget=0, logit_bias=bias)["choices"]
    assert choice["token_ids"] == [begin, end] * 15


def test_plain_prompts_have_no_budget():
    with pytest.raises(SpecError, match="thinking_token_budget: must go with"):
        InferSpec.parse({"prompt": "a", "thinking_token_budget": 3})


def test_the_end_token_is_forced_after_the_budget_and_the_text_continues(qwen):
    tokenizer = qwen.ctx.models.take("demo").tokenizer
    begin, end = (tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>"))
    template, tokenizer.response_template = tokenizer.chat_template, template_of(tokenizer)
    tokenizer.chat_template = template + "{{ '<think>' }}"
    try:
        for budget in (0, 1, 7):
            found = answer(
                qwen,
                max_tokens=20,
                thinking_token_budget=budget,
                temperature=0,
                **thinker(qwen),
            )
            [choice] = found["choices"]
            assert found["prompt_token_ids"][0][-1] == begin
            assert choice["token_ids"].index(end) == budget
            assert choice["token_ids"].count(end) == 1
    finally:
        tokenizer.chat_template = template
        del tokenizer.response_template


def test_only_tokens_between_the_tags_count():
    budget = ThinkingBudget(Thinking(BEGIN, END, 2), [BEGIN, WORD, END, WORD])
    for token in (WORD, WORD, WORD, BEGIN, WORD):
        budget.count(token)
        assert budget.due is None
    budget.count(WORD)
    assert budget.due == END
    budget.count(END)
    budget.count(BEGIN)  # the budget is that of the whole completion
    assert budget.due == END


@pytest.mark.parametrize(
    ("prompt", "is_open"), [([BEGIN], True), ([BEGIN, WORD, WORD], True), ([BEGIN, END], False)]
)
def test_thinking_may_begin_in_the_prompt(prompt, is_open):
    assert ThinkingBudget(Thinking(BEGIN, END, 0), prompt).due == (END if is_open else None)


def test_the_tags_are_those_of_the_family():
    found = {
        family: thinking_tags(template)
        for family in tool_chats.FAMILIES
        if (template := template_of(tool_chats.tokenizer(tool_chats.source_of(family))))
    }
    usual = ("<think>", "</think>")
    for family in ("qwen3", "qwen3_5_think", "deepseek_r1_distill", "glm4moe", "nemotron_3_nano"):
        assert found[family] == usual, family
    assert found["gptoss"] == ("<|channel|>analysis<|message|>", "<|end|>")
    assert found["gemma4"] == ("<|channel>thought\n", "<channel|>")
    assert found["llama3_1"] is None
    assert set(found.values()) == {usual, found["gptoss"], found["gemma4"], None}


@pytest.mark.parametrize(
    ("described", "tags"),
    [
        ({"open": "<t>", "close": "</t>"}, ("<t>", "</t>")),
        ({"close": "</t>"}, ("<t>", "</t>")),
        ({"open": ["<t>", "<u>"], "close": "</t>"}, None),
        ({"open": "<t>", "close": ["</t>", "</u>"]}, None),
        ({"open": "<t>", "close_pattern": "</t.>"}, None),
        ({"open": "<t>", "close_pattern": f".*?(?:a|aa)+$|{'a' * 60}!"}, None),
    ],
)
def test_the_tags_are_texts_that_do_not_vary(described, tags):
    assert thinking_tags({"fields": {"reasoning": described}}) == tags


def test_a_model_without_tags_is_refused_by_name(qwen):
    models: Any = qwen.ctx.models
    models.tokenizer = tool_chats.tokenizer(tool_chats.source_of("llama3_1"))
    with pytest.raises(
        JobFailed, match="thinking_token_budget: must go with a model whose thinking"
    ):
        answer(qwen, thinking_token_budget=3)


@pytest.mark.slow
def test_a_forced_call_takes_precedence(qwen):
    tokenizer = qwen.ctx.models.take("demo").tokenizer
    begin, end = (tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>"))
    template, tokenizer.response_template = tokenizer.chat_template, template_of(tokenizer)
    opens = "{% if add_generation_prompt %}{{ '<think>' }}{% endif %}"
    tokenizer.chat_template = template + opens
    tool = {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}
    options: dict[str, Any] = {}
    options["tools"] = orjson.dumps([{"type": "function", "function": tool}]).decode()
    try:
        options |= {"tool_choice": "required", "parallel_tool_calls": False}
        found = answer(qwen, **options, thinking_token_budget=1, max_tokens=90)
    finally:
        tokenizer.chat_template = template
        del tokenizer.response_template
    [choice] = found["choices"]
    assert found["prompt_token_ids"][0][-1] == begin
    assert end not in choice["token_ids"]
    assert choice["token_ids"][-1] == tokenizer.convert_tokens_to_ids("</tool_call>")

"""A budget of tokens for thinking: at its end, the thinking is closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_models
import orjson
import pytest
import tiny
import tool_chats
import trl.chat_template_utils as trl
from transformers import PreTrainedTokenizerFast

from warmd.jobs.engine.thinking import Thinking, ThinkingBudget
from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.infer.kind import run
from warmd.jobs.infer.options import InferSpec
from warmd.jobs.infer.replies import response_template, thinking_tags

MESSAGES = '[{"role": "user", "content": "How long?"}]'
BEGIN, END, WORD = 900, 901, 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    made = gguf_models.make(folder, "qwen2", "qwen2")
    made.requires_grad_(False)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    tokenizer.chat_template = trl.qwen3_chat_template
    return made, tokenizer


@pytest.fixture
def job(tmp_path: Path, model: Any) -> tiny.Surroundings:
    made, tokenizer = model
    found = tiny.surroundings(tmp_path / "job", made)
    models: Any = found.ctx.models
    models.tokenizer = tokenizer
    return found


def answer(job: tiny.Surroundings, **options: Any) -> Any:
    given = {"messages": MESSAGES, "reply": "message", "token_ids": True, "seed": 1, **options}
    return run(InferSpec.parse(given), job.ctx)


def thinker(job: tiny.Surroundings) -> dict[str, Any]:
    """Options of a model that begins to think at once, and never ends it: by biases."""
    vocabulary = job.ctx.models.take("demo").tokenizer.get_vocab()
    return {"logit_bias": orjson.dumps({str(vocabulary["</think>"]): -100}).decode()}


def test_a_model_that_begins_again_and_again_is_stopped_each_time(job):
    tokenizer = job.ctx.models.take("demo").tokenizer
    begin, end = (tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>"))
    bias = orjson.dumps({str(begin): 100}).decode()
    [choice] = answer(job, max_tokens=30, thinking_token_budget=0, logit_bias=bias)["choices"]
    assert choice["token_ids"] == [begin, end] * 15


def test_plain_prompts_have_no_budget():
    with pytest.raises(SpecError, match="thinking_token_budget: must go with"):
        InferSpec.parse({"prompt": "a", "thinking_token_budget": 3})


def test_a_model_that_thinks_on_is_stopped_and_writes_on(job):
    tokenizer = job.ctx.models.take("demo").tokenizer
    begin, end = (tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>"))
    template, tokenizer.response_template = tokenizer.chat_template, response_template(tokenizer)
    tokenizer.chat_template = template + "{{ '<think>' }}"
    try:
        for budget in (0, 1, 7):
            found = answer(
                job,
                max_tokens=20,
                thinking_token_budget=budget,
                temperature=0,
                **thinker(job),
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
        if (template := response_template(tool_chats.tokenizer(tool_chats.source_of(family))))
    }
    usual = ("<think>", "</think>")
    for family in ("qwen3", "qwen3_5_think", "deepseek_r1_distill", "glm4moe", "nemotron_3_nano"):
        assert found[family] == usual, family
    assert found["gptoss"] == ("<|channel|>analysis<|message|>", "<|end|>")
    assert found["gemma4"] == ("<|channel>thought\n", "<channel|>")
    assert found["llama3_1"] is None
    assert set(found.values()) == {usual, found["gptoss"], found["gemma4"], None}


def test_a_model_without_tags_is_refused_by_name(job):
    models: Any = job.ctx.models
    models.tokenizer = tool_chats.tokenizer(tool_chats.source_of("llama3_1"))
    with pytest.raises(JobFailed, match="thinking_token_budget: must go with a model that thinks"):
        answer(job, thinking_token_budget=3)

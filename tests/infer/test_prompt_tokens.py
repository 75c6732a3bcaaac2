"""The tokens of prompts and chats, and the texts of token ids: those of the tokenizer itself."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
import tiny
import tool_chats

from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.infer.kind import run
from warmd.jobs.infer.options import InferSpec

USER = [{"role": "user", "content": "How long is 7?"}]


def tokens(place: tiny.Surroundings, **options: Any) -> Any:
    result = run(InferSpec.parse({"reply": "tokens", **options}), place.ctx)
    [choice] = result["choices"]
    assert result["usage"]["prompt_tokens"] == len(choice["tokens"])
    assert [event["text"] for event in place.of_type("text")][-1:] == [choice["text"]]
    return choice


@pytest.mark.parametrize("special", [None, True, False])
def test_tokens_of_a_text_are_the_tokenizers(qwen, special):
    tokenizer: Any = qwen.ctx.models.take("demo").tokenizer
    how = {} if special is None else {"add_special_tokens": special}
    found = tokens(qwen, prompt="How long?<think>", **how)
    assert found["tokens"] == tokenizer("How long?<think>", **how)["input_ids"]
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    assert json.loads(found["text"]) == found["tokens"]


@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize("tools", [None, tool_chats.TOOLS])
@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}])
def test_tokens_of_a_chat_are_those_of_apply_chat_template(qwen, is_asked, tools, arguments):
    tokenizer: Any = qwen.ctx.models.take("demo").tokenizer
    options = {} if tools is None else {"tools": json.dumps(tools)}
    if arguments:
        options["chat_template_kwargs"] = json.dumps(arguments)
    expected = tokenizer.apply_chat_template(
        USER, tools=tools, add_generation_prompt=is_asked, return_dict=False, **arguments
    )
    given = orjson.dumps(USER).decode()
    found = tokens(qwen, messages=given, add_generation_prompt=is_asked, **options)
    assert found["tokens"] == expected


def test_tokens_of_a_chat_are_those_that_are_answered(qwen):
    given = {"messages": orjson.dumps(USER).decode()}
    spec = InferSpec.parse({**given, "token_ids": True, "max_tokens": 1})
    assert [tokens(qwen, **given)["tokens"]] == run(spec, qwen.ctx)["prompt_token_ids"]


def test_special_tokens_are_added_to_a_chat_where_that_is_asked_for(qwen):
    tokenizer: Any = qwen.ctx.models.take("demo").tokenizer
    given = {"messages": orjson.dumps(USER).decode()}
    text = tokenizer.apply_chat_template(USER, add_generation_prompt=True, tokenize=False)
    found = tokens(qwen, **given, add_special_tokens=True)
    assert found["tokens"] == tokenizer(text)["input_ids"]


def test_the_text_of_token_ids_is_the_tokenizers(qwen):
    tokenizer: Any = qwen.ctx.models.take("demo").tokenizer
    ids = tokenizer("<think>How long?")["input_ids"]
    found = tokens(qwen, prompts=json.dumps([ids]))
    assert (found["text"], found["tokens"]) == (tokenizer.decode(ids), ids)


@pytest.mark.parametrize("token", [2**20, 2**31, 2**70])
def test_token_ids_that_the_tokenizer_has_not_are_refused(qwen, token):
    with pytest.raises((JobFailed, SpecError), match=r"prompts: .*token id"):
        tokens(qwen, prompts=json.dumps([[5, token]]))


def test_a_text_that_is_certainly_too_long_is_refused_before_it_is_tokenized(qwen):
    with pytest.raises(JobFailed, match="prompt: must have at most"):
        tokens(qwen, prompt="a" * 10_000_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reply": "text", "add_special_tokens": False}, "add_special_tokens: must go with reply"),
        ({"add_generation_prompt": False}, "add_generation_prompt: must go with"),
        ({"echo": True}, "reply: must"),
        ({"json_schema": "{}"}, "reply: must"),
        ({"actions": "ui-tars"}, "actions: must"),
    ],
)
def test_options_without_a_meaning_are_refused(options, message):
    with pytest.raises(SpecError) as caught:
        InferSpec.parse({"reply": "tokens", "prompt": "a", **options})
    assert str(caught.value).startswith(message)

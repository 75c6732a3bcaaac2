"""Tools, template arguments and efforts reach the chat template from options and from records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny
import tool_chats
from sft_jobs import write
from tool_chats import TOOLS, source_of, tokenizer

from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.files.chats import Chat, TemplateInputs
from warmd.jobs.infer import batch_file, chat_messages
from warmd.jobs.infer.options import InferSpec
from warmd.jobs.infer.tokenization import encode

OFF = {"enable_thinking": False}
USER = {"role": "user", "content": "What is 1+2?"}
CHAT = {"messages": json.dumps([USER])}


class Warm:
    """A model with the chat template of a family; its prompts are not limited."""

    def __init__(self, template: str) -> None:
        self.name = "tiny"
        self.tokenizer = tokenizer(template)
        self.model = tiny.model(positions=10**6)


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return Warm(source_of("qwen3"))


def prompt_of(warm: Any, content: Any, **options: Any) -> str:
    spec = InferSpec.parse(options or CHAT)
    ids, _ = encode(spec, warm, content)
    return str(warm.tokenizer.decode(ids))


def expected(warm: Any, messages: Any, **inputs: Any) -> str:
    how = {"add_generation_prompt": True, "tokenize": False}
    return str(warm.tokenizer.apply_chat_template(messages, **inputs, **how))


@pytest.mark.parametrize(
    ("options", "inputs"),
    [
        ({}, {}),
        ({"tools": json.dumps(TOOLS)}, {"tools": TOOLS}),
        ({"chat_template_kwargs": json.dumps(OFF)}, OFF),
        ({"reasoning_effort": "none"}, OFF),
        ({"tools": json.dumps(TOOLS), "reasoning_effort": "none"}, {"tools": TOOLS, **OFF}),
    ],
)
def test_options_reach_the_template(qwen3, options, inputs):
    found = prompt_of(qwen3, Chat([USER]), **CHAT, **options)
    assert found == expected(qwen3, [USER], **inputs)


def test_a_plain_prompt_becomes_a_chat_with_them(qwen3):
    options = {"prompt": "What is 1+2?", "chat_template": True, "reasoning_effort": "none"}
    assert prompt_of(qwen3, "What is 1+2?", **options) == expected(qwen3, [USER], **OFF)


def test_inputs_of_a_record_go_before_the_options(qwen3):
    chat = Chat([USER], TemplateInputs(None, {"enable_thinking": True}))
    options = {**CHAT, "chat_template_kwargs": json.dumps(OFF), "tools": json.dumps(TOOLS)}
    found = prompt_of(qwen3, chat, **options)
    assert found == expected(qwen3, [USER], tools=TOOLS, enable_thinking=True)


def test_calls_with_arguments_as_text_are_rendered_as_objects(qwen3):
    text = json.dumps(tool_chats.chat(as_text=True)[:3])
    chat = Chat(chat_messages.parse(text, "messages"))
    assert prompt_of(qwen3, chat) == expected(qwen3, tool_chats.chat()[:3])


def test_integers_of_any_size_in_calls_that_a_model_wrote_come_back_as_they_were(qwen3):
    arguments = {"a": 45586844671742298514708404, "b": [-(2**70), {"c": 7}]}
    messages = [USER, tool_chats.call(json.dumps(arguments))]
    chat = Chat(chat_messages.parse(json.dumps(messages), "messages"))
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
    found = prompt_of(qwen3, chat)
    assert found == expected(qwen3, [USER, tool_chats.call(arguments)])
    assert chat.num_characters > len(json.dumps(arguments))
    for wrong in ('{"a": 1e999}', '{"a": %s}' % ("9" * 1001)):
        with pytest.raises(SpecError, match="arguments: must be numbers of at most 64 bits"):
            chat_messages.parse(json.dumps([USER, tool_chats.call(wrong)]), "messages")


def test_records_of_a_file_have_inputs(tmp_path):
    records = [
        {"messages": [USER], "tools": TOOLS, "chat_template_kwargs": OFF},
        {"prompt": "a", "chat_template_kwargs": json.dumps(OFF)},
        {"prompt": "b"},
    ]
    path = Path(write(tmp_path / "rows.jsonl", records))
    assert list(batch_file.read(path, chat_template=True)) == [
        Chat([USER], TemplateInputs(TOOLS, OFF)),
        Chat([{"role": "user", "content": "a"}], TemplateInputs(None, OFF)),
        "b",
    ]


@pytest.mark.parametrize("name", ["tools", "chat_template_kwargs"])
def test_an_option_may_be_a_file(tmp_path, name):
    value = TOOLS if name == "tools" else OFF
    (tmp_path / "given.json").write_bytes(orjson.dumps(value))
    spec = InferSpec.parse({**CHAT, name: "given.json"}).located(tmp_path)
    assert spec.inputs.content == {name: value}
    with pytest.raises(SpecError, match=f"^{name}: must be a JSON"):
        InferSpec.parse({**CHAT, name: "other.json"}).located(tmp_path)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tools": json.dumps(TOOLS)}, "tools: the chat template does not use them"),
        ({"chat_template_kwargs": json.dumps(OFF)}, "chat_template_kwargs: the chat template has"),
        ({"reasoning_effort": "low"}, "reasoning_effort: the chat template has no variable for it"),
    ],
)
def test_what_the_template_does_not_use_is_refused_at_submit_and_in_the_job(
    tmp_path, options, problem
):
    warm = Warm("{% for m in messages %}{{ m.content }}{% endfor %}")
    warm.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=f"^{problem}"):
        InferSpec.parse({**CHAT, **options}).check_chats(tmp_path)
    with pytest.raises(JobFailed, match=problem):
        prompt_of(warm, Chat([USER]), **CHAT, **options)


@pytest.mark.parametrize("name", ["tools", "chat_template_kwargs", "reasoning_effort"])
def test_an_option_without_a_chat_is_refused(name):
    values = {"tools": "[]", "chat_template_kwargs": "{}", "reasoning_effort": "none"}
    with pytest.raises(SpecError, match=f"^{name}: must go with chat_template, image, messages"):
        InferSpec.parse({"prompt": "a", name: values[name]})


def test_long_tools_are_refused_before_they_are_tokenized(qwen3):
    tools = [{"name": "a", "description": "b" * 500_000}]
    warm = Warm(source_of("qwen3"))
    warm.model.config.max_position_embeddings = 64
    with pytest.raises(JobFailed, match=r"^messages: "):
        prompt_of(warm, Chat([USER], TemplateInputs(tools)))

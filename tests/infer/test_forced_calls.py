"""Calls that a model is forced to make, in the form of its family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny
import tool_chats
import torch

from warmd.jobs.engine.engine import Engine
from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.infer import answering
from warmd.jobs.infer.forced_calls import CallForm, NoGrammar
from warmd.jobs.infer.kind import run
from warmd.jobs.infer.options import InferSpec
from warmd.jobs.models.chat_templates import ChatTemplate
from warmd.jobs.models.replies import Reply
from warmd.jobs.models.response_templates import described

PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["cm", "inch"]},
    },
    "required": ["a", "unit"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "length", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]


def bomb(*, is_strict: bool) -> str:
    """A tool whose schema takes hours to compile."""
    number = {"type": "integer", "multipleOf": 99999989}
    parameters = {"type": "object", "properties": {"x": number}}
    function = {"name": "f", "parameters": parameters, "strict": is_strict}
    return orjson.dumps([{"type": "function", "function": function}]).decode()


STRICT_BOMB, BOMB = bomb(is_strict=True), bomb(is_strict=False)


def answer(qwen: tiny.Surroundings, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"messages": '[{"role": "user", "content": "How long?"}]'}
    given["reply"] = "message"
    given |= {"tools": orjson.dumps(TOOLS).decode(), "max_tokens": 120, "seed": 1, **options}
    return run(InferSpec.parse(given), qwen.ctx)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_a_forced_call_follows_the_schema_of_its_tool(qwen: tiny.Surroundings, seed: int):
    result = answer(qwen, tool_choice="function length", seed=seed, n=2)
    for choice in result["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("", "tool_calls")
        [call] = choice["calls"]
        assert call["name"] == "length"
        arguments = json.loads(call["arguments"])
        assert arguments.keys() == {"a", "unit"}
        assert 0 <= arguments["a"] <= 99
        assert arguments["unit"] in ("cm", "inch")
    told = [event for event in qwen.of_type("text") if "calls" in event]
    assert [event["calls"] for event in sorted(told, key=lambda one: one["index"])] == [
        choice["calls"] for choice in result["choices"]
    ]


def test_a_forced_call_goes_before_a_schema_of_the_text(qwen: tiny.Surroundings):
    options = {"tool_choice": "required", "parallel_tool_calls": False}
    [choice] = answer(qwen, **options, json_schema='{"type": "integer"}')["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "tool_calls")
    assert choice["calls"][0]["name"] in ("length", "stop")


def test_one_of_the_tools_is_called_where_a_call_is_required(qwen: tiny.Surroundings):
    options = {"tool_choice": "required", "parallel_tool_calls": False}
    found = answer(qwen, **options, n=8, temperature=2.0)["choices"]
    assert {choice["calls"][0]["name"] for choice in found} <= {"length", "stop"}
    assert all(len(choice["calls"]) == 1 for choice in found)


def test_without_tools_the_model_is_free(qwen: tiny.Surroundings):
    for tool_choice in ("auto", "none"):
        [choice] = answer(qwen, tool_choice=tool_choice, max_tokens=5)["choices"]
        assert "calls" not in choice
        assert choice["finish_reason"] == "length"


def is_allowed(qwen: tiny.Surroundings, text: str, **options: Any) -> bool:
    """Whether the grammar of a chat with tools, of which `length` is strict, takes a completion."""
    warm = qwen.ctx.models.take("demo")
    tools = [{**TOOLS[0]["function"], "strict": options.pop("strict", True)}, TOOLS[1]["function"]]
    given = {"messages": '[{"role": "user", "content": "?"}]', "reply": "message", **options}
    spec = InferSpec.parse({**given, "tools": orjson.dumps(tools).decode()})
    grammar = answering._grammar_of_calls(spec, tools, warm, Engine(warm))
    assert grammar is not None
    logits = torch.zeros(len(warm.model.lm_head.weight))
    for token in warm.tokenizer(text)["input_ids"]:
        if not torch.isfinite(grammar.allowed(logits)[token]):
            return False
        grammar.advance(token)
    return True


@pytest.mark.parametrize(
    ("call", "follows"),
    [
        ('{"name": "length", "arguments": {"a": 5, "unit": "cm"}}', True),
        ('{"name": "length", "arguments": {"a": 500, "unit": "cm"}}', False),
        ('{"name": "length", "arguments": {"a": 5}}', False),
        ('{"name": "stop", "arguments": {"any": [1]}}', True),
        ('{"name": "other", "arguments": {}}', False),
    ],
)
def test_calls_of_a_strict_tool_follow_its_schema(
    qwen: tiny.Surroundings, call: str, follows: bool
):
    call = f"<tool_call>\n{call}\n</tool_call>"
    text = f"<think>\nhm</think> yes {call} and <|im_end|>"
    assert is_allowed(qwen, text) is follows
    assert is_allowed(qwen, f"{call}<|im_end|>", json_schema=SCHEMA) is follows


CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
SCHEMA = '{"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}'


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ('{"b":5}<|im_end|>', True),
        (f"{CALL}<|im_end|>", True),
        (f"{CALL}\n{CALL}<|im_end|>", True),
        ('{"b":"x"}', False),
        ("yes", False),
        (f"yes {CALL}", False),
        ('{"b":5}' + CALL, False),
    ],
)
def test_a_model_with_tools_and_a_schema_calls_or_follows_the_schema(
    qwen: tiny.Surroundings, text: str, follows: bool
):
    for strict in (False, True):
        assert is_allowed(qwen, text, strict=strict, json_schema=SCHEMA) is follows


def test_a_chat_with_tools_and_a_schema_has_an_answer_or_calls(qwen: tiny.Surroundings):
    for seed in range(4):
        [choice] = answer(qwen, json_schema=SCHEMA, seed=seed, temperature=2.0)["choices"]
        text = choice["text"]  # the length may have cut a call
        is_answer = text.startswith(('{"b":', "<tool_call>"))
        assert is_answer or ("calls" in choice and text == "")


def test_a_model_whose_calls_are_plain_text_takes_no_schema_with_tools(
    qwen: tiny.Surroundings, qwen_model: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(qwen_model[1], "chat_template", tool_chats.source_of("llama3_1"))
    with pytest.raises(JobFailed, match=r"json_schema: must go without tools, .* plain text"):
        is_allowed(qwen, "", json_schema=SCHEMA)
    with pytest.raises(JobFailed, match=r"tools: strict must be false .* plain text"):
        is_allowed(qwen, "")
    monkeypatch.setattr(qwen_model[1], "chat_template", tool_chats.source_of("qwen3_5_think"))
    with pytest.raises(JobFailed, match=r"tools: strict must be false .* as its name and JSON"):
        is_allowed(qwen, "")
    with pytest.raises(JobFailed, match=r"tool_choice: must be auto .* as its name and JSON"):
        is_allowed(qwen, "", tool_choice="required")


@pytest.mark.parametrize(
    ("options", "follows"),
    [
        ({"tool_choice": "required"}, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, False),
        ({"tool_choice": "function stop"}, False),
    ],
)
def test_several_calls_may_come_where_calls_are_required(qwen, options, follows):
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    assert is_allowed(qwen, f"{call}<|im_end|>", **options)
    assert is_allowed(qwen, f"{call}\n{call}<|im_end|>", **options) is follows


def test_two_calls_in_a_row_are_read_in_every_family_whose_calls_can_be_required():
    read = set()
    for family in tool_chats.FAMILIES:
        tokenizer = tool_chats.tokenizer(tool_chats.source_of(family))
        try:
            form = CallForm.of(ChatTemplate.of(tokenizer), ["<eos>"])
        except (NoGrammar, JobFailed):
            continue  # `required` is refused with the reason
        known = described(tokenizer)
        assert known is not None, family
        form = form.trimmed(tokenizer.get_added_vocab(), lambda _: False)
        for between in ("", "\n"):
            reply = Reply(
                known.template, tokenizer, (), [], seed="", is_limited=not known.is_of_trl
            )
            reply.add(form.text("one", '{"a": 1}') + between + form.text("two", "{}"))
            reply.finish(None, is_whole=True)
            assert [call["name"] for call in reply.told.calls] == ["one", "two"], family
        read.add(family)
    assert {"qwen2_5", "qwen3", "llama3_1"} <= read


def test_a_file_of_tools_goes_with_a_choice(tmp_path: Path):
    (tmp_path / "tools.json").write_text(orjson.dumps(TOOLS).decode())
    given = {"messages": '[{"role": "user", "content": "?"}]', "reply": "message"}
    given |= {"tools": "tools.json", "tool_choice": "function length"}
    spec = InferSpec.parse(given).located(tmp_path)
    spec.check_inputs(None)
    assert [tool["function"]["name"] for tool in spec.forced_tools] == ["length"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tool_choice": "function nothing"}, "tool_choice: must be auto, none, required"),
        ({"tool_choice": "always"}, "tool_choice: must be auto, none, required"),
        ({"tool_choice": "required", "tools": ""}, "tool_choice: must go with tools"),
        ({"reply": "text", "tool_choice": "required"}, "must go with reply message"),
        ({"reply": "text", "parallel_tool_calls": False}, "must go with reply message"),
        ({"tools": "", "parallel_tool_calls": False}, "parallel_tool_calls: must go with tools"),
        ({"tools": STRICT_BOMB}, "tools: must be a schema that compiles in time"),
        pytest.param(
            {"tools": BOMB, "tool_choice": "function f"},
            "tools: must be a schema that compiles",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_choice_that_means_nothing_is_refused(options: dict[str, Any], words: str):
    given = {"messages": '[{"role": "user", "content": "?"}]', "reply": "message"}
    given |= {"tools": orjson.dumps(TOOLS).decode(), **options}
    with pytest.raises(SpecError) as caught:
        InferSpec.parse(given).check_inputs(None)
    assert words in str(caught.value)


def test_tools_of_a_model_whose_calls_nobody_can_read_are_refused(
    qwen: tiny.Surroundings, qwen_model: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(qwen_model[1], "chat_template", tool_chats.source_of("qwen3") + " ")
    with pytest.raises(JobFailed, match="tools: must go with a model whose calls can be read"):
        answer(qwen)


FORCEABLE = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "llama3_2")


@pytest.mark.parametrize("family", [*FORCEABLE, "glm4moe", "qwen3_5_think"])
def test_the_form_of_a_call_is_that_of_the_chat_template(family: str):
    tokenizer = tool_chats.tokenizer(tool_chats.source_of(family))
    template, ends = ChatTemplate.of(tokenizer), ["<|im_end|>", "<|eot_id|>"]
    if family not in FORCEABLE:
        with pytest.raises(NoGrammar, match="does not write a call as its name and JSON"):
            CallForm.of(template, ends)
        return
    form = CallForm.of(template, ends)
    known = described(tokenizer)
    assert known is not None
    text = form.text("add", '{"a": 1}')
    reply = Reply(known.template, tokenizer, [1], tool_chats.TOOLS, seed="")
    end = "<|eot_id|>" if family.startswith("llama") else ""
    reply.add(text + end)
    reply.finish(None, is_whole=False)
    assert [(call["name"], call["arguments"]) for call in reply.told.calls] == [("add", '{"a":1}')]

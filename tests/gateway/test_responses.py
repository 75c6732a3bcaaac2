"""`/v1/responses` by OpenAI's client: items, events, and what is refused."""

from __future__ import annotations

import itertools
import json
from typing import Any

import orjson
import pydantic
import pytest
import tool_chats
from gateway_requests import refusal
from gateways import CALLS, Gateway
from openai import APIError, BadRequestError
from openai.types.responses import Response, ResponseStreamEvent

TOOL = {"type": "function", **tool_chats.TOOLS[0]["function"]}
EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)


def respond(gateway: Gateway, given: Any = "?", **options: Any) -> Any:
    return gateway.openai().responses.create(model="tiny", input=given, **options)


def events_of(gateway: Gateway, **options: Any) -> list[Any]:
    """Return all events of a stream; each must have the fields of OpenAI's description."""
    with gateway.openai().responses.create(
        model="tiny", input="?", stream=True, **options
    ) as stream:
        found = list(stream)
    for event in found:
        EVENT.validate_python(event.model_dump(warnings=False))
    return found


def shown(output: Any) -> list[Any]:
    """Return the content of output items."""
    return [
        (item.name, item.call_id, item.arguments)
        if item.type == "function_call"
        else (item.type, "".join(part.text for part in item.content))
        for item in output
    ]


ANSWER = [
    ("reasoning", "hm"),
    ("message", "Let me"),
    *((call["name"], call["id"], call["arguments"]) for call in CALLS),
]


def test_a_text_is_answered_with_what_was_chosen(thinking, background):
    answer = background.submit(respond, thinking, metadata={"a": "b"}, instructions="Be short.")
    job = thinking.take()
    job.finish("3")
    found = answer.result(10)
    Response.model_validate(found.model_dump(warnings=False))
    assert orjson.loads(job.spec["messages"]) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "?"},
    ]
    assert (found.output_text, found.status, found.model) == ("3", "completed", "tiny")
    assert found.id == f"resp_{job.job.id}"
    assert (found.metadata, found.instructions) == ({"a": "b"}, "Be short.")
    assert (found.temperature, found.top_p) == (job.spec["temperature"], job.spec["top_p"])
    usage = found.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (3, 2, 5)
    assert usage.input_tokens_details.cached_tokens == 1


def test_reasoning_text_and_calls_are_items_whole_and_streamed(thinking, background):
    answer = background.submit(respond, thinking, tools=[TOOL])
    thinking.take().finish_with_calls()
    whole = answer.result(10)
    assert shown(whole.output) == ANSWER
    assert {item.status for item in whole.output} == {"completed"}

    def read() -> Any:
        with thinking.openai().responses.stream(model="tiny", input="?", tools=[TOOL]) as stream:
            events = list(stream)
            return events, stream.get_final_response()

    answer = background.submit(read)
    job = thinking.take()
    job.emit("text", index=0, text="Let", tokens=2, reasoning="hm")
    job.emit("text", index=0, text=" me", tokens=9, calls=CALLS[:1])
    job.die().finish_with_calls()
    events, final = answer.result(10)
    assert shown(final.output) == ANSWER
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas == ["Let", " me"]


def test_items_that_a_client_has_parsed_may_be_sent_back(thinking, background):
    def read(items: Any) -> Any:
        asked: Any = {"model": "tiny", "input": items, "tools": [TOOL]}
        with thinking.openai().responses.stream(**asked) as stream:
            return [item.to_dict() for item in stream.get_final_response().output]

    answer = background.submit(read, "?")
    thinking.take().finish_with_calls()
    items = answer.result(10)
    calls = [item for item in items if item["type"] == "function_call"]
    assert all("parsed_arguments" in call for call in calls)
    (message,) = [item for item in items if item["type"] == "message"]
    message["content"][0] |= {"parsed": None}  # by OpenAI's client for Node
    sent = [{"type": "message", "role": "user", "content": "?"}, *items]
    sent += [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        for call in calls
    ]
    again = background.submit(read, sent)
    job = thinking.take()
    assert "parsed" not in job.spec["messages"]
    job.finish_with_calls()
    assert again.result(10)


def test_the_events_of_a_stream_follow_openais_order(thinking, background):
    answer = background.submit(events_of, thinking)
    thinking.take().finish_with_calls()
    events = answer.result(10)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events)]
    part = ["response.content_part.added", "{}.delta", "{}.done", "response.content_part.done"]
    items = [
        [one.format("response.reasoning_text") for one in part],
        [one.format("response.output_text") for one in part],
        *[[f"response.function_call_arguments.{one}" for one in ("delta", "done")]] * 2,
    ]
    around = [["response.output_item.added", *item, "response.output_item.done"] for item in items]
    assert kinds == [
        "response.created", "response.in_progress", *itertools.chain(*around), "response.completed"
    ]  # fmt: skip
    assert shown(events[-1].response.output) == ANSWER
    assert events[0].response.status == "in_progress"


def test_a_cut_answer_is_incomplete(thinking, background):
    def cut() -> None:
        job = thinking.take()
        assert job.spec["max_tokens"] == 7
        job.emit("text", index=0, text="", tokens=7, reasoning="hm")
        choice = {"index": 0, "text": "", "finish_reason": "length", "reasoning": "hm"}
        job.finish(choices=[choice])

    answer = background.submit(respond, thinking, max_output_tokens=7)
    cut()
    found = answer.result(10)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert shown(found.output) == [("reasoning", "hm")]
    assert found.output[0].status == "incomplete"
    answer = background.submit(events_of, thinking, max_output_tokens=7)
    cut()
    assert answer.result(10)[-1].type == "response.incomplete"


def test_an_empty_answer_is_an_empty_message(thinking, background):
    answer = background.submit(events_of, thinking)
    thinking.take().finish("")
    assert shown(answer.result(10)[-1].response.output) == [("message", "")]


def test_items_of_an_answer_can_be_sent_back(thinking, background):
    answer = background.submit(respond, thinking, tools=[TOOL])
    thinking.take().finish_with_calls()
    first = answer.result(10)
    results = [
        {"type": "function_call_output", "call_id": call["id"], "output": text}
        for call, text in zip(CALLS, ("3", [{"type": "input_text", "text": "7"}]), strict=True)
    ]
    question = {"role": "user", "content": [{"type": "input_text", "text": "?"}]}
    answer = background.submit(respond, thinking, [question, *first.output, *results])
    job = thinking.take()
    job.finish("7")
    assert answer.result(10).output_text == "7"
    assert orjson.loads(job.spec["messages"]) == [
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Let me"}],
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in CALLS
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "7"}]},
    ]


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        (["reasoning", "user"], [{"content": "", "reasoning_content": "hm"}]),
        (["call"], [{"tool_calls": 1}]),
        (["reasoning", "call", "call"], [{"reasoning_content": "hm", "tool_calls": 2}]),
        (["assistant", "assistant"], [{"content": "a"}, {"content": "a"}]),
        (
            ["call", "output", "reasoning", "assistant"],
            [{"tool_calls": 1}, {"content": "a", "reasoning_content": "hm"}],
        ),
        (
            ["reasoning", "reasoning", "call"],
            [
                {"content": "", "reasoning_content": "hm"},
                {"reasoning_content": "hm", "tool_calls": 1},
            ],
        ),
    ],
)
def test_what_the_model_wrote_in_one_turn_is_one_message(thinking, background, items, messages):
    known = {
        "reasoning": {
            "type": "reasoning", "id": "rs_1", "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        "user": {"role": "user", "content": "u"},
        "assistant": {"role": "assistant", "content": "a", "type": "message"},
        "call": {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{}"},
        "output": {"type": "function_call_output", "call_id": "call_1", "output": "3"},
    }  # fmt: skip
    given = [{"role": "user", "content": "?"}, *(known[item] for item in items)]
    answer = background.submit(respond, thinking, given)
    job = thinking.take()
    job.finish("")
    answer.result(10)
    found = [
        {
            name: len(value) if name == "tool_calls" else value
            for name, value in one.items()
            if name != "role"
        }
        for one in orjson.loads(job.spec["messages"])
        if one["role"] == "assistant"
    ]
    assert found == messages


def test_options_are_those_of_a_chat(thinking, background):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": True}}
    answer = background.submit(
        respond,
        thinking,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        reasoning={"effort": "none"},
        temperature=0,
        top_p=0.5,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    job = thinking.take()
    job.finish("")
    found = answer.result(10)
    assert orjson.loads(job.spec["tools"]) == tool_chats.TOOLS
    wanted = {
        "tool_choice": "function add",
        "parallel_tool_calls": False,
        "reasoning_effort": "none",
        "temperature": 0,
        "top_p": 0.5,
        "chat_template_kwargs": '{"enable_thinking":false}',
    }
    assert {name: job.spec[name] for name in wanted} == wanted
    assert found.tool_choice.name == "add"
    assert [tool.name for tool in found.tools] == ["add"]
    answer = background.submit(respond, thinking, text=text)
    job = thinking.take()
    job.finish('{"a":1}')
    assert orjson.loads(job.spec["json_schema"]) == schema
    assert answer.result(10).text.format.name == "s"


def test_large_instructions_and_tools_are_not_repeated_but_reach_the_job(thinking, background):
    given = {"instructions": "a" * 100_000, "tools": [TOOL]}
    answer = background.submit(respond, thinking, **given)
    job = thinking.take()
    job.finish("3")
    found = answer.result(10)
    assert (found.instructions, found.tools, found.output_text) == (None, [], "3")
    assert orjson.loads(job.spec["messages"])[0]["content"] == given["instructions"]
    assert orjson.loads(job.spec["tools"]) == tool_chats.TOOLS


def test_a_form_is_parsed_by_the_client(thinking, background):
    class Form(pydantic.BaseModel):
        a: int

    def parse() -> Any:
        return thinking.openai().responses.parse(model="tiny", input="?", text_format=Form)

    answer = background.submit(parse)
    thinking.take().finish('{"a":1}')
    assert answer.result(10).output_parsed == Form(a=1)


def entry(token: str) -> dict[str, Any]:
    top = [{"token": token, "logprob": -0.5, "bytes": list(token.encode())}]
    return {**top[0], "top": top}


def test_log_probabilities_belong_to_the_message(thinking, background):
    given = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer = background.submit(events_of, thinking, **given)
    job = thinking.take()
    assert job.spec["logprobs"] == 1
    job.emit("text", index=0, text="", tokens=1, reasoning="h", logprobs=[entry("h")])
    job.emit("text", index=0, text="Le", tokens=1, logprobs=[entry("Le")])
    job.emit("text", index=0, text="", tokens=1, logprobs=[entry("")])
    job.finish("Le")
    events = answer.result(10)
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [one.token for one in done.logprobs] == ["h", "Le", ""]
    (part,) = events[-1].response.output[1].content
    assert [one.token for one in part.logprobs] == ["h", "Le", ""]


@pytest.mark.parametrize(
    ("given", "param", "problem"),
    [
        ({"store": True}, "store", "nothing is stored"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"max_tool_calls": 3}, "max_tool_calls", "not supported"),
        ({"include": ["file_search_call.results"]}, "include.0", "must be"),
        ({"top_logprobs": 2}, "top_logprobs", "must go with"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a", "at most 512 characters"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "must be 'function'"),
        ({"tool_choice": "required"}, "tool_choice", "must go with tools"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", "the chat template has no"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "not supported"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
        (
            {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "x"}}}},
            "text.format",
            "unsupported schema",
        ),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input.0", "type must be one of"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input.0.content.0",
            "type must be one of 'input_text', 'input_image', 'output_text', got 'input_file'",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input.0",
            "not supported",
        ),
        ({"input": [{"role": "user", "content": "a", "name": "Al"}]}, "input.0", "unknown"),
    ],
)
def test_what_has_no_meaning_here_is_refused_by_name(thinking, given, param, problem):
    with pytest.raises(BadRequestError) as refused:
        respond(thinking, **{"given": given.pop("input", "?"), **given})
    status, error = refusal(refused.value)
    assert status == 400
    assert error["param"].startswith(param)
    assert problem in error["message"]
    assert thinking.waiting() == []


def test_a_job_that_fails_ends_its_stream_with_an_error(thinking, background):
    answer = background.submit(events_of, thinking)
    job = thinking.take()
    job.emit("text", index=0, text="Le", tokens=1)
    job.fail("no memory", "Traceback")
    with pytest.raises(APIError, match="failed: no memory"):
        answer.result(10)


def test_a_retried_request_gets_the_same_response(thinking, background):
    headers = {"Idempotency-Key": "k1"}
    answer = background.submit(respond, thinking, extra_headers=headers)
    thinking.take().finish("3")
    first = answer.result(10)
    again = respond(thinking, extra_headers=headers)
    assert (again.id, shown(again.output)) == (first.id, shown(first.output))
    assert [item.id for item in again.output] == [item.id for item in first.output]
    assert json.loads(again.to_json())["status"] == "completed"

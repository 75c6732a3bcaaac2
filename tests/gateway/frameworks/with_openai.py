"""OpenAI's own client: chats and responses, streamed and not, and parsed. Argument: the URL."""
# mypy: ignore-errors

from __future__ import annotations

import json
import sys

import openai
import two_tools
from openai import pydantic_function_tool
from pydantic import BaseModel
from two_tools import MODEL, QUESTION

client = openai.OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0)
FUNCTIONS = {"weather": two_tools.weather, "add": two_tools.add}
ABOUT = [
    ("weather", "Get the weather in a city.", {"city": {"type": "string"}}),
    ("add", "Add two numbers.", {"a": {"type": "integer"}, "b": {"type": "integer"}}),
]
OF_CHATS, OF_RESPONSES = [], []
for name, description, properties in ABOUT:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    made = {"name": name, "description": description, "parameters": schema}
    OF_CHATS.append({"type": "function", "function": made})
    OF_RESPONSES.append({"type": "function", "strict": False, **made})


class Weather(BaseModel):
    """Get the weather in a city."""

    city: str


class Add(BaseModel):
    """Add two numbers."""

    a: int
    b: int


class Numbers(BaseModel):
    a: int
    b: int


PARSED = [pydantic_function_tool(Weather, name="weather"), pydantic_function_tool(Add, name="add")]


def result_of(name: str, arguments: str) -> str:
    return str(FUNCTIONS[name](**json.loads(arguments)))


def whole(messages):
    return client.chat.completions.create(
        model=MODEL, messages=messages, tools=OF_CHATS, temperature=0
    ).choices[0]


def chunks(messages):
    """The same message, put together by the stream helper; checked against the raw chunks."""
    asked = {"model": MODEL, "messages": messages, "tools": OF_CHATS, "temperature": 0}
    text, calls = "", {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or ():
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = (
                name + (call.function.name or ""),
                arguments + (call.function.arguments or ""),
            )
    kinds = set()
    with client.chat.completions.stream(**asked) as stream:
        for event in stream:
            kinds.add(event.type)
        choice = stream.get_final_completion().choices[0]
    assert (choice.message.content or "") == text
    found = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
    assert found == list(calls.values())
    if found:
        assert "tool_calls.function.arguments.done" in kinds, kinds
    else:
        assert "content.done" in kinds, kinds
    return choice


def parsed(messages):
    choice = client.chat.completions.parse(
        model=MODEL, messages=messages, tools=PARSED, temperature=0
    ).choices[0]
    for call in choice.message.tool_calls or ():
        kind = {"weather": Weather, "add": Add}[call.function.name]
        assert isinstance(call.function.parsed_arguments, kind)
    return choice


for ask in (whole, chunks, parsed):
    messages = [{"role": "user", "content": QUESTION}]
    choice = ask(messages)
    assert choice.finish_reason == "tool_calls"
    assert len(choice.message.tool_calls) == 2, choice.message  # both at once
    messages.append(choice.message)
    for call in choice.message.tool_calls:
        content = result_of(call.function.name, call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    choice = ask(messages)
    assert choice.finish_reason == "stop"
    assert not choice.message.tool_calls
    two_tools.check(choice.message.content, f"chat, {ask.__name__}")


def whole_response(items):
    return client.responses.create(model=MODEL, input=items, tools=OF_RESPONSES, temperature=0)


def streamed_response(items):
    asked = {"model": MODEL, "input": items, "tools": OF_RESPONSES, "temperature": 0}
    text, arguments = "", []
    with client.responses.stream(**asked) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type == "response.function_call_arguments.done":
                arguments.append(event.arguments)
        response = stream.get_final_response()
    assert response.output_text == text
    assert [i.arguments for i in response.output if i.type == "function_call"] == arguments
    return response


for ask in (whole_response, streamed_response):
    items = [{"role": "user", "content": QUESTION}]
    response = ask(items)
    calls = [item for item in response.output if item.type == "function_call"]
    assert len(calls) == 2, response.output
    items += response.output
    for call in calls:
        output = result_of(call.name, call.arguments)
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    two_tools.check(ask(items).output_text, f"response, {ask.__name__}")

asked = [{"role": "user", "content": "Write 20 + 22 as JSON."}]
found = client.chat.completions.parse(
    model=MODEL, messages=asked, response_format=Numbers, temperature=0
)
assert found.choices[0].message.parsed == Numbers(a=20, b=22)
found = client.responses.parse(model=MODEL, input=asked, text_format=Numbers, temperature=0)
assert found.output_parsed == Numbers(a=20, b=22)
answer = client.chat.completions.create(
    model=MODEL, messages=[{"role": "user", "content": "Hello"}], tools=OF_CHATS, temperature=0
).choices[0]
assert answer.finish_reason == "stop"
assert "help" in answer.message.content, answer

"""LiteLLM: chats and responses, streamed and not. Argument: the URL."""
# mypy: ignore-errors

from __future__ import annotations

import json
import sys

import litellm
import two_tools

FUNCTIONS = {"weather": two_tools.weather, "add": two_tools.add}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Get the weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    },
]
ABOUT = {"api_base": sys.argv[1], "api_key": "unused", "temperature": 0, "max_retries": 0}


def whole(messages, model):
    found = litellm.completion(model=model, messages=messages, tools=TOOLS, **ABOUT)
    return found.choices[0].message


def streamed(messages, model):
    chunks = list(
        litellm.completion(model=model, messages=messages, tools=TOOLS, stream=True, **ABOUT)
    )
    return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message


for provider in ("openai", "hosted_vllm"):
    for ask in (whole, streamed):
        messages = [{"role": "user", "content": two_tools.QUESTION}]
        message = ask(messages, f"{provider}/{two_tools.MODEL}")
        assert len(message.tool_calls) == 2, message
        messages.append(message)
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        answer = ask(messages, f"{provider}/{two_tools.MODEL}")
        two_tools.check(answer.content, f"{provider}, {ask.__name__}")

tools = [{"type": "function", "strict": False, **one["function"]} for one in TOOLS]
for is_streamed in (False, True):
    items = [{"role": "user", "content": two_tools.QUESTION}]
    for turn in range(2):
        found = litellm.responses(
            model=f"openai/{two_tools.MODEL}", input=items, tools=tools, stream=is_streamed, **ABOUT
        )
        if is_streamed:
            completed = (event for event in found if event.type == "response.completed")
            found = next(completed).response
        if turn == 0:
            calls = [item for item in found.output if item.type == "function_call"]
            assert len(calls) == 2, found.output
            items += [item.model_dump(exclude_none=True) for item in found.output]
            for call in calls:
                result = FUNCTIONS[call.name](**json.loads(call.arguments))
                items.append(
                    {
                        "type": "function_call_output",
                        "call_id": call.call_id,
                        "output": str(result),
                    }
                )
    texts = [p.text for i in found.output if i.type == "message" for p in i.content]
    two_tools.check("".join(texts), f"responses, {'streamed' if is_streamed else 'whole'}")

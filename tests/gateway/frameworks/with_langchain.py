"""A chat model of langchain-openai, on both APIs, streamed and not. Argument: the URL."""
# mypy: ignore-errors

from __future__ import annotations

import sys

import two_tools
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class add(BaseModel):
    """Adds two integers."""

    a: int
    b: int


TOOLS = {"weather": tool(two_tools.weather), "add": tool(two_tools.add)}


def streamed(model, messages):
    message = None
    for chunk in model.stream(messages):
        message = chunk if message is None else message + chunk
    return message


def whole(model, messages):
    return model.invoke(messages)


for has_responses in (False, True):
    model = ChatOpenAI(
        model=two_tools.MODEL,
        base_url=sys.argv[1],
        api_key="unused",
        use_responses_api=has_responses,
        max_retries=0,
        temperature=0,
    )
    bound = model.bind_tools(list(TOOLS.values()))
    forced = model.bind_tools(list(TOOLS.values()), tool_choice="add", strict=True)
    for ask in (whole, streamed):
        place = f"{'responses' if has_responses else 'chats'}, {ask.__name__}"
        messages = [HumanMessage(two_tools.QUESTION)]
        messages.append(ask(bound, messages))
        assert len(messages[-1].tool_calls) == 2, messages[-1]
        messages += [TOOLS[call["name"]].invoke(call) for call in messages[-1].tool_calls]
        two_tools.check(ask(bound, messages).text, place)
        (call,) = ask(forced, [HumanMessage("What is 20 + 22?")]).tool_calls
        assert (call["name"], call["args"]) == ("add", {"a": 20, "b": 22}), call
    for method, question in (
        ("json_schema", "Write 20 + 22 as JSON."),
        ("function_calling", "What is 20 + 22?"),
    ):
        found = model.with_structured_output(add, method=method, strict=True).invoke(question)
        assert found == add(a=20, b=22), (method, found)
embeddings = OpenAIEmbeddings(
    model=two_tools.MODEL, base_url=sys.argv[1], api_key="unused", check_embedding_ctx_length=False
)
assert len(embeddings.embed_documents(["a", "b"])) == 2

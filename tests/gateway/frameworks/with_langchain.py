"""A chat model of langchain-openai, on both APIs, streamed and not. Argument: the URL."""
# mypy: ignore-errors

from __future__ import annotations

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Answer(BaseModel):
    size: Literal["long", "short"]


@tool
def convert(unit: Literal["cm", "inch"]) -> str:
    """Converts a length."""
    return f"7 {unit}"


for has_responses in (False, True):
    model = ChatOpenAI(
        model="tools",
        base_url=sys.argv[1],
        api_key="unused",
        use_responses_api=has_responses,
        max_retries=0,
        temperature=0,
    )
    forced = model.bind_tools([convert], tool_choice="any", strict=True)
    question = HumanMessage("How long?")
    message = forced.invoke([question])
    (call,) = message.tool_calls
    assert call["args"]["unit"] in ("cm", "inch")
    whole = None
    for chunk in forced.stream([question]):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == call["args"]
    result = ToolMessage(convert.invoke(call["args"]), tool_call_id=call["id"])
    answer = model.with_structured_output(Answer, method="json_schema")
    assert isinstance(answer.invoke([question, message, result]), Answer)
    answer = model.with_structured_output(Answer, method="function_calling", strict=True)
    assert isinstance(answer.invoke([question]), Answer)
embeddings = OpenAIEmbeddings(
    model="tools", base_url=sys.argv[1], api_key="unused", check_embedding_ctx_length=False
)
assert len(embeddings.embed_documents(["a", "b"])) == 2

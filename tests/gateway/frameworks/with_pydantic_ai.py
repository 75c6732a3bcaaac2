"""Agents of pydantic-ai, on both APIs, streamed and not. Argument: the URL."""
# mypy: ignore-errors

from __future__ import annotations

import asyncio
import sys

import two_tools
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"temperature": 0}


class Numbers(BaseModel):
    a: int
    b: int


async def main(url: str) -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(two_tools.MODEL, provider=OpenAIProvider(base_url=url, api_key="unused"))
        tools = [two_tools.weather, two_tools.add]
        agent = Agent(model, tools=tools, model_settings=SETTINGS)
        found = await agent.run(two_tools.QUESTION)
        two_tools.check(found.output, f"{kind.__name__}, whole")
        async with agent.run_stream(two_tools.QUESTION) as stream:
            text = "".join([part async for part in stream.stream_text(delta=True)])
        two_tools.check(text, f"{kind.__name__}, streamed")
        # As a call of a tool that the agent adds, which is forced, and as JSON.
        for output, question in (
            (ToolOutput(Numbers, name="add"), "What is 20 + 22?"),
            (NativeOutput(Numbers), "Write 20 + 22 as JSON."),
        ):
            writer = Agent(model, output_type=output, model_settings=SETTINGS)
            found = await writer.run(question)
            assert found.output == Numbers(a=20, b=22), found.output


asyncio.run(main(sys.argv[1]))

"""Agents of openai-agents, on both APIs, streamed and not. Argument: the URL."""
# mypy: ignore-errors

from __future__ import annotations

import asyncio
import sys

import two_tools
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
TOOLS = [function_tool(two_tools.weather), function_tool(two_tools.add)]


class Numbers(BaseModel):
    a: int
    b: int


async def main(url: str) -> None:
    client = AsyncOpenAI(base_url=url, api_key="unused", max_retries=0)
    settings = ModelSettings(temperature=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        about = {"model": kind(two_tools.MODEL, client), "instructions": "Be brief."}
        worker = Agent(name="worker", tools=TOOLS, model_settings=settings, **about)
        one_at_a_time = Agent(
            name="one at a time",
            tools=TOOLS,
            tool_use_behavior="stop_on_first_tool",
            model_settings=ModelSettings(temperature=0, parallel_tool_calls=False),
            **about,
        )
        forced = Agent(
            name="forced",
            tools=TOOLS,
            tool_use_behavior="stop_on_first_tool",
            model_settings=ModelSettings(temperature=0, tool_choice="add"),
            **about,
        )
        writer = Agent(name="writer", output_type=Numbers, model_settings=settings, **about)
        for is_streamed in (False, True):
            place = f"{kind.__name__}, {'streamed' if is_streamed else 'whole'}"
            found = await run(worker, two_tools.QUESTION, is_streamed)
            two_tools.check(found.final_output, place)
            found = await run(one_at_a_time, two_tools.QUESTION, is_streamed)
            assert two_tools.called == [("weather", {"city": "Paris"})], two_tools.called
            two_tools.called.clear()
            found = await run(forced, "What is 20 + 22?", is_streamed)
            assert two_tools.called == [("add", {"a": 20, "b": 22})], two_tools.called
            two_tools.called.clear()
            found = await run(writer, "Write 20 + 22 as JSON.", is_streamed)
            assert found.final_output == Numbers(a=20, b=22), found.final_output


async def run(agent: Agent, given: object, is_streamed: bool) -> object:
    if not is_streamed:
        return await Runner.run(agent, given)
    result = Runner.run_streamed(agent, given)
    async for _ in result.stream_events():
        pass
    return result


asyncio.run(main(sys.argv[1]))

"""An agent of openai-agents with two tools, on both APIs, streamed and not. Argument: the URL."""
# mypy: ignore-errors

from __future__ import annotations

import asyncio
import sys
from typing import Literal

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
called = []


class Answer(BaseModel):
    size: Literal["long", "short"]


@function_tool
def convert(unit: Literal["cm", "inch"]) -> str:
    """Converts a length."""
    called.append(unit)
    return f"7 {unit}"


@function_tool
def measure(side: Literal["left", "right"]) -> str:
    """Measures a side."""
    called.append(side)
    return f"the {side} side is 3 cm"


async def main(url: str) -> None:
    client = AsyncOpenAI(base_url=url, api_key="unused", max_retries=0)
    settings = ModelSettings(temperature=0, tool_choice="required", parallel_tool_calls=False)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        about = {"model": kind("tools", client), "instructions": "Be brief."}
        caller = Agent(
            name="caller",
            tools=[convert, measure],
            tool_use_behavior="stop_on_first_tool",
            model_settings=settings,
            **about,
        )
        judge = Agent(
            name="judge", output_type=Answer, model_settings=ModelSettings(temperature=0), **about
        )
        for is_streamed in (False, True):
            called.clear()
            found = await run(caller, "How long?", is_streamed)
            assert len(called) == 1, kind
            # With the call and its result, which go back to the model.
            found = await run(judge, found.to_input_list(), is_streamed)
            assert isinstance(found.final_output, Answer), kind


async def run(agent: Agent, given: object, is_streamed: bool) -> object:
    if not is_streamed:
        return await Runner.run(agent, given)
    result = Runner.run_streamed(agent, given)
    async for _ in result.stream_events():
        pass
    return result


asyncio.run(main(sys.argv[1]))

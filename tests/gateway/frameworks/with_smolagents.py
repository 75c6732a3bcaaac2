"""smolagents: a ToolCallingAgent, streamed and not. Argument: the URL.

Its own system prompt has more tokens than the model takes, so it gets a short one.
"""
# mypy: ignore-errors

from __future__ import annotations

import sys

import two_tools
from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: the city
    """
    return two_tools.weather(city)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the a
        b: the b
    """
    return two_tools.add(a, b)


model = OpenAIModel(
    two_tools.MODEL, api_base=sys.argv[1], api_key="unused", temperature=0, max_tokens=200
)
for is_streamed in (False, True):
    agent = ToolCallingAgent([weather, add], model, stream_outputs=is_streamed, max_steps=4)
    agent.prompt_templates["system_prompt"] = "Be brief."
    answer = agent.run(two_tools.QUESTION)
    two_tools.check(answer, "streamed" if is_streamed else "whole")

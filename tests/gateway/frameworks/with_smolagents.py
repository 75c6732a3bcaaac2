"""smolagents: an agent that calls tools, and one that writes Python. Argument: the URL.

Their own system prompts are longer than the context of the small model: it gets a sentence instead.
"""
# mypy: ignore-errors

from __future__ import annotations

import sys

import two_tools
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from two_tools import MODEL, QUESTION


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


PROMPTS = {
    "system_prompt": "Use the tools to answer the questions of the user.",
    "planning": dict.fromkeys(
        ("initial_plan", "update_plan_pre_messages", "update_plan_post_messages"), ""
    ),
    "managed_agent": dict.fromkeys(("task", "report"), ""),
    "final_answer": dict.fromkeys(("pre_messages", "post_messages"), ""),
}

model = OpenAIModel(MODEL, api_base=sys.argv[1], api_key="unused", temperature=0)
for kind in (ToolCallingAgent, CodeAgent):
    for is_streamed in (False, True):
        agent = kind(
            tools=[weather, add],
            model=model,
            prompt_templates=PROMPTS,
            max_steps=2,
            verbosity_level=0,
            stream_outputs=is_streamed,
        )
        about = f"{kind.__name__}, {'streamed' if is_streamed else 'whole'}"
        two_tools.check(str(agent.run(QUESTION)), about)

"""inspect-ai: a task whose solver has tools. Argument: the URL."""
# mypy: ignore-errors

from __future__ import annotations

import os
import sys
import tempfile

os.environ["INSPECT_DISPLAY"] = "none"

import two_tools
from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def weather():
    async def execute(city: str) -> str:
        """Get the weather in a city.

        Args:
            city: the city
        """
        return two_tools.weather(city)

    return execute


@tool
def add():
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the a
            b: the b
        """
        return two_tools.add(a, b)

    return execute


config = GenerateConfig(temperature=0, max_retries=0)
model = {"base_url": sys.argv[1], "api_key": "unused", "config": config}
tools = [weather(), add()]
for name, more in (
    ("openai-api/warmd", {}),
    ("openai-api/warmd", {"stream": True}),
    ("openai-api/warmd", {"responses_api": True}),
):
    for solver in (
        [use_tools(tools), generate()],
        react(prompt="Be brief.", tools=tools, submit=False),
    ):
        with tempfile.TemporaryDirectory() as logs:
            (log,) = eval(
                Task(
                    dataset=[Sample(input=two_tools.QUESTION, target="The sum is 42.")],
                    solver=solver,
                    scorer=includes(),
                ),
                model=get_model(f"{name}/{two_tools.MODEL}", **model, **more),
                log_dir=logs,
            )
            assert log.status == "success", log.error
            two_tools.check(log.samples[0].output.completion, f"{name} {more}")
            assert log.samples[0].scores["includes"].value == "C"

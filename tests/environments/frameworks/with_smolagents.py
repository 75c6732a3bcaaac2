"""Both agents of smolagents; prints how often they have asked the model.

They find it by the variables that a job gives to its agents.
"""
# mypy: ignore-errors

from __future__ import annotations

import json
import os
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def read(cell: int) -> str:
    """Reads a cell.

    Args:
        cell: Number of the cell.
    """
    return str(cell * 7)


class Counted(OpenAIModel):
    turns = 0

    def generate(self, *args, **kwargs):
        Counted.turns += 1
        return super().generate(*args, **kwargs)


for kind in (ToolCallingAgent, CodeAgent):
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    model = Counted("policy", api_base=url, api_key=key)
    agent = kind(tools=[read], model=model, max_steps=2, verbosity_level=0)
    agent.run("Which number is in cell 2?")
sys.stdout.write(json.dumps({"turns": Counted.turns}))

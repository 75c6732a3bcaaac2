"""An agent of openai-agents with a tool, on both APIs; prints how often it has asked the model.

It finds it by the variables that a job gives to its agents.
"""
# mypy: ignore-errors

from __future__ import annotations

import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def read(cell: int) -> str:
    """Reads a cell."""
    return str(cell * 7)


turns = 0
for api in ("responses", "chat_completions"):
    set_default_openai_api(api)
    agent = Agent(name="reader", instructions="Be brief.", model="policy", tools=[read])
    found = Runner.run_sync(agent, "Which number is in cell 2?", max_turns=3)
    turns += len(found.raw_responses)
    again = Runner.run_sync(
        agent, [*found.to_input_list(), {"role": "user", "content": "Sure?"}], max_turns=3
    )
    turns += len(again.raw_responses)
sys.stdout.write(json.dumps({"turns": turns}))

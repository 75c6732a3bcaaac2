"""An agent of pydantic-ai with a tool and a form, on both APIs. Argument: the URL."""
# mypy: ignore-errors

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Answer(BaseModel):
    size: Literal["long", "short"]


for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind("tools", provider=OpenAIProvider(base_url=sys.argv[1], api_key="unused"))
    agent = Agent(model, output_type=Answer, model_settings={"temperature": 0})
    answer = agent.run_sync("How long?")
    assert isinstance(answer.output, Answer)

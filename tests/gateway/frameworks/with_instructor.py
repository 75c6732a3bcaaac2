"""instructor: arguments of calls as objects, in its modes for tools and JSON. Argument: the URL."""
# mypy: ignore-errors

from __future__ import annotations

import sys
from collections.abc import Iterable

import instructor
import openai
import two_tools
from pydantic import BaseModel


# Their names are those of the tools.
class weather(BaseModel):
    city: str


class add(BaseModel):
    a: int
    b: int


client = openai.OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0)
about = {"model": two_tools.MODEL, "temperature": 0, "max_retries": 0}


def asked(question):
    return [{"role": "user", "content": question}]


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
    made = instructor.from_openai(client, mode=mode)
    found = made.chat.completions.create(
        messages=asked("What is 20 + 22?"), response_model=add, **about
    )
    assert found.model_dump() == {"a": 20, "b": 22}, found
    found = made.chat.completions.create(
        messages=asked("What is the weather in Paris?"), response_model=weather, **about
    )
    assert found.model_dump() == {"city": "Paris"}, found
made = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
found = made.chat.completions.create(
    messages=asked("Write 20 + 22 as JSON."), response_model=add, **about
)
assert found.model_dump() == {"a": 20, "b": 22}, found
parts = list(
    made.chat.completions.create_partial(
        messages=asked("Write 20 + 22 as JSON."), response_model=add, **about
    )
)
assert parts[-1].model_dump() == {"a": 20, "b": 22}, parts
made = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS)
found = made.chat.completions.create(
    messages=asked(two_tools.QUESTION), response_model=Iterable[weather | add], **about
)
calls = [one.model_dump() for one in found]
assert calls == [{"city": "Paris"}, {"a": 20, "b": 22}], calls

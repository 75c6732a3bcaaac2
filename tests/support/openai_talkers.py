"""Agents for tests that request turns with OpenAI's client, unchanged: what only it does."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, OpenAI
from talkers import TURNS, note, user, worth


def client(**settings: Any) -> OpenAI:
    return OpenAI(**{"max_retries": 2, "timeout": 60, **settings})


def ask(messages: list[Any], model: OpenAI | None = None, **more: Any) -> Any:
    """One turn; `more`: of the request."""
    made = model or client()
    return made.chat.completions.create(model="policy", messages=messages, **more)


def vowels(task: dict[str, Any], model: OpenAI | None = None) -> float:
    """`talkers.vowels`."""
    note(task, "begun")
    model, messages = model or client(), [user(f"{'abcdefghijkl'[task['seed'] % 12]}?")]
    total = 0.0
    for _ in range(TURNS):
        choice = ask(messages, model).choices[0]
        if choice.finish_reason == "length":
            break
        text = choice.message.content or ""
        total += worth(text)
        messages += [choice.message.model_dump(exclude_none=True), user(f"#{len(text)}")]
    note(task, "over")
    return total


def patient_vowels(task: dict[str, Any]) -> float:
    """`vowels`, by a client that waits for a gateway that is started again."""
    return vowels(task, client(max_retries=20))


async def _gathered(count: int) -> list[str]:
    model = AsyncOpenAI(max_retries=0)
    asked: list[Any] = [[user(f"{'efgh'[number]}?")] for number in range(count)]
    made = [model.chat.completions.create(model="policy", messages=one) for one in asked]
    return [one.choices[0].message.content or "" for one in await asyncio.gather(*made)]


async def at_once(task: dict[str, Any]) -> float:
    """Four conversations at the same time, in an agent that is a coroutine."""
    return sum(map(worth, await _gathered(4)))


def streaming(task: dict[str, Any]) -> float:
    """`vowels`, streamed."""
    messages, total = [user(f"{'abcdefghijkl'[task['seed'] % 12]}?")], 0.0
    for _ in range(TURNS):
        stream = ask(messages, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        assert chunks[-1].usage.completion_tokens > 0
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        if choices[-1].finish_reason == "length":
            break
        text = "".join(choice.delta.content or "" for choice in choices)
        total += worth(text)
        messages += [{"role": "assistant", "content": text}, user(f"#{len(text)}")]
    return total


def by_responses(task: dict[str, Any]) -> float:
    """`vowels`, by the Responses API."""
    items: list[Any] = [user(f"{'abcdefghijkl'[task['seed'] % 12]}?")]
    total = 0.0
    for _ in range(TURNS):
        response = client().responses.create(model="policy", input=items)
        if response.status == "incomplete":
            break
        text = response.output_text
        total += worth(text)
        items += [{"role": "assistant", "content": text}, user(f"#{len(text)}")]
    return total


def _endless() -> None:
    messages = [user("a?")]
    while True:
        message = ask(messages).choices[0].message
        messages += [message.model_dump(exclude_none=True), user("b?")]


def bounded(task: dict[str, Any]) -> float:
    """Requests turns until it may not, and has a reward all the same."""
    with pytest.raises(APIStatusError) as ended:
        _endless()
    assert (ended.value.status_code, ended.value.code) == (400, "max_turns")
    return 0.5


def late(task: dict[str, Any]) -> float:
    """Requests a turn with the key of the episode before, if there was one in this process."""
    former = os.environ.get("FORMER_KEY")
    os.environ["FORMER_KEY"] = os.environ["OPENAI_API_KEY"]
    if former is not None:
        with pytest.raises(APIStatusError) as ended:
            ask([user("a?")], client(api_key=former, max_retries=0))
        assert (ended.value.status_code, ended.value.code) == (410, "episode_ended")
    return vowels(task)


def refused(task: dict[str, Any]) -> float:
    """Requests what an agent cannot have; what it gets for each is in a file."""
    image = {"type": "image_url", "image_url": {"url": task["image"]}}
    model = client(max_retries=0)
    found = []
    asked: list[dict[str, Any]] = [
        {"n": 2},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"5": 1}},
        {"logprobs": True},
        {"messages": [{"role": "user", "content": [image]}]},
    ]
    for more in asked:
        try:
            ask(more.pop("messages", [user("a?")]), model, **more)
        except APIStatusError as error:
            found.append(f"{error.status_code} {error.param}: {error.message}")
    for other in (model.models.list, lambda: model.embeddings.create(model="x", input="a")):
        try:
            other()
        except APIStatusError as error:
            found.append(f"{error.status_code} {error.request.url.path}")
    Path(task["found"]).write_text("\n".join(found))
    return vowels(task)


def cold(task: dict[str, Any]) -> float:
    """Asks for what only some clients have."""
    ask([user("a?")], extra_body={"min_p": 0.5})
    return 0.0


def with_a_refused_message(task: dict[str, Any]) -> float:
    """Goes on with a message that the chat template does not take, then with one that it does."""
    message = ask([user("a?")]).choices[0].message.model_dump(exclude_none=True)
    with pytest.raises(APIStatusError, match="does not use name"):
        ask([user("a?"), message, {**user("b?"), "name": "bob"}])
    return worth(ask([user("a?"), message, user("c?")]).choices[0].message.content or "")

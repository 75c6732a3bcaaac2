"""Agents for tests: functions that request turns with OpenAI's client, unchanged."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, APITimeoutError, AsyncOpenAI, OpenAI

TURNS = 3
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads a cell.",
        "parameters": {"type": "object", "properties": {"cell": {"type": "integer"}}},
    },
}


def client(**settings: Any) -> OpenAI:
    return OpenAI(**{"max_retries": 2, "timeout": 60, **settings})


def ask(messages: list[Any], model: OpenAI | None = None, **more: Any) -> Any:
    """One turn; `more`: of the request."""
    made = model or client()
    return made.chat.completions.create(model="policy", messages=messages, **more)


def worth(text: str) -> float:
    return sum(letter in "aeiou" for letter in text) / 8


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Vowels:
    """The same as `vowels`, as an environment."""

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        self.count, self.seed = 0, seed
        return f"{'abcdefghijkl'[seed % 12]}?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return f"#{len(action)}", worth(action), self.count == TURNS, False, {}


def vowels(task: dict[str, Any], model: OpenAI | None = None) -> float:
    """Three turns, each worth its vowels; one that is cut ends the episode, as in environments."""
    _note(task, "begun")
    model, messages = model or client(), [user(f"{'abcdefghijkl'[task['seed'] % 12]}?")]
    total = 0.0
    for _ in range(TURNS):
        choice = ask(messages, model).choices[0]
        if choice.finish_reason == "length":
            break
        text = choice.message.content or ""
        total += worth(text)
        messages += [choice.message.model_dump(exclude_none=True), user(f"#{len(text)}")]
    _note(task, "over")
    return total


def patient_vowels(task: dict[str, Any]) -> float:
    """`vowels`, by a client that waits for a gateway that is started again."""
    return vowels(task, client(max_retries=20))


def slow_vowels(task: dict[str, Any]) -> float:
    """`vowels`, each episode with pauses of other lengths."""
    time.sleep(0.05 * (os.getpid() % 3))
    return vowels(task)


def rewriting(task: dict[str, Any]) -> float:
    """Each turn sees the latest answer only."""
    total, text = 0.0, "b?"
    for _ in range(TURNS):
        text = ask([user(text[-8:] or "c?")]).choices[0].message.content or ""
        total += worth(text)
    return total


def in_parts(task: dict[str, Any]) -> dict[str, float]:
    text = ask([user("d?")]).choices[0].message.content or ""
    return {"vowels": worth(text), "length": -len(text) / 100}


def with_other_parts(task: dict[str, Any]) -> dict[str, float]:
    in_parts(task)
    return {"odd" if task["seed"] % 2 else "even": 1.0}


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


def silent(task: dict[str, Any]) -> float:
    """Requests nothing, and has a reward."""
    return 1.0


def without_reward(task: dict[str, Any]) -> None:
    ask([user("a?")])


def raising(task: dict[str, Any]) -> float:
    ask([user("a?")])
    raise LookupError("no such page")


def once_raising(task: dict[str, Any]) -> float:
    """Raises in the first attempt of each episode that is not member 0 of its process."""
    file = Path(task["file"])
    with file.open("a") as log:
        log.write(".")
    if len(file.read_text()) == 1:
        raise LookupError("for once")
    return vowels(task)


def not_a_number(task: dict[str, Any]) -> float:
    return float("nan")


def hanging(task: dict[str, Any]) -> float:
    ask([user("a?")])
    time.sleep(1000)  # longer than the limit of an episode in that test, 3 s: its process is killed
    return 0.0


def dying(task: dict[str, Any]) -> float:
    ask([user("a?")])
    os._exit(3)


def endless(task: dict[str, Any]) -> float:
    """Requests turns until it may not."""
    messages = [user("a?")]
    while True:
        message = ask(messages).choices[0].message
        messages += [message.model_dump(exclude_none=True), user("b?")]


def bounded(task: dict[str, Any]) -> float:
    """Requests turns until it may not, and has a reward all the same."""
    with pytest.raises(APIStatusError) as ended:
        endless(task)
    assert (ended.value.status_code, ended.value.code) == (400, "max_turns")
    return 0.5


def leaving_one(task: dict[str, Any]) -> float:
    """Leaves a request in a thread when it returns."""
    messages = [user("a?")]
    thread = threading.Thread(target=ask, args=([user("z?")],), daemon=True)
    text = ask(messages).choices[0].message.content or ""
    thread.start()
    return worth(text)


def aborting(task: dict[str, Any]) -> float:
    """Gives up a request, then sends another one."""
    with suppress(APITimeoutError):
        ask([user("y?" * 20)], client(timeout=0.001, max_retries=0))
    return worth(ask([user("a?")]).choices[0].message.content or "")


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
        {"tools": [TOOL], "tool_choice": "required"},
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


def hot(task: dict[str, Any]) -> float:
    """Asks for another temperature and fewer tokens."""
    answer = ask([user("a?")], temperature=0, max_tokens=2)
    assert answer.usage.completion_tokens <= 2
    return worth(answer.choices[0].message.content or "")


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


def canceled(task: dict[str, Any]) -> float:
    raise asyncio.CancelledError


def oddly_named(task: dict[str, Any]) -> dict[str, float]:
    return {"\ud800": 1.0}


def endlessly_worth(task: dict[str, Any]) -> float:
    return 1e308


def branching(task: dict[str, Any]) -> float:
    """Begins more conversations than are kept, and goes on with the first and the last one."""
    first = ask([user("a?")]).choices[0].message.model_dump(exclude_none=True)
    for _ in range(20):
        last = ask([user("b?")]).choices[0].message.model_dump(exclude_none=True)
    ask([user("a?"), first, user("c?")])
    ask([user("b?"), last, user("c?")])
    return 0.0


def with_tools(task: dict[str, Any]) -> float:
    """Has a tool, which a random model does not call."""
    message = ask([user("a?")], tools=[TOOL]).choices[0].message
    return float(bool(message.tool_calls))


def stopping(task: dict[str, Any]) -> float:
    """A text ends each turn, which is no part of it."""
    total = 0.0
    messages = [user("a?")]
    for _ in range(2):
        answer = ask(messages, stop=list("abcdefghijklmnop")).choices[0]
        assert not set("abcdefghijklmnop").intersection(answer.message.content or "")
        total += len(answer.message.content or "")
        messages += [{"role": "assistant", "content": answer.message.content}, user("b?")]
    return total / 10


NODE = """
const messages = [{role: "user", content: "a?"}]
for (let turn = 0; turn < 2; turn++) {
  const response = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: {
      "Authorization": `Bearer ${process.env.OPENAI_API_KEY}`,
      "Content-Type": "application/json",
    },
    body: JSON.stringify({model: "policy", messages}),
  })
  if (!response.ok) throw new Error(await response.text())
  messages.push((await response.json()).choices[0].message, {role: "user", content: "b?"})
}
console.log(JSON.stringify({reward: messages.length / 20}))
"""


def in_node(task: dict[str, Any]) -> float:
    """A program in another language."""
    command = ["node", "--input-type=module", "--eval", NODE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["reward"])


def _note(task: dict[str, Any], word: str) -> None:
    if "file" in task:
        with open(task["file"], "a") as log:
            log.write(f"{word}\n")

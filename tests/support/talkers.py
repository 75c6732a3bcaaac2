"""Agents for tests: functions that request turns by plain HTTP, which imports in no time.

Those that need a client of OpenAI's are in `openai_talkers`.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import subprocess
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TURNS = 3
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads a cell.",
        "parameters": {"type": "object", "properties": {"cell": {"type": "integer"}}},
    },
}


def connected() -> http.client.HTTPConnection:
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    made = http.client.HTTPConnection(url.netloc, timeout=60)
    made.connect()
    return made


def request(connection: http.client.HTTPConnection, messages: list[Any], **more: Any) -> None:
    """Request a turn; `more`: of the request."""
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    path = urlsplit(os.environ["OPENAI_BASE_URL"]).path
    body = json.dumps({"model": "policy", "messages": messages, **more})
    connection.request("POST", f"{path}/chat/completions", body, headers)


def ask(messages: list[Any], **more: Any) -> Any:
    """The answer to a request of one turn, as JSON; `more`: of the request."""
    with closing(connected()) as connection:
        request(connection, messages, **more)
        response = connection.getresponse()
        found = json.loads(response.read())
    if response.status != 200:
        raise OSError(f"{response.status}: {found}")
    return found


def content_of(answer: Any) -> str:
    return answer["choices"][0]["message"]["content"] or ""


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


def vowels(task: dict[str, Any]) -> float:
    """Three turns, each worth its vowels; one that is cut ends the episode, as in environments."""
    note(task, "begun")
    messages = [user(f"{'abcdefghijkl'[task['seed'] % 12]}?")]
    total = 0.0
    for _ in range(TURNS):
        choice = ask(messages)["choices"][0]
        if choice["finish_reason"] == "length":
            break
        text = choice["message"]["content"] or ""
        total += worth(text)
        messages += [choice["message"], user(f"#{len(text)}")]
    note(task, "over")
    return total


def slow_vowels(task: dict[str, Any]) -> float:
    """`vowels`, each episode with pauses of other lengths."""
    time.sleep(0.05 * (os.getpid() % 3))
    return vowels(task)


def rewriting(task: dict[str, Any]) -> float:
    """Each turn sees the latest answer only."""
    total, text = 0.0, "b?"
    for _ in range(TURNS):
        text = content_of(ask([user(text[-8:] or "c?")]))
        total += worth(text)
    return total


def in_parts(task: dict[str, Any]) -> dict[str, float]:
    text = content_of(ask([user("d?")]))
    return {"vowels": worth(text), "length": -len(text) / 100}


def with_other_parts(task: dict[str, Any]) -> dict[str, float]:
    in_parts(task)
    return {"odd" if task["seed"] % 2 else "even": 1.0}


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
        message = ask(messages)["choices"][0]["message"]
        messages += [message, user("b?")]


def leaving_one(task: dict[str, Any]) -> float:
    """Leaves a request in a thread when it returns."""
    messages = [user("a?")]
    thread = threading.Thread(target=ask, args=([user("z?")],), daemon=True)
    text = content_of(ask(messages))
    thread.start()
    return worth(text)


def aborting(task: dict[str, Any]) -> float:
    """Gives up a request, then sends another one."""
    with closing(connected()) as connection:
        # The kernel holds the request until the connection is closed: whoever reads it finds that
        # nobody waits for the answer, which therefore cannot come before.
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        request(connection, [user("y?" * 20)])
    return worth(content_of(ask([user("a?")])))


def hot(task: dict[str, Any]) -> float:
    """Asks for another temperature and fewer tokens."""
    answer = ask([user("a?")], temperature=0, max_tokens=2)
    assert answer["usage"]["completion_tokens"] <= 2
    return worth(content_of(answer))


def canceled(task: dict[str, Any]) -> float:
    raise asyncio.CancelledError


def oddly_named(task: dict[str, Any]) -> dict[str, float]:
    return {"\ud800": 1.0}


def endlessly_worth(task: dict[str, Any]) -> float:
    return 1e308


def branching(task: dict[str, Any]) -> float:
    """Begins more conversations than are kept, and goes on with the first and the last one."""
    first = ask([user("a?")])["choices"][0]["message"]
    for _ in range(20):
        last = ask([user("b?")])["choices"][0]["message"]
    ask([user("a?"), first, user("c?")])
    ask([user("b?"), last, user("c?")])
    return 0.0


def with_tools(task: dict[str, Any]) -> float:
    """Has a tool, which a random model does not call."""
    message = ask([user("a?")], tools=[TOOL])["choices"][0]["message"]
    return float(bool(message.get("tool_calls")))


def stopping(task: dict[str, Any]) -> float:
    """A text ends each turn, which is no part of it."""
    total = 0.0
    messages = [user("a?")]
    for _ in range(2):
        answer = ask(messages, stop=list("abcdefghijklmnop"))
        assert not set("abcdefghijklmnop").intersection(content_of(answer))
        total += len(content_of(answer))
        messages += [{"role": "assistant", "content": content_of(answer)}, user("b?")]
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


def note(task: dict[str, Any], word: str) -> None:
    if "file" in task:
        with open(task["file"], "a") as log:
            log.write(f"{word}\n")

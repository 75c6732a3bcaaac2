"""Agents and environments for tests that show images: the same screens by both."""

from __future__ import annotations

import base64
import io
import json
import random
import re
from pathlib import Path
from typing import Any

from openai import APIStatusError, OpenAI
from PIL import Image

TURNS = 3
CLICK = r"Action: click\(start_box='\([0-9]{1,3},[0-9]{1,3}\)'\)"


def picture(seed: int, turn: int) -> dict[str, Any]:
    """A screen that no other turn has, as a part of a message."""
    size = 56 + 28 * (turn % 2), 56
    pixels = random.Random(1000 * seed + turn).randbytes(3 * size[0] * size[1])
    out = io.BytesIO()
    Image.frombytes("RGB", size, pixels).save(out, "png")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def screen(seed: int, turn: int) -> dict[str, Any]:
    text = {"type": "text", "text": f"{turn}?"}
    return {"role": "user", "content": [picture(seed, turn), text]}


def worth(text: str) -> float:
    return len(text) / 10


def ask(messages: list[Any], **more: Any) -> Any:
    client: Any = OpenAI()
    return client.chat.completions.create(model="policy", messages=messages, **more)


def looks(task: dict[str, Any], ask: Any = ask) -> float:
    """An agent that shows a screen in each turn."""
    total, messages = 0.0, [screen(task["seed"], 0)]
    for turn in range(1, TURNS + 1):
        (choice,) = ask(messages).choices
        total += worth(choice.message.content or "")
        if choice.finish_reason == "length":
            break
        answer = {"role": "assistant", "content": choice.message.content}
        messages += [answer, screen(task["seed"], turn)]
    return total


def records(task: dict[str, Any]) -> float:
    """`looks`, which keeps the tokens of each turn in a file, with the number of its screens."""
    ids = []

    def recorded(messages: list[Any]) -> Any:
        answer = ask(messages, extra_body={"return_token_ids": True})
        ids.append(
            {
                "prompt": answer.model_extra["prompt_token_ids"],
                "written": answer.choices[0].model_extra["token_ids"],
            }
        )
        return answer

    total = looks(task, recorded)
    Path(task["folder"], f"{task['seed']}.json").write_text(json.dumps(ids))
    return total


def forgets(task: dict[str, Any]) -> float:
    """An agent that keeps the latest screen only: each turn is a context of its own."""
    total = 0.0
    for turn in range(TURNS):
        asked = [screen(task["seed"], turn)]
        total += worth(ask(asked).choices[0].message.content or "")
    return total


def clicks(task: dict[str, Any]) -> dict[str, float]:
    """An agent whose turns are forced to be clicks of UI-TARS, and read as such."""
    answer = ask(
        [screen(task["seed"], 0)],
        extra_body={"structured_outputs": {"regex": CLICK}, "actions": "ui-tars"},
    )
    (choice,) = answer.choices
    (action,) = choice.model_extra["actions"]["actions"]
    x, y = action["start"]
    return {
        "forced": float(re.fullmatch(CLICK, choice.message.content) is not None),
        "read": float(0 <= x <= 56 and 0 <= y <= 56),
    }


def reads_refusal(task: dict[str, Any]) -> float:
    """An agent whose reward is 1 if its screen was refused by name."""
    try:
        looks(task)
    except APIStatusError as error:
        words = "agent: must show text to a policy that is trained, got images, which only"
        return float(error.status_code == 400 and words in error.message)
    return 0.0


class Screens:
    """`looks`, as an environment."""

    def reset(self, *, seed=None, options=None):
        self.seed, self.turn = seed, 0
        return screen(seed, 0), {}

    def step(self, action):
        self.turn += 1
        return screen(self.seed, self.turn), worth(action), self.turn == TURNS, False, {}


class PartsOnly(Screens):
    """Observations that are parts, without a message around them."""

    def reset(self, *, seed=None, options=None):
        message, info = super().reset(seed=seed)
        return message["content"], info


class SometimesBroken(Screens):
    """Every third task has a screen that is no image."""

    def reset(self, *, seed=None, options=None):
        message, info = super().reset(seed=seed)
        if seed % 3 == 0:
            message["content"][0]["image_url"]["url"] = "data:image/png;base64,AAAA"
        return message, info


class ByFile(Screens):
    """A screen that is the address of a file."""

    def reset(self, *, seed=None, options=None):
        message, info = super().reset(seed=seed)
        message["content"][0]["image_url"]["url"] = "file:///etc/passwd"
        return message, info


class NoisyText:
    """Text on some turns and images on others, in one conversation."""

    def reset(self, *, seed=None, options=None):
        self.random, self.turn = random.Random(seed), 0
        return "begin", {}

    def step(self, action):
        self.turn += 1
        shows = screen(self.random.randrange(100), self.turn) if self.turn % 2 else "go on"
        return shows, worth(action), self.turn == TURNS, False, {}

"""Agents and environments for tests that show images: the same screens by both."""

from __future__ import annotations

import base64
import io
import json
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from openai import APIStatusError, APITimeoutError, OpenAI
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


def forced(task: dict[str, Any], text: str, **form: Any) -> str:
    """The answer to a text, which a form forces; or the message of the refusal."""
    try:
        answer = ask([{"role": "user", "content": text}], **form)
    except APIStatusError as error:
        if error.status_code != 400:
            raise
        return error.message
    return answer.choices[0].message.content or ""


def answers_by_choice(task: dict[str, Any]) -> float:
    """Four turns of one conversation, each one of two words."""
    messages: list[Any] = [{"role": "user", "content": "yes?"}]
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    for turn in range(4):
        text = ask(messages, extra_body=form).choices[0].message.content
        assert text in ("yes", "no")
        messages += [{"role": "assistant", "content": text}, screen(task["seed"], turn)]
    return 1.0


# Forms that are refused when they are read; one that takes hours to compile; one that exceeds a
# limit of the parser during a turn.
BAD_FORMS: dict[str, dict[str, Any]] = {
    "expression": {"extra_body": {"structured_outputs": {"regex": "(a"}}},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "nonsense"}},
        }
    },
    "bomb": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "integer", "multipleOf": 99999989}},
        }
    },
    "late": {"extra_body": {"structured_outputs": {"regex": r"\x00{30}c|(\w{1,1000}){1,1000}"}}},
}


def leaves(task: dict[str, Any]) -> float:
    """An agent that gives up a turn which will exceed a limit of the parser."""
    turn = [{"role": "user", "content": "a"}]
    answer = ask(turn, extra_body={"structured_outputs": {"regex": "b{3}"}})
    client: Any = OpenAI(max_retries=0, timeout=0.3)
    with suppress(APITimeoutError, APIStatusError):
        client.chat.completions.create(model="policy", messages=turn, **BAD_FORMS["late"])
    return worth(answer.choices[0].message.content)


def asks_badly(task: dict[str, Any]) -> float:
    """Some tasks ask for a form that cannot be had; then all ask for one that can."""
    text = forced(task, "a", **BAD_FORMS[task["form"]]) if task["form"] else ""
    expected = {"": "", "bomb": "compiles in time, got"}.get(task["form"], "unsupported")
    assert expected in text, text
    again = forced(task, "a", extra_body={"structured_outputs": {"regex": "b{3}"}})
    assert again == "bbb", again
    return 1.0


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


class Alternating:
    """Text and images by turns in one conversation."""

    def reset(self, *, seed=None, options=None):
        self.seed, self.turn = seed, 0
        return "begin", {}

    def step(self, action):
        self.turn += 1
        shows = screen(self.seed, self.turn) if self.turn % 2 else "go on"
        return shows, worth(action), self.turn == TURNS, False, {}

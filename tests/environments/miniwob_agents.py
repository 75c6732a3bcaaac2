"""An agent on pages of MiniWoB++, as UI-TARS is: it shows its latest screens, and reads actions."""

# mypy: disable-error-code=import-not-found
# MiniWoB++ is in no environment of warmd's.

from __future__ import annotations

from typing import Any

from miniwob_pages import Screens
from openai import OpenAI

MOST_TURNS = 15
SHOWN = 3  # screens in a request; of earlier ones only what was said stays
POINT = r"'\([0-9]{1,3},[0-9]{1,3}\)'"
# Any turn in UI-TARS's form, so that a model without training acts, too.
TURN = (
    rf"Thought: [a-z ]{{1,20}}\nAction: ((click|left_double)\(start_box={POINT}\)"
    rf"|drag\(start_box={POINT}, end_box={POINT}\)|type\(content='[a-z0-9 ]{{1,10}}'\)"
    rf"|scroll\(start_box={POINT}, direction='(up|down)'\)|wait\(\))"
)


def plays(task: dict[str, Any]) -> dict[str, float]:
    """One episode; the rewards are the page's success, and the share of actions that were read."""
    page, client = Screens(), OpenAI()
    try:
        messages, _ = page.reset(seed=task["seed"], options=task)
        read = []
        for _ in range(MOST_TURNS):
            answer = client.chat.completions.create(
                model="policy",
                messages=latest(messages),
                extra_body={"structured_outputs": {"regex": TURN}, "actions": "ui-tars"},
            )
            (choice,) = answer.choices
            found = (choice.model_extra or {})["actions"]
            read.append(bool(found["actions"]) and not found["errors"])
            text = choice.message.content or ""
            seen, reward, is_over, _, _ = page.step(text)
            if is_over:
                return {"success": reward, "format": sum(read) / len(read)}
            messages += [{"role": "assistant", "content": text}, *seen]
        return {"success": 0.0, "format": sum(read) / len(read)}
    finally:
        page.close()


def latest(messages: list[dict[str, Any]]) -> list[Any]:
    """The messages, of which only the latest have their screens."""
    screens = [one for one in messages if one["role"] == "user"]
    old = screens[:-SHOWN]
    return [
        {**one, "content": one["content"][1]["text"]} if one in old else one for one in messages
    ]

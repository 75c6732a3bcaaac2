"""The requests of agents: what they ask for, and what only the job decides. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError
from ..files.chats import Messages
from ..files.jsonl import Place
from ..models import gui_actions, image_parts
from ..models.gui_actions import Screen

# Options of the infer kind, which the gateway makes of a request, that mean nothing here.
_WITHOUT_EFFECT = frozenset(("model", "reply", "seed", "parallel_tool_calls", "token_ids"))
_OF_THE_JOB = ("temperature", "top_p", "top_k", "min_p")  # whatever a request has


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a request asks for.

    `messages`: with images as parts. `tools`: JSON schemas; [] for none. `is_single`: what follows
    the first call is left out. `form`: the options `json_schema` or `regex` of an infer job, which
    constrain the turn. `actions`: whether the turn is parsed to actions of a GUI agent on a
    `screen`. `warnings`: what the job decides otherwise, a line each.
    """

    messages: Messages
    tools: list[dict[str, Any]]
    max_tokens: int | None
    stop: tuple[str, ...]
    is_single: bool
    wants_ids: bool
    form: dict[str, str]
    actions: bool
    screen: Screen | None
    warnings: tuple[str, ...]

    @property
    def tools_text(self) -> str:
        """The tools as JSON, to be compared; "" for none."""
        return json.dumps(self.tools) if self.tools else ""


def read(
    options: Mapping[str, Any], sampling: Mapping[str, Any], *, is_trained: bool = True
) -> Wanted:
    """Read the options of an infer job that differ from its defaults. Raises SpecError.

    `sampling`: what the job samples with, by name. `is_trained`: whether turns are trained on; then
    they are not constrained.
    """
    left = dict(options)
    found = image_parts.read(json.loads(left.pop("messages", "[]")), Place("messages", "chat", 0))
    messages = image_parts.joined(found)
    forms = () if is_trained else ("json_schema", "regex")
    form = {name: left.pop(name) for name in forms if name in left}
    actions = left.pop("actions", gui_actions.FORMATS[0]) != gui_actions.FORMATS[0]
    screen = left.pop("screen", "")
    tools = json.loads(left.pop("tools", "") or "[]")
    choice = left.pop("tool_choice", "auto")
    if choice == "none":
        tools = []
    warnings = []
    if choice not in ("auto", "none"):  # some frameworks always force a call
        warnings.append(
            f"agent: a request has tool_choice {choice}; turns are sampled freely, as with auto"
        )
    max_tokens, stop = left.pop("max_tokens", None), tuple(left.pop("stop", ()))
    for name in _OF_THE_JOB:
        if (value := left.pop(name, None)) is not None and value != sampling[name]:
            warnings.append(
                f"agent: a request has {name} {value:g}; turns are sampled with the job's, "
                f"{sampling[name]:g}"
            )
    is_single = left.get("parallel_tool_calls") is False
    wants_ids = bool(left.get("token_ids"))
    for name, value in left.items():
        if name not in _WITHOUT_EFFECT:
            whose = "are trained as they were sampled" if is_trained else "the job decides"
            raise SpecError(
                name,
                f"must be unset in the request of an agent, whose turns {whose}, got "
                f"{str(value)[:80]}",
            )
    return Wanted(
        messages=messages,
        tools=tools,
        max_tokens=max_tokens,
        stop=stop,
        is_single=is_single,
        wants_ids=wants_ids,
        form=form,
        actions=actions,
        screen=gui_actions.parse_screen(screen) if screen else None,
        warnings=tuple(warnings),
    )

"""The requests of agents: what they ask for, and what only the job decides. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError
from ..files.chats import Messages, read_messages
from ..files.jsonl import Place

# Options of the infer kind, which the gateway makes of a request, that mean nothing here.
_WITHOUT_EFFECT = frozenset(("model", "reply", "seed", "parallel_tool_calls", "token_ids"))
_OF_THE_JOB = ("temperature", "top_p", "top_k", "min_p")  # whatever a request has


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a request asks for.

    `tools`: JSON schemas; [] for none. `is_single`: what follows the first call is left out.
    `warnings`: what the job decides otherwise, a line each.
    """

    messages: Messages
    tools: list[dict[str, Any]]
    max_tokens: int | None
    stop: tuple[str, ...]
    is_single: bool
    wants_ids: bool
    warnings: tuple[str, ...]

    @property
    def tools_text(self) -> str:
        """The tools as JSON, to be compared; "" for none."""
        return json.dumps(self.tools) if self.tools else ""


def read(options: Mapping[str, Any], sampling: Mapping[str, Any]) -> Wanted:
    """Read the options of an infer job that differ from its defaults. Raises SpecError.

    `sampling`: what the job samples with, by name.
    """
    left = dict(options)
    messages = read_messages(
        json.loads(left.pop("messages", "[]")), Place("messages", "chat", 0), _refuse_part
    )
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
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
            raise SpecError(
                name,
                "must be unset in the request of an agent, whose turns are trained as they were "
                f"sampled, got {str(value)[:80]}",
            )
    return Wanted(
        messages=messages,
        tools=tools,
        max_tokens=max_tokens,
        stop=stop,
        is_single=is_single,
        wants_ids=wants_ids,
        warnings=tuple(warnings),
    )


def _refuse_part(part: dict[str, Any], place: Place) -> None:
    raise place.fault("text: images are not supported for agents", f"type {part.get('type')!r}")

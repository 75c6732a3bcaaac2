"""The turns of a policy as messages, and the tokens between them, for the tools of each request.

Imports transformers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..errors import SpecError
from ..files.chats import Messages, tool_calls_of
from ..models import gui_actions
from ..models.gui_actions import Screen
from ..models.response_templates import described
from .agent_requests import Wanted
from .calls import UNREADABLE, TurnReader
from .turns import ChatTurns

_KEPT = 64  # lists of tools whose turns are kept


class AgentTurns:
    """How a model with a chat template talks with agents.

    `ends`: the tokens by which a turn ends. `given`: a response template that takes the place of
    the model's. Raises JobFailed for a chat template that cannot be trained with (ChatTurns).
    """

    def __init__(
        self, tokenizer: Any, *, ends: Collection[int], given: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        form = described(tokenizer, given)
        self._reader = None if form is None else TurnReader(tokenizer, form)
        self._turns: dict[str, ChatTurns] = {}
        self._of("")

    def prompt(self, messages: Messages, tools: str) -> list[int]:
        """Return the tokens of a conversation. Raises JobFailed if the template refuses it."""
        return self._of(tools).prompt(messages)

    def observed(self, messages: Messages, tools: str, calls: Sequence[str]) -> list[int]:
        """Return the tokens of messages behind a turn that ended by itself, and has `calls`."""
        return self._of(tools).observed(messages, calls)

    def check(self, wanted: Wanted) -> None:
        """Raise SpecError for tools whose calls cannot be read."""
        if wanted.tools and self._reader is None:
            raise SpecError("tools", UNREADABLE)

    def has_closed(self, turn: Any) -> bool:
        """Whether a turn ended by an end token, so that messages may follow it."""
        return bool(turn.segment.ids) and turn.segment.ids[-1] in self._ends

    def missing_end(self, turn: Any, wanted: Wanted) -> list[int]:
        """Return the end token to put behind a constrained turn, so that messages may follow it.

        The engine ends such a turn as soon as its form is complete, without an end token. [] for
        any other turn, and where the template has no end token.
        """
        if not wanted.form or wanted.stop or turn.reason != "stop" or self.has_closed(turn):
            return []
        end = self._of(wanted.tools_text).end
        return [] if end is None else [end]

    def choice(
        self, turn: Any, wanted: Wanted, seed: str, screen: Screen | None = None
    ) -> dict[str, Any]:
        """Return a turn as the choice of an infer job's result.

        `seed`: of the ids of calls. `screen`: size of the latest image, in pixels.
        """
        is_closed = self.has_closed(turn)
        reason = "length" if turn.reason == "length" else "stop"
        found: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if wanted.actions:
            found["actions"] = gui_actions.read(turn.text, wanted.screen or screen)
        if self._reader is None or wanted.form:  # a constrained turn is all content
            return {**found, "text": turn.text}
        told = self._reader.reply(
            turn,
            wanted.tools or None,
            is_closed=is_closed,
            stop=wanted.stop,
            seed=seed,
            is_single=wanted.is_single,
        ).told
        found["text"] = told.content
        if told.reasoning:
            found["reasoning"] = told.reasoning
        if told.calls:
            found |= {"calls": told.calls, "finish_reason": "tool_calls" if is_closed else reason}
        return found

    def _of(self, tools: str) -> ChatTurns:
        found = self._turns.pop(tools, None)
        if found is None:
            listed: dict[str | None, Any] | None = {None: json.loads(tools)} if tools else None
            found = ChatTurns(self._tokenizer, ends=self._ends, tools=listed, option="agent")
        self._turns[tools] = found  # the latest one last
        if len(self._turns) > _KEPT:
            del self._turns[next(iter(self._turns))]
        return found


def message_of(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return a choice as the message that the next request of the agent has."""
    calls = tool_calls_of(choice.get("calls", ()))
    for call in calls:
        function = call["function"]
        function["arguments"] = json.loads(function["arguments"])
    message = {"role": "assistant", "content": choice["text"]}
    return {**message, "tool_calls": calls} if calls else message

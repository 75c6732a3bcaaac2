"""Turns as messages, and the tool calls in them. Imports transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import JobFailed
from ..models.replies import Reply
from ..models.response_templates import Described, described

UNREADABLE = (
    "need a model whose tool calls can be read, and neither the model nor TRL has a response "
    "template: `warmd load --response-template FILE` gives one"
)


class TurnReader:
    """Reads an `engine.dialogues.Turn` by the response template `form` of the model."""

    def __init__(self, tokenizer: Any, form: Described) -> None:
        self._tokenizer = tokenizer
        self._form = form

    def reply(
        self,
        turn: Any,
        tools: list[dict[str, Any]] | None,
        *,
        is_closed: bool = True,
        stop: Sequence[str] = (),
        **others: Any,
    ) -> Reply:
        """Return the message of a turn.

        `is_closed`: whether an end token has ended it; else a text of `stop`, which is not part of
        the message, or its length. `tools` and `others`: as Reply takes them.
        """
        ids = turn.segment.ids
        text = self._tokenizer.decode(
            ids[:-1] if is_closed else ids,
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        if not is_closed and turn.reason == "stop":
            places = [at for one in stop if (at := text.find(one)) >= 0]
            text = text[: min(places)] if places else turn.text
        is_limited = not self._form.is_of_trl
        found = Reply(
            *(self._form.template, self._tokenizer, turn.before, tools),
            is_limited=is_limited,
            **others,
        )
        found.add(text)
        found.finish(ids[-1] if is_closed else None, is_whole=is_closed)
        return found


class CallReader:
    """Reads the calls of turns. A call that cannot be read is text, as in TRL: an answer.

    Raises JobFailed for a model whose calls no response template describes.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Mapping[str | None, list[dict[str, Any]]],
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """`tools`: JSON schemas, by the name of the environment's class.

        `given`: a response template that takes the place of the model's.
        """
        form = described(tokenizer, given)
        if form is None:
            raise JobFailed(f"environment: tools {UNREADABLE}")
        self._reader = TurnReader(tokenizer, form)
        self._tools = tools

    def of(self, turn: Any, name: str | None) -> dict[str, Any]:
        """Return the message of an `engine.dialogues.Turn`, as TRL has it.

        With `content` and, if it calls tools, `tool_calls`. `name`: of the environment's class.
        """
        found = self._reader.reply(turn, self._tools.get(name) or [], seed="").message
        message: dict[str, Any] = {"role": "assistant", "content": found.content}
        if found.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "function": {
                        "name": call["name"],
                        "arguments": json.loads(call["arguments"]),
                    },
                }
                for call in found.calls
            ]
        return message

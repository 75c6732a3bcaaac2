"""The tool calls of a turn, by the parser of the model's messages. Imports transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import JobFailed
from ..models.replies import Reply
from ..models.response_templates import described


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
        found = described(tokenizer, given)
        if found is None:
            raise JobFailed(
                "environment: tools need a model whose tool calls can be read, and neither the "
                "model nor TRL has a response template: `warmd load --response-template FILE` "
                "gives one"
            )
        self._form = found
        self._tools = tools
        self._tokenizer = tokenizer

    def of(self, turn: Any, name: str | None) -> list[dict[str, Any]]:
        """Return the calls of an `engine.dialogues.Turn`, each with `name` and `arguments`.

        `name`: of the environment's class.
        """
        reply = Reply(
            self._form.template,
            self._tokenizer,
            turn.before,
            self._tools.get(name) or [],
            seed="",
            is_limited=not self._form.is_of_trl,
        )
        ids = turn.segment.ids
        reply.add(self._text(ids[:-1]))
        reply.finish(ids[-1], is_whole=True)
        return [
            {"name": call["name"], "arguments": json.loads(call["arguments"])}
            for call in reply.message.calls
        ]

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

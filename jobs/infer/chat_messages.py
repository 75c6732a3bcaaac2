"""Chats in the format of OpenAI's API, of requests. Imports no torch."""

from __future__ import annotations

import orjson

from ..errors import SpecError
from ..files.chats import Messages
from ..files.jsonl import Place
from ..models import image_parts


def parse(text: str, field: str) -> Messages:
    """Read a JSON list of messages. Raises SpecError that names `field` and the message."""
    try:
        messages = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise SpecError(field, f"must be JSON, got {text[:60]!r}: {error}") from error
    return image_parts.read(messages, Place(field, "chat", 0))


def with_system(messages: Messages, system: str) -> Messages:
    """Return the chat, with a system message in front if it has none."""
    if not system or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]

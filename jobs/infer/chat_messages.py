"""Chats in the format of OpenAI's API: lists of messages, and their checks. Imports no torch."""

from __future__ import annotations

from typing import Any

import orjson

from ..engine import images
from ..errors import SpecError
from ..files.jsonl import ROLES


def parse(text: str, field: str) -> list[dict[str, Any]]:
    """Read a JSON list of messages. Raises SpecError that names `field` and the message."""
    try:
        messages = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise SpecError(field, f"must be JSON, got {text[:60]!r}: {error}") from error
    return check(messages, field)


def check(messages: Any, field: str) -> list[dict[str, Any]]:
    """Return the messages, each with a role and content. Raises SpecError that names `field`."""
    if not isinstance(messages, list) or not messages:
        raise SpecError(field, f"must be a list of messages, got {str(messages)[:60]!r}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise SpecError(field, f"message {number} must have a role, one of {', '.join(ROLES)}")
        _check_content(message, number, field)
    return messages


def _check_content(message: dict[str, Any], number: int, field: str) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return
    if not isinstance(content, list) or not content:
        raise SpecError(field, f"message {number} must have content: text or a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            continue
        if kind != "image_url":
            raise SpecError(
                field, f"message {number} must have parts of type text (with text) or image_url"
            )
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else None
        if not isinstance(url, str) or not url.startswith(images.SCHEMES):
            raise SpecError(
                field,
                f"message {number} must have an image_url whose url begins with "
                f"{' or '.join(images.SCHEMES)}, got {str(url)[:40]!r}",
            )


def has_images(messages: list[dict[str, Any]]) -> bool:
    """Whether a checked chat has images."""
    return any(
        part["type"] == "image_url"
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


def split(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the chat in the format of chat templates, and the URLs of its images in order.

    Content that is only text becomes one text: templates of text models do not support parts.
    """
    chat, urls = [], []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            found = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
            urls += found
            if found:
                content = [p if p["type"] == "text" else {"type": "image"} for p in content]
            else:
                content = "".join(part["text"] for part in content)
        chat.append({**message, "content": content})
    return chat, urls


def with_system(messages: list[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    """Return the chat, with a system message in front if it has none."""
    if not system or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]

"""Chats in the format of OpenAI's API, of requests: with images. Imports no torch."""

from __future__ import annotations

from typing import Any

import orjson

from ..engine import images
from ..errors import SpecError
from ..files.chats import Messages, read_messages
from ..files.jsonl import Place


def parse(text: str, field: str) -> Messages:
    """Read a JSON list of messages. Raises SpecError that names `field` and the message."""
    try:
        messages = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise SpecError(field, f"must be JSON, got {text[:60]!r}: {error}") from error
    return read(messages, Place(field, "chat", 0))


def read(value: Any, place: Place) -> Messages:
    """Return the messages of a request, of which some may have images. Raises SpecError."""
    return read_messages(value, place, _check_image)


def _check_image(part: dict[str, Any], place: Place) -> None:
    """Check that a part that is not text is an image. Raises SpecError."""
    if part.get("type") != "image_url":
        raise place.fault("of type text (with text) or image_url", str(part.get("type"))[:40])
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(url, str) or not url.startswith(images.SCHEMES):
        takes = f"an image_url whose url begins with {' or '.join(images.SCHEMES)}"
        raise place.fault(takes, repr(url)[:40])


def has_images(messages: Messages) -> bool:
    """Whether a checked chat has images."""
    return any(
        part["type"] == "image_url"
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


def split(messages: Messages) -> tuple[Messages, list[str]]:
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
            message = {**message, "content": content}
        chat.append(message)
    return chat, urls


def with_system(messages: Messages, system: str) -> Messages:
    """Return the chat, with a system message in front if it has none."""
    if not system or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]

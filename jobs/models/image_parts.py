"""Images in chats: parts of content, in the format of OpenAI's API. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from ..files.chats import Messages, read_messages
from ..files.jsonl import Place

DATA, FILE = SCHEMES = ("data:image/", "file://")


def read(value: Any, place: Place, schemes: tuple[str, ...] = SCHEMES) -> Messages:
    """Return the messages of a chat, of which some may have images. Raises SpecError.

    `schemes`: with which the URLs of images begin.
    """
    return read_messages(value, place, partial(_check_image, schemes))


def _check_image(schemes: tuple[str, ...], part: dict[str, Any], place: Place) -> None:
    """Check that a part that is not text is an image. Raises SpecError."""
    if part.get("type") != "image_url":
        raise place.fault("of type text (with text) or image_url", str(part.get("type"))[:40])
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(url, str) or not url.startswith(schemes):
        takes = f"an image_url whose url begins with {' or '.join(schemes)}"
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
    for message in joined(messages):
        content = message.get("content")
        if isinstance(content, list):
            urls += [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
            content = [p if p["type"] == "text" else {"type": "image"} for p in content]
            message = {**message, "content": content}
        chat.append(message)
    return chat, urls


def joined(messages: Messages) -> Messages:
    """Return the chat with one text in place of parts that are only texts."""
    chat = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and all(part["type"] == "text" for part in content):
            message = {**message, "content": "".join(part["text"] for part in content)}
        chat.append(message)
    return chat


def shown(messages: Messages, sizes: Iterable[tuple[int, int]]) -> Messages:
    """Return a chat that was split for people, with the sizes of its images in their place."""
    left = iter(sizes)
    chat = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            texts = [
                part["text"] if part["type"] == "text" else "[image {}x{}]".format(*next(left))
                for part in content
            ]
            message = {**message, "content": "".join(texts)}
        chat.append(message)
    return chat

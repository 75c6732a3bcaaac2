"""Request bodies: bounded in number and size, taken apart where they hold up nobody.

A body is JSON of anybody's making. Before a model of pydantic sees it, its values are counted:
pydantic makes an error of each wrong one, which takes hundreds of times the memory of the body.
What is not small is parsed in a thread, one body at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from .errors import CLIENT_GONE, ApiError, invalid, unavailable

ROOM = 64 * 1024**2  # bytes of all bodies together that were read and are still needed
SMALL = 64 * 1024  # bytes of a body that needs no such room
ROOM_WAIT_S = 5.0  # after which a body that finds no room is refused
MOST_MARKS = 500_000  # commas and opening brackets of a body, in its texts, too
MOST_VALUES = 50_000  # values in all lists and objects of a body
MOST_MEMBERS = 1_000  # values of one object
_AT_ONCE = 16 * 1024  # bytes that are parsed sooner than handed to a thread

InThread = Callable[..., Awaitable[Any]]


class Room:
    """The memory that bodies may take together."""

    def __init__(self, size: int = ROOM) -> None:
        self._free = size
        self._freed = asyncio.Event()

    async def take(self, size: int) -> None:
        """Take a part, as soon as it is free. Raises ApiError 503 when it is not in time."""
        try:
            async with asyncio.timeout(ROOM_WAIT_S):
                while size > self._free:
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise unavailable("too many large requests at once: try again in a moment") from None
        self._free -= size

    def give_back(self, size: int) -> None:
        self._free += size
        self._freed.set()


class Share:
    """The part of the room that one request has."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._size = 0

    @property
    def is_large(self) -> bool:
        return self._size > 0

    async def grow(self, total: int) -> None:
        """Take room for so many bytes, for some of which there may be. Raises ApiError 503."""
        missing = total - SMALL - self._size
        if missing > 0:
            await self._room.take(missing)
            self._size += missing

    def shrink(self, total: int) -> None:
        """Give back what is not needed for so many bytes."""
        surplus = self._size - max(0, total - SMALL)
        if surplus > 0:
            self._size -= surplus
            self._room.give_back(surplus)


@dataclass(frozen=True)
class Taken:
    """A body that was read."""

    value: BaseModel | None  # None: there was none
    fingerprint: str  # of path and body: the same for a retry


async def take(request: Request, model: type[BaseModel], in_thread: InThread) -> Taken:
    """Read, parse and check the body of a request. Raises ApiError and HTTPException."""
    content = io.BytesIO()
    try:
        async for chunk in request.stream():
            content.write(chunk)
    except ClientDisconnect:
        raise CLIENT_GONE from None
    if content.tell() <= _AT_ONCE:
        return _taken(content, request.url.path, model)
    taken: Taken = await in_thread(_taken, content, request.url.path, model)
    return taken


def _taken(content: io.BytesIO, path: str, model: type[BaseModel]) -> Taken:
    raw = content.getvalue()
    content.close()  # the bytes end with `raw`
    digest = hashlib.sha256(path.encode() + b"\n")
    digest.update(raw)
    if not raw:
        return Taken(None, digest.hexdigest())
    value = parse(raw)
    del raw
    return Taken(_checked(value, model), digest.hexdigest())


def parse(raw: bytes) -> Any:
    """Return the JSON of a body. Raises ApiError where it is none, or has too many values."""
    marks = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if marks > MOST_MARKS:
        raise ApiError(
            400,
            f"the body must have at most {MOST_MARKS:,} commas and opening brackets, got {marks:,}",
        )
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        problem = error.msg
    else:
        _count_values(value)
        return value
    # Not within `except`: an error holds on to those before it, and that one has the whole body.
    raise ApiError(400, f"the body must be JSON: {problem}")


def _count_values(value: Any) -> None:
    left, to_do = MOST_VALUES, [value]
    while to_do:
        group = to_do.pop()
        left -= len(group) if isinstance(group, dict | list) else 0
        if left < 0:
            raise ApiError(400, f"the body must have at most {MOST_VALUES:,} values, got more")
        if isinstance(group, dict):
            if len(group) > MOST_MEMBERS:
                raise ApiError(
                    400, f"an object must have at most {MOST_MEMBERS:,} members, got {len(group):,}"
                )
            group = group.values()
        elif not isinstance(group, list):
            continue
        to_do += [inside for inside in group if isinstance(inside, dict | list)]


def _checked(value: Any, model: type[BaseModel]) -> BaseModel:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    raise invalid(first, first["loc"])

"""Request bodies: limits on memory and number of values, parsing off the event loop.

Values are counted before pydantic validates a body: it creates an error object per invalid value,
which can take hundreds of times the memory of the body. All but small bodies are parsed in a
thread, one at a time.
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

from .errors import CLIENT_DISCONNECTED, ApiError, invalid, unavailable

BODY_MEMORY = 64 * 1024**2  # bytes of all bodies together, until their jobs are queued
SMALL = 64 * 1024  # bytes of a body that need no reservation
BODY_MEMORY_WAIT_S = 5.0  # before a body without a reservation is refused
MAX_MARKS = 500_000  # commas and opening brackets in a body, including those in strings
MAX_VALUES = 50_000  # values in all lists and objects of a body
MAX_MEMBERS = 1_000  # members of one object
_INLINE = 16 * 1024  # bytes that are parsed faster than handed to a thread

InThread = Callable[..., Awaitable[Any]]


class BodyMemory:
    """The memory for all request bodies together."""

    def __init__(self, size: int = BODY_MEMORY) -> None:
        self._free = size
        self._freed = asyncio.Event()

    async def take(self, size: int) -> None:
        """Reserve `size` bytes as soon as they are free. Raises ApiError 503 after a timeout."""
        try:
            async with asyncio.timeout(BODY_MEMORY_WAIT_S):
                while size > self._free:
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise unavailable("too many large requests: try again in a moment") from None
        self._free -= size

    def release(self, size: int) -> None:
        self._free += size
        self._freed.set()


class Reservation:
    """The part of the body memory that one request holds."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._size = 0

    @property
    def is_large(self) -> bool:
        return self._size > 0

    async def grow(self, total: int) -> None:
        """Raise the reservation to `total` bytes. Raises ApiError 503."""
        missing = total - SMALL - self._size
        if missing > 0:
            await self._memory.take(missing)
            self._size += missing

    def shrink(self, total: int) -> None:
        """Lower the reservation to `total` bytes."""
        surplus = self._size - max(0, total - SMALL)
        if surplus > 0:
            self._size -= surplus
            self._memory.release(surplus)


@dataclass(frozen=True)
class ParsedBody:
    """A parsed and validated body."""

    value: BaseModel | None  # None: no body
    fingerprint: str  # sha256 of path and body: the same for a retry


async def read(request: Request, model: type[BaseModel], in_thread: InThread) -> ParsedBody:
    """Read, parse and validate the body of a request. Raises ApiError and HTTPException."""
    content = io.BytesIO()
    try:
        async for chunk in request.stream():
            content.write(chunk)
    except ClientDisconnect:
        raise CLIENT_DISCONNECTED from None
    if content.tell() <= _INLINE:
        return _taken(content, request.url.path, model)
    taken: ParsedBody = await in_thread(_taken, content, request.url.path, model)
    return taken


def _taken(content: io.BytesIO, path: str, model: type[BaseModel]) -> ParsedBody:
    raw = content.getvalue()
    content.close()  # so that `del raw` frees the bytes
    digest = hashlib.sha256(path.encode() + b"\n")
    digest.update(raw)
    if not raw:
        return ParsedBody(None, digest.hexdigest())
    value = parse(raw)
    del raw
    return ParsedBody(_checked(value, model), digest.hexdigest())


def parse(raw: bytes) -> Any:
    """Parse the JSON of a body. Raises ApiError for invalid JSON or too many values."""
    marks = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if marks > MAX_MARKS:
        raise ApiError(
            400,
            f"the body must have at most {MAX_MARKS:,} commas and opening brackets, got {marks:,}",
        )
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        problem = error.msg
    else:
        _count_values(value)
        return value
    # Not inside `except`: the JSONDecodeError holds the whole body and would stay as __context__.
    raise ApiError(400, f"the body must be JSON: {problem}")


def _count_values(value: Any) -> None:
    left, to_do = MAX_VALUES, [value]
    while to_do:
        group = to_do.pop()
        left -= len(group) if isinstance(group, dict | list) else 0
        if left < 0:
            raise ApiError(400, f"the body must have at most {MAX_VALUES:,} values, got more")
        if isinstance(group, dict):
            if len(group) > MAX_MEMBERS:
                raise ApiError(
                    400, f"an object must have at most {MAX_MEMBERS:,} members, got {len(group):,}"
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

"""Request bodies: limits on memory and number of values, parsing off the event loop.

Values are counted before pydantic validates a body: it creates an error object per invalid value,
which can take hundreds of times the memory of the body. All but small bodies are parsed in a
thread, one at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
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
PATIENCE_S = 1.0  # before the bodies of another client are given up for it
MAX_MARKS = 500_000  # commas and opening brackets in a body, including those in strings
MAX_VALUES = 50_000  # values in all lists and objects of a body
MAX_MEMBERS = 1_000  # members of one object
MAX_LEVELS = 200  # of objects and lists in each other; orjson writes 254
_INLINE = 16 * 1024  # bytes that are parsed faster than handed to a thread

_ESCAPED = ((b"\\\\", b""), (b'\\"', b""))  # within strings of JSON
_STRING = re.compile(rb'"[^"]*"\s*(:?)')  # of JSON without escaped quotes; a colon follows a key

InThread = Callable[..., Awaitable[Any]]


class BodyMemory:
    """The memory for all request bodies together, divided between clients.

    A client gets what is free. If too little is free for its fair share, the slowest bodies of the
    client with most memory are given up.
    """

    def __init__(self, size: int = BODY_MEMORY) -> None:
        self._size = self._free = size
        self._freed = asyncio.Event()
        self._holders: set[Reservation] = set()

    async def take(self, size: int, reservation: Reservation) -> None:
        """Reserve `size` bytes as soon as they are free. Raises ApiError 503 after a timeout."""
        try:
            async with asyncio.timeout(BODY_MEMORY_WAIT_S):
                while size > self._free:
                    self._freed.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(PATIENCE_S):
                            await self._freed.wait()
                    if size > self._free:
                        self._make_room(size, reservation)
        except TimeoutError:
            raise unavailable("too many large requests: try again in a moment") from None
        self._free -= size
        self._holders.add(reservation)

    def release(self, size: int, reservation: Reservation) -> None:
        if not reservation.is_large:
            self._holders.discard(reservation)
        self._free += size
        self._freed.set()

    def _make_room(self, size: int, reservation: Reservation) -> None:
        """Give up bodies of the client with most memory, where this one lacks its fair share."""
        held: Counter[str] = Counter({reservation.share: 0})
        for one in self._holders:
            held[one.share] += 0 if one.is_revoked else one.size
        fair = self._size // len(held)
        if held[reservation.share] + size > fair:
            return
        coming = sum(one.size for one in self._holders if one.is_revoked)
        while size > self._free + coming:
            most = max(held, key=held.__getitem__)
            arriving = [
                one
                for one in self._holders
                if one.share == most and one.is_arriving and not one.is_revoked
            ]
            if held[most] <= fair or not arriving:
                return
            slowest = min(arriving, key=lambda one: one.speed)
            slowest.revoke()
            coming += slowest.size
            held[most] -= slowest.size


class Reservation:
    """The part of the body memory that one request holds."""

    def __init__(self, memory: BodyMemory, share: str) -> None:
        """`share`: of its client."""
        self._memory = memory
        self._began = time.monotonic()
        self.share = share
        self.size = 0
        self.is_arriving = True  # the body is not whole yet
        self.is_revoked = False
        self.on_revoked: Callable[[ApiError], None] | None = None  # ends the request

    @property
    def is_large(self) -> bool:
        return self.size > 0

    @property
    def speed(self) -> float:
        """Bytes per second; a body that has just begun is not slow."""
        return self.size / max(time.monotonic() - self._began, 1.0)

    def revoke(self) -> None:
        """End the request, which gives its memory back."""
        self.is_revoked = True
        if self.on_revoked is not None:
            self.on_revoked(unavailable("too many large requests: another client needs its share"))

    async def grow(self, total: int) -> None:
        """Raise the reservation to `total` bytes. Raises ApiError 503."""
        missing = total - SMALL - self.size
        if missing > 0:
            await self._memory.take(missing, self)
            self.size += missing

    def shrink(self, total: int) -> None:
        """Lower the reservation to `total` bytes."""
        surplus = self.size - max(0, total - SMALL)
        if surplus > 0:
            self.size -= surplus
            self._memory.release(surplus, self)


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
        _check_keys(raw, _count_values(value))
        return value
    # Not inside `except`: the JSONDecodeError holds the whole body and would stay as __context__.
    raise ApiError(400, f"the body must be JSON: {problem}")


def _check_keys(raw: bytes, num_members: int) -> None:
    """Raise ApiError for a key that stands twice in an object: of these the parser keeps the last.

    `num_members`: of all objects, as parsed. The text has more keys if one was dropped.
    """
    if raw.count(b":") == num_members:  # colons in strings could only add to them
        return
    for escaped, nothing in _ESCAPED:
        raw = raw.replace(escaped, nothing)
    if _STRING.findall(raw).count(b":") != num_members:
        raise ApiError(400, "an object must have each key once, got one again")


def _count_values(value: Any) -> int:
    """Return the number of members of all objects.

    Raises ApiError for too many values, and for too many levels of objects and lists.
    """
    left, members, levels = MAX_VALUES, 0, 0
    groups = [value] if isinstance(value, dict | list) else []
    while groups:
        levels += 1
        if levels > MAX_LEVELS:
            raise ApiError(
                400, f"the body must have at most {MAX_LEVELS} levels of objects and lists"
            )
        within: list[Any] = []
        for group in groups:
            found: Any = group
            left -= len(group)
            if left < 0:
                raise ApiError(400, f"the body must have at most {MAX_VALUES:,} values, got more")
            if isinstance(group, dict):
                if len(group) > MAX_MEMBERS:
                    problem = f"an object must have at most {MAX_MEMBERS:,} members, got"
                    raise ApiError(400, f"{problem} {len(group):,}")
                members += len(group)
                found = group.values()
            within += [inside for inside in found if isinstance(inside, dict | list)]
        groups = within
    return members


def _checked(value: Any, model: type[BaseModel]) -> BaseModel:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    raise invalid(first, first["loc"])

"""A reading that all clients share that want it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Reads once for all who wait: a thousand clients cost as much as one. For one event loop.

    A client gets the result of a reading that began after its request: the one that is in progress
    may lack what the client already knows.
    """

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._lock = asyncio.Lock()
        self._reading: asyncio.Task[T] | None = None  # kept, as tasks are otherwise collected
        self._following: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return the result of the next reading. Raises what it raises."""
        if self._following is None:
            self._following = asyncio.create_task(self._read_following())
        return await asyncio.shield(self._following)

    async def _read_following(self) -> T:
        async with self._lock:
            self._reading, self._following = self._following, None
            return await self._read()

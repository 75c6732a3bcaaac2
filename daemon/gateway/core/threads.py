"""Threads that clients use in turns: one with hundreds of requests does not hold up the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..http.client import current
from ..http.turns import Line

T = TypeVar("T")


class Threads:
    """A pool of threads; the work that waits for one is taken from the clients in turns."""

    def __init__(self, number: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(number, thread_name_prefix=name)
        self._free = 2 * number  # with as many that are ready, so that no thread waits
        self._line = Line()

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread, as soon as it is the turn of the current client."""
        if self._free:
            self._free -= 1
        else:
            await self._turn()
        running = asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)
        running.add_done_callback(self._returned)
        # Also a canceled request occupies its thread until the function returns.
        return await asyncio.shield(running)

    async def _turn(self) -> None:
        client = current()
        turn = self._line.join("" if client is None else client.share)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._leave()  # the turn had come
            raise

    def _returned(self, running: asyncio.Future[T]) -> None:
        if not running.cancelled():
            running.exception()  # that of a canceled request has been retrieved then
        self._leave()

    def _leave(self) -> None:
        if (turn := self._line.next()) is None:
            self._free += 1
        else:
            turn.set_result(True)

    def shutdown(self) -> None:
        """Drop the work that has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

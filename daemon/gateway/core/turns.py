"""Threads that clients use in turns: one with hundreds of requests does not hold up the others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..http.client import current

T = TypeVar("T")


class Turns:
    """A pool of threads; the work that waits for one is taken from the clients in turns."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._free = 2 * num_threads  # with as many that are ready, so that no thread waits
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by share, the next one first

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread, as soon as it is the turn of the current client."""
        loop = asyncio.get_running_loop()
        if self._free:
            self._free -= 1
        else:
            await self._turn(loop)
        running = loop.run_in_executor(self._pool, work, *arguments)
        running.add_done_callback(self._returned)
        # Also a canceled request occupies its thread until the function returns.
        return await asyncio.shield(running)

    async def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        client = current()
        share = "" if client is None else client.share
        turn = loop.create_future()
        self._waiting.setdefault(share, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # its turn had come
            raise

    def _returned(self, running: asyncio.Future[T]) -> None:
        if not running.cancelled():
            running.exception()  # that of a canceled request has been retrieved then
        self._leave()

    def _leave(self) -> None:
        while self._waiting:
            share, turns = next(iter(self._waiting.items()))
            del self._waiting[share]
            while turns:
                turn = turns.popleft()
                if not turn.done():  # else it was canceled
                    if turns:
                        self._waiting[share] = turns  # behind the other clients
                    turn.set_result(None)
                    return
        self._free += 1

    def shutdown(self) -> None:
        """Drop the work that has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

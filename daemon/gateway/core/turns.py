"""Threads that clients use in turns: one with hundreds of requests does not hold up the others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from ..http.client import current

T = TypeVar("T")


class Turns:
    """A pool of threads; of the work that waits for one, the clients' next ones go in turns."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._free = num_threads
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by share, the next one first

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread, as soon as it is the turn of the current client."""
        loop = asyncio.get_running_loop()
        await self._enter(loop)

        def leave(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._leave)

        # Also a canceled request occupies its thread until the function returns.
        running = self._pool.submit(work, *arguments)
        running.add_done_callback(leave)
        return await asyncio.wrap_future(running)

    async def _enter(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._free:
            self._free -= 1
            return
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

"""What the follower of a stream has not been sent yet, and the pace at which followers are served.

A thousand followers of one job all want its next event in the same moment. They are sent it one
after the other, with time for other requests in between; what comes meanwhile is sent in one piece.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

SILENCE_S = 5.0  # after which a follower is woken without news

_AT_ONCE = 8  # followers that have their turn in one event loop iteration


class Pace:
    """Gives turns to those who want to send, in the order in which they ask. For one event loop.

    A few at a time; then others have the event loop for as long.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._giving: asyncio.Task[None] | None = None

    def ask(self, turn: asyncio.Future[None]) -> None:
        """Set the result of a future when its turn has come."""
        self._waiting.append(turn)
        if self._giving is None:
            self._giving = asyncio.create_task(self._give())

    async def _give(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            began, given = loop.time(), 0
            while self._waiting and given < _AT_ONCE:
                turn = self._waiting.popleft()
                if not turn.done():  # else its follower has left
                    turn.set_result(None)
                    given += 1
            await asyncio.sleep(0)  # what they do now takes
            await asyncio.sleep(loop.time() - began)
        self._giving = None


class Inbox(Generic[T]):
    """Items for one follower, oldest first. For one event loop."""

    def __init__(self, most: int, pace: Pace | None = None) -> None:
        """`most`: unread items. `pace`: for its turns to read; None: at once."""
        self._most = most
        self._pace = pace
        self._items: deque[T] = deque()
        self._is_closed = False
        self._is_woken = False
        self._waiting: asyncio.Future[None] | None = None  # `take`, until it is woken

    @property
    def is_full(self) -> bool:
        return len(self._items) >= self._most

    def put(self, item: T) -> None:
        """Append an item, for which there must be room; a closed inbox takes none."""
        if not self._is_closed:
            self._items.append(item)
            self.wake()

    def close(self) -> None:
        """Drop what is unread, and end every `take`."""
        self._items.clear()
        self._is_closed = True
        self.wake()

    def wake(self) -> None:
        """Let `take` return, also without items."""
        self._is_woken = True
        if (waiting := self._waiting) is not None:
            self._waiting = None
            self._ask(waiting)

    async def take(self) -> list[T] | None:
        """Wait for items, and for the follower's turn; return all items that are there then.

        Returns none after `wake` or some silence, and None once the inbox is closed.
        """
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        if self._is_woken:
            self._ask(turn)
        else:
            self._waiting = turn
        silence = loop.call_later(SILENCE_S, self.wake)
        try:
            await turn
        finally:
            silence.cancel()
            self._waiting = None
        self._is_woken = False
        if self._is_closed:
            return None
        items = list(self._items)
        self._items.clear()
        return items

    async def turn(self) -> None:
        """Wait until it is this follower's turn to be sent something."""
        turn = asyncio.get_running_loop().create_future()
        self._ask(turn)
        await turn

    def _ask(self, turn: asyncio.Future[None]) -> None:
        if self._pace is not None:
            self._pace.ask(turn)
        elif not turn.done():
            turn.set_result(None)

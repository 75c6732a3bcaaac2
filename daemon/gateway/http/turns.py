"""Fair scheduling of waiting requests: round-robin over clients, one request of each in turn.

Requests that only read take turns, so that a thousand of them do not keep completions waiting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .client import share_of

WAITING = "warmd.waiting"  # key in the ASGI scope: a future while the request waits for its turn


class Line:
    """Futures that wait, by the share of their client. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[bool]]] = {}  # the next client first

    def join(self, share: str) -> asyncio.Future[bool]:
        """Append a new future to its client's queue, and return it."""
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(share, deque()).append(turn)
        return turn

    def next(self) -> asyncio.Future[bool] | None:
        """Take out the next client's first future that is not done; None if there is none."""
        while self._waiting:
            share, turns = next(iter(self._waiting.items()))
            del self._waiting[share]
            while turns:
                turn = turns.popleft()
                if not turn.done():  # else its request has left
                    if turns:
                        self._waiting[share] = turns  # behind the other clients
                    return turn
        return None


class Turns:
    """Lets a few requests at a time be computed until their responses begin.

    The others wait in turns of their clients, and those whose clients disconnect leave.
    """

    def __init__(self, most: int) -> None:
        """`most`: requests at a time."""
        self._free = most
        self._line = Line()

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application in this request's turn."""
        if not await self._begin(scope):
            return
        has_begun = False

        async def send_begun(message: Message) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                self._end()
            await send(message)

        try:
            await app(scope, receive, send_begun)
        finally:
            if not has_begun:
                self._end()

    async def _begin(self, scope: Scope) -> bool:
        """Wait for the turn; return False if the client disconnects before it."""
        if self._free:
            self._free -= 1
            return True
        turn = scope[WAITING] = self._line.join(share_of(scope) or "")
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.result():
                self._end()  # the turn had come
            raise

    def _end(self) -> None:
        if (turn := self._line.next()) is None:
            self._free += 1
        else:
            turn.set_result(True)


def leave(scope: Mapping[str, Any]) -> None:
    """Take a request whose client has disconnected out of those that wait."""
    turn = scope.get(WAITING)
    if turn is not None and not turn.done():
        turn.set_result(False)

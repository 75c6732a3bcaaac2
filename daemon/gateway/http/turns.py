"""Turns of requests that only read, so that a thousand of them do not keep completions waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

WAITING = "warmd.waiting"  # key in the ASGI scope: a future while the request waits for its turn


class Turns:
    """Lets a few requests at a time be computed until their responses begin.

    The others wait in order of arrival, and those whose clients disconnect leave.
    """

    def __init__(self, most: int) -> None:
        """`most`: requests at a time."""
        self._free = most
        self._waiting: dict[asyncio.Future[bool], None] = {}

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
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        scope[WAITING] = turn
        self._waiting[turn] = None
        try:
            return await turn
        finally:
            self._waiting.pop(turn, None)

    def _end(self) -> None:
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(True)
                return
        self._free += 1


def leave(scope: Mapping[str, Any]) -> None:
    """Take a request whose client has disconnected out of those that wait."""
    turn = scope.get(WAITING)
    if turn is not None and not turn.done():
        turn.set_result(False)

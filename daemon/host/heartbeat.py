"""Heartbeats of the supervisor's children: a child that stops sending them hangs."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from .messages import Alive, encode

_PERIOD_S = 1.0
_LINE = encode(Alive())


class Heartbeat:
    """Sends heartbeats on stdout."""

    def __init__(self) -> None:
        os.set_blocking(1, False)  # a suspended supervisor does not read: do not block then
        self._sent_at = 0.0

    def send_if_due(self) -> None:
        """Send a heartbeat if a second has passed; called in every iteration of the main loop."""
        now = time.monotonic()
        if now - self._sent_at >= _PERIOD_S:
            self._sent_at = now
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(1, _LINE)

"""Signs of life of the supervisor's children: one that lives and is silent hangs."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import orjson

STAGE = "alive"

_BEAT_S = 1.0
_LINE = orjson.dumps({"stage": STAGE}, option=orjson.OPT_APPEND_NEWLINE)


class Beat:
    """A child's own, on its stdout."""

    def __init__(self) -> None:
        os.set_blocking(1, False)  # nobody reads while the supervisor is suspended
        self._signed_at = 0.0

    def sign(self) -> None:
        """Give a sign of life if it is time for one; called in every turn of the child's loop."""
        now = time.monotonic()
        if now - self._signed_at >= _BEAT_S:
            self._signed_at = now
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(1, _LINE)

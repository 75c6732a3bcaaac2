"""Requests of a block are canceled when their job stops, and when the block ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..context import Context


@contextmanager
def cancel_on_exit(ctx: Context) -> Iterator[Callable[[], bool]]:
    """Yield whether requests are canceled: by `ctx.stop`, and with the end of this block.

    So an error in the block also frees the slots of the engine.
    """
    has_ended = threading.Event()
    try:
        yield lambda: has_ended.is_set() or ctx.stop.is_set()
    finally:
        has_ended.set()

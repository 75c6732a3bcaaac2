"""A line on a terminal that is redrawn while something runs."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from typing import Self

from . import render, terminal


def has_live_lines() -> bool:
    """Whether stderr is a terminal that can redraw a line."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class LiveLine:
    """One line on stderr that is redrawn, and cleared at the end."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled

    def draw(self, text: str) -> None:
        if self.enabled:
            # A line that wraps could not be drawn over.
            text = text[: shutil.get_terminal_size().columns - 1]
            terminal.steer(sys.stderr, "\r")
            sys.stderr.write(text)
            terminal.steer(sys.stderr, "\x1b[K")
            sys.stderr.flush()

    def clear(self) -> None:
        self.draw("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


class ClockLine(LiveLine):
    """A live line with the seconds since its text changed, also while the caller is blocked."""

    def __init__(self, *, enabled: bool) -> None:
        super().__init__(enabled=enabled)
        self._text = ""
        self._since = 0.0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def show(self, text: str) -> None:
        """Show a text; an empty one clears the line."""
        with self._lock:
            self._text, self._since = text, time.monotonic()
            self.draw(text)

    def _tick(self) -> None:
        while not self._ended.wait(_TICK_S):
            with self._lock:
                if self._text:
                    took_s = time.monotonic() - self._since
                    self.draw(f"{self._text}  {render.duration(took_s)}")

    def __enter__(self) -> Self:
        if self.enabled:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self.enabled:
            self._thread.join()
        self.clear()


_TICK_S = 0.5

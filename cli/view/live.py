"""A line on a terminal that changes while something is under way."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Self


def has_live_lines() -> bool:
    """Whether stderr is a terminal, and one that a line can be drawn over on."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class LiveLine:
    """One line on stderr that is drawn over and over, and leaves nothing behind."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled

    def draw(self, text: str) -> None:
        if self.enabled:
            # A line that wraps could not be drawn over.
            text = text[: shutil.get_terminal_size().columns - 1]
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()

    def clear(self) -> None:
        self.draw("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
